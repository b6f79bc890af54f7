"""Builds keras_hvd's native libraries with Bazel and puts them into a folder.

    python -I bazel/build_libraries.py [--keep-engine] FOLDER [CONFIG...]

The op library is built against the TensorFlow of the Python that runs this, or the one
in $KERAS_HVD_TENSORFLOW. `-I` makes it look past the environment that pip builds in, at
what that Python really has installed. Run by several Pythons, it puts the op libraries
of their TensorFlows side by side. What the libraries were built from is noted beside
them, in build_info.json. Each CONFIG is one of .bazelrc, like faults. With
--keep-engine only the op library is put into FOLDER, which has the engine of this very
version.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
ENGINE = "libkeras_hvd.so"
OPS = "libkeras_hvd_ops.so"
BUILD_INFO = "build_info.json"


def build_libraries(
    folder: pathlib.Path, configs: list[str], keeps_engine: bool
) -> None:
    """Builds the libraries into `folder`, or exits with the reason why it cannot."""
    tensorflow = _tensorflow()
    targets = (f"//tf_ops:{name}" for name in (ENGINE, OPS))
    options = [f"--config={config}" for config in configs]
    if keeps_engine:
        # The sources are among an installation's files.
        options.append("--symlink_prefix=/")
    _run_bazel("build", *options, *targets)
    built = pathlib.Path(_run_bazel("info", *options, "bazel-bin").strip(), "tf_ops")

    folder.mkdir(parents=True, exist_ok=True)
    if not keeps_engine and _differ(built / ENGINE, folder / ENGINE):
        # Op libraries of other builds may not fit this engine.
        _forget_ops(folder)
        _install(built / ENGINE, folder / ENGINE)
    minor = ".".join(tensorflow["version"].split(".")[:2])
    ops = folder / f"libkeras_hvd_ops_{minor}.so"
    _install(built / OPS, ops)
    _note(folder, minor, tensorflow, [ops] if keeps_engine else [folder / ENGINE, ops])


def _forget_ops(folder: pathlib.Path) -> None:
    (folder / BUILD_INFO).unlink(missing_ok=True)
    for library in folder.glob("libkeras_hvd_ops*.so"):
        library.unlink()


def _note(
    folder: pathlib.Path,
    minor: str,
    tensorflow: dict[str, str | bool],
    installed: list[pathlib.Path],
) -> None:
    """Adds the installed libraries, and the ops' TensorFlow, to build_info.json."""
    path = folder / BUILD_INFO
    noted = json.loads(path.read_text()) if path.exists() else {}
    version = runpy.run_path(str(CHECKOUT / "keras_hvd" / "version.py"))["__version__"]
    ops = {
        "tensorflow": tensorflow["version"],
        "distribution": tensorflow["distribution"],
        "xla": tensorflow["xla"],
    }
    hashes = {
        library.name: hashlib.sha256(library.read_bytes()).hexdigest()
        for library in installed
    }
    of_minors = noted.get("ops", {}) | {minor: ops}
    info = {
        "version": version,
        # A user without a TensorFlow is told to install the last.
        "ops": {each: of_minors[each] for each in sorted(of_minors, key=_numbers)},
        "sha256": noted.get("sha256", {}) | hashes,
    }
    incoming = path.with_name(f".{path.name}.{os.getpid()}")
    incoming.write_text(json.dumps(info, indent=2) + "\n")
    incoming.replace(path)


def _numbers(minor: str) -> list[int]:
    return [int(part) for part in minor.split(".")]


def _tensorflow() -> dict[str, str | bool]:
    # Under -I the folder of this file is not on the path.
    finder = runpy.run_path(str(CHECKOUT / "bazel" / "find_tensorflow.py"))
    try:
        return finder["find"]()
    except finder["NotUsable"] as error:
        sys.exit(
            f"keras_hvd is built against TensorFlow, and {error}\n"
            "If TensorFlow is installed in the environment that you run pip in, this "
            "isolated build does not see it: add --no-build-isolation to pip's command."
        )


def _run_bazel(command: str, *arguments: str) -> str:
    bazel = shutil.which("bazel")
    if bazel is None:
        sys.exit(
            "keras_hvd is built with Bazel, which is not installed. Install it with: "
            "apt-get install -y bazel-bootstrap bazel-rules-java"
        )
    options = ["--config=quiet", f"--repo_env=PYTHON_BIN_PATH={sys.executable}"]
    # Also where it is empty: a Bazel server keeps the value of an earlier build.
    folder = os.environ.get("KERAS_HVD_TENSORFLOW", "")
    options.append(f"--repo_env=KERAS_HVD_TENSORFLOW={folder}")
    process = subprocess.Popen(
        [bazel, command, *options, *arguments],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        printed, _ = process.communicate()
    except KeyboardInterrupt:
        # It has got the signal too, and stops its server's work. Killed before that, it
        # would leave the next build to wait.
        process.wait()
        sys.exit(130)
    if process.returncode != 0:
        sys.exit(f"bazel {command} ended with code {process.returncode}; see above")
    return printed


def _install(built: pathlib.Path, installed: pathlib.Path) -> None:
    """Puts a new file in the old one's place: processes may have that one mapped."""
    if not _differ(built, installed):
        return
    incoming = installed.with_name(f".{installed.name}.{os.getpid()}")
    shutil.copyfile(built, incoming)
    incoming.chmod(0o755)
    incoming.replace(installed)


def _differ(built: pathlib.Path, installed: pathlib.Path) -> bool:
    return not installed.exists() or not filecmp.cmp(built, installed, shallow=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--keep-engine", action="store_true")
    asked = parser.parse_args()
    build_libraries(asked.folder.resolve(), asked.configs, asked.keep_engine)
