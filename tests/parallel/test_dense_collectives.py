"""Collectives of arrays that run at once: all have ended when their context has."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import keras_hvd
from keras_hvd.backends.dense_collectives import DenseTensor, Together

NUMBER = 3


class Stopped(Exception):
    """What a script's signal handler raises."""


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)  # between two looks


def is_asleep(process: int) -> bool:
    return (
        Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    )


@pytest.mark.usefixtures("several_ranks")
def test_an_exception_of_a_signal_leaves_none_unfinished(rank, tmp_path):
    """The engine would write into memory that Python has given to something else."""

    def stop(number, frame):
        handled.touch()
        raise Stopped

    places = keras_hvd.broadcast_object((tmp_path / "waits", tmp_path / "handled"))
    waits, handled = places
    process = keras_hvd.broadcast_object(os.getpid())
    arrays = [np.full(4, float(rank)) for _ in range(NUMBER)]

    def begin(collectives, number):
        tensor = DenseTensor.of_array(arrays[number])
        collectives.broadcast(f"array {number}", tensor, root=1)

    if rank == 0:
        kept = signal.signal(signal.SIGUSR2, stop)
        with pytest.raises(Stopped), Together() as collectives:
            for number in range(NUMBER):
                begin(collectives, number)
            waits.touch()
        assert [array[0] for array in arrays] == [1] * NUMBER
        signal.signal(signal.SIGUSR2, kept)
    elif rank == 1:
        wait_for(waits.exists)
        wait_for(lambda: is_asleep(process))
        os.kill(process, signal.SIGUSR2)
        with Together() as collectives:
            begin(collectives, 0)
        # It has returned from the first one.
        wait_for(handled.exists)
        with Together() as collectives:
            for number in range(1, NUMBER):
                begin(collectives, number)
    else:
        with Together() as collectives:
            for number in range(NUMBER):
                begin(collectives, number)
    keras_hvd.barrier()
