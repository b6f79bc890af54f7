"""The wheels that `make wheel` has built: their metadata, content and needs."""

import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
ENGINE = "libkeras_hvd.so"


# readelf's name for it, and its loader.
MACHINES = {
    "x86_64": ("Advanced Micro Devices X86-64", "ld-linux-x86-64.so.2"),
    "aarch64": ("AArch64", "ld-linux-aarch64.so.1"),
}


@pytest.fixture(scope="module", params=MACHINES)
def architecture(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def wheel(request, architecture) -> pathlib.Path:
    dist = request.config.getoption("dist")
    found = list(dist.glob(f"keras_hvd-*_{architecture}.whl"))
    if not found and architecture != platform.machine():
        pytest.skip(f"not built: make wheel ARCHITECTURE={architecture}")
    (only,) = found
    return only


@pytest.mark.parametrize("architecture", [platform.machine()], indirect=True)
def test_the_readme_installs_it(wheel, tmp_path):
    """With this environment's TensorFlow, which is not downloaded once more."""
    readme = (CHECKOUT / "README.md").read_text()
    (command,) = re.findall(r"^pip install .*$", readme, re.M)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / wheel.name).symlink_to(wheel.resolve())
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    others = tmp_path / "others"
    others.mkdir()
    for package in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
        if "keras_hvd" not in package.name:
            (others / package.name).symlink_to(package)
    (packages / "others.pth").write_text(str(others))
    # An index might have another package of that name.
    variables = {**os.environ, "PIP_NO_INDEX": "1"}
    variables["PATH"] = f"{python.parent}:{variables['PATH']}"
    outside = {"cwd": tmp_path, "check": True, "stdout": subprocess.PIPE, "text": True}
    subprocess.run(command, shell=True, env=variables, **outside)
    code = "import keras_hvd; keras_hvd.init(); print(keras_hvd.__file__)"
    khvdrun = [python.with_name("khvdrun"), "-np", "2", python, "-c", code]
    ended = subprocess.run(khvdrun, **outside)
    assert ended.stdout.count(str(packages / "keras_hvd" / "__init__.py")) == 2


def test_extras_bring_a_tensorflow_that_it_serves(wheel, native):
    built = json.loads((native / "build_info.json").read_text())["ops"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [
        Requirement(line.split(": ", 1)[1])
        for line in lines
        if re.match(r"Requires-Dist: tensorflow(-cpu)?\b(?!-)", line)
    ]
    assert {each.name for each in wanted} == {"tensorflow", "tensorflow-cpu"}
    oldest, newest = (int([*built][i].split(".")[1]) for i in (0, -1))
    for each in wanted:
        assert all(ops["tensorflow"] in each.specifier for ops in built.values())
        assert f"2.{oldest - 1}.9" not in each.specifier
        assert f"2.{newest + 1}.0" not in each.specifier


@pytest.fixture(scope="module")
def native(wheel, tmp_path_factory) -> pathlib.Path:
    """The folder of the libraries, taken out of it."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "keras_hvd" / "_native"


def test_it_is_for_any_python_on_systems_since_glibc_2_27(wheel, architecture):
    assert wheel.name.endswith(f"-py3-none-manylinux_2_27_{architecture}.whl")
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    (tag,) = re.findall(
        r'constrains the platform tag to "(\S+)"', " ".join(shown.split())
    )
    assert tag == f"manylinux_2_27_{architecture}"


def test_it_is_small(wheel):
    assert wheel.stat().st_size < 3 << 20


def test_it_has_one_engine_and_ops_for_each_tensorflow(native):
    built = json.loads((native / "build_info.json").read_text())["ops"]
    ops = {f"libkeras_hvd_ops_{minor}.so" for minor in built}
    names = {path.name for path in native.iterdir()}
    assert names == {"build_info.json", "source", ENGINE, *ops}
    for minor, each in built.items():
        assert each["tensorflow"].startswith(f"{minor}.")
    # The last one is to be installed where there is none.
    assert [*built] == sorted(built, key=lambda minor: int(minor.split(".")[1]))


def test_it_has_the_hash_of_each_library(native):
    noted = json.loads((native / "build_info.json").read_text())["sha256"]
    assert noted == {
        library.name: hashlib.sha256(library.read_bytes()).hexdigest()
        for library in native.glob("*.so")
    }


def test_it_has_what_ops_are_built_from_and_no_tests(native):
    listed = subprocess.run(
        ["git", "ls-files", "bazel", "tf_ops", "BUILD", "WORKSPACE", ".bazelrc"],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    wanted = {
        name
        for name in listed
        if not name.endswith(("_test.cc", "_fuzz.cc", "_corpus.tar.gz"))
        and "testing/" not in name
    }
    source = native / "source"
    found = {
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()
    }
    assert found == wanted | {".bazelignore", "keras_hvd/version.py"}


def test_it_has_the_modules_of_the_checkout(wheel):
    """So the results of the checkout's tests hold for the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        found = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.endswith(".py") and "/_native/" not in name
        }
    listed = subprocess.run(
        ["git", "ls-files", "keras_hvd/*.py"],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    assert found == {name: (CHECKOUT / name).read_bytes() for name in listed}


def test_everybody_may_read_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        modes = {each.external_attr >> 16 & 0o777 for each in archive.infolist()}
    assert all(mode & 0o444 == 0o444 for mode in modes), modes


def test_only_the_system_and_tensorflow_are_linked(native, architecture):
    machine, loader = MACHINES[architecture]
    system = rf"lib(c|m|dl|pthread|stdc\+\+|gcc_s)\.so\.\d|{re.escape(loader)}"
    for library in native.glob("*.so"):
        listed = subprocess.run(
            ["readelf", "-hd", library], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        assert re.search(rf"Machine: +{machine}\n", listed)
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed))
        others = {name for name in needed if not re.fullmatch(system, name)}
        of_ops = {ENGINE, "libtensorflow_cc.so.2", "libtensorflow_framework.so.2"}
        assert others == (set() if library.name == ENGINE else of_ops)


def test_nothing_names_a_folder_of_this_machine(native):
    for library in native.glob("*.so"):
        content = library.read_bytes()
        for folder in (CHECKOUT, pathlib.Path.home() / ".cache"):
            assert str(folder).encode() not in content
