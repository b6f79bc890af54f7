"""Where tensors in host memory come from, which TensorFlow asks its environment.

By itself TensorFlow takes each tensor from the C library and gives it back, but on
processors for whose sake it uses oneDNN. A large one the C library gives back to the
system, so that the next of its size costs a page fault for each 4 KiB again, which
takes longer than an allreduce of it. TensorFlow's own pool keeps what was freed for
later tensors. It is chosen when TensorFlow makes its devices. Nothing here imports
TensorFlow: `khvdrun` uses this too.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping

from keras_hvd.gpu import gpu_pinning
from keras_hvd.runtime import log, settings

_USE_POOL = "TF_CPU_ALLOCATOR_USE_BFC"
_LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
# TensorFlow's own limit, where nothing is said.
_DEFAULT_LIMIT_MIB = 64 << 10

# Who sets one of these has chosen an allocator.
_CHOICES = (_USE_POOL, "TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "GLIBC_TUNABLES", "LD_PRELOAD")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have TensorFlow use its pool, where it is to.

    Args:
        environment: The variables of the process: `KERAS_HVD_ALLOCATOR`, and those by
            which users choose an allocator themselves.

    Returns:
        What to set; nothing where all is to stay as it is.

    Raises:
        ValueError: `KERAS_HVD_ALLOCATOR` is malformed.

    Example:

    >>> variables({})["TF_CPU_ALLOCATOR_USE_BFC"]
    'true'
    >>> variables({"MALLOC_ARENA_MAX": "1"})
    {}
    >>> variables({"KERAS_HVD_ALLOCATOR": "unchanged"})
    {}
    """
    chosen = settings.allocator(environment)
    if chosen == "unchanged" or (not chosen and chosen_by(environment)):
        return {}
    found = {_USE_POOL: "true"}
    # What the machine has is what TensorFlow takes for a limit where it uses oneDNN.
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE >> 20
    if memory > _DEFAULT_LIMIT_MIB and not environment.get(_LIMIT):
        found[_LIMIT] = str(memory)
    return found


def uses_pool(environment: Mapping[str, str]) -> bool:
    """Whether TensorFlow's tensors come from its pool in ranks that khvdrun starts.

    Args:
        environment: The variables that they are given.

    Returns:
        False also where TensorFlow uses it by itself.

    Example:

    >>> uses_pool({}), uses_pool({"TF_CPU_ALLOCATOR_USE_BFC": "0"})
    (True, False)
    """
    said = {**environment, **variables(environment)}.get(_USE_POOL, "")
    return said.lower() in ("1", "true")


def chosen_by(environment: Mapping[str, str]) -> str:
    """The variable by which the user has chosen an allocator.

    Args:
        environment: The variables of the process.

    Returns:
        Its name; "" for none.

    Example:

    >>> chosen_by({"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"})
    'LD_PRELOAD'
    >>> chosen_by({"LD_PRELOAD": "/usr/lib/libfaketime.so.1"})
    ''
    """
    for name, value in environment.items():
        if not value:
            continue
        if name.startswith("MALLOC_"):
            return name
        # The last two are for other things as well.
        if name in _CHOICES and (name.startswith("TF_") or "alloc" in value):
            return name
    return ""


def use(rank: int) -> None:
    """Has TensorFlow use its pool in this process, if it has made no devices yet.

    Args:
        rank: Of this process: rank 0 says where that comes too late.

    Raises:
        ValueError: `KERAS_HVD_ALLOCATOR` is malformed.

    Example:

    >>> use(0)
    """
    wanted = variables(os.environ)
    if wanted and _has_devices():
        if rank == 0 and not (_has_pool() or gpu_pinning.driver_is_loaded()):
            log.write("warning", TOO_LATE)
        return
    os.environ.update(wanted)


TOO_LATE = (
    "TensorFlow was in use before keras_hvd.init(), so that large tensors cost page "
    f"faults: call keras_hvd.init() first, or set {_USE_POOL}=true (khvdrun does; "
    "KERAS_HVD_ALLOCATOR=unchanged: leave it so)"
)
"""What rank 0 says where TensorFlow has chosen its allocator before `init`."""


def _has_devices() -> bool:
    if "tensorflow" not in sys.modules:
        return False
    from tensorflow.python.eager import context

    return context.context()._initialized


def _has_pool() -> bool:
    """Whether TensorFlow's allocator knows what it has, as pools do."""
    import tensorflow as tf

    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return False
    return True
