"""KerasTuner under a strategy: trials must be chosen for all ranks together."""

from __future__ import annotations

import sys
from typing import Any

from keras_hvd.backends.tensorflow import current_strategy
from keras_hvd.callbacks.coordination import calling


def refuse_search_of_one_rank(strategy: Any) -> None:
    """Raises if the scope is for a tuner of KerasTuner that knows of no other rank.

    Each rank's tuner would choose trials of its own, and write the same files.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> refuse_search_of_one_rank(keras_hvd.Strategy())
    """
    keras_tuner = sys.modules.get("keras_tuner")
    if keras_tuner is None or current_strategy.several_ranks(strategy) is None:
        return
    # KerasTuner does not pass the tuner on.
    tuner = calling(keras_tuner.engine.base_tuner.BaseTuner)
    if tuner is None or getattr(tuner, "trains_on_all_ranks", False):
        return
    name = type(tuner).__name__
    # Other errors would fail a trial, and the search would go on.
    raise keras_tuner.errors.FatalRuntimeError(
        f"a {name} builds a model under a keras_hvd.Strategy of "
        f"{strategy.num_replicas_in_sync} ranks, but each rank's {name} would search "
        f"by itself, in the same folder {tuner.project_dir!r}: create it as "
        f"keras_hvd.keras_tuner.distribute({name})(...)"
    )
