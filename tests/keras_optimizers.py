"""The optimizers of Keras, and how fast tests let them train."""

from typing import Any

import keras

RATE = 0.01
# Its steps are small at any usual rate.
_RATES = {"Adadelta": 1.0}

# They take the arguments of others.
_SEVERAL = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}

NAMES = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type)
    and issubclass(value, keras.optimizers.Optimizer)
    and name not in _SEVERAL
)

EMA = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 7}


def optimizer(name: str) -> Any:
    """An optimizer of Keras at a rate that suits it."""
    return getattr(keras.optimizers, name)(_RATES.get(name, RATE))
