"""The end of a rank's data, before that of the others."""

from __future__ import annotations

import ctypes

from keras_hvd.runtime import basics, native


def join() -> int:
    """Says that this rank has no more data, and waits until every rank has said so.

    Meanwhile it takes part in the others' allreduces of all ranks, with zeros. An
    average is still divided by the number of all ranks. Only Sum and Average of dense
    tensors can be completed so: anything else that would need this rank, such as
    another `op`, another collective, or one of a process set that it is in, raises
    on the ranks that wait for it.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: another rank died or left.
        MismatchError: another thread of this rank is in `join` already.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.join()
    0
    """
    basics.require_initialized("join")
    last = ctypes.c_int32()
    basics.check(native.engine().khvd_join(ctypes.byref(last)))
    return last.value
