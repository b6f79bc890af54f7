"""Trains on batches that tf.data service prepares, in servers that all ranks share.

khvdrun -np 2 python examples/data_service.py
"""

import argparse
import gc

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.data.experimental import service

import keras_hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=8)
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)

# The dispatcher and the workers may also run on other machines, started before. Then
# the ranks need the dispatcher's address only.
dispatcher = service.DispatchServer() if rank == 0 else None
address = keras_hvd.broadcast_object(dispatcher and dispatcher.target, root_rank=0)
worker = service.WorkerServer(
    service.WorkerConfig(dispatcher_address=address.removeprefix("grpc://"))
)

images, labels = load_digits(return_X_y=True)
dataset = (
    tf.data.Dataset.from_tensor_slices((images.astype("float32"), labels))
    .shuffle(len(images))
    # Without an end: a rank may get more batches than another one, and all have to make
    # as many steps.
    .repeat()
    .map(lambda image, label: (image / 16, label))
    .batch(32)
    # By one name each batch goes to the rank that asks first, and to no other.
    .apply(service.distribute(service.ShardingPolicy.DYNAMIC, address, "digits"))
)
steps = len(images) // (32 * size)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * size)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(
    dataset,
    epochs=arguments.epochs,
    steps_per_epoch=steps,
    verbose=0,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
    ],
)
# As many batches as the optimizer has made steps.
taken = int(model.optimizer.iterations.numpy())
taken = int(keras_hvd.allreduce(taken, name="taken", op=keras_hvd.Sum))
if rank == 0:
    print(f"Training accuracy: {history.history['accuracy'][-1]:.2%}")
    print(f"All ranks together got {taken // arguments.epochs} batches in an epoch")
# A worker waits for its readers, and a server that prepares a batch for the dispatcher.
# So all readers, which fetch batches ahead, go before all workers.
del dataset, model, history
gc.collect()
keras_hvd.barrier()
worker.stop()
keras_hvd.barrier()
if dispatcher is not None:
    dispatcher.stop()
