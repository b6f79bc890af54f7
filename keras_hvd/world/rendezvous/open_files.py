"""The limit of this process' open files: each connection to another rank is one."""

from __future__ import annotations

import os
import resource

# Files that the script may open besides.
_OTHERS = 256


def allow(more: int) -> None:
    """Raises this process' own limit by `more` files, as far as it may.

    Args:
        more: files, beside those that are open.

    Example:

    >>> allow(100)
    >>> soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    >>> soft == resource.RLIM_INFINITY or soft > 100
    True
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _count() + more + _OTHERS
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if limit != resource.RLIM_INFINITY and limit < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _count() -> int:
    """The number of open files of this process; an estimate without /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        # The lowest free number: there are few gaps.
        free = os.dup(0)
        os.close(free)
        return free
