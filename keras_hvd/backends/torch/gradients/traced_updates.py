"""Refuses steps that torch.compile compiles: they would not reduce as they are now."""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_hvd.job import basics


@functools.cache
def install() -> None:
    """Makes `fit` refuse `jit_compile=True` in a job of several ranks.

    Example:

    >>> install()
    """
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(self, force=False):
        if self.jit_compile is True and basics.is_initialized() and basics.size() > 1:
            raise NotImplementedError(
                f"model {self.name!r} is compiled with jit_compile=True. keras_hvd "
                "does not reduce gradients in steps that torch.compile compiles: "
                "leave jit_compile out of compile()"
            )
        return plain(self, force)

    keras.Model.make_train_function = make_train_function


def note_change(optimizer: Any) -> None:
    """Notes that an optimizer reduces in another way: no step holds the former one.

    Example:

    >>> note_change(keras.optimizers.SGD())
    """
