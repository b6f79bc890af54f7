"""Steps of many kinds, in float64, in a job that loses rank 1 before step 6.

Takes a folder, where each rank writes what the steps have given.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd
from keras_hvd.world.renewal import of

STEPS, ROWS, LOST_AT = 10, 12, 6

keras.config.set_floatx("float64")
keras_hvd.init()
started_as = of(os.environ).number
rng = np.random.default_rng(7)
x, y = rng.normal(size=(STEPS, ROWS, 3)), rng.normal(size=(STEPS, ROWS, 1))
words = rng.integers(0, 5, size=(STEPS, ROWS, 2))


class Training:
    """A model, how it is trained, and how often that was traced."""

    def __init__(self, layers, inputs, optimizer=None, jit_compile=False, **wrapping):
        self.inputs, self.traces = inputs, 0
        # Layers draw their seeds as they are made.
        keras.utils.set_random_seed(keras_hvd.rank())
        self.model = keras.Sequential([keras.Input(inputs.shape[2:]), *layers()])
        plain = optimizer or keras.optimizers.SGD(0.1)
        self.optimizer = keras_hvd.DistributedOptimizer(plain, **wrapping)
        self.state = keras_hvd.elastic.KerasState(self.model, self.optimizer)
        self.update = tf.function(
            self._update, reduce_retracing=True, jit_compile=jit_compile
        )

    def _update(self, rows, wanted):
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(rows, training=True) - wanted))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def step(self, number):
        rank, size = keras_hvd.rank(), keras_hvd.size()
        rows, wanted = self.inputs[number][rank::size], y[number][rank::size]
        self.update(tf.constant(rows), tf.constant(wanted))


def dense():
    return [keras.layers.Dense(1)]


def embedded():
    return [keras.layers.Embedding(5, 3), keras.layers.Flatten(), *dense()]


def normalized():
    return [keras_hvd.SyncBatchNormalization(), *dense()]


SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
warmup = keras_hvd.warmup_schedule(0.4, warmup_steps=8)
trainings = {
    "slices": Training(embedded, words, Adam(0.1)),
    "slices, compiled": Training(embedded, words, Adam(0.1), jit_compile=True),
    "compiled": Training(dense, x, Adam(0.1), jit_compile=True),
    "normalized": Training(normalized, x),
    "normalized, compiled": Training(normalized, x, jit_compile=True),
    "sum": Training(dense, x, SGD(0.01), op=keras_hvd.Sum),
    "warmed up": Training(dense, x, SGD(warmup)),
}


@tf.function(reduce_retracing=True)
def gradients_of_collectives(mine):
    """Of the sum of each one's elements times their places and the rank's number."""
    of_rank = tf.cast(keras_hvd.rank_op(), tf.float64) + 1
    found = []
    for collective in (
        lambda each: keras_hvd.allreduce(each, op=keras_hvd.Sum, name="one"),
        lambda each: keras_hvd.allgather(each, name="two"),
        lambda each: keras_hvd.reducescatter(each, op=keras_hvd.Sum, name="three"),
        lambda each: keras_hvd.broadcast(each, 0, name="four"),
        lambda each: keras_hvd.alltoall(each, name="five"),
    ):
        with tf.GradientTape() as tape:
            tape.watch(mine)
            out = tf.reshape(collective(mine), [-1])
            places = tf.cast(tf.range(tf.size(out)), tf.float64) + 1
            result = tf.reduce_sum(out * places) * of_rank
        found.append(tape.gradient(result, mine))
    return found


def in_set(process_set):
    return tf.function(
        lambda mine: keras_hvd.allreduce(
            mine, op=keras_hvd.Sum, process_set=process_set
        )
    )


def outcome(function, *arguments, **options):
    try:
        return function(*arguments, **options).numpy().tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


pair = keras_hvd.ProcessSet([0, 2])
of_set, old_of_set, of_old_set = None, None, ""
gradients, of_sets, of_adasum = [], {}, {}
state = keras_hvd.elastic.TensorFlowState(
    [each for one in trainings.values() for each in one.state.variables], step=0
)


@keras_hvd.elastic.run
def train(state):
    global of_set, old_of_set, of_old_set
    rank, size = keras_hvd.rank(), keras_hvd.size()
    keras_hvd.add_process_set(pair)
    if pair.included():
        of_set, old_of_set = in_set(pair), of_set
        of_sets[size] = outcome(of_set, tf.constant([1.0 + rank]))
        of_old_set = old_of_set and outcome(old_of_set, tf.constant([1.0 + rank]))
    vector = tf.constant(x[0, rank])
    of_adasum[size] = outcome(keras_hvd.allreduce, vector, op=keras_hvd.Adasum)
    while state.step < STEPS:
        if (state.step, started_as) == (LOST_AT, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        for training in trainings.values():
            training.step(state.step)
        found = gradients_of_collectives(tf.constant(x[state.step, :size]))
        gradients.append([rank, size, [each.numpy().tolist() for each in found]])
        state.step += 1
        state.commit()


train(state)
seen = {
    "rank": keras_hvd.rank(),
    "size": keras_hvd.size(),
    "sets": of_sets,
    "old set": of_old_set,
    "adasum": of_adasum,
    "gradients": gradients,
    "traces": {name: each.traces for name, each in trainings.items()},
    "weights": {
        name: [weight.numpy().tolist() for weight in each.model.weights]
        for name, each in trainings.items()
    },
}
(Path(sys.argv[1]) / f"{os.getpid()}.json").write_text(json.dumps(seen))
