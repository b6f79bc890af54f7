"""The examples in the docstrings do what they say."""

import doctest
import importlib
import pkgutil

import keras
import pytest

import keras_hvd

MODULES = [
    module.name
    for module in pkgutil.walk_packages(keras_hvd.__path__, "keras_hvd.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    keras.utils.clear_session()  # Keras numbers the names of layers and optimizers
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
