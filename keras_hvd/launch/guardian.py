"""The process that the user starts: it outlives the job, and the job outlives it.

It forks the process that runs the job and does nothing but pass signals on. Each of the
two ends everything when the other dies, however it dies: that nothing is left behind
must not hang on one process that `kill -9` may hit. The two are in different process
groups, so that a signal to one group, such as the terminal's, reaches one of them.
"""

import os
import signal

from keras_hvd.launch import processes
from keras_hvd.launch.command_line import Options
from keras_hvd.launch.job import Job, handled


def run(options: Options) -> int:
    """Runs a job and stays until all of it has ended.

    Args:
        options: What the user asked for.

    Returns:
        What khvdrun exits with.
    """
    # Were it ignored, as some parents leave it, nobody could wait for a child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = handled()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    processes.adopt_orphans()
    lifeline, held = os.pipe2(os.O_CLOEXEC)
    job = os.fork()
    if job == 0:
        os.close(held)
        os.setpgid(0, 0)
        processes.adopt_orphans()
        return Job(options, lifeline, mask).run()
    os.close(lifeline)
    status = _wait(job, awaited)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    message = f"khvdrun: {name} ended the process that ran the job: all was killed\n"
    os.write(2, message.encode())
    return 128 - code


def _wait(job: int, awaited: set[signal.Signals]) -> int:
    """Passes signals on until the job's process has ended, and all that it left."""
    status: int | None = None
    has_children = True
    while has_children:
        number = signal.sigwait(awaited)
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
