"""Steps in which a rank has no rows, because the batch has fewer than there are ranks.

Layers, losses and metrics cannot compute on no rows, and the collectives need every
rank. So a rank without rows computes on a copy of the batch's first row. The results of
that row are left out: of variables, of gradients, and of values that ranks reduce or
gather. Results that do not depend on rows, such as a counter of steps, are kept as
elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops import resource_variable_ops

from keras_hvd.job.temporary import temporarily
from keras_hvd.strategy import keras_patches

# Collectives, whose results have left out ranks without rows.
_COLLECTIVE = "KerasHvd"

_COMBINED = tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor

SCATTERS = [
    f"scatter_{kind}" for kind in ("add", "sub", "max", "min", "mul", "div", "update")
]
"""Methods of variables that take slices."""

SCATTERS_BY_INDEX = [
    *(f"scatter_nd_{kind}" for kind in ("add", "sub", "max", "min", "update")),
    "batch_scatter_update",
]

_here = threading.local()


class Rows(NamedTuple):
    """A rank's rows of a batch, or a copy of the batch's first row if it has none.

    `own` has no elements if it is a copy, and is None where every batch has rows for
    all ranks. It tells by its shape, which XLA knows when it compiles.
    """

    batch: Any
    own: tf.Tensor | None


class Outputs(NamedTuple):
    """A step's outputs for `Rows`, and whether the rank has rows; None if surely."""

    values: Any
    has_rows: tf.Tensor | None


def install() -> None:
    """Makes variables leave out rows that a rank does not have."""
    # TensorFlow has set some methods of the first class to wrappers of the second's.
    classes = (
        resource_variable_ops.ResourceVariable,
        resource_variable_ops.BaseResourceVariable,
    )
    changes = [*SCATTERS, *SCATTERS_BY_INDEX, "_strided_slice_assign"]
    replacements = dict.fromkeys(changes, _change)
    replacements |= {"assign": _assign, "assign_add": _add, "assign_sub": _add}
    for name, replacement in replacements.items():
        for each in classes:
            if name not in vars(each):
                continue
            keras_patches.replace(each, name, replacement)
            # Users' functions call it. Autograph would take seconds to convert it.
            function = tf.autograph.experimental.do_not_convert(getattr(each, name))
            setattr(each, name, function)


def run(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a step; if it is given `Rows`, with the rows, and returns `Outputs`."""
    place = next((i for i, each in enumerate(args) if isinstance(each, Rows)), None)
    if place is None:
        return function(*args, **kwargs)
    rows, before, after = args[place], args[:place], args[place + 1 :]
    if rows.own is None:
        with _entered(_Step(None, agreed=True)):
            return Outputs(function(*before, rows.batch, *after, **kwargs), None)
    has_rows = tf.shape(rows.own)[0] > 0
    with of_batch(rows.batch, has_rows, agreed=True) as batch:
        return Outputs(function(*before, batch, *after, **kwargs), has_rows)


@contextlib.contextmanager
def of_batch(batch: Any, has_rows: tf.Tensor, agreed: bool = False) -> Iterator[Any]:
    """Leaves out results that depend on the block's batch, unless the rank has rows.

    `agreed` tells that all ranks are in such a block, so that they may have collectives
    for it. In a loop by hand some may know their number of rows, and others not.
    """
    batch = tf.nest.map_structure(of_any_length, batch)
    flag = _flag()
    flag.assign(has_rows)
    step = _Step(flag, _dense(batch), agreed)
    try:
        with _entered(step), step.watching():
            yield batch
    finally:
        flag.assign(True)


def is_open() -> bool:
    """Whether a step is being computed that knows about ranks without rows."""
    return _step() is not None


def has_rows() -> tf.Tensor | None:
    """Whether this rank has rows of the present step's batch; None if it surely has."""
    step = _step()
    return step.has_rows() if step is not None else None


def losses_leave_out() -> None:
    """Notes that the step's losses, and so its gradients, are zero without rows."""
    step = _step()
    if step is not None:
        step.gradients_are_own = True


def own_gradient(gradient: Any) -> Any:
    """A gradient (or None); zeros if it comes from rows that this rank lacks."""
    step = _step()
    if gradient is None or step is None or step.gradients_are_own:
        return gradient
    return zero_unless(step.has_rows(), gradient)


def ranks_that_count() -> tf.Tensor | None:
    """Whether this rank counts in a mean over ranks; None if all do."""
    step = _step()
    return step.has_rows() if step is not None and step.is_agreed else None


def own_or(value: tf.Tensor, otherwise: Any) -> tf.Tensor:
    """A rank's value for a mean; `otherwise` if all count and its rows are foreign."""
    step = _step()
    if step is None or step.is_agreed or not step.depends_on_rows(value):
        return value
    return tf.where(step.has_rows(), value, tf.cast(otherwise, value.dtype))


def without_foreign(
    value: Any, neutral: Callable[[tf.Tensor], tf.Tensor] = tf.zeros_like
) -> Any:
    """A tensor or slices; zeros if they come from rows that this rank lacks."""
    step = _step()
    if step is None or not step.depends_on_rows(value):
        return value
    return zero_unless(step.has_rows(), value, neutral)


def zero_unless(
    condition: tf.Tensor | None,
    value: Any,
    neutral: Callable[[tf.Tensor], tf.Tensor] = tf.zeros_like,
) -> Any:
    """A tensor or slices; zeros unless the condition holds. A condition None holds.

    `neutral` makes another value from the tensor, in place of zeros.

    Example:

    >>> zero_unless(tf.constant(False), tf.constant(float("nan"))).numpy().item()
    0.0
    """
    if condition is None:
        return value
    if isinstance(value, tf.IndexedSlices):
        values = zero_unless(condition, value.values)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    value = tf.convert_to_tensor(value)
    return tf.where(condition, value, neutral(value))


def own_part(value: tf.Tensor, axis: Any) -> tf.Tensor:
    """A tensor, empty along an axis if it comes from rows that this rank lacks."""
    step = _step()
    if step is None or not step.depends_on_rows(value):
        return value
    return trimmed(value, step.has_rows(), axis)


def trimmed(value: tf.Tensor, has_rows: tf.Tensor, axis: Any = 0) -> tf.Tensor:
    """A tensor, made empty along an axis unless this rank has rows.

    Example:

    >>> trimmed(tf.ones([2, 3]), tf.constant(False), axis=1).shape
    TensorShape([2, 0])
    """
    shape = tf.shape(value)
    place = tf.math.floormod(tf.range(tf.rank(value)) - axis, tf.rank(value))
    kept = tf.where((place > 0) | has_rows, shape, tf.zeros_like(shape))
    part = tf.slice(value, tf.zeros_like(shape), kept)
    known = tf.get_static_value(axis)
    if value.shape.rank is not None and known is not None:
        static = value.shape.as_list()
        static[int(known)] = None
        part.set_shape(static)
    return part


def counting(variables: Callable[[], list[Any]]) -> contextlib.AbstractContextManager:
    """Lets variables of Keras, which may be made in this block, change in any case."""
    step = _step()
    if step is None:
        return contextlib.nullcontext()
    return step.exempting(
        lambda variable: any(variable is v.value for v in variables())
    )


class _Step:
    """A step's batch, and the values that depend on it."""

    def __init__(self, flag: Any, batch: Sequence[Any] = (), agreed: bool = False):
        self._flag = flag
        self.is_agreed = agreed
        # Keeps references: otherwise a later tensor could get the id of one that is
        # gone.
        self._of_rows = {_key(each): each for each in batch}
        self._of_none: set[Any] = set()
        self._exempt: Callable[[Any], bool] = lambda variable: False
        self.gradients_are_own = False

    def has_rows(self) -> tf.Tensor | None:
        # A variable, as a tf.function called in the step may outlive the step's graph.
        return None if self._flag is None else self._flag.read_value()

    def keeps(self, variable: Any, values: Any) -> bool:
        """Whether a variable also takes values on a rank without rows."""
        if self._flag is None or variable is self._flag or self._exempt(variable):
            return True
        if variable.synchronization == tf.VariableSynchronization.ON_READ:
            # It has the sum of the rank's own rows, like all variables of metrics.
            return False
        return not self.depends_on_rows(values)

    def depends_on_rows(self, values: Any) -> bool:
        return self._flag is not None and any(map(self._depends, _dense(values)))

    def exempting(
        self, exempt: Callable[[Any], bool]
    ) -> contextlib.AbstractContextManager[None]:
        return temporarily(self, "_exempt", exempt)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notes values that depend on rows while ops run at once, without a graph."""
        if not tf.executing_eagerly() or bool(self._flag):
            yield
            return
        op_callbacks.add_op_callback(self._note)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._note)

    def _note(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is not None or tf.compat.as_str(op_type).startswith(_COLLECTIVE):
            return
        if any(_key(each) in self._of_rows for each in inputs):
            self._of_rows.update((_key(each), each) for each in outputs)

    def _depends(self, tensor: tf.Tensor) -> bool:
        seen, waiting = set(), [tensor]
        while waiting:
            each = waiting.pop()
            key = _key(each)
            if key in self._of_rows:
                return True
            if key in seen or key in self._of_none:
                continue
            seen.add(key)
            if tf.is_symbolic_tensor(each):
                inputs = _inputs(each)
                if inputs is None:
                    return True
                waiting += inputs
        self._of_none |= seen
        return False


def _inputs(tensor: tf.Tensor) -> list[tf.Tensor] | None:
    """The tensors from which `tensor` is computed; None if that cannot be known."""
    op = tensor.op
    if op.type.startswith(_COLLECTIVE):
        return []
    if op.type == "IdentityN":  # of a custom gradient
        return [op.inputs[tensor.value_index]]
    if op.type != "Placeholder":
        return list(op.inputs)
    for outer, inner in getattr(op.graph, "captures", ()):
        if _key(inner) == _key(tensor):
            return [outer]
    # An argument of a function, or of a loop's body.
    return [] if tensor.dtype == tf.resource else None


def _step() -> _Step | None:
    # An update has the same values on all ranks.
    is_update = distribute_lib.get_update_replica_id() is not None
    return None if is_update else getattr(_here, "step", None)


def _entered(step: _Step) -> contextlib.AbstractContextManager[None]:
    return temporarily(_here, "step", step)


def _flag() -> Any:
    """A variable of this thread: whether the rank has rows of the present batch."""
    if not hasattr(_here, "flag"):
        with tf.init_scope():
            # Its class, as tf.Variable would make one of the strategy.
            _here.flag = resource_variable_ops.ResourceVariable(True, trainable=False)
    return _here.flag


def of_any_length(part: Any) -> Any:
    """The same part, without a static number of rows.

    Eager tensors keep theirs.

    Example:

    >>> of_any_length(tf.ones([2, 3])).shape
    TensorShape([2, 3])
    """
    if not hasattr(part, "shape"):
        # A flag, such as `training`: layers decide by it in Python.
        return part
    if not isinstance(part, (tf.Tensor, *_COMBINED)):
        part = tf.convert_to_tensor(part)
    if not tf.is_symbolic_tensor(part) or not part.shape.rank or not part.shape[0]:
        return part
    return tf.compat.v1.placeholder_with_default(part, [None, *part.shape[1:]])


def _dense(values: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(values, expand_composites=True)
    return [each for each in flat if isinstance(each, tf.Tensor)]


def _key(tensor: tf.Tensor) -> Any:
    if tf.is_symbolic_tensor(tensor):
        return id(tensor.graph), tensor.name
    return id(tensor)


@keras_patches.replaces(keras.metrics.Mean, "update_state")
@keras_patches.replaces(keras.metrics.Sum, "update_state")
def _update_state(plain, metric, values, sample_weight=None):
    step = _step()
    if step is None or step.depends_on_rows([values, sample_weight]):
        return plain(metric, values, sample_weight)
    # Each rank counts a value of all ranks, such as the loss of the whole batch.
    with step.exempting(lambda variable: True):
        return plain(metric, values, sample_weight)


def _assign(plain, variable, value, *args, **kwargs):
    step = _step()
    if step is None or step.keeps(variable, value):
        return plain(variable, value, *args, **kwargs)
    value = tf.convert_to_tensor(value, variable.dtype)
    value = tf.where(step.has_rows(), value, variable.read_value())
    return plain(variable, value, *args, **kwargs)


def _add(plain, variable, delta, *args, **kwargs):
    step = _step()
    if step is None or step.keeps(variable, delta):
        return plain(variable, delta, *args, **kwargs)
    delta = tf.convert_to_tensor(delta, variable.dtype)
    delta = tf.where(step.has_rows(), delta, tf.zeros_like(delta))
    return plain(variable, delta, *args, **kwargs)


def _change(plain, variable, *args, **kwargs):
    """Changes a part of a variable, and undoes that on a rank without rows."""
    step = _step()
    if step is None or step.keeps(variable, [args, kwargs]):
        return plain(variable, *args, **kwargs)
    before = tf.identity(variable.read_value())
    changed = plain(variable, *args, **kwargs)
    ops = [changed] if tf.is_symbolic_tensor(changed) else []
    with _entered(_Step(None)), tf.control_dependencies(ops):
        return variable.assign(tf.where(step.has_rows(), variable.read_value(), before))
