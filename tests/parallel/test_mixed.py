"""Random steps of all collectives at once, each result compared with NumPy's.

The seed decides the collectives of a step, the same on all ranks. Each rank asks for
them in an order of its own: each collective of a step has a thread. Names come again
with other shapes, types and operations; process sets overlap.
"""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf
from element_types import FLOATS, NUMBERS
from every_collective import ARGUMENTS

import keras_hvd
from keras_hvd import Adasum, Average, Max, Min, Product, Sum

SEED = 20261121
KINDS = tuple(ARGUMENTS)
# One worker for each collective that a step may have.
MOST = 5
# A join costs all ranks a meeting, and some ranks some steps of zeros.
STEPS_BETWEEN_JOINS = 20


@dataclass
class Collective:
    """One request; every rank can compute the inputs of all others."""

    kind: str
    name: str
    process_set: keras_hvd.ProcessSet
    dtype: tf.DType
    op: keras_hvd.ReduceOp
    shapes: list[tuple[int, ...]]  # of each tensor
    rows: list[list[int]]  # of each tensor, where members' first dimensions differ
    splits: list[list[int]]  # of each member of an alltoall
    root: int  # its place among the members
    seed: int

    def run(self) -> list[tf.Tensor]:
        """This rank's results."""
        place = self.process_set.rank()
        given = {"name": self.name, "process_set": self.process_set}
        if self.kind == "barrier":
            keras_hvd.barrier(**given)
            return []
        function = getattr(keras_hvd, self.kind)
        if "reduce" in self.kind:
            given["op"] = self.op
        tensors = [tf.constant(each) for each in self.inputs(place)]
        if self.kind.startswith("grouped_"):
            return function(tensors, **given)
        if self.kind == "alltoall":
            result, received = function(tensors[0], self.splits[place], **given)
            assert received.numpy().tolist() == [each[place] for each in self.splits]
            return [result]
        if self.kind == "broadcast":
            return [function(tensors[0], self.process_set.ranks[self.root], **given)]
        return [function(tensors[0], **given)]

    def inputs(self, place: int) -> list[np.ndarray]:
        """A member's inputs: small numbers, whose sums are exact in every type."""
        arrays = []
        for i, (_, *rest) in enumerate(self.shapes):
            shape = (self.rows[i][place], *rest)
            numbers = np.random.default_rng([self.seed, place, i])
            low = 0 if self.dtype.is_unsigned or self.dtype == tf.bool else -2
            high = 2 if self.dtype == tf.bool else 3
            drawn = numbers.integers(low, high, shape)
            arrays.append(drawn.astype(self.dtype.as_numpy_dtype))
        return arrays

    def expected(self, size: int) -> list[np.ndarray]:
        """The results that this rank must get."""
        place = self.process_set.rank()
        of_members = [self.inputs(member) for member in range(size)]
        of_tensors = [list(of_tensor) for of_tensor in zip(*of_members, strict=True)]
        if self.kind == "broadcast":
            return of_members[self.root]
        if self.kind.endswith("allgather"):
            return [np.concatenate(members) for members in of_tensors]
        if self.kind == "alltoall":
            parts = [
                np.split(given, np.cumsum(split))[place]
                for given, split in zip(of_tensors[0], self.splits, strict=True)
            ]
            return [np.concatenate(parts)]
        reduced = [self.reduced(members) for members in of_tensors]
        if self.kind.endswith("reducescatter"):
            return [np.array_split(each, size)[place] for each in reduced]
        return reduced

    def reduced(self, members: list[np.ndarray]) -> np.ndarray:
        """The reduction of the members' inputs."""
        wide = "float64" if self.dtype in FLOATS else "int64"
        stacked = np.stack([each.astype(wide) for each in members])
        if self.op == Adasum:
            result = adasum(list(stacked))
        elif self.op == Average:
            result = stacked.sum(0) / len(members)
            result = result if self.dtype in FLOATS else np.trunc(result)
        else:
            reduce = {Sum: np.sum, Min: np.min, Max: np.max, Product: np.prod}[self.op]
            result = reduce(stacked, axis=0)
        return result.astype(self.dtype.as_numpy_dtype)

    def check(self, results: list[tf.Tensor], size: int) -> None:
        """Asserts that the results are NumPy's; rounded ones, nearly."""
        if self.kind == "barrier":
            return
        rounded = "reduce" in self.kind and self.op in (Average, Adasum)
        tolerance = {1: 0.15, 2: 2e-2, 4: 1e-5, 8: 1e-12}
        for result, expected in zip(results, self.expected(size), strict=True):
            assert result.dtype == self.dtype
            assert result.shape == expected.shape, self
            if rounded and self.dtype in FLOATS:
                close = tolerance[self.dtype.size]
                np.testing.assert_allclose(
                    result.numpy().astype("float64"),
                    expected.astype("float64"),
                    close,
                    close,
                    err_msg=str(self),
                )
            else:
                np.testing.assert_array_equal(result.numpy(), expected, str(self))


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Pairs of neighbours into one, until one is left."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_adasum(a, b) for a, b in pairs]
    return vectors[0]


def _adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = np.sum(a * b)
    weights = [
        1 - product / (2 * square) if square else 1.0
        for square in (np.sum(a * a), np.sum(b * b))
    ]
    return weights[0] * a + weights[1] * b


def draw(step: int, sets: list[keras_hvd.ProcessSet]) -> Iterator[Collective]:
    """The collectives of a step, of all sets; each name is there once."""
    chance = random.Random(f"{SEED} {step}")
    for name in chance.sample(range(2 * MOST), chance.randint(1, MOST)):
        kind = chance.choice(KINDS)
        process_set = chance.choice(sets)
        size = len(process_set.ranks)
        op = chance.choice((Sum, Average, Min, Max, Product, Adasum))
        if kind.endswith("reducescatter"):
            op = chance.choice((Sum, Average))
        if op == Adasum and size & (size - 1):
            op = Sum
        dtypes = FLOATS if op == Adasum else NUMBERS
        if op in (Min, Max, Product) or "reduce" not in kind:
            dtypes = [*dtypes, tf.bool]
        count = chance.randint(1, 4) if kind.startswith("grouped_") else 1
        shapes = [
            (chance.choice((0, 1, 7, 300)), chance.randint(1, 40)) for _ in range(count)
        ]
        splits = [[chance.randint(0, 9) for _ in range(size)] for _ in range(size)]
        rows = [[shape[0]] * size for shape in shapes]
        if kind.endswith("allgather"):
            rows = [[chance.randint(0, 30) for _ in range(size)] for _ in shapes]
        if kind == "alltoall":
            rows = [[sum(split) for split in splits]]
        yield Collective(
            kind=kind,
            name=f"mixed {name}",
            process_set=process_set,
            dtype=chance.choice(dtypes),
            op=op,
            shapes=shapes,
            rows=rows,
            splits=splits,
            root=chance.randrange(size),
            seed=chance.randrange(2**32),
        )


@pytest.fixture
def sets(size) -> Iterator[list[keras_hvd.ProcessSet]]:
    """All ranks, and sets that overlap."""
    members = {1: [], 2: [[0], [1]], 3: [[0, 1], [1, 2], [2]]}.get(
        size, [[0, 1], [1, 2, 3], [0, 2], [3]]
    )
    added = [keras_hvd.add_process_set(each) for each in members]
    yield [keras_hvd.global_process_set, *added]
    for each in added:
        assert keras_hvd.remove_process_set(each)


def run_with_uneven_data(step: int, rank: int, size: int) -> None:
    """Some ranks have more to reduce than others, which join."""
    chance = random.Random(f"{SEED} join {step}")
    counts = [chance.randint(0, 3) for _ in range(size)]
    for i in range(counts[rank]):
        total = keras_hvd.allreduce([float(rank + 1)], op=Sum, name=f"uneven {i}")
        others = sum(r + 1 for r in range(size) if counts[r] > i)
        assert total.numpy().tolist() == [others], (step, counts)
    last = keras_hvd.join()
    assert keras_hvd.allgather_object(last) == [last] * size


def test_all_collectives_and_process_sets_at_once(sets, rank, size):
    own_order = random.Random(f"{SEED} {rank}")
    seen = set()
    with concurrent.futures.ThreadPoolExecutor(MOST) as threads:
        for step in range(1000 if size == 4 else 200):
            asked = [each for each in draw(step, sets) if each.process_set.included()]
            own_order.shuffle(asked)
            started = [(each, threads.submit(each.run)) for each in asked]
            for each, running in started:
                each.check(running.result(), len(each.process_set.ranks))
                seen.add((each.kind, each.process_set.process_set_id))
            if step % STEPS_BETWEEN_JOINS == 0:
                run_with_uneven_data(step, rank, size)
    own_sets = [each.process_set_id for each in sets if each.included()]
    assert seen == {(kind, each) for kind in KINDS for each in own_sets}
