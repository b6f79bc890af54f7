"""Finds packages and libraries of this Python and this machine.

It imports nothing, so packages that are broken or slow to load do no harm.
"""

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
    """Something is missing; the text names it and says why."""


class Overwritten(Missing):
    """A module comes from two packages; the text says what to do."""


def versions(module: str) -> dict[str, str]:
    """Distributions that provide a module, and their versions; {} without a package.

    Raises Missing if this Python has no such module.

    Example:

    >>> list(versions("pytest"))
    ['pytest']
    """
    if importlib.util.find_spec(module) is None:
        raise Missing(f"no module named {module!r} in this Python")
    names = importlib.metadata.packages_distributions().get(module, [])
    return {name: importlib.metadata.version(name) for name in sorted({*names})}


def require_one_version(module: str) -> None:
    """Raises Overwritten if packages of several versions share a module's folder."""
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
    """Like `versions`, as text."""
    found = [f"{name} {version}" for name, version in versions(module).items()]
    return ", ".join(found) or "not from a package: its version is unknown"


def install_command(extra: str = "") -> str:
    """The pip command that reinstalls this copy from its folder, file or version.

    With an extra, it installs what the extra adds. A checkout that hides an installed
    copy gives that one's. A note in brackets follows if the source may be elsewhere.

    Example:

    >>> install_command().startswith(sys.executable + " -m pip install ")
    True
    """
    copy = hidden_copy() or PACKAGE
    wanted = f"[{extra}]" if extra else ""
    if (copy.parent / "WORKSPACE").exists():
        return _pip("install", "-e", f"{copy.parent}{wanted}")
    options = () if extra else ("--force-reinstall", "--no-deps")
    origins = (
        _origin(each)
        for each in importlib.metadata.distributions(name="keras_hvd")
        if _package(each) == copy
    )
    origin = next(origins, None)
    if origin is None:
        command = _pip("install", *options, f"keras_hvd{wanted}=={__version__}")
        return f"{command} (if it came from a wheel file, name that file instead)"
    command = _pip("install", *options, f"{origin}{wanted}")
    # It may have been deleted, or belong to another user.
    if not os.path.exists(origin):
        command += " (which is no longer there: name the place where it is now)"
    return command


def hidden_copy() -> Path | None:
    """The installed copy that this checkout, which is not installed in place, hides."""
    if not (PACKAGE.parent / "WORKSPACE").exists():
        return None
    copies = [
        _package(each)
        for each in importlib.metadata.distributions(name="keras_hvd")
        # Builds leave an .egg-info in a checkout, which is no installation.
        if each.read_text("METADATA") is not None
    ]
    if PACKAGE in copies:
        return None
    return next((each for each in copies if os.path.exists(each / "__init__.py")), None)


def how_to_use_the_hidden() -> str:
    """Says that this checkout hides an installed copy, and what to do; else "".

    Example:

    >>> how_to_use_the_hidden()
    ''
    """
    hidden = hidden_copy()
    if hidden is None:
        return ""
    checkout = PACKAGE.parent
    hides = f"The checkout {checkout} hides the keras_hvd that is installed in {hidden}"
    on_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if str(checkout) in map(os.path.realpath, on_path):
        return f"{hides}: take it out of PYTHONPATH"
    # Earlier Pythons do not know it.
    safe = ", or with PYTHONSAFEPATH=1 (python -P)" * (sys.version_info >= (3, 11))
    return (
        f"{hides}, because Python looks first into the script's folder (with -m or -c "
        f"into the current one). Run the script in another folder{safe}"
    )


def other_copies() -> list[Path]:
    """Folders of other copies of keras_hvd, on this Python's path or installed."""
    folders = {*map(_package_in, sys.path)}
    folders |= {*map(_package, importlib.metadata.distributions(name="keras_hvd"))}
    # Path.exists raises for unreadable folders.
    found = {folder for folder in folders if os.path.exists(folder / "__init__.py")}
    return sorted(found - {PACKAGE})


def _package_in(folder: str) -> Path:
    """The folder of keras_hvd's package in a folder of sys.path."""
    try:
        return Path(os.path.realpath(os.path.join(folder, "keras_hvd")))
    except OSError:
        # The current folder was deleted; `import` skips it.
        return PACKAGE


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def _folder(distribution: importlib.metadata.Distribution, module: str) -> str:
    return str(distribution.locate_file(module))


def _package(distribution: importlib.metadata.Distribution) -> Path:
    """The folder of the package of an installed keras_hvd."""
    if _noted(distribution).get("dir_info", {}).get("editable"):
        origin = _origin(distribution)
        if origin is not None:
            return Path(os.path.realpath(origin / "keras_hvd"))
    return Path(os.path.realpath(_folder(distribution, "keras_hvd")))


def _origin(distribution: importlib.metadata.Distribution) -> Path | None:
    """The folder or file that a package was installed from; None for an index."""
    url = urllib.parse.urlparse(_noted(distribution).get("url", ""))
    if url.scheme != "file":
        return None
    return Path(urllib.request.url2pathname(url.path))


def _noted(distribution: importlib.metadata.Distribution) -> dict:
    """pip's record of a package that did not come from an index (PEP 610)."""
    try:
        return json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        # Treated as no record, because this runs while another error is explained.
        return {}
