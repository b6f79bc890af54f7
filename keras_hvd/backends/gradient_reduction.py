"""The settings for reducing gradients: of an optimizer, a tape or a strategy."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from keras_hvd.backends import buckets
from keras_hvd.backends.compression import (
    Compressor,
    NoneCompressor,
    require_compressor,
)
from keras_hvd.backends.reduce_op import Average, ReduceOp
from keras_hvd.backends.variables import identity, is_variable, path
from keras_hvd.job import basics, later_jobs
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of
from keras_hvd.recording import recorder

# The origin of errors, in messages.
KIND = "the reduction of gradients"


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced; the same on all ranks."""

    op: ReduceOp = Average
    compression: type[Compressor] = NoneCompressor
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

        >>> GradientReduction(op=ReduceOp.Sum).differences(GradientReduction())
        'op=Sum and op=Average'
        """
        fields = [field.name for field in dataclasses.fields(self)]
        differing = [f for f in fields if getattr(self, f) != getattr(other, f)]
        return " and ".join(
            ", ".join(f"{name}={shown(getattr(each, name))}" for name in differing)
            for each in ((self, other) if differing else ())
        )

    def buckets(
        self, variables: Sequence[Any], sizes: Sequence[int]
    ) -> list[list[int]]:
        """The places in `variables` of the gradients that are sent together.

        `sizes` are their bytes. The buckets are in the order in which backprop is done.

        >>> import keras
        >>> weights = [keras.Variable([1.0], name=name) for name in ("first", "last")]
        >>> GradientReduction().buckets(weights, [4, 4])
        [[1, 0]]
        >>> GradientReduction(groups=2).buckets(weights, [4, 4])
        [[1], [0]]
        """
        if isinstance(self.groups, int):
            return list(buckets.by_number(len(variables), self.groups))
        groups = _places(self.groups, variables) if self.groups else ()
        return list(buckets.by_size(sizes, list(groups)))

    def is_alone(self) -> bool:
        """Whether this rank has no other rank to reduce with.

        Also outside of the process set: such a rank trains with its own gradients. A
        caller that then traces a step without a reduction makes it depend on
        `only_alone` of the framework.
        """
        basics.require_initialized(KIND)
        number_of(self.process_set, KIND)
        if not self.process_set.included():
            return True
        # In a measurement of scaling, even a rank alone submits: submissions are
        # counted. Where later jobs are possible, the step is for them too.
        submits = recorder.scaling() or later_jobs.are_possible()
        return self.process_set.size() == 1 and not submits

    def __deepcopy__(self, memo: Any) -> GradientReduction:
        # The process set is part of the job; a copy of it would not be.
        return self


def _places(
    groups: Sequence[Sequence[str]], variables: Sequence[Any]
) -> Iterator[list[int]]:
    """The indices of each group's variables; a path that several share is in none."""
    paths = [path(variable) for variable in variables]
    times = collections.Counter(paths)
    places = {each: i for i, each in enumerate(paths) if times[each] == 1}
    for group in groups:
        found = [places[each] for each in group if each in places]
        if found:
            yield found


def shown(value: Any) -> str:
    """A setting as text for messages: its name if it has one.

    >>> shown(Average), shown(NoneCompressor), shown(None)
    ('Average', 'NoneCompressor', 'None')
    """
    if isinstance(value, ReduceOp):
        return value.name
    return getattr(value, "__name__", None) or repr(value)


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
        if not is_variable(each):
            raise ValueError(
                f"{kind}: groups must hold variables; got {type(each).__name__}"
            )
    twice = collections.Counter(map(identity, variables)).most_common(1)
    if twice and twice[0][1] > 1:
        [shown] = [path(v) for v in variables if identity(v) == twice[0][0]][:1]
        raise ValueError(f"{kind}: variable {shown!r} is in groups more than once")
