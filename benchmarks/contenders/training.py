"""One process of scaling.py or elastic.py: trains a small CNN, as a rank or alone."""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import time
from collections.abc import Sequence

import numpy as np
import rank

JIT_COMPILE = {"auto": "auto", "yes": True, "no": False}


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--rank", type=int, help="of an independent copy")
    parser.add_argument("--size", type=int, help="number of independent copies")
    parser.add_argument(
        "--meet",
        type=int,
        nargs="*",
        default=[],
        help="sockets of this copy to the others, which it meets before each step",
    )
    parser.add_argument("--strategy", action="store_true", help="of the ranks")
    parser.add_argument(
        "--elastic", choices=["fit", "run"], help="so that the ranks' job may go on"
    )
    parser.add_argument("--commit", type=int, help="batches of one")
    parser.add_argument(
        "--from-arrays", action="store_true", help="the ranks' data, by that function"
    )
    parser.add_argument(
        "--inter-op-threads", type=int, default=0, help="0: TensorFlow's default"
    )
    parser.add_argument(
        "--jit-compile", choices=list(JIT_COMPILE), default="auto", help="as in Keras"
    )
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="in an epoch")
    options = parser.parse_args()
    if options.rank is not None:
        # Before TensorFlow counts its cores; khvdrun has bound ranks by now.
        rank.bind(options.cores, options.rank)
    train(options)


def train(options: argparse.Namespace) -> None:
    """Trains an epoch for each command."""
    import keras
    import tensorflow as tf

    import keras_hvd
    from keras_hvd import version

    tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)
    others = [socket.socket(fileno=number) for number in options.meet]

    class Meeting(keras.callbacks.Callback):
        """Waits before each step until all copies are there, and exchanges nothing."""

        def on_train_batch_begin(self, batch, logs=None) -> None:
            for other in others:
                other.send(b"1")
            for other in others:
                other.recv(1)

    keras.utils.set_random_seed(1)
    callbacks = [Meeting()] if others else []
    scope = contextlib.nullcontext()
    place = options.rank, options.size
    is_copy = options.rank is not None
    if is_copy:
        take_gpu(options.rank)
    else:
        keras_hvd.init()
        place = keras_hvd.rank(), keras_hvd.size()
    session = rank.Session(
        options.socket,
        *place,
        f"keras_hvd {version.__version__}, TensorFlow {tf.__version__}, "
        f"Keras {keras.__version__}",
    )
    try:
        if options.strategy:
            scope = keras_hvd.Strategy().scope()
            # All ranks have the same data, and each takes its rows of a batch.
            options.batch *= place[1]
        elif not is_copy:
            callbacks = [
                keras_hvd.callbacks.BroadcastGlobalVariables(0),
                keras_hvd.callbacks.MetricAverage(),
            ]
        with scope:
            optimizer = keras.optimizers.Adam()
            if not (is_copy or options.strategy):
                optimizer = keras_hvd.DistributedOptimizer(optimizer)
            model = cnn()
            model.compile(
                optimizer,
                "sparse_categorical_crossentropy",
                metrics=["accuracy"],
                jit_compile=JIT_COMPILE[options.jit_compile],
            )
        fit(model, session, options, 0 if options.strategy else place[0], callbacks)
    except Exception as error:
        session.reply(error=f"{type(error).__name__}: {error}")
        raise


def fit(
    model,
    session: rank.Session,
    options: argparse.Namespace,
    seed: int,
    callbacks: Sequence[object] = (),
) -> None:
    """Trains an epoch for each command and answers with its time per step."""
    import keras

    class Pace(keras.callbacks.Callback):
        """Waits for a command before each epoch."""

        def on_train_begin(self, logs=None) -> None:
            self.wait()

        def on_epoch_end(self, epoch, logs=None) -> None:
            seconds = (time.perf_counter() - self.begin) / options.steps
            of_cores = (time.process_time() - self.begin_of_cores) / options.steps
            session.reply(
                seconds=[seconds],
                core_seconds=[of_cores],
                norm=norm(self.model.get_weights()),
            )
            if self.wait() is None:
                self.model.stop_training = True

        def wait(self) -> dict | None:
            command = session.command()
            self.begin, self.begin_of_cores = time.perf_counter(), time.process_time()
            return command

    rows = data(options, 0 if options.from_arrays else seed)
    settings = {
        "epochs": 1_000_000,
        "verbose": 0,
        "callbacks": [*callbacks, Pace()],
    }
    if options.elastic or options.from_arrays:
        fit_by_keras_hvd(model, rows, options, settings)
        return
    model.fit(*rows, batch_size=options.batch, **settings)


def fit_by_keras_hvd(
    model,
    rows: tuple[np.ndarray, np.ndarray],
    options: argparse.Namespace,
    settings: dict,
) -> None:
    """The same with `keras_hvd.data.from_arrays`, or in a job that may go on."""
    import keras_hvd

    # It deals the rows to the ranks.
    of_all = [np.concatenate([each] * keras_hvd.size()) for each in rows]

    def make_data(position: keras_hvd.data.Position | None = None):
        return keras_hvd.data.from_arrays(
            *of_all, batch_size=options.batch, position=position
        )

    if not options.elastic:
        model.fit(make_data(), **settings)
    elif options.from_arrays:
        commit = options.commit
        keras_hvd.elastic.fit(model, make_data, batches_per_commit=commit, **settings)
    elif options.elastic == "fit":
        settings["batch_size"] = options.batch
        keras_hvd.elastic.fit(model, lambda: rows, **settings)
    else:
        state = keras_hvd.elastic.KerasState(model)
        committing = keras_hvd.elastic.CommitStateCallback(state, options.commit)
        settings["callbacks"].append(committing)
        keras_hvd.elastic.run(
            lambda _: model.fit(*rows, batch_size=options.batch, **settings)
        )(state)


def data(options: argparse.Namespace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels for an epoch."""
    random = np.random.default_rng(seed)
    count = options.steps * options.batch
    return random.random((count, 28, 28, 1), np.float32), random.integers(0, 10, count)


def norm(weights: Sequence[np.ndarray]) -> float:
    """The length of all weights as one vector: equal on ranks that train together."""
    return math.sqrt(sum(float(np.sum(each.astype(float) ** 2)) for each in weights))


def take_gpu(number: int) -> None:
    """Makes a copy use one GPU, if there is any, as `keras_hvd.init()` does."""
    import tensorflow as tf

    if gpus := tf.config.list_physical_devices("GPU"):
        mine = gpus[number % len(gpus)]
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)


def cnn():
    """A network for MNIST, of 1.2 million parameters."""
    import keras

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


if __name__ == "__main__":
    main()
