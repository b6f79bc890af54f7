"""The process that the user starts. It guards the process that runs the job.

It forks the job's process and then only passes signals on. When one of the two dies,
the other ends everything, so `kill -9` of either leaves nothing behind. They are in
different process groups: a signal to one group, such as the terminal's, reaches only
one of them.
"""

import os
import signal
from collections.abc import Callable

from keras_hvd.job import process_limit
from keras_hvd.launch import processes
from keras_hvd.launch.job import CANNOT_START, Job, handled

# How long to wait for processes that a job has left behind and that cannot be found.
_LEFT_SECONDS = 1.0


def run(make_job: Callable[[int, set[int]], Job]) -> int:
    """Runs a job to its very end, and returns the exit code.

    `make_job` gets the last two arguments of a `Job`.
    """
    # Some parents leave it ignored, and then no process can wait for a child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = handled()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    processes.adopt_orphans()
    lifeline, held = os.pipe2(os.O_CLOEXEC)
    try:
        job = os.fork()
    except BlockingIOError:
        os.write(2, f"khvdrun: error: {process_limit.no_room()}\n".encode())
        return CANNOT_START
    if job == 0:
        os.close(held)
        os.setpgid(0, 0)
        processes.adopt_orphans()
        return make_job(lifeline, mask).run()
    os.close(lifeline)
    status = _wait(job, awaited)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    message = f"khvdrun: {name} ended the job's process, so everything was killed\n"
    os.write(2, message.encode())
    return 128 - code


def _wait(job: int, awaited: set[signal.Signals]) -> int:
    """Passes signals on until the job's process and everything it left have ended."""
    status: int | None = None
    has_children = True
    while has_children:
        number = _next(awaited, is_patient=status is None or processes.are_visible())
        if number is None:
            break
        if number != signal.SIGCHLD:
            if status is None:
                os.kill(job, number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
            continue
        ended, has_children = processes.reap()
        status = dict(ended).get(job, status)
        if status is not None:
            processes.signal_descendants(signal.SIGKILL)
    assert status is not None
    return status


def _next(awaited: set[signal.Signals], is_patient: bool) -> int | None:
    """The next signal; None if there is none for a while, and that is long enough."""
    if is_patient:
        return signal.sigwait(awaited)
    found = signal.sigtimedwait(awaited, _LEFT_SECONDS)
    return None if found is None else found.si_signo
