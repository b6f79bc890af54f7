"""DistributedGradientTape: a tape that reduces its gradients over all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_hvd.backends.compression import Compressor
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.reduce_op import Average, ReduceOp
from keras_hvd.backends.tensorflow import guarded_saving, process
from keras_hvd.backends.tensorflow.collectives import contributions, reductions
from keras_hvd.backends.tensorflow.collectives.reductions import Mark
from keras_hvd.backends.tensorflow.compression import Compression
from keras_hvd.backends.tensorflow.gradients import equal_start
from keras_hvd.backends.tensorflow.gradients import reduction as of_gradients
from keras_hvd.backends.tensorflow.gradients.repeated_rows import add_up_all
from keras_hvd.backends.variables import LocalVariables, identity, local_layers_of
from keras_hvd.job.process_sets import ProcessSet, global_process_set
from keras_hvd.mixin import Mixin

# Variables whose gradients tapes have left on their rank, by identity.
_local: dict[int, weakref.ref] = {}


def is_local(variable: Any) -> bool:
    """Whether a distributed tape has left gradients of a variable on their rank.

    >>> is_local(tf.Variable(1.0))
    False
    """
    known = _local.get(identity(variable))
    return known is not None and known() is not None


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Makes a tape whose `gradient` method reduces gradients over all ranks.

    Every rank must call `gradient` with the same sources. Pass the result to a plain
    optimizer: a distributed one raises an error, as it would reduce it again. The given
    tape is not changed. Both tapes have the same recording.

    The tape gets a method `register_local_source(variable)`. The gradients of such a
    variable stay on their rank. `jacobian` and `batch_jacobian` raise an error, because
    they do not return gradients.

    Args:
        gradtape: a tape before, during or after recording.
        device_dense: ignored, as in Horovod.
        device_sparse: ignored, as in Horovod.
        compression: how gradients are compressed for sending:
            `keras_hvd.Compression.none`, `.fp16` or `.bf16`.
        sparse_as_dense: whether to make sparse gradients dense. By default the ranks
            gather all slices and add up equal rows.
        op: `keras_hvd.Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: gradients are divided by it before they are summed,
            and by `size() / gradient_predivide_factor` afterwards.
        num_groups: old name of `groups`, as a number.
        groups: which gradients are sent together: a number of groups, or lists of
            variables. By default gradients are grouped by size.
        process_set: the ranks that reduce together; by default all of them. A rank
            outside keeps its own gradients.
        scale_local_gradients: whether to divide gradients of local sources by the
            number of ranks, as averaging divides the others.

    Returns:
        A tape.

    Raises:
        TypeError: `gradtape` is not a `tf.GradientTape`, or `compression` is not a
            compressor.
        ValueError: an argument is invalid, or conflicts with another.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> weight = tf.Variable(3.0)
    >>> with tf.GradientTape() as tape:
    ...     loss = weight**2
    >>> keras_hvd.DistributedGradientTape(tape).gradient(loss, weight).numpy().item()
    6.0
    """
    del device_dense, device_sparse
    reduction = GradientReduction.of_arguments(
        "DistributedGradientTape",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _distributed(gradtape, reduction)


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Like `DistributedGradientTape`, but keeps gradients of some layers on their rank.

    Args:
        gradtape: as for `DistributedGradientTape`.
        device_dense: ignored, as in Horovod.
        device_sparse: ignored, as in Horovod.
        compression: as for `DistributedGradientTape`.
        sparse_as_dense: as for `DistributedGradientTape`.
        op: as for `DistributedGradientTape`.
        gradient_predivide_factor: as for `DistributedGradientTape`.
        num_groups: as for `DistributedGradientTape`.
        groups: as for `DistributedGradientTape`.
        process_set: as for `DistributedGradientTape`.
        local_layers: a Keras layer, or several.
        scale_local_gradients: as for `DistributedGradientTape`.

    Returns:
        A tape.

    Raises:
        TypeError: as for `DistributedGradientTape`.
        ValueError: something in `local_layers` is not a layer; also as for
            `DistributedGradientTape`.

    Example:

    >>> import keras, keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> layer = keras.layers.Dense(1, kernel_initializer="ones")
    >>> with tf.GradientTape() as tape:
    ...     loss = layer(tf.constant([[2.0]]))
    >>> tape = keras_hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    >>> tape.gradient(loss, layer.kernel).numpy()
    array([[2.]], dtype=float32)
    """
    local = local_layers_of("PartialDistributedGradientTape", local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    tape._own.local.append(local)
    return tape


class _Own:
    """The state that a distributed tape does not share with its plain tape."""

    def __init__(self, reduction: GradientReduction):
        self.reduction = reduction
        self.local: list[LocalVariables] = []


class _ReducesGradients(Mixin):
    """A tape that shares its state with the tape it was made from."""

    __slots__ = ("_own",)

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradients of a variable on their rank.

        Args:
            source: a Keras variable or a `tf.Variable`.

        Raises:
            TypeError: `source` is something else.
        """
        self._own.local.append(LocalVariables.of(source))

    def gradient(self, target, sources, output_gradients=None, **arguments):
        grads = super().gradient(target, sources, output_gradients, **arguments)
        own = self._own
        reductions.note_handed_over()
        if own.reduction.is_alone():
            with of_gradients.only_alone(own.reduction):
                return add_up_all(
                    tf.nest.map_structure(_same, grads, expand_composites=True)
                )
        return _reduce(own, grads, sources)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """The gradients in two lists: those that stay on their rank, and the others.

        Args:
            target: as for `gradient`.
            sources: a list of variables.
            output_gradients: as for `gradient`.

        Returns:
            Pairs of local sources and their gradients, then pairs of the others.
        """
        grads = self.gradient(target, sources, output_gradients)
        local = {each for own in self._own.local for each in own.among(sources)}
        pairs = list(zip(sources, grads, strict=True))
        return (
            [pair for pair in pairs if identity(pair[0]) in local],
            [pair for pair in pairs if identity(pair[0]) not in local],
        )

    def jacobian(self, *arguments, **named):
        raise _no_gradients("jacobian")

    def batch_jacobian(self, *arguments, **named):
        raise _no_gradients("batch_jacobian")


def _same(grad: tf.Tensor | None) -> tf.Tensor | None:
    return grad if grad is None or tf.executing_eagerly() else tf.identity(grad)


def _reduce(own: _Own, grads: Any, sources: Any) -> Any:
    flat = tf.nest.flatten(grads)
    variables = tf.nest.flatten(sources)
    present = [i for i, grad in enumerate(flat) if grad is not None]
    if not present:
        return grads
    mine = [variables[i] for i in present]
    local = {each for local in own.local for each in local.among(mine)}
    for each in mine:
        if identity(each) in local:
            plain = each._value if isinstance(each, keras.Variable) else each
            _local[identity(each)] = weakref.ref(plain)
    equal_start.compare(mine, own.reduction, local)
    reduction = own.reduction
    given, restore = contributions.to_reduction(
        [flat[i] for i in present], reduction.op, reduction.process_set
    )
    with contributions.as_given():
        reduced = restore(
            of_gradients.reduce(
                reduction, "DistributedGradientTape", given, mine, local
            )
        )
    reductions.mark(reduced, Mark("DistributedGradientTape"))
    for i, result in zip(present, reduced, strict=True):
        flat[i] = result
    return tf.nest.pack_sequence_as(sources, flat)


def _distributed(gradtape: Any, reduction: GradientReduction) -> Any:
    if isinstance(gradtape, _ReducesGradients):
        raise TypeError(
            "DistributedGradientTape: this tape is distributed already, and would "
            "reduce its gradients twice"
        )
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(
            "DistributedGradientTape takes a tf.GradientTape; got "
            f"{type(gradtape).__module__}.{type(gradtape).__qualname__}"
        )
    guarded_saving.install()
    process.watch_steps()
    plain: type = type(gradtape)
    tape: Any = object.__new__(_distributed_class(plain))
    # The tapes share one state, so it does not matter which one `with` exits.
    tape.__dict__ = gradtape.__dict__
    tape._own = _Own(reduction)
    return tape


@functools.cache
def _distributed_class(plain: type) -> type:
    return type(plain.__name__, (_ReducesGradients, plain), {"__doc__": plain.__doc__})


def _no_gradients(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"DistributedGradientTape reduces gradients, and has no {method}(): use the "
        "tape that it was made of, and keras_hvd.allreduce"
    )
