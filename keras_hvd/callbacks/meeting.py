"""All ranks learn of one rank's error, wherever in the training it happened.

A rank that fails contributes zeros to the others' reductions, like a rank without more
data. So the others reach the next operation that needs it, which raises, or the end of
their epoch; there all ranks meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from keras_hvd.backends.current import framework
from keras_hvd.job.objects import allgather_object

# Users see this name if a rank stalls here.
_NAME = "keras_hvd/steps of the epoch"

# Part of the engine's error on ranks that waited for a failed rank.
_FROM_ANOTHER = "joined, and gives zeros from then on"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed rank's error, as it tells the others at a meeting."""

    severity: int
    text: str


class RanksFailedError(RuntimeError):
    """Raised on the ranks that did not fail themselves."""

    def __init__(self, of_ranks: list[Any]):
        failed = [rank for rank, each in enumerate(of_ranks) if _is_failure(each)]
        texts = (f"rank {rank} failed: {of_ranks[rank].text}" for rank in failed)
        super().__init__("\n".join(texts))
        self.of_ranks = of_ranks


def meet(brought: Any) -> list[Any]:
    """Waits for all ranks, and returns their (pickled) contributions in rank order.

    Raises RanksFailedError if a rank brought a `Failure`, and MismatchError if a rank
    has failed and is about to bring one.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> meet("rank 0 was here")
    ['rank 0 was here']
    """
    of_ranks = allgather_object(brought, name=_NAME)
    if any(map(_is_failure, of_ranks)):
        raise RanksFailedError(of_ranks)
    return of_ranks


@contextlib.contextmanager
def all_or_none(
    severity: Callable[[Exception], int], error_of: Callable[[int, str], Exception]
) -> Iterator[None]:
    """All ranks get through this block, or all raise.

    The error with the highest `severity` (from 0) counts, from the lowest rank. Ranks
    without an error of that severity raise the result of `error_of(severity, text)`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> with all_or_none(lambda error: 0, lambda severity, text: RuntimeError(text)):
    ...     raise ValueError("no such row")
    Traceback (most recent call last):
    ValueError: no such row
    """
    own = None
    cause: Exception
    try:
        yield
        meet(None)
    except RanksFailedError as error:
        of_ranks, cause = error.of_ranks, error
    except Exception as error:
        is_own = _FROM_ANOTHER not in str(error)
        own = Failure(severity(error) if is_own else -1, _shown(error))
        cause = error
        framework.join()
        of_ranks = allgather_object(own, name=_NAME)
    else:
        return
    worst = max(each.severity for each in of_ranks if _is_failure(each))
    if own is not None and own.severity == worst:
        raise cause
    text = next(
        f"rank {rank} failed: {each.text}"
        for rank, each in enumerate(of_ranks)
        if _is_failure(each) and each.severity == worst
    )
    raise error_of(max(worst, 0), text) from cause


def _is_failure(brought: Any) -> bool:
    return isinstance(brought, Failure)


def _shown(error: Exception) -> str:
    lines = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n{lines}"
