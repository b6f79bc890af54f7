"""A rank for the tests of what is said once: says all that ranks can say.

With "late", it joins before it imports Keras and TensorFlow.
"""

import sys
import tempfile
import threading
import warnings

import keras_hvd

if "late" in sys.argv:
    keras_hvd.init()
    assert not {"keras", "tensorflow", "absl"} & sys.modules.keys()

import keras
import numpy as np
import tensorflow as tf
from absl import logging

keras_hvd.init()
print("print of the script")
warnings.warn("warning of Python", stacklevel=1)
tf.get_logger().warning("the script's to TensorFlow's log")
logging.warning("the script's to absl's log")
# A warning of TensorFlow: each number is traced anew.
traced = tf.function(lambda number: number)
for number in range(9):
    traced(number)
tf.get_logger().error("error of TensorFlow")
logging.error("error of absl")

# It resets what Keras keeps of its output.
keras.utils.clear_session()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.summary()
# A warning of Keras to absl's log: the format is an old one.
with tempfile.TemporaryDirectory() as folder:
    model.save(f"{folder}/model.h5")
model.summary(print_fn=lambda line, **_: print(f"to the script: {line[:6]}"))
optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer, "mse")
x = np.ones((8, 2), "float32")
never_better = {"monitor": "loss", "min_delta": 1e9, "verbose": 1}
model.fit(
    *(x, x),
    epochs=3,
    batch_size=4,
    callbacks=[
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate, verbose=1),
        keras.callbacks.ReduceLROnPlateau(patience=1, **never_better),
        keras.callbacks.EarlyStopping(patience=2, **never_better),
    ],
)
model.evaluate(x, x)
predict = threading.Thread(target=model.predict, args=(x,))
predict.start()
predict.join()
bar = keras.utils.Progbar(1)
bar.update(1)
