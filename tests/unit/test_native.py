"""native.py: its mirrors of the C API, and its errors for libraries that do not fit."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from keras_hvd.exceptions import LibraryError
from keras_hvd.job import installed, native
from keras_hvd.version import __version__

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
ENGINE = native._FOLDER / "libkeras_hvd.so"
HEADER = CHECKOUT / "tf_ops" / "engine" / "c_api.h"
STRUCTURES = {
    "khvd_mpi": native.Mpi,
    "khvd_options": native.Options,
    "khvd_tensor": native.Tensor,
    "khvd_request": native.Request,
    "khvd_counters": native.Counters,
    "khvd_gpu_support": native.GpuSupport,
}


@pytest.fixture
def unopened():
    """native.py as in a new process, before and after the test."""
    for function in (native.engine, native.ops, native.build_info):
        function.cache_clear()
    yield
    for function in (native.engine, native.ops, native.build_info):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch, unopened):
    """An empty folder in the place of keras_hvd/_native."""
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    return tmp_path


def put_build_info(folder, *tensorflows, version=__version__):
    """As after builds of the folder's libraries, against these tensorflow-cpu."""
    ops = {
        tensorflow.rpartition(".")[0]: {
            "tensorflow": tensorflow,
            "distribution": "tensorflow-cpu",
            "xla": False,
        }
        for tensorflow in tensorflows
    }
    hashes = {
        library.name: hashlib.sha256(library.read_bytes()).hexdigest()
        for library in folder.glob("*.so")
    }
    info = {"version": version, "ops": ops, "sha256": hashes}
    (folder / "build_info.json").write_text(json.dumps(info))


def test_structures_have_the_layout_of_the_header(tmp_path):
    wanted = {name: [ctypes.sizeof(kind)] for name, kind in STRUCTURES.items()}
    program = ["#include <stdio.h>", f'#include "{HEADER}"', "int main() {"]
    for name, kind in STRUCTURES.items():
        program.append(f'printf("{name} %zu", sizeof({name}));')
        for field, *_ in kind._fields_:
            wanted[name].append(getattr(kind, field).offset)
            program.append(f'printf(" %zu", offsetof({name}, {field}));')
        program.append('puts("");')
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*program, "}"]))
    subprocess.run(["gcc", source, "-o", tmp_path / "layout"], check=True)
    printed = subprocess.run(
        [tmp_path / "layout"], check=True, capture_output=True, text=True
    ).stdout
    found = {
        name: list(map(int, n)) for name, *n in map(str.split, printed.split("\n")[:-1])
    }
    assert found == wanted


def test_structures_have_every_field_of_the_header():
    for name, kind in STRUCTURES.items():
        body = HEADER.read_text().split(f"}} {name};")[0].rsplit("struct {", 1)[1]
        declarations = re.sub(r"//.*", "", body).split(";")[:-1]
        fields = [
            re.search(r"(\w+)(\[\d+\])?$", field.strip()).group(1)
            for declaration in declarations
            for field in declaration.split(",")
        ]
        assert [field for field, *_ in kind._fields_] == fields


def test_types_and_kinds_have_the_numbers_of_the_header():
    text = HEADER.read_text()
    enum = text.partition("} khvd_dtype;")[0].rpartition("typedef enum {")[2]
    found = re.findall(r"KHVD_(\w+) = (\d+)", enum)
    assert {name.lower(): int(number) for name, number in found} == native.DTYPES
    kinds = re.findall(r"^  KIND\((\w+),", text, re.M)
    assert [getattr(native, name) for name in kinds[:4]] == [0, 1, 2, 3]


def test_engine_has_every_function_of_the_header():
    declared = set(
        re.findall(r"^KHVD_EXPORT .*?(khvd_\w+)\(", HEADER.read_text(), re.M)
    )
    assert declared == set(native._FUNCTIONS)
    for name in declared:
        assert getattr(native.engine(), name).argtypes is not None


@pytest.mark.parametrize("number", [2**32, -(2**31) - 1, 2**64 + 1])
def test_no_number_is_cut_short(number):
    options = native.Options(rank=2**31 - 1, cache_capacity=-(2**63))
    assert (options.rank, options.cache_capacity) == (2**31 - 1, -(2**63))
    with pytest.raises(OverflowError, match=f"size cannot be {number}"):
        native.Options(size=number)
    with pytest.raises(OverflowError, match=f"root cannot be {number}"):
        native.Request().root = number
    with pytest.raises(ctypes.ArgumentError, match=f"{number} does not fit"):
        native.engine().khvd_process_set_size(number)


def test_library_exports_the_c_api_alone():
    printed = subprocess.run(
        ["nm", "-D", "--defined-only", ENGINE],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    exported = {line.split()[-1] for line in printed.splitlines()}
    assert exported == set(native._FUNCTIONS)


def test_op_library_finds_the_engine_beside_itself():
    printed = subprocess.run(
        ["readelf", "-d", native.ops_library(tf.__version__)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "[libkeras_hvd.so]" in printed
    assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", printed) == ["$ORIGIN"]


def test_not_built(folder):
    with pytest.raises(LibraryError) as raised:
        native.engine()
    assert str(folder / "build_info.json") in str(raised.value)
    assert f"{sys.executable} -m pip install" in str(raised.value)


def test_not_built_in_a_checkout_that_hides_an_installed_copy(folder, monkeypatch):
    """A build in place would not be what its user wants, who has installed a wheel."""
    monkeypatch.setattr(
        installed, "hidden_copy", lambda: pathlib.Path("/site/keras_hvd")
    )
    with pytest.raises(LibraryError) as raised:
        native.engine()
    assert "hides the keras_hvd that is installed in /site/keras_hvd" in str(
        raised.value
    )
    assert "pip install" not in str(raised.value)
    put_build_info(folder, "2.20.0")
    with pytest.raises(LibraryError) as raised:
        native.ops_info("2.21.0")
    assert "hides the keras_hvd that is installed in /site/keras_hvd" in str(
        raised.value
    )
    assert "keras_hvd.build" not in str(raised.value)


def test_library_missing_beside_its_build_info(folder):
    put_build_info(folder, "2.21.0")
    with pytest.raises(LibraryError, match=r"libkeras_hvd\.so is missing"):
        native.engine()
    with pytest.raises(LibraryError, match=r"libkeras_hvd_ops_2\.21\.so is missing"):
        native.ops_library("2.21.4")


@pytest.mark.parametrize("broken", ["cut short", "one bit"])
def test_library_that_is_not_what_was_built(folder, broken):
    """Cut short it would end the process where a page is missing."""
    library = pathlib.Path(shutil.copy(ENGINE, folder))
    put_build_info(folder, "2.21.0")
    content = bytearray(library.read_bytes())
    if broken == "cut short":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    library.write_bytes(content)
    with pytest.raises(LibraryError) as raised:
        native.engine()
    assert f"{library} was damaged or replaced" in str(raised.value)
    assert f"its {len(content)} bytes" in str(raised.value)
    assert f"{sys.executable} -m pip install" in str(raised.value)


def test_libraries_of_before_there_were_hashes(folder):
    library = shutil.copy(ENGINE, folder)
    info = {"version": __version__, "ops": {}}
    (folder / "build_info.json").write_text(json.dumps(info))
    with pytest.raises(LibraryError, match=f"{library} was damaged or replaced"):
        native.engine()


def test_libraries_of_another_version(folder):
    put_build_info(folder, version="0.0.7")
    with pytest.raises(
        LibraryError, match=rf"{__version__}.* 0\.0\.7\. Install keras_hvd again"
    ):
        native.engine()


def test_library_that_cannot_be_opened(folder):
    (folder / "libkeras_hvd.so").write_text("not a library")
    put_build_info(folder, "2.21.0")
    # The real one is mapped by now: it would be the second copy.
    code = (
        "import pathlib, sys\n"
        "from keras_hvd.job import native\n"
        "native._FOLDER = pathlib.Path(sys.argv[1])\n"
        "native.engine()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"LibraryError: {folder}/libkeras_hvd.so cannot be opened" in done.stderr


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (
            "2.22.0-rc1",
            f"where there is Bazel, with: {sys.executable} -m keras_hvd.build",
        ),
        ("2.15.1", "(there are no ops for TensorFlow before 2.16)"),
    ],
)
def test_another_minor_version_of_tensorflow_is_refused_before_opening(
    folder, monkeypatch, version, advice
):
    for minor in ("2.16", "2.20"):
        library = folder / f"libkeras_hvd_ops_{minor}.so"
        library.write_text("opening this would fail otherwise")
    put_build_info(folder, "2.16.2", "2.20.0")
    monkeypatch.setattr(native, "_mapped_libraries", set)
    module = types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    packages = {"tensorflow": ["tensorflow-rocm"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: packages)
    with pytest.raises(LibraryError) as raised:
        native.ops()
    message = str(raised.value)
    assert f"this is TensorFlow {version}" in message
    assert f"the ops in {folder} were built for 2.16.2, 2.20.0" in message
    # The package that is installed. Another one's files would go over its files.
    assert f"{sys.executable} -m pip install tensorflow-rocm==2.20.0" in message
    assert message.endswith(advice)


def test_oldest_tensorflow_is_that_of_the_build():
    finder = runpy.run_path(str(CHECKOUT / "bazel" / "find_tensorflow.py"))
    assert native._numbers(native._OLDEST) == finder["OLDEST"]


def test_op_libraries_lie_side_by_side(folder, monkeypatch):
    # The real ones are mapped by now: they would be the second copies.
    monkeypatch.setattr(native, "_mapped_libraries", set)
    for minor in ("2.2", "2.21"):
        (folder / f"libkeras_hvd_ops_{minor}.so").touch()
    put_build_info(folder, "2.2.1", "2.21.0")
    assert native.ops_library("2.2.3") == folder / "libkeras_hvd_ops_2.2.so"
    assert native.ops_library("2.21.1") == folder / "libkeras_hvd_ops_2.21.so"
    assert native.ops_info("2.21.1")["tensorflow"] == "2.21.0"


def test_missing_tensorflow(folder, monkeypatch):
    put_build_info(folder, "2.16.2", "2.21.0")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(LibraryError, match="pip install tensorflow-cpu==2.21.0"):
        native.ops()


def test_what_is_left_of_a_tensorflow(folder, tmp_path):
    """pip leaves folders behind that have files of others, caches for example."""
    put_build_info(folder, "2.16.2", "2.21.0")
    left = tmp_path / "packages" / "tensorflow"
    left.joinpath("python").mkdir(parents=True)
    code = (
        "import pathlib, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "sys.path[:] = [each for each in sys.path if 'site-packages' not in each]\n"
        "sys.path.append(sys.argv[3])\n"
        "from keras_hvd.job import native\n"
        "native._FOLDER = pathlib.Path(sys.argv[1])\n"
        "native.ops()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, left.parent, CHECKOUT],
        capture_output=True,
        text=True,
    )
    assert f"only remains of one in {left}" in done.stderr
    assert "pip install tensorflow-cpu==2.21.0" in done.stderr


def test_second_copy_is_refused(tmp_path):
    copy = shutil.copy(ENGINE, tmp_path)
    code = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "from keras_hvd.job import native\n"
        "native.engine()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, copy], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"this process has already loaded {copy}" in done.stderr
    assert str(ENGINE) in done.stderr


def test_replaced_library_counts_as_a_second_copy(tmp_path):
    library = pathlib.Path(shutil.copy(ENGINE, tmp_path))
    code = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "os.unlink(sys.argv[1])\n"
        "from keras_hvd.job import native\n"
        "print(native._mapped_libraries())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, library],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{library} (deleted)" in done.stdout
