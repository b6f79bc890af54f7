"""An engine that waits for work uses no CPU time."""

import os
import pathlib
import time

import keras_hvd

# What is measured is the time in which nothing happens.
SECONDS = 3


def engine_threads():
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("keras_hvd"):
            yield task


def times_awake(task):
    lines = (task / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def nanoseconds(task):
    return int((task / "schedstat").read_text().split()[0])


def test_its_threads_stay_asleep(size):
    keras_hvd.barrier()
    threads = list(engine_threads())
    assert threads
    awake = [times_awake(task) for task in threads]
    used = [nanoseconds(task) for task in threads]
    time.sleep(SECONDS)
    for task, awake_before, used_before in zip(threads, awake, used, strict=True):
        # They may have been on their way to sleep, and peers may be a little ahead.
        assert times_awake(task) - awake_before <= 2 * size
        assert nanoseconds(task) - used_before < 1_000_000


def test_the_process_as_a_whole_uses_none():
    keras_hvd.barrier()
    before = os.times()
    time.sleep(SECONDS)
    after = os.times()
    assert after.user + after.system - before.user - before.system <= 0.02
