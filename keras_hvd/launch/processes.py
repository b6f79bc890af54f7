"""Keeps hold of processes with Linux's subreapers, parent-death signals and /proc."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents have died."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when `parent`, which forked it, dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call, and then no signal comes.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def descendants() -> list[int]:
    """Ids of this process' children, grandchildren and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        # A process may end between the listing and the reading.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, parent = _state_and_parent(int(entry))
            children.setdefault(parent, []).append(int(entry))
    found = []
    parents = [os.getpid()]
    while parents:
        born = children.get(parents.pop(), [])
        found += born
        parents += born
    return found


def signal_descendants(number: signal.Signals) -> None:
    """Sends a signal to every descendant of this process."""
    for process in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def reap() -> tuple[list[tuple[int, int]], bool]:
    """Collects ended children: their ids and wait statuses, and whether any remain."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if process == 0:
            return ended, True
        ended.append((process, status))


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger holds a process.

    Example:

    >>> is_stopped(os.getpid())
    False
    """
    try:
        return _state_and_parent(process)[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state_and_parent(process: int) -> tuple[str, int]:
    with open(f"/proc/{process}/stat", "rb") as status:
        # The name is in parentheses and may contain parentheses.
        fields = status.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1])


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
