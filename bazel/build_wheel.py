"""Builds the wheel: one engine, and an op library for each TensorFlow it is to serve.

    python bazel/build_wheel.py FOLDER ARCHITECTURE VERSION...

ARCHITECTURE is that of this machine, as `uname -m` gives it, or aarch64. Each VERSION
is one of TensorFlow, like 2.21.0 or 2.21.*. One that this Python has installed, or that
of --python, is taken as it is. Nothing of the others is installed: their headers and
libraries are taken out of their own wheels, and kept in ~/.cache/keras_hvd (or
$XDG_CACHE_HOME). With --prefer-installed the installed one replaces VERSION. The same
commit gives the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator

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
# For each TensorFlow, about: its wheel, what is taken out of it, and the build on two
# idle cores; the first one's with the engine.
DOWNLOAD_MB, UNPACKED_GB = 250, 1
FIRST_MINUTES, NEXT_MINUTES = 5, 1.5


class Steps:
    """Prints one line for each step: its number, its name and how long it took."""

    def __init__(self, count: int):
        self._count = count
        self._begun = 0

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Gives a list for facts that are known at the end, which end the line."""
        self._begun += 1
        print(f"[{self._begun} of {self._count}] {name} ...", end=" ", flush=True)
        facts: list[str] = []
        begun = time.monotonic()
        try:
            yield facts
            print(*facts, f"{time.monotonic() - begun:.0f} s", sep=", ", end="")
        except KeyboardInterrupt:
            print("interrupted; the next build keeps what is done", end="")
            raise
        finally:
            print(flush=True)


def _cache() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "keras_hvd" / "tensorflow"


def _installed(pythons: list[str]) -> dict[str, pathlib.Path]:
    """The TensorFlows that these Pythons have: versions, and the packages' folders."""
    found: dict[str, pathlib.Path] = {}
    for python in pythons:
        finder = [python, "-I", CHECKOUT / "bazel" / "find_tensorflow.py"]
        looked = subprocess.run(finder, capture_output=True, text=True)
        if looked.returncode == 0:
            each = json.loads(looked.stdout)
            found.setdefault(each["version"], pathlib.Path(each["root"]).parent)
    return found


def _place(
    version: str, architecture: str, installed: dict[str, pathlib.Path]
) -> pathlib.Path | None:
    """$KERAS_HVD_TENSORFLOW for a version; None if it must be downloaded."""
    if architecture == os.uname().machine:
        for each in fnmatch.filter(installed, version):
            return installed[each]
    kept = _cache().glob(f"{version}-{architecture}")
    return max(kept, key=_numbers, default=None)


def _numbers(folder: pathlib.Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def _download(version: str, architecture: str, facts: list[str]) -> pathlib.Path:
    """Downloads a version; returns the folder with its headers and libraries."""
    with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
        _pip(
            *("download", "--no-deps", "--only-binary=:all:"),
            *("--python-version", PYTHON, "--dest", scratch),
            *(f"--platform={name}_{architecture}" for name in TENSORFLOW_PLATFORMS),
            f"{DISTRIBUTIONS[architecture]}=={version}",
        )
        (wheel,) = pathlib.Path(scratch).glob("*.whl")
        facts.append(f"{wheel.stat().st_size / 1e6:.0f} MB")
        partial = pathlib.Path(scratch, "taken")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(TAKEN) or name.endswith(".dist-info/METADATA"):
                    archive.extract(name, partial)
        # Only a complete folder gets the name under which it is found.
        folder = _cache() / f"{wheel.name.split('-')[1]}-{architecture}"
        try:
            partial.rename(folder)
        except OSError:
            # Another build may have been quicker.
            if not folder.exists():
                raise
    return folder


def _say_costs(
    architecture: str, places: dict[str, pathlib.Path | None], missing: list[str]
) -> None:
    minutes = FIRST_MINUTES + NEXT_MINUTES * (len(places) - 1)
    print(
        f"A wheel for {architecture} and TensorFlow {', '.join(reversed(places))}: "
        f"at most {minutes:.0f} minutes on two idle cores"
    )
    for version, place in places.items():
        if place is not None:
            print(f"TensorFlow {version} is taken from {place}")
    if missing:
        free = shutil.disk_usage(_cache()).free / 1e9
        print(
            f"To download, once: {DOWNLOAD_MB * len(missing)} MB. Unpacked into "
            f"{_cache()}: {UNPACKED_GB * len(missing)} GB, {free:.0f} GB are free"
        )


def build(
    folder: pathlib.Path,
    architecture: str,
    versions: list[str],
    installed: dict[str, pathlib.Path],
) -> pathlib.Path:
    """Builds the wheel into `folder`, and gives its path."""
    # Installed files have the modes of the wheel's.
    os.umask(0o022)
    configs = ["portable"]
    if architecture != os.uname().machine:
        configs.append(architecture)
    # The newest first: that is most often the installed one, whose ops are compiled.
    places = {
        version: _place(version, architecture, installed)
        for version in reversed(versions)
    }
    missing = [version for version, place in places.items() if place is None]
    _cache().mkdir(parents=True, exist_ok=True)
    _say_costs(architecture, places, missing)
    steps = Steps(len(missing) + len(versions) + 1)
    for version in missing:
        with steps.step(f"downloading TensorFlow {version}") as facts:
            places[version] = _download(version, architecture, facts)
    with tempfile.TemporaryDirectory(prefix="keras_hvd-wheel-") as scratch:
        native = pathlib.Path(scratch, "native")
        for version, place in places.items():
            script = CHECKOUT / "bazel" / "build_libraries.py"
            with steps.step(f"building for TensorFlow {version}"):
                _run(
                    [sys.executable, "-I", script, native, *configs],
                    KERAS_HVD_TENSORFLOW=str(place),
                )
        with steps.step("packing the wheel") as facts:
            _pip(
                *("wheel", "--no-deps", "--wheel-dir", scratch, str(CHECKOUT)),
                KERAS_HVD_NATIVE=str(native),
                KERAS_HVD_PLATFORM=f"{PLATFORM}_{architecture}",
                SOURCE_DATE_EPOCH=_commit_time(),
            )
            (built,) = pathlib.Path(scratch).glob("keras_hvd-*.whl")
            facts.append(f"{built.stat().st_size / 1e6:.1f} MB")
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
    environment = {**os.environ, **variables}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        for line in process.stderr:
            if not line.startswith("Starting local Bazel server"):
                print(line, end="", file=sys.stderr, flush=True)
        code = process.wait()
    except KeyboardInterrupt:
        # It has got the signal too, and need not say so once more.
        process.stderr.read()
        process.wait()
        raise
    if code != 0:
        sys.exit(f"{shlex.join(map(str, command))} ended with code {code}; see above")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("architecture", choices=DISTRIBUTIONS)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--prefer-installed", action="store_true")
    asked = parser.parse_args()
    for version in asked.versions:
        if not re.fullmatch(r"\d+(\.(\d+|\*))+", version):
            sys.exit(
                f"{version!r} names no version of TensorFlow, as 2.20.0 and 2.20.* do: "
                "make wheel TENSORFLOW=tensorflow-cpu==2.20.*"
            )
    installed = _installed([asked.python, sys.executable])
    if asked.prefer_installed:
        asked.versions = list(installed)[:1] or asked.versions
    wheel = build(asked.folder, asked.architecture, asked.versions, installed)
    print(
        f"To install it: pip install {wheel}\n"
        f"And a TensorFlow, if you have none: pip install '{wheel}[tensorflow-cpu]'"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
