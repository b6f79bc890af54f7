"""Reduction of a step's gradients, for optimizers, tapes and strategies."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_hvd.backends.labels import labels_of
from keras_hvd.backends.tensorflow.collectives import (
    allreduce_op,
    gradients,
    job_values,
    reductions,
    submission,
)
from keras_hvd.backends.tensorflow.collectives.allreduce import allreduce
from keras_hvd.backends.tensorflow.collectives.allreduce_op import (
    Average,
    ReduceOp,
    Sum,
)
from keras_hvd.backends.tensorflow.collectives.graph_names import name_in_graph
from keras_hvd.backends.tensorflow.compression import (
    Compression,
    Compressor,
    require_compressor,
)
from keras_hvd.job import basics
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of
from keras_hvd.optimizer import buckets
from keras_hvd.optimizer.repeated_rows import add_up, add_up_all
from keras_hvd.recording import recorder

# Who raises the error, in messages.
_KIND = "the reduction of gradients"

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced; the same on all ranks."""

    op: ReduceOp = Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    # A number of groups, or each group's variable paths; None groups by size.
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
        """Checks the user's arguments of `kind`; raises TypeError or ValueError."""
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
        """The settings in which two reductions differ, as text; those of `self` first.

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
        """Whether this rank has no other rank to reduce with.

        Also outside of the process set: such a rank trains with its own gradients.
        Whoever then traces something else than a reduction makes it depend on
        `only_alone`.
        """
        basics.require_initialized(_KIND)
        number_of(self.process_set, _KIND)
        if not self.process_set.included():
            return True
        # There, what a step submits is what counts it.
        return self.process_set.size() == 1 and not recorder.scaling()

    def only_alone(self) -> contextlib.AbstractContextManager:
        """A context whose ops run only in a job in which this rank is still alone.

        In any other, the function that is being traced in it fails.
        """
        number = number_of(self.process_set, _KIND)
        checks = job_values.require_as_traced("size", process_set=number)
        return tf.control_dependencies(checks)

    def __deepcopy__(self, memo: Any) -> GradientReduction:
        # The process set is part of the job; a copy of it would not be.
        return self

    def reduce(
        self,
        prefix: str,
        grads: Sequence[Gradient],
        variables: Sequence[Any],
        local: Collection[int] = (),
        agreed: str = "",
    ) -> list[Gradient]:
        """Reduces the gradients of variables over the ranks.

        `prefix` begins the names that match gradients between ranks, in the order of
        `variables`, whose labels the ranks compare. `local` holds the `identity` of
        each variable whose gradients stay on their rank. `agreed` says in words what
        else must be equal on all ranks.

        In the result, slices remain slices unless `sparse_as_dense`, and have each row
        once. Raises NotImplementedError for Adasum of slices, or with a number of ranks
        that is not a power of 2.
        """
        if recorder.scaling() == "meet":
            return self._meet(f"{prefix}/meeting", grads)
        results = list(grads)
        dense, sparse = [], []
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if identity(variable) in local:
                results[i] = self._scale_local(add_up_all(grad))
            elif isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
                self._require_sum(f"{prefix}/{path(variable)}")
                sparse.append(i)
            else:
                results[i] = tf.convert_to_tensor(grad)
                dense.append(i)
        labels = dict(
            zip(
                dense + sparse,
                labels_of([path(variables[i]) for i in dense + sparse]),
                strict=True,
            )
        )
        # Slices come last, and only once the ranks agree on which gradients those are.
        with submission.leaving_thread():
            reduced = self._reduce_dense(
                f"{prefix}/gradients",
                [results[i] for i in dense],
                [variables[i] for i in dense],
                [labels[i] for i in dense],
                [f"slices of {labels[i]}" for i in sparse] + [agreed] * bool(agreed),
            )
            for i, result in zip(dense, reduced):
                results[i] = result
            with tf.control_dependencies(reduced):
                for number, i in enumerate(sparse):
                    results[i] = self._reduce_slices(
                        f"{prefix}/slices/{number}", grads[i]
                    )
        return results

    def _meet(self, name: str, grads: Sequence[Gradient]) -> list[Gradient]:
        """Waits for the other ranks when the gradients are there, and leaves these."""
        kept = [add_up_all(grad) for grad in grads]
        values = [
            each.values if isinstance(each, tf.IndexedSlices) else each for each in kept
        ]
        with submission.leaving_thread():
            with tf.control_dependencies(values):
                sent = tf.zeros([1])
            [[met]] = self._reduce_buckets([[sent]], [name_in_graph(name)], [""])
        # A session runs only what a result needs.
        with tf.control_dependencies([met]):
            return [tf.identity(each) for each in kept]

    def _reduce_dense(self, prefix, grads, variables, labels, agreed):
        """Reduces dense gradients; `agreed` are labels besides theirs."""
        factor = self.gradient_predivide_factor
        if factor != 1:
            agreed = [*agreed, f"predivided by {factor!r}"]
        if not grads:
            return self._only_agree(f"{prefix}/0", agreed)
        pairs = [self.compression.compress(_times(grad, 1 / factor)) for grad in grads]
        sent = [submission.as_tensor(_KIND, tensor) for tensor, _ in pairs]
        places = list(self._buckets(variables))
        results = self._reduce_buckets(
            [[sent[i] for i in bucket] for bucket in places],
            [name_in_graph(f"{prefix}/{number}") for number in range(len(places))],
            ["\n".join([*(labels[i] for i in bucket), *agreed]) for bucket in places],
        )
        reduced = list(grads)
        for bucket, bucket_results in zip(places, results, strict=True):
            for i, result in zip(bucket, bucket_results, strict=True):
                reduced[i] = _times(
                    self.compression.decompress(result, pairs[i][1]), factor
                )
        return reduced

    def _only_agree(self, name: str, agreed: Sequence[str]) -> list[tf.Tensor]:
        """Has ranks without dense gradients compare labels, by a number for nothing."""
        groups = [[tf.zeros([1])]]
        [results] = self._reduce_buckets(
            groups, [name_in_graph(name)], ["\n".join(agreed)]
        )
        return results

    def _buckets(self, variables: Sequence[Any]) -> Iterator[list[int]]:
        if isinstance(self.groups, int):
            return buckets.by_number(len(variables), self.groups)
        sizes = [buckets.size_of(variable) for variable in variables]
        paths = _distinct_paths(variables)
        return buckets.by_size(sizes, list(_places(self.groups or (), paths)))

    def _reduce_buckets(
        self, tensors: list[list[tf.Tensor]], names: list[str], labels: list[str]
    ) -> list[list[tf.Tensor]]:
        """Reduces gradients; some ranks may compile this with XLA, others not."""
        sums = self.op in (Average, Sum)
        number = number_of(self.process_set, _KIND)
        if sums and submission.is_compiled():
            return gradients.submit(tensors, names, labels, self.op, number)
        every = [each for bucket in tensors for each in bucket]
        allreduce_op.require_supported(_KIND, self.op, every, self.process_set)
        if sums and gradients.are_on_gpu(every):
            return gradients.start_all(tensors, names, self.op, number, labels)
        return [
            submission.submit(
                "allreduce",
                submission.name_of(_KIND, name),
                number,
                tensors=bucket,
                reduce_op=int(self.op),
                labels=of_bucket,
            )
            for bucket, name, of_bucket in zip(tensors, names, labels, strict=True)
        ]

    def _require_sum(self, name: str) -> None:
        if self.op not in (Average, Sum):
            raise NotImplementedError(
                f"{name} has a sparse gradient, which op={self.op.name} cannot "
                "reduce: pass sparse_as_dense=True"
            )

    def _reduce_slices(self, prefix: str, grad: tf.IndexedSlices) -> tf.IndexedSlices:
        """Gathers all ranks' slices; first adds up equal rows here, to send fewer."""
        with reductions.not_by_hand():
            gathered = allreduce(
                add_up(grad),
                compression=self.compression,
                op=self.op,
                name=name_in_graph(prefix),
                process_set=self.process_set,
            )
        return add_up(gathered)

    def _scale_local(self, grad: Gradient) -> Gradient:
        """Scales a local gradient like the others, which are means over all ranks."""
        if not self.scale_local_gradients:
            return grad
        size = job_values.size_of(number_of(self.process_set, _KIND))
        return _divided(grad, size)


def identity(variable: Any) -> int:
    """A variable's id, the same for a Keras variable and the `tf.Variable` in it.

    >>> variable = keras.Variable([1.0])
    >>> identity(variable) == identity(variable.value)
    True
    """
    return id(variable._value if isinstance(variable, keras.Variable) else variable)


def path(variable: Any) -> str:
    """A variable's name on all ranks; tensors, which share no name, get a fixed one.

    >>> path(tf.Variable(1.0, name="w")), path(tf.constant(1.0))
    ('w:0', 'tensor')
    """
    if isinstance(variable, tf.Variable):
        return variable.name
    return getattr(variable, "path", None) or "tensor"


def shown(value: Any) -> str:
    """A setting as text for messages: its name if it has one.

    >>> shown(Average), shown(Compression.fp16), shown(None)
    ('Average', 'FP16Compressor', 'None')
    """
    if isinstance(value, ReduceOp):
        return value.name
    return getattr(value, "__name__", None) or repr(value)


def _places(
    groups: Sequence[Sequence[str]], paths: Sequence[str]
) -> Iterator[list[int]]:
    """The indices in `paths` of each group's variables."""
    by_path = {each: i for i, each in enumerate(paths)}
    for group in groups:
        found = [by_path[each] for each in group if each in by_path]
        if found:
            yield found


def _distinct_paths(variables: Sequence[Any]) -> list[str]:
    """The variables' paths; a path that several share gets the variable's index."""
    paths = [path(variable) for variable in variables]
    times = collections.Counter(paths)
    return [each if times[each] == 1 else f"{each}#{i}" for i, each in enumerate(paths)]


def _divided(grad: Gradient, count: tf.Tensor) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        values = _divided(grad.values, count)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad / tf.cast(count, grad.dtype)


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
