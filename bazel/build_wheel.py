"""Builds the wheel: one engine, and an op library for each TensorFlow it is to serve.

    python bazel/build_wheel.py FOLDER ARCHITECTURE VERSION...

ARCHITECTURE is that of this machine, as `uname -m` gives it, or aarch64. Each VERSION
is one of TensorFlow, like 2.21.0. The one that this Python has installed is taken as
it is. Nothing of the others is installed: their headers and libraries are taken out of
their own wheels, and kept in ~/.cache/keras_hvd (or $XDG_CACHE_HOME). The same commit
gives the same bytes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
# All TensorFlows that we serve are published for it.
PYTHON = "3.11"
# The smallest distributions with the headers, and the libraries to link against.
DISTRIBUTIONS = {"x86_64": "tensorflow-cpu", "aarch64": "tensorflow"}
# The platform of our libraries (older_system.py), and those of TensorFlow's wheels.
PLATFORM = "manylinux_2_27"
TENSORFLOW_PLATFORMS = ("manylinux_2_27", "manylinux_2_17")
# The files that the build needs. The package file and the metadata let it find them.
TAKEN = (
    "tensorflow/__init__.py",
    "tensorflow/include/",
    "tensorflow/libtensorflow_cc.so.2",
    "tensorflow/libtensorflow_framework.so.2",
)


def _cache() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "keras_hvd" / "tensorflow"


def _tensorflow(version: str, architecture: str) -> str:
    """$KERAS_HVD_TENSORFLOW for a version; empty for the one that is installed."""
    if architecture == os.uname().machine:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if importlib.metadata.version(DISTRIBUTIONS[architecture]) == version:
                return ""
    return str(_downloaded(version, architecture))


def _downloaded(version: str, architecture: str) -> pathlib.Path:
    """The folder with the headers and libraries of a version, downloaded once."""
    folder = _cache() / f"{version}-{architecture}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _pip(
            *("download", "--no-deps", "--only-binary=:all:"),
            *("--python-version", PYTHON, "--dest", scratch),
            *(f"--platform={name}_{architecture}" for name in TENSORFLOW_PLATFORMS),
            f"{DISTRIBUTIONS[architecture]}=={version}",
        )
        (wheel,) = pathlib.Path(scratch).glob("*.whl")
        partial = pathlib.Path(scratch, "taken")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(TAKEN) or name.endswith(".dist-info/METADATA"):
                    archive.extract(name, partial)
        # Only a complete folder gets the name under which it is found.
        try:
            partial.rename(folder)
        except OSError:
            # Another build may have been quicker.
            if not folder.exists():
                raise
    return folder


def build(folder: pathlib.Path, architecture: str, versions: list[str]) -> pathlib.Path:
    """Builds the wheel into `folder`, and gives its path."""
    # Installed files have the modes of the wheel's.
    os.umask(0o022)
    configs = ["portable"]
    if architecture != os.uname().machine:
        configs.append(architecture)
    # The newest first: that is most often the installed one, whose ops are compiled.
    places = [_tensorflow(version, architecture) for version in reversed(versions)]
    with tempfile.TemporaryDirectory(prefix="keras_hvd-wheel-") as scratch:
        native = pathlib.Path(scratch, "native")
        for place in places:
            script = CHECKOUT / "bazel" / "build_libraries.py"
            _run(
                [sys.executable, "-I", script, native, *configs],
                KERAS_HVD_TENSORFLOW=place,
            )
        _pip(
            *("wheel", "--no-deps", "--wheel-dir", scratch, str(CHECKOUT)),
            KERAS_HVD_NATIVE=str(native),
            KERAS_HVD_PLATFORM=f"{PLATFORM}_{architecture}",
            SOURCE_DATE_EPOCH=_commit_time(),
        )
        (built,) = pathlib.Path(scratch).glob("keras_hvd-*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        # An installation from the folder must get this wheel.
        for earlier in folder.glob(f"keras_hvd-*_{architecture}.whl"):
            earlier.unlink()
        wheel = folder / built.name
        wheel.write_bytes(built.read_bytes())
    return wheel


def _commit_time() -> str:
    """When this commit was made, in seconds: the time of all files in the wheel."""
    command = ["git", "-C", CHECKOUT, "log", "-1", "--format=%ct"]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _pip(command: str, *arguments: str, **variables: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    _run([sys.executable, "-m", "pip", command, *quiet, *arguments], **variables)


def _run(command: list, **variables: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables})
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with code {done.returncode}")


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[2] not in DISTRIBUTIONS:
        sys.exit(__doc__)
    print(build(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
