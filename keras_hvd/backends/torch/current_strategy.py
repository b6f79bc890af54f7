"""What reduces gradients besides an optimizer: Keras itself, from 3.16 on.

There is no `keras_hvd.Strategy` on torch.
"""

from __future__ import annotations

from typing import Any

import keras
import torch

# The first Keras that wraps models in DistributedDataParallel.
_WRAPS_FROM = (3, 16)


def was_made() -> bool:
    """Whether this process has made a `keras_hvd.Strategy`.

    Example:

    >>> was_made()
    False
    """
    return False


def is_ours(strategy: Any) -> bool:
    """Whether a strategy is a `keras_hvd.Strategy`.

    Example:

    >>> is_ours(None)
    False
    """
    del strategy
    return False


def of_model(model: Any) -> None:
    """The `keras_hvd.Strategy` that a Keras model trains under: none.

    Example:

    >>> of_model(keras.Sequential())
    """
    del model


def require_none(optimizer: Any) -> None:
    """Raises if Keras would reduce the gradients as well.

    >>> require_none(keras.optimizers.SGD())
    """
    version = tuple(map(int, keras.__version__.split(".")[:2]))
    if version < _WRAPS_FROM or not torch.distributed.is_available():
        return
    if torch.distributed.is_initialized():
        raise RuntimeError(
            f"optimizer {optimizer.name!r} is used after "
            f"torch.distributed.init_process_group(), with which Keras "
            f"{keras.__version__} reduces gradients itself: a DistributedOptimizer "
            "there would reduce twice. Use one of the two."
        )
