"""The native half of the package: Bazel builds it, the wheel carries it.

Everything else that describes the package is in pyproject.toml.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import ExecError

CHECKOUT = pathlib.Path(__file__).resolve().parent
NATIVE = pathlib.Path("keras_hvd", "_native")
# Libraries for several TensorFlows, and their platform: bazel/build_wheel.py.
BUILT_BEFORE = os.environ.get("KERAS_HVD_NATIVE")
PLATFORM = os.environ.get("KERAS_HVD_PLATFORM")
# The sources of ops for a later TensorFlow: keras_hvd/build.py.
SOURCES = (".bazelignore", ".bazelrc", "BUILD", "WORKSPACE", "bazel", "tf_ops")
VERSION = pathlib.Path("keras_hvd", "version.py")
# The files of earlier builds must not get into this one's wheel.
BUILD = tempfile.TemporaryDirectory(prefix="keras_hvd-build-")


class BuildNative(setuptools.Command):
    """Builds the two libraries; in an editable install they go into the checkout."""

    description = "build the native libraries with Bazel"
    user_options = []

    def initialize_options(self) -> None:
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        folder = CHECKOUT if self.editable_mode else pathlib.Path(self.build_lib)
        if BUILT_BEFORE:
            shutil.copytree(BUILT_BEFORE, folder / NATIVE)
        else:
            script = CHECKOUT / "bazel" / "build_libraries.py"
            done = subprocess.run([sys.executable, "-I", script, folder / NATIVE])
            if done.returncode != 0:
                raise ExecError("the native libraries were not built; see above")
        if not self.editable_mode:
            self.copy_sources(folder / NATIVE / "source")

    def copy_sources(self, folder: pathlib.Path) -> None:
        """Copies the libraries' sources, without tests and fuzzers."""
        folder.mkdir()
        tests = ("*_test.cc", "*_fuzz.cc", "*_corpus.tar.gz", "testing")
        unwanted = shutil.ignore_patterns(*tests, "__pycache__")
        for name in SOURCES:
            if (CHECKOUT / name).is_dir():
                shutil.copytree(CHECKOUT / name, folder / name, ignore=unwanted)
            else:
                shutil.copy(CHECKOUT / name, folder / name)
        (folder / VERSION).parent.mkdir()
        shutil.copy(CHECKOUT / VERSION, folder / VERSION)

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    """setuptools' build, and the native libraries."""

    sub_commands = [*build.sub_commands, ("build_native", None)]


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python, whose ABI the libraries do not use."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM or super().get_tag()[2]


class PlatformDistribution(setuptools.Distribution):
    """One whose files belong to the platform, as those of extension modules do."""

    def has_ext_modules(self) -> bool:
        return True

    def parse_config_files(self, *arguments, **options) -> None:
        """Makes the extras ask for a TensorFlow that libraries built before serve."""
        super().parse_config_files(*arguments, **options)
        if not BUILT_BEFORE:
            return
        info = json.loads(pathlib.Path(BUILT_BEFORE, "build_info.json").read_text())
        minors = [*info["ops"]]
        major, newest = minors[-1].split(".")
        oldest = int(minors[0].split(".")[1])
        between = {f"{major}.{minor}" for minor in range(oldest, int(newest))}
        served = f">={minors[0]},<{major}.{int(newest) + 1}"
        served += "".join(f",!={minor}.*" for minor in sorted(between - {*minors}))
        for extra in ("tensorflow", "tensorflow-cpu", "gpu"):
            self.extras_require[extra] = [
                re.sub(r"^(tensorflow[^<>=]*)[^;]*", rf"\g<1>{served}", requirement)
                for requirement in self.extras_require[extra]
            ]


setuptools.setup(
    distclass=PlatformDistribution,
    cmdclass={
        "build": Build,
        "build_native": BuildNative,
        "bdist_wheel": PlatformWheel,
    },
    options={"build": {"build_base": BUILD.name}},
)
