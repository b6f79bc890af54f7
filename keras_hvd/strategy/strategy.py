"""keras_hvd.Strategy."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from keras_hvd import guarded_saving
from keras_hvd.runtime import basics
from keras_hvd.runtime.process_sets import ProcessSet, global_process_set, number_of
from keras_hvd.strategy import (
    extended,
    keras_data,
    keras_layers,
    keras_losses,
    keras_metrics,
    keras_optimizer,
    keras_trainer,
    reduction,
)


class _OneForAPlace(type):
    """Has a call of `Strategy` give the object that there is for its arguments.

    TensorFlow tells strategies apart by identity, and refuses variables of one under
    another: a model made under `Strategy()` here, and used under `Strategy()` there.
    """

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        made = super().__call__(*arguments, **named)
        # What a class that is derived from it adds is not known.
        if cls is not Strategy:
            return made
        return _there_are.setdefault(made.extended.place(), made)

    @property
    def __signature__(cls) -> inspect.Signature:
        # mypy warns of another class' __init__; that of `cls` itself is meant.
        make = cls.__init__  # type: ignore[misc]
        return inspect.signature(functools.partial(make, None))


class Strategy(tf.distribute.Strategy, metaclass=_OneForAPlace):
    """A `tf.distribute.Strategy` whose replicas are the ranks of the job.

    Each process is one replica, on one device. What `run` returns, and what a
    distributed dataset gives, is a plain tensor: this rank's. `reduce` and `gather`
    combine the ranks' tensors. While there is a strategy of a process set and a device,
    making another one gives the same.

    Args:
        process_set: the ranks that train together; by default all of them.
        device: where this rank computes, as in "/device:CPU:0"; by default its first
            GPU, or its CPU.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `process_set` is not a `ProcessSet`, or `device` not a string.
        ValueError: the process set is not part of the job, or this rank not of the set,
            or there is no such device.
        NotImplementedError: several devices are given, or a cluster.

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
        self,
        process_set: ProcessSet = global_process_set,
        device: str | None = None,
    ) -> None:
        basics.require_initialized("Strategy")
        _refuse(process_set, device)
        number_of(process_set, "Strategy")
        if not process_set.included():
            raise ValueError(
                f"Strategy: rank {basics.rank()} is not in {process_set}: only its "
                "ranks make a strategy of it"
            )
        place = _default_device() if device is None else _known_device(device)
        super().__init__(extended.Extended(self, process_set, place))
        _install_hooks()
        guarded_saving.install()

    @tf.autograph.experimental.do_not_convert
    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Combines the ranks' values, and with `axis` the elements of each as well.

        A value that is equal on all ranks counts as many times as there are ranks.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: this rank's value: a tensor, or a nested structure of them.
            axis: the dimension, or dimensions, along which each rank's tensor is
                reduced first; the ranks' may differ in them, and the mean is that of
                all elements. None: the ranks' tensors have one shape, which the result
                has too.

        Returns:
            A tensor, or a structure of them, the same on all ranks. The mean of
            integers is a float.

        Raises:
            RuntimeError: it is called in a replica context.
            TypeError: `reduce_op` is no reduction, or a type cannot be reduced.

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
        # A list of numbers is a tensor to TensorFlow; one of tensors is a structure.
        if not any(map(_is_tensor, tf.nest.flatten(value))):
            value = tf.convert_to_tensor(value)
        flat = [tf.convert_to_tensor(each) for each in tf.nest.flatten(value)]
        sums = [tf.reduce_sum(each, axis) for each in flat]
        process_set = self.extended.process_set
        total = tf.distribute.ReduceOp.SUM
        if reduce_op == total:
            results = reduction.all_reduce(total, sums, process_set)
            return tf.nest.pack_sequence_as(value, results)
        counts = [_count(each, axis) for each in flat]
        both = reduction.all_reduce(total, [*sums, *counts], process_set)
        pairs = zip(both[: len(flat)], both[len(flat) :], strict=True)
        return tf.nest.pack_sequence_as(value, [_quotient(*pair) for pair in pairs])

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Leaves a tensor on the one device that a replica has.

        Args:
            tensor: a tensor.
            logical_device_id: 0.

        Returns:
            The tensor.

        Raises:
            NotImplementedError: it is to go to another device.
        """
        if logical_device_id != 0:
            raise NotImplementedError(
                "experimental_assign_to_logical_device: a keras_hvd.Strategy has one "
                f"device per process, number 0; got {logical_device_id!r}"
            )
        return tensor

    def __deepcopy__(self, memo: Any) -> Strategy:
        # It stands for the job, and variables know it by its identity.
        return self


# By what they are made of.
_there_are: weakref.WeakValueDictionary[Any, Strategy] = weakref.WeakValueDictionary()


@functools.cache
def _install_hooks() -> None:
    """Replaces what Keras does otherwise under a strategy of ours.

    Raises:
        RuntimeError: this Keras lacks one of the places.
    """
    for module in (
        keras_optimizer,
        keras_losses,
        keras_metrics,
        keras_layers,
        keras_data,
        keras_trainer,
    ):
        module.install()


def _refuse(process_set: Any, device: Any) -> None:
    """Raises for what other strategies are made of."""
    if isinstance(process_set, tf.distribute.cluster_resolver.ClusterResolver):
        raise NotImplementedError(
            "Strategy: there are no parameter servers, and no cluster to resolve: "
            "khvdrun, mpirun or srun starts the ranks, each of which is a replica"
        )
    for given in process_set, device:
        if isinstance(given, (list, tuple)):
            raise NotImplementedError(
                "Strategy: several replicas in a process are not supported: start a "
                f"process for each device, with khvdrun -np N; got {given!r}"
            )


def _default_device() -> str:
    """This rank's first GPU, or its CPU."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/device:{kind}:0"


def _known_device(device: str) -> str:
    """A device that there is; TensorFlow would take the CPU for one that is missing."""
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
        raise ValueError(
            f"Strategy: this process has no device {device!r}; it has "
            f"{', '.join(known)}"
        )
    return name


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or isinstance(value, (tf.Variable, np.ndarray))


def _count(tensor: tf.Tensor, axis: Any) -> tf.Tensor:
    """How many elements of a tensor each sum along an axis is made of."""
    axes = tf.math.floormod(tf.reshape(axis, [-1]), tf.rank(tensor))
    return tf.reduce_prod(tf.gather(tf.shape(tensor, tf.int64), axes))


def _quotient(total: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    return tf.truediv(total, tf.cast(count, total.dtype))
