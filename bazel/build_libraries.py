"""Builds keras_hvd's two native libraries with Bazel and puts them into a folder.

    python -I bazel/build_libraries.py FOLDER [CONFIG]

They are built against the TensorFlow of the Python that runs this. `-I` makes it look
past the environment that pip builds in, at what that Python really has installed. What
the libraries were built from is noted beside them, in build_info.json. CONFIG is one of
.bazelrc, like faults.
"""

from __future__ import annotations

import filecmp
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = ("libkeras_hvd.so", "libkeras_hvd_ops.so")
BUILD_INFO = "build_info.json"


def build_libraries(folder: pathlib.Path, *configs: str) -> None:
    """Builds both libraries into `folder`, or exits with what is missing."""
    tensorflow = _tensorflow()
    targets = (f"//tf_ops:{name}" for name in LIBRARIES)
    _run_bazel("build", *(f"--config={config}" for config in configs), *targets)
    built = pathlib.Path(_run_bazel("info", "bazel-bin").strip(), "tf_ops")

    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        _install(built / name, folder / name)
    version = runpy.run_path(str(CHECKOUT / "keras_hvd" / "version.py"))
    info = {
        "version": version["__version__"],
        "tensorflow": tensorflow["version"],
        "distribution": tensorflow["distribution"],
        "xla": tensorflow["xla"],
    }
    (folder / BUILD_INFO).write_text(json.dumps(info, indent=2) + "\n")


def _tensorflow() -> dict[str, str]:
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
    done = subprocess.run(
        [bazel, command, *options, *arguments],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"bazel {command} ended with code {done.returncode}; see above")
    return done.stdout


def _install(built: pathlib.Path, installed: pathlib.Path) -> None:
    """Puts a new file in the old one's place: processes may have that one mapped."""
    if installed.exists() and filecmp.cmp(built, installed, shallow=False):
        return
    incoming = installed.with_name(f".{installed.name}.{os.getpid()}")
    shutil.copyfile(built, incoming)
    incoming.chmod(0o755)
    incoming.replace(installed)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    build_libraries(pathlib.Path(sys.argv[1]).resolve(), *sys.argv[2:])
