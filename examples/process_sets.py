"""Trains two models side by side, each on one half of the ranks.

The ranks of each half are a process set: they reduce among themselves, and do not wait
for the other half. At the end all ranks compare.

khvdrun -np 4 python examples/process_sets.py
"""

import argparse

import keras
from sklearn.datasets import load_digits

import keras_hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
if size < 2:
    raise SystemExit("Start it on two ranks at least: khvdrun -np 2 python ...")

narrow = keras_hvd.add_process_set(range(size // 2))
wide = keras_hvd.add_process_set(range(size // 2, size))
mine, units = (narrow, 16) if narrow.included() else (wide, 128)

keras.utils.set_random_seed(1 + rank)
images, labels = load_digits(return_X_y=True)
images, labels = keras_hvd.data.part(images, labels, process_set=mine)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Rescaling(1 / 16),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras_hvd.DistributedOptimizer(
    keras.optimizers.Adam(0.001), process_set=mine
)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
keras_hvd.broadcast_variables(
    model.variables, root_rank=mine.ranks[0], process_set=mine
)
for _ in range(arguments.epochs):
    model.fit(images, labels, verbose=0)

_, accuracy = model.evaluate(images, labels, verbose=0)
accuracy = keras_hvd.allreduce(float(accuracy), name="accuracy", process_set=mine)
results = keras_hvd.allgather_object((units, float(accuracy)))
if rank == 0:
    for units, accuracy in sorted(set(results)):
        print(f"{units} units: accuracy {accuracy:.2%}")
