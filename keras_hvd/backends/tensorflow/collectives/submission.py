"""Submission of all collectives' ops: inputs, names, and their order in graphs."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.autograph.core import config as autograph
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import control_flow_util

from keras_hvd.backends.automatic_names import without_number
from keras_hvd.backends.tensorflow.collectives import compiled_calls
from keras_hvd.backends.tensorflow.collectives.graph_names import numbered
from keras_hvd.job import later_jobs, native, script_end, unnamed

_UNNAMED = "unnamed_"

# XLA compiles them for the shapes that their results have in a job.
_SHAPED_BY_JOB = {"allgather", "alltoall", "reducescatter"}

_REDUCED = tuple(map(tf.as_dtype, native.REDUCED_DTYPES))
_MOVED = (
    *map(tf.as_dtype, native.DTYPES),
    *(tf.qint8, tf.quint8, tf.qint16, tf.quint16, tf.qint32),
    # Not all supported versions of TensorFlow have these as attributes.
    *(tf.as_dtype("int4"), tf.as_dtype("uint4")),
)

# From now on, TensorFlow calls them for every op of every `tf.function`.
auto_control_deps.register_acd_resource_resolver(
    compiled_calls.keep_compiled_calls_in_order
)
auto_control_deps.register_acd_resource_resolver(compiled_calls.keep_joins_in_place)

# AutoGraph would take seconds to convert this package's code in a `tf.function`.
autograph.CONVERSION_RULES = (
    autograph.DoNotConvert(__package__.partition(".")[0]),
    *autograph.CONVERSION_RULES,
)

_turns = unnamed.Turns()


def as_tensor(kind: str, value: Any, *, reduces: bool = True) -> tf.Tensor:
    """Converts a value to a tensor; slices become dense, and equal rows are added up.

    Collectives that only move elements, with `reduces` False, take more types. Raises
    TypeError if `kind` does not take the element type, and ValueError if TensorFlow
    cannot convert the value.

    Example:

    >>> as_tensor("allreduce", [1, 2]).dtype
    tf.int32
    >>> as_tensor("allgather", [1j], reduces=False).dtype
    tf.complex128
    """
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{kind} takes what TensorFlow can convert to a tensor; got "
            f"{type(value).__name__}: {error}"
        ) from error
    supported = _REDUCED if reduces else _MOVED
    if tensor.dtype in supported:
        return tensor
    names = ", ".join(dtype.name for dtype in supported)
    raise TypeError(
        f"{kind} takes tensors of {names}; got {tensor.dtype.name} of shape "
        f"{tensor.shape}"
    )


def with_rows(kind: str, does: str, value: Any, *, reduces: bool = False) -> tf.Tensor:
    """Like `as_tensor`, for collectives of rows: a scalar raises ValueError."""
    tensor = as_tensor(kind, value, reduces=reduces)
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{kind} {does} tensors along their first dimension, and a scalar has "
            f"none: give it one, with tf.expand_dims(x, 0); got {tensor}"
        )
    return tensor


def require_scalable(
    kind: str, scales: tuple[float, float], dtypes: Iterable[tf.DType]
) -> None:
    """Raises ValueError if a factor is infinite and one of `dtypes` is an integer type.

    >>> require_scalable("allreduce", (float("inf"), 1.0), [tf.float32, tf.int8])
    Traceback (most recent call last):
    ValueError: allreduce: prescale_factor must be finite for int8 tensors; got inf
    """
    for argument, scale in zip(("prescale", "postscale"), scales, strict=True):
        for dtype in dtypes if math.isinf(scale) else ():
            if not (dtype.is_floating or dtype.is_complex):
                raise ValueError(
                    f"{kind}: {argument}_factor must be finite for {dtype.name} "
                    f"tensors; got {scale}"
                )


class Name(NamedTuple):
    """An op's two names: `tensor` between ranks, `node` in its graph."""

    tensor: str
    node: str


def name_of(
    kind: str, name: str | None, ignore_name_scope: bool = False, process_set: int = 0
) -> Name:
    """The names of a collective.

    An unnamed eager collective has a fixed name: the ranks run the same program, and
    each waits for its collective to end. In a graph, its name consists of the names of
    the `tf.function`, of the enclosing branches, loops and scopes, and of its kind.
    TensorFlow and Keras number these by the objects that this process has made before,
    with or without collectives. These numbers may differ between ranks, so they are
    left out, and collectives of equal names are numbered instead.

    Collectives of a process set are numbered separately, because other ranks may not
    have them in their graphs.

    Raises ValueError if `name` is empty or has a zero byte, and TypeError if it is not
    a string.

    Example:

    >>> name_of("allreduce", "layer 1/w:0")
    Name(tensor='layer 1/w:0', node='layer_1/w_0')
    >>> name_of("allreduce", None)
    Name(tensor='unnamed_allreduce', node='allreduce')
    """
    if name is not None:
        unnamed.require_name(kind, name)
        return Name(name, _node_name(name))
    if tf.executing_eagerly():
        return Name(_UNNAMED + kind, kind)
    if process_set != 0:
        kind = f"{kind}_in_set_{process_set}"
    graph = tf.compat.v1.get_default_graph()
    scope = [] if ignore_name_scope else _scope(graph)
    return Name(numbered("/".join([*_path(graph), *scope, kind]), "_"), kind)


def name_of_gradient(forward: tf.Operation, name: str | None = None) -> Name:
    """The names of the collective in an op's gradient, derived from those of the op.

    An op may be differentiated several times in a graph, which numbers the names. If
    the op has several parts, `name` is the name of one of them.

    >>> class Forward:
    ...     def get_attr(self, name):
    ...         return b"layer/w"
    >>> name_of_gradient(Forward())
    Name(tensor='layer/w/gradient', node='layer/w/gradient')
    """
    name = tf.compat.as_str(name or forward.get_attr("tensor_name")) + "/gradient"
    node = _node_name(name)
    if tf.executing_eagerly():
        return Name(name, node)
    return Name(numbered(name, "_"), node)


def submit(kind: str, name: Name, process_set: int, **attributes: Any) -> Any:
    """Runs a collective's op, or adds it to the graph, with no order among collectives.

    Raises NotImplementedError if XLA would have to compile it and cannot. Raises
    MismatchError if several threads run it eagerly and without a name.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> name = name_of("broadcast", None)
    >>> submit("broadcast", name, 0, tensor=tf.constant(1), root_rank=0).numpy().item()
    1
    """
    require_compilable(f"{kind} {name.tensor!r}")
    script_end.note_collective()
    if kind in _SHAPED_BY_JOB and is_compiled():
        later_jobs.note_held("size", "rank")
    in_turn = tf.executing_eagerly() and name.tensor.startswith(_UNNAMED)
    with _turns.take(name.tensor, process_set) if in_turn else contextlib.nullcontext():
        outputs = getattr(native.ops(), f"keras_hvd_{kind}")(
            process_set=process_set,
            tensor_name=name.tensor,
            name=name.node,
            **attributes,
        )
    # A barrier stays in order with other stateful ops, and has no output.
    if kind != "barrier":
        run_independently(tf.nest.flatten(outputs)[0])
    return outputs


def smooth_gradients(
    outputs: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor | None]
) -> dict[int, tf.Tensor]:
    """The gradients of those outputs that can have one, by output index.

    This depends on types only, so all ranks submit the same group.

    >>> gradients = smooth_gradients([tf.constant(1.0), tf.constant(2)], [None, None])
    >>> {i: gradient.numpy().item() for i, gradient in gradients.items()}
    {0: 0.0}
    """
    return {
        i: tf.zeros_like(output) if gradient is None else tf.convert_to_tensor(gradient)
        for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
        if output.dtype.is_floating or output.dtype.is_complex
    }


def as_pairs(tensor: tf.Tensor) -> tf.Tensor:
    """Converts complex numbers to pairs, which can be summed and averaged.

    >>> as_pairs(tf.constant([1 + 2j])).numpy()
    array([[1., 2.]])
    """
    return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)


def from_pairs(pairs: tf.Tensor) -> tf.Tensor:
    """Converts the pairs of `as_pairs` back to complex numbers.

    >>> from_pairs(tf.constant([[1.0, 2.0]], tf.float64)).numpy()
    array([1.+2.j])
    """
    return tf.complex(pairs[..., 0], pairs[..., 1])


def is_compiled() -> bool:
    """Whether XLA will compile the function being traced, or one around it."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def in_session_graph() -> bool:
    """Whether the current graph is for sessions of `tf.compat.v1`.

    >>> with tf.Graph().as_default():
    ...     in_session_graph()
    True
    """
    graph = tf.compat.v1.get_default_graph()
    is_function = isinstance(graph, tf.__internal__.FuncGraph)
    return not (tf.executing_eagerly() or is_function)


def on_cpu() -> contextlib.AbstractContextManager:
    """Keeps collectives of keras_hvd's own few numbers on the CPU.

    On a GPU, NCCL would run them after all computation queued before them, and ranks
    with a GPU would not match ranks without one. A program that XLA compiles runs on
    one device anyway.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> with on_cpu():
    ...     keras_hvd.allreduce(1).device[-6:]
    ':CPU:0'
    """
    return contextlib.nullcontext() if is_compiled() else tf.device("/CPU:0")


def continue_on_one_thread(results: list[tf.Tensor]) -> list[tf.Tensor]:
    """Passes on the results of a collective's op in a graph, as if it had not waited.

    TensorFlow starts each op that follows one which waits on a thread of its own. For
    small ops that costs more than they do; on a GPU they also wait for each other's
    launches. What follows any other op stays on one thread, unless it is expensive.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> @tf.function
    ... def step(x):
    ...     return continue_on_one_thread([x, x])
    >>> [each.numpy().item() for each in step(tf.constant(1.0))]
    [1.0, 1.0]
    """
    if tf.executing_eagerly() or is_compiled() or len(results) == 1:
        return results
    # Grappler removes a tf.identity_n.
    same, _ = native.ops().keras_hvd_whole_step(results)
    return same


def leaving_thread() -> contextlib.AbstractContextManager:
    """Makes collectives in a graph free their threads at once for the ops beside them.

    Otherwise, an op with a small tensor may do the engine's work for a moment, and wait
    for peers. That is the fastest way to a result that everything waits for. But during
    the reduction of gradients, backprop can use the thread.

    >>> @tf.function
    ... def step(x):
    ...     with leaving_thread():
    ...         y = tf.identity(x)
    ...     print(y.op.get_attr("_keras_hvd_leaves_thread"))
    >>> step(1)
    True
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    leaves = attr_value_pb2.AttrValue(b=True)
    return tf.compat.v1.get_default_graph()._attr_scope(
        {"_keras_hvd_leaves_thread": leaves}
    )


def require_compilable(what: str) -> None:
    """Raises if XLA would compile a collective and TensorFlow is too old for that."""
    if not is_compiled() or native.ops_info(tf.__version__)["xla"]:
        return
    raise NotImplementedError(
        f"{what} would be compiled by XLA, and TensorFlow {tf.__version__} lacks what "
        "collectives need there: pass jit_compile=False to compile() or to "
        "tf.function(), or use a newer TensorFlow"
    )


def run_independently(output: tf.Tensor) -> None:
    """Frees a collective from the order that a `tf.function` gives to stateful ops.

    Otherwise TensorFlow would make each wait for the previous one, and nothing would
    overlap or fuse. The op still always runs.

    >>> @tf.function
    ... def step(x):
    ...     y = tf.identity(x)
    ...     run_independently(y)
    ...     return y
    >>> int(step(1))
    1
    """
    if not tf.executing_eagerly():
        run_operation_independently(output.op)


def run_operation_independently(op: tf.Operation) -> None:
    """Like `run_independently`, for an op itself."""
    control_dependencies = op.graph.experimental_acd_manager
    if control_dependencies is not None:
        control_dependencies.run_independently(op)
    keep_order(op)


def effects_so_far() -> list[tf.Operation]:
    """Returns the ops with effects in the `tf.function` being traced.

    Among them are collectives. They may be in loops, in branches and in functions that
    it calls. Of a session's graph there are none: a session runs only the ops that it
    is asked for.

    >>> effects_so_far()
    []
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or in_session_graph():
        return []
    return [op for op in graph.get_operations() if op._is_stateful]


def let_following_wait(op: tf.Operation) -> None:
    """Makes all later ops of a `tf.function` wait for `op`."""
    if not in_session_graph():
        # Outside of the dependencies that the caller is within, which end first.
        following = op.graph.control_dependencies([op])
        op.graph._control_dependencies_stack.insert(0, following)


def keep_order(op: tf.Operation) -> None:
    """Makes the collectives of a compiled program start in the order of their creation.

    XLA ignores control edges, so they make nothing wait. But they decide the order in
    which TensorFlow hands the ops to XLA. Without them, it depends on the names of all
    nodes around the ops. The starts of a program are chained in that order. It must be
    the same on all ranks, even if their programs differ in other ways.

    >>> @tf.function(jit_compile=True)
    ... def step(x):
    ...     y, z = tf.identity(x), tf.identity(x)
    ...     keep_order(y.op)
    ...     keep_order(z.op)
    ...     print([each is y.op for each in z.op.control_inputs])
    ...     return y + z
    >>> int(step(1))
    [True]
    2
    """
    if not is_compiled():
        return
    last = getattr(op.graph, "_keras_hvd_last_collective", None)
    op.graph._keras_hvd_last_collective = op
    # An old-style loop or branch has a place of its own in the graph.
    if last is not None and last._control_flow_context is op._control_flow_context:
        op._add_control_input(last)


def _path(graph: tf.Graph) -> list[str]:
    """The names of the `tf.function`, the branches and the loops down to `graph`."""
    if not isinstance(graph, tf.__internal__.FuncGraph):
        return []
    if getattr(graph, "is_control_flow_graph", False):
        # All of the scope in one, such as "map_1_while_body_15".
        return [*_path(graph.outer_graph), re.sub(r"_\d+(?=_|$)", "", graph.name)]
    if graph.name.startswith(("__forward_", "__backward_")):
        return [_without_number(graph.name)]
    return [graph.name]


def _scope(graph: tf.Graph) -> list[str]:
    """The scopes that a new node of the graph is in, without automatic numbers."""
    scope: list[str] = []
    outer = ""
    for part in filter(None, graph.get_name_scope().split("/")):
        # With its number, because the graph knows the inner parts by that name.
        own = _without_number(part)
        is_numbered = own != part and _is_used_again(graph, outer + own)
        scope.append(without_number(own if is_numbered else part))
        outer += f"{part}/"
    return scope


def _is_used_again(graph: tf.Graph | None, name: str) -> bool:
    """Whether the graph, or one around it, has had to number nodes of this name."""
    while graph is not None:
        if graph._names_in_use.get(name.lower(), 0) > 1:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _node_name(name: str) -> str:
    """Converts a tensor name to one that TensorFlow allows for a node."""
    return re.sub(r"^[^A-Za-z0-9.]", ".", re.sub(r"[^A-Za-z0-9_./-]", "_", name))


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
