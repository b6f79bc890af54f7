"""The files in the folder of a recording: their names, and their writers."""

import errno
import os
import socket
from pathlib import Path

_NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG

TIMES = "times"
"""Rank 0's engine: the times of the job."""

RANKS = "ranks"
"""Each rank of a host: its progress."""

SERIES = "series"
"""Rank 0: samples and loss over time."""

EPOCHS = "epochs"
"""Rank 0: the logs of epochs."""

FACTS = "facts.json"
"""Rank 0: settings, versions, and the members of the job."""

COMMAND = "command"
"""`khvdrun`: its command."""

SCALING = "scaling"
"""`khvdrun --scaling`: the purpose of the job, "train" or "meet"."""

HOST = "host"
"""`khvdrun`: the name of the host that it made the recording on."""

GENERATION = "generation"
"""`khvdrun`: in the folder of a job in which ranks go on, its number, from 2."""


def of_generation(path: str, generation: int) -> str:
    """The file of a job in which ranks go on, by the one of their first job.

    Example:

    >>> of_generation("logs.d/timeline.json", 1), of_generation("logs.d/timeline", 2)
    ('logs.d/timeline.json', 'logs.d/timeline.2')
    >>> of_generation("timeline.json", 3)
    'timeline.3.json'
    """
    stem, extension = os.path.splitext(path)
    return path if generation == 1 else f"{stem}.{generation}{extension}"


def is_of_this_host(folder: str) -> bool:
    """Whether a recording was made on this host: another one may see the folder too.

    Example:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> for name in (socket.gethostname(), "elsewhere"):
    ...     Path(folder, HOST).write_text(name) and is_of_this_host(folder)
    True
    False
    """
    try:
        return Path(folder, HOST).read_text() == socket.gethostname()
    except OSError:
        return False


def is_full(error: Exception) -> bool:
    """Whether an error says that there is no room, on a disk or within a limit.

    A job does not end because of an error in writing about it. The engine's errors have
    the system's words.

    Example:

    >>> is_full(OSError(errno.ENOSPC, "full")), is_full(PermissionError())
    (True, False)
    >>> is_full(ValueError("'a' cannot be written: No space left on device"))
    True
    """
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return any(os.strerror(number) in str(error) for number in _NO_ROOM)
