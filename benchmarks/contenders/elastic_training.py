"""A rank of keras_hvd in elastic.py, which trains until its launcher ends it."""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import rank
from elastic_rank import Steps

import keras_hvd
from keras_hvd import version
from keras_hvd.world import renewal

# As many floats as the Keras model has.
WEIGHTS = 8449
STEPS_PER_COMMIT = 20
BATCH, STEPS_PER_EPOCH, COLUMNS = 32, 20, 64
# Of each variable, as a layer's weights.
MEGABYTES = 16


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--timed-calls", required=True, help="timed_calls.c, compiled")
    parser.add_argument("--training", choices=list(TRAININGS), required=True)
    parser.add_argument("--megabytes", type=int, default=0, help="of the state")
    options = parser.parse_args()
    keras_hvd.init()
    told = renewal.of(os.environ)
    assert told is not None, "or the job keeps its ranks"
    said = f"keras_hvd {version.__version__}"
    if options.training != "numpy":
        import keras
        import tensorflow as tf

        said += f", TensorFlow {tf.__version__}, Keras {keras.__version__}"
    TRAININGS[options.training](options, Steps(options.socket, told.number, said))


def train_with_numpy(options: argparse.Namespace, steps: Steps) -> None:
    """A loop without TensorFlow, whose gradients the C API sums."""
    import c_api

    gradient = rank.buffer(4 * WEIGHTS)
    allreduce = c_api.Allreduce(options.timed_calls, "gradient", [gradient])
    state = keras_hvd.elastic.ObjectState(weights=np.ones_like(gradient), step=0)

    @keras_hvd.elastic.run
    def train(state):
        while True:
            gradient[:] = state.weights
            allreduce.seconds(1)
            state.weights -= 0.01 / keras_hvd.size() * gradient
            state.step += 1
            if state.step % STEPS_PER_COMMIT == 0:
                state.commit()
            steps.end(keras_hvd.size())

    train(state)


def train_with_keras(options: argparse.Namespace, steps: Steps) -> None:
    """`elastic.fit` of a small model; each epoch begins with a commit."""
    import keras

    traces = []

    class Traced(keras.Sequential):
        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    class Told(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.end(keras_hvd.size(), traces=len(traces))

    keras.utils.set_random_seed(keras_hvd.rank())
    model = Traced(
        [
            keras.Input((COLUMNS,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    rows = np.random.default_rng(os.getpid()).random(
        (BATCH * STEPS_PER_EPOCH, COLUMNS), np.float32
    )
    keras_hvd.elastic.fit(
        model,
        lambda: (rows, rows[:, :1]),
        batch_size=BATCH,
        epochs=1_000_000,
        verbose=0,
        callbacks=[keras_hvd.callbacks.MetricAverage(), Told()],
    )


def train_with_a_state(options: argparse.Namespace, steps: Steps) -> None:
    """A loop that computes nothing, with a large state that never changes."""
    import tensorflow as tf

    class Timed(keras_hvd.elastic.TensorFlowState):
        seconds = 0.0

        def broadcast(self, root_rank):
            since = time.monotonic()
            super().broadcast(root_rank)
            self.seconds = time.monotonic() - since

    variables = [
        tf.Variable(tf.zeros([MEGABYTES * 250_000]))
        for _ in range(options.megabytes // MEGABYTES)
    ]
    state = Timed(variables, step=0)
    plain: list[float] = []

    def broadcast() -> float:
        keras_hvd.allgather_object(None)
        since = time.monotonic()
        for each in variables:
            keras_hvd.broadcast(each, 0)
        return time.monotonic() - since

    @keras_hvd.elastic.run
    def train(state):
        if state.step == 0:
            plain.extend(broadcast() for _ in range(5))
        while True:
            keras_hvd.allgather_object(None)
            state.step += 1
            state.check_host_updates()
            steps.end(
                keras_hvd.size(),
                given=state.seconds,
                plain=statistics.median(plain) if plain else 0.0,
            )

    train(state)


TRAININGS = {
    "numpy": train_with_numpy,
    "keras": train_with_keras,
    "state": train_with_a_state,
}

if __name__ == "__main__":
    main()
