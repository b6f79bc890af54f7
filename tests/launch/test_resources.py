"""The ranks' place in the job, threads and cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keras_hvd.job import cores

SHOW = (
    sys.executable,
    "-c",
    "import os, sys\nprint([os.environ.get(name) for name in sys.argv[1:]])",
)
CORES = len(os.sched_getaffinity(0))


def shown(khvdrun, ranks: int, *names: str, options=(), **popen) -> list[list]:
    """The values of variables on every rank."""
    ended = khvdrun.run("-np", ranks, *options, *SHOW, *names, **popen)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    return [eval(line.removeprefix(f"[{i}] ")) for i, line in enumerate(lines)]


def test_tells_each_rank_its_place(khvdrun):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    values = shown(khvdrun, 3, *(f"KERAS_HVD_{name}" for name in names))
    assert values == [[str(r), "3", str(r), "3", "0", "1"] for r in range(3)]


# Prints the number of threads, without a name of their own, after TensorFlow's first
# step.
LATE = """
import os, pathlib, sys
import tensorflow as tf
from keras_hvd.job import cores
cores.available = lambda: int(sys.argv[1])
cores.share(2)
tf.linalg.matmul(tf.ones([999, 999]), tf.ones([999, 999]))
own = pathlib.Path("/proc/self")
names = [each.read_text() for each in own.glob("task/*/comm")]
print(names.count((own / "comm").read_text()))
"""


def test_tensorflow_takes_a_share_that_is_set_after_its_import():
    counts = [
        int(subprocess.check_output([sys.executable, "-c", LATE, str(shared)]))
        for shared in (2, 80)
    ]
    # With a share of one core, and of forty.
    assert 30 < counts[1] - counts[0] < 50


def test_a_share_leaves_what_was_chosen(monkeypatch):
    given = {"TF_NUM_INTRAOP_THREADS": "3"}
    monkeypatch.setattr(os, "environ", given)
    cores.share(1)
    assert given == {
        "TF_NUM_INTRAOP_THREADS": "3",
        "OMP_NUM_THREADS": str(cores.available()),
    }


def test_gives_each_job_an_id_of_its_own(khvdrun):
    first = shown(khvdrun, 3, "KERAS_HVD_JOB")
    second = shown(khvdrun, 1, "KERAS_HVD_JOB", env={"KERAS_HVD_JOB": "outer"})
    assert first[0][0]
    assert first[0] == first[1] == first[2]
    assert second[0][0] not in (first[0][0], "outer")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_divides_threads_between_ranks(khvdrun, ranks):
    without = {"TF_NUM_INTRAOP_THREADS": None, "OMP_NUM_THREADS": None}
    assert not without.keys() & os.environ.keys()
    share = str(max(1, cores.available() // ranks))
    assert shown(khvdrun, ranks, *without) == [[share, share]] * ranks


def test_keeps_threads_that_the_user_set(khvdrun):
    values = shown(
        *(khvdrun, 2, "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"),
        env={"OMP_NUM_THREADS": "17"},
    )
    assert [value[1] for value in values] == ["17", "17"]
    assert "17" not in [value[0] for value in values]


@pytest.mark.parametrize(("given", "expected"), [({}, "1"), ({"X": "0"}, "0")])
def test_shows_python_output_at_once_unless_told_otherwise(khvdrun, given, expected):
    environment = {"PYTHONUNBUFFERED": given["X"]} if given else {}
    assert shown(khvdrun, 1, "PYTHONUNBUFFERED", env=environment) == [[expected]]


def affinities(khvdrun, ranks: int, *options: str) -> list[set[int]]:
    program = "import os; print(os.sched_getaffinity(0))"
    ended = khvdrun.run("-np", ranks, *options, sys.executable, "-c", program)
    lines = sorted(ended.stdout.splitlines())
    return [eval(line.removeprefix(f"[{i}] ")) for i, line in enumerate(lines)]


@pytest.mark.parametrize("options", [(), ("--bind-to", "none")])
def test_does_not_bind_by_default(khvdrun, options):
    assert affinities(khvdrun, 2, *options) == [os.sched_getaffinity(0)] * 2


@pytest.mark.skipif(CORES < 2, reason="needs 2 cores")
def test_binds_ranks_to_cores_of_their_own(khvdrun):
    first, second = affinities(khvdrun, 2, "--bind-to", "cores")
    assert first and second
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


def test_shares_cores_between_too_many_ranks(khvdrun):
    bound = affinities(khvdrun, CORES + 1, "--bind-to", "cores")
    assert all(len(one) == 1 for one in bound)
    assert set.union(*bound) == os.sched_getaffinity(0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_fair_and_cover_all(monkeypatch, count, ranks):
    usable = {3 * core for core in range(count)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: usable)
    shares = cores.shares(ranks)
    assert len(shares) == ranks
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if ranks <= count:
        assert sum(sizes) == count
        assert set.union(*shares) == usable


def test_a_rank_has_neighbours(monkeypatch, tmp_path):
    # Cores 0, 2, 4 and 6 are of one package, the others of another; in each the first
    # two and the last two are threads of one physical core.
    for core in range(8):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{core % 2}\n")
        (topology / "core_id").write_text(f"{core // 4}\n")
    monkeypatch.setattr(cores, "_CORES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert cores.shares(2) == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert cores.shares(4) == [{0, 2}, {4, 6}, {1, 3}, {5, 7}]


@pytest.fixture
def control_group(tmp_path, monkeypatch):
    """Makes files that stand for the control group of this process."""

    def make(line: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        table = tmp_path / "table"
        table.write_text(line + "\n")
        monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
        monkeypatch.setattr(cores, "_CGROUP_TABLE", table)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return make


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        pytest.param("0::/", {}, 8, id="none"),
        pytest.param("0::/a", {"a/cpu.max": "max 100000"}, 8, id="v2-unlimited"),
        pytest.param("0::/a", {"a/cpu.max": "250000 100000"}, 2, id="v2"),
        pytest.param("0::/a", {"a/cpu.max": "50000 100000"}, 1, id="v2-part-of-a-core"),
        pytest.param(
            "0::/a", {"a/cpu.max": "6400000 100000"}, 8, id="v2-more-than-all"
        ),
        pytest.param(
            "0::/a/b",
            {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"},
            3,
            id="v2-parent",
        ),
        pytest.param(
            "0::/hidden/by/a/container", {"cpu.max": "400000 100000"}, 4, id="v2-root"
        ),
        pytest.param(
            "4:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "500000", "cpu/a/cpu.cfs_period_us": "100000"},
            5,
            id="v1",
        ),
        pytest.param(
            "4:cpu:/a",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            8,
            id="v1-unlimited",
        ),
        pytest.param(
            "4:cpuset:/a",
            {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"},
            8,
            id="v1-other-controller",
        ),
    ],
)
def test_counts_cores_within_the_quota(control_group, line, files, expected):
    control_group(line, files)
    assert cores.available() == expected


def test_tensorflow_heeds_the_thread_variable(khvdrun):
    pytest.importorskip("tensorflow")
    program = (
        "import os, tensorflow as tf\n"
        "tf.matmul(tf.ones((8, 8)), tf.ones((8, 8)))\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    script = 'TF_NUM_INTRAOP_THREADS=$((1 + 8 * KERAS_HVD_RANK)) exec "$0" -c "$1"'
    ended = khvdrun.run("-np", 2, "sh", "-c", script, sys.executable, program)
    one, nine = (int(line.split()[1]) for line in sorted(ended.stdout.splitlines()))
    assert nine == one + 8


@pytest.fixture
def at_most(khvdrun):
    """Runs a job in a control group with room for `count` processes and threads."""
    mount = Path("/sys/fs/cgroup")
    pids = mount / "pids" if (mount / "pids").is_dir() else mount
    group = pids / f"keras_hvd_test_{khvdrun.mark}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of processes can be made here: {error}")

    def run(count: int, *arguments):
        (group / "pids.max").write_text(str(count))

        def enter():
            (group / "cgroup.procs").write_text(str(os.getpid()))

        variables = {"OPENBLAS_NUM_THREADS": "1"}
        return khvdrun.run(*arguments, preexec_fn=enter, env=variables)

    yield run
    group.rmdir()


# khvdrun is two processes. A rank is one, and has three threads more: a limit of five
# leaves no room for one of the first, eight for one of the last.
@pytest.mark.parametrize("count", [1, 3, 5, 6, 8])
def test_without_room_for_a_process_or_thread_names_the_limit(at_most, count):
    program = "import keras_hvd as hvd; hvd.init(); hvd.allgather_object(1)"
    ended = at_most(count, "-np", 2, sys.executable, "-c", program)
    assert ended.returncode in (1, 2), ended.stderr
    assert "the system has no room for another" in ended.stderr
    assert f", and may have {count} (pids.max" in ended.stderr
    if count < 4:
        assert "Traceback" not in ended.stderr
