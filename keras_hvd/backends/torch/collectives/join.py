"""Join: a rank runs out of data before the others."""

from __future__ import annotations

import ctypes

from keras_hvd.job import arrival, basics, native, script_end


def join() -> int:
    """Says that this rank has no more data, and waits until every rank has said so.

    Meanwhile this rank takes part in the others' reductions with zeros. Averages still
    divide by the number of all ranks.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: another rank died or left.
        MismatchError: another thread of this rank is already in `join`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> join()
    0
    """
    arrival.require_arrived("join")
    script_end.note_collective()
    last = ctypes.c_int32()
    basics.check(native.engine().khvd_join(ctypes.byref(last)))
    return last.value
