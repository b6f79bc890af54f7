"""khvdrun's reading of the output of ranks, also of very long lines."""

import importlib
import os
import pkgutil
import re
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from keras_hvd.launch import command_line, report
from keras_hvd.launch.handed_over import TaggedLines
from keras_hvd.launch.output import (
    CarriageReturnFilter,
    LiveLines,
    Prefix,
    Screen,
    Tail,
    WholeLines,
)
from keras_hvd.launch.rank import Rank

_LETTERS = 1 << 17
_PIECES = (
    *("x", "1", " ", ",", "[", "[1", "[1,", "]", "\r", "\x1b[", "\x1b[0;", "HYDRA "),
    *("rank 1 (pid 1 on ", "rank 1 (pid 1 on a) was killed by SIG", "Process name: ["),
    *("Process name: [a,1", "keras_hvd [rank 1", "srun: error: ", "Error", "=   PID 1"),
)


def expressions() -> dict[str, re.Pattern]:
    """All of the modules that read text of users, files or other processes."""
    found = {}
    for folder in ("launch", "report", "world.rendezvous", "timeline"):
        package = importlib.import_module(f"keras_hvd.{folder}")
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if one.name.endswith("__main__"):
                continue
            module = importlib.import_module(one.name)
            for name, value in vars(module).items():
                if isinstance(value, re.Pattern):
                    found[f"{one.name}.{name}"] = value
    return found


def test_no_expression_takes_the_square_of_a_line_s_length():
    patterns = expressions()
    assert "keras_hvd.launch.report._TELLS_OF_ERROR" in patterns
    for name, pattern in patterns.items():
        for piece in _PIECES:
            text = piece * (_LETTERS // len(piece)) + "!"
            line = text.encode() if isinstance(pattern.pattern, bytes) else text
            began = time.thread_time()
            for _ in pattern.finditer(line):
                pass
            # The square takes minutes.
            assert time.thread_time() - began < 1, (name, piece)


def tail_of(written: bytes, *, at_once: int = 1 << 16) -> Tail:
    tail = Tail(3)
    for at in range(0, len(written), at_once):
        tail.feed(written[at : at + at_once])
    return tail


@pytest.mark.parametrize("end", [b"\n", b""], ids=["ended", "not ended"])
def test_a_long_line_is_read_at_its_ends(end):
    tail = tail_of(b"ValueError: " + b"x" * 60_000 + b" of rank 7" + end)
    (line,) = tail.lines()
    assert len(line) == 1000
    assert line.startswith("ValueError: x") and line.endswith("x of rank 7")


def test_the_last_error_is_found_in_whatever_a_rank_writes():
    def last_error(written):
        return report.last_error(Rank(0, 7, [], tail_of(written)))

    long = b"x" * 60_000
    assert last_error(long + b"\n") == ""
    assert last_error(b"KeyError: 1\nnothing\n") == "KeyError: 1"
    assert last_error(b"x" * 60_000 + b" my.own.Exception: 2\n").endswith(
        " my.own.Exception: 2"
    )
    assert last_error(b"1/9\r2/9\rOwnInterrupt\n") == "OwnInterrupt"
    assert last_error(b"NoErrors at all\n") == ""
    # More digits than int() takes.
    peer = b"RankFailedError: rank 1 (pid " + b"9" * 5000 + b" on a) has left\n"
    assert last_error(peer).startswith("RankFailedError")


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_a_rank_is_at_fault_only_where_its_host_is_named_too(host):
    """In each pod the first rank may be process 7."""
    error = f"RankFailedError: rank 1 (pid 7 on {host}) has left\n"
    rank = Rank(0, 7, [], tail_of(error.encode()))
    is_elsewhere = report.of_others([rank], rank) == report.NOT_HERE
    assert is_elsewhere == (host == "another")


def test_what_would_act_on_a_terminal_is_shown_as_text():
    (line,) = tail_of(b"\x1b[1;31mError\x1b[0m: tensor 'a\x1b[2J\x07\tb'\n").lines()
    assert line == "Error: tensor 'a\\x1b[2J\\x07\tb'"


@pytest.fixture
def screen() -> Iterator[tuple[Screen, Callable[[], str]]]:
    """A screen that is no terminal, and what it shows."""
    end, descriptor = os.pipe()
    yield Screen(descriptor), lambda: os.read(end, 1 << 16).decode()
    os.close(end)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("rest", "shown"), [(b"\nnext\n", "[0] next\n"), (b" b\n\n", "[0]  b\n[0] \n")]
)
def test_a_line_that_another_ranks_line_cuts_off_ends_once(screen, rest, shown):
    """A print() of two writes, with a pause between them."""
    screen, read = screen
    live = LiveLines(screen, Prefix(0, False), CarriageReturnFilter())
    live.feed(b"text")
    live.show_held()
    WholeLines(screen, Prefix(1, False)).feed(b"other\n")
    live.feed(rest)
    assert read() == f"[0] text\n[1] other\n{shown}"


def test_a_line_that_is_cut_off_before_a_carriage_return_ends_once(screen):
    screen, read = screen
    live = LiveLines(screen, Prefix(0, False), None)
    live.feed(b"text")
    live.show_held()
    WholeLines(screen, Prefix(1, False)).feed(b"other\n")
    live.feed(b"\r\nnext\n")
    assert read().replace("\r", "") == "[0] text\n[1] other\n[0] next\n"


def test_a_line_is_held_for_its_time_however_long_anothers_was(screen):
    """Under mpirun the ranks have one stream, and one time at which to show lines."""
    screen, read = screen
    tag = re.compile(rb"\[(\d)\]<rank>:")
    options = command_line.parse(["-np", "2", "true"])
    lines = TaggedLines(options, screen, tag, None, Tail(1), {})
    lines.feed(b"[0]<rank>:text")
    lines.show_held()
    assert lines.is_holding
    lines.feed(b"[1]<rank>:other\n[0]<rank>: more\n")
    assert read() == "[1] other\n[0] text more\n"
