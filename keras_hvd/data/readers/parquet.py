"""Parquet files, read by tensorflow-io if it loads, otherwise by pyarrow."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_hvd.data.readers import tensorflow_io
from keras_hvd.data.readers.reader import Reader, require_columns
from keras_hvd.job import installed

if TYPE_CHECKING:
    import pyarrow

_TENSORFLOW_IO = "tensorflow-io"
_PYARROW = "pyarrow"

# Arrow's types whose names are not TensorFlow's. pyarrow's own conversion to NumPy's
# types takes pandas.
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


@dataclasses.dataclass
class Parquet(Reader):
    """Rows, as dicts of tensors.

    tensorflow-io reads whole files, pyarrow reads row groups.

    Example:

    >>> Parquet(engine="arrow")
    Traceback (most recent call last):
    ValueError: from_files: engine must be 'tensorflow-io' or 'pyarrow', got 'arrow'
    """

    columns: list[str] | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            raise TypeError(
                f"from_files: columns must be a list of names, got {self.columns!r}"
            )
        if self.engine not in (None, _TENSORFLOW_IO, _PYARROW):
            raise ValueError(
                f"from_files: engine must be {_TENSORFLOW_IO!r} or {_PYARROW!r}, got "
                f"{self.engine!r}"
            )
        if self.engine is None:
            self.engine = _PYARROW if tensorflow_io.why_not() else _TENSORFLOW_IO
        reason = _why_not(self.engine)
        if reason:
            raise ImportError(
                f"from_files: Parquet files are read through {tensorflow_io.VERSIONS}, "
                f"or through pyarrow: {reason}"
            )

    def learn(self, path: str) -> None:
        learn = _with_tensorflow_io if self.engine == _TENSORFLOW_IO else _with_pyarrow
        specs = learn(path)
        names = list(specs) if self.columns is None else list(self.columns)
        require_columns(path, names, specs)
        for name in names:
            if isinstance(specs[name], str):
                raise ValueError(
                    f"from_files: column {name!r} of {path!r} is of type "
                    f"{specs[name]}, which a tensor cannot have; name the other "
                    "columns with columns=[...]"
                )
        self.format = {name: specs[name] for name in names}

    def groups(self, path: str, size: int) -> list[tuple[int, int]]:
        if self.engine == _TENSORFLOW_IO:
            return [(-1, size)]
        with _opened(path) as file:
            metadata = file.metadata
            return [
                (group, metadata.row_group(group).total_byte_size)
                for group in range(metadata.num_row_groups)
            ]

    def open(self, path: tf.Tensor, group: tf.Tensor) -> tf.data.Dataset:
        if self.engine == _TENSORFLOW_IO:
            io = tensorflow_io.load()
            return io.IODataset.from_parquet(path, columns=self.format).map(dict)
        columns = tf.numpy_function(
            self._read, [path, group], [spec.dtype for spec in self.format.values()]
        )
        for column, spec in zip(columns, self.format.values()):
            column.set_shape([None, *spec.shape])
        return tf.data.Dataset.from_tensor_slices(dict(zip(self.format, columns)))

    def _read(self, path: bytes, group: np.ndarray) -> list[np.ndarray]:
        name, number = path.decode(), int(group)
        with _opened(name) as file:
            table = file.read_row_group(number, list(self.format))
        where = f"row group {number} of {name!r}"
        return [
            _array(table.column(name), spec, f"column {name!r} in {where}")
            for name, spec in self.format.items()
        ]


def _why_not(engine: str) -> str:
    if engine == _TENSORFLOW_IO:
        return tensorflow_io.why_not()
    try:
        importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        return f"pyarrow is not installed: {installed.install_command('io')}"
    except ImportError as error:
        return str(error)
    return ""


def _with_tensorflow_io(path: str) -> dict[str, Any]:
    specs = tensorflow_io.load().IODataset.from_parquet(path).element_spec
    return {name.decode(): spec for name, spec in specs.items()}


# --- pyarrow --------------------------------------------------------------------------


def _with_pyarrow(path: str) -> dict[str, Any]:
    """The columns' specs; for types without one, their names."""
    with _opened(path) as file:
        return {field.name: _spec(field.type) for field in file.schema_arrow}


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    import pyarrow
    from pyarrow import parquet

    # TensorFlow may open files that are not local.
    source = tf.io.gfile.GFile(path, "rb") if "://" in path else path
    try:
        with parquet.ParquetFile(source) as file:
            yield file
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"from_files: {path!r}: {error}") from None


def _spec(kind: pyarrow.DataType) -> tf.TensorSpec | str:
    from pyarrow import types

    if types.is_fixed_size_list(kind):
        inner = _spec(kind.value_type)
        if isinstance(inner, str) or inner.dtype == tf.string:
            return str(kind)
        return tf.TensorSpec([kind.list_size, *inner.shape], inner.dtype)
    stored = _stored(kind)
    if types.is_binary(stored):
        return tf.TensorSpec([], tf.string)
    kinds = types.is_boolean, types.is_integer, types.is_floating
    if any(is_kind(stored) for is_kind in kinds):
        name = str(stored)
        return tf.TensorSpec([], tf.as_dtype(_NAMES.get(name, name)))
    return str(kind)


def _stored(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type to read a column as; for times, the type of the numbers in the file."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    strings = types.is_string, types.is_large_string, types.is_large_binary
    if any(is_kind(kind) for is_kind in (*strings, types.is_fixed_size_binary)):
        return pyarrow.binary()
    if types.is_date32(kind) or types.is_time32(kind):
        return pyarrow.int32()
    if types.is_temporal(kind):
        return pyarrow.int64()
    return kind


def _array(column: pyarrow.ChunkedArray, spec: tf.TensorSpec, where: str) -> np.ndarray:
    from pyarrow import types

    if _spec(column.type) != spec:
        raise ValueError(
            f"from_files: {where} is of type {column.type}, in the first file of "
            f"{spec.dtype.name} and shape {spec.shape}"
        )
    array = column.combine_chunks()
    while spec.shape.rank and types.is_fixed_size_list(array.type):
        _require_no_nulls(array, where)
        array = array.flatten()
    if not spec.dtype.is_floating:
        _require_no_nulls(array, where)
    values = array.cast(_stored(array.type)).to_numpy(zero_copy_only=False)
    if spec.dtype == tf.string:
        return np.asarray(values, object)
    values = np.asarray(values, spec.dtype.as_numpy_dtype)
    return values.reshape(-1, *spec.shape)


def _require_no_nulls(array: pyarrow.Array, where: str) -> None:
    if array.null_count:
        raise ValueError(
            f"from_files: {where} has {array.null_count} nulls, and only floating "
            "point types can represent them (NaN)"
        )
