"""Parsers of the options' values. Each raises ArgumentTypeError, with the reason."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from keras_hvd.job import settings
from keras_hvd.world.rendezvous import address

_LARGEST_PORT = 2**16 - 1


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser for one of these words.

    Example:

    >>> one_of("none", "cores")("cores")
    'cores'
    """

    def parse(text: str) -> str:
        if text in choices:
            return text
        known = ", ".join(map(repr, choices))
        raise ArgumentTypeError(f"invalid choice: {text!r} (choose from {known})")

    return parse


def whole(least: int) -> Callable[[str], int]:
    """A parser for whole numbers from `least` on."""
    return lambda text: int(whole_text(least)(text))


def whole_text(least: int) -> Callable[[str], str]:
    """Like `whole`, with the number as text, for a variable."""

    def parse(text: str) -> str:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return text

    return parse


def host_counts(text: str) -> tuple[int, int]:
    """Parses a number of hosts, or the least and the most of a job that may change.

    Example:

    >>> host_counts("2"), host_counts("2:4")
    ((2, 2), (2, 4))
    """
    least, colon, most = text.partition(":")
    counts = whole(1)(least), whole(1)(most if colon else least)
    if counts[0] > counts[1]:
        raise ArgumentTypeError(f"{text!r}: the first number is more than the second")
    return counts


def rank_count(text: str) -> int:
    """Parses a number of processes."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ArgumentTypeError(
            f"{text!r} is not a number of processes: give 1 or more"
        )
    return int(text)


def rank_counts(text: str) -> tuple[int, ...]:
    """Parses several numbers of processes, to be compared."""
    counts = tuple(sorted({rank_count(each) for each in text.split(",")}))
    if counts == (1,):
        raise ArgumentTypeError("one rank has nothing to be compared with")
    return counts


def port(least: int) -> Callable[[str], int]:
    """A parser for ports from `least` on."""

    def parse(text: str) -> int:
        number = whole(least)(text)
        if number > _LARGEST_PORT:
            raise ArgumentTypeError(f"{text!r} is not a port")
        return number

    return parse


def rendezvous(text: str) -> str:
    """Parses HOST:PORT."""
    try:
        address.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def interfaces(text: str) -> str:
    """Parses names of network interfaces, for a variable."""
    try:
        settings.network_interfaces({"KERAS_HVD_NETWORK_INTERFACES": text})
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not names of network interfaces, with commas"
        ) from None
    return text


def ports(text: str) -> str:
    """Parses FIRST-LAST, for a variable."""
    try:
        settings.ports({"KERAS_HVD_PORTS": text})
    except ValueError:
        reason = f"{text!r} is not two port numbers, as 30000-30100"
        raise ArgumentTypeError(reason) from None
    return text


def seconds(text: str) -> float:
    """Parses a number of seconds, from 0."""
    return _from_0(text, "seconds")


def seconds_text(text: str) -> str:
    """Like `seconds`, as text for a variable."""
    seconds(text)
    return text.strip()


def mebibytes(text: str) -> str:
    """Converts a number of MiB to bytes, for a variable."""
    return str(int(_from_0(text, "MiB") * 2**20))


def _from_0(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    # This form also refuses NaN.
    if not 0 <= number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of {what}")
    return number


def log_level(text: str) -> str:
    """Parses a level of `KERAS_HVD_LOG_LEVEL`."""
    if text.lower() not in settings.LOG_LEVELS:
        known = ", ".join(settings.LOG_LEVELS)
        raise ArgumentTypeError(f"{text!r} is not one of {known}")
    return text.lower()


def words(text: str) -> tuple[str, ...]:
    """Splits the text into words, as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None


def file_to_write(text: str) -> str:
    """The absolute path of a file that a rank will write."""
    path = Path(text)
    return _writable(path, lambda: path if path.exists() else path.parent)


def file_to_replace(text: str) -> str:
    """Like `file_to_write`, for a file to be replaced: its folder must be writable."""
    path = Path(text)
    return _writable(path, lambda: path.parent)


def _writable(path: Path, written: Callable[[], Path]) -> str:
    try:
        is_folder = path.is_dir()
        can_write = path.parent.is_dir() and os.access(written(), os.W_OK)
    except OSError as error:
        raise ArgumentTypeError(
            f"cannot write {str(path)!r}: {error.strerror}"
        ) from None
    if is_folder:
        raise ArgumentTypeError(f"{str(path)!r} is a directory")
    if not can_write:
        raise ArgumentTypeError(f"cannot write {str(path)!r}")
    # Ranks may change their directory before they open the file.
    return os.path.abspath(path)
