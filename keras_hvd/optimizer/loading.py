"""load_model: loads a saved model and distributes its optimizer again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_hvd.backends.compression import Compressor, NoneCompressor
from keras_hvd.backends.current import load
from keras_hvd.optimizer.distributed_optimizer import DistributedOptimizer


def load_model(
    filepath: str | os.PathLike,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = NoneCompressor,
    legacy_opts: bool = False,
    *,
    compile: bool = True,
    safe_mode: bool = True,
    **arguments: Any,
) -> keras.Model:
    """Loads a model with `keras.models.load_model` and distributes its optimizer.

    The optimizer keeps its saved state, whether or not it was distributed when saved.
    From an `.h5` file, Keras 3 loads an optimizer that cannot go on training.

    Args:
        filepath: the saved model.
        custom_optimizers: optimizer classes that the file refers to by name.
        custom_objects: other classes and functions by name, as for Keras.
        compression: as for `DistributedOptimizer`.
        legacy_opts: must be False: Keras 3 has no legacy optimizers.
        compile: whether to compile the model; otherwise it has no optimizer.
        safe_mode: whether to reject files that contain Python code.
        **arguments: other arguments of `DistributedOptimizer`. A model saved with
            `backward_passes_per_step` still accumulates as many gradients, but Keras
            averages them. To add them up as before, pass the same number again.

    Returns:
        The model.

    Raises:
        ValueError: the file is not a model, or `legacy_opts` is True; also errors of
            `keras.models.load_model` and `DistributedOptimizer`.

    Example:

    >>> import tempfile, keras, keras_hvd
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model.keras")
    ...     again = keras_hvd.load_model(f"{folder}/model.keras")
    >>> again.optimizer.name
    'adam'
    """
    if legacy_opts:
        raise ValueError(
            "load_model: Keras 3 has no legacy optimizers, so legacy_opts=True "
            "cannot be had"
        )
    # Keras knows the layers of a saved model once this is imported.
    load()
    named = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath,
        custom_objects={**named, **(custom_objects or {})},
        compile=compile,
        safe_mode=safe_mode,
    )
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    return model
