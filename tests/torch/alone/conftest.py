"""The tests of Keras on torch that are no job, or start one of their own."""

import keras
import pytest


def pytest_configure(config: pytest.Config) -> None:
    assert keras.backend.backend() == "torch", "set KERAS_BACKEND=torch"
