"""Variables of TensorFlow and Keras that a training goes on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import keras

from keras_hvd.backends.current import framework, process
from keras_hvd.backends.reduce_op import Sum
from keras_hvd.callbacks.model_parts import layers_of, weights_of
from keras_hvd.elastic import values
from keras_hvd.elastic.state import ObjectState
from keras_hvd.job import basics
from keras_hvd.optimizer.nested_optimizers import leaf_optimizers, model_optimizers


class TensorFlowState(ObjectState):
    """Variables, and Python objects, that a training goes on from.

    A commit copies the variables' values into the host's memory.

    Args:
        variables: `tf.Variable`s or Keras variables, alike on all ranks.
        session: None; variables of TensorFlow 2 need no session.
        kwargs: names and values of Python objects, as for `ObjectState`.

    Raises:
        TypeError: `session` is given.
        ValueError: there are no variables, or a name is that of a method.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> weights = tf.Variable([1.0, 2.0])
    >>> state = keras_hvd.elastic.TensorFlowState([weights], step=0)
    >>> _ = weights.assign([8.0, 9.0])
    >>> state.restore()
    >>> weights.numpy()
    array([1., 2.], dtype=float32)
    """

    def __init__(
        self,
        variables: Iterable[Any] | None = None,
        session: None = None,
        **kwargs: Any,
    ) -> None:
        if session is not None:
            raise TypeError(
                f"{type(self).__name__}: session must be None, because sessions are of "
                f"TensorFlow 1; got {session!r}"
            )
        self.variables = list(variables or ())
        if not self.variables:
            raise ValueError(
                f"{type(self).__name__} needs the variables that it is to keep: "
                "TensorFlow 2 has no list of them all"
            )
        super().__init__(**kwargs)

    def save(self) -> None:
        # What a GPU computes after another rank's death is garbage.
        framework.guarded_saving.require_good_steps()
        present = [*map(framework.value_on_host, self.variables)]
        super().save()
        # At last, so that a commit that fails changes nothing.
        kept = getattr(self, "_values", [None] * len(present))
        self._values = [*map(values.copied, present, kept)]

    def restore(self) -> None:
        # From here on variables are known to have whole values, and may be written to
        # files again in the next job.
        process.note_failure()
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def broadcast(self, root_rank: int) -> None:
        mine = [*map(framework.value_on_host, self.variables)]
        places = [*range(len(mine))]
        if self._are_even:
            # They have the same, but for what each rank has of its own.
            places = values.differing(mine, root_rank)
        received = values.from_root([mine[place] for place in places], root_rank)
        if self._has_synced:
            # Nothing changes before all has come: the root may die.
            received = iter([(number, each.copy()) for number, each in received])
        for number, value in received:
            self.variables[places[number]].assign(value)
        framework.equal_start.note_given(self.variables)
        # Also those that are as they were, after a job that failed before it had begun.
        framework.half_applied.receive(self.variables, [False] * len(self.variables))
        super().broadcast(root_rank)

    def _parts(self) -> list[str]:
        return [*map(_described, self.variables), *super()._parts()]


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer, and Python objects that a training goes on from.

    That is all weights, the seeds of random layers, which differ by the rank, and the
    optimizer's state.

    Args:
        model: a model that has its variables.
        optimizer: the optimizer, if it is not compiled into the model.
        backend: without effect; as in Horovod.
        kwargs: names and values of Python objects, as for `ObjectState`; `epoch=0` and
            `batch=0` are what the callbacks count.

    Raises:
        ValueError: the model has no variables yet, or there is no optimizer; or one of
            several has no variables yet; or a name is that of a method.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    >>> state = keras_hvd.elastic.TensorFlowKerasState(model, epoch=0)
    >>> model.set_weights([np.ones((1, 1)), np.ones(1)])
    >>> state.commit()
    >>> history = model.fit(np.ones((4, 1)), np.zeros(4), verbose=0)
    >>> state.restore()
    >>> [weight.tolist() for weight in model.get_weights()]
    [[[1.0]], [1.0]]
    """

    # What users have called, where that is not the class.
    called_by = ""

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> None:
        kind = self.called_by or type(self).__name__
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        self.backend = backend
        _require_whole(kind, model, self.optimizer)
        optimizers = [optimizer] if optimizer else model_optimizers(model)
        _build(kind, optimizers, model)
        of_optimizers = [each for one in optimizers for each in one.variables]
        self._accumulators = _accumulators_of(optimizers)
        self._schedules = [*map(_schedule_of, optimizers)]
        super().__init__([*_variables_of(model), *of_optimizers], **kwargs)

    def broadcast(self, root_rank: int) -> None:
        # Not the root's: each rank has added up gradients of its own data.
        accumulated = self._accumulated()
        super().broadcast(root_rank)
        for variable, value in zip(self._accumulators, accumulated, strict=True):
            variable.assign(value)
        # The root draws on as it did, and no two ranks draw the same.
        distance = basics.rank() - root_rank
        for layer in layers_of(self.model):
            for generator in getattr(layer, "_seed_generators", ()):
                seed = generator.state
                framework.random_numbers.continue_with_rank(generator, seed, distance)

    def _parts(self) -> list[str]:
        return [*super()._parts(), *self._schedules]

    def _accumulated(self) -> list[Any]:
        """The averages of what the ranks have accumulated that are furthest."""
        if not self._accumulators:
            return []
        own = [keras.ops.convert_to_tensor(each) for each in self._accumulators]
        if self._is_behind:
            own = [keras.ops.zeros_like(each) for each in own]
        count = keras.ops.convert_to_tensor(float(not self._is_behind))
        *sums, total = framework.grouped_allreduce(
            [*own, count], op=Sum, name="keras_hvd/elastic/accumulated"
        )
        return [each / keras.ops.cast(total, each.dtype) for each in sums]


class KerasState(TensorFlowKerasState):
    """A Keras model, its optimizer, and Python objects that a training goes on from.

    That is all weights, the seeds of random layers, which differ by the rank, and the
    optimizer's state.

    Args:
        model: a model that has its variables.
        optimizer: the optimizer, if it is not compiled into the model.
        kwargs: names and values of Python objects, as for `ObjectState`; `epoch=0` and
            `batch=0` are what the callbacks count.

    Raises:
        ValueError: the model has no variables yet, or there is no optimizer; or one of
            several has no variables yet; or a name is that of a method.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> state = keras_hvd.elastic.KerasState(model, epoch=0)
    >>> @keras_hvd.elastic.run
    ... def train(state):
    ...     model.fit(np.ones((4, 1)), np.zeros(4), verbose=0,
    ...         initial_epoch=state.epoch, epochs=3, callbacks=[
    ...             keras_hvd.elastic.UpdateEpochStateCallback(state),
    ...             keras_hvd.elastic.CommitStateCallback(state)])
    >>> train(state)
    >>> state.epoch
    3
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, optimizer, **kwargs)


def _schedule_of(optimizer: keras.optimizers.Optimizer) -> str:
    """Describes a learning rate that is no variable: all ranks need the same."""
    for leaf in leaf_optimizers(optimizer):
        rate = getattr(leaf, "_learning_rate", None)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            # A schedule of one's own may have no configuration.
            with contextlib.suppress(NotImplementedError):
                return f"the schedule {type(rate).__name__} of {rate.get_config()}"
    return "a learning rate without a schedule"


def _described(variable: Any) -> str:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return f"a {dtype} variable of shape {[*variable.shape]}"


def _variables_of(model: keras.Model) -> list[Any]:
    """A model's weights, and then what else it has, which is its seeds.

    Metrics are not among them: ranks that have trained have more of them than others.
    """
    weights = weights_of(model)
    known = {id(each) for each in weights}
    return [*weights, *(each for each in model.variables if id(each) not in known)]


def _require_whole(kind: str, model: keras.Model, optimizer: Any) -> None:
    if not model.built:
        raise ValueError(
            f"{kind}: model {model.name!r} has no variables yet: call "
            "model.build(input_shape), or the model on a batch, before"
        )
    if optimizer is None:
        raise ValueError(
            f"{kind}: model {model.name!r} is not compiled: give the optimizer too"
        )


def _build(
    kind: str, optimizers: list[keras.optimizers.Optimizer], model: keras.Model
) -> None:
    """Makes the optimizers' variables, which a rank that is new must have too."""
    unbuilt = [each for each in optimizers if not each.built]
    if unbuilt and len(optimizers) > 1:
        # Each may be for some of the variables only.
        raise ValueError(
            f"{kind}: optimizer {unbuilt[0].name!r}, one of several of model "
            f"{model.name!r}, has no variables yet: call "
            "optimizer.build(variables) before"
        )
    for optimizer in unbuilt:
        named = keras.name_scope(optimizer.name, caller=optimizer)
        # As Keras itself builds it in `fit`.
        with model.distribute_strategy.scope(), named:
            optimizer.build(model.trainable_variables)


def _accumulators_of(optimizers: list[keras.optimizers.Optimizer]) -> list[Any]:
    """Those of gradients that wait for the next update."""
    leaves = [leaf for each in optimizers for leaf in leaf_optimizers(each)]
    accumulators = [getattr(leaf, "_accumulated_gradients", ()) for leaf in leaves]
    return [each for of_one in accumulators for each in of_one if each is not None]
