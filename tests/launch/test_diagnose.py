"""`khvdrun --diagnose` on this machine, and on ones that are made poorer first."""

import json
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import pytest
from free_port import free_port

import keras_hvd
from keras_hvd.launch.diagnosis import shared_memory

PACKAGE = Path(keras_hvd.__file__).parent
DIAGNOSE = (sys.executable, "-m", "keras_hvd.launch", "--diagnose")
CORES = os.sched_getaffinity(0)
FOUND_WITHOUT_RANKS = [
    *("engine", "TensorFlow", "Keras"),
    *("cores", "physical cores", "binding", "memory nodes", "other load", "other jobs"),
    *("memory", "/dev/shm", "leftovers", "open files", "threads"),
]
OPTIONAL = ["MPI", "GPUs", "NCCL"]
PAGE = (Path(__file__).parents[2] / "docs" / "diagnosing.md").read_text()
ON_ONE_HOST, BETWEEN_HOSTS = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)


def findings(text: str) -> dict[str, tuple[str, str]]:
    """Verdict and figure of each finding; each that is not ok must have advice."""
    found = {}
    lines = text.splitlines()
    for line, next_line in zip(lines, [*lines[1:], ""]):
        row = re.fullmatch(r"  (ok|warning|failure) +(.+?)  +(\S.*)", line)
        if row:
            verdict, name, figure = row.groups()
            found[name] = verdict, figure
            has_advice = next_line.strip().startswith("-> ")
            assert has_advice == (verdict != "ok"), line
    return found


def diagnose(*arguments: str, **popen) -> tuple[subprocess.CompletedProcess, dict]:
    command = popen.pop("command", DIAGNOSE)
    ended = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200, **popen
    )
    assert ended.stderr == ""
    return ended, findings(ended.stdout)


def test_measures_two_ranks(khvdrun):
    started = time.monotonic()
    (command,) = re.findall(r"^    khvdrun (.*)", PAGE, re.M)
    ended = khvdrun.run(*command.split())
    seconds = time.monotonic() - started
    found = findings(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    assert ended.stderr == ""
    assert list(found) == list(findings(ON_ONE_HOST))
    assert found["TensorFlow"][0] == found["Keras"][0] == "ok"
    assert re.fullmatch(r"0 in \d+ sleeps", found["lost wake-ups"][1])
    assert re.match(r"\d+ MiB take [\d.]+ [mu]s, when used", found["new memory"][1])
    assert seconds < 120
    last = ended.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"a job of 2 ranks runs; \d+ warnings?; diagnosed in \d+ s", last
    )


@pytest.mark.skipif(len(CORES) < 2, reason="needs 2 cores")
def test_says_that_ranks_share_a_core():
    core = min(CORES)
    ended, found = diagnose(
        *("-np", "2", "--bind-to", "cores"),
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert ended.returncode == 0, ended.stdout
    assert found["cores"][0] == "warning"
    assert found["cores"][1].startswith("1 of this machine's ")
    assert "2 ranks take turns: start 1 with -np" in ended.stdout
    assert found["binding"][1].endswith(f"rank 0 core {core}, rank 1 core {core}")
    assert "of two processes on one core" in found["wake-up"][1]


def test_measures_a_single_rank():
    ended, found = diagnose("-np", "1")
    assert ended.returncode == 0, ended.stdout
    assert "copy, 1 rank" in found
    assert "shared memory" not in found
    assert ended.stdout.splitlines()[-1].startswith("a job of 1 rank runs; ")


def test_does_not_load_tensorflow():
    program = (
        "import sys; from keras_hvd.launch.diagnosis import report, rank; "
        "print([name for name in ('tensorflow', 'keras', 'numpy') "
        "if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.stdout.split() == [b"[]"]


def test_fails_where_nothing_is_built(tmp_path):
    without = shutil.ignore_patterns("_native")
    shutil.copytree(PACKAGE, tmp_path / "keras_hvd", ignore=without)
    ended, found = diagnose("-np", "2", cwd=tmp_path)
    assert ended.returncode == 1
    assert found["engine"] == ("failure", "cannot be used")
    assert found["TensorFlow"][0] == "failure"
    assert "native libraries are not built" in ended.stdout
    assert list(found) == FOUND_WITHOUT_RANKS + OPTIONAL
    assert "a job of 2 ranks does not run" in ended.stdout.splitlines()[-1]


def test_fails_where_the_ops_are_for_another_tensorflow(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "keras_hvd")
    path = tmp_path / "keras_hvd" / "_native" / "build_info.json"
    ops = {"2.5": {"tensorflow": "2.5.0", "distribution": "tensorflow", "xla": False}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ops": ops}))
    ended, found = diagnose("-np", "2", cwd=tmp_path)
    assert ended.returncode == 1
    assert found["engine"][0] == "ok"
    assert found["TensorFlow"][0] == "failure"
    assert "were built for 2.5.0" in ended.stdout


def test_fails_where_the_system_refuses_shared_memory():
    limit = (1 << 20, resource.RLIM_INFINITY)
    ended, found = diagnose(
        *("-np", "2"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert ended.returncode == 1
    assert found["2 ranks"] == ("failure", "do not run")
    assert "MiB of shared memory: fallocate: File too large" in ended.stdout


def test_fails_where_the_exchange_memory_does_not_fit():
    environment = {**os.environ, "KERAS_HVD_EXCHANGE_BYTES": str(1 << 50)}
    ended, found = diagnose("-np", "2", env=environment)
    assert ended.returncode == 1
    assert found["memory"][0] == "failure"
    assert "2 ranks need at least" in found["memory"][1]


def test_fails_with_what_a_rank_says():
    environment = {**os.environ, "KERAS_HVD_FUSION_BYTES": "many"}
    ended, found = diagnose("-np", "2", env=environment)
    assert ended.returncode == 1
    assert found["2 ranks"][0] == "failure"
    assert "KERAS_HVD_FUSION_BYTES must be a whole number" in ended.stdout


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        ("size=64k", "64 KiB free of 64 KiB, writable"),
        ("ro", "cannot be written: Read-only file system"),
    ],
)
def test_runs_with_a_poor_dev_shm(options, figure):
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount")
    ended, found = diagnose("-np", "2", command=[*alone, *DIAGNOSE])
    assert found["/dev/shm"] == ("warning", figure)
    assert "docker run --shm-size=1g" in ended.stdout
    assert ended.returncode == 0, ended.stdout


def test_names_ranks_of_other_jobs(khvdrun):
    program = (
        "import os, signal, keras_hvd; keras_hvd.init(); print(os.getpid()); "
        "signal.pause()"
    )
    with khvdrun.start("-np", 2, "--no-prefix", sys.executable, "-c", program) as job:
        ranks = {int(job.stdout.readline()) for _ in range(2)}
        found = shared_memory.other_ranks()
        # As another user, whom root's rights let see them.
        with unittest.mock.patch("os.getuid", return_value=65534):
            of_another = shared_memory.other_ranks()
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    # Jobs of others may run too.
    own = pwd.getpwuid(os.getuid()).pw_name
    since = time.strftime("%F")
    for each in found, of_another:
        counted = rf"\d+ ranks of {own} since {since} \d\d:\d\d:\d\d"
        assert re.search(counted, each.figure)
    assert ranks <= named(found.advice)
    assert "kill" not in of_another.advice
    assert not ranks & named(shared_memory.other_ranks().advice)


def named(advice: str) -> set[int]:
    """The processes that an advice names."""
    return {int(word) for word in advice.split() if word.isdecimal()}


def test_ends_with_ctrl_c(khvdrun):
    with khvdrun.start("--diagnose", "-np", 2) as diagnosis:
        for line in diagnosis.stdout:
            if "wake-up" in line:
                break
        diagnosis.send_signal(signal.SIGINT)
        out, err = diagnosis.communicate(timeout=60)
    assert diagnosis.returncode == 130, err
    assert out.endswith("interrupted\n")
    assert err == ""


def test_measures_the_network_between_hosts(khvdrun):
    rendezvous = f"127.0.0.1:{free_port()}"
    started = [
        khvdrun.start(
            *("--diagnose", "-np", 2 - number, "--nnodes", 2, "--node-rank", number),
            *("--rendezvous", rendezvous),
            env={
                "KERAS_HVD_SECRET": "0123456789abcdef of tests",
                "KERAS_HVD_HOST_KEY": f"host {number}",
            },
        )
        for number in range(2)
    ]
    outputs = [job.communicate(timeout=60)[0] for job in started]
    assert [job.returncode for job in started] == [0, 0], outputs
    for number, output in enumerate(outputs):
        assert f"on this host, node {number} of 2" in output
        found = findings(output)
        assert found["interface"][1].startswith("lo, ")
        assert findings(BETWEEN_HOSTS).keys() <= found.keys()
        assert "back" in found["network trip"][1]
        assert "each host sends" in found["network 64 MiB"][1]
        assert not [name for name in found if name.startswith("allreduce")]
