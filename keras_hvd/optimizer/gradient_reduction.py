"""Reduction of the gradients of a step over all ranks: settings, buckets and slices.

What `DistributedOptimizer` and `DistributedGradientTape` have in common.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_hvd.collectives import gradients, submission
from keras_hvd.collectives.allreduce import allreduce, grouped_allreduce
from keras_hvd.collectives.allreduce_op import Average, ReduceOp, Sum
from keras_hvd.compression import Compression, Compressor, require_compressor
from keras_hvd.optimizer.repeated_rows import add_up, add_up_all
from keras_hvd.runtime import basics
from keras_hvd.runtime.process_sets import ProcessSet, global_process_set, number_of

# Gradients leave in groups of about this size: large enough to be worth a collective,
# small enough that the last layers' travel while backprop works on the first.
_BUCKET_BYTES = 4 << 20

# Set on a tensor that is reduced already.
_REDUCED_BY = "_keras_hvd_reduced_by"

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced; the same on all ranks."""

    op: ReduceOp = Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    # A number of groups, or the paths of the variables of each; None: by size.
    groups: int | tuple[tuple[str, ...], ...] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    @classmethod
    def of_arguments(
        cls,
        kind: str,
        *,
        op: ReduceOp | None,
        compression: type[Compressor],
        sparse_as_dense: bool,
        gradient_predivide_factor: float,
        num_groups: int,
        groups: int | Sequence[Sequence[Any]] | None,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> GradientReduction:
        """Checks what the user gave.

        Args:
            kind: the function that it was given to, for messages.
            op: `Average`, `Sum` or `Adasum`; None: `Average`.
            compression: a class with the methods of `Compressor`.
            sparse_as_dense: whether slices become dense before they are reduced.
            gradient_predivide_factor: divides before the sum, and multiplies after it.
            num_groups: Horovod's old name for a number of `groups`.
            groups: a number of groups, or lists of variables; None: by size.
            process_set: the ranks that reduce together.
            scale_local_gradients: whether gradients of local variables are divided by
                the number of ranks.

        Returns:
            The settings.

        Raises:
            TypeError: something is of a wrong type.
            ValueError: something has a wrong value, or does not go together.
        """
        reduce_op = _gradient_op(kind, op)
        require_compressor(kind, compression)
        number_of(process_set, kind)
        return cls(
            op=reduce_op,
            compression=compression,
            sparse_as_dense=bool(sparse_as_dense),
            gradient_predivide_factor=_predivide_factor(
                kind, gradient_predivide_factor, reduce_op
            ),
            groups=_groups(kind, num_groups, groups),
            process_set=process_set,
            scale_local_gradients=bool(scale_local_gradients),
        )

    def differences(self, other: GradientReduction) -> str:
        """What two settings differ in, for messages.

        Args:
            other: other settings.

        Returns:
            The names and values, those of `self` first; empty if there is none.

        Example:

        >>> GradientReduction(op=Sum).differences(GradientReduction())
        'op=Sum and op=Average'
        """
        fields = [field.name for field in dataclasses.fields(self)]
        differing = [f for f in fields if getattr(self, f) != getattr(other, f)]
        return " and ".join(
            ", ".join(f"{name}={shown(getattr(each, name))}" for name in differing)
            for each in ((self, other) if differing else ())
        )

    def is_alone(self) -> bool:
        """Whether this rank has nobody to reduce with.

        Returns:
            False also for a rank outside of the process set: collectives say so.

        Raises:
            NotInitializedError: `keras_hvd.init` was not called.
            ValueError: the process set is not part of the job any more.
        """
        basics.require_initialized("the reduction of gradients")
        number_of(self.process_set, "the reduction of gradients")
        return self.process_set.size() == 1 and bool(self.process_set.included())

    def __deepcopy__(self, memo: Any) -> GradientReduction:
        # The process set is part of the job, and a copy of it would not be.
        return self

    def reduce(
        self,
        prefix: str,
        grads: Sequence[Gradient],
        variables: Sequence[Any],
        local: Collection[int] = (),
        agreed: str = "",
    ) -> list[Gradient]:
        """Reduces gradients over the ranks.

        Args:
            prefix: begins the names that match them to the other ranks'.
            grads: a gradient for each variable.
            variables: what they are the gradients of.
            local: `identity` of the variables whose gradients stay on their rank.
            agreed: what else must be the same on all ranks, in words.

        Returns:
            The reduced gradients; slices remain slices unless `sparse_as_dense`, and
            have each row once.

        Raises:
            NotImplementedError: Adasum of slices.
        """
        with submission.leaving_thread():
            return self._reduce(prefix, grads, variables, local, agreed)

    def _reduce(self, prefix, grads, variables, local, agreed):
        paths = _distinct_paths(variables)
        results = list(grads)
        dense, sparse = [], []
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if identity(variable) in local:
                results[i] = self._scale_local(add_up_all(grad))
            elif isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
                self._require_sum(f"{prefix}/{paths[i]}")
                sparse.append(i)
            else:
                results[i] = tf.convert_to_tensor(grad)
                dense.append(i)
        # Slices come last: ranks that differ in which gradients are sparse differ in
        # the dense ones too, and get an error there before they wait for each other.
        reduced = self._reduce_dense(
            f"{prefix}/gradients",
            [results[i] for i in dense],
            [variables[i] for i in dense],
            [paths[i] for i in dense],
            agreed,
        )
        for i, result in zip(dense, reduced, strict=True):
            results[i] = result
        with tf.control_dependencies(reduced):
            for i in sparse:
                results[i] = self._reduce_slices(f"{prefix}/{paths[i]}", grads[i])
        return results

    def _reduce_dense(self, prefix, grads, variables, paths, agreed):
        if self.gradient_predivide_factor != 1:
            agreed += f" predivided by {self.gradient_predivide_factor!r}"
        factor = self.gradient_predivide_factor
        pairs = [self.compression.compress(_times(grad, 1 / factor)) for grad in grads]
        buckets = list(self._buckets(variables, paths))
        names = [name_in_graph(f"{prefix}/{place}") for place in range(len(buckets))]
        results = _reduce_buckets(
            [[pairs[i][0] for i in bucket] for bucket in buckets],
            names,
            [_mark_of([paths[i] for i in bucket], agreed) for bucket in buckets],
            self.op,
            self.process_set,
        )
        reduced = list(grads)
        for bucket, bucket_results in zip(buckets, results, strict=True):
            for i, result in zip(bucket, bucket_results, strict=True):
                reduced[i] = _times(
                    self.compression.decompress(result, pairs[i][1]), factor
                )
        return reduced

    def _buckets(
        self, variables: Sequence[Any], paths: Sequence[str]
    ) -> Iterator[list[int]]:
        if isinstance(self.groups, int):
            return _numbered_buckets(len(paths), self.groups)
        sizes = [_bytes(variable) for variable in variables]
        return _buckets(sizes, _places(self.groups or (), paths))

    def _require_sum(self, name: str) -> None:
        if self.op not in (Average, Sum):
            raise NotImplementedError(
                f"{name} has a sparse gradient, which op={self.op.name} cannot "
                "reduce: pass sparse_as_dense=True"
            )

    def _reduce_slices(self, prefix: str, grad: tf.IndexedSlices) -> tf.IndexedSlices:
        """All ranks' slices; a rank's own are added up first, so that fewer travel."""
        gathered = allreduce(
            add_up(grad),
            compression=self.compression,
            op=self.op,
            name=name_in_graph(prefix),
            process_set=self.process_set,
        )
        return add_up(gathered)

    def _scale_local(self, grad: Gradient) -> Gradient:
        """A local gradient in the scale of the others: of the mean over all ranks."""
        size = self.process_set.size()
        return _times(grad, 1 / size) if self.scale_local_gradients else grad


def identity(variable: Any) -> int:
    """What tells a variable from others, its Keras form or TensorFlow's.

    Args:
        variable: a Keras variable, a `tf.Variable`, or a tensor.

    Returns:
        A number that is its own as long as it lives.

    Example:

    >>> variable = keras.Variable([1.0])
    >>> identity(variable) == identity(variable.value)
    True
    """
    return id(variable._value if isinstance(variable, keras.Variable) else variable)


def path(variable: Any) -> str:
    """The name by which the ranks know a variable.

    Args:
        variable: a Keras variable, a `tf.Variable`, or a tensor.

    Returns:
        Its path, or name; a tensor has none that ranks would share.

    Example:

    >>> path(tf.Variable(1.0, name="w")), path(tf.constant(1.0))
    ('w:0', 'tensor')
    """
    if isinstance(variable, tf.Variable):
        return variable.name
    return getattr(variable, "path", None) or "tensor"


def name_in_graph(name: str) -> str:
    """The name, numbered where the graph that is being built has it already.

    Optimizers and variables of the same names in one `tf.function` (twins, copies) may
    reduce at the same time, in another order on each rank. Ranks that trace the program
    more often than others count the same, since each trace has a graph of its own.

    Args:
        name: a collective's name.

    Returns:
        The name, or one that no other collective of the graph got from here.

    Example:

    >>> @tf.function
    ... def step():
    ...     print(name_in_graph("adam/w"), name_in_graph("adam/w"))
    >>> step()
    adam/w adam/w#1
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    if not hasattr(graph, "_keras_hvd_names"):
        graph._keras_hvd_names = collections.Counter()
    names = graph._keras_hvd_names
    names[name] += 1
    return name if names[name] == 1 else f"{name}#{names[name] - 1}"


def shown(value: Any) -> str:
    """A setting as messages show it.

    Args:
        value: an operation, a compressor, a number, a name...

    Returns:
        Its name if it has one.

    Example:

    >>> shown(Average), shown(Compression.fp16), shown(None)
    ('Average', 'FP16Compressor', 'None')
    """
    if isinstance(value, ReduceOp):
        return value.name
    return getattr(value, "__name__", None) or repr(value)


def mark_reduced(grads: Iterable[Gradient | None], kind: str) -> None:
    """Notes that gradients are reduced, so that an optimizer does not do it again.

    Args:
        grads: reduced gradients.
        kind: what reduced them, for the message.
    """
    for grad in grads:
        if grad is not None:
            setattr(grad, _REDUCED_BY, kind)


def require_not_reduced(optimizer: Any, grads: Iterable[Gradient | None]) -> None:
    """Raises if gradients are reduced that an optimizer is about to reduce.

    Args:
        optimizer: a distributed optimizer.
        grads: what it was given.

    Raises:
        RuntimeError: one of them comes from a distributed tape.
    """
    kinds = {getattr(grad, _REDUCED_BY, None) for grad in grads} - {None}
    if not kinds:
        return
    raise RuntimeError(
        f"optimizer {optimizer.name!r} is distributed, and was given gradients that a "
        f"{kinds.pop()} has reduced: they would be reduced twice. Use one of the two, "
        "the tape with a plain optimizer or a tf.GradientTape with the distributed one."
    )


def _reduce_buckets(
    buckets: list[list[tf.Tensor]],
    names: list[str],
    marks: list[int],
    reduce_op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> list[list[tf.Tensor]]:
    """Reduces gradients; the ranks need not agree on having it compiled by XLA."""
    sums = reduce_op in (Average, Sum)
    number = number_of(process_set, "the reduction of gradients")
    if buckets and sums and submission.is_compiled():
        return gradients.submit(buckets, names, marks, reduce_op, number)
    # What is no sum is not one of integers either.
    groups = [
        [*bucket, tf.zeros([0, mark], tf.uint8 if sums else bucket[-1].dtype)]
        for bucket, mark in zip(buckets, marks, strict=True)
    ]
    if buckets and sums and gradients.are_on_gpu([each for b in buckets for each in b]):
        results = gradients.start_all(groups, names, reduce_op, number)
    else:
        results = [
            grouped_allreduce(group, op=reduce_op, name=name, process_set=process_set)
            for group, name in zip(groups, names, strict=True)
        ]
    return [result[:-1] for result in results]


def _mark_of(paths: Sequence[str], agreed: str = "") -> int:
    """The length of a tensor without elements that tells the variables of a bucket.

    Where a variable has a gradient on some ranks only, the buckets of the ranks hold
    different variables, perhaps of equal shapes; and settings that are applied around
    the reduction may differ. Shapes are compared between ranks, so this makes it an
    error, and costs nothing: there is nothing to reduce.
    """
    return zlib.crc32("\n".join([*paths, agreed]).encode()) & 0x7FFFFFFF


def _buckets(
    sizes: Sequence[int], groups: Iterable[Sequence[int]] = ()
) -> Iterator[list[int]]:
    """Groups of indices, from the last to the first: the order backprop ends them in.

    Given groups are kept as they are, and leave with the last of theirs.

    >>> list(_buckets([1 << 20, 3 << 20, 9 << 20, 1 << 10]))
    [[3], [2], [1, 0]]
    >>> list(_buckets([1 << 20, 3 << 20, 9 << 20, 1 << 10], [[0, 2]]))
    [[2, 0], [3, 1]]
    """
    of_index = {i: sorted(group, reverse=True) for group in groups for i in group}
    bucket: list[int] = []
    filled = 0
    for i in reversed(range(len(sizes))):
        if i in of_index:
            if i == of_index[i][0]:
                yield of_index[i]
            continue
        if bucket and filled + sizes[i] > _BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += sizes[i]
    if bucket:
        yield bucket


def _numbered_buckets(count: int, groups: int) -> Iterator[list[int]]:
    """As many buckets as asked for, of nearly as many gradients each.

    >>> list(_numbered_buckets(5, 2)), list(_numbered_buckets(2, 3))
    ([[4, 3, 2], [1, 0]], [[1], [0]])
    """
    ends = [count * group // groups for group in reversed(range(groups + 1))]
    for end, start in zip(ends, ends[1:]):
        if start < end:
            yield list(range(end - 1, start - 1, -1))


def _places(
    groups: Sequence[Sequence[str]], paths: Sequence[str]
) -> Iterator[list[int]]:
    """Where the variables of each group are."""
    by_path = {each: i for i, each in enumerate(paths)}
    for group in groups:
        found = [by_path[each] for each in group if each in by_path]
        if found:
            yield found


def _bytes(variable: Any) -> int:
    # A tensor that a tape watches may have dimensions that are not known yet.
    return math.prod(n or 1 for n in variable.shape) * tf.as_dtype(variable.dtype).size


def _distinct_paths(variables: Sequence[Any]) -> list[str]:
    """The variables' paths; those that several share get their place in the list."""
    paths = [path(variable) for variable in variables]
    times = collections.Counter(paths)
    return [each if times[each] == 1 else f"{each}#{i}" for i, each in enumerate(paths)]


def _times(grad: Gradient, factor: float) -> Gradient:
    if factor == 1.0:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        values = _times(grad.values, factor)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _gradient_op(kind: str, op: ReduceOp | None) -> ReduceOp:
    if op is None:
        return Average
    if op not in _GRADIENT_OPS:
        *names, last = [f"keras_hvd.{each.name}" for each in _GRADIENT_OPS]
        raise ValueError(
            f"{kind} reduces gradients by {', '.join(names)} or {last}; got op={op!r}"
        )
    return ReduceOp(op)


_GRADIENT_OPS = tuple(op for op in ReduceOp if op.name in ("Average", "Sum", "Adasum"))


def _predivide_factor(kind: str, factor: float, op: ReduceOp) -> float:
    if factor == 1.0:
        return 1.0
    if op != Average:
        raise ValueError(
            f"{kind}: gradient_predivide_factor says where to divide for an average, "
            f"so it needs op=keras_hvd.Average; got {factor!r} with op={op.name}"
        )
    if not factor > 0 or math.isinf(factor):
        raise ValueError(
            f"{kind}: gradient_predivide_factor must be positive; got {factor!r}"
        )
    return float(factor)


def _groups(
    kind: str, num_groups: int, groups: Any
) -> int | tuple[tuple[str, ...], ...] | None:
    if num_groups:
        warnings.warn(
            f"{kind}: num_groups is called groups now", DeprecationWarning, stacklevel=4
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, (list, tuple)) and all(
        isinstance(each, (list, tuple)) for each in groups
    ):
        _require_variables(kind, [each for group in groups for each in group])
        return tuple(tuple(map(path, group)) for group in groups)
    raise ValueError(
        f"{kind}: groups must be a positive number of groups, or a list of lists of "
        f"variables; got {groups!r}"
    )


def _require_variables(kind: str, variables: Sequence[Any]) -> None:
    for each in variables:
        if not isinstance(each, (tf.Variable, keras.Variable)):
            raise ValueError(
                f"{kind}: groups must hold variables; got {type(each).__name__}"
            )
    twice = collections.Counter(map(identity, variables)).most_common(1)
    if twice and twice[0][1] > 1:
        [shown] = [path(v) for v in variables if identity(v) == twice[0][0]][:1]
        raise ValueError(f"{kind}: variable {shown!r} is in groups more than once")
