"""The files in the folder of a recording: their names, and who writes each."""

import socket
from pathlib import Path

TIMES = "times"
"""Rank 0's engine: where the time went."""

RANKS = "ranks"
"""Each rank of a host: how far it is."""

SERIES = "series"
"""Rank 0: samples and loss over time."""

FACTS = "facts.json"
"""Rank 0: settings, versions, and who takes part."""

COMMAND = "command"
"""`khvdrun`: what it runs."""

SCALING = "scaling"
"""`khvdrun --scaling`: what the job is for, "train" or "meet"."""

HOST = "host"
"""`khvdrun`: the name of the host that it made the recording on."""


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
