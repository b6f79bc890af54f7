"""Join: a rank runs out of data before the others."""

from __future__ import annotations

import ctypes

from keras_hvd.runtime import basics, native, script_end


def join() -> int:
    """Says that this rank has no more data, and waits until every rank has said so.

    Meanwhile this rank takes part in the others' allreduces over all ranks, with zeros.
    `Average` still divides by the number of all ranks. This works for `Sum` and
    `Average` of dense tensors only. Everything else that needs this rank raises an
    error on the waiting ranks: another `op`, another collective, or a process set that
    contains this rank.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: another rank died or left.
        MismatchError: another thread of this rank is already in `join`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.join()
    0
    """
    basics.require_initialized("join")
    script_end.note_collective()
    last = ctypes.c_int32()
    basics.check(native.engine().khvd_join(ctypes.byref(last)))
    return last.value
