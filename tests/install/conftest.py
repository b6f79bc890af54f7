"""Fresh environments to install keras_hvd into, with pip as a user would."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable

import pytest


class Environment:
    """A virtual environment; with `packages`, it sees that folder's too, as its pip."""

    def __init__(self, folder: pathlib.Path, packages: str | None = None):
        self.folder = folder
        venv.create(folder, with_pip=packages is None, symlinks=True)
        self.python = folder / "bin" / "python"
        variables = {"base": str(folder), "platbase": str(folder)}
        self.packages = pathlib.Path(sysconfig.get_path("purelib", vars=variables))
        if packages is not None:
            (self.packages / "shared.pth").write_text(packages + "\n")

    def run(
        self, *arguments, folder: pathlib.Path | None = None, **variables
    ) -> subprocess.CompletedProcess:
        """Runs its Python, outside of the checkout unless `folder` says otherwise."""
        return subprocess.run(
            [self.python, *arguments],
            cwd=folder or self.folder,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
            capture_output=True,
            text=True,
        )

    def pip_install(self, *arguments, **variables) -> subprocess.CompletedProcess:
        return self.run("-m", "pip", "install", *arguments, **variables)


@pytest.fixture(scope="session")
def checkout() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    return run_command


def run_command(command: str, folder: pathlib.Path, exit_code: int = 0, **variables):
    """Runs a command as in an activated environment; returns its output."""
    scripts = pathlib.Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Open MPI asks root whether it is sure.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **variables,
    }
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == exit_code, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def shared_packages() -> str:
    """This environment's packages: TensorFlow is not downloaded a second time.

    The editable keras_hvd among them is not seen: .pth files do not nest.
    """
    return sysconfig.get_path("purelib")


@pytest.fixture(scope="session")
def installed(tmp_path_factory, shared_packages, checkout) -> Environment:
    """An environment that `pip install .` has installed keras_hvd into."""
    environment = Environment(tmp_path_factory.mktemp("installed"), shared_packages)
    done = environment.pip_install(".", folder=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    return environment


@pytest.fixture(scope="session")
def without_tensorflow(tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("without_tensorflow"))


@pytest.fixture(scope="session")
def with_tensorflow(tmp_path_factory, shared_packages) -> Environment:
    return Environment(tmp_path_factory.mktemp("with_tensorflow"), shared_packages)
