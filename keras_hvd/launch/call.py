"""A function call that travels to the ranks of `keras_hvd.run`, and what came of it.

All of it lies in memory files of the process that called `run`, which the ranks open by
way of /proc: nothing is written to a disk, and nothing is left when that process dies.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import cloudpickle

from keras_hvd import environment

# As a shell would call the end by Ctrl-C.
_INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """What came of the call on one rank.

    Args:
        value: What the function returned.
        error: What it raised instead, in a pickle of its own: other processes may lack
            what this one knows it by. Empty where it cannot be pickled; None for none.
        description: What the error is and says.
        traceback: Of the error, as Python prints it.
        when: The time of the error, by a clock that all ranks share.

    Example:

    >>> outcome = Outcome(error=b"no pickle", description="OSError: it is full")
    >>> type(outcome.exception()).__name__
    'RuntimeError'
    """

    value: Any = None
    error: bytes | None = None
    description: str = ""
    traceback: str = ""
    when: float = 0.0

    def exception(self) -> Exception:
        """The error, for this process to raise, or one that describes it."""
        with contextlib.suppress(Exception):
            error = pickle.loads(self.error or b"")
            if isinstance(error, Exception):
                return error
        return RuntimeError(self.description)


def dump_call(
    file: BinaryIO,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Writes a call so that another Python process can make it.

    Args:
        file: Where to write.
        function: Anything that cloudpickle takes: functions of a script, of a notebook
            and of functions go as they are, those of a module by its name.
        args: Its positional arguments.
        kwargs: Its other arguments.

    Raises:
        TypeError: Something cannot be pickled.
    """
    # Modules are imported by name, from where this process finds them.
    pickle.dump(sys.path, file)
    made = function, tuple(args), dict(kwargs)
    try:
        cloudpickle.dump(made, file)
    except Exception as error:
        raise TypeError(
            f"run: the function, what it uses or an argument cannot be pickled: {error}"
        ) from error
    file.flush()


def serve(call: str, *outcomes: str) -> int:
    """Makes the call as the rank that this process is.

    Args:
        call: Path of what `dump_call` wrote.
        outcomes: For each rank the path of where its outcome is to go.

    Returns:
        What to exit with.
    """
    # Options of the function's own are not to be looked for among these.
    sys.argv[1:] = []
    try:
        made = _make(call)
    except KeyboardInterrupt:
        return _INTERRUPTED
    with open(outcomes[environment.world().rank], "wb") as file:
        made = _dump_outcome(made, file)
    if made.error is None:
        return 0
    # By their last words khvdrun knows who failed and who only missed that one.
    print(made.description, file=sys.stderr, flush=True)
    return 1


def _make(call: str) -> Outcome:
    try:
        with open(call, "rb") as file:
            sys.path[:] = pickle.load(file)
            function, args, kwargs = pickle.load(file)
        return Outcome(value=function(*args, **kwargs))
    except SystemExit as error:
        # It would end whoever called `run` without a word.
        return _failure(error, RuntimeError(f"the function exited: {error!r}"))
    except Exception as error:
        return _failure(error, error)


def _failure(error: BaseException, raised: Exception) -> Outcome:
    """The outcome of `error`, which is to come out as `raised`."""
    when = time.monotonic()
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(raised)
    # Without the frame of this module.
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return Outcome(
        error=pickled,
        description="".join(traceback.format_exception_only(raised)).rstrip(),
        traceback="".join(lines).rstrip(),
        when=when,
    )


def _dump_outcome(outcome: Outcome, file: BinaryIO) -> Outcome:
    """Writes an outcome, or an error in its place, where the value cannot be pickled.

    Returns:
        What was written.
    """
    try:
        cloudpickle.dump(outcome, file)
    except Exception as error:
        file.seek(0)
        file.truncate()
        outcome = _failure(error, TypeError(f"the result cannot be pickled: {error}"))
        cloudpickle.dump(outcome, file)
    return outcome
