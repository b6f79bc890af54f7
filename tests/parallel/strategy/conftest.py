"""Fixtures of the tests of Keras under a strategy."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import keras_hvd

# Results by name: arrays, or nested structures of numbers.
Results = dict[str, Any]


@pytest.fixture(autouse=True)
def same_names() -> None:
    """Keras numbers names; each test starts anew, so that all ranks have the same."""
    keras.utils.clear_session()
    # Keras keeps the graphs of every model that was trained. Each collection of garbage
    # would walk through them all.
    gc.freeze()


@pytest.fixture(scope="session")
def digits(images) -> tuple[np.ndarray, np.ndarray]:
    """1,000 images of 14 by 14, and labels: neither ranks nor batches divide it."""
    x, y = images
    return x[:1000].reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)), y[:1000]


class BothWays:
    """Runs a function on one process, and under a strategy: the two results.

    With the same seed. One rank does it alone; it takes turns.
    """

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._alone: dict[str, Results] = {}

    def __call__(self, function: Callable[..., Results], name: str, *args) -> tuple:
        if name not in self._alone:
            root = len(self._alone) % self._size
            found = self._run_alone(function, *args) if self._rank == root else None
            self._alone[name] = keras_hvd.broadcast_object(found, root)
        strategy = keras_hvd.Strategy()
        return self._alone[name], _seeded(function, strategy.scope(), *args)

    def prepare(self, functions: dict[str, Callable[[], Results]]) -> None:
        """Runs functions alone, each on one rank, and all ranks at once."""
        mine = [*functions][self._rank :: self._size]
        found = {name: self._run_alone(functions[name]) for name in mine}
        for each in keras_hvd.allgather_object(found):
            self._alone |= each

    def _run_alone(self, function: Callable[..., Results], *args) -> Results:
        return _seeded(function, contextlib.nullcontext(), *args)


@pytest.fixture(scope="session")
def both_ways(rank, size) -> BothWays:
    return BothWays(rank, size)


def _seeded(function: Callable[..., Results], scope: Any, *args: Any) -> Results:
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    with scope:
        return function(*args)


@pytest.fixture(scope="session")
def require_equal(equal_on_all_ranks) -> Callable[..., None]:
    """Asserts that results are close to one process', and the same on all ranks."""

    def check(alone: Results, here: Results, tolerance: float = 1e-5) -> None:
        assert alone.keys() == here.keys()
        for name in alone:
            one, other = (
                [np.asarray(each) for each in keras.tree.flatten(results[name])]
                for results in (alone, here)
            )
            assert len(one) == len(other), name
            for a, b in zip(one, other):
                np.testing.assert_allclose(b, a, tolerance, tolerance, err_msg=name)
            assert equal_on_all_ranks(other), name

    return check


@pytest.fixture
def strategy() -> "keras_hvd.Strategy":
    return keras_hvd.Strategy()


@pytest.fixture
def shared_path(tmp_path_factory, rank) -> Iterator[Any]:
    """A folder that all ranks know."""
    yield keras_hvd.broadcast_object(tmp_path_factory.mktemp("shared"), 0)
    keras_hvd.barrier()
