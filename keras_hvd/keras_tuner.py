"""KerasTuner: see keras_hvd/integrations/keras_tuner.py."""

import sys

from keras_hvd.integrations import keras_tuner

sys.modules[__name__] = keras_tuner
