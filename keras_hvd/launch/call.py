"""A function call that travels to the ranks of `keras_hvd.run`, and its outcomes.

Everything is in memory files of the process that called `run`, which ranks on its own
host open through /proc. Between several hosts the call and outcomes travel
(`exchange`).
Nothing is written to disk, and nothing is left when that process dies. Without /proc,
they are temporary files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, NamedTuple, cast

import cloudpickle

from keras_hvd.backends.current import allocator
from keras_hvd.exceptions import KerasHvdError
from keras_hvd.job import cores, said_once
from keras_hvd.launch import node_ranks
from keras_hvd.launch.exchange import Caller
from keras_hvd.world import environment, renewal

# A shell's exit code after Ctrl-C.
_INTERRUPTED = 130


class Place(NamedTuple):
    """A rank's place in the last job that it was in; without a name, it was in none."""

    job: str = ""
    rank: int = 0
    size: int = 0


@dataclass(frozen=True)
class Outcome:
    """The result or the error of the call on one rank.

    Example:

    >>> outcome = Outcome(error=b"no pickle", description="OSError: it is full")
    >>> type(outcome.exception()).__name__
    'RuntimeError'
    """

    value: Any = None
    # Pickled on its own, because it may not load in other processes. Empty if it cannot
    # be pickled; None if nothing was raised.
    error: bytes | None = None
    description: str = ""
    traceback: str = ""
    when: float = 0.0  # of the error, by a clock that all ranks share
    place: Place = Place()  # where ranks come and go
    has_left: bool = False  # to let the others go on without it

    def exception(self) -> Exception:
        """The error for this process to raise, or a RuntimeError that describes it."""
        with contextlib.suppress(Exception):
            error = pickle.loads(self.error or b"")
            if isinstance(error, Exception):
                return error
        return RuntimeError(self.description)


def memory_file(name: str) -> BinaryIO:
    """A file of this process in memory, or a temporary file where there is no /proc."""
    if os.path.isdir("/proc/self/fd"):
        return open(os.memfd_create(f"keras_hvd.run-{name}"), "w+b")
    return cast(BinaryIO, tempfile.NamedTemporaryFile(prefix=f"keras_hvd.run-{name}-"))


def path_of(file: BinaryIO) -> str:
    """The path of a memory file for other processes of the same user."""
    # A descriptor's name is its number.
    if isinstance(file.name, str):
        return file.name
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def dump_call(
    file: BinaryIO,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Writes a call to `file` so that another Python process can make it.

    cloudpickle writes functions of scripts, notebooks and functions by value, and those
    of modules by name. Raises TypeError if something cannot be pickled.
    """
    # Lets the other process import modules from the same places.
    pickle.dump(sys.path, file)
    dump_function(file, function, args, kwargs)
    file.flush()


def dump_function(
    file: IO[bytes],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """As `dump_call`, for a process that has its own `sys.path` written before it."""
    made = function, tuple(args), dict(kwargs)
    try:
        cloudpickle.dump(made, file)
    except Exception as error:
        raise TypeError(
            f"run: the function, what it uses or an argument cannot be pickled: {error}"
        ) from error


def serve(call: str, *outcomes: str) -> int:
    """Makes the call in file `call` as this process' rank, and returns the exit code.

    `outcomes` has the path for each rank's outcome.
    """
    # The function may change the environment.
    return serve_one(call, outcomes[environment.world().rank])


def serve_one(call: str, own: str) -> int:
    """As `serve`, with the path for this rank's outcome alone."""
    # The function must not parse these as its own options.
    sys.argv[1:] = []
    try:
        with open(call, "rb") as file:
            made = _make(file)
    except KeyboardInterrupt:
        return _INTERRUPTED
    with open(own, "wb") as file:
        made = _dump_outcome(made, file)
    return _exit_code(made, made.description)


def serve_caller() -> int:
    """Makes the call that this rank gets over the network, and returns the exit code.

    mpirun or srun has started it, so it sets the variables that khvdrun would set.
    """
    return _over_the_network(_serve_caller)


def serve_elastic() -> int:
    """As `serve_caller`, for a rank of a job that may go on, which khvdrun starts."""
    return _over_the_network(_serve_elastic)


def _over_the_network(serve: Callable[[], int]) -> int:
    try:
        return serve()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (KerasHvdError, ValueError) as error:
        print(f"keras_hvd.run: {error}", file=sys.stderr, flush=True)
        return 1


def _serve_caller() -> int:
    place = environment.world()
    cores.share(place.local_size)
    os.environ.update(allocator.variables(os.environ))
    os.environ.update(_horovods(place))
    caller = Caller(os.environ, place.rank, place.size)
    made = _make_for(caller)
    return _hand_over(made, caller, lambda outcome: outcome.description)


def _serve_elastic() -> int:
    # The function may change the environment.
    first = {**os.environ}
    told = renewal.of(first)
    assert told is not None, "khvdrun has set it"
    caller = Caller(os.environ, told.number, None)
    made = _make_for(caller)
    if not made.has_left:
        made = dataclasses.replace(made, place=_last_place(first))
    # The others may go on, and then nobody else shows the traceback.
    return _hand_over(made, caller, lambda outcome: outcome.traceback)


def _last_place(first: Mapping[str, str]) -> Place:
    """Where this rank was last in a job, if it began with these variables."""
    variables = {**first, **renewal.taken()}
    told = renewal.of(variables)
    if told is None or told.is_new:
        return Place()
    rank, size = (int(variables[f"KERAS_HVD_{name}"]) for name in ("RANK", "SIZE"))
    return Place(variables["KERAS_HVD_JOB"], rank, size)


def _make_for(caller: Caller) -> Outcome:
    with memory_file("call") as file:
        caller.ask(file)
        return _make(file)


def _hand_over(
    made: Outcome, caller: Caller, describe: Callable[[Outcome], str]
) -> int:
    """Gives an outcome to the caller, shows its error, and returns the exit code."""
    with memory_file("outcome") as file:
        made = _dump_outcome(made, file)
        age = time.monotonic() - made.when
        # If no process takes the outcome, its error is seen at least here.
        code = _exit_code(made, describe(made))
        caller.tell(file, made.error is not None, age)
        return code


def _horovods(place: environment.World) -> dict[str, str]:
    """Horovod's variables, without the hosts' numbers: ranks have not met yet."""
    names = "rank", "size", "local_rank", "local_size"
    return node_ranks.of_horovod({name.upper(): getattr(place, name) for name in names})


def _exit_code(made: Outcome, said: str) -> int:
    """The exit code after an outcome; `said` tells of its error."""
    if made.error is None:
        return 0
    said_once.tell_hidden(made.description)
    # From these lines khvdrun tells the first failure from ranks that lost a peer.
    print(said, file=sys.stderr, flush=True)
    return 1


def _make(call: BinaryIO) -> Outcome:
    def made() -> Any:
        sys.path[:] = pickle.load(call)
        function, args, kwargs = pickle.load(call)
        return function(*args, **kwargs)

    return outcome_of(made)


def outcome_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Calls the function for a process that waits for the outcome.

    Example:

    >>> outcome_of(int, "1").value, outcome_of(int, "one").description[:10]
    (1, 'ValueError')
    """
    try:
        return Outcome(value=function(*args, **kwargs))
    except renewal.Left:
        return Outcome(has_left=True)
    except SystemExit as error:
        # It would silently end the process that called `run`.
        return _failure(error, RuntimeError(f"the function exited: {error!r}"))
    except Exception as error:
        return _failure(error, error)


def _failure(error: BaseException, raised: Exception) -> Outcome:
    """The outcome of `error`; the caller of `run` gets `raised`."""
    when = time.monotonic()
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(raised)
    # Leaves out this module's frames.
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return Outcome(
        error=pickled,
        description="".join(traceback.format_exception_only(raised)).rstrip(),
        traceback="".join(lines).rstrip(),
        when=when,
    )


def _dump_outcome(outcome: Outcome, file: BinaryIO) -> Outcome:
    """Writes and returns the outcome, or an error if it cannot be pickled."""
    try:
        cloudpickle.dump(outcome, file)
    except Exception as error:
        file.seek(0)
        file.truncate()
        failure = _failure(error, TypeError(f"the result cannot be pickled: {error}"))
        outcome = dataclasses.replace(failure, place=outcome.place)
        cloudpickle.dump(outcome, file)
    file.flush()
    return outcome
