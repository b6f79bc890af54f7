"""The environment variables of keras_hvd, with Horovod's, and their values.

Horovod's variables work with their own names and with KERAS_HVD_ in place of HOROVOD_.
If several with the same meaning are set, ours come first. `khvdrun` uses this too, so
nothing here imports TensorFlow or the engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Value = TypeVar("_Value")

_OURS = "KERAS_HVD_"
_HOROVODS = "HOROVOD_"

# That of khvd_options.
_DEFAULT_INIT_TIMEOUT = 60

MOST_DATA_CONNECTIONS = 16
"""Of two ranks on different hosts, for tensors."""

# The engine counts in 64 bits.
_MOST = 2**63 - 1

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
"""Values of `KERAS_HVD_LOG_LEVEL`, as khvd_log_level in c_api.h, from 1."""

ALLOCATORS = ("pool", "unchanged")
"""Values of `KERAS_HVD_ALLOCATOR`; see backends/tensorflow/allocator.py."""

_NO_CYCLES = "there are no cycles: a tensor leaves when every rank has submitted it"
_NO_PROCESS = "autotune compares by turns, without a Gaussian process"
_ONE_STREAM = "all collectives of a GPU are on one stream, one after the other"
_ASYNCHRONOUS = "always so: the host does not wait for NCCL"
_ONE_GROUP = "NCCL gets small tensors as a group, without copies"
_OWN_CHOICE = "tensors on GPUs take NCCL where it can be used, else host memory"
_NO_MPI = "MPI is not used"
_NO_CCL = "oneCCL is not used"
_HIERARCHICAL = "ranks on one host always share memory"
_OWN_ENGINE = "there is one engine, keras_hvd's own"
_NOT_ELASTIC = "this version has no elastic jobs"
_ALWAYS_XLA = "collectives are always compiled with what XLA compiles"
_ALWAYS_DYNAMIC = "process sets can always be added"

WITHOUT_EFFECT = {
    "ADASUM_MPI_CHUNK_SIZE": _NO_MPI,
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_PROCESS,
    "BATCH_D2D_MEMCOPIES": _ONE_GROUP,
    "CCL_BGT_AFFINITY": _NO_CCL,
    "CCL_CACHE": _NO_CCL,
    "CONTROLLER": _OWN_ENGINE,
    "CYCLE_TIME": _NO_CYCLES,
    "DISABLE_GROUP_FUSION": "groups travel with other tensors where they fit",
    "DYNAMIC_PROCESS_SETS": _ALWAYS_DYNAMIC,
    "ELASTIC_TIMEOUT": _NOT_ELASTIC,
    "ENABLE_ASYNC_COMPLETION": _ASYNCHRONOUS,
    "ENABLE_XLA_OPS": _ALWAYS_XLA,
    "GPU_OPERATIONS": _OWN_CHOICE,
    "HIERARCHICAL_ALLGATHER": _HIERARCHICAL,
    "HIERARCHICAL_ALLREDUCE": _HIERARCHICAL,
    "MLSL_BGT_AFFINITY": _NO_CCL,
    "MPI_THREADS_DISABLE": _NO_MPI,
    "NUM_NCCL_STREAMS": _ONE_STREAM,
    "NUM_STREAMS": _ONE_STREAM,
    "THREAD_AFFINITY": "khvdrun --bind-to cores binds all threads of a rank",
    "TORUS_ALLREDUCE": _HIERARCHICAL,
}
"""Horovod's variables (without HOROVOD_) without effect here, and the reasons."""


@dataclass(frozen=True)
class Settings:
    """The variables' values, in the units of khvd_options (c_api.h).

    0, or an empty path, stands for the engine's default, unless noted otherwise.
    """

    init_timeout: float  # seconds that ranks wait for each other at the start
    stall_warning: float  # seconds until a stall is reported; negative: never
    stall_abort: float  # seconds until a stall ends the job; 0: never
    exchange_bytes: int  # a rank's memory that others read
    fusion_bytes: int  # the largest batch
    cache_capacity: int  # names that travel as numbers; negative: none
    check: bool  # whether ranks compare all results
    log_level: int  # the lowest level that is written, from 1 (trace) to 6 (fatal)
    log_timestamp: bool
    autotune: bool
    autotune_log: bytes  # absolute path; empty: none
    autotune_warmup: int  # samples that do not count; negative: none
    autotune_steps: int  # steps of a sample
    autotune_samples: int  # the most samples of the search; 0: no limit
    cuda_library: bytes  # empty: the system's
    nccl_library: bytes  # empty: the Python environment's, else the system's
    nvtx_library: bytes
    disable_ranges: bool  # whether to hide collectives from NVIDIA's profilers
    host_timeout: int  # seconds until a host that does not answer counts as gone


@dataclass(frozen=True)
class _Found:
    """A variable that is set."""

    name: str
    text: str

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(_OURS)

    def parse(self, parse: Callable[[str], _Value], wanted: str) -> _Value:
        try:
            return parse(self.text)
        except ValueError:
            text = f"{self.name} must be {wanted}, got {self.text!r}"
            raise ValueError(text) from None


def read(environment: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings; empty variables count as not set.

    Raises ValueError for a malformed variable, with its name and value.

    Example:

    >>> read({"HOROVOD_FUSION_THRESHOLD": "1000000"}).fusion_bytes
    1000000
    >>> read({"KERAS_HVD_LOG_LEVEL": "loud"})
    Traceback (most recent call last):
    ValueError: KERAS_HVD_LOG_LEVEL must be trace, debug, info, ... or fatal, got 'loud'
    """
    variables = os.environ if environment is None else environment
    stall_warning, stall_abort = _stall_seconds(variables)
    return Settings(
        init_timeout=_duration(
            _find(
                variables,
                "INIT_TIMEOUT_SECONDS",
                "START_TIMEOUT",
                "GLOO_TIMEOUT_SECONDS",
            )
        ),
        stall_warning=stall_warning,
        stall_abort=stall_abort,
        exchange_bytes=_bytes(_find_ours(variables, "EXCHANGE_BYTES")) or 0,
        fusion_bytes=_fusion_bytes(variables),
        cache_capacity=_cache_capacity(variables),
        check=_switch(_find_ours(variables, "CHECK")),
        log_level=_log_level(variables),
        log_timestamp=_log_timestamp(variables),
        autotune=_switch(_find(variables, "AUTOTUNE")),
        autotune_log=_autotune_log(variables),
        autotune_warmup=_autotune_warmup(variables),
        autotune_steps=_count(_find(variables, "AUTOTUNE_STEPS_PER_SAMPLE"), 1),
        autotune_samples=_count(_find(variables, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES"), 1),
        cuda_library=_library(_find_ours(variables, "CUDA_LIBRARY")),
        nccl_library=_library(_find_ours(variables, "NCCL_LIBRARY")),
        nvtx_library=_library(_find_ours(variables, "NVTX_LIBRARY")),
        disable_ranges=_switch(_find(variables, "DISABLE_NVTX_RANGES")),
        host_timeout=_count(_find_ours(variables, "HOST_TIMEOUT_SECONDS"), 1),
    )


@dataclass(frozen=True)
class Timeline:
    """The timeline's path ("" for none), and whether it marks rounds of decisions."""

    path: str
    mark_cycles: bool


def timeline(environment: Mapping[str, str] | None = None) -> Timeline:
    """Reads whether the job writes a timeline from its start.

    Example:

    >>> timeline({"HOROVOD_TIMELINE": "job.json"})
    Timeline(path='job.json', mark_cycles=False)
    """
    variables = os.environ if environment is None else environment
    found = _find(variables, "TIMELINE")
    # Horovod's value for a timeline that start_timeline starts; always possible here.
    path = "" if found is None or found.text == "DYNAMIC" else found.text
    return Timeline(path, _switch(_find(variables, "TIMELINE_MARK_CYCLES")))


def report(environment: Mapping[str, str] | None = None) -> str:
    """Reads the folder that `khvdrun` has made for the job's recording; "" for none.

    Example:

    >>> report({"KERAS_HVD_REPORT": "/jobs/report.html.recording"})
    '/jobs/report.html.recording'
    """
    variables = os.environ if environment is None else environment
    found = _find_ours(variables, "REPORT")
    return "" if found is None else found.text


def allocator(environment: Mapping[str, str] | None = None) -> str:
    """Reads which allocator TensorFlow should use: one of `ALLOCATORS`, or ""."""
    variables = os.environ if environment is None else environment
    found = _find_ours(variables, "ALLOCATOR")
    if found is None:
        return ""
    return ALLOCATORS[found.parse(ALLOCATORS.index, " or ".join(ALLOCATORS))]


def init_timeout(environment: Mapping[str, str] | None = None) -> float:
    """Reads how many seconds the processes of a job wait for each other at the start.

    Example:

    >>> init_timeout({}), init_timeout({"HOROVOD_START_TIMEOUT": "90"})
    (60, 90.0)
    """
    return read(environment).init_timeout or _DEFAULT_INIT_TIMEOUT


def required_size(environment: Mapping[str, str] | None = None) -> int:
    """Reads the only size that a job may have; 0: any.

    Example:

    >>> required_size({}), required_size({"KERAS_HVD_REQUIRE_SIZE": "8"})
    (0, 8)
    """
    variables = os.environ if environment is None else environment
    return _count(_find_ours(variables, "REQUIRE_SIZE"), 1)


def network_interfaces(
    environment: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Reads the network interfaces for other hosts, by name; none: whichever it takes.

    Example:

    >>> network_interfaces({"HOROVOD_GLOO_IFACE": "eth0"})
    ('eth0',)
    """
    variables = os.environ if environment is None else environment
    found = _find(variables, "NETWORK_INTERFACES", "GLOO_IFACE")
    if found is None:
        return ()
    return found.parse(_names, "names of network interfaces, with commas")


def data_connections(environment: Mapping[str, str] | None = None) -> int:
    """Reads how many connections carry tensors between two ranks of different hosts.

    Example:

    >>> data_connections({}), data_connections({"KERAS_HVD_DATA_CONNECTIONS": "4"})
    (1, 4)
    """
    variables = os.environ if environment is None else environment
    found = _find_ours(variables, "DATA_CONNECTIONS")
    return _count(found, 1, MOST_DATA_CONNECTIONS) or 1


def cpu_operations(environment: Mapping[str, str] | None = None) -> str:
    """Reads what carries tensors in host memory between hosts: "mpi", "tcp", or "".

    Horovod calls TCP "gloo".

    Example:

    >>> cpu_operations({}), cpu_operations({"HOROVOD_CPU_OPERATIONS": "gloo"})
    ('', 'tcp')
    """
    variables = os.environ if environment is None else environment
    found = _find(variables, "CPU_OPERATIONS")
    if found is None:
        return ""
    carriers = {"mpi": "mpi", "tcp": "tcp", "gloo": "tcp"}

    def parse(text: str) -> str:
        if text.lower() not in carriers:
            raise ValueError
        return carriers[text.lower()]

    return found.parse(parse, "mpi, tcp or gloo")


def tls(environment: Mapping[str, str] | None = None) -> bool:
    """Reads whether everything between hosts is encrypted.

    Example:

    >>> tls({}), tls({"KERAS_HVD_TLS": "1"})
    (False, True)
    """
    variables = os.environ if environment is None else environment
    return _switch(_find_ours(variables, "TLS"))


def ssl_library(environment: Mapping[str, str] | None = None) -> bytes:
    """Reads which libssl TLS uses: a path, a name, or "" for the system's.

    Example:

    >>> ssl_library({"KERAS_HVD_SSL_LIBRARY": "libssl.so.3"})
    b'libssl.so.3'
    """
    variables = os.environ if environment is None else environment
    return _library(_find_ours(variables, "SSL_LIBRARY"))


def without_effect(environment: Mapping[str, str] | None = None) -> str:
    """Explains in one line which of Horovod's variables are set without effect, or "".

    Example:

    >>> without_effect({"HOROVOD_NUM_NCCL_STREAMS": "2"})
    'without effect here: HOROVOD_NUM_NCCL_STREAMS (all collectives of a GPU are ...)'
    """
    variables = os.environ if environment is None else environment
    found = {}
    for suffix, reason in WITHOUT_EFFECT.items():
        one = _find(variables, suffix)
        if one is not None:
            found[one.name] = reason
    return explain(found)


def explain(ignored: Mapping[str, str]) -> str:
    """Explains in one line names without effect, grouped by reason.

    Example:

    >>> explain({"--mpi": "MPI is not used", "--tcp": "MPI is not used"})
    'without effect here: --mpi, --tcp (MPI is not used)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in ignored.items():
        names.setdefault(reason, []).append(name)
    parts = [f"{', '.join(same)} ({reason})" for reason, same in names.items()]
    return "without effect here: " + "; ".join(parts) if parts else ""


def _find(variables: Mapping[str, str], *suffixes: str) -> _Found | None:
    """The first of the variables that is set: all of ours, then Horovod's."""
    for prefix in (_OURS, _HOROVODS):
        for suffix in suffixes:
            text = variables.get(prefix + suffix, "").strip()
            if text:
                return _Found(prefix + suffix, text)
    return None


def _find_ours(variables: Mapping[str, str], suffix: str) -> _Found | None:
    """A variable that Horovod does not have."""
    text = variables.get(_OURS + suffix, "").strip()
    return _Found(_OURS + suffix, text) if text else None


def _stall_seconds(variables: Mapping[str, str]) -> tuple[float, float]:
    """The seconds until a stall is reported, and until it ends the job."""
    warning = _find(variables, "STALL_WARNING_SECONDS", "STALL_CHECK_TIME_SECONDS")
    abort = _find(variables, "STALL_ABORT_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS")
    disable = _find(variables, "STALL_CHECK_DISABLE")
    # All are parsed: a malformed one is always an error.
    seconds = _number(warning), _duration(abort)
    if disable is None or not _switch(disable):
        return seconds
    kept = [
        found is not None and found.is_ours and not disable.is_ours
        for found in (warning, abort)
    ]
    return seconds[0] if kept[0] else -1, seconds[1] if kept[1] else 0


def _fusion_bytes(variables: Mapping[str, str]) -> int:
    given = _bytes(_find(variables, "FUSION_BYTES", "FUSION_THRESHOLD"))
    # 0 is the engine's default. A tensor larger than the largest batch travels alone.
    return 1 if given == 0 else given or 0


def _cache_capacity(variables: Mapping[str, str]) -> int:
    found = _find(variables, "CACHE_CAPACITY")
    if found is None:
        return 0
    return found.parse(_whole, "a whole number of names from 0") or -1


def _log_level(variables: Mapping[str, str]) -> int:
    found = _find(variables, "LOG_LEVEL")
    if found is None:
        return LOG_LEVELS.index("warning") + 1
    wanted = f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}"
    return found.parse(lambda text: LOG_LEVELS.index(text.lower()), wanted) + 1


def _log_timestamp(variables: Mapping[str, str]) -> bool:
    shown = _find(variables, "LOG_TIMESTAMP")
    hidden = _find(variables, "LOG_HIDE_TIME")
    is_shown, is_hidden = _switch(shown), _switch(hidden)
    return is_shown if shown is not None or hidden is None else not is_hidden


def _autotune_log(variables: Mapping[str, str]) -> bytes:
    found = _find(variables, "AUTOTUNE_LOG")
    # The script may change its directory before the file is written.
    return b"" if found is None else os.fsencode(os.path.abspath(found.text))


def _autotune_warmup(variables: Mapping[str, str]) -> int:
    found = _find(variables, "AUTOTUNE_WARMUP_SAMPLES")
    return 0 if found is None else _count(found, 0) or -1


def _library(found: _Found | None) -> bytes:
    """A library's absolute path, or a name to look for in the library path."""
    if found is None:
        return b""
    # Absolute, because it is opened later.
    path = os.path.abspath(found.text) if "/" in found.text else found.text
    return os.fsencode(path)


def _count(found: _Found | None, least: int, most: int = 2**31 - 1) -> int:
    """A number that fits into 32 bits; 0 if it is not set."""

    def parse(text: str) -> int:
        number = _whole(text)
        if not least <= number <= most:
            raise ValueError
        return number

    wanted = f"a whole number from {least} to {most}"
    return 0 if found is None else found.parse(parse, wanted)


def _bytes(found: _Found | None) -> int | None:
    return None if found is None else found.parse(_whole, "a whole number of bytes")


def _duration(found: _Found | None) -> float:
    """Seconds from 0; 0 is the engine's default."""
    return 0 if found is None else found.parse(_from_0, "a number of seconds from 0")


def _number(found: _Found | None) -> float:
    """Seconds; negative means never."""
    return 0 if found is None else found.parse(_finite, "a number of seconds")


def _switch(found: _Found | None) -> bool:
    if found is None:
        return False
    return bool(found.parse(("0", "1").index, "0 or 1"))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError
    return names


def _whole(text: str) -> int:
    # int() also takes "1_0" and digits of other scripts.
    if not (text.isascii() and text.isdecimal()) or int(text) > _MOST:
        raise ValueError
    return int(text)


def _finite(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError
    return seconds


def _from_0(text: str) -> float:
    seconds = _finite(text)
    if seconds < 0:
        raise ValueError
    return seconds
