"""Refuses to reduce gradients that the step has reduced itself.

Arithmetic makes new tensors without marks, so clipped and scaled gradients are traced
back to their sources. A tensor from marked ones alone, besides variables and constants,
has been reduced. A tensor that also comes from a batch of data has not: the results
that a forward pass takes from other ranks are no reduction of its gradients. Eager mode
keeps no sources, so only marked tensors are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.backends.tensorflow.collectives import reductions
from keras_hvd.backends.tensorflow.collectives.reductions import Mark
from keras_hvd.job.process_sets import number_of

# The sources of a tensor: these marks alone; None: a rank's own data as well.
_Origin = frozenset[Mark] | None

_NOTHING: frozenset[Mark] = frozenset()
_READS = {"ReadVariableOp", "VariableV2", "VarHandleOp", "Const"}
_BRANCHES = {"If", "StatelessIf"}
_CALLS = {*_BRANCHES, "Case", "While", "PartitionedCall", "StatefulPartitionedCall"}


def require_not_reduced(
    optimizer: Any, grads: Iterable[Any], reduction: GradientReduction
) -> None:
    """Raises if the gradients given to an optimizer that reduces were reduced before.

    Averaging equal values changes nothing. So an optimizer that averages takes
    gradients that a collective has reduced, but not the gradients of a distributed
    tape.

    Example:

    >>> import keras, keras_hvd
    >>> keras_hvd.init()
    >>> optimizer, summing = keras.optimizers.SGD(), GradientReduction(op=Sum)
    >>> require_not_reduced(optimizer, [tf.constant(1.0)], summing)
    >>> require_not_reduced(optimizer, [keras_hvd.allreduce(1.0)], summing)
    Traceback (most recent call last):
    RuntimeError: optimizer 'sgd' sums gradients over the ranks, and was given ...
    """
    origins = _Origins()
    for grad in grads:
        for mark in origins.of_gradient(grad) if grad is not None else ():
            if mark.process_set is None:
                raise _reduced_by_tape(optimizer, mark.by)
            number = number_of(reduction.process_set, "the reduction of gradients")
            if reduction.op == Sum and mark.process_set == number:
                raise _summed_by_hand(optimizer, reduction.process_set.size())


class _Origins:
    """The origins of tensors in the graph being traced."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Origin] = {}
        self._captured: dict[int, dict[str, Any]] = {}
        self._marked = reductions.marked_elements()

    def of_gradient(self, grad: Any) -> frozenset[Mark]:
        mark = reductions.mark_of(grad)
        if mark is not None:
            return frozenset([mark])
        tensor = grad.indices if isinstance(grad, tf.IndexedSlices) else grad
        if not tf.is_tensor(tensor) or _is_eager(tensor) or not self._marked:
            return _NOTHING
        # A step's collectives of a few numbers (losses, metrics) need no look at all.
        if reductions.elements_of(tensor) > self._marked:
            return _NOTHING
        return self._origin(tensor) or _NOTHING

    def _origin(self, tensor: Any) -> _Origin:
        """Searches a tensor's sources, depth first, until it meets data."""
        path: list[_Visit] = []
        origin = self._enter(tensor, path)
        while path:
            if origin is None:
                # A tensor with a rank's own data among its sources is this rank's too.
                for visit in path:
                    self._known[visit.key] = None
                return None
            visit = path[-1]
            visit.origin |= origin
            source = next(visit.sources, None)
            if source is None:
                path.pop()
                origin = self._known[visit.key] = visit.origin
            else:
                origin = self._enter(source, path)
        return origin

    def _enter(self, tensor: Any, path: list[_Visit]) -> _Origin:
        """A tensor's origin if it is clear; else puts it on the path."""
        mark = reductions.mark_of(tensor)
        if mark is not None:
            return frozenset([mark])
        if _is_eager(tensor):
            # A constant to this graph. Data in it, unlike a setting, has many elements.
            is_setting = (
                tensor.dtype == tf.resource or reductions.elements_of(tensor) < 2
            )
            return _NOTHING if is_setting else None
        op = tensor.op
        key = id(op.graph), tensor.name
        if key in self._known:
            return self._known[key]
        if op.type in _READS:
            return _NOTHING
        if op.type == "Placeholder":
            outside = self._captures(op.graph).get(tensor.name)
            return None if outside is None else self._enter(outside, path)
        is_own = op.type.startswith("KerasHvd") or op.type in _CALLS
        if op.op_def.is_stateful and not is_own:
            return None
        # Also ends the circles of old-style loops.
        self._known[key] = _NOTHING
        path.append(_Visit(key, iter(_sources(tensor))))
        return _NOTHING

    def _captures(self, graph: Any) -> dict[str, Any]:
        """The outer tensors that a function's placeholders stand for, by name."""
        if id(graph) not in self._captured:
            pairs = getattr(graph, "captures", ())
            self._captured[id(graph)] = {inside.name: out for out, inside in pairs}
        return self._captured[id(graph)]


class _Visit:
    """A tensor whose sources are being looked at."""

    def __init__(self, key: tuple[int, str], sources: Iterator[Any]):
        self.key = key
        self.sources = sources
        self.origin = _NOTHING


def _sources(tensor: Any) -> list[Any]:
    op = tensor.op
    branches = [getattr(op, name, None) for name in ("_true_graph", "_false_graph")]
    known = [branch for branch in branches if branch is not None]
    if op.type in _BRANCHES and len(known) == 2:
        return [branch.outputs[tensor.value_index] for branch in known]
    return list(op.inputs)


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


def _reduced_by_tape(optimizer: Any, kind: str) -> RuntimeError:
    return RuntimeError(
        f"optimizer {optimizer.name!r} is distributed, and was given gradients that a "
        f"{kind} has reduced: they would be reduced twice. Use one of the two, "
        "the tape with a plain optimizer or a tf.GradientTape with the distributed one."
    )


def _summed_by_hand(optimizer: Any, ranks: int) -> RuntimeError:
    return RuntimeError(
        f"optimizer {optimizer.name!r} sums gradients over the ranks, and was given "
        "gradients that the step itself has reduced over them, with an all_reduce or "
        f"allreduce: they would be summed twice, {ranks} times too large. Give the "
        "optimizer the gradients that tape.gradient() returns."
    )
