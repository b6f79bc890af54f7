"""How jobs end: exit codes, the rank that is blamed, and no leftovers."""

import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def on(rank: int, script: str, others: str = ":") -> tuple[str, ...]:
    """A command that runs one script on one rank and another on the others."""
    return sh(f"if [ $KERAS_HVD_RANK = {rank} ]; then {script}; else {others}; fi")


def last_line(ended: subprocess.CompletedProcess) -> str:
    return ended.stderr.splitlines()[-1]


@contextlib.contextmanager
def within(seconds: float):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def test_succeeds_when_all_ranks_do_even_one_by_one(khvdrun):
    script = "read go < /dev/null; exec sleep 0.$KERAS_HVD_RANK"
    ended = khvdrun.run("-np", 3, *sh(script))
    assert ended.returncode == 0
    assert ended.stderr == ""


@pytest.mark.parametrize("code", [1, 2, 77, 255])
def test_exits_with_the_code_of_the_rank_that_failed(khvdrun, code):
    ended = khvdrun.run("-np", 3, *on(1, f"exit {code}"))
    assert ended.returncode == code
    assert "rank 1 (process" in last_line(ended)
    assert last_line(ended).endswith(f"failed first: it ended with exit code {code}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_names_the_signal_that_killed_a_rank(khvdrun, number):
    ended = khvdrun.run("-np", 3, *on(2, f"kill -{number:d} $$"))
    assert ended.returncode == 128 + number
    assert last_line(ended).startswith("khvdrun: rank 2 ")
    assert f"it was killed by signal {number:d} ({number.name})" in last_line(ended)


def test_shows_the_end_of_the_failed_ranks_stderr(khvdrun):
    script = "for i in $(seq 100); do echo line $i >&2; done; printf last >&2; exit 3"
    ended = khvdrun.run("-np", 2, *on(1, script))
    own = [line for line in ended.stderr.splitlines() if line.startswith("khvdrun:")]
    shown = [line.removeprefix("khvdrun:     ") for line in own[-21:-1]]
    assert own[-22] == "khvdrun: rank 1's stderr ended with:"
    assert shown == [f"line {i}" for i in range(82, 101)] + ["last"]


def test_shows_stderr_that_is_not_text(khvdrun):
    ended = khvdrun.run("-np", 1, *sh(r"printf '\377\n' >&2; exit 1"), text=False)
    assert "khvdrun:     \N{REPLACEMENT CHARACTER}\n".encode() in ended.stderr


def test_lets_the_others_end_by_themselves_before_sigterm(khvdrun):
    others = "trap 'echo told' TERM; exec 9<> /dev/null; sleep 1; echo ended; exit 9"
    patient = ("--term-after", 60)
    ended = khvdrun.run("-np", 2, *patient, *on(0, "exit 4", others))
    assert ended.returncode == 4
    assert ended.stdout == "[1] ended\n"
    assert "rank 1 ended with exit code 9" in ended.stderr


def after(folder: Path, *ranks: int) -> str:
    """Shell commands that wait until these ranks have set their traps."""
    return "".join(
        f"until [ -e {folder}/{rank} ]; do sleep 0.05; done; " for rank in ranks
    )


def test_sends_sigterm_to_those_who_stay(khvdrun, tmp_path):
    trap = f"trap 'echo told; exit 0' TERM; : > {tmp_path}/$KERAS_HVD_RANK"
    others = f"{trap}; while :; do sleep 0.1; done"
    fails = after(tmp_path, 1, 2) + "exit 4"
    with within(30):
        ended = khvdrun.run("-np", 3, "--term-after", 0.2, *on(0, fails, others))
    assert ended.returncode == 4
    assert sorted(ended.stdout.splitlines()) == ["[1] told", "[2] told"]
    assert "rank 1 ended with exit code 0 after khvdrun told it to end" in ended.stderr


def test_kills_those_who_ignore_sigterm(khvdrun, tmp_path):
    trap = f"trap '' TERM; : > {tmp_path}/$KERAS_HVD_RANK"
    others = f"{trap}; while :; do sleep 1; done"
    fails = after(tmp_path, 0, 2) + "exit 5"
    options = ("--term-after", 0.1, "--kill-after", 0.2)
    with within(30):
        ended = khvdrun.run("-np", 3, *options, *on(1, fails, others))
    assert ended.returncode == 5
    for rank in (0, 2):
        expected = f"rank {rank} was killed by signal 9 (SIGKILL) after khvdrun told it"
        assert expected in ended.stderr


def test_ends_a_stopped_rank_and_says_that_it_was(khvdrun):
    fails = "while ! grep -q '^State:.T' /proc/$(cat $0)/status; do :; done; exit 6"
    script = (
        f"if [ $KERAS_HVD_RANK = 0 ]; then {fails}; fi; echo $$ > $0; kill -STOP $$"
    )
    with within(30):
        ended = _with_file(khvdrun, "--term-after", 0.1, script=script)
    assert ended.returncode == 6
    assert "rank 1 was killed by signal 15" in ended.stderr
    assert "stopped by a signal until then" in ended.stderr


def _with_file(khvdrun, *options, script):
    path = Path(f"/tmp/khvdrun-test-{khvdrun.mark}")
    path.write_text("self")
    try:
        return khvdrun.run("-np", 2, *options, "sh", "-c", script, path)
    finally:
        path.unlink()


@pytest.mark.parametrize("blamed", [0, 3])
@pytest.mark.parametrize(
    "complaint",
    [
        "RankFailedError: rank x died",
        "keras_hvd [rank 1] error: rank 0 (pid 1 on host) has left the job",
    ],
    ids=["raised", "caught"],
)
def test_blames_the_rank_that_others_complain_about(khvdrun, blamed, complaint):
    # The survivors are gone before the failed rank, which takes a second to die.
    survivors = f"echo '{complaint}' >&2; exit 1"
    dies = on(blamed, "sleep 1; exit 42", survivors)
    ended = khvdrun.run("-np", 4, "--term-after", 60, *dies)
    assert ended.returncode == 42
    assert f"khvdrun: rank {blamed} " in last_line(ended)


def test_blames_the_killed_rank_of_those_that_end_together(khvdrun):
    # khvdrun is held while all ranks end, so that it sees their ends all at once.
    script = "read go < $0; [ $KERAS_HVD_RANK = 2 ] && kill -KILL $$; exit 1"
    gate = Path(f"/tmp/khvdrun-test-{khvdrun.mark}")
    os.mkfifo(gate)
    try:
        with khvdrun.start("--verbose", "-np", 4, "sh", "-c", script, gate) as job:
            ranks = _started_processes(job, 4)
            launcher = _parent(ranks[0])
            watched = [os.pidfd_open(rank) for rank in ranks]
            os.kill(launcher, signal.SIGSTOP)
            gate_end = os.open(gate, os.O_RDWR)
            os.write(gate_end, b"go\n" * 4)
            for descriptor in watched:
                assert select.select([descriptor], [], [], 20)[0]
                os.close(descriptor)
            os.close(gate_end)
            os.kill(launcher, signal.SIGCONT)
            last = job.stderr.read().splitlines()[-1]
    finally:
        gate.unlink()
    assert job.returncode == 128 + signal.SIGKILL
    assert last.startswith("khvdrun: rank 2 ")


def test_blames_a_crash_that_outlasts_the_patience(khvdrun, tmp_path):
    # Like a rank that writes a large core: it ends by its own signal, long after.
    survivors = f"{after(tmp_path, 1)}echo RankFailedError: rank x died >&2; exit 1"
    crash = f"trap '' TERM; : > {tmp_path}/1; sleep 0.5; kill -ABRT $$"
    ended = khvdrun.run("-np", 3, "--term-after", 0.1, *on(1, crash, survivors))
    assert ended.returncode == 128 + signal.SIGABRT
    assert last_line(ended).startswith("khvdrun: rank 1 ")


def test_names_a_rank_that_left_while_others_waited(khvdrun):
    # Ranks 1 and 2 both end well; rank 0 complains about one of them.
    here = f"pid $(cat $0) on {socket.gethostname()}"
    complaint = f"RankFailedError: rank 1 ({here}) has left the job"
    script = (
        "case $KERAS_HVD_RANK in "
        "1) echo $$ > $0.new; mv $0.new $0;; "
        "0) while ! [ -s $0 ]; do sleep 0.05; done; "
        f"echo {complaint!r} >&2; exit 1;; "
        "esac"
    )
    script = script.replace("'", '"')
    pid = Path(f"/tmp/khvdrun-test-{khvdrun.mark}")
    try:
        ended = khvdrun.run("-np", 3, "sh", "-c", script, pid)
    finally:
        pid.unlink()
    assert ended.returncode == 1
    assert last_line(ended) == (
        "khvdrun: rank 1 had left with exit code 0 while others still waited for it: "
        "all ranks must make the same collective calls (look for one that is inside "
        "`if keras_hvd.rank() == 0:`)"
    )


def test_says_when_a_rank_dumped_core(khvdrun, tmp_path):
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    if pattern.startswith("|") or "/" in pattern:
        pytest.skip("core files do not go to the working directory here")

    def allow_cores():
        limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))

    ended = khvdrun.run(
        *("-np", 2, *on(1, "kill -SEGV $$")),
        cwd=tmp_path,
        preexec_fn=allow_cores,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ended.returncode == 128 + signal.SIGSEGV
    assert "(SIGSEGV), core dumped" in last_line(ended)


# Processes that ranks leave: in their group, in a session of its own, fully detached,
# and deaf to every signal that can be ignored.
LEFTOVERS = (
    "sleep 1000 & "
    "setsid sleep 1000 & "
    "(setsid sh -c 'sleep 1000 & sleep 1000' &) ; "
    "(trap '' TERM INT HUP; setsid sleep 1000 &) ; "
)


@pytest.mark.parametrize("code", [0, 3])
def test_ends_what_ranks_leave_running(khvdrun, code):
    with within(30):
        ended = khvdrun.run(
            "-np", 2, "--kill-after", 0.5, *sh(LEFTOVERS + f"exit {code}")
        )
    assert ended.returncode == code
    # The fixture checks that no process is left.


def _started_processes(job, count: int) -> list[int]:
    """Reads the ranks' process ids from the output of `khvdrun --verbose`."""
    found = {}
    while len(found) < count:
        words = job.stderr.readline().split()
        if words[1:2] == ["rank"] and words[3:5] == ["is", "process"]:
            found[int(words[2])] = int(words[5].rstrip(","))
    return [found[rank] for rank in range(count)]


def _parent(process: int) -> int:
    stat = Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victims", [["guardian"], ["job"], ["group"]])
def test_leaves_nothing_when_khvdrun_is_killed(khvdrun, victims):
    script = LEFTOVERS + "echo ready; sleep 1000"
    command = ("--verbose", "-np", 2, *sh(script))
    with khvdrun.start(*command, start_new_session=True) as job:
        ranks = _started_processes(job, 2)
        for _ in range(2):
            job.stdout.readline()
        if victims == ["guardian"]:
            job.kill()
        elif victims == ["job"]:
            os.kill(_parent(ranks[0]), signal.SIGKILL)
        else:
            os.killpg(job.pid, signal.SIGKILL)
        with within(30):
            khvdrun.wait_until_gone()
    assert khvdrun.processes() == []
    if victims == ["job"]:
        assert job.returncode == 128 + signal.SIGKILL
    else:
        assert job.returncode == -signal.SIGKILL


def test_a_khvdrun_that_was_killed_blames_no_rank(khvdrun):
    with khvdrun.start("-np", 2, *sh("echo ready; exec sleep 1000")) as job:
        for _ in range(2):
            job.stdout.readline()
        job.kill()
        said = job.stderr.read()
    khvdrun.wait_until_gone()
    assert said == "khvdrun: khvdrun itself was killed, and all ranks with it\n"


def test_a_job_goes_on_where_its_output_has_no_room(khvdrun):
    script = "echo lost; echo kept >&2; sleep 0.1; echo lost again"
    with open("/dev/full", "wb") as full:
        ended = khvdrun.run("-np", 1, *sh(script), stdout=full)
    assert ended.returncode == 0
    assert sorted(ended.stderr.splitlines()) == [
        "[0] kept",
        "khvdrun: standard output cannot be written: No space left on device. The job "
        "goes on, and lines are missing",
    ]


def test_ranks_die_even_if_both_of_khvdruns_processes_are_killed(khvdrun):
    with khvdrun.start("--verbose", "-np", 2, "sleep", "1000") as job:
        ranks = _started_processes(job, 2)
        launcher = _parent(ranks[0])
        os.kill(job.pid, signal.SIGSTOP)
        os.kill(launcher, signal.SIGKILL)
        job.kill()
        khvdrun.wait_until_gone()
    assert khvdrun.processes() == []


def test_kills_started_ranks_when_a_later_one_cannot_start(khvdrun):
    # Processes run out while ranks are started.
    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    with within(30):
        ended = khvdrun.run("-np", 100, "sleep", 1000, preexec_fn=few_files)
    assert ended.returncode == 2
    assert last_line(ended).startswith("khvdrun: error: cannot execute 'sleep'")
    assert "Too many open files" in last_line(ended)


MEMORY_HOG = "x = bytearray(1 << 30)"


def test_says_that_the_kernel_killed_for_memory(khvdrun):
    group = Path(f"/sys/fs/cgroup/memory/keras_hvd_test_{khvdrun.mark}")
    limit = group / "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group = Path(f"/sys/fs/cgroup/keras_hvd_test_{khvdrun.mark}")
        limit = group / "memory.max"
    try:
        group.mkdir()
        limit.write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a control group with a limit: {error}")

    def enter():
        (group / "cgroup.procs").write_text(str(os.getpid()))

    program = f"import os\nif os.environ['KERAS_HVD_RANK'] == '1': {MEMORY_HOG}"
    try:
        ended = khvdrun.run("-np", 2, *python(program), preexec_fn=enter)
    finally:
        group.rmdir()
    assert ended.returncode == 128 + signal.SIGKILL
    page = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
    (documented,) = re.findall(r"^    (khvdrun: rank 1 .* failed first.*)", page, re.M)
    said = last_line(ended).replace("the control group's memory", "memory")
    assert re.sub(r"process \d+", "process 4711", said) == documented


# Commands by which root changes /proc for processes of a namespace of their own.
PROC = {
    "hides others": "mount -t proc -o hidepid=1,gid=65534 proc /proc",
    "does not name others": "mount -t proc -o hidepid=2,gid=65534 proc /proc",
    "is missing": "mount -t tmpfs tmpfs /proc",
}


@pytest.fixture(params=PROC.values(), ids=PROC)
def where_proc_differs(request) -> list[str]:
    """The beginning of a command that runs under another /proc."""
    # Root sees all by this right.
    drop = "setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace"
    command = ["unshare", "--mount", "sh", "-c", f'{request.param} && exec {drop} "$@"']
    command.append("sh")
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(str(error))
    if tried.returncode != 0:
        pytest.skip(f"there can be no other /proc: {tried.stderr.strip()}")
    return command


@pytest.fixture
def somebody_elses() -> Iterator[subprocess.Popen]:
    """A process of another user."""
    with subprocess.Popen(["sleep", "1000"], user=65534) as process:
        yield process
        process.kill()


def test_ends_jobs_whatever_proc_shows(khvdrun, where_proc_differs, somebody_elses):
    def end(script):
        options = ("-np", "2", "--term-after", "0", "--kill-after", "0.5", "sh", "-c")
        started = (sys.executable, "-m", "keras_hvd.launch", *options, script)
        command = [*where_proc_differs, *started]
        marked = {**os.environ, "KERAS_HVD_TEST_MARK": khvdrun.mark}
        pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        ended = subprocess.run(command, env=marked, timeout=60, **pipes)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended.returncode, ended.stderr

    assert end("exit 0") == (0, "")
    orphan = "(sleep 1000 &)"
    code, _ = end(f"{orphan}; [ $KERAS_HVD_RANK = 0 ] && exit 4; exec sleep 1000")
    assert code == 4
    assert khvdrun.processes() == []

    code, said = end("[ $KERAS_HVD_RANK = 1 ] || (setsid sleep 1000 &)")
    left = khvdrun.processes()
    assert (code, len(left)) == (0, int("cannot be found" in said))
    for line in left:
        os.kill(int(line.partition(":")[0]), signal.SIGKILL)
    khvdrun.wait_until_gone()
    assert somebody_elses.poll() is None


# Rank 1's script ends in one way or the other while a thread of it, which is no daemon,
# goes on. The others tell how long they have waited for it.
STAYS = """
import sys, threading, time
import keras_hvd as hvd
hvd.init()
hvd.allgather_object("all are there")
if hvd.rank() == 1:
    threading.Thread(target=time.sleep, args=(60,), name="reader").start()
    {end}
began = time.monotonic()
try:
    hvd.allgather_object("and now?")
except hvd.KerasHvdError as error:
    print(time.monotonic() - began, type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (
            "raise ValueError('of no use')",
            "its script has ended with ValueError: of no use, and its thread 'reader' "
            "stays",
        ),
        ("sys.exit(0)", "its script has ended, and its thread 'reader' stays"),
    ],
    ids=["exception", "exit"],
)
def test_a_thread_that_outlives_its_script_keeps_nobody_waiting(khvdrun, end, how):
    job = khvdrun.start("-np", 3, *python(STAYS.format(end=end)))
    told = []
    while len(told) < 2:
        line = job.stdout.readline()
        assert line, job.communicate()
        if "RankFailedError" in line:
            told.append(line)
    job.send_signal(signal.SIGTERM)
    job.communicate()
    for line in told:
        # The thread stays for a minute.
        assert float(line.split()[1]) < 10, line
        assert "rank 1 (pid" in line and f"has left the job: {how}" in line


GOES_ON = """
import threading
import numpy as np
import keras_hvd as hvd
hvd.init()
main = threading.main_thread()

def work():
    main.join()
    for step in range(3):
        threading.Event().wait(0.5)  # longer together than threads may take to end
        assert hvd.allgather_object(hvd.rank()) == [*range(hvd.size())]
    print("all steps")

hvd.allgather_object(0)
threading.Thread(target=lambda: (hvd.allgather_object(0, name="x"), work())).start()
"""


def test_a_thread_that_outlives_its_script_may_go_on_with_collectives(khvdrun):
    ended = khvdrun.run("-np", 2, *python(GOES_ON))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all steps") == 2


EXECUTOR = """
import atexit, concurrent.futures
import keras_hvd as hvd
hvd.init()
atexit.register(lambda: print(hvd.allgather_object(hvd.rank())))
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(int).result()
{end}
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('of no use')"])
def test_an_executors_idle_thread_changes_nothing_at_the_end(khvdrun, end):
    """It is there when the script ends, and atexit functions have collectives."""
    ended = khvdrun.run("-np", 2, *python(EXECUTOR.format(end=end)))
    assert ended.returncode == int(bool(end)), ended.stderr
    assert ended.stdout.count("[0, 1]") == 2
    assert "has left the job" not in ended.stderr
