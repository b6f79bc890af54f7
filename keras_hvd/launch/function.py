"""Runs a function on every rank of a new job, from a notebook or a script."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import linecache
import os
import pathlib
import pickle
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, BinaryIO, TextIO

from keras_hvd.exceptions import KerasHvdError, RankFailedError
from keras_hvd.launch import call, command_line, other_launchers, report
from keras_hvd.launch.exchange import Arrived, Exchange
from keras_hvd.launch.options import Options
from keras_hvd.world.rendezvous import open_files

_ROOT = str(pathlib.Path(__file__).resolve().parents[2])

# No other host has to reach this process then.
_ON_THIS_HOST = {"KERAS_HVD_NETWORK_INTERFACES": "lo"}

_MEAN_THE_SAME = {
    "num_proc": "np",
    "min_num_proc": "min_np",
    "max_num_proc": "max_np",
    "network_interface": "network_interfaces",
}

# A frame of a traceback, without the line of its source.
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .+$(?!\n    )', re.M)

# Time for ranks to end by themselves after an interrupt.
_PATIENCE_SECONDS = 5


class RankTraceback(Exception):
    """The rank and the traceback of the error that `run` raises, as its cause.

    `host` is that of the rank; "" if all ranks of the job stay, and on one host.
    """

    def __init__(self, rank: int, text: str, host: str = ""):
        super().__init__(rank, text, host)
        self.rank = rank
        self.text = text
        self.host = host

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"on rank {self.rank}{where}:\n{self.text}"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    prefix_output_with_timestamp: bool = False,
    allocator: str | None = None,
    elastic_timeout: float | None = None,
    launch_agent: str | None = None,
) -> list[Any]:
    """Calls a function on every rank of a new job, which ends with the call.

    The function joins the job itself, with `keras_hvd.init`. It may be defined in a
    script or in a notebook's cell; objects that it uses from there are sent along. The
    ranks' output appears as with `khvdrun`. If this process dies, so does the job.

    With `min_np` the job goes on without ranks that fail, and others may come, if the
    function calls `keras_hvd.elastic.run` or `keras_hvd.elastic.fit`.

    Args:
        func: the function to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks.
        min_num_proc: the job goes on as long as so many ranks are left. The arguments
            that are for such jobs need it.
        max_num_proc: start more ranks, up to so many, in slots that are free.
        slots: those of a host that is given without a number; 1 without it.
        reset_limit: the most times that the job goes on.
        cooldown_range: two numbers of seconds: start a rank that has ended again, after
            the first, and after twice as many as before each further time, at most the
            second.
        hosts: as `khvdrun --hosts`, such as "node0:4,node1:4". All hosts need the same
            Python, with keras_hvd, at the same place.
        hostfile: as `khvdrun --hostfile`.
        host_discovery_script: a command that is run again and again, and prints the
            hosts of the job, as "node0" or "node0:4", one in each line.
        start_timeout: seconds that the ranks wait for each other in `init`.
        ssh_port: as `khvdrun --ssh-port`; without effect on one host.
        ssh_identity_file: as `khvdrun --ssh-identity-file`; without effect on one host.
        disable_cache: without effect; nothing is kept between jobs.
        output_filename: folder that also keeps every rank's output.
        verbose: whether to report each start and end.
        use_gloo: without effect; there is one engine.
        use_mpi: without effect; there is one engine.
        mpi_args: as `khvdrun --mpi-args`; refused on one host.
        network_interface: as `khvdrun --network-interfaces`; without effect on one
            host.
        network_interfaces: the same.
        executable: the Python of the ranks; by default this process' Python.
        np: the same as `num_proc`.
        min_np: the same as `min_num_proc`.
        max_np: the same as `max_num_proc`.
        prefix_output_with_timestamp: whether lines of output start with the time.
        allocator: as `khvdrun --allocator`: "pool" or "unchanged".
        elastic_timeout: seconds that ranks that are left wait for each other, and for
            `min_num_proc` of them; 600 without it.
        launch_agent: a command that starts ranks on other hosts instead of ssh, as
            `khvdrun --launch-agent`.

    Returns:
        The function's result on each rank, in the order of ranks. With `min_num_proc`,
        those of the ranks that the job has at its end; ranks that have ended before
        the function had returned give none.

    Raises:
        Exception: the function's error, from the rank that failed first. Its cause has
            the rank and its traceback. An error that cannot be pickled, or not
            unpickled here, becomes a RuntimeError that describes it. An error after
            which the job goes on is not raised.
        RankFailedError: a rank ended before the function had returned, and the job with
            it.
        TypeError: `func` is not a function; or it, an object that it uses, or an
            argument cannot be pickled.
        ValueError: an argument is wrong, or needs what this version does not have.
        KeyboardInterrupt: this process was interrupted; all ranks have ended.

    Example:

    >>> import keras_hvd
    >>> def greet(greeting):
    ...     keras_hvd.init()
    ...     return f"{greeting} from rank {keras_hvd.rank()} of {keras_hvd.size()}"
    >>> keras_hvd.run(greet, args=("hello",), np=2)
    ['hello from rank 0 of 2', 'hello from rank 1 of 2']
    """
    values = dict(locals())
    if num_proc in (None, 1):
        values["num_proc"] = 1 if np is None else None
    for name, other in _MEAN_THE_SAME.items():
        if values[name] is not None and values[other] is not None:
            raise ValueError(f"{name} and {other} mean the same: give one of them")
    # The others are options, by their names here.
    for name in ("func", "args", "kwargs", "executable"):
        del values[name]
    if not callable(func):
        raise TypeError(f"run: func must be a function to call, got {func!r}")
    command = [executable or sys.executable, "-c", _program("call", "serve")]
    # Checked here, because the child process' error message would get lost.
    options = command_line.of_arguments(values, command)
    is_elastic = options.least_ranks is not None
    if options.hosts and not is_elastic:
        other_launchers.hand_over(options, os.environ)
    # For each rank a file for its outcome, or a connection.
    open_files.allow(options.most_ranks or options.ranks)
    with contextlib.ExitStack() as files:
        made = files.enter_context(call.memory_file("call"))
        call.dump_call(made, func, args, kwargs or {})
        if is_elastic:
            return _run_elastic(_with(options, command, "serve_elastic"), made)
        if options.hosts:
            return _run_on_several_hosts(_with(options, command, "serve_caller"), made)
        outcomes = [
            files.enter_context(call.memory_file(f"outcome-{rank}"))
            for rank in range(options.ranks)
        ]
        paths = [call.path_of(made), *map(call.path_of, outcomes)]
        code = _khvdrun(dataclasses.replace(options, command=(*command, *paths)))
        loaded = [_load(file, rank, code) for rank, file in enumerate(outcomes)]
        return _results(loaded, code)


def _program(module: str, function: str) -> str:
    """A program that calls a function of this folder, of this process' copy."""
    return (
        f"import sys; sys.path.insert(0, {_ROOT!r}); from keras_hvd.launch import "
        f"{module}; sys.exit({module}.{function}(*sys.argv[1:]))"
    )


def _with(options: Options, command: Sequence[str], function: str) -> Options:
    """The options with another function of `call` for the Python of the command."""
    program = _program("call", function)
    return dataclasses.replace(options, command=(*command[:-1], program))


def _run_on_several_hosts(options: Options, made: BinaryIO) -> list[Any]:
    exchange = Exchange(made, options.ranks, {**os.environ, **options.variables})
    with exchange:
        code = _khvdrun(options, exchange)
    loaded: list[call.Outcome | None] = [None] * options.ranks
    for each in exchange.arrived:
        loaded[each.rank] = _arrived(each, code)
    return _results(loaded, code, exchange)


def _run_elastic(options: Options, made: BinaryIO) -> list[Any]:
    if not options.hosts and not options.discovery_script:
        variables = {**options.variables, **_ON_THIS_HOST}
        options = dataclasses.replace(options, variables=variables)
    exchange = Exchange(made, None, {**os.environ, **options.variables})
    with exchange:
        code = _khvdrun(options, exchange)
    outcomes = [(each.rank, _arrived(each, code)) for each in exchange.arrived]
    last = _of_last_job(outcomes, code)
    returned = [each for each in last.values() if each.error is None]
    # One that crashes later, at its very end, counts.
    have_all = bool(returned) and len(returned) == returned[0].place.size
    if have_all or (returned and code == 0):
        return [each.value for each in sorted(returned, key=lambda each: each.place)]
    if exchange.arrived_before_loss < len(exchange.arrived):
        # Otherwise the job has gone on after these errors, until ranks were lost.
        raise_first_error(last, exchange.hosts)
    silent = [rank for rank in range(options.ranks) if rank not in exchange.hosts]
    raise _failure(silent, code, exchange)


def _of_last_job(
    outcomes: Sequence[tuple[int, call.Outcome | None]], code: int
) -> dict[int, call.Outcome]:
    """The outcomes of the last job's ranks, by their numbers as they were started.

    Ranks whose job goes on in another one have handed over theirs before that one
    begins. If all went well, ranks that have failed are of no interest.
    """
    of_jobs = [
        (rank, each)
        for rank, each in outcomes
        if each is not None and each.place.job and (code != 0 or each.error is None)
    ]
    jobs = [each.place.job for _, each in of_jobs]
    return {rank: each for rank, each in of_jobs if each.place.job == jobs[-1]}


def _arrived(arrived: Arrived, code: int) -> call.Outcome | None:
    outcome = _load(arrived.outcome, arrived.rank, code)
    # By one clock, since each host has its own.
    return outcome and dataclasses.replace(outcome, when=arrived.raised_at)


def _khvdrun(options: Options, exchange: Exchange | None = None) -> int:
    """Runs `khvdrun`, shows its output as this process', and returns the exit code."""
    stdout = _output_to(sys.stdout, sys.__stdout__)
    stderr = _output_to(sys.stderr, sys.__stderr__)
    # A notebook's cell shows progress bars as a terminal does.
    is_live = stdout == subprocess.PIPE
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with call.memory_file("options") as file:
        pickle.dump(dataclasses.replace(options, live_output=is_live), file)
        file.flush()
        own = str(os.getpid()), call.path_of(file)
        process = subprocess.Popen(
            [sys.executable, "-c", _program("__main__", "run_for"), *own],
            stdin=subprocess.DEVNULL,
            env=None if exchange is None else {**os.environ, **exchange.variables},
            stdout=stdout,
            stderr=stderr,
            # An interrupt from the terminal reaches it only through this process.
            start_new_session=True,
        )
        if exchange is not None:
            exchange.on_late = functools.partial(_stop, process)
            if exchange.is_late:
                _stop(process)
        try:
            _relay([(process.stdout, sys.stdout), (process.stderr, sys.stderr)])
            return process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def _output_to(stream: TextIO | None, from_start: TextIO | None) -> int | None:
    """Popen's argument for output that this process would write to `stream`."""
    if stream is from_start:
        return None
    # A notebook's stream is not a file.
    return subprocess.DEVNULL if stream is None else subprocess.PIPE


def _relay(streams: Sequence[tuple[IO[bytes] | None, TextIO]]) -> None:
    """Shows the output of pipes until they end."""
    with selectors.DefaultSelector() as selector:
        for pipe, shown in streams:
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(pipe, selectors.EVENT_READ, (decoder, shown))
        while selector.get_map():
            for key, _ in selector.select():
                decoder, shown = key.data
                data = os.read(key.fd, 1 << 16)
                shown.write(decoder.decode(data, final=not data))
                shown.flush()
                if not data:
                    selector.unregister(key.fileobj)


def _end(process: subprocess.Popen) -> None:
    """Ends `khvdrun` and its job, as two presses of Ctrl-C do."""
    # Otherwise it waits for a reader of its output.
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """Ends `khvdrun`, which can still write."""
    # khvdrun inherits signals that this process ignores, as in a shell's background.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        for _ in range(2):
            process.send_signal(signal.SIGTERM if is_ignored else signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
                return
    finally:
        # It does not react, or the user did not wait.
        process.kill()
        process.wait()


def _load(file: BinaryIO, rank: int, code: int) -> call.Outcome | None:
    """A rank's outcome; None if the rank ended without one."""
    if not file.read(1):
        return None
    file.seek(0)
    try:
        return pickle.load(file)
    except Exception as error:
        if code != 0:
            # The rank was ended while it wrote.
            return None
        text = f"what rank {rank} returned cannot be unpickled here: {error}"
        raise KerasHvdError(text) from error


def _with_sources(traceback: str) -> str:
    """A rank's traceback, with lines of cells, whose sources only this process has."""

    def with_source(frame: re.Match[str]) -> str:
        line = linecache.getline(frame[1], int(frame[2])).strip()
        return f"{frame[0]}\n    {line}" if line else frame[0]

    return _FRAME.sub(with_source, traceback)


def _results(
    outcomes: Sequence[call.Outcome | None], code: int, exchange: Exchange | None = None
) -> list[Any]:
    """The results of the ranks; raises unless all have returned."""
    left = {rank: each for rank, each in enumerate(outcomes) if each is not None}
    raise_first_error(left, exchange.hosts if exchange is not None else {})
    missing = [rank for rank in range(len(outcomes)) if rank not in left]
    if missing:
        raise _failure(missing, code, exchange)
    return [outcome.value for outcome in left.values()]


def _failure(
    missing: Sequence[int], code: int, exchange: Exchange | None
) -> RankFailedError:
    who = _named(missing) if exchange is None else _who_ended(missing, exchange)
    how = f"khvdrun {_ended(code)}; its last lines say why"
    if exchange is not None and exchange.is_late:
        how = "the other ranks had not ended 5 s later, and were ended"
    return RankFailedError(f"{who} ended before the function had returned; {how}")


def raise_first_error(
    outcomes: Mapping[int, call.Outcome], hosts: Mapping[int, str]
) -> None:
    """Raises the error of the rank that failed first, if there is one.

    `outcomes` has those of ranks that have left one; `hosts` has the names of ranks'
    hosts, where they are several.
    """
    failed = [
        (report.blames_a_peer(each.traceback.splitlines()), each.when, rank, each)
        for rank, each in outcomes.items()
        if each.error is not None
    ]
    if failed:
        _, _, first, outcome = min(failed)
        text = _with_sources(outcome.traceback)
        cause = RankTraceback(first, text, hosts.get(first, ""))
        raise outcome.exception() from cause


def _who_ended(missing: Sequence[int], exchange: Exchange) -> str:
    """The ranks that ended: first the one that did so first, as far as is known."""
    came = [*exchange.lost, *(exchange.hosts.keys() & set(missing))]
    named = [
        f"rank {rank} on {exchange.hosts[rank]}"
        + (f" ({exchange.lost[rank]})" if exchange.lost.get(rank) else "")
        for rank in dict.fromkeys(came)
    ]
    silent = [rank for rank in missing if rank not in exchange.hosts]
    if silent:
        named.append(f"{_named(silent)}, without a word,")
    # One that came later may have ended with what it was to hand over.
    return ", then ".join(named) or "a rank"


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _ended(code: int) -> str:
    after = {128 + each: f", as after {each.name}" for each in signal.Signals}
    return f"ended with exit code {code}{after.get(code, '')}"
