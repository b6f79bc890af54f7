"""keras_hvd.Strategy."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from keras_hvd.backends.tensorflow import current_strategy, guarded_saving
from keras_hvd.backends.tensorflow.collectives import contributions
from keras_hvd.callbacks.coordination import calling
from keras_hvd.job import arrival, basics
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of
from keras_hvd.optimizer import traced_steps
from keras_hvd.strategy import (
    extended,
    keras_layers,  # noqa: F401 - for what they replace
    keras_losses,  # noqa: F401
    keras_optimizer,
    keras_patches,
    keras_trainer,  # noqa: F401
    no_rows,
    reduction,
    user_collectives,
)


class _OneForAPlace(type):
    """Makes `Strategy` return the existing object for the same arguments.

    TensorFlow compares strategies by identity, and refuses variables of another one.
    Without this, a model from one `Strategy()` could not be used under a second one.
    """

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        made = super().__call__(*arguments, **named)
        # The arguments of a subclass are not known.
        if cls is not Strategy:
            return made
        return _there_are.setdefault(made.extended.place(), made)

    @property
    def __signature__(cls) -> inspect.Signature:
        # Of `cls` itself; mypy warns of another class' __init__.
        return inspect.signature(functools.partial(cls.__init__, None))  # type: ignore[misc]


class Strategy(tf.distribute.Strategy, metaclass=_OneForAPlace):
    """A `tf.distribute.Strategy` whose replicas are the ranks of the job.

    Each process is one replica, on one device. `run` and distributed datasets give
    plain tensors: this rank's. `reduce` and `gather` combine the ranks' tensors.
    Constructing a strategy again, with the same process set and device, returns the
    same object.

    Args:
        process_set: the ranks that train together; by default all of them.
        device: this rank's device, such as "/device:CPU:0"; by default its first
            GPU, or its CPU.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `process_set` is not a `ProcessSet`, or `device` is not a string.
        ValueError: the process set is not part of the job, this rank is not in the
            set, or the device does not exist.
        NotImplementedError: several devices or a cluster are given.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> strategy = keras_hvd.Strategy()
    >>> with strategy.scope():
    ...     weight = tf.Variable(2.0)
    >>> dataset = tf.data.Dataset.range(6, output_type=tf.float32).batch(4)
    >>> for batch in strategy.experimental_distribute_dataset(dataset):
    ...     outputs = strategy.run(lambda x: weight * x, args=(batch,))
    ...     print(strategy.reduce("MEAN", outputs, axis=0).numpy())
    3.0
    9.0
    """

    def __init__(
        self, process_set: ProcessSet = global_process_set, device: str | None = None
    ) -> None:
        arrival.require_arrived("Strategy")
        _refuse(process_set, device)
        number_of(process_set, "Strategy")
        if not process_set.included():
            raise ValueError(
                f"Strategy: rank {basics.rank()} is not in {process_set}: only its "
                "ranks can create its strategy"
            )
        place = _default_device() if device is None else _known_device(device)
        super().__init__(extended.Extended(self, process_set, place))
        _install_hooks()
        guarded_saving.install()
        traced_steps.install()

    def scope(self) -> Any:
        """Makes this the strategy of everything that is created in the block.

        Returns:
            A context manager.

        Raises:
            keras_tuner.errors.FatalRuntimeError: a tuner of KerasTuner calls it, on
                several ranks, that `keras_hvd.keras_tuner.distribute` has not made.

        Example:

        >>> import keras_hvd, tensorflow as tf
        >>> keras_hvd.init()
        >>> with keras_hvd.Strategy().scope():
        ...     weight = tf.Variable(2.0)
        """
        _refuse_search_of_one_rank(self)
        return super().scope()

    @tf.autograph.experimental.do_not_convert
    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Combines the ranks' values, and with `axis` also the elements of each.

        A value that is equal on all ranks counts once for each rank.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: this rank's value: a tensor, or a nested structure of them.
            axis: the dimension or dimensions along which each rank's tensor is reduced
                first. Their sizes may differ between ranks, and the mean is over all
                elements. None: the ranks' tensors and the result have one shape.

        Returns:
            A tensor, or a structure of them, the same on all ranks. The mean of
            integers is a float.

        Raises:
            RuntimeError: it is called in a replica context.
            TypeError: `reduce_op` is not a reduction, or a type cannot be reduced.

        Example:

        >>> import keras_hvd, tensorflow as tf
        >>> keras_hvd.init()
        >>> strategy = keras_hvd.Strategy()
        >>> strategy.reduce("MEAN", tf.constant([1.0, 2.0]), axis=0).numpy().item()
        1.5
        """
        distribute_lib._require_cross_replica_or_default_context_extended(self.extended)
        reduce_op = extended.as_reduce_op(reduce_op)
        if axis is None:
            return self.extended.reduce_nested(reduce_op, value)
        # TensorFlow converts a list of numbers to a tensor; a list of tensors is a
        # structure.
        if not any(map(_is_tensor, tf.nest.flatten(value))):
            value = tf.convert_to_tensor(value)
        flat = [tf.convert_to_tensor(each) for each in tf.nest.flatten(value)]
        given = [tf.reduce_sum(each, axis) for each in flat]
        total = tf.distribute.ReduceOp.SUM
        if reduce_op != total:
            given += [_count(each, axis) for each in flat]
        results = reduction.all_reduce(total, given, self.extended.process_set)
        sums, counts = results[: len(flat)], results[len(flat) :]
        if counts:
            sums = [tf.truediv(s, tf.cast(c, s.dtype)) for s, c in zip(sums, counts)]
        return tf.nest.pack_sequence_as(value, sums)

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Returns the tensor, which stays on the replica's only device.

        Args:
            tensor: a tensor.
            logical_device_id: 0.

        Returns:
            The tensor.

        Raises:
            NotImplementedError: `logical_device_id` is not 0.
        """
        if logical_device_id != 0:
            raise NotImplementedError(
                "experimental_assign_to_logical_device: a keras_hvd.Strategy has one "
                f"device per process, number 0; got {logical_device_id!r}"
            )
        return tensor

    def __deepcopy__(self, memo: Any) -> Strategy:
        # It represents the job, and variables compare it by identity.
        return self


# Keyed by process set and device.
_there_are: weakref.WeakValueDictionary[Any, Strategy] = weakref.WeakValueDictionary()


@functools.cache
def _install_hooks() -> None:
    """Patches Keras and TensorFlow for this strategy."""
    keras_patches.install()
    keras_optimizer.install()
    no_rows.install()
    contributions.follow(user_collectives)


def _refuse(process_set: Any, device: Any) -> None:
    """Raises an error for arguments of other strategies."""
    if isinstance(process_set, tf.distribute.cluster_resolver.ClusterResolver):
        raise NotImplementedError(
            "Strategy: parameter servers and cluster resolvers are not supported: "
            "start the ranks, one for each replica, with khvdrun, mpirun or srun"
        )
    for given in process_set, device:
        if isinstance(given, (list, tuple)):
            raise NotImplementedError(
                "Strategy: several replicas in a process are not supported: start a "
                f"process for each device, with khvdrun -np N; got {given!r}"
            )


def _refuse_search_of_one_rank(strategy: Strategy) -> None:
    """Raises if the scope is for a tuner of KerasTuner that knows of no other rank."""
    keras_tuner = sys.modules.get("keras_tuner")
    if keras_tuner is None or current_strategy.several_ranks(strategy) is None:
        return
    # KerasTuner does not pass the tuner on.
    tuner = calling(keras_tuner.engine.base_tuner.BaseTuner)
    if tuner is None or getattr(tuner, "trains_on_all_ranks", False):
        return
    name = type(tuner).__name__
    # Other errors would fail a trial, and the search would go on.
    raise keras_tuner.errors.FatalRuntimeError(
        f"a {name} builds a model under a keras_hvd.Strategy of "
        f"{strategy.num_replicas_in_sync} ranks, but each rank's {name} would search "
        f"by itself, in the same folder {tuner.project_dir!r}: create it as "
        f"keras_hvd.keras_tuner.distribute({name})(...)"
    )


def _default_device() -> str:
    """This rank's first GPU, or its CPU."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/device:{kind}:0"


def _known_device(device: str) -> str:
    """Checks that the device exists; TensorFlow would silently use the CPU instead."""
    if not isinstance(device, str):
        raise TypeError(
            f'Strategy: device must be a name, such as "/device:CPU:0"; got {device!r}'
        )
    asked = tf.DeviceSpec.from_string(device)
    known = [
        f"/device:{each.device_type}:{each.name.rpartition(':')[2]}"
        for each in tf.config.list_logical_devices()
    ]
    name = f"/device:{asked.device_type}:{asked.device_index or 0}"
    if name not in known:
        there = ", ".join(known)
        raise ValueError(
            f"Strategy: this process has no device {device!r}; it has {there}"
        )
    return name


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or isinstance(value, (tf.Variable, np.ndarray))


def _count(tensor: tf.Tensor, axis: Any) -> tf.Tensor:
    """The number of elements in each sum along an axis."""
    axes = tf.math.floormod(tf.reshape(axis, [-1]), tf.rank(tensor))
    return tf.reduce_prod(tf.gather(tf.shape(tensor, tf.int64), axes))
