"""Keeps hold of processes with Linux's subreapers, parent-death signals and /proc."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Where /proc does not show descendants, they are found by process groups. Processes
# that this one has started or reaped may have led these groups.
_leaders: set[int] = set()

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


def are_visible() -> bool:
    """Whether /proc shows this process' descendants.

    A container may have none, or that of another PID namespace, with other numbers.

    Example:

    >>> are_visible()
    True
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def descendants() -> list[int]:
    """Ids of this process' children, grandchildren and so on, if they are visible."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if are_visible() else ():
        if not entry.isdecimal():
            continue
        # A process may end between the listing and the reading, and other users'
        # processes may be hidden (hidepid).
        with contextlib.suppress(OSError):
            _, parent = _state_and_parent(int(entry))
            children.setdefault(parent, []).append(int(entry))
    found = []
    parents = [os.getpid()]
    while parents:
        born = children.get(parents.pop(), [])
        found += born
        parents += born
    return found


def note_leader(process: int) -> None:
    """Remembers a process that this one has started as the leader of a group."""
    _leaders.add(process)


def signal_descendants(number: signal.Signals) -> None:
    """Sends a signal to every descendant of this process.

    Where they are not visible, only descendants in known process groups get it. SIGKILL
    goes to the groups in any case: some descendants may be hidden while others are not,
    and a second SIGKILL does no harm.
    """
    for process in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
    if are_visible() and number != signal.SIGKILL:
        return
    for leader in _leaders_of_children():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def _leaders_of_children() -> list[int]:
    """The known leaders in whose groups children of this process still are.

    The child proves that no other group has the number by now.
    """
    found = []
    for leader in [*_leaders]:
        try:
            os.waitid(os.P_PGID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            _leaders.discard(leader)
            continue
        if leader != os.getpgrp():
            found.append(leader)
    return found


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
        _leaders.add(process)


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger holds a process.

    Example:

    >>> is_stopped(os.getpid())
    False
    """
    try:
        return _state_and_parent(process)[0] in "Tt"
    except OSError:
        return _is_stopped_child(process)


def _is_stopped_child(process: int) -> bool:
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, process, options) is not None
    except ChildProcessError:
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
