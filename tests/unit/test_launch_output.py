"""khvdrun's reading of the output of ranks, also of very long lines."""

import importlib
import pkgutil
import re
import time

import pytest

from keras_hvd.launch import report
from keras_hvd.launch.output import Tail
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


def test_what_would_act_on_a_terminal_is_shown_as_text():
    (line,) = tail_of(b"\x1b[1;31mError\x1b[0m: tensor 'a\x1b[2J\x07\tb'\n").lines()
    assert line == "Error: tensor 'a\\x1b[2J\\x07\tb'"
