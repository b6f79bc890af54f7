"""Images, small smooth models, and what training has to give."""

import gc
import os
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest

import keras_hvd

Weights = list[np.ndarray]


@pytest.fixture(autouse=True)
def same_names() -> None:
    """Keras numbers names; each test starts anew, so that all ranks have the same."""
    keras.utils.clear_session()
    # Keras keeps the graphs of every model that was trained. Each collection of garbage
    # would walk through them all.
    gc.freeze()


@pytest.fixture(scope="session")
def images() -> tuple[np.ndarray, np.ndarray]:
    """MNIST where it is at hand (KERAS_HVD_TEST_MNIST=file.npz, or where Keras keeps
    its downloads); else scikit-learn's digits in the same size."""
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    places = [
        os.environ.get("KERAS_HVD_TEST_MNIST", ""),
        home / "datasets" / "mnist.npz",
    ]
    for place in places:
        if place and pathlib.Path(place).exists():
            with np.load(place) as data:
                x, y = data["x_train"][:4000] / 255, data["y_train"][:4000]
                break
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = np.kron(x.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
        x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    return x[..., None].astype("float32"), y.astype("int64")


@pytest.fixture(scope="session")
def part_of_batches(rank: int, size: int) -> Callable[..., np.ndarray]:
    """This rank's rows of each of the batches that one process would train on."""

    def part(rows: np.ndarray, batch_of_rank: int) -> np.ndarray:
        batches = rows.reshape(-1, size, batch_of_rank, *rows.shape[1:])
        return batches[:, rank].reshape(-1, *rows.shape[1:])

    return part


@pytest.fixture(scope="session")
def make_linear() -> Callable[..., keras.Model]:
    """The smallest model, for what does not depend on the model."""

    def make(optimizer: keras.optimizers.Optimizer | None, **compiled) -> keras.Model:
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, name="linear")], name="model"
        )
        if optimizer is not None:
            model.compile(optimizer, keras.losses.MeanSquaredError(), **compiled)
        return model

    return make


@pytest.fixture(scope="session")
def points() -> tuple[np.ndarray, np.ndarray]:
    """Data for `make_linear`: 24 rows, which 1, 2, 3 and 4 ranks can share equally."""
    generator = np.random.default_rng(3)
    x = generator.standard_normal((24, 3)).astype("float32")
    return x, x @ generator.standard_normal((3, 2)).astype("float32")


def largest_difference(some: Weights, others: Weights) -> float:
    return max(
        float(np.abs(one - other).max())
        for one, other in zip(some, others, strict=True)
    )


@pytest.fixture(scope="session")
def difference() -> Callable[[Weights, Weights], float]:
    """The largest difference between two models' weights."""
    return largest_difference


@pytest.fixture
def raises_on_all_ranks() -> Callable[..., None]:
    """Asserts that every rank got an error that says something."""

    def check(error: BaseException, *parts: str) -> None:
        assert all(keras_hvd.allgather_object(all(p in str(error) for p in parts))), (
            str(error)
        )

    return check
