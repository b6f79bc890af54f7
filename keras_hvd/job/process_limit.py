"""Explains why the system has no room for another process or thread."""

from __future__ import annotations

import os
import resource

from keras_hvd.job import cores


def no_room() -> str:
    """Names the limit that leaves no room, as far as the system tells, and a remedy.

    The engine says the same of its own threads: tf_ops/transport/threads.h.

    Example:

    >>> no_room()
    'the system has no room for another process or thread: ...'
    """
    text = "the system has no room for another process or thread: "
    for path in cores.cgroup_files("pids", "pids.max"):
        most, now = path.read_text().strip(), (path.parent / "pids.current").read_text()
        if most != "max" and int(now) >= int(most):
            return (
                f"{text}the control group {path.parent} has {int(now)} processes and "
                f"threads, and may have {most} (pids.max; docker run --pids-limit; "
                "Kubernetes: podPidsLimit)"
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY:
        return (
            f"{text}user {os.getuid()} may have {limit} processes and threads "
            "(RLIMIT_NPROC; ulimit -u)"
        )
    return f"{text}see ulimit -v, /proc/sys/kernel/threads-max and pid_max beside it"
