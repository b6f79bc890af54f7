"""Datasets of a strategy: each rank iterates over its part.

All ranks take the same number of steps: the first rank without data ends the epoch for
all. They agree on the number when a dataset is distributed, or in each step if a
dataset does not know its number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from keras_hvd.backends.reduce_op import Min
from keras_hvd.backends.same_job import Membership
from keras_hvd.backends.tensorflow.collectives import allreduce_op, submission
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.exceptions import MismatchError
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, number_of
from keras_hvd.strategy.no_rows import Rows

_DISTRIBUTE = "experimental_distribute_dataset"

# Types of values with rows to slice.
_KINDS_OF_ROWS = tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec

_INFINITE = -1
_UNKNOWN = -2

# The numbers by which ranks agree in each step whether all have an element: the process
# set's number, this process' rank in the job, and the job's size. Plain numbers,
# because they are part of a TensorFlow type.
_Agreement = tuple[int, int, int]


def distribute(
    dataset: tf.data.Dataset,
    process_set: ProcessSet,
    options: tf.distribute.InputOptions | None = None,
) -> DistributedDataset:
    """Gives each rank its rows of each batch of a dataset that all ranks have.

    Each rank's rows follow those of the rank before. If the rows do not divide evenly,
    the first ranks have one more. Raises if the datasets' elements are not batches that
    can be sliced, or differ in type between ranks.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> dataset = tf.data.Dataset.range(5).batch(3)
    >>> for rows in distribute(dataset, keras_hvd.global_process_set):
    ...     print(rows.numpy())
    [0 1 2]
    [3 4]
    """
    _check_options(_DISTRIBUTE, options)
    rows = functools.partial(_rows_of_rank, process_set.rank(), process_set.size())
    distributed = _distributed(dataset, rows, process_set, options)
    distributed.whole = _prefetched(dataset, options)
    return distributed


def distribute_for_steps(
    dataset: tf.data.Dataset, process_set: ProcessSet, every_rank_has_rows: bool
) -> DistributedDataset:
    """Like `distribute`, as `Rows` for Keras' steps: even a rank without rows gets one.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> dataset = tf.data.Dataset.range(5).batch(3)
    >>> ranks = keras_hvd.global_process_set
    >>> for rows in distribute_for_steps(dataset, ranks, False):
    ...     print(rows.batch.numpy(), len(rows.own))
    [0 1 2] 1
    [3 4] 1
    """
    rank, size = process_set.rank(), process_set.size()

    def rows(batch):
        leaves = _leaves(batch)
        known = max((_known_rows(leaf) or 0 for leaf in leaves), default=0)
        if every_rank_has_rows or known >= size:
            return Rows(_rows_of_rank(rank, size, batch), None)
        _, count = _share(rank, size, leaves[0])
        own = tf.zeros([tf.minimum(count, 1)], tf.uint8)
        return Rows(_rows_of_rank(rank, size, batch, at_least=1), own)

    return _distributed(dataset, rows, process_set, None)


def parts_for_steps(parts: DistributedDataset) -> DistributedDataset:
    """Parts that ranks have made themselves, as `Rows` if some may have no rows.

    There a rank without rows gets a row of zeros.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> context = tf.distribute.InputContext(1, 0, 1)
    >>> parts = from_function(
    ...     lambda _: tf.data.Dataset.range(2), context, keras_hvd.global_process_set
    ... )
    >>> parts_for_steps(parts) is parts
    True
    """
    if not parts.may_lack_rows:
        return parts

    def rows(batch):
        own = tf.zeros([tf.minimum(_rows(_leaves(batch)[0]), 1)], tf.uint8)
        return Rows(tf.nest.map_structure(_with_a_row, batch), own)

    return DistributedDataset(_mapped(parts._dataset, rows), parts._process_set)


def _distributed(
    dataset: tf.data.Dataset,
    rows: Callable[[Any], Any],
    process_set: ProcessSet,
    options: tf.distribute.InputOptions | None,
) -> DistributedDataset:
    _require_dataset(_DISTRIBUTE, dataset)
    for spec in tf.nest.flatten(dataset.element_spec):
        _require_rows(_DISTRIBUTE, spec)
    parts = _prefetched(_mapped(dataset, rows), options)
    return DistributedDataset(parts, process_set)


def _mapped(dataset: tf.data.Dataset, change: Callable[[Any], Any]) -> tf.data.Dataset:
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def changed(*batch):
        return change(batch if is_tuple else batch[0])

    return dataset.map(changed)


def _leaves(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def from_function(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    context: tf.distribute.InputContext,
    process_set: ProcessSet,
    options: tf.distribute.InputOptions | None = None,
) -> DistributedDataset:
    """Takes the dataset of batches that `dataset_fn` makes on each rank.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> def make(context):
    ...     return tf.data.Dataset.range(2 * context.num_replicas_in_sync)
    >>> context = tf.distribute.InputContext(1, 0, 1)
    >>> len(list(from_function(make, context, keras_hvd.global_process_set)))
    2
    """
    function = "distribute_datasets_from_function"
    _check_options(function, options)
    dataset = dataset_fn(context)
    _require_dataset(function, dataset)
    return DistributedDataset(_prefetched(dataset, options), process_set)


class DistributedDataset(tf.distribute.DistributedDataset):
    """A rank's part of a dataset, with as many elements as other ranks' parts.

    Raises MismatchError if the ranks' datasets have different types.
    """

    def __init__(self, dataset: tf.data.Dataset, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._membership = Membership(process_set)
        # The number of elements on each rank: -1 if infinite, -2 if unknown.
        self.cardinality, self.may_lack_rows = _agree(dataset, process_set)
        if self.cardinality >= 0:
            dataset = dataset.take(self.cardinality)
        self._dataset = dataset
        # The batches of all ranks together; None if each rank has made its own part.
        self.whole: tf.data.Dataset | None = None

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec` of this rank's elements."""
        return self._dataset.element_spec

    def require_same_job(self) -> None:
        """Raises RuntimeError if it has the parts of another job's ranks."""
        self._membership.require_same("distributed dataset")

    def __iter__(self) -> DistributedIterator:
        self.require_same_job()
        return DistributedIterator(self._dataset, agreement=self._agreement())

    def _agreement(self) -> _Agreement | None:
        if self.cardinality != _UNKNOWN or self._process_set.size() == 1:
            return None
        number = number_of(self._process_set, "DistributedDataset")
        return number, basics.rank(), basics.size()

    def reduce(self, initial_state: Any, reduce_func: Callable) -> Any:
        """Folds the elements into a state with `reduce_func(state, element)`."""
        iterator = iter(self)

        def body(optional, state):
            state = reduce_func(state, optional.get_value())
            return iterator.get_next_as_optional(), state

        _, state = tf.while_loop(
            lambda optional, state: optional.has_value(),
            body,
            [iterator.get_next_as_optional(), initial_state],
            parallel_iterations=1,
        )
        return state

    def _make_initializable_iterator(self, shared_name=None):
        make = tf.compat.v1.data.make_initializable_iterator
        return InitializableIterator(
            make(self._dataset, shared_name), self._agreement()
        )


class DistributedIterator(
    iterator_ops.OwnedIterator, tf.distribute.DistributedIterator
):
    """An iterator that ends on all ranks in the same step.

    It is made of this rank's dataset, or of the resource of an iterator (`components`)
    and its `element_spec`. Without `agreement`, all ranks are known to have as many
    elements.
    """

    def __init__(self, dataset=None, components=None, element_spec=None, *, agreement):
        self._agreement = agreement
        super().__init__(dataset, components, element_spec)

    def _next_internal(self):
        if self._agreement is None:
            return super()._next_internal()
        return _value_or_end(self.get_next_as_optional())

    @tf.autograph.experimental.do_not_convert
    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The next element, or nothing once a rank has no more."""
        optional = super().get_next_as_optional()
        if self._agreement is None:
            return optional
        return _if_all_have_one(optional, self._agreement)

    @property
    def _type_spec(self):
        return DistributedIteratorSpec(self.element_spec, self._agreement)


class DistributedIteratorSpec(iterator_ops.IteratorSpec):
    """The type of a `DistributedIterator`, for arguments of a `tf.function`."""

    __slots__ = ["_agreement"]

    def __init__(self, element_spec: Any, agreement: _Agreement | None):
        super().__init__(element_spec)
        self._agreement = agreement

    @property
    def value_type(self) -> type:
        """The class of the iterators."""
        return DistributedIterator

    def _serialize(self):
        return self._element_spec, self._agreement

    def _from_components(self, components):
        return DistributedIterator(
            None, components, self._element_spec, agreement=self._agreement
        )

    @staticmethod
    def from_value(value: DistributedIterator) -> DistributedIteratorSpec:
        """The type of an iterator."""
        return value._type_spec


class InitializableIterator:
    """An iterator of `tf.compat.v1`: ops give the next element and restart it."""

    def __init__(self, iterator: Any, agreement: _Agreement | None) -> None:
        self._iterator = iterator
        self._agreement = agreement

    def initialize(self) -> tf.Operation:
        """Returns the op that restarts it."""
        return self._iterator.initializer

    initializer = property(initialize)

    def get_next(self) -> Any:
        """The next element, as tensors that fail once a rank has no more."""
        if self._agreement is None:
            return self._iterator.get_next()
        optional = self._iterator.get_next_as_optional()
        return _value_or_end(_if_all_have_one(optional, self._agreement))


class EagerIterator:
    """Like `InitializableIterator`, in eager mode; it starts when it is created."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self.initialize()

    def initialize(self) -> list[Any]:
        """Restarts it, and returns no ops for a session to run."""
        self._iterator = iter(self._dataset)
        return []

    initializer = property(initialize)

    def get_next(self) -> Any:
        """The next element; raises `OutOfRangeError` once a rank has no more."""
        return self._iterator.get_next()


def _agree(dataset: tf.data.Dataset, process_set: ProcessSet) -> tuple[int, bool]:
    """The number of elements that each rank takes, and whether some may lack rows."""
    if not tf.executing_eagerly():
        return _UNKNOWN, False
    own = int(dataset.cardinality())
    if process_set.size() == 1:
        return own, False
    kind = str(tf.nest.map_structure(_kind, dataset.element_spec))
    everyones = allgather_object(
        (own, kind, _least_rows(dataset.element_spec)),
        name="Strategy/dataset",
        process_set=process_set,
    )
    cardinalities, kinds, rows = zip(*everyones, strict=True)
    may_lack_rows = None not in rows and 0 in rows
    ranks = process_set.ranks
    if len(set(kinds)) > 1:
        listed = "; ".join(f"rank {r} {k}" for r, k in zip(ranks, kinds, strict=True))
        raise MismatchError(f"the ranks' datasets have different elements: {listed}")
    if _UNKNOWN in cardinalities:
        return _UNKNOWN, may_lack_rows
    fewest = min((each for each in cardinalities if each >= 0), default=_INFINITE)
    if len(set(cardinalities)) > 1 and process_set.rank() == 0:
        listed = ", ".join(
            f"rank {rank} {'endlessly many' if each == _INFINITE else each}"
            for rank, each in zip(ranks, cardinalities, strict=True)
        )
        log.warn(
            f"the ranks' datasets have different numbers of batches: {listed}. Each "
            f"rank takes {fewest}",
            stacklevel=6,
            from_any_rank=True,
        )
    return fewest, may_lack_rows


def _least_rows(element_spec: Any) -> int | None:
    """The least number of rows of an element; None if elements have no rows."""
    specs = [each for each in tf.nest.flatten(element_spec) if not _is_nothing(each)]
    if all(isinstance(each, _KINDS_OF_ROWS) and each.shape.rank for each in specs):
        return min((each.shape[0] or 0 for each in specs), default=None)
    return None


def _kind(spec: Any) -> str:
    """The part of an element's type that must be the same on all ranks."""
    dtype = getattr(spec, "dtype", None)
    return f"{type(spec).__name__} of {dtype.name}" if dtype else type(spec).__name__


def _if_all_have_one(
    optional: tf.experimental.Optional, agreement: _Agreement
) -> tf.experimental.Optional:
    """The element, or nothing if a rank has none."""
    number, rank, size = agreement
    has = optional.has_value()
    name = submission.name_of("allreduce", name_in_graph("Strategy/next element"))
    with submission.on_cpu():
        [first_without] = allreduce_op.submit(
            [tf.where(has, size, rank)], name, Min, process_set=number
        )
        all_have_one = tf.equal(first_without, size)

    def nothing():
        with tf.control_dependencies(_say_who_ended(has, first_without)):
            return tf.experimental.Optional.empty(optional.element_spec)

    return tf.cond(all_have_one, lambda: optional, nothing)


def _say_who_ended(has: tf.Tensor, first_without: tf.Tensor) -> list[tf.Operation]:
    """Warns, on a rank with more data, which rank has no more."""
    words = "keras_hvd: this epoch ends because rank {} has no more data; this rank has"
    if tf.executing_eagerly():
        if has:
            text = words.format(int(first_without))
            log.warn(text, stacklevel=7, from_any_rank=True)
        return []

    def say():
        text = tf.strings.format(words, first_without)
        return tf.group(tf.print(text, output_stream=sys.stderr))

    return [tf.cond(has, say, tf.no_op)]


def _value_or_end(optional: tf.experimental.Optional) -> Any:
    """The element, or the error at an iterator's end."""
    if tf.executing_eagerly():
        if optional.has_value():
            return optional.get_value()
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")

    def end():
        with tf.control_dependencies([_fail_at_end()]):
            return optional.get_value()

    return tf.cond(optional.has_value(), optional.get_value, end)


def _fail_at_end() -> tf.Tensor:
    """Adds an op that fails like an ended iterator: it reads from an empty one."""
    what = {"output_types": [tf.int32], "output_shapes": [[]]}
    empty = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(0).take(0))
    iterator = tf.raw_ops.AnonymousIteratorV3(**what)
    made = tf.raw_ops.MakeIterator(dataset=empty, iterator=iterator)
    with tf.control_dependencies([made]):
        return tf.raw_ops.IteratorGetNext(iterator=iterator, **what)[0]


def _rows_of_rank(rank: int, size: int, batch: Any, at_least: int = 0) -> Any:
    """This rank's rows of a batch; the first `at_least` rows if it has fewer."""
    with tf.control_dependencies(_check_rows(_leaves(batch))):
        own = functools.partial(_slice, rank, size, at_least)
        return tf.nest.map_structure(own, batch)


def _check_rows(leaves: list[Any]) -> list[Any]:
    """Checks that all parts of a batch have the same number of rows."""
    said = "the parts of a batch have different numbers of rows"
    known = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    if len(known - {None}) > 1:
        raise ValueError(f"{said}: {', '.join(str(leaf.shape) for leaf in leaves)}")
    if len(leaves) < 2 or None not in known:
        return []
    first, *others = map(_rows, leaves)
    return [tf.debugging.assert_equal(rows, first, said) for rows in others]


def _slice(rank: int, size: int, at_least: int, part: Any) -> Any:
    """This rank's rows of a dense, ragged or sparse tensor."""
    if part is None:
        return None
    begin, count = _share(rank, size, part)
    if at_least:
        begin = tf.where(count < at_least, tf.zeros_like(begin), begin)
        count = tf.maximum(count, at_least)
    if not isinstance(part, tf.SparseTensor):
        return part[begin : begin + count]
    ends = part.dense_shape[1:]
    starts = tf.concat([[begin], tf.zeros_like(ends)], 0)
    rows = tf.sparse.slice(part, starts, tf.concat([[count], ends], 0))
    if part.shape.rank is not None:
        rows.set_shape([None, *part.shape[1:]])  # the slice loses it
    return rows


def _with_a_row(part: Any) -> Any:
    """The rows of a dense, ragged or sparse tensor, or one of zeros if it has none."""
    if part is None or (_known_rows(part) or 0) > 0:
        return part
    if isinstance(part, tf.SparseTensor):
        shape = tf.maximum(part.dense_shape, 1)
        padded = tf.SparseTensor(part.indices, part.values, shape)
        padded.set_shape([None, *part.shape[1:]])
        return padded
    # Padding may have no length where no row has one.
    row = tf.zeros([1, *(size or 1 for size in part.shape[1:])], part.dtype)
    if isinstance(part, tf.RaggedTensor):
        row = tf.RaggedTensor.from_tensor(
            row, ragged_rank=part.ragged_rank, row_splits_dtype=part.row_splits.dtype
        )
        return tf.cond(part.nrows() > 0, lambda: part, lambda: row)
    padded = tf.cond(tf.shape(part)[0] > 0, lambda: part, lambda: row)
    return tf.ensure_shape(padded, [None, *part.shape[1:]])


def _share(rank: int, size: int, part: Any) -> tuple[Any, Any]:
    """A rank's first row and number of rows: constants if all ranks have as many."""
    known = _known_rows(part)
    if known is not None and known % size == 0:
        return rank * (known // size), known // size
    rows = _rows(part)
    each, rest = rows // size, rows % size
    more = tf.minimum(tf.constant(rank, rows.dtype), rest)
    return rank * each + more, each + tf.cast(rank < rest, rows.dtype)


def _known_rows(part: Any) -> int | None:
    return part.shape[0] if part.shape.rank is not None else None


def _rows(part: Any) -> tf.Tensor:
    """The number of rows of a dense, ragged or sparse tensor."""
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if isinstance(part, tf.RaggedTensor):
        return part.nrows(tf.int64)
    return tf.shape(part, tf.int64)[0]


def _require_dataset(function: str, dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"{function} takes a tf.data.Dataset; got {type(dataset).__module__}."
            f"{type(dataset).__qualname__}"
        )


def _require_rows(function: str, spec: Any) -> None:
    """Raises for elements that cannot be sliced."""
    if _is_nothing(spec):
        return
    if not isinstance(spec, _KINDS_OF_ROWS):
        raise TypeError(
            f"{function} slices dense, ragged and sparse tensors, and cannot slice "
            f"{spec}: use distribute_datasets_from_function"
        )
    if spec.shape.rank == 0:
        raise ValueError(
            f"{function} slices batches, and {spec} has no rows: batch the dataset "
            "first, by the global batch size"
        )


def _is_nothing(spec: Any) -> bool:
    # TensorFlow has no public name for the type of None.
    return type(spec).__name__ == "NoneTensorSpec"


def _check_options(function: str, options: tf.distribute.InputOptions | None) -> None:
    if options is None:
        return
    several = tf.distribute.InputReplicationMode.PER_REPLICA
    if options.experimental_replication_mode == several:
        raise NotImplementedError(
            f"{function}: InputReplicationMode.PER_REPLICA is for several replicas per "
            "process, and a keras_hvd.Strategy has one"
        )
    if options.experimental_place_dataset_on_device:
        raise NotImplementedError(
            f"{function}: experimental_place_dataset_on_device is not supported by "
            "keras_hvd.Strategy: datasets run on the CPU"
        )


def _prefetched(
    dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
) -> tf.data.Dataset:
    size = options.experimental_per_replica_buffer_size if options else 1
    return dataset.prefetch(size) if size > 1 else dataset
