"""No collective is missing from the list that the tests of all of them use."""

import re
from pathlib import Path

from every_collective import ARGUMENTS

import keras_hvd

FOLDER = "backends.tensorflow.collectives."
C_API = Path(__file__).parents[3] / "tf_ops/engine/c_api.h"


def test_every_public_collective_is_listed():
    public = {
        name
        for name, module in keras_hvd._DEFINED_IN.items()
        if module.startswith(FOLDER) and name.islower()
    }
    # A join is no request of the engine's, and no call that all ranks make alike.
    assert public - {"join"} == set(ARGUMENTS)


def test_every_kind_of_the_engine_has_a_function():
    kinds = re.findall(r"^  KIND\(\w+, +\w+, +(\w+),", C_API.read_text(), re.M)
    assert kinds
    assert set(kinds) == {name.removeprefix("grouped_") for name in ARGUMENTS}
