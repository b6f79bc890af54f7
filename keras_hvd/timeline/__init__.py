"""The timeline: a file, written during the job, of the times of each tensor.

`python -m keras_hvd.timeline FILE` summarizes it. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import os

from keras_hvd.job import arrival, basics, native


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False
) -> None:
    r"""Starts to write the times of each tensor.

    Rank 0 writes the file, in the JSON format of Chrome's tracing, for chrome://tracing
    and https://ui.perfetto.dev. Other ranks may call this too; it does nothing there,
    also while one that joins an elastic job later is still alone, and no rank waits.
    Tensors submitted earlier are not in the file.

    Args:
        file_path: Where to write; an existing file is overwritten.
        mark_cycles: Whether to mark each round in which ranks agree on the order of
            tensors. (Horovod marks its cycles, which keras_hvd does not have.)

    Raises:
        MismatchError: The file cannot be written, or a timeline is already active.
            This is also a `ValueError`.
        NotInitializedError: `init` was not called.
        TypeError: `file_path` is not a path.

    Example:

    >>> import pathlib, tempfile, keras_hvd
    >>> keras_hvd.init()
    >>> path = pathlib.Path(tempfile.mkdtemp(), "timeline.json")
    >>> keras_hvd.start_timeline(path)
    >>> keras_hvd.stop_timeline()
    >>> path.read_text()[:2]
    '[\n'
    """
    basics.require_initialized("start_timeline")
    path = os.fsencode(file_path)
    if arrival.is_new():
        return
    basics.check(native.engine().khvd_start_timeline(path, bool(mark_cycles)))


def stop_timeline() -> None:
    """Ends the timeline. On rank 0 its file is complete when this returns.

    Does nothing on other ranks, or if no timeline is being written. `shutdown` ends the
    timeline too.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.stop_timeline()
    """
    basics.require_initialized("stop_timeline")
    basics.check(native.engine().khvd_stop_timeline())
