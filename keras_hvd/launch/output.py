"""Passes output from the ranks' pipes to the terminal: lines marked with their rank.

A `Stream` is a source of output, and a `Screen` its target. Rank 0's streams are live:
its output appears at once, so progress bars, which rewrite their line, work. Other
ranks' lines appear when they are complete. In a file, a line that was rewritten appears
only in its last state.
"""

import collections
import contextlib
import datetime
import os
import re
import select
import time
from pathlib import Path
from typing import BinaryIO, Protocol

from keras_hvd.recording import files

# A pipe that poll() reports as writable takes this much without blocking (PIPE_BUF).
_WRITE_BYTES = 4096

# The most output that waits for a slow reader. Beyond it nothing more is read from the
# ranks, so in time they wait too.
_QUEUE_BYTES = 1 << 20

# A longer line is broken here.
_LINE_BYTES = 1 << 16

# Long enough for a rank to end its line with a second write, and too short to notice.
# Without it, other ranks' lines would cut through rank 0's.
_HOLD_SECONDS = 0.1

_PIECES = re.compile(rb"[^\r\n]*(?:[\r\n]|\Z)")

_CLEAR_LINE = b"\r\x1b[K"

_TENSORFLOWS_START = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called"
    r"|.{,80} oneDNN custom operations are on\."
    r"|.{,80} This TensorFlow binary is optimized "
    r"|To enable the following instructions: "
)

# A report cuts a longer line: it shows the beginning and the end. A rank may write
# megabytes without a line end, and a reader of such lines holds up the whole job.
_KEPT_LETTERS = 1000
_CUT_OUT = " ... "

# In a report these letters would act on the terminal that shows it.
_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) != "\t"}

# The engine's own warnings. A report has the first ones of each rank.
_WARNING = re.compile(rb"keras_hvd \[rank \d+\] warning: .*")
_MOST_WARNINGS = 20

# Escape sequences for colours and bold letters.
_STYLES = re.compile(rb"\x1b\[[0-9;]*m")


class Screen:
    """A terminal, pipe or file that several streams write to."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.is_broken = False
        self.why_incomplete = ""
        """The reason for lost output: the disk is full. There may be room later."""
        self._queue = bytearray()
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        self._unfinished: LiveLines | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether output waits for the reader."""
        return bool(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether so much output waits that no more should be read from the ranks."""
        return len(self._queue) >= _QUEUE_BYTES

    def write_lines(self, lines: bytes) -> None:
        """Writes complete lines, above the unfinished line of a live stream."""
        if not lines:
            return
        unfinished = self._unfinished
        if unfinished is None:
            self._write(lines)
        elif self.is_terminal:
            self._write(_CLEAR_LINE + lines + unfinished.redrawn())
        else:
            unfinished.cut_off()
            self._unfinished = None
            self._write(b"\n" + lines)

    def write_live(self, source: "LiveLines", data: bytes) -> None:
        """Writes a live stream's formatted output, complete or not."""
        if self._unfinished not in (None, source):
            self._unfinished.cut_off()
            self._write(b"\n")
        self._unfinished = source if source.shown else None
        self._write(data)

    def flush(self) -> None:
        """Writes as much as the reader takes without blocking."""
        while self._queue and self._writable.poll(0):
            try:
                written = os.write(self.descriptor, self._queue[:_WRITE_BYTES])
            except BlockingIOError:
                return
            except OSError as error:
                self._queue.clear()
                if files.is_full(error):
                    self.why_incomplete = str(error.strerror)
                else:
                    # The reader (EPIPE) or the terminal (EIO) is gone.
                    self.is_broken = True
                return
            del self._queue[:written]

    def _write(self, data: bytes) -> None:
        if self.is_broken:
            return
        self._queue += data
        self.flush()


class Prefix:
    """The start of a line: the rank (unless None), and the time if wanted.

    Example:

    >>> Prefix(rank=2, timestamps=False).now()
    b'[2] '
    """

    def __init__(self, rank: int | None, timestamps: bool):
        self._rank = "" if rank is None else f"[{rank}] "
        self._timestamps = timestamps

    def now(self) -> bytes:
        """The prefix of a line that has just arrived."""
        if not self._timestamps:
            return self._rank.encode()
        time = datetime.datetime.now().isoformat(" ", "milliseconds")
        return f"{time} {self._rank}".encode()


class WholeLines:
    """Formats a stream and shows only complete lines.

    A line rewritten with carriage returns appears in its last state. TensorFlow's
    startup messages are left out, because rank 0 has shown the same.
    """

    def __init__(self, screen: Screen, prefix: Prefix):
        self._screen = screen
        self._prefix = prefix
        self._rest = b""

    is_holding = False
    """Whether something must be shown soon, even if no more arrives."""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._show(lines)

    def show_held(self) -> None:
        """Shows nothing: an incomplete line waits for its end."""

    def finish(self) -> None:
        """Shows a last line that has no line end."""
        if self._rest:
            self._show([self._rest])
            self._rest = b""

    def _show(self, lines: list[bytes]) -> None:
        prefix = self._prefix.now()
        self._screen.write_lines(
            b"".join(
                prefix + last_state(line) + b"\n"
                for line in lines
                if not is_of_tensorflows_start(line.decode(errors="replace"))
            )
        )


class CarriageReturnFilter:
    """Removes carriage returns from a live stream, and the text that they rewrite.

    Text before a line's first carriage return passes at once.
    """

    def __init__(self):
        self._has_begun = False
        self._is_rewinding = False
        self._state: bytes | None = None
        """The text after the line's last carriage return; None before the first."""

    def filter(self, data: bytes) -> bytes:
        """Takes the next bytes and returns those that can be shown now."""
        return b"".join(map(self._filter, _PIECES.findall(data)))

    def finish(self) -> bytes:
        """Returns the rest at the end of the stream."""
        state, self._state = self._state or b"", None
        if not state:
            return b""
        return (b"\n" if self._has_begun else b"") + _STYLES.sub(b"", state)

    def _filter(self, piece: bytes) -> bytes:
        text = piece.rstrip(b"\r\n")
        end = piece[len(text) :]
        if not self._has_begun or self._is_rewinding:
            # At the start of a line, backspaces have nothing to go back over.
            text = text.lstrip(b"\b")
        shown = b""
        if self._state is None:
            shown = text
            self._has_begun = self._has_begun or bool(text)
        elif text:
            begun = b"" if self._is_rewinding else self._state
            self._state = (begun + text)[-_LINE_BYTES:]
            self._is_rewinding = False
        if end == b"\r":
            self._state = self._state or b""
            self._is_rewinding = True
        elif end == b"\n":
            shown += self.finish() + end
            self._has_begun = self._is_rewinding = False
        return shown


class LiveLines:
    """Formats a stream that is shown at once, unfinished lines included.

    The prefix appears again when a line is rewritten. `returns` removes carriage
    returns; None leaves them in.
    """

    def __init__(
        self, screen: Screen, prefix: Prefix, returns: CarriageReturnFilter | None
    ):
        self._screen = screen
        self._prefix = prefix
        self._returns = returns
        self._held = b""
        self._is_rewinding = False
        self._was_cut_off = False
        self.shown = b""
        """The unfinished line as the screen shows it; empty between lines."""

    @property
    def is_holding(self) -> bool:
        """Whether the beginning of a line is not shown yet."""
        return bool(self._held)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes and shows all of them except an unfinished line."""
        if self._returns is not None:
            data = self._returns.filter(data)
        data = self._held + data
        ended = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._held = data[ended:]
        self._show(data[:ended])

    def show_held(self) -> None:
        """Shows the beginning of a line whose rest has not arrived."""
        held, self._held = self._held, b""
        self._show(held)

    def finish(self) -> None:
        """Ends a last line that has no line end."""
        if self._returns is not None:
            self._held += self._returns.finish()
        self.show_held()
        if self.shown:
            self.feed(b"\n")

    def _show(self, data: bytes) -> None:
        formatted = b"".join(map(self._format, _PIECES.findall(data)))
        if formatted:
            self._screen.write_live(self, formatted)

    def redrawn(self) -> bytes:
        """Text that restores the unfinished line and its cursor on an empty line."""
        return self.shown + b"\r" if self._is_rewinding else self.shown

    def leave_line(self) -> None:
        """Forgets the unfinished line: the screen has moved on to another one."""
        self.shown = b""
        self._is_rewinding = False

    def cut_off(self) -> None:
        """Forgets the unfinished line, which another's line ends on the screen."""
        self.leave_line()
        self._was_cut_off = True

    def _format(self, piece: bytes) -> bytes:
        if piece and self._was_cut_off:
            self._was_cut_off = piece == b"\r"
            if piece == b"\n":
                return b""  # The line has ended already.
        text = piece.rstrip(b"\r\n")
        end = piece[len(text) :]
        if not self.shown or self._is_rewinding:
            # At the start of a line, backspaces have nothing to go back over.
            text = text.lstrip(b"\b")
        formatted = b""
        if text or (end == b"\n" and not self.shown):
            formatted = self._begun(text)
        if end == b"\n":
            self.leave_line()
        elif end == b"\r":
            self._is_rewinding = True
        return formatted + end

    def _begun(self, text: bytes) -> bytes:
        if self.shown and not self._is_rewinding:
            self.shown = (self.shown + text)[-_LINE_BYTES:]
            return text
        self.shown = self._prefix.now() + text
        self._is_rewinding = False
        return self.shown


class Tail:
    """Keeps the last lines of a stream for the report of a failure.

    Attributes:
        warnings: the first of keras_hvd's own warnings, and when they came
            (`time.time`).
    """

    def __init__(self, count: int):
        self.warnings: list[tuple[float, str]] = []
        self._count = count
        self._lines: collections.deque[str] = collections.deque(maxlen=count)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE_BYTES:]
        self._lines.extend(map(readable, lines[-self._count :]))
        if len(self.warnings) >= _MOST_WARNINGS:
            return
        for line in lines:
            if said := _WARNING.search(line):
                self.warnings.append((time.time(), readable(said[0])))
        del self.warnings[_MOST_WARNINGS:]

    def lines(self) -> list[str]:
        """The last lines as text of bounded length, each in its last state."""
        lines = [*self._lines]
        if self._rest:
            lines.append(readable(self._rest))
        return lines[-self._count :]


class Lines(Protocol):
    """Formats a stream for a screen: see `WholeLines`."""

    @property
    def is_holding(self) -> bool: ...

    def feed(self, data: bytes) -> None: ...

    def show_held(self) -> None: ...

    def finish(self) -> None: ...


class Copy:
    """A file that keeps a rank's output unchanged, as long as it can grow.

    `screen` shows why it cannot. Raises OSError if it cannot be made, except for lack
    of room.
    """

    def __init__(self, path: Path, screen: Screen):
        self._path = path
        self._screen = screen
        self._file: BinaryIO | None = None
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            if not files.is_full(error):
                raise
            self._cut_off(error)

    def feed(self, data: bytes) -> None:
        """Keeps the next bytes."""
        rest = memoryview(data)
        try:
            while self._file is not None and rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._cut_off(error)

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _cut_off(self, error: OSError) -> None:
        self.close()
        message = f"khvdrun: {self._path} is cut off here: {error.strerror}\n"
        self._screen.write_lines(message.encode())


class Stream:
    """One rank's standard output or error.

    `descriptor` is the read end of a pipe, or the master of a terminal. The stream goes
    through `lines` to the screen, and unchanged to `file` and `tail` if these are
    given.
    """

    def __init__(
        self,
        descriptor: int,
        lines: Lines,
        screen: Screen,
        file: Path | None,
        tail: Tail | None,
    ):
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.screen = screen
        self.show_at: float | None = None
        """When to call `show_held` if no more arrives first (`time.monotonic`)."""
        self._lines = lines
        self._copy = None if file is None else Copy(file, screen)
        self._tail = tail

    def pump(self) -> bool:
        """Passes on the available bytes; returns False after the end of the stream."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            # A terminal's master reports EIO when its last user has closed it.
            data = b""
        if not data:
            return False
        if self._copy is not None:
            self._copy.feed(data)
        if self._tail is not None:
            self._tail.feed(data)
        self._lines.feed(data)
        if not self._lines.is_holding:
            self.show_at = None
        elif self.show_at is None or b"\n" in data or b"\r" in data:
            self.show_at = time.monotonic() + _HOLD_SECONDS
        return True

    def show_held(self) -> None:
        """Shows the beginning of a line whose rest has not arrived."""
        self._lines.show_held()
        again = self._lines.is_holding
        self.show_at = time.monotonic() + _HOLD_SECONDS if again else None

    def close(self) -> None:
        """Ends the last line and closes the files."""
        self._lines.finish()
        os.close(self.descriptor)
        if self._copy is not None:
            self._copy.close()


def last_state(line: bytes) -> bytes:
    r"""The text that a terminal shows for a line after its carriage returns.

    Example:

    >>> last_state(b"1/2\r2/2")
    b'2/2'
    """
    _, rewritten, state = line.rstrip(b"\r").rpartition(b"\r")
    return _STYLES.sub(b"", state) if rewritten else state


def readable(line: bytes) -> str:
    r"""A line's last state as text of bounded length, which controls no terminal.

    Example:

    >>> readable(b"1/2\r\x1b[31m2/2\x07")
    '2/2\\x07'
    >>> len(readable(b"x" * 60000))
    1000
    """
    text = _STYLES.sub(b"", last_state(line)).decode(errors="replace")
    if len(text) > _KEPT_LETTERS:
        half = (_KEPT_LETTERS - len(_CUT_OUT)) // 2
        text = f"{text[: _KEPT_LETTERS - len(_CUT_OUT) - half]}{_CUT_OUT}{text[-half:]}"
    return text.translate(_CONTROLS)


def is_of_tensorflows_start(line: str) -> bool:
    """Whether TensorFlow writes this line at every import."""
    return _TENSORFLOWS_START.match(line) is not None
