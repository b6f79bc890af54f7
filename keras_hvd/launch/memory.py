"""Whether the kernel killed a process because memory ran out."""

import os
from pathlib import Path

from keras_hvd.job import cores
from keras_hvd.job.system_files import lines_of

_FIRST_PROCESS_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, the same on every Linux

_KERNEL_LOG = Path("/dev/kmsg")
_VMSTAT = Path("/proc/vmstat")

_COUNTED_PER_GROUP = (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill"))


class OutOfMemoryWatch:
    """Remembers how many processes the kernel had killed for memory at the start."""

    def __init__(self):
        self._log = _open_kernel_log()
        self._killed_before = _killed_in_group()
        self._killed_on_machine_before = _killed_on_machine()

    def killed(self, process: int) -> str | None:
        """Tells whether the kernel killed this process (ended by SIGKILL) for memory.

        Returns a clause for the message to the user, or None if there is no sign of it.
        """
        if self._log is not None:
            is_named = _log_names(self._log, process)
            return "by the kernel because memory ran out" if is_named else None
        if _killed_in_group() > self._killed_before:
            return "by the kernel because the control group's memory ran out"
        if _killed_on_machine() > self._killed_on_machine_before:
            return "probably by the kernel, which killed for memory during this job"
        return None


def _open_kernel_log() -> int | None:
    try:
        # In another PID namespace the kernel's log has other process ids than this one.
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PROCESS_NAMESPACE:
            return None
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # Reading it takes privileges, and there may be no /proc.
        return None
    os.lseek(log, 0, os.SEEK_END)
    return log


def _log_names(log: int, process: int) -> bool:
    """Whether the records since the last call say that a process was killed."""
    killed = f"Killed process {process} ".encode()
    named = False
    while True:
        try:
            named = killed in os.read(log, 8192) or named
        except BlockingIOError:
            return named
        except BrokenPipeError:
            # The kernel overwrote records before they were read: go on.
            continue


def _killed_in_group() -> int:
    return sum(
        _field(path, field)
        for name, field in _COUNTED_PER_GROUP
        for path in cores.cgroup_files("memory", name)[:1]
    )


def _killed_on_machine() -> int:
    return _field(_VMSTAT, "oom_kill")


def _field(path: Path, name: str) -> int:
    """A number in a file; 0 if it cannot be read."""
    for line in lines_of(path):
        field, number = line.split()
        if field == name:
            return int(number)
    return 0
