"""The facts of a job besides its times: settings, versions, and its ranks.

Rank 0 writes them to a file of its recording once it has joined the job.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_hvd.version import __version__

ACCUMULATION, COMPRESSION = "gradient_accumulation_steps", "compression of gradients"
"""The names of these settings of a model's optimizer."""

NO_COMPRESSION = "none"

_DISTRIBUTIONS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "NCCL": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
_PREFIXES = "KERAS_HVD_", "HOROVOD_"
# A rank's place, which launchers set, is no setting. A secret stays one.
_LEFT_OUT = (
    *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("JOB", "REPORT", "RENDEZVOUS", "RENEWAL", "REQUIRE_SIZE"),
)
_SECRETS = "SECRET", "KEY", "PASSWORD", "TOKEN"


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The versions in use, and the variables of keras_hvd and Horovod.

    Example:

    >>> found = settings({"HOROVOD_AUTOTUNE": "1", "KERAS_HVD_SECRET": "hidden"})
    >>> found["HOROVOD_AUTOTUNE"], "KERAS_HVD_SECRET" in found, "Python" in found
    ('1', False, True)
    """
    versions = {"keras_hvd": __version__, "Python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions[::-1]:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(distribution)
    return versions | {
        name: value
        for name, value in sorted(environment.items())
        if _is_shown(name) and value
    }


def _is_shown(name: str) -> bool:
    rest = next((name[len(p) :] for p in _PREFIXES if name.startswith(p)), None)
    is_left_out = rest is None or rest in _LEFT_OUT
    return not is_left_out and not any(word in name for word in _SECRETS)


def write(
    path: Path, members: Sequence[tuple[str, int | None]], capacity: float | None
) -> None:
    """Writes this process' settings, each rank's host and process, and the capacity."""
    found = {"settings": settings(os.environ), "members": members, "capacity": capacity}
    path.write_text(json.dumps(found))


def add(path: Path, settings: Mapping[str, str]) -> None:
    """Adds settings that are known later than the others.

    Example:

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "facts.json")
    >>> write(path, [], None)
    >>> add(path, {COMPRESSION: NO_COMPRESSION})
    >>> read(path)["settings"][COMPRESSION]
    'none'
    """
    found = read(path)
    found["settings"] = found.get("settings", {}) | settings
    # A job does not end because of an error in writing about it.
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(found))


def read(path: Path) -> dict[str, Any]:
    """The facts that were written; {} if they are missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
