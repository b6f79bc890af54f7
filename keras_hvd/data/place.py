"""This rank's place among those that share data."""

from __future__ import annotations

from keras_hvd.job import arrival, basics
from keras_hvd.job.process_sets import ProcessSet, number_of


def place_in(process_set: ProcessSet, function: str) -> tuple[int, int]:
    """A process set's size, and this rank's place in it; raises if it has none.

    `function` is the public caller's name in `keras_hvd.data`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> place_in(keras_hvd.global_process_set, "part")
    (1, 0)
    """
    arrival.require_arrived(f"data.{function}")
    number_of(process_set, function)
    place = process_set.rank()
    if place is None:
        raise ValueError(
            f"{function}: rank {basics.rank()} is not in {process_set}, whose ranks "
            "share the dataset: call it on these alone"
        )
    return process_set.size(), place
