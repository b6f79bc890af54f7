"""Trains on images in folders, altered at random, and goes on after a stop.

khvdrun -np 2 python examples/image_folders.py FOLDER
"""

import argparse

import keras
import tensorflow as tf

import keras_hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="FOLDER/CLASS/*.png, or .jpg, .bmp, .gif")
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--backup", metavar="DIR", default="backup")
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1 + rank)

# Single images, of the same split on all ranks: each rank is given its part of them.
training, validation = keras.utils.image_dataset_from_directory(
    arguments.folder,
    image_size=(arguments.image_size, arguments.image_size),
    batch_size=None,
    validation_split=0.2,
    subset="both",
    seed=1,
    verbose=rank == 0,
)
classes = len(training.class_names)
alter = keras.Sequential(
    [
        keras.layers.RandomTranslation(0.05, 0.05),
        keras.layers.RandomRotation(0.02),
        keras.layers.RandomZoom(0.05),
    ]
)
training = keras_hvd.data.distribute(training, batch_size=arguments.batch_size).map(
    lambda images, labels: (alter(images, training=True), labels), tf.data.AUTOTUNE
)
validation = keras_hvd.data.distribute(validation, batch_size=arguments.batch_size)

model = keras.Sequential(
    [
        keras.Input((arguments.image_size, arguments.image_size, 3)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.GlobalMaxPooling2D(),
        keras.layers.Dense(classes, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * size)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(
    training,
    epochs=arguments.epochs,
    verbose=2,
    validation_data=validation,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        # Before the callbacks that read its averages.
        keras_hvd.callbacks.MetricAverage(),
        # Started again after a stop, all ranks go on with the epoch that was stopped.
        keras_hvd.callbacks.BackupAndRestore(arguments.backup, delete_checkpoint=False),
        keras_hvd.callbacks.LearningRateWarmup(0.002 * size, warmup_epochs=1),
        keras.callbacks.ReduceLROnPlateau(patience=3),
    ],
)
# No epoch is made where the backup has the last one already.
if rank == 0 and history.epoch:
    made = len(history.epoch)
    print(f"Made {made} epoch(s), from epoch {history.epoch[0] + 1} on")
    print(f"Validation accuracy: {history.history['val_accuracy'][-1]:.2%}")
