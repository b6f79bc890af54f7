"""Columns of a DataFrame as arrays, in the shapes that a model takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import pyarrow
import pyarrow.compute
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, functions
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DecimalType,
    NumericType,
    StructType,
)


def select(schema: StructType, names: Iterable[str], what: str) -> list[Column]:
    """A DataFrame's columns of numbers, arrays or vectors, as numbers or arrays.

    Raises ValueError if one is not there, or of another type.
    """
    return [_select(schema, name, what) for name in names]


def _select(schema: StructType, name: str, what: str) -> Column:
    if name not in schema.names:
        raise ValueError(
            f"{what}: the DataFrame has no column {name!r}; it has "
            f"{', '.join(schema.names)}"
        )
    column = functions.col(f"`{name}`")
    kind = given = schema[name].dataType
    if isinstance(kind, VectorUDT):
        floats = "float64" if keras.config.floatx() == "float64" else "float32"
        # For a null, it raises an error that does not name the column.
        column = functions.when(column.isNotNull(), vector_to_array(column, floats))
        return column.alias(name)
    if isinstance(kind, DecimalType):
        return column.cast("double").alias(name)
    while isinstance(kind, ArrayType):
        kind = kind.elementType
    if isinstance(kind, DecimalType) or not isinstance(
        kind, (NumericType, BooleanType)
    ):
        raise ValueError(
            f"{what}: column {name!r} is of type {given.simpleString()}, and a model "
            "takes numbers, arrays of them, and vectors"
        )
    return column


class Rows:
    """The values of a column, where Arrow has them.

    Raises ValueError for nulls, and for arrays of several lengths.
    """

    def __init__(self, name: str, values: pyarrow.ChunkedArray):
        self._parts = [to_numpy(name, chunk) for chunk in values.chunks if len(chunk)]
        if len({part.shape[1:] for part in self._parts}) > 1:
            raise _of_several_lengths(name)
        self._starts = np.cumsum([0, *map(len, self._parts)])

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """The values of the rows of these numbers; floats as Keras takes them."""
        first = self._parts[0]
        is_float = np.issubdtype(first.dtype, np.floating)
        kind = keras.config.floatx() if is_float else first.dtype
        taken = np.empty((len(numbers), *first.shape[1:]), kind)
        places = np.searchsorted(self._starts, numbers, side="right") - 1
        for place in np.unique(places):
            here = places == place
            taken[here] = self._parts[place][numbers[here] - self._starts[place]]
        return taken


def to_numpy(name: str, values: pyarrow.Array) -> np.ndarray:
    """The values of a column, in Arrow's memory if it has them as NumPy has.

    Raises ValueError for nulls, and for arrays of several lengths.
    """
    shape = [len(values)]
    while not values.null_count and pyarrow.types.is_list(values.type):
        lengths = pyarrow.compute.unique(pyarrow.compute.list_value_length(values))
        if len(lengths) > 1:
            raise _of_several_lengths(name)
        shape.append(lengths[0].as_py())
        values = values.flatten()
    if values.null_count:
        raise ValueError(f"column {name!r} has nulls, which no model takes")
    return values.to_numpy(zero_copy_only=False).reshape(shape)


def _of_several_lengths(name: str) -> ValueError:
    return ValueError(f"column {name!r} has arrays of several lengths: pad or cut them")


def as_inputs(values: Sequence[np.ndarray], inputs: Sequence[Any] | None) -> Any:
    """Values of feature columns, in the shapes and types of a model's inputs.

    Several columns for one input are put side by side. `inputs` is None for a model
    that does not know them.
    """
    if len(values) > 1 and inputs is not None and len(inputs) == 1:
        flat = [each.reshape(len(each), -1) for each in values]
        values = [np.concatenate(flat, axis=1)]
    if inputs is None:
        shaped = [*map(as_rows, values)]
    else:
        shaped = [
            in_shape(each, to.shape, f"input {to.name!r}").astype(to.dtype, copy=False)
            for each, to in zip(values, inputs)
        ]
    return shaped[0] if len(shaped) == 1 else tuple(shaped)


def as_rows(values: np.ndarray) -> np.ndarray:
    """Numbers as rows of one number; arrays as they are."""
    return values[:, None] if values.ndim == 1 else values


def in_shape(values: np.ndarray, shape: Sequence[int | None], what: str) -> np.ndarray:
    """Values in the shape of a batch, of whose sizes unknown ones are None or -1."""
    wanted = [-1 if size is None else size for size in shape[1:]]
    if wanted.count(-1) > 1:
        return values
    try:
        return values.reshape(len(values), *wanted)
    except ValueError:
        raise ValueError(
            f"{what} takes rows of shape {(*wanted,)}, and its columns have rows of "
            f"shape {values.shape[1:]}"
        ) from None
