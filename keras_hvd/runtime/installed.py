"""What this Python and this machine have: packages and libraries, found by looking.

Nothing is imported, so that what is broken or slow to load does no harm here.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
import urllib.parse
import urllib.request
from pathlib import Path

from keras_hvd.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]


class Missing(Exception):
    """Something is not there; the text says what and why."""


class Overwritten(Missing):
    """A module came from two packages; the text says what to do."""


def versions(module: str) -> dict[str, str]:
    """Which distributions bring a module, and their versions.

    Args:
        module: the name that is imported.

    Returns:
        Distribution: version. Empty if the module is not from a package.

    Raises:
        Missing: this Python has no such module.

    Example:

    >>> list(versions("pytest"))
    ['pytest']
    """
    if importlib.util.find_spec(module) is None:
        raise Missing(f"no module named {module!r} in this Python")
    names = importlib.metadata.packages_distributions().get(module, [])
    return {name: importlib.metadata.version(name) for name in sorted({*names})}


def require_one_version(module: str) -> None:
    """Raises where packages of several versions have brought a module.

    Args:
        module: the name that is imported.

    Raises:
        Missing: this Python has no such module.
        Overwritten: two versions of it were installed into one folder.

    Example:

    >>> require_one_version("pytest")
    """
    spec = importlib.util.find_spec(module)
    where = os.path.dirname(spec.origin) if spec is not None and spec.origin else None
    found = {
        name: importlib.metadata.version(name)
        for name in versions(module)
        if os.path.realpath(_folder(importlib.metadata.distribution(name), module))
        == os.path.realpath(where or "")
    }
    if len({*found.values()}) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        raise Overwritten(
            f"{both} are both installed, and have overwritten each other's files: "
            f"uninstall them with: {_pip('uninstall', *found)} and install one"
        )


def describe(module: str) -> str:
    """The same as `versions`, in words.

    Args:
        module: the name that is imported.

    Returns:
        The distributions with their versions.

    Raises:
        Missing: as `versions`.

    Example:

    >>> describe("keras").startswith("keras 3.")
    True
    """
    found = [f"{name} {version}" for name, version in versions(module).items()]
    return ", ".join(found) or "not from a package: its version is unknown"


def mpi_library() -> ctypes.CDLL:
    """Opens the system's MPI library, or raises `Missing`."""
    # Open MPI's two names, and MPICH's with those who share its ABI.
    reasons = []
    for name in ("libmpi.so.40", "libmpi.so.12", "libmpi.so"):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise Missing("; ".join(reasons))


def install_command() -> str:
    """The command that installs this very copy of keras_hvd again.

    Returns:
        One of pip, for the folder, file or version that this copy came from.

    Example:

    >>> install_command().startswith(sys.executable + " -m pip install ")
    True
    """
    checkout = PACKAGE.parent
    if (checkout / "WORKSPACE").exists():
        return _pip("install", "-e", str(checkout))
    source = f"keras_hvd=={__version__}"
    for each in importlib.metadata.distributions(name="keras_hvd"):
        if _package(each) == PACKAGE:
            origin = _origin(each)
            # It may be gone, or another user's.
            if origin is not None and os.path.exists(origin):
                source = str(origin)
            break
    return _pip("install", "--force-reinstall", "--no-deps", source)


def other_copies() -> list[Path]:
    """The other copies of keras_hvd that this Python has, on its path or installed.

    Returns:
        Their packages' folders, none of which `import keras_hvd` finds.

    Example:

    >>> other_copies()
    []
    """
    folders = {*map(_package_in, sys.path)}
    folders |= {*map(_package, importlib.metadata.distributions(name="keras_hvd"))}
    # Path.exists raises where a folder may not be read.
    found = {folder for folder in folders if os.path.exists(folder / "__init__.py")}
    return sorted(found - {PACKAGE})


def _package_in(folder: str) -> Path:
    """The folder of a package in one of sys.path, if there is any."""
    try:
        return Path(os.path.realpath(os.path.join(folder, "keras_hvd")))
    except OSError:
        # The current folder was deleted: `import` passes it over.
        return PACKAGE


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def _folder(distribution: importlib.metadata.Distribution, module: str) -> str:
    return str(distribution.locate_file(module))


def _package(distribution: importlib.metadata.Distribution) -> Path:
    """The folder of the package that an installation of keras_hvd has."""
    if _noted(distribution).get("dir_info", {}).get("editable"):
        origin = _origin(distribution)
        if origin is not None:
            return Path(os.path.realpath(origin / "keras_hvd"))
    return Path(os.path.realpath(_folder(distribution, "keras_hvd")))


def _origin(distribution: importlib.metadata.Distribution) -> Path | None:
    """The folder or file that a package was installed from; None: an index."""
    url = urllib.parse.urlparse(_noted(distribution).get("url", ""))
    if url.scheme != "file":
        return None
    return Path(urllib.request.url2pathname(url.path))


def _noted(distribution: importlib.metadata.Distribution) -> dict:
    """What pip noted of what did not come from an index (PEP 610)."""
    try:
        return json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        # As where pip has noted nothing: it is asked while something else is explained.
        return {}
