"""Where all ranks hear of an error of one, wherever in the training it was.

A rank that fails gives zeros to what the others reduce, as one whose data is over. So
they come to the next thing that needs it, which raises, or to the end of their epoch;
there all meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from keras_hvd.collectives.join import join
from keras_hvd.objects import allgather_object

# A rank's last words before a stall may be this name.
_NAME = "keras_hvd/steps of the epoch"

# The engine's words to ranks that waited for one that had failed. No reason of theirs.
_FROM_ANOTHER = "joined, and gives zeros from then on"


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a rank brings that goes no further."""

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
    """Waits for all ranks, and gives what each has brought.

    Args:
        brought: anything that can be pickled.

    Returns:
        What the ranks brought, in their order.

    Raises:
        RanksFailedError: a rank brought a `Failure`.
        MismatchError: a rank failed, and is about to bring a `Failure`.

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
    """Has all ranks get through a block, or all raise.

    Args:
        severity: how bad an error is, from 0 on. The worst counts, of the lowest rank.
        error_of: makes what is raised on ranks that have no error as bad of their own,
            of its severity and a text.

    Yields:
        Nothing.

    Raises:
        Exception: this rank's error, or what `error_of` makes of another rank's.

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
        join()
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
