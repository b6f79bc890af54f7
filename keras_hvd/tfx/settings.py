"""The number of ranks and the time limit of a component, from their places in TFX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

NUM_RANKS = "num_ranks"
TIME_LIMIT = "time_limit"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A component's number of ranks, and its time limit in seconds."""

    num_ranks: int
    time_limit: float | None = None

    @classmethod
    def read(
        cls, exec_properties: Mapping[str, Any], custom_config: Any = None
    ) -> Settings:
        """Reads both from an execution's properties or the user's `custom_config`.

        Raises ValueError if the number of ranks is missing, a value is invalid, or the
        two places differ.

        Example:

        >>> Settings.read({}, {"num_ranks": "2", "time_limit": 3600})
        Settings(num_ranks=2, time_limit=3600.0)
        """
        ranks = _given(NUM_RANKS, exec_properties, custom_config)
        if ranks is None:
            raise ValueError(
                "keras_hvd.tfx: the number of ranks is missing: give num_ranks=... to "
                "keras_hvd.tfx.Trainer, or custom_config={'num_ranks': ...} to TFX's"
            )
        limit = _given(TIME_LIMIT, exec_properties, custom_config)
        return cls(num_ranks_of(ranks), None if limit is None else time_limit_of(limit))


def num_ranks_of(value: Any) -> int:
    """Checks a number of ranks, which may be text, as in parameters of a run.

    Example:

    >>> num_ranks_of("two")
    Traceback (most recent call last):
    ValueError: keras_hvd.tfx: num_ranks must be a whole number from 1 on; got 'two'
    """
    if isinstance(value, str):
        is_whole = value.isdecimal()
    else:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_whole = is_number and value == int(value)
    if not is_whole or int(value) < 1:
        raise ValueError(
            f"keras_hvd.tfx: num_ranks must be a whole number from 1 on; got {value!r}"
        )
    return int(value)


def time_limit_of(value: Any) -> float:
    """Checks a number of seconds, which may be text."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"keras_hvd.tfx: time_limit must be a positive number of seconds; got "
            f"{value!r}"
        )
    return seconds


def _given(name: str, exec_properties: Mapping[str, Any], custom_config: Any) -> Any:
    in_config = custom_config.get(name) if isinstance(custom_config, Mapping) else None
    in_properties = exec_properties.get(name)
    if None not in (in_config, in_properties) and str(in_config) != str(in_properties):
        raise ValueError(
            f"keras_hvd.tfx: {name} is {in_properties!r}, and {in_config!r} in "
            "custom_config: give it once"
        )
    return in_config if in_properties is None else in_properties
