"""Ranks make TensorFlow keep its memory, unless the user wants it otherwise."""

import json
import mmap
import os
import sys
from pathlib import Path

import pytest

import keras_hvd
from keras_hvd.backends.tensorflow import allocator
from keras_hvd.launch import command_line
from keras_hvd.launch.usage import UsageError

RANK = Path(__file__).parent / "ranks" / "allocator.py"
PAGES = (64 << 20) // mmap.PAGESIZE
# Page faults of a call that are not the result's.
FEW = PAGES // 100
POOL = "TF_CPU_ALLOCATOR_USE_BFC"
WITHOUT_KHVDRUN = ("env", "-u", POOL)


@pytest.fixture(autouse=True)
def nothing_is_chosen(monkeypatch):
    while name := allocator.chosen_by(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.delenv("KERAS_HVD_ALLOCATOR", raising=False)
    # With oneDNN TensorFlow has a pool by itself.
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


def faults(khvdrun, *arguments: object, **environment: str) -> tuple[list, str]:
    """Page faults of a call on each rank, and the standard error."""
    ended = khvdrun.run(*arguments, env=environment)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    return [json.loads(line.partition("] ")[2]) for line in lines], ended.stderr


def is_set(khvdrun, *options: object, **environment: str) -> list[str]:
    """The variable's value on each of two ranks."""
    show = f"import os; print(os.environ.get({POOL!r}))"
    program = (sys.executable, "-c", show)
    ended = khvdrun.run("-np", 2, "--no-prefix", *options, *program, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_large_result_costs_no_page_faults(khvdrun):
    found, _ = faults(khvdrun, "-np", 2, sys.executable, RANK)
    assert len(found) == 2
    assert max(found) < FEW


def test_it_costs_one_for_each_page_where_the_allocator_is_left_unchanged(khvdrun):
    """Else the test above would prove nothing. And there is no advice to change it."""
    options = ("-np", 2, "--allocator", "unchanged")
    found, errors = faults(khvdrun, *options, sys.executable, RANK, "late")
    assert len(found) == 2
    assert min(found) >= PAGES
    assert errors == ""


def test_without_khvdrun_init_is_early_enough(khvdrun):
    found, errors = faults(khvdrun, "-np", 2, *WITHOUT_KHVDRUN, sys.executable, RANK)
    assert len(found) == 2
    assert max(found) < FEW
    assert errors == ""


def test_without_khvdrun_rank_0_says_where_init_came_too_late(khvdrun):
    command = (*WITHOUT_KHVDRUN, sys.executable, RANK, "late")
    found, errors = faults(khvdrun, "-np", 2, *command)
    assert len(found) == 2
    assert min(found) >= PAGES
    assert errors == f"[0] keras_hvd [rank 0] warning: {allocator.TOO_LATE}\n"


def test_what_the_user_has_set_reaches_the_ranks_as_it_is(khvdrun):
    assert is_set(khvdrun) == ["true", "true"]
    assert is_set(khvdrun, MALLOC_ARENA_MAX="1") == ["None", "None"]
    assert is_set(khvdrun, **{POOL: "false"}) == ["false", "false"]
    assert is_set(khvdrun, KERAS_HVD_ALLOCATOR="unchanged") == ["None", "None"]


def test_the_option_comes_before_the_file_and_that_before_the_environment(
    khvdrun, tmp_path
):
    file = tmp_path / "job.yaml"
    file.write_text("allocator: unchanged\n")
    from_file = ("--config-file", file)
    chosen = {"KERAS_HVD_ALLOCATOR": "pool"}
    assert is_set(khvdrun, *from_file, **chosen) == ["None", "None"]
    option = ("--allocator", "pool")
    assert is_set(khvdrun, *from_file, *option, **{POOL: "false"}) == ["true", "true"]


def test_run_takes_it_as_well():
    def shown() -> str | None:
        return os.environ.get(POOL)

    assert keras_hvd.run(shown) == ["true"]
    assert keras_hvd.run(shown, allocator="unchanged") == [None]


def test_a_wrong_name_is_an_error_before_anything_starts(monkeypatch):
    with pytest.raises(UsageError, match="--allocator: .*'tcmalloc'"):
        command_line.read(["-np", "1", "--allocator", "tcmalloc", "true"])
    monkeypatch.setenv("KERAS_HVD_ALLOCATOR", "tcmalloc")
    with pytest.raises(UsageError, match="KERAS_HVD_ALLOCATOR must be pool or un"):
        command_line.read(["-np", "1", "true"])
