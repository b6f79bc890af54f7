"""What this Python and this machine have: versions and libraries, found by looking.

Nothing is imported, so that what is broken or slow to load does no harm here.
"""

import ctypes
import importlib.metadata
import importlib.util


class Missing(Exception):
    """Something is not there; the text says what and why."""


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


def describe(module: str) -> str:
    """The same as `versions`, in words.

    Args:
        module: the name that is imported.

    Returns:
        The distributions with their versions.

    Raises:
        Missing: this Python has no such module.

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
