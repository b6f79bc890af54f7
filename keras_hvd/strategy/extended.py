"""The interface that `tf.distribute` needs from a strategy: each rank is one replica.

A value in the cross-replica context is this rank's plain tensor: there are no
containers with several replicas' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework import ops

from keras_hvd.backends.same_job import Membership
from keras_hvd.backends.tensorflow import current_strategy, random_numbers
from keras_hvd.job.process_sets import ProcessSet
from keras_hvd.strategy import distributed_dataset, no_rows, reduction, variables

# Users' functions call these, and autograph would take seconds to convert them.
_as_it_is = tf.autograph.experimental.do_not_convert


class ReplicaContext(tf.distribute.ReplicaContext):
    """The context in which `Strategy.run` runs a function on this rank.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> def step():
    ...     context = tf.distribute.get_replica_context()
    ...     return context.all_reduce("SUM", context.replica_id_in_sync_group + 1)
    >>> keras_hvd.Strategy().run(step).numpy().item()
    1
    """

    @property
    def devices(self) -> tuple[str, ...]:
        """This rank's only device, as a tuple."""
        return self.strategy.extended.worker_devices

    @_as_it_is
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces a structure of tensors, and gradients, over the ranks as one group.

        `options` are ignored, here and in `all_gather`.
        """
        return self.strategy.extended.reduce_nested(reduce_op, value)

    @_as_it_is
    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Concatenates the ranks' tensors along a dimension, of any size on each rank.

        Each rank gets its part of the sum of all ranks' gradients.
        """
        return self.strategy.extended.gather_nested(value, axis)


class Extended(current_strategy.OwnExtended):
    """The `extended` of a `keras_hvd.Strategy`, whose ranks compute on one `device`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> strategy = keras_hvd.Strategy()
    >>> extended = strategy.extended
    >>> extended.call_for_each_replica(tf.abs, args=(tf.constant(-1),)).numpy().item()
    1
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, process_set: ProcessSet, device: str
    ) -> None:
        super().__init__(strategy)
        self.process_set = process_set
        self._membership = Membership(process_set)
        self._size, self._rank = self._membership.size, self._membership.rank
        self._device = device

    def place(self) -> tuple[Any, ...]:
        """Process set, size, rank and device: strategies with equal ones are the same.

        A process may return to another job with another rank.
        """
        return self.process_set, self._size, self._rank, self._device

    def require_same_job(self) -> None:
        """Raises RuntimeError unless rank and size are the same as when it was made.

        A function being traced makes the same check when it runs.
        """
        self._membership.require_same("keras_hvd.Strategy")

    # --- collectives ------------------------------------------------------------------

    @_as_it_is
    def reduce_nested(self, reduce_op: Any, value: Any) -> Any:
        """Reduces all tensors of a structure over the ranks, in one call."""
        reduced = reduction.all_reduce(
            as_reduce_op(reduce_op), tf.nest.flatten(value), self.process_set
        )
        return tf.nest.pack_sequence_as(value, reduced)

    @_as_it_is
    def gather_nested(self, value: Any, axis: Any) -> Any:
        """Concatenates all tensors of a structure along a dimension, over the ranks."""
        flat = tf.nest.flatten(value)
        if any(isinstance(each, tf.IndexedSlices) for each in flat):
            raise NotImplementedError("all_gather does not take tf.IndexedSlices")
        gathered = reduction.all_gather(flat, axis, self.process_set)
        return tf.nest.pack_sequence_as(value, gathered)

    def _reduce_to(self, reduce_op, value, destinations, options):
        return self.reduce_nested(reduce_op, value)

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [value for value, _ in value_destination_pairs]
        return reduction.all_reduce(reduce_op, values, self.process_set)

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        return self.reduce_nested(reduce_op, value)

    def _gather_to_implementation(self, value, destinations, axis, options):
        return self.gather_nested(value, axis)

    def _broadcast_to(self, tensor, destinations):
        return variables.of_first_rank(tensor, "broadcast_to", self.process_set)

    # --- running ----------------------------------------------------------------------

    def _scope(self, strategy):
        self.require_same_job()
        return super()._scope(strategy)

    def _call_for_each_replica(self, fn, args, kwargs):
        self.require_same_job()
        context = ReplicaContext(self._container_strategy(), self._rank)
        random_numbers.continue_global_generator(self._rank)
        with tf.device(self._device), context, random_numbers.of_rank(self._rank):
            return no_rows.run(fn, args, kwargs)

    def _update(self, var, fn, args, kwargs, group):
        return self._update_non_slot(var, fn, (var, *args), kwargs, group)

    def _update_non_slot(self, colocate_with, fn, args, kwargs, group):
        with tf.device(self._device), distribute_lib.UpdateContext(0):
            result = fn(*args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    # --- variables --------------------------------------------------------------------

    def _create_variable(self, next_creator, **kwargs):
        place = kwargs.pop("colocate_with", None)
        if place is None or isinstance(place, str):
            place = tf.device(self._device)
        else:
            place = ops.colocate_with(place)
        strategy = self._container_strategy()
        with place:
            return variables.create(next_creator, kwargs, strategy, self.process_set)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        variable = colocate_with_variable
        if self.variable_created_in_scope(variable):
            return
        what = f"a {type(variable).__name__}"
        if isinstance(variable, tf.Variable):
            # Not its repr, which has all of its numbers.
            what = f"{variable.name!r} of shape {variable.shape}"
        raise ValueError(
            "colocate_vars_with takes a variable that was created in the scope of "
            f"this keras_hvd.Strategy; got {what}: create it, or build the model that "
            "it belongs to, inside `with strategy.scope():`"
        )

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable was created in the strategy's scope."""
        return getattr(v, "_distribute_strategy", None) is self._container_strategy()

    @_as_it_is
    def read_var(self, v: Any) -> tf.Tensor:
        """The value of a variable; if it is ON_READ, aggregated over the ranks."""
        return variables.read_aggregate(v, self.process_set)

    def value_container(self, value: Any) -> Any:
        """The container of a replica's value: here the value itself."""
        return value

    def _local_results(self, val):
        return (val,)

    # --- data -------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset, options=None):
        return distributed_dataset.distribute(dataset, self.process_set, options)

    def _distribute_datasets_from_function(self, dataset_fn, options=None):
        context = tf.distribute.InputContext(self._size, self._rank, self._size)
        return distributed_dataset.from_function(
            dataset_fn, context, self.process_set, options
        )

    def _make_dataset_iterator(self, dataset):
        return _legacy_iterator(self._experimental_distribute_dataset(dataset))

    def _make_input_fn_iterator(self, input_fn, replication_mode):
        return _legacy_iterator(self._distribute_datasets_from_function(input_fn))

    def _experimental_distribute_values_from_function(self, value_fn):
        return value_fn(tf.distribute.experimental.ValueContext(self._rank, self._size))

    # --- properties -------------------------------------------------------------------

    @property
    def _num_replicas_in_sync(self):
        return self._size

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This rank's device, as a tuple."""
        return (self._device,)

    parameter_devices = worker_devices

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """This rank's device, as a tuple."""
        return self.worker_devices

    # Each rank builds its own graph, and initializes its variables.
    experimental_between_graph = True
    experimental_should_init = True
    _global_batch_size = True
    _support_per_replica_values = False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints, and summaries."""
        return self._rank == 0

    should_save_summary = should_checkpoint

    def _in_multi_worker_mode(self):
        # If True, parts of TensorFlow would start servers, or pack values into
        # containers for several replicas.
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return 0

    def _get_replica_id_in_sync_group(self, replica_id):
        return self._rank


def _legacy_iterator(dataset):
    if tf.executing_eagerly():
        return distributed_dataset.EagerIterator(dataset)
    return tf.compat.v1.data.make_initializable_iterator(dataset)


def as_reduce_op(reduce_op: Any) -> tf.distribute.ReduceOp:
    """A `tf.distribute.ReduceOp`, given itself or by name in any case.

    Example:

    >>> as_reduce_op("sum")
    <ReduceOp.SUM: 'SUM'>
    """
    if isinstance(reduce_op, str):
        return tf.distribute.ReduceOp(reduce_op.upper())
    if isinstance(reduce_op, tf.distribute.ReduceOp):
        return reduce_op
    raise TypeError(
        "reduce_op must be tf.distribute.ReduceOp.SUM or MEAN, or its name; got "
        f"{reduce_op!r}"
    )
