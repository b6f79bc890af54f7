"""An engine that waits for work uses no CPU time."""

import pathlib
import time

import keras_hvd

# What is measured is the time in which nothing happens.
SECONDS = 3


def threads():
    return list(pathlib.Path("/proc/self/task").iterdir())


def name(task):
    return (task / "comm").read_text().strip()


def times_awake(task):
    lines = (task / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def nanoseconds(task):
    return int((task / "schedstat").read_text().split()[0])


def await_rest(engine):
    """Waits until they sleep until they are rung: their other sleeps are shorter."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        awake = [times_awake(task) for task in engine]
        time.sleep(0.7)
        if awake == [times_awake(task) for task in engine]:
            return
    raise AssertionError("the engine's threads do not come to rest")


def test_its_threads_stay_asleep(size):
    keras_hvd.barrier()
    engine = [task for task in threads() if name(task).startswith("keras_hvd")]
    assert engine
    await_rest(engine)
    awake = [times_awake(task) for task in engine]
    used = [nanoseconds(task) for task in engine]
    time.sleep(SECONDS)
    for task, awake_before, used_before in zip(engine, awake, used, strict=True):
        # Peers may be a little ahead.
        assert times_awake(task) - awake_before <= 2 * size
        assert nanoseconds(task) - used_before < 1_000_000


def used_in_a_window():
    """The seconds of CPU time of this process, and the nanoseconds of each thread."""
    before = {task: nanoseconds(task) for task in threads()}
    start = time.process_time()
    time.sleep(SECONDS)
    used = time.process_time() - start
    return used, {
        f"{name(task)} {task.name}": nanoseconds(task) - before.get(task, 0)
        for task in threads()
    }


def test_the_process_as_a_whole_uses_none():
    keras_hvd.barrier()
    # TensorFlow has threads that work now and then; an engine that does not sleep would
    # be there in every window.
    windows = []
    while not windows or (windows[-1][0] > 0.02 and len(windows) < 5):
        windows.append(used_in_a_window())
    assert windows[-1][0] <= 0.02, windows
