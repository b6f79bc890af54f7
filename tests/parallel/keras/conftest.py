"""Small smooth models, and data for them."""

import gc
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def same_names() -> None:
    """Keras numbers names; each test starts anew, so that all ranks have the same."""
    keras.utils.clear_session()
    # Keras keeps the graphs of every model that was trained. Each collection of garbage
    # would walk through them all.
    gc.freeze()


@pytest.fixture
def float64() -> Iterator[None]:
    """Makes Keras compute in float64, in which results are those of NumPy to 1e-9."""
    kept = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(kept)


@pytest.fixture(scope="session")
def part_of_batches(rank: int, size: int) -> Callable[..., np.ndarray]:
    """This rank's rows of each of the batches that one process would train on."""

    def part(rows: np.ndarray, batch_of_rank: int) -> np.ndarray:
        batches = rows.reshape(-1, size, batch_of_rank, *rows.shape[1:])
        return batches[:, rank].reshape(-1, *rows.shape[1:])

    return part


@pytest.fixture(scope="session")
def make_linear() -> Callable[..., keras.Model]:
    """The smallest model, for tests that do not depend on the model."""

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


@pytest.fixture
def starts(monkeypatch) -> list[str]:
    """Makes gradients travel as on a GPU; gives the names of those that started."""
    from keras_hvd.backends.tensorflow.collectives import gradients

    names = []
    start = gradients.start

    def noting(tensors, name, *rest):
        names.append(name)
        return start(tensors, name, *rest)

    monkeypatch.setattr(gradients, "start", noting)
    monkeypatch.setattr(gradients, "are_on_gpu", lambda tensors: True)
    return names
