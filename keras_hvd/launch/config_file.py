"""`khvdrun --config-file`: options in a YAML file with Horovod's layout.

A file is translated to command-line options, so the same checks apply to both. Options
on the command line win.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from keras_hvd.launch.options import BY_KEY, Option
from keras_hvd.launch.usage import UsageError

_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi"}

_SECTIONS: dict[str, dict[str, Option]] = {}
for _key, _value in BY_KEY.items():
    _section, _, _inner = _key.rpartition(".")
    _SECTIONS.setdefault(_section, {})[_inner] = _value
_OUTSIDE = _SECTIONS.pop("")


def arguments(path: Path) -> list[str]:
    """The command-line options that a configuration file stands for.

    Raises UsageError, which names the file and the key, if the file is not as expected.

    Example:

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     print("autotune: {enabled: true, warmup-samples: 2}", file=file, flush=True)
    ...     arguments(Path(file.name))
    ['--autotune', '--autotune-warmup-samples=2']
    """
    found = []
    for key, value in _mapping(path, "", _load(path)).items():
        name = _name(key)
        if name in _SECTIONS:
            for inner, inner_value in _mapping(path, str(key), value).items():
                option = _option(path, str(key), inner)
                found += _as_arguments(path, f"{key}.{inner}", option, inner_value)
        elif name == "controller":
            if not isinstance(value, str) or value not in _CONTROLLERS:
                raise _wrong(path, f"{key} must be gloo or mpi, not {value!r}")
            found.append(_CONTROLLERS[value])
        else:
            found += _as_arguments(path, str(key), _option(path, "", key), value)
    return found


def _load(path: Path) -> Any:
    # Imported only for such a file.
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
    # A malformed date, truth value or number may raise any exception.
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


def _option(path: Path, section: str, key: Any) -> Option:
    """The option for a key of a section; the section "" is outside of all."""
    options = _SECTIONS.get(_name(section), _OUTSIDE)
    if _name(key) not in options:
        others = () if section else (*_SECTIONS, "controller")
        known = ", ".join(sorted([*options, *others]))
        where, dot = (f"in {section} are", ".") if section else ("are", "")
        raise _wrong(path, f"unknown key {section}{dot}{key}; keys {where}: {known}")
    return options[_name(key)]


def _name(key: Any) -> str:
    """A key with hyphens, as options have them."""
    return str(key).replace("_", "-")


def _as_arguments(path: Path, key: str, option: Option, value: Any) -> list[str]:
    if option.values:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise _wrong(path, f"{key} must be a number or text, not {value!r}")
        if not can_be_passed_on(str(value)):
            raise _wrong(path, f"{key} cannot be passed to a process: {value!r}")
        return [f"{option.long_name}={value}"]
    if not isinstance(value, bool):
        raise _wrong(path, f"{key} must be true or false, not {value!r}")
    if value:
        return [option.long_name]
    return [option.off] if option.off else []


def can_be_passed_on(text: str) -> bool:
    """Whether a command line or an environment variable can hold this text.

    >>> can_be_passed_on("a\\0b")
    False
    """
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _wrong(path: Path, text: str) -> UsageError:
    return UsageError(f"--config-file: {str(path)!r}: {text}")
