"""Keras' generator of random numbers for draws without one of their own."""

from __future__ import annotations

import random
from typing import Any

from keras.src.random import seed_generator


def global_generator() -> Any:
    """Returns Keras' generator for draws without one; makes it if there is none.

    Example:

    >>> global_generator() is global_generator()
    True
    """
    # Making it draws from Python's generator, from which users draw as well.
    state = random.getstate()
    try:
        return seed_generator.global_seed_generator()
    finally:
        random.setstate(state)
