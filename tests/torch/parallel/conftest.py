"""One job for the tests of Keras on torch: `khvdrun -np 2 python -m pytest -x ...`.

Every rank runs every test, in the same order. With `--stand-in-gpu` all tensors are on
a GPU, for which libraries stand in.
"""

import os
from typing import NamedTuple

import keras
import pytest
import stand_in_gpu
import torch

import keras_hvd
from keras_hvd.backends.dense_collectives import Begun


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stand-in-gpu", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    assert keras.backend.backend() == "torch", "set KERAS_BACKEND=torch"
    # A test that fails on one rank leaves the others waiting; not for ever.
    os.environ.setdefault("KERAS_HVD_STALL_ABORT_SECONDS", "60")
    torch.set_num_threads(1)
    if config.getoption("--stand-in-gpu"):
        stand_in_gpu.choose()
        stand_in_gpu.use()
    keras_hvd.init()
    if keras_hvd.rank() != 0:
        config.option.verbose = -2


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if keras_hvd.is_initialized() and keras_hvd.rank() != 0 and not report.failed:
        return report.outcome, "", ""
    return None


@pytest.fixture
def rank() -> int:
    """This process' rank."""
    return keras_hvd.rank()


@pytest.fixture
def size() -> int:
    """The number of ranks."""
    assert keras_hvd.size() > 1, "these tests need a job of at least 2 ranks"
    return keras_hvd.size()


class Group(NamedTuple):
    """Gradients that are reduced together, as the engine is given them."""

    name: str
    addresses: list[int]
    results: list[int]
    stream: int | None


@pytest.fixture
def groups(monkeypatch) -> list[Group]:
    """The groups of gradients whose reduction has begun, in their order."""
    noted, plain = [], Begun.begin

    def begin(self):
        plain(self)
        name = self.request.name.decode()
        if "/gradients/" in name:
            tensors = self.request.tensors[: self.request.count]
            noted.append(
                Group(
                    name.partition("/gradients/")[2],
                    [each.input for each in tensors],
                    [each.output for each in tensors],
                    self.request.stream,
                )
            )

    monkeypatch.setattr(Begun, "begin", begin)
    return noted


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Gives all ranks one seed, before each test."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
