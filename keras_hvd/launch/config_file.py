"""`khvdrun --config-file`: options in a YAML file with Horovod's layout.

A file is translated to command-line options, so the same checks apply to both. Options
on the command line win.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_hvd.launch.usage import UsageError

# Outside sections, keys are the names of options.
_TOP_LEVEL = (
    *("verbose", "num-proc", "hosts", "hostfile", "start-timeout", "output-filename"),
    *("prefix-output-with-timestamp", "bind-to", "term-after", "kill-after"),
    *("allocator", "report", "status"),
)

_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi"}

# section: key: option
_SECTIONS = {
    "params": {
        key: f"--{key}"
        for key in (
            *("fusion-threshold-mb", "cycle-time-ms", "cache-capacity"),
            *("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"),
        )
    },
    "autotune": {
        "enabled": "--autotune",
        **{
            key: f"--autotune-{key}"
            for key in (
                *("log-file", "warmup-samples", "steps-per-sample"),
                *("bayes-opt-max-samples", "gaussian-process-noise"),
            )
        },
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark-cycles": "--timeline-mark-cycles",
    },
    "stall-check": {
        "enabled": "--stall-check",
        "warning-time-seconds": "--stall-check-warning-time-seconds",
        "shutdown-time-seconds": "--stall-check-shutdown-time-seconds",
    },
    "library-options": {
        key: f"--{key}"
        for key in (
            *("mpi-threads-disable", "num-nccl-streams", "thread-affinity"),
            *("ccl-bgt-affinity", "mlsl-bgt-affinity", "gloo-timeout-seconds"),
        )
    },
    "logging": {
        "level": "--log-level",
        "with-timestamp": "--log-with-timestamp",
        "hide-timestamp": "--log-hide-timestamp",
    },
}

# Options that switch off what the default or the environment may have switched on.
_OPPOSITES = {
    "--autotune": "--no-autotune",
    "--stall-check": "--no-stall-check",
    "--log-with-timestamp": "--log-without-timestamp",
    "--log-hide-timestamp": "--log-with-timestamp",
}


def arguments(path: Path, values: Mapping[str, int]) -> list[str]:
    """The command-line options that a configuration file stands for.

    `values` has the number of values that each option of `khvdrun` takes. Raises
    UsageError, which names the file and the key, if the file is not as expected.

    Example:

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     print("autotune: {enabled: true, warmup-samples: 2}", file=file, flush=True)
    ...     arguments(
    ...         Path(file.name), {"--autotune": 0, "--autotune-warmup-samples": 1}
    ...     )
    ['--autotune', '--autotune-warmup-samples=2']
    """
    found = []
    for key, option, value in _entries(path):
        if option not in values:
            raise _wrong(path, f"{key}: this version of khvdrun has no {option}")
        found += _as_arguments(path, key, option, value, values[option] > 0)
    return found


def _entries(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yields each value's key as the user writes it, its option, and the value."""
    top_level = {key: f"--{key}" for key in _TOP_LEVEL}
    for key, value in _mapping(path, "", _load(path)).items():
        name = _name(key)
        if name in _SECTIONS:
            for inner, inner_value in _mapping(path, str(key), value).items():
                option = _option(path, _SECTIONS[name], inner, f"{key}.")
                yield f"{key}.{inner}", option, inner_value
        elif name == "controller":
            if not isinstance(value, str) or value not in _CONTROLLERS:
                raise _wrong(path, f"{key} must be gloo or mpi, not {value!r}")
            yield str(key), _CONTROLLERS[value], True
        else:
            others = {**top_level, **dict.fromkeys((*_SECTIONS, "controller"), "")}
            yield str(key), _option(path, others, key, ""), value


def _load(path: Path) -> Any:
    # Imported only by those who use such a file.
    import yaml

    try:
        text = path.read_text()
        _require_distinct_keys(path, yaml.compose(text, yaml.SafeLoader))
        return yaml.safe_load(text)
    except UsageError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _wrong(path, f"cannot be read: {reason}") from None
    # What is no date, no truth value or no number raises whatever that comes to.
    except Exception as error:
        said = " ".join(str(error).split())
        if not isinstance(error, yaml.YAMLError):
            said = f"{type(error).__name__}: {said}"
        raise _wrong(path, f"is not YAML: {said}") from None


def _require_distinct_keys(path: Path, node: Any, section: str = "") -> None:
    """Refuses repeated keys: YAML's loader would silently drop the first."""
    if node is None or node.id != "mapping":
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line, name = key.start_mark.line + 1, section + str(key.value)
        if _name(name) in lines:
            where = f"in lines {lines[_name(name)]} and {line}"
            raise _wrong(path, f"{name} appears twice, {where}")
        lines[_name(name)] = line
        _require_distinct_keys(path, value, f"{name}.")


def _mapping(path: Path, key: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        where = f"{key} must hold" if key else "must hold"
        raise _wrong(path, f"{where} keys with values, not {value!r}")
    return value


def _option(path: Path, options: Mapping[str, str], key: Any, section: str) -> str:
    name = _name(key)
    if name not in options:
        known = ", ".join(sorted(options))
        where = f"in {section.removesuffix('.')} are" if section else "are"
        raise _wrong(path, f"unknown key {section}{key}; keys {where}: {known}")
    return options[name]


def _name(key: Any) -> str:
    """A key with hyphens, as options have them."""
    return str(key).replace("_", "-")


def _as_arguments(
    path: Path, key: str, option: str, value: Any, takes_value: bool
) -> list[str]:
    if takes_value:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise _wrong(path, f"{key} must be a number or text, not {value!r}")
        if not _can_be_passed_on(str(value)):
            raise _wrong(path, f"{key} cannot be passed to a process: {value!r}")
        return [f"{option}={value}"]
    if not isinstance(value, bool):
        raise _wrong(path, f"{key} must be true or false, not {value!r}")
    if value:
        return [option]
    return [_OPPOSITES[option]] if option in _OPPOSITES else []


def _can_be_passed_on(text: str) -> bool:
    """Whether a command line or an environment variable can hold this text."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _wrong(path: Path, text: str) -> UsageError:
    return UsageError(f"--config-file: {str(path)!r}: {text}")
