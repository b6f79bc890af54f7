"""The version of keras_hvd, which the engine (tf_ops/transport/version.h) repeats."""

__version__ = "0.1.0"
