"""Collectives with their inputs on every rank, and their results by NumPy.

All ranks make the same cases, and so each of them knows the others' inputs. Numbers are
small and whole, so that sums and products are exact in every type and any order.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from engine import Dtype, Kind, Op

_NUMPY = {
    Dtype.UINT8: np.uint8,
    Dtype.INT8: np.int8,
    Dtype.INT32: np.int32,
    Dtype.INT64: np.int64,
    Dtype.FLOAT16: np.float16,
    Dtype.BFLOAT16: np.uint16,  # its bits
    Dtype.FLOAT32: np.float32,
    Dtype.FLOAT64: np.float64,
    Dtype.BOOL: np.uint8,
    Dtype.UINT32: np.uint32,
    Dtype.UINT64: np.uint64,
    Dtype.FLOAT8_E5M2: np.uint8,  # its bits
    Dtype.FLOAT8_E4M3FN: np.uint8,
}
_UNSIGNED = (Dtype.UINT8, Dtype.UINT32, Dtype.UINT64)
# Where a scale, or one of Adasum's, is no number of the type.
_TOLERANCE = {
    Dtype.FLOAT16: 4e-3,
    Dtype.BFLOAT16: 3e-2,
    Dtype.FLOAT32: 1e-6,
    Dtype.FLOAT64: 1e-12,
    Dtype.FLOAT8_E5M2: 0.13,
    Dtype.FLOAT8_E4M3FN: 0.07,
}
# Powers of two, which are exact; two that are 1 together; one that half has not.
SCALES = ((1.0, 1.0), (0.5, 1.0), (0.5, 2.0), (0.3, 1.0))


def _float8_numbers(mantissa_bits: int) -> np.ndarray:
    """The numbers of all 256 codes of a type; its NaN and infinities are none."""
    codes = np.arange(256)
    bias = (1 << (6 - mantissa_bits)) - 1
    exponents = (codes & 0x7F) >> mantissa_bits
    fractions = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    numbers = np.where(
        exponents == 0,
        np.ldexp(fractions, 1 - bias),
        np.ldexp(1 + fractions, exponents - bias),
    )
    return np.where(codes < 128, numbers, -numbers)


_FLOAT8 = {
    Dtype.FLOAT8_E5M2: _float8_numbers(2),
    Dtype.FLOAT8_E4M3FN: _float8_numbers(3),
}


def encode(numbers: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Numbers as they lie in memory; the type has them."""
    if dtype.is_float8:
        codes = np.argsort(_FLOAT8[dtype], kind="stable")
        places = np.searchsorted(_FLOAT8[dtype], numbers, sorter=codes)
        return codes[places].astype(np.uint8)
    if dtype is not Dtype.BFLOAT16:
        return numbers.astype(_NUMPY[dtype])
    bits = numbers.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


def decode(memory: np.ndarray, dtype: Dtype) -> np.ndarray:
    """The numbers in memory, float64 or int64."""
    raw = memory.view(_NUMPY[dtype])
    if dtype.is_float8:
        return _FLOAT8[dtype][raw]
    if dtype is Dtype.BFLOAT16:
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.astype(np.float64 if dtype.is_floating else np.int64)


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective.

    Args:
        name: of the tensor.
        kind: which one.
        dtypes: of its tensors, more than one for a group.
        rows: for each rank the first dimension of its tensors.
        columns: the second one.
        op: where there is a reduction.
        scales: before and after it.
        root: of a broadcast.
        splits: of an alltoall: for each rank how many rows go to each.
        seed: of the numbers.
        not_a_number: whether rank 0 has one NaN.
    """

    name: str
    kind: Kind
    dtypes: tuple[Dtype, ...]
    rows: tuple[int, ...]
    columns: int = 3
    op: Op = Op.SUM
    scales: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    not_a_number: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    def numbers(self, tensor: int, rank: int) -> np.ndarray:
        """A rank's input."""
        dtype = self.dtypes[tensor]
        name = zlib.crc32(self.name.encode())
        chance = np.random.default_rng([self.seed, name, tensor, rank])
        least, most = (0, 2) if dtype is Dtype.BOOL else (-4, 5)
        if dtype in _UNSIGNED:
            least = 0
        if self.op is Op.PRODUCT and dtype is not Dtype.BOOL:
            least, most = max(least, -2), 3
        if dtype.is_float8:
            least, most = -1, 2
        shape = self.rows[rank], self.columns
        numbers = chance.integers(least, most, shape).astype(np.float64)
        if self.not_a_number and rank == 0:
            numbers[0, 0] = np.nan
        return numbers

    def output_rows(self, rank: int) -> int | None:
        """The first dimension of a rank's results; None where the engine tells it."""
        if self.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
            return None
        if self.kind is not Kind.REDUCESCATTER:
            return self.rows[rank]
        return len(self._scattered(np.arange(self.rows[0]), rank))

    def check(self, tensor: int, rank: int, memory: np.ndarray) -> None:
        """Raises unless a rank's result is NumPy's."""
        dtype = self.dtypes[tensor]
        expected = self._expected(tensor, rank)
        found = decode(memory, dtype).reshape(-1, self.columns)
        tolerance = _TOLERANCE.get(dtype, 0) if self.kind in _REDUCING else 0
        # A sum of rounded numbers may miss zero.
        np.testing.assert_allclose(
            *(found, expected),
            rtol=tolerance,
            atol=4 * tolerance,
            err_msg=f"{self}, tensor {tensor}, rank {rank}",
        )

    def _expected(self, tensor: int, rank: int) -> np.ndarray:
        given = [self.numbers(tensor, each) for each in range(self.size)]
        if self.kind is Kind.BROADCAST:
            return given[self.root]
        if self.kind is Kind.ALLGATHER:
            return np.concatenate(given)
        if self.kind is Kind.ALLTOALL:
            parts = []
            for numbers, splits in zip(given, self.splits):
                start = sum(splits[:rank])
                parts.append(numbers[start : start + splits[rank]])
            return np.concatenate(parts)
        reduced = self._reduced(given, self.dtypes[tensor])
        if self.kind is Kind.REDUCESCATTER:
            return self._scattered(reduced, rank)
        return reduced

    def _reduced(self, given: list[np.ndarray], dtype: Dtype) -> np.ndarray:
        before, after = self.scales
        scaled = [before * numbers for numbers in given]
        if self.op is Op.ADASUM:
            return after * _adasum(scaled)
        if self.op is Op.AVERAGE:
            average = sum(scaled) / self.size
            return after * (average if dtype.is_floating else np.trunc(average))
        function = {
            Op.SUM: np.add,
            Op.MIN: np.minimum,
            Op.MAX: np.maximum,
            Op.PRODUCT: np.multiply,
        }[self.op]
        return after * function.reduce(scaled)

    def _scattered(self, rows: np.ndarray, rank: int) -> np.ndarray:
        """A rank's rows: equally many on each, and one more on the first ones."""
        return np.array_split(rows, self.size)[rank]


_REDUCING = (Kind.ALLREDUCE, Kind.REDUCESCATTER)


def _adasum(vectors: list[np.ndarray]) -> np.ndarray:
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = _adasum(vectors[:half]), _adasum(vectors[half:])
    dot = np.vdot(a, b)
    of_a = 1 - dot / (2 * np.vdot(a, a)) if a.any() else 1
    of_b = 1 - dot / (2 * np.vdot(b, b)) if b.any() else 1
    return of_a * a + of_b * b


def ops(kind: Kind, dtype: Dtype, size: int) -> list[Op]:
    """The reductions of a type over `size` ranks."""
    if kind not in _REDUCING:
        return [Op.SUM]
    if dtype is Dtype.BOOL:
        return [Op.MIN, Op.MAX, Op.PRODUCT]
    found = [Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT]
    is_power_of_two = size & (size - 1) == 0
    if kind is Kind.ALLREDUCE and dtype.is_floating and is_power_of_two:
        found.append(Op.ADASUM)
    return found


def scales(kind: Kind, dtype: Dtype, op: Op) -> Sequence[tuple[float, float]]:
    """The scales that have a meaning for any numbers."""
    if kind in _REDUCING and dtype.is_floating and op is not Op.ADASUM:
        return SCALES
    return SCALES[:1]


def rows(kind: Kind, size: int, most: int, chance: np.random.Generator) -> tuple:
    """First dimensions for each rank, and the splits of an alltoall."""
    if kind is Kind.ALLTOALL:
        splits = chance.integers(0, most // size + 2, (size, size))
        return tuple(map(int, splits.sum(1))), tuple(map(tuple, splits.tolist()))
    if kind is Kind.ALLGATHER:
        return tuple(map(int, chance.integers(0, most + 1, size))), ()
    return (int(chance.integers(0, most + 1)),) * size, ()


def all_cases(size: int) -> Iterator[Case]:
    """Every collective, of every type, with every reduction and scale, once each."""
    chance = np.random.default_rng(size)
    for kind, dtype in itertools.product(Kind, Dtype):
        for op in ops(kind, dtype, size):
            for scale in scales(kind, dtype, op):
                first, splits = rows(kind, size, 7, chance)
                yield Case(
                    name=f"{kind.name}/{dtype.name}/{op.name}/{scale}",
                    kind=kind,
                    dtypes=(dtype,),
                    rows=first,
                    op=op,
                    scales=scale,
                    root=int(chance.integers(size)),
                    splits=splits,
                )
    yield from _special_cases(size)


def _special_cases(size: int) -> Iterator[Case]:
    floats = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT64, Dtype.FLOAT16)
    # Several megabytes, which NCCL handles otherwise; groups; no elements; NaNs.
    large = (300_000,) * size
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCESCATTER, Kind.BROADCAST):
        dtypes = (Dtype.FLOAT32,)
        yield Case(f"large {kind.name}", kind, dtypes, large, op=Op.AVERAGE)
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCESCATTER):
        uneven = range(1, size + 1) if kind is Kind.ALLGATHER else [size + 1] * size
        yield Case(f"group {kind.name}", kind, floats * 10, tuple(uneven))
        yield Case(f"empty {kind.name}", kind, floats, (0,) * size)
    for op in (Op.MIN, Op.MAX, Op.SUM):
        yield Case(
            name=f"NaN {op.name}",
            kind=Kind.ALLREDUCE,
            dtypes=(Dtype.FLOAT32,),
            rows=(5,) * size,
            op=op,
            not_a_number=True,
        )


def random_cases(size: int, seed: int, step: int) -> list[Case]:
    """Up to four of any kind, to be under way together."""
    chance = np.random.default_rng([seed, step])
    made = []
    for number in range(chance.integers(1, 5)):
        kind = Kind(chance.choice(list(Kind)))
        dtype = Dtype(chance.choice(list(Dtype)))
        op = Op(chance.choice(ops(kind, dtype, size)))
        choices = scales(kind, dtype, op)
        most = int(chance.choice([0, 1, 7, 100, 3000]))
        first, splits = rows(kind, size, most, chance)
        groups = kind not in (Kind.BROADCAST, Kind.ALLTOALL)
        count = int(chance.choice([1, 1, 3])) if groups else 1
        made.append(
            Case(
                name=f"{number}",
                kind=kind,
                dtypes=(dtype,) * count,
                rows=first,
                columns=int(chance.integers(1, 4)),
                op=op,
                scales=choices[chance.integers(len(choices))],
                root=int(chance.integers(size)),
                splits=splits,
                seed=step,
            )
        )
    return made
