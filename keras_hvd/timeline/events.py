"""The events of a timeline's file.

A timeline is an array of events, one on each line. If the job was killed, the end of
the array is missing, and the last line may be incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

OTHER_HOSTS = 2
"""The process of other hosts' rows in viewers; rank 0's rows have another one."""

DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError),
    ValueError,
)
"""Errors from reading another program's file, or one that was cut off."""


class NotATimelineError(ValueError):
    """keras_hvd has not written this file."""


def read(
    lines: Iterable[str], add: Callable[[Mapping[str, Any]], None]
) -> tuple[bool, int]:
    """Calls `add` with each event, in the order of the file.

    An event that makes `add` raise one of `DAMAGE` counts as damaged.

    Args:
        lines: Of the file.
        add: Takes an event.

    Returns:
        Whether keras_hvd has ended the file, and the number of damaged lines, except an
        incomplete last line.

    Example:

    >>> read(['[', '{"name":"start"},', '{"na'], print)
    {'name': 'start'}
    (False, 0)
    """
    is_whole = was_cut_off = False
    damaged = 0
    for line in lines:
        event = line.strip().rstrip(",").rstrip()
        if event in ("", "["):
            continue
        # Only the last line may be incomplete because the job was killed.
        damaged += was_cut_off
        was_cut_off = False
        is_whole = is_whole or event == "]"
        try:
            if event != "]":
                add(json.loads(event, parse_constant=_refuse))
        except DAMAGE:
            was_cut_off = True
    return is_whole, damaged


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no time")
