"""Each callback, collective and launcher is on its pages and in CHANGELOG.md."""

import re
from pathlib import Path

import pytest
from every_collective import ARGUMENTS

from keras_hvd import callbacks
from keras_hvd.world.environment import _LAUNCHERS

CHECKOUT = Path(__file__).parents[2]

# Horovod's names are those of the same classes.
CALLBACKS = {getattr(callbacks, name).__name__ for name in callbacks.__all__}
# A launcher is a module or an object of one.
MODULES = {getattr(each, "__name__", type(each).__module__) for each in _LAUNCHERS}
LAUNCHERS = {module.rpartition(".")[2] for module in MODULES}
NAMES = {
    "docs/training.md": CALLBACKS,
    "docs/reference/callbacks.md": CALLBACKS,
    "docs/collectives.md": {*ARGUMENTS},
    "docs/reference/collectives.md": {*ARGUMENTS},
    "docs/launching.md": LAUNCHERS,
    "docs/environment.md": LAUNCHERS,
    "CHANGELOG.md": CALLBACKS | {*ARGUMENTS} | LAUNCHERS,
}


@pytest.mark.parametrize("page", NAMES)
def test_the_page_has_every_name(page):
    text = (CHECKOUT / page).read_text()
    missing = [name for name in NAMES[page] if not re.search(rf"\b{name}\b", text)]
    assert missing == []
