"""The examples in the docstrings of what is made for torch have the shown results."""

import doctest
import importlib
import inspect
import pkgutil

import keras
import pytest

import keras_hvd.backends.torch

MODULES = [
    module.name
    for module in pkgutil.walk_packages(
        keras_hvd.backends.torch.__path__, "keras_hvd.backends.torch."
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    keras.utils.clear_session()
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    own = [
        each
        for each in vars(module).values()
        if inspect.isfunction(each) or inspect.isclass(each)
        if each.__module__ == name and not each.__name__.startswith("_")
    ]
    assert (result.attempted > 0) == bool(own)
