"""Prints, as JSON, where the running Python has TensorFlow, without importing it.

$KERAS_HVD_TENSORFLOW is a folder to take it from instead.

Run it with `python -I`: pip builds in an environment of its own, which has no
TensorFlow, and `-I` looks past it at what the interpreter really has installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys

# `packages_distributions` would read every installed package; the names under which
# TensorFlow is published are few. All of them install the folder `tensorflow`.
DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-cpu-aws",
    "tensorflow-rocm",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
)
OLDEST = (2, 16)
# The headers that start and done calls of collectives need: the interface with its
# futures, and the programs' builder where it is today.
XLA_HEADERS = {
    "xla/ffi/api/c_api.h": "XLA_FFI_Future_Create",
    "xla/ffi/api/ffi.h": "class CountDownPromise",
    "xla/hlo/builder/xla_builder.h": "CustomCallWithLayout",
}
LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")


class NotUsable(Exception):
    """This Python has no TensorFlow to build against; the text says why."""


def find() -> dict[str, str | bool]:
    """Finds the TensorFlow that `import tensorflow` would give.

    Returns:
        `distribution`, `version`, `root` (the package's folder), `include`, and `xla`:
        whether collectives can be compiled by XLA.

    Raises:
        NotUsable: it is missing, incomplete or too old.
    """
    folder = os.environ.get("KERAS_HVD_TENSORFLOW")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise NotUsable(
            f"{sys.executable} has no TensorFlow; install it with: "
            f"{sys.executable} -m pip install tensorflow"
        )
    root = pathlib.Path(spec.origin).parent
    include = root / "include"
    needed = [include / "tensorflow" / "core" / "framework" / "op_kernel.h"]
    needed += [root / name for name in LIBRARIES]
    for path in needed:
        if not path.exists():
            raise NotUsable(
                f"the TensorFlow in {root} lacks {path.relative_to(root)}, which ops "
                "are built against; packages from PyPI have it"
            )
    distribution = _distribution_at(root)
    version = distribution.version
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise NotUsable(
            f"TensorFlow {version} in {root} is too old: keras_hvd needs 2.16 or later"
        )
    return {
        "distribution": distribution.metadata["Name"].replace("_", "-"),
        "version": version,
        "root": str(root),
        "include": str(include),
        "xla": all(_has(include / name, text) for name, text in XLA_HEADERS.items()),
    }


def _has(header: pathlib.Path, text: str) -> bool:
    return header.exists() and text in header.read_text(encoding="utf-8")


def _distribution_at(root: pathlib.Path) -> importlib.metadata.Distribution:
    for name in DISTRIBUTIONS:
        for found in importlib.metadata.distributions(name=name):
            installed = pathlib.Path(found.locate_file("tensorflow"))
            if installed.exists() and installed.samefile(root):
                return found
    raise NotUsable(
        f"the TensorFlow in {root} belongs to none of the packages "
        f"{', '.join(DISTRIBUTIONS)}, so that its version is not known"
    )


if __name__ == "__main__":
    try:
        print(json.dumps(find()))
    except NotUsable as error:
        sys.exit(str(error))
