"""A rank for the tests under faults: random collectives, each checked with NumPy.

The seed alone decides the collectives of a step, the same on all ranks. Each rank asks
for them in an order of its own. It says "looping PID" before it joins the job, and at
the end how many wakes were lost. It notes in RECORDS/N.json which error ended it and
when, on the clock that all processes of a machine share.

With --engine FOLDER the libraries are those of a build with faults (see
tf_ops/transport/faults.h), and the options tell which.
"""

import argparse
import ctypes
import functools
import json
import os
import queue
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

import keras_hvd
from keras_hvd import exceptions
from keras_hvd.job import native

ALLREDUCE, ALLGATHER, BROADCAST, BARRIER, REDUCESCATTER, ALLTOALL = range(6)
GROUPED = (ALLREDUCE, REDUCESCATTER)
AVERAGE, SUM, MIN, MAX, PRODUCT = range(5)
# In the order of khvd_dtype.
DTYPES = [
    np.dtype(dtype)
    for dtype in (
        *("uint8", "int8", "int32", "int64", "float16"),
        *(ml_dtypes.bfloat16, "float32", "float64", "bool", "uint32", "uint64"),
        *(ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn),
    )
]
# Floats that are reduced in float32.
NARROW = (DTYPES[4], DTYPES[5], DTYPES[11], DTYPES[12])
# Of equal numbers, which zeros of both signs are, the first one stays. With NumPy's own
# minimum and maximum that depends on the processor.
REDUCE = {
    MIN: lambda first, second: np.where(second < first, second, first),
    MAX: lambda first, second: np.where(first < second, second, first),
    PRODUCT: np.multiply,
}


@dataclass
class Collective:
    """A request of all ranks; the shapes are those of its tensors."""

    kind: int
    name: str
    dtype: np.dtype
    seed: list[int]
    ranks: int
    local_ranks: int  # of each host
    # One for each tensor; an allgather's for each rank, an alltoall's for each two.
    sizes: list[int] = field(default_factory=list)
    op: int = SUM
    scales: tuple[float, float] = (1, 1)
    root: int = 0
    in_place: bool = False

    def input(self, rank: int, tensor: int) -> np.ndarray:
        """A rank's input, which every rank can compute."""
        size = self.sizes[rank if self.kind == ALLGATHER else tensor]
        if self.kind == ALLTOALL:
            size = sum(self.splits(rank))
        numbers = np.random.default_rng([*self.seed, rank, tensor])
        if self.dtype.kind in "iu":
            low, high = (0, 200) if self.dtype.kind == "u" else (-100, 100)
            return numbers.integers(low, high, size).astype(self.dtype)
        if self.dtype.kind == "b":
            return numbers.integers(0, 4, size) > 0
        return numbers.standard_normal(size, np.float32).astype(self.dtype)

    def splits(self, rank: int) -> list[int]:
        """The numbers of elements that a rank sends to each in an alltoall."""
        return self.sizes[rank * self.ranks : (rank + 1) * self.ranks]

    def expected(self, tensor: int, rank: int) -> np.ndarray:
        """The result that a rank must get, to the bit."""
        if self.kind == BROADCAST:
            return self.input(self.root, tensor)
        inputs = [self.input(peer, tensor) for peer in range(self.ranks)]
        if self.kind == ALLGATHER:
            return np.concatenate(inputs)
        if self.kind == ALLTOALL:
            ends = [np.cumsum(self.splits(peer)) for peer in range(self.ranks)]
            return np.concatenate(
                [
                    given[end[rank] - self.splits(peer)[rank] : end[rank]]
                    for peer, (given, end) in enumerate(zip(inputs, ends, strict=True))
                ]
            )
        reduced = self.reduced(inputs)
        if self.kind == REDUCESCATTER:
            return np.array_split(reduced, self.ranks)[rank]
        return reduced

    def reduced(self, inputs: list[np.ndarray]) -> np.ndarray:
        """The elements in the order of the ranks, narrow floats in float32.

        Of several hosts with several ranks, each host's come first. They leave it in
        their own type, and averages of narrow floats already divided. Wider types are
        then taken in pairs: the first half of the hosts, and the others.
        """
        wide = self.dtype
        if self.dtype in NARROW:
            wide = np.dtype("float32")
        elif self.op == AVERAGE and self.dtype.kind in "iu":
            wide = np.dtype("int64")
        before, after = (np.asarray(scale, wide) for scale in self.scales)
        with np.errstate(over="ignore"):
            scaled = [each.astype(wide) * before for each in inputs]
            if wide.kind != "i" and 1 < self.local_ranks < self.ranks:
                scaled = [
                    self.leaving(scaled[first : first + self.local_ranks])
                    for first in range(0, self.ranks, self.local_ranks)
                ]
            if self.local_ranks < self.ranks and self.dtype not in NARROW:
                result = self.combined_in_pairs(scaled)
            else:
                result = self.combined(scaled)
            if self.op == AVERAGE and wide.kind == "i":
                result = np.sign(result) * (np.abs(result) // len(inputs))
            elif self.op == AVERAGE and not self.divides_early():
                result = result / np.asarray(len(inputs), wide)
            return (result * after).astype(self.dtype)

    def combined(self, inputs: list[np.ndarray]) -> np.ndarray:
        return functools.reduce(REDUCE.get(self.op, np.add), inputs)

    def combined_in_pairs(self, inputs: list[np.ndarray]) -> np.ndarray:
        """For a power of two of hosts, as all layouts of this test have."""
        if len(inputs) == 1:
            return inputs[0]
        middle = len(inputs) // 2
        halves = inputs[:middle], inputs[middle:]
        return self.combined([self.combined_in_pairs(half) for half in halves])

    def divides_early(self) -> bool:
        return self.dtype in NARROW and 1 < self.local_ranks < self.ranks

    def leaving(self, inputs: list[np.ndarray]) -> np.ndarray:
        """The result of a host, as it leaves it."""
        result = self.combined(inputs)
        if self.op == AVERAGE and self.divides_early():
            result = result / np.asarray(self.ranks, result.dtype)
        return result.astype(self.dtype).astype(result.dtype)


def collectives(seed: int, step: int, ranks: int, local_ranks: int) -> list[Collective]:
    """The requests of a step: one to six, with names of earlier steps."""
    chance = random.Random(f"{seed} {step}")
    names = chance.sample(range(20), chance.randint(1, 6))
    return [
        _collective(chance, f"tensor {name}", [seed, step, place], ranks, local_ranks)
        for place, name in enumerate(names)
    ]


def _collective(
    chance: random.Random, name: str, seed: list[int], ranks: int, local_ranks: int
) -> Collective:
    kind = chance.choices(range(6), (6, 2, 2, 1, 2, 2))[0]
    asked = Collective(kind, name, chance.choice(DTYPES), seed, ranks, local_ranks)
    if kind == BARRIER:
        return asked
    counts = {ALLGATHER: ranks, BROADCAST: 1, ALLTOALL: ranks * ranks}
    count = counts.get(kind) or chance.choice((1, 1, 1, 2, 6))
    # Every length is as likely as its half; some are empty, some take many rounds.
    longest = 20 if chance.random() < 0.05 else 15
    asked.sizes = [int(2 ** chance.uniform(-1, longest)) for _ in range(count)]
    asked.root = chance.randrange(ranks)
    asked.in_place = chance.random() < 0.5
    if kind in GROUPED:
        is_bool = asked.dtype.kind == "b"
        asked.op = chance.choice((MIN, MAX, PRODUCT) if is_bool else (*range(5),))
        # Powers of two, like the number of ranks: no rounding depends on the order.
        if asked.dtype.kind not in "iub":
            asked.scales = (chance.choice((0.5, 1, 2)), chance.choice((0.5, 1, 2)))
    return asked


class Pending:
    """A collective that this rank has asked for, and its memory."""

    def __init__(self, asked: Collective, rank: int, ended: queue.SimpleQueue) -> None:
        self.asked = asked
        kind = asked.kind
        count = len(asked.sizes) if kind in GROUPED else kind != BARRIER
        self.inputs = [asked.input(rank, tensor) for tensor in range(count)]
        self.outputs = [self.output(each, rank) for each in self.inputs]
        self.done = native.Done(lambda _, code, text: ended.put((code, text.decode())))
        self.allocate = native.Allocate(self.give_memory)
        self.tensors = (native.Tensor * max(count, 1))(
            *map(self.tensor, self.inputs, self.outputs)
        )
        self.request = native.Request(
            struct_size=ctypes.sizeof(native.Request),
            kind=kind,
            name=asked.name.encode(),
            submitter=1,
            reduce_op=asked.op,
            root=asked.root,
            prescale=asked.scales[0],
            postscale=asked.scales[1],
            count=count,
            tensors=self.tensors,
            done=self.done,
            allocate=self.allocate,
        )
        if kind == ALLTOALL:
            splits = asked.splits(rank)
            self.request.splits = (ctypes.c_int64 * len(splits))(*splits)
            self.request.split_count = len(splits)

    def output(self, given: np.ndarray, rank: int) -> np.ndarray | None:
        if self.asked.kind in (ALLGATHER, ALLTOALL):
            return None  # when it is known how much there is
        if self.asked.kind == REDUCESCATTER:
            return np.array_split(given, self.asked.ranks)[rank].copy()
        return given if self.asked.in_place else given.copy()

    def tensor(self, given: np.ndarray, result: np.ndarray | None) -> native.Tensor:
        return native.Tensor(
            dtype=DTYPES.index(self.asked.dtype),
            rank=1,
            shape=(ctypes.c_int64 * 1)(given.size),
            input=given.ctypes.data,
            output=None if result is None else result.ctypes.data,
        )

    def give_memory(self, _, tensor: int, rows, count: int) -> int:
        self.outputs[tensor] = np.empty(sum(rows[:count]), self.asked.dtype)
        return self.outputs[tensor].ctypes.data

    def check(self, rank: int) -> None:
        for place, result in enumerate(self.outputs):
            expected = self.asked.expected(place, rank)
            same = result.tobytes() == expected.tobytes()
            assert same, f"tensor {place} of {self.asked} is {result}, not {expected}"


def run(asked: Collective) -> None:
    """Carries out one collective, and checks it."""
    pending = Pending(asked, keras_hvd.rank(), queue.SimpleQueue())
    code = native.engine().khvd_run(ctypes.byref(pending.request))
    if code != 0:
        raise exceptions.from_code(code, native.engine().khvd_last_error().decode())
    pending.check(keras_hvd.rank())


def run_step(seed: int, step: int) -> None:
    """Asks for a step's collectives in an order of this rank's own, checks them."""
    rank, ranks = keras_hvd.rank(), keras_hvd.size()
    ended = queue.SimpleQueue()
    asked = collectives(seed, step, ranks, keras_hvd.local_size())
    pending = [Pending(each, rank, ended) for each in asked]
    own = random.Random(f"{seed} {step} {rank}")
    own.shuffle(pending)
    engine = native.engine()
    codes = []
    for place, each in enumerate(pending):
        # khvd_run waits: others must not wait for a later request.
        waits = place == len(pending) - 1 and own.random() < 0.5
        call = engine.khvd_run if waits else engine.khvd_submit
        code = call(ctypes.byref(each.request))
        if code != 0 or waits:
            ended.put((code, engine.khvd_last_error().decode() if code != 0 else ""))
    codes = [ended.get() for _ in pending]
    for code, text in codes:
        if code != 0:
            raise exceptions.from_code(code, text)
    for each in pending:
        each.check(rank)


def lost_wakes() -> int:
    counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
    native.engine().khvd_get_counters(ctypes.byref(counters))
    return counters.lost_wakes


def set_faults(options: argparse.Namespace) -> None:
    """Sets the engine's variables; each rank has delays of its own."""
    rank = int(os.environ["KERAS_HVD_RANK"])
    faults = {"SEED": 1000 * options.seed + rank, "DELAY_MICROSECONDS": options.delay}
    if rank == options.culprit:
        faults |= {"KILL_AT": options.kill_at, "STOP_AT": options.stop_at}
    for name, value in faults.items():
        os.environ[f"KERAS_HVD_FAULT_{name}"] = str(value)
    native._FOLDER = options.engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--delay", type=int, default=0, help="microseconds")
    parser.add_argument("--culprit", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--stop-at", type=int, default=0)
    options = parser.parse_args()

    if options.engine is not None:
        set_faults(options)
    print(f"looping {os.getpid()}", flush=True)
    try:
        keras_hvd.init()
        for step in range(options.steps):
            run_step(options.seed, step)
    except keras_hvd.KerasHvdError as error:
        at = time.monotonic()
        note = {"type": type(error).__name__, "text": str(error), "at": at}
        rank = os.environ["KERAS_HVD_RANK"]
        (options.records / f"{rank}.json").write_text(json.dumps(note))
        raise
    print(f"lost {lost_wakes()} wakes", flush=True)


if __name__ == "__main__":
    main()
