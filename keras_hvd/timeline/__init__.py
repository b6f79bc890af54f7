"""The timeline: where the time of each tensor goes, written while the job runs.

`python -m keras_hvd.timeline FILE` sums a timeline up. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import os

from keras_hvd.runtime import basics, native


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False
) -> None:
    """Writes where the time of each tensor goes to a file, from now on.

    Rank 0 writes it, in the JSON format of Chrome's tracing, for chrome://tracing and
    https://ui.perfetto.dev. Other ranks may call this as well, or not: there it does
    nothing, and nobody waits for it. What was submitted before is not in the file.

    Args:
        file_path: Where to write; what is there already is overwritten.
        mark_cycles: Whether to mark each round in which the order of tensors was
            decided. (Horovod marks its cycles, which keras_hvd has not.)

    Raises:
        MismatchError: The file cannot be written, or a timeline is being written; a
            `ValueError`, too.
        NotInitializedError: `init` was not called.
        TypeError: `file_path` is not a path.

    Example:

    >>> import pathlib, tempfile, keras_hvd
    >>> keras_hvd.init()
    >>> path = pathlib.Path(tempfile.mkdtemp(), "timeline.json")
    >>> keras_hvd.start_timeline(path)
    >>> keras_hvd.stop_timeline()
    >>> path.read_text()[:2]
    '[\\n'
    """
    basics.require_initialized("start_timeline")
    path = os.fsencode(file_path)
    basics.check(native.engine().khvd_start_timeline(path, bool(mark_cycles)))


def stop_timeline() -> None:
    """Ends the timeline: its file is complete when this returns on rank 0.

    Does nothing on other ranks, and where no timeline is written. `shutdown` ends it as
    well.

    Raises:
        NotInitializedError: `init` was not called.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> keras_hvd.stop_timeline()
    """
    basics.require_initialized("stop_timeline")
    basics.check(native.engine().khvd_stop_timeline())
