"""The loop of a contender's rank: it waits for a command, measures, answers.

A benchmark starts all contenders and then asks one after the other. The others wait in
a read meanwhile. So they take no time from the one that is asked, even if their
libraries spin while ranks wait for each other.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
from collections.abc import Callable

import numpy as np


def parser() -> argparse.ArgumentParser:
    """Arguments that every contender gets from `measurement.Job`."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--socket", required=True, help="where commands come from")
    arguments.add_argument("--cores", help="to bind the ranks to: 0,1/2,3")
    return arguments


def bind(cores: str | None, rank: int) -> None:
    """Binds this process to its cores, if its launcher did not."""
    if cores:
        mine = cores.split("/")[rank]
        os.sched_setaffinity(0, {int(core) for core in mine.split(",")})


class Session:
    """The connection to the benchmark that asks.

    Args:
        path: the benchmark's socket.
        rank: this process' rank.
        size: the number of ranks.
        version: of the contender, for the table.
    """

    def __init__(self, path: str, rank: int, size: int, version: str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw", encoding="utf-8")
        cores = sorted(os.sched_getaffinity(0))
        self.reply(rank=rank, size=size, version=version, cores=cores)

    def command(self) -> dict | None:
        """Waits for the next command, without using a core; None at the end."""
        line = self._stream.readline()
        return json.loads(line) if line else None

    def reply(self, **values: object) -> None:
        """Answers a command."""
        self._stream.write(json.dumps(values) + "\n")
        self._stream.flush()

    def serve(self, measure: Callable[..., list[float]]) -> None:
        """Passes every command to `measure` and answers with its result.

        Args:
            measure: takes the fields of a command, returns the seconds of each call.
        """
        while (command := self.command()) is not None:
            try:
                self.reply(seconds=measure(**command))
            except Exception as error:
                self.reply(error=f"{type(error).__name__}: {error}")
                raise


def buffer(size: int) -> np.ndarray:
    """Private memory for float32 numbers, whole pages, all of them touched.

    Args:
        size: in bytes.

    Returns:
        An array of zeros. Every contender's data lies in memory of this kind.
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.float32)
    array.fill(0)
    return array


def require_sum(array: np.ndarray, reduce: Callable[[], object], rank: int, size: int):
    """Makes a contender reduce numbers whose sum is known; then all is zero again.

    Args:
        array: the numbers that `reduce` sums over all ranks, in place.
        reduce: the call that will be measured.
        rank: this process' rank.
        size: the number of ranks.

    Raises:
        ValueError: the sum is wrong.
    """
    array.fill(rank + 1)
    reduce()
    expected = size * (size + 1) / 2
    if not (array == expected).all():
        raise ValueError(f"wrong sum: {array[array != expected][:4]}, not {expected}")
    array.fill(0)
