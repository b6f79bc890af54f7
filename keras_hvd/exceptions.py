"""The exceptions of keras_hvd.

Errors of a collective that runs as a TensorFlow op arrive as `tf.errors.*` with the
same text. All other functions raise these.
"""

from __future__ import annotations


class KerasHvdError(RuntimeError):
    """Base of keras_hvd's errors; raised itself for faults of the engine or system."""


class NotInitializedError(KerasHvdError):
    """keras_hvd was used before `keras_hvd.init()`."""


class RankFailedError(KerasHvdError):
    """Another rank died or left, or the job was aborted: this one cannot go on."""


class HostsUpdatedInterrupt(RuntimeError):
    """Other ranks wait to join this job: no failure, and `elastic.run` catches it."""


class MismatchError(KerasHvdError, ValueError):
    """This rank's request is wrong, or does not fit the other ranks'."""


class ForkedError(KerasHvdError):
    """keras_hvd was used in a process forked from a rank, which is not a rank."""


class ShutDownError(KerasHvdError):
    """keras_hvd was shut down on this rank while, or before, a collective ran."""


class LibraryError(KerasHvdError):
    """A native library is missing, does not fit, or is in this process twice."""


class RendezvousError(KerasHvdError):
    """Processes of a job on several hosts did not find, or not trust, each other."""


# The engine's result codes (khvd_code in tf_ops/engine/c_api.h).
_BY_CODE = {
    1: MismatchError,
    2: NotInitializedError,
    3: RankFailedError,
    4: ShutDownError,
    5: ForkedError,
    6: KerasHvdError,
    7: MismatchError,
}


def from_code(code: int, message: str) -> KerasHvdError:
    """The exception for a result code of the engine, other than 0.

    Args:
        code: the result code.
        message: the text of the exception.

    Example:

    >>> from_code(3, "rank 2 was killed by signal 9")
    RankFailedError('rank 2 was killed by signal 9')
    """
    return _BY_CODE[code](message)
