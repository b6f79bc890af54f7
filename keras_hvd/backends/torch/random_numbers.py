"""Random numbers that differ between ranks: those of Keras' generators.

Draws of torch's own generator, as in `torch.nn.Dropout`, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def install(is_distributed: Callable[[Any], bool]) -> None:
    """Does nothing: Keras' generators are all that is seeded by rank.

    Example:

    >>> install(lambda optimizer: False)
    """


def continue_with_rank(generator: Any, seed: Any, rank: int) -> None:
    """Makes a generator of Keras continue with the ranks' seed, or state, plus a rank.

    Example:

    >>> import keras
    >>> generator = keras.random.SeedGenerator(7)
    >>> continue_with_rank(generator, generator.state, rank=2)
    >>> generator.state.numpy().tolist()
    [9, 0]
    """
    state = np.array(seed)
    state[0] += rank
    generator.state.assign(state)
