"""Signals that khvdrun gets: passed on, counted, ignored where they were before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Says which signals it gets, and ends with 0 after SIGTERM.
LISTENER = (
    "import signal, sys\n"
    "def got(number, frame):\n"
    "    print(signal.Signals(number).name)\n"
    "    if number == signal.SIGTERM: sys.exit(0)\n"
    "for name in ('INT', 'TERM', 'HUP', 'QUIT', 'USR1', 'USR2'):\n"
    "    signal.signal(getattr(signal, 'SIG' + name), got)\n"
    "print('ready')\n"
    "while True: signal.pause()\n"
)


def start_listeners(khvdrun, **popen) -> subprocess.Popen:
    job = khvdrun.start("-np", 2, sys.executable, "-c", LISTENER, **popen)
    assert read_both(job) == ["[0] ready", "[1] ready"]
    return job


def read_both(job) -> list[str]:
    return sorted(job.stdout.readline().rstrip("\n") for _ in range(2))


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_passes_a_signal_on_to_all_ranks(khvdrun, name):
    with start_listeners(khvdrun) as job:
        job.send_signal(getattr(signal, name))
        assert read_both(job) == [f"[0] {name}", f"[1] {name}"]
        job.terminate()
        assert read_both(job) == ["[0] SIGTERM", "[1] SIGTERM"]
    assert job.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_exits_as_the_signal_says(khvdrun, number):
    with khvdrun.start("-np", 2, "sh", "-c", "echo ready; exec sleep 100") as job:
        read_both(job)
        job.send_signal(number)
        stderr = job.stderr.read()
    assert job.returncode == 128 + number
    assert stderr == f"khvdrun: the job was ended by {number.name}\n"


INTERRUPTED = """
import keras_hvd, threading
def wait():
    print("ready", flush=True); threading.Event().wait()
keras_hvd.init()
wait()
"""


def test_an_interrupt_is_a_line_of_each_rank_that_says_where_it_was(khvdrun):
    with khvdrun.start("-np", 2, sys.executable, "-c", INTERRUPTED) as job:
        assert read_both(job) == ["[0] ready", "[1] ready"]
        job.send_signal(signal.SIGINT)
        stderr = job.stderr.read()
    assert job.returncode == 128 + signal.SIGINT
    *of_ranks, verdict = stderr.splitlines()
    assert verdict == "khvdrun: the job was ended by SIGINT"
    where = "KeyboardInterrupt in line 4 of <string>"
    assert sorted(of_ranks) == [f"[0] {where}", f"[1] {where}"]


def test_an_exception_of_the_script_has_its_traceback(khvdrun):
    script = "import keras_hvd\nkeras_hvd.init()\nraise ValueError('of the script')"
    ended = khvdrun.run("-np", 2, sys.executable, "-c", script)
    assert "[1] Traceback (most recent call last):" in ended.stderr
    assert '[1]   File "<string>", line 3, in <module>' in ended.stderr


def test_a_script_that_prints_its_exceptions_itself_goes_on_to(khvdrun):
    script = (
        "import sys, keras_hvd\n"
        "sys.excepthook = lambda kind, *_: print('mine:', kind.__name__)\n"
        "keras_hvd.init()\n"
        "raise KeyboardInterrupt"
    )
    ended = khvdrun.run("-np", 2, sys.executable, "-c", script)
    lines = sorted(ended.stdout.splitlines())
    assert lines == ["[0] mine: KeyboardInterrupt", "[1] mine: KeyboardInterrupt"]


def test_reaches_what_a_rank_has_started(khvdrun):
    # A shell that waits for a program gets Ctrl-C together with the program.
    waits = "echo ready; while :; do sleep 0.05; done"
    script = f"sh -c 'trap \"echo inner; exit\" INT; {waits}'"
    with khvdrun.start("-np", 1, "sh", "-c", script + "; echo outer") as job:
        assert job.stdout.readline() == "[0] ready\n"
        job.send_signal(signal.SIGINT)
        assert "[0] inner\n" in job.stdout.read()


def test_kills_on_the_second_ctrl_c(khvdrun):
    with start_listeners(khvdrun) as job:
        job.send_signal(signal.SIGINT)
        assert read_both(job) == ["[0] SIGINT", "[1] SIGINT"]
        job.send_signal(signal.SIGINT)
        assert job.stdout.read() == ""
    assert job.returncode == 128 + signal.SIGINT


def test_does_not_hear_what_was_ignored_from_the_start(khvdrun):
    # As under nohup, for khvdrun and for the ranks.
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with khvdrun.start(
        *("-np", 2, "sh", "-c", "echo ready; exec sleep 100"), preexec_fn=ignore
    ) as job:
        read_both(job)
        job.send_signal(signal.SIGHUP)
        job.terminate()
    assert job.returncode == 128 + signal.SIGTERM


def test_waits_for_ranks_even_if_its_parent_ignored_children(khvdrun):
    def ignore():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    assert (
        khvdrun.run("-np", 2, "sh", "-c", "exit 3", preexec_fn=ignore).returncode == 3
    )


def test_gives_ranks_the_signal_settings_that_it_was_given(khvdrun):
    program = (
        "import signal\n"
        "names = ('SIGTTOU', 'SIGCHLD', 'SIGINT', 'SIGTERM', 'SIGTSTP', 'SIGWINCH')\n"
        "print([n for n in names if signal.getsignal(getattr(signal, n)) is\n"
        "       signal.SIG_IGN], signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    ended = khvdrun.run("-np", 1, sys.executable, "-c", program)
    assert ended.stdout == "[0] [] set()\n"


def test_stops_and_continues_with_ctrl_z(khvdrun):
    with start_listeners(khvdrun) as job:
        job.send_signal(signal.SIGTSTP)
        # The guardian stops itself after it has passed the signal on.
        assert os.WIFSTOPPED(os.waitpid(job.pid, os.WUNTRACED)[1])
        deadline = time.monotonic() + 20
        while states(khvdrun).count("T") != 3:
            assert time.monotonic() < deadline, states(khvdrun)
        job.send_signal(signal.SIGCONT)
        job.terminate()
        assert read_both(job) == ["[0] SIGTERM", "[1] SIGTERM"]
    assert job.returncode == 0


def states(khvdrun) -> str:
    """The states, such as S or T, of all processes of the test."""
    processes = [line.partition(":")[0] for line in khvdrun.processes()]
    stats = [Path(f"/proc/{process}/stat").read_text() for process in processes]
    return "".join(stat.rpartition(")")[2].split()[0] for stat in stats)
