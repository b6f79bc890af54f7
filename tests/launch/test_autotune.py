"""Jobs that tune themselves: their results stay right, and the next starts from it."""

import re
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).parent / "ranks" / "allreduce_loop.py"
COLUMNS = (
    "fusion_bytes,window_bytes,small_bytes,spin_microseconds,halving_hosts,"
    "bytes_per_second,stage"
)
# Makes searches short.
QUICK = {
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "4",
}


@pytest.fixture
def log(tmp_path):
    return tmp_path / "autotune.csv"


def stages(log: Path) -> list[str]:
    """The purpose of each sample in a log whose form is as documented."""
    head, columns, best, *samples = log.read_text().splitlines()
    assert re.fullmatch(r"keras_hvd autotune 2: ranks=2 state=(result|search)", head)
    assert columns == COLUMNS
    assert re.fullmatch(r"(\d+,){5},best", best)
    for sample in samples:
        assert re.fullmatch(r"(\d+,){6}(warmup|search|final)", sample)
    return [sample.rpartition(",")[2] for sample in samples]


def test_the_results_stay_right_and_the_next_job_starts_from_the_log(
    khvdrun, tmp_path, log
):
    # The loop checks its sums.
    command = (sys.executable, LOOP, tmp_path, "--steps", 500)
    options = ("-np", 2, "--autotune", "--autotune-log-file", log)
    ended = khvdrun.run(*options, "--log-level", "info", *command, env=QUICK)
    assert ended.returncode == 0, ended.stderr
    assert " state=result" in log.read_text()
    assert "info: autotune ends with fusion_bytes=" in ended.stderr
    found = stages(log)
    assert found[:2] == ["warmup", "search"]
    # Candidates that the first search left are compared with the defaults only.
    best = "67108864,262144,16384,50,12,,best"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], best, *lines[3:]]) + "\n")
    ended = khvdrun.run(*options, *command, env=QUICK)
    assert ended.returncode == 0, ended.stderr
    assert set(stages(log)) == {"warmup", "final"}
    tried = {line.rsplit(",", 2)[0] for line in log.read_text().splitlines()[3:]}
    assert tried == {"67108864,262144,16384,50,12", "67108864,1048576,16384,50,12"}


def test_another_number_of_ranks_starts_from_nothing(khvdrun, tmp_path, log):
    log.write_text(
        f"keras_hvd autotune 2: ranks=3 state=result\n{COLUMNS}\n1,1024,1,1,12,,best\n"
    )
    command = (sys.executable, LOOP, tmp_path, "--steps", 100)
    variables = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log)}
    ended = khvdrun.run("-np", 2, *command, env=QUICK | variables)
    assert ended.returncode == 0, ended.stderr
    assert stages(log)[0] == "warmup"
    assert "\n1,1024,1,1" not in log.read_text()


def test_a_file_of_something_else_ends_the_job_and_stays(khvdrun, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import keras_hvd\nkeras_hvd.init()\n")
    options = ("--autotune", "--autotune-log-file", script)
    ended = khvdrun.run("-np", 2, *options, sys.executable, script)
    assert ended.returncode == 1
    assert f"'{script}' exists but is not a keras_hvd autotune log" in ended.stderr
    assert script.read_text() == "import keras_hvd\nkeras_hvd.init()\n"


def test_without_autotune_the_log_means_nothing(khvdrun, tmp_path, log):
    command = (sys.executable, LOOP, tmp_path, "--steps", 20)
    environment = {"HOROVOD_AUTOTUNE": "1"}
    options = ("--no-autotune", "--autotune-log-file", log)
    ended = khvdrun.run("-np", 2, *options, *command, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert not log.exists()
