"""TFX: see keras_hvd/integrations/tfx."""

import sys

from keras_hvd.integrations import tfx

sys.modules[__name__] = tfx
