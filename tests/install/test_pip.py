"""pip install: its files, and its message where something is missing."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import subprocess

from keras_hvd.version import __version__

TRAIN_ONE_STEP = """
import keras_hvd, sys, tensorflow as tf
keras_hvd.init()
reduced = keras_hvd.allreduce(tf.constant([3.0]), op=keras_hvd.Sum)
print(keras_hvd.__file__, keras_hvd.size(), float(reduced[0]))
"""


def test_installed_package_works_outside_of_the_checkout(installed):
    done = installed.run("-c", TRAIN_ONE_STEP)
    assert done.returncode == 0, done.stderr
    file, *values = done.stdout.split()
    assert pathlib.Path(file).parent == installed.packages / "keras_hvd"
    assert values == ["1", "3.0"]


def test_libraries_lie_in_the_package_with_what_they_were_built_from(
    installed, checkout
):
    native = installed.packages / "keras_hvd" / "_native"
    names = {file.name for file in native.iterdir()}
    found = installed.run("-I", checkout / "bazel" / "find_tensorflow.py")
    tensorflow = json.loads(found.stdout)
    version = tensorflow["version"]
    minor = ".".join(version.split(".")[:2])
    ops = f"libkeras_hvd_ops_{minor}.so"
    assert names == {"libkeras_hvd.so", ops, "build_info.json", "source"}
    info = json.loads((native / "build_info.json").read_text())
    assert info["version"] == __version__
    built = {key: tensorflow[key] for key in ("distribution", "xla")}
    assert info["ops"] == {minor: {"tensorflow": version, **built}}
    for library in ("libkeras_hvd.so", ops):
        content = (native / library).read_bytes()
        assert info["sha256"][library] == hashlib.sha256(content).hexdigest()


def test_only_the_package_is_installed(installed):
    (info,) = installed.packages.glob("keras_hvd-*.dist-info")
    files = (info / "RECORD").read_text().splitlines()
    tops = {file.split(",")[0].split("/")[0] for file in files}
    assert tops == {"keras_hvd", info.name, ".."}
    assert [file for file in files if file.startswith("..")][0].startswith(
        "../../../bin/khvdrun,"
    )


def test_khvdrun_is_installed(installed):
    khvdrun = installed.python.with_name("khvdrun")
    done = subprocess.run(
        [khvdrun, "--version"], cwd=installed.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout


def test_second_copy_beside_the_checkout(installed, checkout):
    engine = checkout / "keras_hvd" / "_native" / "libkeras_hvd.so"
    code = f"import ctypes, keras_hvd; ctypes.CDLL({str(engine)!r}); keras_hvd.init()"
    done = installed.run("-c", code)
    assert done.returncode == 1
    own = installed.packages / "keras_hvd" / "_native" / "libkeras_hvd.so"
    assert f"this process has already loaded {engine}" in done.stderr
    assert str(own) in done.stderr


def test_second_copy_of_the_op_library(installed, tmp_path):
    """TensorFlow would abort the process at the second registration of an op."""
    shutil.copytree(installed.packages / "keras_hvd", tmp_path / "keras_hvd")
    code = (
        "import sys, keras_hvd.job.native as first\n"
        "first.ops()\n"
        "for name in [n for n in sys.modules if n.startswith('keras_hvd')]:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import keras_hvd.job.native as second\n"
        "assert second is not first\n"
        "second.ops()\n"
    )
    done = installed.run("-c", code)
    assert done.returncode == 1, done.stderr
    assert f", and {tmp_path}/keras_hvd/_native" in done.stderr


def test_checkout_in_the_place_of_an_installed_copy_is_said_once(installed, checkout):
    """Python looks into the current folder first."""
    khvdrun = [installed.python.with_name("khvdrun"), "-np", "2", installed.python]
    done = subprocess.run(
        [*khvdrun, "-c", TRAIN_ONE_STEP], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    used, other = checkout / "keras_hvd", installed.packages / "keras_hvd"
    said = f"this is the keras_hvd in {used}, and there is another copy in {other}"
    assert done.stderr.count(said) == 1


def test_ops_for_another_tensorflow_are_built_beside_the_others(
    installed, tmp_path, checkout
):
    """As with a wheel that is older than this TensorFlow."""
    shutil.copytree(installed.packages / "keras_hvd", tmp_path / "keras_hvd")
    native = tmp_path / "keras_hvd" / "_native"
    info = json.loads((native / "build_info.json").read_text())
    [[minor, ops]] = info["ops"].items()
    library = native / f"libkeras_hvd_ops_{minor}.so"
    info["sha256"]["libkeras_hvd_ops_2.5.so"] = info["sha256"].pop(library.name)
    library.rename(native / "libkeras_hvd_ops_2.5.so")
    info["ops"] = {"2.5": ops | {"tensorflow": "2.5.1"}}
    (native / "build_info.json").write_text(json.dumps(info))
    engine = (native / "libkeras_hvd.so").read_bytes()
    code = (
        "import keras_hvd, tensorflow as tf\n"
        "keras_hvd.init()\n"
        "try:\n"
        "    keras_hvd.allreduce(tf.constant(1.0))\n"
        "finally:\n"
        "    print('ops mapped:', 'libkeras_hvd_ops' in open('/proc/self/maps').read())"
    )
    done = installed.run("-c", code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert f"this is TensorFlow {ops['tensorflow']}" in done.stderr
    assert f"the ops in {native} were built for 2.5.1" in done.stderr
    assert f"with: {installed.python} -m keras_hvd.build" in done.stderr
    assert done.stdout == "ops mapped: False\n"

    # Bazel need not compile again what it has compiled in the checkout.
    base = subprocess.run(
        ["bazel", "info", "output_base"],
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    (tmp_path / ".bazelrc").write_text(f"startup --output_base={base}")
    built = installed.run(
        "-m", "keras_hvd.build", PYTHONPATH=str(tmp_path), HOME=str(tmp_path)
    )
    assert built.returncode == 0, built.stderr
    assert f"{library} is built and opens" in built.stdout
    assert (native / "libkeras_hvd.so").read_bytes() == engine
    done = installed.run("-c", code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ops mapped: True\n"


def test_ops_cannot_be_built_without_bazel(installed):
    done = installed.run("-m", "keras_hvd.build", PATH="/nonexistent")
    assert done.returncode == 1
    assert "apt-get install -y bazel-bootstrap bazel-rules-java" in done.stderr


def test_missing_bazel(with_tensorflow, checkout):
    done = with_tensorflow.pip_install(checkout, PATH="/nonexistent")
    assert done.returncode == 1
    message = "apt-get install -y bazel-bootstrap bazel-rules-java"
    assert message in done.stdout + done.stderr


def test_tensorflow_out_of_sight_of_the_isolated_build(without_tensorflow, checkout):
    done = without_tensorflow.pip_install("--no-deps", checkout)
    assert done.returncode == 1
    printed = done.stdout + done.stderr
    assert f"{without_tensorflow.python} has no TensorFlow" in printed
    assert "add --no-build-isolation to pip's command" in printed


def test_editable_installation_uses_the_checkout(with_tensorflow, checkout):
    done = with_tensorflow.pip_install("--editable", checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    done = with_tensorflow.run("-c", TRAIN_ONE_STEP)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.split()[0]).parent == checkout / "keras_hvd"
