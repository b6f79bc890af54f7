"""Variables of a strategy: plain ones, equal on all ranks.

They start with the first rank's values. Variables with an aggregation apply it when
they are assigned in a replica context; reading never does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework.errors_impl import InaccessibleTensorError
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable

from keras_hvd.backends.labels import own_name
from keras_hvd.backends.tensorflow.collectives.allgather import allgather
from keras_hvd.backends.tensorflow.collectives.broadcast import broadcast
from keras_hvd.backends.tensorflow.collectives.graph_names import (
    function_graph,
    name_in_graph,
)
from keras_hvd.backends.tensorflow.collectives.submission import on_cpu
from keras_hvd.job.process_sets import ProcessSet
from keras_hvd.mixin import Mixin
from keras_hvd.strategy import no_rows, reduction

_NONE = tf.VariableAggregation.NONE
_SUM = tf.VariableAggregation.SUM
_MEAN = tf.VariableAggregation.MEAN
_ONLY_FIRST_REPLICA = tf.VariableAggregation.ONLY_FIRST_REPLICA
_ON_READ = tf.VariableSynchronization.ON_READ

# Users' functions call these, and autograph would take seconds to convert them.
_as_it_is = tf.autograph.experimental.do_not_convert

_REDUCE_OPS = {_SUM: tf.distribute.ReduceOp.SUM, _MEAN: tf.distribute.ReduceOp.MEAN}


def create(
    next_creator: Callable[..., Any],
    arguments: dict[str, Any],
    strategy: tf.distribute.Strategy,
    process_set: ProcessSet,
) -> Any:
    """Creates a variable with the first rank's initial value."""
    synchronization = arguments.get("synchronization")
    if synchronization == tf.VariableSynchronization.NONE:
        raise ValueError(
            f"variable {arguments.get('name')!r}: a keras_hvd.Strategy has a copy of "
            "it on each rank, and the copies need a synchronization: use "
            "tf.VariableSynchronization.ON_READ for values that differ between ranks"
        )
    variable = _created(next_creator, arguments, process_set)
    # TensorFlow does not set these for variables created in a tf.function.
    aggregation = arguments.get("aggregation") or _NONE
    variable._distribute_strategy = strategy
    variable._aggregation = aggregation
    if synchronization == _ON_READ:
        variable._synchronization = synchronization
    elif aggregation != _NONE:
        plain: type = type(variable)
        variable.__class__ = _aggregating_class(plain)
    return variable


def read_aggregate(variable: Any, process_set: ProcessSet) -> tf.Tensor:
    """The value of a variable; if it is ON_READ, aggregated over the ranks.

    Raises ValueError if it is ON_READ and has no aggregation.
    """
    value = tf.convert_to_tensor(variable)
    if variable.synchronization != _ON_READ:
        return tf.identity(value)
    name = f"Strategy/{own_name(variable.name)}/read"
    if variable.aggregation == _NONE:
        raise ValueError(
            f"variable {variable.name!r} is ON_READ without an aggregation: it has a "
            "value on each rank, but none over all of them"
        )
    return _aggregated(variable.aggregation, value, name, process_set)


def of_first_rank(value: Any, name: str, process_set: ProcessSet) -> tf.Tensor:
    """The first rank's value, on every rank.

    Shapes and types are the same on all ranks; strings may have any length.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> of_first_rank(["a", "bc"], "words", keras_hvd.global_process_set).numpy()
    array([b'a', b'bc'], dtype=object)
    """
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype == tf.string:
        name = name_in_graph(f"Strategy/{name}")
        return _string_of_first_rank(tensor, name, process_set)
    return _aggregated(_ONLY_FIRST_REPLICA, tensor, f"Strategy/{name}", process_set)


@contextlib.contextmanager
def equal_values() -> Iterator[None]:
    """Skips aggregation in this block, for values that are equal on all ranks.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> strategy = keras_hvd.Strategy()
    >>> with strategy.scope():
    ...     step = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)
    >>> def count():
    ...     with equal_values():
    ...         step.assign_add(1)
    >>> strategy.run(count)
    >>> step.numpy().item()
    1
    """
    with distribute_lib.UpdateContext(0):
        yield


def _created(
    next_creator: Callable[..., Any], arguments: dict[str, Any], process_set: ProcessSet
) -> Any:
    given = arguments.get("initial_value")
    if given is None:
        return next_creator(**arguments)
    name = arguments.get("name") or "Variable"
    initial_value = functools.partial(
        _initial_value, given, arguments.get("dtype"), name, process_set
    )
    if tf.inside_function() and not tf.is_symbolic_tensor(given):
        with tf.init_scope():
            try:
                value = initial_value()
            except (TypeError, InaccessibleTensorError):
                # TensorFlow itself lifts values that depend on the function's tensors.
                value = None
            if value is not None:
                return next_creator(**{**arguments, "initial_value": value})
    return next_creator(**{**arguments, "initial_value": initial_value})


def _initial_value(
    given: Any, dtype: Any, name: str, process_set: ProcessSet, **arguments: Any
) -> tf.Tensor:
    """A variable's initial value, computed where TensorFlow creates the variable."""
    value = given(**arguments) if callable(given) else given
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    value = tf.convert_to_tensor(value, dtype)
    return of_first_rank(value, f"variable/{name}", process_set)


def _string_of_first_rank(
    tensor: tf.Tensor, name: str, process_set: ProcessSet
) -> tf.Tensor:
    """The first rank's strings, sent as bytes; the other ranks give none."""
    with on_cpu():
        data = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
        if process_set.rank() != 0:
            data = data[:0]
        data = allgather(data, name=name, process_set=process_set)
    letters = tf.constant([bytes([letter]) for letter in range(256)])
    text = tf.strings.reduce_join(tf.gather(letters, tf.cast(data, tf.int32)))
    return tf.ensure_shape(tf.io.parse_tensor(text, tf.string), tensor.shape)


class _Aggregates(Mixin):
    """A variable with an aggregation of the ranks' assignments."""

    @_as_it_is
    def assign(self, value, use_locking=None, name=None, read_value=True):
        value = self._over_ranks(value, "assign")
        return super().assign(value, use_locking, name, read_value)

    @_as_it_is
    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        delta = self._over_ranks(delta, "assign_add")
        return super().assign_add(delta, use_locking, name, read_value)

    @_as_it_is
    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        delta = self._over_ranks(delta, "assign_sub")
        return super().assign_sub(delta, use_locking, name, read_value)

    @_as_it_is
    def _strided_slice_assign(self, begin, end, strides, value, *others, **named):
        slices = begin, end, strides, self._over_ranks(value, "assign")
        return super()._strided_slice_assign(*slices, *others, **named)

    def _must_aggregate(self) -> bool:
        return not _initializes() and _is_in_replica_context(self._distribute_strategy)

    def _over_ranks(self, value: Any, method: str) -> Any:
        """The value that all ranks assign, from this rank's value."""
        if not self._must_aggregate():
            return value
        is_number = isinstance(value, (bool, int, float, complex))
        aggregation = self.aggregation
        if aggregation == _SUM and is_number:
            # For tf.distribute, a Python number is one value of all replicas.
            aggregation = _ONLY_FIRST_REPLICA
        if aggregation == _MEAN and not is_number:
            self._require_mean(method)
        tensor = tf.convert_to_tensor(value, self.dtype)
        if aggregation == _MEAN:
            tensor = no_rows.own_or(tensor, self if method == "assign" else 0)
        process_set = self._distribute_strategy.extended.process_set
        result = _aggregated(aggregation, tensor, self._place(method), process_set)
        return tf.cast(result, self.dtype)

    def _slices_over_ranks(
        self, slices: tf.IndexedSlices, method: str
    ) -> tf.IndexedSlices:
        """The slices that all ranks scatter, from this rank's slices."""
        if not self._must_aggregate():
            return slices
        process_set = self._distribute_strategy.extended.process_set
        if self.aggregation == _ONLY_FIRST_REPLICA:
            return _slices_of_first_rank(slices, self._place(method), process_set)
        if method not in ("scatter_add", "scatter_sub"):
            raise self._cannot(method)
        if self.aggregation == _MEAN:
            self._require_mean(method)
        return _aggregated(self.aggregation, slices, self._place(method), process_set)

    def _place(self, method: str) -> str:
        """The name of a collective for the variable."""
        return f"Strategy/{own_name(self.name)}/{method}"

    def _require_mean(self, method: str) -> None:
        if self.dtype.is_floating or self.dtype.is_complex:
            return
        raise ValueError(
            f"variable {self.name!r} of {self.dtype.name} has the aggregation MEAN, "
            f"which {method} cannot apply to integers in a replica context: make it a "
            "float, or assign it outside of Strategy.run"
        )

    def _cannot(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"variable {self.name!r} has the aggregation {self.aggregation.name}, "
            f"which {method} cannot apply in a replica context: reduce what it is "
            "given, and call it in Strategy.extended.update"
        )

    def __tf_tracing_type__(self, signature_context):
        # Otherwise variables with different aggregations would share a trace.
        plain = super().__tf_tracing_type__(signature_context)
        own = self.aggregation.value, id(self._distribute_strategy)
        return _AggregatingSpec(*plain._serialize(), *own)

    def __deepcopy__(self, memo):
        copied = super().__deepcopy__(memo)
        copied.__class__ = type(self)
        return copied


class _AggregatingSpec(resource_variable_ops.VariableSpec):
    """The type of an aggregating variable, for arguments of a `tf.function`."""

    __slots__ = ["_own"]

    def __init__(self, shape, dtype, trainable, alias_id, *own):
        super().__init__(shape, dtype, trainable, alias_id)
        self._own = own

    def _serialize(self):
        return *super()._serialize(), *self._own

    def __eq__(self, other):
        return super().__eq__(other) and self._own == other._own

    def __hash__(self):
        return hash((super().__hash__(), self._own))


def _scatters(method: str) -> Callable[..., Any]:
    """A method that scatters slices."""

    @_as_it_is
    def scatter(self, sparse_delta, use_locking=False, name=None):
        slices = self._slices_over_ranks(sparse_delta, method)
        return getattr(super(_Aggregates, self), method)(slices, use_locking, name)

    return scatter


def _scatters_by_index(method: str) -> Callable[..., Any]:
    """A method without an aggregation."""

    @_as_it_is
    def scatter(self, *arguments, **named):
        if self._must_aggregate():
            raise self._cannot(method)
        return getattr(super(_Aggregates, self), method)(*arguments, **named)

    return scatter


for _name in no_rows.SCATTERS:
    setattr(_Aggregates, _name, _scatters(_name))
for _name in no_rows.SCATTERS_BY_INDEX:
    setattr(_Aggregates, _name, _scatters_by_index(_name))


def _slices_of_first_rank(
    slices: tf.IndexedSlices, name: str, process_set: ProcessSet
) -> tf.IndexedSlices:
    """The first rank's slices; the other ranks may have more or fewer."""
    values = tf.convert_to_tensor(slices.values)
    indices = tf.convert_to_tensor(slices.indices)
    if process_set.rank() != 0:
        values, indices = values[:0], indices[:0]
    values, indices = reduction.all_gather(
        [values, indices], 0, process_set, name_in_graph(name)
    )
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _aggregated(
    aggregation: tf.VariableAggregation,
    value: tf.Tensor | tf.IndexedSlices,
    name: str,
    process_set: ProcessSet,
) -> Any:
    name = name_in_graph(name)
    if aggregation == _ONLY_FIRST_REPLICA:
        root = process_set.ranks[0]
        return broadcast(value, root, name=name, process_set=process_set)
    op = _REDUCE_OPS[aggregation]
    [result] = reduction.all_reduce(op, [value], process_set, name)
    return result


def _is_in_replica_context(strategy: tf.distribute.Strategy) -> bool:
    """Whether this code may have other values here than on other ranks."""
    if not tf.distribute.has_strategy():
        return False
    with distribute_lib.enter_or_assert_strategy(strategy):
        if tf.distribute.in_cross_replica_context():
            return False
    return distribute_lib.get_update_replica_id() is None


def _initializes() -> bool:
    """Whether TensorFlow is assigning an initial value lifted out of a function."""
    return getattr(function_graph(), "name", "") == "initialize_variables"


@functools.cache
def _aggregating_class(plain: type) -> type:
    same = {"__doc__": plain.__doc__, "__module__": plain.__module__}
    return type(plain)(plain.__name__, (_Aggregates, plain), same)
