"""Jobs from a notebook or a script: a function, called by every rank of a new job."""

from __future__ import annotations

import codecs
import contextlib
import os
import pathlib
import pickle
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, BinaryIO, TextIO

from keras_hvd.exceptions import KerasHvdError, RankFailedError
from keras_hvd.launch import call, command_line, report

_ROOT = str(pathlib.Path(__file__).resolve().parents[1])

# The same copy of keras_hvd as this process', wherever that has it from.
_IMPORT = f"import sys; sys.path.insert(0, {_ROOT!r}); "
_KHVDRUN = _IMPORT + "from keras_hvd.launch.for_parent import main as run; "
_RANK = (
    _IMPORT + "from keras_hvd.launch import call; sys.exit(call.serve(*sys.argv[1:]))"
)

# How long ranks have to end by themselves after an interrupt.
_PATIENCE_SECONDS = 5


class RankTraceback(Exception):
    """Where a rank raised what `run` raises: the cause of that.

    Args:
        rank: The rank.
        text: Its traceback, as Python prints it.
    """

    def __init__(self, rank: int, text: str):
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n{self.text}"


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
) -> list[Any]:
    """Calls a function on every rank of a new job, which ends with the call.

    The function joins the job itself, with `keras_hvd.init`. It may be defined in a
    script or in a notebook's cell; what it uses of them goes along. What the ranks
    write appears as `khvdrun` shows it. When this process dies, so does the job.

    Args:
        func: What to call.
        args: Its positional arguments.
        kwargs: Its other arguments.
        num_proc: Number of ranks.
        min_num_proc: Of elastic jobs, which this version does not have.
        max_num_proc: The same.
        slots: The same.
        reset_limit: The same.
        cooldown_range: The same.
        hosts: As `khvdrun --hosts`: only this machine, for now.
        hostfile: As `khvdrun --hostfile`: only this machine, for now.
        host_discovery_script: Of elastic jobs, which this version does not have.
        start_timeout: Seconds that the ranks wait for each other in `init`.
        ssh_port: Without effect on one machine.
        ssh_identity_file: Without effect on one machine.
        disable_cache: Without effect: nothing is kept.
        output_filename: Folder to keep every rank's output in as well.
        verbose: Whether to report each start and end.
        use_gloo: Without effect: there is one engine.
        use_mpi: Without effect: there is one engine.
        mpi_args: Refused: no `mpirun` runs underneath.
        network_interface: Without effect on one machine.
        network_interfaces: The same.
        executable: The Python of the ranks; this one's by default.
        np: The same as `num_proc`.
        min_np: The same as `min_num_proc`.
        max_np: The same as `max_num_proc`.
        prefix_output_with_timestamp: Whether lines of output start with the time.
        allocator: As `khvdrun --allocator`: "pool" or "unchanged".

    Returns:
        What the function returned on each rank, in the order of the ranks.

    Raises:
        Exception: What the function raised on a rank, on the first one if it did on
            several; its cause says which rank, and where. Where it cannot be pickled,
            or not be unpickled here, a RuntimeError that says what it was.
        RankFailedError: A rank ended before the function had returned.
        TypeError: `func` is no function; or it, what it uses or an argument cannot be
            pickled.
        ValueError: An argument is wrong, or asks for what this version does not have.
        KeyboardInterrupt: Of this process; all ranks have ended then.

    Example:

    >>> import keras_hvd
    >>> def greet(greeting):
    ...     keras_hvd.init()
    ...     return f"{greeting} from rank {keras_hvd.rank()} of {keras_hvd.size()}"
    >>> keras_hvd.run(greet, args=("hello",), np=2)
    ['hello from rank 0 of 2', 'hello from rank 1 of 2']
    """
    arguments = _arguments(
        {
            "--num-proc": _one_of(
                "num_proc", None if num_proc == 1 else num_proc, "np", np, 1
            ),
            "--min-num-proc": _one_of("min_num_proc", min_num_proc, "min_np", min_np),
            "--max-num-proc": _one_of("max_num_proc", max_num_proc, "max_np", max_np),
            "--slots": slots,
            "--reset-limit": reset_limit,
            "--blacklist-cooldown-range": cooldown_range,
            "--hosts": hosts,
            "--hostfile": hostfile,
            "--host-discovery-script": host_discovery_script,
            "--start-timeout": start_timeout,
            "--ssh-port": ssh_port,
            "--ssh-identity-file": ssh_identity_file,
            "--disable-cache": bool(disable_cache),
            "--output-filename": output_filename,
            "--verbose": bool(verbose),
            "--gloo": bool(use_gloo),
            "--mpi": bool(use_mpi),
            "--mpi-args": mpi_args,
            "--network-interface": network_interface,
            "--prefix-output-with-timestamp": bool(prefix_output_with_timestamp),
            "--allocator": allocator,
        }
    )
    if not callable(func):
        raise TypeError(f"run: func must be a function to call, got {func!r}")
    command = [executable or sys.executable, "-c", _RANK]
    # Wrong ones are refused here, and not by a process whose words get lost.
    ranks = command_line.read([*arguments, *command]).ranks
    with contextlib.ExitStack() as files:
        made = files.enter_context(_memory_file("call"))
        call.dump_call(made, func, args, kwargs or {})
        outcomes = [
            files.enter_context(_memory_file(f"outcome-{rank}"))
            for rank in range(ranks)
        ]
        paths = [_path(made), *map(_path, outcomes)]
        code = _khvdrun([*arguments, *command, *paths])
        loaded = [_load(file, rank, code) for rank, file in enumerate(outcomes)]
        return _results(loaded, code)


def _one_of(
    name: str,
    value: int | None,
    old_name: str,
    old_value: int | None,
    default: int | None = None,
) -> int | None:
    if value is not None and old_value is not None:
        raise ValueError(f"{name} and {old_name} mean the same: give one of them")
    given = old_value if value is None else value
    return default if given is None else given


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line that options with their values make."""
    made = []
    for option, value in options.items():
        if value is None or value is False:
            continue
        if value is True:
            made.append(option)
        elif isinstance(value, (list, tuple)):
            made += [option, *map(str, value)]
        else:
            made.append(f"{option}={value}")
    return made


def _memory_file(name: str) -> BinaryIO:
    return open(os.memfd_create(f"keras_hvd.run-{name}"), "w+b")


def _path(file: BinaryIO) -> str:
    """Where processes of the same user find a memory file of this one."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _khvdrun(arguments: Sequence[str]) -> int:
    """Runs `khvdrun`, its output shown where this process shows its own.

    Returns:
        What it exited with.
    """
    program = f"{_KHVDRUN}sys.exit(run(sys.argv[1:]))"
    stdout = _output_to(sys.stdout, sys.__stdout__)
    stderr = _output_to(sys.stderr, sys.__stderr__)
    if stdout == subprocess.PIPE:
        # A notebook's cell shows progress bars as a terminal does.
        arguments = ["--live-output", *arguments]
    command = [sys.executable, "-c", program, str(os.getpid()), *arguments]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        # So that an interrupt from the terminal reaches it once, by way of here.
        start_new_session=True,
    )
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
    """Where output goes that this process would write to a stream, for `Popen`."""
    if stream is from_start:
        return None
    # In a notebook it is no file, but what its cells show.
    return subprocess.DEVNULL if stream is None else subprocess.PIPE


def _relay(streams: Sequence[tuple[IO[bytes] | None, TextIO]]) -> None:
    """Shows what comes out of pipes, until their ends."""
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
    """Ends `khvdrun`, and all of its job: as Ctrl-C does, then as a second one."""
    # It waits for readers of what it has to say.
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    # What this process has ignored from the start, as in the background of a shell, it
    # ignores as well.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        for _ in range(2):
            process.send_signal(signal.SIGTERM if is_ignored else signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
                return
    finally:
        # It hears nothing, or the user has not waited for it to end.
        process.kill()
        process.wait()


def _load(file: BinaryIO, rank: int, code: int) -> call.Outcome | None:
    """What came of the call on a rank; None if it ended before it could say so."""
    if os.fstat(file.fileno()).st_size == 0:
        return None
    try:
        return pickle.load(file)
    except Exception as error:
        if code != 0:
            # It was ended while it wrote.
            return None
        text = f"what rank {rank} returned cannot be unpickled here: {error}"
        raise KerasHvdError(text) from error


def _results(outcomes: Sequence[call.Outcome | None], code: int) -> list[Any]:
    """What the ranks returned; raises if not all have."""
    failed = [
        (report.blames_a_peer(each.traceback.splitlines()), each.when, rank, each)
        for rank, each in enumerate(outcomes)
        if each is not None and each.error is not None
    ]
    if failed:
        _, _, first, outcome = min(failed)
        raise outcome.exception() from RankTraceback(first, outcome.traceback)
    missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if missing:
        names = ", ".join(map(str, missing))
        who = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
        raise RankFailedError(
            f"{who} ended before the function had returned; khvdrun {_ended(code)}, "
            "and said why in its last lines"
        )
    return [outcome.value for outcome in outcomes if outcome is not None]


def _ended(code: int) -> str:
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"ended with exit code {code}"
    return f"ended with exit code {code}, as after {name}"
