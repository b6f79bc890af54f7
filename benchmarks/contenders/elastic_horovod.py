"""A rank of Horovod in elastic.py: the custom loop of Horovod's documentation."""

from __future__ import annotations

import horovod
import horovod.tensorflow as hvd
import numpy as np
import rank
import tensorflow as tf
from elastic_rank import Steps

BATCH, COLUMNS, BATCHES_PER_COMMIT = 32, 64, 20


def main() -> None:
    options = rank.parser().parse_args()
    hvd.init()
    steps = Steps(
        options.socket,
        hvd.rank(),
        f"Horovod {horovod.__version__}, TensorFlow {tf.__version__}",
    )
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(128, activation="relu", input_shape=(COLUMNS,)),
            tf.keras.layers.Dense(1),
        ]
    )
    optimizer = tf.keras.optimizers.legacy.Adam()
    rows = tf.constant(np.random.default_rng(hvd.rank()).random((BATCH, COLUMNS), "f"))
    traces = []

    @tf.function
    def train_one_batch(allreduce: bool = True) -> None:
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(rows, training=True) - rows[:, :1]))
        if allreduce:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    # Makes the variables.
    train_one_batch(allreduce=False)

    @hvd.elastic.run
    def train(state):
        while True:
            train_one_batch()
            state.batch += 1
            if state.batch % BATCHES_PER_COMMIT == 0:
                state.commit()
            steps.end(hvd.size(), traces=len(traces))

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))


if __name__ == "__main__":
    main()
