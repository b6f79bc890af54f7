"""Starts one rank, connects it, and records how it ended."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import tty
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keras_hvd.launch import processes
from keras_hvd.launch.options import Options
from keras_hvd.launch.output import (
    CarriageReturnFilter,
    Lines,
    LiveLines,
    Prefix,
    Screen,
    Stream,
    Tail,
    WholeLines,
)

TAIL_LINES = 20
"""The number of last lines of a rank's stderr in a report."""


@dataclass
class Rank:
    """A started rank."""

    number: int
    process: int
    streams: list[Stream]
    stderr: Tail = field(repr=False)
    status: int | None = None  # the wait status, once it has ended
    wake: int = 0  # the round of the launcher's loop that saw its end
    was_told: bool = False  # whether the launcher had told it to end
    start: int = 1  # how often its number was started by then
    host: str = ""  # where it runs, if that is another one
    send: Callable[[int], None] | None = None  # there, a signal

    @property
    def name(self) -> str:
        """Its number, and where to look for it."""
        place = f"on {self.host}" if self.host else f"process {self.process}"
        return f"rank {self.number} ({place})"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the rank's process group, if the rank still runs."""
        if self.status is not None:
            return
        if self.send is not None:
            self.send(number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process, number)

    def end_rest(self) -> None:
        """Ends what it has started, which would be in its successor's way."""
        if not self.host:
            with contextlib.suppress(OSError):
                os.killpg(self.process, signal.SIGTERM)


def start(
    number: int,
    options: Options,
    begin: Callable[[tuple[int, int, int]], int],
    stdout: Screen,
    stderr: Screen,
    start: int = 1,
    lines_of: Callable[[int, Options, Screen], Lines] | None = None,
) -> Rank:
    """Starts rank `number`.

    Rank 0 gets the launcher's standard input and live output. `begin` starts its
    process, with these descriptors, and may raise OSError. `start` counts the processes
    of this number, whose files must not replace each other.
    """
    is_live = number == 0
    prefix = _prefix(number, options)
    ends = [_connection(screen, is_live, prefix) for screen in (stdout, stderr)]
    try:
        process = begin((stdin(number), ends[0][1], ends[1][1]))
    finally:
        for _, write_end in ends:
            os.close(write_end)
    tail = Tail(TAIL_LINES)
    streams = [
        Stream(
            read_end,
            (lines_of or lines)(number, options, screen),
            screen,
            file(options.output_directory, number, name, start),
            tail if name == "stderr" else None,
        )
        for (read_end, _), screen, name in zip(
            ends, (stdout, stderr), ("stdout", "stderr"), strict=True
        )
    ]
    return Rank(number, process, streams, tail, start=start)


def spawn(
    command: Sequence[str],
    executable: str,
    environment: Mapping[str, str],
    cores: set[int] | None,
    descriptors: tuple[int, int, int],
) -> int:
    """Starts a process in its own session that ends with this one; returns its id.

    `descriptors` become its stdin, stdout and stderr. Raises OSError if the command
    cannot be executed.
    """
    launcher = os.getpid()

    def prepare() -> None:
        processes.die_with_parent(launcher)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)

    child = subprocess.Popen(
        command,
        executable=executable,
        env=environment,
        start_new_session=True,
        preexec_fn=prepare,
        stdin=descriptors[0],
        stdout=descriptors[1],
        stderr=descriptors[2],
    )
    # The launcher reaps all of its children itself.
    child.returncode = 0
    processes.note_leader(child.pid)
    return child.pid


def fit_terminals(rank: Rank, options: Options) -> None:
    """Gives a rank's terminals the size of the real terminals, less the prefix."""
    for stream in rank.streams:
        _fit(stream.descriptor, stream.screen, _prefix(rank.number, options))


def _fit(descriptor: int, screen: Screen, prefix: Prefix) -> None:
    if not os.isatty(descriptor):
        return
    columns, rows = os.get_terminal_size(screen.descriptor)
    size = struct.pack("HHHH", rows, max(columns - len(prefix.now()), 0), 0, 0)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, size)


def _prefix(number: int, options: Options) -> Prefix:
    return Prefix(number if options.prefix else None, options.timestamps)


def lines(number: int, options: Options, screen: Screen) -> LiveLines | WholeLines:
    """The formatter for the output of rank `number`."""
    prefix = _prefix(number, options)
    if number != 0:
        return WholeLines(screen, prefix)
    keeps_returns = screen.is_terminal or options.live_output
    return LiveLines(screen, prefix, None if keeps_returns else CarriageReturnFilter())


def _connection(screen: Screen, is_live: bool, prefix: Prefix) -> tuple[int, int]:
    """A read and a write end: of a terminal if the screen is one and the rank live."""
    if not (is_live and screen.is_terminal):
        return os.pipe2(os.O_CLOEXEC)
    master, slave = pty.openpty()
    # The real terminal already turns a line feed into carriage return and line feed.
    modes = termios.tcgetattr(slave)
    modes[tty.OFLAG] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    _fit(master, screen, prefix)
    return master, slave


def stdin(number: int) -> int:
    """The standard input of rank `number`."""
    # A rank is not in the terminal's session and cannot read from it.
    if number == 0 and not os.isatty(0):
        return 0
    return subprocess.DEVNULL


def file(directory: Path | None, number: int, name: str, start: int = 1) -> Path | None:
    """The file for a rank's output; None for none."""
    if directory is None:
        return None
    return directory / f"rank.{number}" / (name if start == 1 else f"{name}.{start}")
