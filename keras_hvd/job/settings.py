"""The environment variables of keras_hvd, with Horovod's, and their values: a table.

Horovod's variables work with their own names and with KERAS_HVD_ in place of HOROVOD_.
If several with the same meaning are set, ours come first. `khvdrun` uses this too, so
nothing here imports TensorFlow or the engine.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")
# A function from a text to a value, which may raise ValueError; and the valid texts.
_Kind = tuple[Callable[[str], _Value], str]

_OURS = "KERAS_HVD_"
_HOROVODS = "HOROVOD_"

# The default of khvd_options.
_DEFAULT_INIT_TIMEOUT = 60

MOST_DATA_CONNECTIONS = 16
"""For tensors, between two ranks on different hosts."""

# The engine counts in 64 bits.
_MOST = 2**63 - 1

DIVIDED = "KERAS_HVD_DIVIDED_DATA"
"""The variable that tells what has given a rank its part of the data already."""

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
"""Values of `KERAS_HVD_LOG_LEVEL`, as khvd_log_level in c_api.h, from 1."""

ALLOCATORS = ("pool", "unchanged")
"""Values of `KERAS_HVD_ALLOCATOR`; see backends/tensorflow/allocator.py."""

_CARRIERS = {"mpi": "mpi", "tcp": "tcp", "gloo": "tcp"}

_REASONS = {
    "CYCLE_TIME": (
        "there are no cycles: a tensor leaves when every rank has submitted it"
    ),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": (
        "autotune compares by turns, without a Gaussian process"
    ),
    "NUM_NCCL_STREAMS NUM_STREAMS": (
        "all collectives of a GPU are on one stream, one after the other"
    ),
    "ENABLE_ASYNC_COMPLETION": "always so: the host does not wait for NCCL",
    "BATCH_D2D_MEMCOPIES": "NCCL gets small tensors as a group, without copies",
    "GPU_OPERATIONS": (
        "tensors on GPUs take NCCL where it can be used, else host memory"
    ),
    "ADASUM_MPI_CHUNK_SIZE MPI_THREADS_DISABLE": "MPI reduces no tensors here",
    "CCL_BGT_AFFINITY CCL_CACHE MLSL_BGT_AFFINITY": "oneCCL is not used",
    "HIERARCHICAL_ALLGATHER HIERARCHICAL_ALLREDUCE TORUS_ALLREDUCE": (
        "ranks on one host always share memory"
    ),
    "CONTROLLER": "there is one engine, keras_hvd's own",
    "ELASTIC_TIMEOUT": "khvdrun --elastic-timeout says so",
    "ENABLE_XLA_OPS": "collectives are always compiled with what XLA compiles",
    "DYNAMIC_PROCESS_SETS": "process sets can always be added",
    "DISABLE_GROUP_FUSION": "groups travel with other tensors where they fit",
    "THREAD_AFFINITY": "khvdrun --bind-to cores binds all threads of a rank",
}

WITHOUT_EFFECT = dict(
    sorted((each, why) for names, why in _REASONS.items() for each in names.split())
)
"""Horovod's variables (without HOROVOD_) without effect here, and the reasons."""

# Names without prefix: these, and those of every `Setting`.
_known = {*WITHOUT_EFFECT}


class Setting(Generic[_Value]):
    """A variable, read by a call. An empty variable counts as not set.

    Args:
        kind: the meaning of its text.
        default: its value if it is not set.
        names: its name without prefix, and others of the same meaning.

    A call raises ValueError for a malformed variable, with its name and value.

    Example:

    >>> network_interfaces({"HOROVOD_GLOO_IFACE": "eth0"}), network_interfaces({})
    (('eth0',), ())
    """

    prefixes: tuple[str, ...] = (_OURS, _HOROVODS)

    def __init__(self, kind: _Kind[_Value], default: _Value, *names: str):
        self.names = names
        _known.update(names)
        self._parse, self._wanted = kind
        self._default = default

    def __call__(self, environment: Mapping[str, str] | None = None) -> _Value:
        variables = os.environ if environment is None else environment
        name = self.found(variables)
        if not name:
            return self._default
        text = variables[name].strip()
        try:
            return self._parse(text)
        except ValueError:
            error = f"{name} must be {self._wanted}, got {text!r}"
            raise ValueError(error) from None

    def found(self, variables: Mapping[str, str]) -> str:
        """The first of the names that is set: all of ours, then Horovod's; or ""."""
        names = (prefix + name for prefix in self.prefixes for name in self.names)
        return next((name for name in names if variables.get(name, "").strip()), "")


class OwnSetting(Setting[_Value]):
    """A variable that Horovod does not have.

    >>> tls({"KERAS_HVD_TLS": "1"}), tls({"HOROVOD_TLS": "1"})
    (True, False)
    """

    prefixes = (_OURS,)


def _whole(text: str) -> int:
    # int() also takes "1_0" and digits of other scripts.
    if not (text.isascii() and text.isdecimal()) or int(text) > _MOST:
        raise ValueError
    return int(text)


def _seconds(text: str, least: float = -math.inf) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= least):
        raise ValueError
    return seconds


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError
    return names


def _ports(text: str) -> range:
    first, _, last = text.partition("-")
    if not 0 < _whole(first) <= _whole(last) < 2**16:
        raise ValueError
    return range(int(first), int(last) + 1)


def _carrier(text: str) -> str:
    if text.lower() not in _CARRIERS:
        raise ValueError
    return _CARRIERS[text.lower()]


def _absolute(text: str) -> bytes:
    # The script may change its directory before the file is used.
    return os.fsencode(os.path.abspath(text))


def _count(least: int = 1, most: int = 2**31 - 1) -> _Kind[int]:
    """The kind of a number that fits into 32 bits."""

    def parse(text: str) -> int:
        if not least <= _whole(text) <= most:
            raise ValueError
        return int(text)

    return parse, f"a whole number from {least} to {most}"


def _or(value: int, kind: _Kind[int]) -> _Kind[int]:
    """The same kind, except that 0 gives `value`: 0 is the engine's default."""
    return lambda text: kind[0](text) or value, kind[1]


_SWITCH: _Kind[bool] = (lambda text: bool(("0", "1").index(text)), "0 or 1")
_TEXT: _Kind[str] = (str, "")
_FILE: _Kind[bytes] = (_absolute, "")
# A library's path, or a name to look for in the library path.
_LIBRARY: _Kind[bytes] = (
    lambda text: _absolute(text) if "/" in text else os.fsencode(text),
    "",
)
_SECONDS: _Kind[float] = (_seconds, "a number of seconds")
_FROM_0: _Kind[float] = (lambda text: _seconds(text, 0), "a number of seconds from 0")
_BYTES: _Kind[int] = (_whole, "a whole number of bytes")
_NAMES: _Kind[int] = (_whole, "a whole number of names from 0")
_LEVEL: _Kind[int] = (
    lambda text: LOG_LEVELS.index(text.lower()) + 1,
    f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}",
)

# Settings that are not for the engine.
all_output = OwnSetting(_SWITCH, False, "ALL_OUTPUT")
allocator = OwnSetting(
    (lambda text: ALLOCATORS[ALLOCATORS.index(text)], " or ".join(ALLOCATORS)),
    *("", "ALLOCATOR"),
)
cpu_operations = Setting((_carrier, "mpi, tcp or gloo"), "", "CPU_OPERATIONS")
data_connections = OwnSetting(_count(1, MOST_DATA_CONNECTIONS), 1, "DATA_CONNECTIONS")
network_interfaces: Setting[tuple[str, ...]] = Setting(
    (_names, "names of network interfaces, with commas"),
    *((), "NETWORK_INTERFACES", "GLOO_IFACE"),
)
ports = OwnSetting((_ports, "two port numbers, as 30000-30100"), range(0), "PORTS")
# The folder that khvdrun has made for the job's recording.
report = OwnSetting(_TEXT, "", "REPORT")
# What sets this start of a job apart from others with the same secret.
job_id = OwnSetting(_TEXT, "", "JOB_ID")
required_size = OwnSetting(_count(), 0, "REQUIRE_SIZE")
ssl_library = OwnSetting(_LIBRARY, b"", "SSL_LIBRARY")
tls = OwnSetting(_SWITCH, False, "TLS")
# Horovod's DYNAMIC announces that start_timeline starts one; always possible here.
_timeline = Setting(
    (lambda text: "" if text == "DYNAMIC" else text, ""), "", "TIMELINE"
)
_mark_cycles = Setting(_SWITCH, False, "TIMELINE_MARK_CYCLES")
_stall_check_disable = Setting(_SWITCH, False, "STALL_CHECK_DISABLE")
_log_hide_time = Setting(_SWITCH, False, "LOG_HIDE_TIME")


class _StallSeconds(Setting[float]):
    """A time of the stall check; `never` where the check is disabled."""

    def __init__(self, kind: _Kind[float], never: float, *names: str):
        super().__init__(kind, 0, *names)
        self._never = never

    def __call__(self, environment: Mapping[str, str] | None = None) -> float:
        # Malformed, it is an error in any case.
        seconds = super().__call__(environment)
        variables = os.environ if environment is None else environment
        if not _stall_check_disable(variables):
            return seconds
        is_horovods = _stall_check_disable.found(variables).startswith(_HOROVODS)
        is_ours = self.found(variables).startswith(_OURS)
        return seconds if is_horovods and is_ours else self._never


class _Timestamp(Setting[bool]):
    """Whether lines start with the time; Horovod says whether they do not."""

    def __call__(self, environment: Mapping[str, str] | None = None) -> bool:
        variables = os.environ if environment is None else environment
        is_shown, is_hidden = super().__call__(variables), _log_hide_time(variables)
        if self.found(variables) or not _log_hide_time.found(variables):
            return is_shown
        return not is_hidden


def _by(setting: Setting[Any]) -> Any:
    """A field that a setting reads."""
    return dataclasses.field(metadata={"setting": setting})


def _any(kind: _Kind[Any], default: Any, *names: str) -> Any:
    return _by(Setting(kind, default, *names))


def _own(kind: _Kind[Any], default: Any, *names: str) -> Any:
    return _by(OwnSetting(kind, default, *names))


@dataclass(frozen=True)
class Settings:
    """The variables' values, in the units of khvd_options (c_api.h).

    0, or an empty path, stands for the engine's default, unless noted otherwise.
    """

    # Seconds until a stall is reported; negative: never.
    stall_warning: float = _by(
        _StallSeconds(_SECONDS, -1, "STALL_WARNING_SECONDS", "STALL_CHECK_TIME_SECONDS")
    )
    # Seconds until a stall ends the job; 0: never.
    stall_abort: float = _by(
        _StallSeconds(_FROM_0, 0, "STALL_ABORT_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS")
    )
    # Seconds that ranks wait for each other at the start.
    init_timeout: float = _any(
        *(_FROM_0, 0, "INIT_TIMEOUT_SECONDS", "START_TIMEOUT", "GLOO_TIMEOUT_SECONDS")
    )
    # A rank's memory that others read.
    exchange_bytes: int = _own(_BYTES, 0, "EXCHANGE_BYTES")
    # The largest batch; a larger tensor travels alone.
    fusion_bytes: int = _any(_or(1, _BYTES), 0, "FUSION_BYTES", "FUSION_THRESHOLD")
    # Names that travel as numbers; negative: none.
    cache_capacity: int = _any(_or(-1, _NAMES), 0, "CACHE_CAPACITY")
    check: bool = _own(_SWITCH, False, "CHECK")  # whether ranks compare all results
    # The lowest level that is written, from 1 (trace) to 6 (fatal).
    log_level: int = _any(_LEVEL, LOG_LEVELS.index("warning") + 1, "LOG_LEVEL")
    log_timestamp: bool = _by(_Timestamp(_SWITCH, False, "LOG_TIMESTAMP"))
    autotune: bool = _any(_SWITCH, False, "AUTOTUNE")
    autotune_log: bytes = _any(_FILE, b"", "AUTOTUNE_LOG")
    # Samples that do not count; negative: none.
    autotune_warmup: int = _any(_or(-1, _count(0)), 0, "AUTOTUNE_WARMUP_SAMPLES")
    # Steps of a sample, and the most samples of the search; 0: no limit.
    autotune_steps: int = _any(_count(), 0, "AUTOTUNE_STEPS_PER_SAMPLE")
    autotune_samples: int = _any(_count(), 0, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES")
    # Empty: the libraries of the Python environment, else the system's; of CUDA the
    # system's.
    cuda_library: bytes = _own(_LIBRARY, b"", "CUDA_LIBRARY")
    nccl_library: bytes = _own(_LIBRARY, b"", "NCCL_LIBRARY")
    nvtx_library: bytes = _own(_LIBRARY, b"", "NVTX_LIBRARY")
    # Whether to hide collectives from NVIDIA's profilers.
    disable_ranges: bool = _any(_SWITCH, False, "DISABLE_NVTX_RANGES")
    # Seconds until a host that does not answer counts as gone.
    host_timeout: int = _own(_count(), 0, "HOST_TIMEOUT_SECONDS")


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
    rows = dataclasses.fields(Settings)
    return Settings(*(row.metadata["setting"](environment) for row in rows))


@dataclass(frozen=True)
class Timeline:
    """The timeline's path ("" for none), and whether it marks rounds of decisions."""

    path: str
    mark_cycles: bool


def timeline(environment: Mapping[str, str] | None = None) -> Timeline:
    """Reads the path of the timeline that the job writes from its start.

    Example:

    >>> timeline({"HOROVOD_TIMELINE": "job.json"})
    Timeline(path='job.json', mark_cycles=False)
    """
    return Timeline(_timeline(environment), _mark_cycles(environment))


def init_timeout(environment: Mapping[str, str] | None = None) -> float:
    """Returns the seconds that a job's processes wait for each other at the start.

    Example:

    >>> init_timeout({}), init_timeout({"HOROVOD_START_TIMEOUT": "90"})
    (60, 90.0)
    """
    return read(environment).init_timeout or _DEFAULT_INIT_TIMEOUT


def without_effect(environment: Mapping[str, str] | None = None) -> str:
    """Explains in one line which variables are set without effect, or "".

    They are some of Horovod's, and names that are nearly ours.

    Example:

    >>> without_effect({"HOROVOD_NUM_NCCL_STREAMS": "2"})
    'without effect here: HOROVOD_NUM_NCCL_STREAMS (all collectives of a GPU are ...)'
    >>> without_effect({"KERAS_HVD_LOGLEVEL": "info"})
    'without effect here: KERAS_HVD_LOGLEVEL (not a variable; KERAS_HVD_LOG_LEVEL is)'
    """
    variables = os.environ if environment is None else environment
    reasons = WITHOUT_EFFECT.items()
    found = {Setting(_TEXT, "", name).found(variables): why for name, why in reasons}
    ignored = {name: why for name, why in found.items() if name}
    return explain(ignored | _misspelled(variables))


def _misspelled(variables: Mapping[str, str]) -> dict[str, str]:
    """The names that are nearly those of settings, and which ones."""
    found = {}
    for variable in variables:
        name = variable.removeprefix(_OURS)
        if name == variable or name in _known or not variables[variable].strip():
            continue
        # At 0.75 none of the variables is close that other files read, such as a
        # rank's place.
        for meant in difflib.get_close_matches(name, _known, n=1, cutoff=0.75):
            found[variable] = f"not a variable; {_OURS}{meant} is"
    return found


def explain(ignored: Mapping[str, str]) -> str:
    """Explains in one line names without effect, grouped by reason.

    Example:

    >>> explain({"--mpi": "MPI is unused", "--tcp": "MPI is unused"})
    'without effect here: --mpi, --tcp (MPI is unused)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in ignored.items():
        names.setdefault(reason, []).append(name)
    parts = [f"{', '.join(same)} ({reason})" for reason, same in names.items()]
    return "without effect here: " + "; ".join(parts) if parts else ""
