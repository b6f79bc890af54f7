"""Datasets of a strategy: each rank iterates over its part.

All ranks take the same number of steps: the first one to run out of data ends the epoch
for all.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from keras_hvd.collectives import allreduce, submission
from keras_hvd.gradient_reduction import name_in_graph
from keras_hvd.objects import allgather_object
from keras_hvd.process_sets import ProcessSet

_INFINITE = -1
_UNKNOWN = -2

# Who finds out in each step if all have an element: the process set's number, this
# rank's place in it, and its size. A tuple of numbers, as types in TensorFlow have it.
_Agreement = tuple[int, int, int]


def distribute(
    dataset: tf.data.Dataset,
    strategy: tf.distribute.Strategy,
    process_set: ProcessSet,
    options: tf.distribute.InputOptions | None,
) -> DistributedDataset:
    """Gives each rank its rows of each batch.

    Args:
        dataset: the same batches on every rank.
        strategy: whose dataset it is to be.
        process_set: the strategy's ranks.
        options: hints of `tf.distribute`.

    Returns:
        A dataset of this rank's rows.

    Raises:
        NotImplementedError: `options` asks for something that there is not.
        TypeError: it is no dataset, or its elements cannot be sliced.
        ValueError: its elements are not batches.
    """
    _check_options("experimental_distribute_dataset", options)
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "experimental_distribute_dataset takes a tf.data.Dataset; got "
            f"{type(dataset).__qualname__}"
        )
    part = functools.partial(_rows_of_rank, process_set.rank(), process_set.size())
    rows = dataset.map(lambda *batch: part(batch if len(batch) > 1 else batch[0]))
    return DistributedDataset(rows, strategy, process_set)


def from_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    context: tf.distribute.InputContext,
    strategy: tf.distribute.Strategy,
    process_set: ProcessSet,
    options: tf.distribute.InputOptions | None,
) -> DistributedDataset:
    """Takes the batches that each rank makes for itself.

    Args:
        dataset_fn: makes this rank's dataset.
        context: what it is called with.
        strategy: whose dataset it is to be.
        process_set: the strategy's ranks.
        options: hints of `tf.distribute`.

    Returns:
        The dataset.
    """
    _check_options("distribute_datasets_from_function", options)
    return DistributedDataset(dataset_fn(context), strategy, process_set)


class DistributedDataset(tf.distribute.DistributedDataset):
    """A rank's part of a dataset, of as many elements as the other ranks' parts.

    Args:
        dataset: this rank's elements.
        strategy: whose dataset it is.
        process_set: the strategy's ranks.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
        process_set: ProcessSet,
    ) -> None:
        self._strategy = strategy
        self._process_set = process_set
        self._cardinality = _agree(dataset, process_set)
        if self._cardinality >= 0:
            dataset = dataset.take(self._cardinality)
        self._dataset = dataset

    @property
    def element_spec(self) -> Any:
        """What this rank's elements are made of: a structure of `tf.TypeSpec`."""
        return self._dataset.element_spec

    @property
    def cardinality(self) -> int:
        """The number of elements, on each rank: -1 if infinite, -2 if not known."""
        return self._cardinality

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._dataset, agreement=self._agreement())

    def _agreement(self) -> _Agreement | None:
        ranks = self._process_set
        if self._cardinality != _UNKNOWN or ranks.size() == 1:
            return None
        return ranks.process_set_id, ranks.rank(), ranks.size()

    def reduce(self, initial_state: Any, reduce_func: Callable) -> Any:
        """Folds the elements into a state, one after another.

        Args:
            initial_state: a structure of tensors.
            reduce_func: takes the state and an element, and returns the state.

        Returns:
            The last state.
        """
        iterator = iter(self)
        optional = iterator.get_next_as_optional()

        def body(optional, state):
            state = reduce_func(state, optional.get_value())
            return iterator.get_next_as_optional(), state

        _, state = tf.while_loop(
            lambda optional, state: optional.has_value(),
            body,
            [optional, initial_state],
            parallel_iterations=1,
        )
        return state


class DistributedIterator(
    iterator_ops.OwnedIterator, tf.distribute.DistributedIterator
):
    """An iterator that ends on all ranks in the same step.

    Args:
        dataset: this rank's elements.
        components: in place of a dataset, the resource of an iterator.
        element_spec: what goes with `components`.
        agreement: who finds out in each step if all ranks have an element; None: all
            are known to have as many.
    """

    def __init__(
        self,
        dataset=None,
        components=None,
        element_spec=None,
        *,
        agreement: _Agreement | None,
    ):
        self._agreement = agreement
        super().__init__(dataset, components, element_spec)

    def get_next(self) -> Any:
        """The next element.

        Returns:
            A structure of tensors.

        Raises:
            tf.errors.OutOfRangeError: a rank has no more.
        """
        return self._next_internal()

    def _next_internal(self):
        if self._agreement is None:
            return super()._next_internal()
        optional = self.get_next_as_optional()
        if tf.executing_eagerly():
            if optional.has_value():
                return optional.get_value()
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")

        def end():
            with tf.control_dependencies([_raise_out_of_range()]):
                return optional.get_value()

        return tf.cond(optional.has_value(), optional.get_value, end)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The next element, or nothing.

        Returns:
            Nothing, once a rank has no more.
        """
        optional = super().get_next_as_optional()
        if self._agreement is None:
            return optional
        number, rank, size = self._agreement
        has = optional.has_value()
        name = submission.name_of("allreduce", name_in_graph("Strategy/next"))
        [first] = allreduce.submit(
            [tf.where(has, size, rank)], name, allreduce.Min, process_set=number
        )
        return tf.cond(
            first == size,
            lambda: optional,
            lambda: tf.experimental.Optional.empty(self.element_spec),
        )

    @property
    def _type_spec(self):
        return DistributedIteratorSpec(self.element_spec, self._agreement)


class DistributedIteratorSpec(iterator_ops.IteratorSpec):
    """The type of a `DistributedIterator`, for arguments of a `tf.function`.

    Args:
        element_spec: what its elements are made of.
        agreement: who finds out in each step if all ranks have an element; None: all
            are known to have as many.
    """

    __slots__ = ["_agreement"]

    def __init__(self, element_spec: Any, agreement: _Agreement | None):
        super().__init__(element_spec)
        self._agreement = agreement

    @property
    def value_type(self):
        return DistributedIterator

    def _serialize(self):
        return self._element_spec, self._agreement

    def _from_components(self, components):
        return DistributedIterator(
            None, components, self._element_spec, agreement=self._agreement
        )

    @staticmethod
    def from_value(value):
        return value._type_spec


def _agree(dataset: tf.data.Dataset, process_set: ProcessSet) -> int:
    """How many elements each rank is going to take."""
    if not tf.executing_eagerly():
        return _UNKNOWN
    own = int(dataset.cardinality())
    if process_set.size() == 1:
        return own
    all_ranks = allgather_object(own, name="Strategy/dataset", process_set=process_set)
    if _UNKNOWN in all_ranks:
        return _UNKNOWN
    finite = [each for each in all_ranks if each != _INFINITE]
    if not finite:
        return _INFINITE
    if len(set(all_ranks)) > 1:
        numbers = ", ".join(
            f"rank {rank} {'infinitely many' if each == _INFINITE else each}"
            for rank, each in zip(process_set.ranks, all_ranks, strict=True)
        )
        warnings.warn(
            "the ranks' datasets have different numbers of batches: "
            f"{numbers}. Each takes {min(finite)}",
            stacklevel=2,
        )
    return min(finite)


def _rows_of_rank(rank: int, size: int, batch: Any) -> Any:
    """This rank's rows of a batch: as many on each, one more on the first ranks."""
    return tf.nest.map_structure(functools.partial(_slice, rank, size), batch)


def _slice(rank: int, size: int, tensor: tf.Tensor) -> tf.Tensor:
    rows = tf.shape(tensor)[0]
    share, more = rows // size, rows % size
    begin = rank * share + tf.minimum(rank, more)
    end = begin + share + tf.cast(rank < more, tf.int32)
    return tensor[begin:end]


def _raise_out_of_range() -> tf.Operation:
    """An op that fails as an iterator does at its end."""
    empty = iter(tf.data.Dataset.from_tensors(0).take(0))
    return empty.get_next().op


def _check_options(function: str, options: tf.distribute.InputOptions | None) -> None:
    mode = options and options.experimental_replication_mode
    if mode == tf.distribute.InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            f"{function}: InputReplicationMode.PER_REPLICA is for several replicas per "
            "process; a keras_hvd.Strategy has one"
        )
