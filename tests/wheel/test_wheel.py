"""The wheel that `make wheel` has put into dist/: what it says, holds and needs."""

import json
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
ENGINE = "libkeras_hvd.so"


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    (found,) = (CHECKOUT / "dist").glob("keras_hvd-*.whl")
    return found


@pytest.fixture(scope="module")
def native(wheel, tmp_path_factory) -> pathlib.Path:
    """The folder of the libraries, taken out of it."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "keras_hvd" / "_native"


def test_it_is_for_any_python_on_systems_since_glibc_2_27(wheel):
    assert wheel.name.endswith("-py3-none-manylinux_2_27_x86_64.whl")
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    (tag,) = re.findall(
        r'constrains the platform tag to "(\S+)"', " ".join(shown.split())
    )
    assert tag == "manylinux_2_27_x86_64"


def test_it_is_small(wheel):
    assert wheel.stat().st_size < 15 << 20


def test_it_has_one_engine_and_ops_for_each_tensorflow(native):
    built = json.loads((native / "build_info.json").read_text())["ops"]
    ops = {f"libkeras_hvd_ops_{minor}.so" for minor in built}
    names = {path.name for path in native.iterdir()}
    assert names == {"build_info.json", ENGINE, *ops}
    for minor, each in built.items():
        assert each["tensorflow"].startswith(f"{minor}.")


def test_only_the_system_and_tensorflow_are_linked(native):
    system = r"lib(c|m|dl|pthread|stdc\+\+|gcc_s)\.so\.\d|ld-linux-x86-64\.so\.2"
    for library in native.glob("*.so"):
        listed = subprocess.run(
            ["readelf", "-d", library], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed))
        others = {name for name in needed if not re.fullmatch(system, name)}
        of_ops = {ENGINE, "libtensorflow_cc.so.2", "libtensorflow_framework.so.2"}
        assert others == (set() if library.name == ENGINE else of_ops)


def test_nothing_names_a_folder_of_this_machine(native):
    for library in native.glob("*.so"):
        content = library.read_bytes()
        for folder in (CHECKOUT, pathlib.Path.home() / ".cache"):
            assert str(folder).encode() not in content
