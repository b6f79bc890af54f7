"""Before, during and after the membership in a job of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_hvd

PLACE = {
    "rank": 0,
    "size": 1,
    "local_rank": 0,
    "local_size": 1,
    "cross_rank": 0,
    "cross_size": 1,
}

TESTS = Path(__file__).parents[1]
BEFORE_INIT = """
import functools
import keras_hvd
from every_collective import ARGUMENTS, call
calls = {
    "rank": keras_hvd.rank,
    "size": keras_hvd.size,
    "local_rank": keras_hvd.local_rank,
    "local_size": keras_hvd.local_size,
    "cross_rank": keras_hvd.cross_rank,
    "cross_size": keras_hvd.cross_size,
    **{each: functools.partial(call, each, [1.0]) for each in ARGUMENTS},
    "broadcast_object": lambda: keras_hvd.broadcast_object(1),
    "join": keras_hvd.join,
    "add_process_set": lambda: keras_hvd.add_process_set([0]),
    "rank_op": keras_hvd.rank_op,
    "broadcast_object_fn": keras_hvd.broadcast_object_fn,
    "allgather_object": lambda: keras_hvd.allgather_object(1),
    "broadcast_variables": lambda: keras_hvd.broadcast_variables([], 0),
    "broadcast_": lambda: keras_hvd.broadcast_([], 0),
    "remove_process_set": lambda: keras_hvd.remove_process_set(0),
    "size_op": keras_hvd.size_op,
    "local_rank_op": keras_hvd.local_rank_op,
    "local_size_op": keras_hvd.local_size_op,
    "process_set_included_op": keras_hvd.process_set_included_op,
    "broadcast_global_variables": lambda: keras_hvd.broadcast_global_variables(0),
    "Strategy": keras_hvd.Strategy,
    "start_timeline": lambda: keras_hvd.start_timeline("never.json"),
    "stop_timeline": keras_hvd.stop_timeline,
    "evaluate": lambda: keras_hvd.evaluate(None),
    "warmup_schedule": lambda: keras_hvd.warmup_schedule(0.1, warmup_steps=1),
    "is_homogeneous": keras_hvd.is_homogeneous,
    "mpi_threads_supported": keras_hvd.mpi_threads_supported,
}
documented = {
    name
    for name in keras_hvd.__all__
    if "NotInitializedError: " in (getattr(keras_hvd, name).__doc__ or "")
}
assert documented == set(calls), documented ^ set(calls)
assert keras_hvd.is_initialized() is False
keras_hvd.shutdown()
for name, function in calls.items():
    try:
        function()
    except keras_hvd.NotInitializedError as error:
        assert f"keras_hvd.{name}()" in str(error), error
        assert "call keras_hvd.init()" in str(error), error
    else:
        raise AssertionError(name)
assert keras_hvd.init() is None
assert keras_hvd.rank() == 0
"""


@pytest.fixture(autouse=True)
def initialized():
    keras_hvd.init()


def test_everything_but_init_needs_init():
    subprocess.run([sys.executable, "-c", BEFORE_INIT], check=True, cwd=TESTS)


@pytest.mark.parametrize("name", PLACE)
def test_a_process_that_nobody_launched_is_a_job_of_one(name):
    assert getattr(keras_hvd, name)() == PLACE[name]


def test_init_and_shutdown_may_be_repeated():
    for _ in range(3):
        keras_hvd.init()
        keras_hvd.init()
        assert keras_hvd.is_initialized()
        keras_hvd.shutdown()
        keras_hvd.shutdown()
        assert not keras_hvd.is_initialized()


def test_threads_may_call_init_at_once(tmp_path):
    """One of them joins; starting the timeline twice would be an error."""
    program = """
import threading, keras_hvd
errors = []
start = threading.Barrier(8)

def join():
    start.wait()
    try:
        keras_hvd.init()
    except Exception as error:
        errors.append(error)

for _ in range(20):
    threads = [threading.Thread(target=join) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [], errors
    keras_hvd.shutdown()
"""
    environment = {**os.environ, "KERAS_HVD_TIMELINE": str(tmp_path / "timeline.json")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("name", PLACE)
def test_after_shutdown(name):
    keras_hvd.shutdown()
    with pytest.raises(keras_hvd.ShutDownError, match=rf"keras_hvd\.{name}\(\)"):
        getattr(keras_hvd, name)()


@pytest.mark.parametrize(
    "variable, text, wanted",
    [
        ("KERAS_HVD_STALL_WARNING_SECONDS", "soon", "a number of seconds, got 'soon'"),
        ("KERAS_HVD_FUSION_BYTES", "1.5", "a whole number of bytes, got '1.5'"),
    ],
)
def test_a_setting_that_is_no_number(monkeypatch, variable, text, wanted):
    keras_hvd.shutdown()
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} must be {wanted}"):
        keras_hvd.init()


def test_a_setting_that_the_engine_refuses(monkeypatch):
    keras_hvd.shutdown()
    monkeypatch.setenv("KERAS_HVD_EXCHANGE_BYTES", "1")
    with pytest.raises(keras_hvd.MismatchError, match="EXCHANGE_BYTES is 1, and must"):
        keras_hvd.init()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_no_rank():
    def errors():
        for call in (
            keras_hvd.init,
            keras_hvd.rank,
            keras_hvd.barrier,
            lambda: keras_hvd.allgather_object(1),
        ):
            try:
                call()
            except keras_hvd.ForkedError as error:
                yield str(error)

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, "\n".join(errors()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        lines = pipe.read().split("\n")
    assert len(lines) == 4
    assert all("forked from a keras_hvd rank" in line for line in lines)
    assert keras_hvd.rank() == 0


def test_init_again_reads_no_variable(monkeypatch):
    monkeypatch.setenv("KERAS_HVD_RANK", "of nobody")
    monkeypatch.setenv("KERAS_HVD_FUSION_BYTES", "many")
    keras_hvd.init()
    assert keras_hvd.size() == 1


def test_a_process_that_is_alone_by_mistake_is_told_once(monkeypatch, capfd):
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "0")
    keras_hvd.shutdown()
    keras_hvd.init(comm=[0])
    assert "SKYPILOT_NUM_NODES" not in capfd.readouterr().err
    keras_hvd.shutdown()
    keras_hvd.init()
    assert capfd.readouterr().err.count("SKYPILOT_NUM_NODES=2 says that") == 1
    keras_hvd.shutdown()
    keras_hvd.init()
    assert capfd.readouterr().err == ""
    keras_hvd.shutdown()
    monkeypatch.setenv("KERAS_HVD_REQUIRE_SIZE", "2")
    with pytest.raises(keras_hvd.KerasHvdError, match="KERAS_HVD_REQUIRE_SIZE=2, but"):
        keras_hvd.init()
    assert not keras_hvd.is_initialized()
