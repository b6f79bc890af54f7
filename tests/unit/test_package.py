"""The names of the package: listed for Python and for type checkers, both alike."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import keras_hvd
from keras_hvd.job import native

CHECKOUT = Path(__file__).parents[2]
SOURCE = ast.parse(Path(keras_hvd.__file__).read_text())


def for_type_checkers() -> dict[str, str]:
    """Names imported under TYPE_CHECKING, and the modules that they come from."""
    (block,) = (
        node
        for node in SOURCE.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom)
        for name in line.names:
            # `import X as X` is how a stub or package exports X (PEP 484).
            assert name.asname == name.name
            found[name.name] = line.module
    return found


def test_type_checkers_see_what_python_sees():
    at_run_time = {
        **{name: "keras_hvd" for name in keras_hvd._SUBMODULES},
        **{name: f"keras_hvd.{m}" for name, m in keras_hvd._DEFINED_IN.items()},
    }
    assert for_type_checkers() == at_run_time
    assert sorted(keras_hvd.__all__) == sorted(at_run_time)


@pytest.mark.parametrize("name", sorted(keras_hvd.__all__))
def test_every_name_is_there(name):
    value = getattr(keras_hvd, name)
    assert name in dir(keras_hvd)
    if name in keras_hvd._DEFINED_IN:
        module = f"keras_hvd.{keras_hvd._DEFINED_IN[name]}"
        assert value is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'keras_hvd' has no attribute 'bogus'"):
        _ = keras_hvd.bogus
    with pytest.raises(ImportError):
        from keras_hvd import bogus  # noqa: F401


def test_has_a_version():
    assert keras_hvd.__version__ == native.engine().khvd_version().decode()


def test_is_cited_by_its_version_and_license():
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert cited["version"] == keras_hvd.__version__
    assert cited["license"] == "Apache-2.0"


def test_importing_it_imports_nothing_heavy():
    program = (
        "import sys, keras_hvd; "
        "print([n for n in ('tensorflow', 'keras', 'numpy') if n in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("package", "name", "advice"),
    [
        *(("tfx", name, "docs/tfx.md has what") for name in keras_hvd.tfx.__all__),
        *(("ray", name, r"pip install .*\[ray\]") for name in keras_hvd.ray.__all__),
        *(
            ("spark", name, r"pip install .*\[spark\]")
            for name in keras_hvd.spark.__all__
            # It needs pyarrow alone, which is here.
            if name != "rows"
        ),
    ],
)
def test_without_its_library_a_name_says_what_to_install(package, name, advice):
    library = {"spark": "pyspark"}.get(package, package)
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{package} is here")
    with pytest.raises(ImportError, match=f"keras_hvd.{package}.{name}: .*{advice}"):
        getattr(getattr(keras_hvd, package), name)
