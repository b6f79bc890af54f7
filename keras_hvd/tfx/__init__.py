"""TFX: a Trainer and a Tuner that train on several ranks.

TFX is imported when one of these names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_hvd.tfx.component import Trainer as Trainer
    from keras_hvd.tfx.component import Tuner as Tuner
    from keras_hvd.tfx.dataset import tf_dataset as tf_dataset
    from keras_hvd.tfx.executor import Executor as Executor

_DEFINED_IN = {
    "Executor": "executor",
    "Trainer": "component",
    "Tuner": "component",
    "tf_dataset": "dataset",
}

__all__ = sorted(_DEFINED_IN)


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("tfx", "tfx_bsl"):
            raise
        raise ImportError(
            f"keras_hvd.tfx.{name} needs TFX, and there is no {error.name}: "
            "docs/tfx.md has what to install"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
