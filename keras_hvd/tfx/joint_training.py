"""Checks that ranks train one model or search together, and not each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_hvd import keras_tuner
from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.job import basics
from keras_hvd.optimizer.traced_steps import require_reducing
from keras_hvd.strategy import keras_patches


def require_in_fit() -> None:
    """Makes Keras' training raise before its first step unless all ranks share it."""
    for name in ("fit", "train_on_batch"):
        keras_patches.replace(keras.Model, name, _train)


def require_has_been() -> None:
    """Raises RuntimeError if the `run_fn` that returned trained on this rank alone."""
    _require_joined()
    if not basics.is_initialized():
        return
    if basics.counters().tensors == 0:
        raise RuntimeError(
            "run_fn has returned, and the ranks have never exchanged anything: each "
            "has trained a model of its own. Reduce the gradients with "
            "keras_hvd.DistributedOptimizer, keras_hvd.DistributedGradientTape or "
            "keras_hvd.Strategy"
        )


def require_one_search(tuner: Any) -> None:
    """Raises RuntimeError if each rank would search by itself with this tuner."""
    if not keras_tuner.is_distributed(tuner):
        name = type(tuner).__name__
        raise RuntimeError(
            f"tuner_fn has made a {name} that knows of no other rank: each would "
            "search by itself. Call keras_hvd.init() at the beginning of tuner_fn, and "
            f"take keras_hvd.keras_tuner.distribute({name}) for {name}"
        )


def _train(
    plain: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    _require_joined()
    if current_strategy.of_model(model) is None:
        require_reducing(model)
    return plain(model, *args, **kwargs)


def _require_joined() -> None:
    if not basics.epoch().number:
        raise RuntimeError(
            "run_fn runs on several ranks, and has not joined them: each would train a "
            "model of its own. Call keras_hvd.init() at the beginning of run_fn, and "
            "give the model a keras_hvd.DistributedOptimizer or a keras_hvd.Strategy"
        )
