"""Diagnoses of the kernel's files, and of good and bad figures."""

import os
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from keras_hvd.job import cores
from keras_hvd.launch.diagnosis import (
    limits,
    machine,
    measurement,
    network,
    optional,
    probes,
    shared_memory,
)
from keras_hvd.launch.diagnosis.findings import Verdict
from keras_hvd.launch.options import Options
from keras_hvd.world.rendezvous.nodes import Node

UNLIMITED_V1 = "9223372036854771712\n"
MEBIBYTE = 1 << 20


@pytest.fixture
def control_group(tmp_path, monkeypatch):
    """Makes files that stand for the control groups of this process."""

    def make(table: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "table").write_text(table)
        monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
        monkeypatch.setattr(cores, "_CGROUP_TABLE", tmp_path / "table")

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return make


V1_TABLE = "12:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n3:pids:/docker/4f\n0::/\n"


def v1_memory(limit: str) -> dict[str, str]:
    return {
        "memory/memory.limit_in_bytes": limit,
        "memory/memory.usage_in_bytes": f"{300 * MEBIBYTE}\n",
        "memory/memory.stat": f"cache 7\ninactive_file 5\n"
        f"total_inactive_file {100 * MEBIBYTE}\n",
    }


def v2_memory(limit: str, group: str = "") -> dict[str, str]:
    return {
        f"{group}memory.max": limit,
        f"{group}memory.current": f"{300 * MEBIBYTE}\n",
        f"{group}memory.stat": f"anon 7\ninactive_file {100 * MEBIBYTE}\n",
    }


@pytest.mark.parametrize(
    ("table", "files", "limit"),
    [
        pytest.param("0::/\n", {}, None, id="none"),
        pytest.param("0::/\n", v2_memory("max\n"), None, id="v2-max"),
        pytest.param("0::/\n", v2_memory("1073741824\n"), 1 << 30, id="v2"),
        pytest.param(
            "0::/a/b\n",
            {**v2_memory("max\n", "a/b/"), **v2_memory("536870912\n", "a/")},
            1 << 29,
            id="v2-parent",
        ),
        pytest.param(V1_TABLE, v1_memory(UNLIMITED_V1), None, id="v1-unlimited"),
        pytest.param(V1_TABLE, v1_memory("1073741824\n"), 1 << 30, id="v1"),
    ],
)
def test_reads_the_memory_limit(control_group, table, files, limit):
    control_group("0::/nowhere\n", {})
    unlimited = limits.free_memory()
    control_group(table, files)
    assert limits.memory_limit() == limit
    if limit is not None:
        # Unused pages of files do not count as used.
        assert limits.free_memory() == limit - 200 * MEBIBYTE
    else:
        assert limits.free_memory() == pytest.approx(unlimited, rel=0.2)


def test_says_whether_ranks_fit_into_memory(control_group):
    control_group("0::/\n", v2_memory(f"{8 << 30}\n"))
    if limits.free_memory() < 7 << 30:
        pytest.skip("needs 7 GiB of free memory")
    assert limits.memory(2).verdict is Verdict.OK
    assert limits.memory(20).verdict is Verdict.WARNING
    assert limits.memory(2000).verdict is Verdict.FAILURE


@pytest.mark.parametrize(
    ("table", "files", "figure", "verdict"),
    [
        pytest.param(
            "0::/\n", {"cpu.max": "max 100000\n"}, "no CPU quota", Verdict.OK, id="max"
        ),
        pytest.param(
            "0::/\n", {"cpu.max": "400000 100000\n"}, "quota 4", Verdict.OK, id="v2"
        ),
        pytest.param(
            *("0::/\n", {"cpu.max": "150000 100000\n"}),
            *("the time of 1.5 of them (CPU quota)", Verdict.WARNING),
            id="v2-too-little",
        ),
        pytest.param(
            V1_TABLE,
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            *("the time of 0.5 of them (CPU quota)", Verdict.WARNING),
            id="v1-too-little",
        ),
        pytest.param(
            V1_TABLE,
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            *("no CPU quota", Verdict.OK),
            id="v1-unlimited",
        ),
    ],
)
def test_compares_the_quota_to_the_ranks(control_group, table, files, figure, verdict):
    control_group(table, files)
    found = machine.available(2)
    assert found.figure.endswith(figure)
    assert found.verdict is verdict
    assert ("-np" in found.advice) == (verdict is Verdict.WARNING)


@pytest.mark.parametrize(
    ("table", "files", "times"),
    [
        ("0::/\n", {}, 0),
        ("0::/\n", {"cpu.stat": "usage_usec 9\nnr_periods 5\nnr_throttled 3\n"}, 3),
        # The root of version 2 counts no periods.
        ("0::/\n", {"cpu.stat": "usage_usec 9\nuser_usec 8\n"}, 0),
        (V1_TABLE, {"cpu/cpu.stat": "nr_periods 5\nnr_throttled 2\n"}, 2),
    ],
)
def test_reads_how_often_the_quota_ran_out(control_group, table, files, times):
    control_group(table, files)
    assert machine.times_throttled() == times


@pytest.mark.parametrize(
    ("table", "files", "left"),
    [
        ("0::/\n", {"pids.max": "max\n", "pids.current": "5\n"}, None),
        ("0::/\n", {"pids.max": "100\n", "pids.current": "40\n"}, 60),
        (V1_TABLE, {"pids/pids.max": "30\n", "pids/pids.current": "29\n"}, 1),
    ],
)
def test_reads_the_limit_of_processes(control_group, table, files, left):
    control_group(table, files)
    found = limits.processes(1)
    expected = "no limit" if left is None else f"{left} more may be started"
    assert found.figure.startswith(expected)
    assert (found.verdict is Verdict.WARNING) == (left == 1)


def test_sees_ranks_on_threads_of_one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "place", lambda core: (0, core % 2, core))
    alone, shared = machine.threads(2), machine.threads(4)
    assert alone.figure == shared.figure == "2, of 4 threads (SMT)"
    assert alone.verdict is Verdict.OK
    assert shared.verdict is Verdict.WARNING
    assert shared.advice.endswith("-np 2 gives each a core of its own")


def test_measures_between_memory_nodes(monkeypatch, tmp_path):
    usable = sorted(os.sched_getaffinity(0))
    for node, core in enumerate((usable[0], usable[-1])):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{core}\n")
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    found = machine.memory_nodes("none")
    assert found.verdict is Verdict.WARNING
    assert found.figure.startswith("2; copies from its own ")
    assert found.figure.count("GB/s") == 2
    assert machine.memory_nodes("cores").verdict is Verdict.OK
    assert sorted(os.sched_getaffinity(0)) == usable


def test_binds_for_a_moment_only():
    before = os.sched_getaffinity(0)
    assert machine.binding(len(before) + 1, "cores").verdict is Verdict.OK
    assert os.sched_getaffinity(0) == before


def test_measures_round_trips():
    before = os.sched_getaffinity(0)
    trips = probes.round_trips(cores.shares(2), 50, patience=30)
    assert len(trips) == 50
    # One of them may wait for a core.
    assert all(seconds > 0 for seconds in trips) and statistics.median(trips) < 1
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_ends_round_trips_in_time():
    assert len(probes.round_trips(cores.shares(2), 10**9, patience=0.05)) >= 1


def test_finds_what_dead_programs_left(tmp_path):
    dead = tmp_path / "vader_segment.host.1.0"
    dead.write_bytes(b"x" * 8192)
    held = tmp_path / "nccl-Ab12"
    (tmp_path / "data-set").write_bytes(b"x")
    with held.open("wb"):
        found = shared_memory.leftovers(tmp_path)
    assert found.verdict is Verdict.WARNING
    assert found.figure.startswith("1 file, ")
    assert found.advice.endswith(f": rm {dead}")


def test_finds_no_leftovers(tmp_path):
    (tmp_path / "data-set").write_bytes(b"x")
    assert shared_memory.leftovers(tmp_path).verdict is Verdict.OK


def figures(**changed) -> measurement.Figures:
    """The figures of a good machine with enough cores."""
    usual = {
        "ranks": 2,
        "largest": 64 * MEBIBYTE,
        "alone": 7e-3,
        "together": {MEBIBYTE: 60e-6, 64 * MEBIBYTE: 9e-3},
        "allreduce": {
            size: {"median": median, "p90": 2 * median, "calls": 10}
            for size, median in (
                *((4, 4e-6), (1024, 4e-6)),
                *((MEBIBYTE, 90e-6), (64 * MEBIBYTE, 13e-3)),
            )
        },
        "sleeps": 900,
        "lost_wakes": 0,
        "shared_bytes": 9 * MEBIBYTE,
        "throttled": 0,
    }
    return measurement.Figures(**(usual | changed))


def judged(found: measurement.Figures, bind_to: str = "none") -> dict:
    options = Options(check_build=False, ranks=found.ranks, bind_to=bind_to)
    return {one.name: one for one in measurement.judge(found, options)}


@pytest.fixture
def enough_cores(monkeypatch):
    monkeypatch.setattr(cores, "available", lambda: 4)


def test_approves_of_good_figures(enough_cores):
    found = judged(figures())
    assert {one.verdict for one in found.values()} == {Verdict.OK}
    assert found["copy, 2 ranks"].figure == "14.9 GB/s together, 1.6 x that of one"
    assert found["allreduce 4 B"].figure == "4 us (p90 8 us)"
    assert found["allreduce 64 MiB"].figure == (
        "13 ms, 5.16 GB/s: the time of 1.4 copies of as much"
    )
    assert found["shared memory"].figure.startswith("9 MiB for 2 ranks")


def slow(size: int, median: float) -> dict:
    return figures().allreduce | {size: {"median": median, "p90": median, "calls": 1}}


@pytest.mark.parametrize(
    ("changed", "name", "advice"),
    [
        ({"allreduce": slow(4, 90e-6)}, "allreduce 4 B", "--bind-to cores"),
        ({"allreduce": slow(MEBIBYTE, 1e-3)}, "allreduce 1 MiB", "memory node"),
        (
            {"allreduce": slow(64 * MEBIBYTE, 50e-3)},
            *("allreduce 64 MiB", "memory node"),
        ),
        ({"lost_wakes": 1}, "lost wake-ups", "report"),
        ({"throttled": 7}, "CPU quota", "limits.cpu"),
        (
            {"together": {MEBIBYTE: 6e-5, 64 * MEBIBYTE: 3e-2}},
            *("copy, 2 ranks", "fewer ranks"),
        ),
    ],
)
def test_warns_of_a_bad_figure(enough_cores, changed, name, advice):
    found = judged(figures(**changed))
    assert advice in found[name].advice
    bad = [one.name for one in found.values() if one.verdict is not Verdict.OK]
    assert bad == [name]


def test_blames_too_many_ranks_first(monkeypatch):
    monkeypatch.setattr(cores, "available", lambda: 1)
    found = judged(figures(allreduce=slow(4, 90e-6)))
    assert found["allreduce 4 B"].advice == "ranks wait for a core: start 1 with -np"


# ---- The network of several hosts

TO_ITSELF = Node(number=0, count=2, ranks=1, rendezvous="127.0.0.1:29400")


@pytest.fixture
def speeds(tmp_path, monkeypatch):
    """Interfaces that tell their speeds, in Mbit/s; the loopback one is used."""
    monkeypatch.setattr(network, "_INTERFACES", tmp_path)
    addresses = {"lo": ["127.0.0.1"], "ib0": ["192.0.2.7"], "veth1": ["192.0.2.8"]}
    monkeypatch.setattr(
        network.network_interfaces, "found", lambda name: addresses.get(name, [])
    )

    def speeds(**megabits):
        names = [(1, "lo"), *((2 + n, name) for n, name in enumerate(megabits))]
        monkeypatch.setattr(network.socket, "if_nameindex", lambda: names)
        for name, value in megabits.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "speed").write_text(f"{value}\n")
            if not name.startswith("veth"):
                (tmp_path / name / "device").mkdir()

    return speeds


def test_names_the_interface_that_a_job_uses(speeds):
    speeds(lo=10000, eth7=1000, down=-1)
    found = network.interface(TO_ITSELF)
    assert (found.verdict, found.figure) == (Verdict.OK, "lo, 10 Gbit/s")


def test_an_interface_that_does_not_tell_its_speed_is_no_slow_one(speeds):
    speeds(lo=-1, eth7=1000)
    found = network.interface(TO_ITSELF)
    assert (found.verdict, found.figure) == (Verdict.OK, "lo, of unknown speed")


def test_knows_a_faster_interface(speeds):
    speeds(lo=1000, ib0=100000)
    found = network.interface(TO_ITSELF)
    assert found.verdict is Verdict.WARNING
    assert "ib0 has 100 Gbit/s" in found.advice
    assert "--network-interfaces ib0" in found.advice


def test_advises_no_interface_that_leads_to_no_other_host(speeds):
    speeds(lo=1000, veth1=10000, unused=100000)
    assert network.interface(TO_ITSELF).verdict is Verdict.OK


def test_the_interface_asked_for_counts(speeds):
    speeds(lo=1000)
    node = replace(TO_ITSELF, rendezvous="192.0.2.1:29400", interfaces=("lo",))
    assert network.interface(node).figure == "lo, 1 Gbit/s"


def test_judges_what_hosts_reach_instead_of_copies(speeds):
    speeds(lo=1000)
    options = Options(check_build=False, ranks=2, node=TO_ITSELF)
    allreduce = slow(4, 3e-3) | {
        size: {"median": seconds, "p90": seconds, "calls": 1}
        for size, seconds in ((MEBIBYTE, 1.0), (64 * MEBIBYTE, 0.6))
    }
    found = {
        one.name: one
        for one in measurement.judge(figures(allreduce=allreduce), options)
    }
    assert not [name for name in found if name.startswith("allreduce")]
    trip, rate = found["network trip"], found["network 64 MiB"]
    assert trip.figure == "3 ms for 4 bytes to the other hosts and back"
    assert trip.verdict is Verdict.WARNING
    assert "hosts of one place" in trip.advice
    # A half of the tensor, and a half of the sum.
    assert rate.figure == "600 ms: each host sends 895 Mbit/s"
    assert rate.verdict is Verdict.OK
    # One size is enough to tell; small ones are slow anywhere.
    assert found["network 1 MiB"].verdict is Verdict.OK


def test_warns_of_a_network_that_does_not_give_what_it_says(speeds):
    speeds(lo=25000)
    (found,) = network.rate({64 * MEBIBYTE: 0.6}, replace(TO_ITSELF, count=4))
    assert found.verdict is Verdict.WARNING
    # Three quarters of each, to and from.
    assert found.figure == (
        "600 ms: each host sends 1.34 Gbit/s of the interface's 25 Gbit/s"
    )
    assert "iperf3" in found.advice


def test_what_hosts_reach_is_told_without_an_interface(speeds):
    speeds(lo=1000)
    nowhere = replace(TO_ITSELF, interfaces=("none0",))
    (found,) = network.rate({64 * MEBIBYTE: 0.6}, nowhere)
    assert (found.verdict, found.figure) == (
        *(Verdict.OK, "600 ms: each host sends 895 Mbit/s"),
    )


def launcher(folder: Path, says: str) -> None:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)


def test_compares_mpi4py_to_mpirun(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "def Get_library_version(): return 'MPICH Version:      4.3.2'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher(tmp_path, "mpirun (Open MPI) 4.1.4")
    other = optional.mpi()
    launcher(tmp_path, "HYDRA build details:\n    Version:       4.3.2")
    same = optional.mpi()
    assert other.verdict is Verdict.WARNING
    assert "put the mpirun of MPICH first" in other.advice
    assert same.verdict is Verdict.OK
    assert same.figure.endswith("MPICH 4.3.2; mpi4py uses MPICH 4.3.2")


@pytest.mark.parametrize(
    ("seconds", "variables", "said", "verdict"),
    [
        ((70e-3, 5e-3), {}, "TensorFlow keeps it", Verdict.OK),
        (
            (70e-3, 5e-3),
            {"TF_CPU_ALLOCATOR_USE_BFC": "true"},
            *("TensorFlow keeps it", Verdict.OK),
        ),
        (
            (70e-3, 5e-3),
            {"KERAS_HVD_ALLOCATOR": "unchanged"},
            *("chosen by --allocator unchanged", Verdict.WARNING),
        ),
        (
            (70e-3, 5e-3),
            {"MALLOC_ARENA_MAX": "1"},
            *("chosen by MALLOC_ARENA_MAX", Verdict.WARNING),
        ),
        (
            (8e-3, 5e-3),
            {"MALLOC_ARENA_MAX": "1"},
            *("chosen by MALLOC_ARENA_MAX", Verdict.OK),
        ),
    ],
)
def test_warns_where_tensors_may_come_from_slow_new_memory(
    monkeypatch, seconds, variables, said, verdict
):
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(measurement, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(probes, "touches", lambda size: seconds)
    found = measurement.new_memory(Options(check_build=False, ranks=2))
    first = f"64 MiB take {seconds[0] * 1e3:g} ms, when used again 5 ms: "
    assert found.figure == first + said
    assert found.verdict is verdict
    assert ("--allocator pool" in found.advice) == (verdict is Verdict.WARNING)
