"""What launchers say of a process' place: see keras_hvd/world/environment.py."""

import sys

from keras_hvd.world import environment

sys.modules[__name__] = environment
