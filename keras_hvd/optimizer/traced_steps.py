"""Checks that the step which Keras runs for a model reduces its gradients.

Keras keeps a model's step once it is traced. An optimizer distributed afterwards, or a
variable made local, has no effect on it. So before Keras runs a step again, it is made
anew if the optimizer has changed since. While a step is traced, or first runs, its
reductions are counted: the configuration does not tell what a step does.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import keras

from keras_hvd.backends.current import framework
from keras_hvd.job import basics, later_jobs, log
from keras_hvd.optimizer import distributed_class, retracing
from keras_hvd.optimizer.distributed_class import is_distributed
from keras_hvd.optimizer.nested_optimizers import (
    model_leaf_optimizers,
    model_optimizers,
)
from keras_hvd.optimizer.retracing import trace_anew_in_another_job

STANDS_FOR = "_keras_hvd_stands_for"
"""An attribute of a stand-in for a model's step: the step itself."""

# Attributes of a model, which Keras must not track.
_STEP = "_keras_hvd_step"
_REFUSES = "_keras_hvd_refuses"


@dataclasses.dataclass
class _Step:
    """The function that Keras runs for a model, and the facts about it."""

    function: Callable[..., Any]
    # The model's optimizers when it was made, in full and in short.
    optimizers: list[Any]
    changes: tuple[Any, ...]
    # Whether its gradients are reduced; None until that is known.
    reduces: bool | None = None


@functools.cache
def install() -> None:
    """Makes Keras check the steps of all models, if a job has several ranks.

    Example:

    >>> install()
    """
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(self, force=False):
        if not basics.is_initialized():
            return plain(self, force)
        trace_anew_in_another_job(self)
        if basics.size() == 1 and not later_jobs.are_possible():
            return plain(self, force)
        return _watch(self, functools.partial(plain, self), force)

    keras.Model.make_train_function = make_train_function
    for name in ("make_test_function", "make_predict_function"):
        _trace_anew_before(name)
    retracing.install()
    framework.traced_updates.install()
    atexit.register(_warn_of_separate_trainings)


def _trace_anew_before(name: str) -> None:
    plain = getattr(keras.Model, name)

    @functools.wraps(plain)
    def make(self, force=False):
        if basics.is_initialized():
            trace_anew_in_another_job(self)
        return plain(self, force)

    setattr(keras.Model, name, make)


def require_reducing(model: keras.Model) -> None:
    """Raises RuntimeError if a model does not train on all ranks, now or in its step.

    The reductions of its own `train_step` are known only once that has been traced.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> require_reducing(model)
    Traceback (most recent call last):
    RuntimeError: model ... its optimizer SGD 'sgd' is not distributed...
    """
    install()
    vars(model)[_REFUSES] = True
    if model.train_function is not None:
        # A model may make its step in a way of its own.
        _watch(model, model.make_train_function)
    step = _step_of(model)
    reduces = None if step is None else step.reduces
    if reduces or (reduces is None and _is_known_later(model)):
        return
    require_distributed(model)


def require_distributed(model: keras.Model) -> None:
    """Raises RuntimeError unless the model's optimizers reduce their gradients."""
    optimizers = model_optimizers(model)
    plain = [each for each in optimizers if not is_distributed(each)]
    if (optimizers and not plain) or not _trains(model):
        return
    # compile() creates an optimizer that a train_step with its own never uses.
    if _has_own_step(model) and plain == [model.optimizer] and len(optimizers) > 1:
        return
    what = ", ".join(f"{type(each).__name__} {each.name!r}" for each in plain)
    raise RuntimeError(
        f"model {model.name!r} would train without reducing gradients over the "
        f"{basics.size()} ranks: "
        + (f"its optimizer {what} is not distributed" if plain else "no optimizer")
        + f". {_remedy(model)}"
    )


def _watch(
    model: keras.Model, make: Callable[..., Any], force: bool = False
) -> Callable[..., Any] | None:
    """Makes a model's step, or makes it anew, and watches its first run."""
    step = _step_of(model)
    if step is None:
        is_stale = model.train_function is not None
    else:
        is_stale = _has_changed(model, step)
    result = make(force=True) if force or is_stale else make()
    step = _step_of(model)
    if step is None:
        function = model.train_function
        step = _Step(function, _optimizers(model), _changes(model))
        vars(model)[_STEP] = step
    if step.reduces is None and framework.current_strategy.of_model(model) is None:
        model.train_function = _FirstRun(model, step)
    return result


def _step_of(model: keras.Model) -> _Step | None:
    """The facts about a model's present step."""
    function = getattr(model.train_function, STANDS_FOR, model.train_function)
    if isinstance(function, _FirstRun):
        return function.step
    step = vars(model).get(_STEP)
    return step if step is not None and step.function is function else None


def _has_changed(model: keras.Model, step: _Step) -> bool:
    """Whether the optimizers have changed since a step was made."""
    changes = _changes(model)
    if step.changes == changes:
        return False
    step.changes = changes
    return step.optimizers != _optimizers(model)


def _changes(model: keras.Model) -> tuple[Any, ...]:
    """A value that differs if the model's optimizers may have changed; quick to get."""
    return distributed_class.changes(), type(model.optimizer)


def _optimizers(model: keras.Model) -> list[Any]:
    return [distributed_class.held_by_traces(each) for each in model_optimizers(model)]


class _FirstRun:
    """Stands for a model's step until its first run, and watches its reductions."""

    def __init__(self, model: keras.Model, step: _Step):
        self._model = model
        self.step = step
        retracing.copy_held(step.function, self)

    def __call__(self, iterator: Any) -> Any:
        model, step = self._model, self.step
        tensors, state = basics.counters().tensors, _state(model)
        with framework.reductions.watching() as counts:
            logs = step.function(iterator)
        sent = basics.counters().tensors - tensors
        # A function inside the step that was traced before counts nothing.
        is_old = counts == framework.reductions.Counts() and sent > 0
        if is_old or _reduces(model, counts, sent):
            step.reduces = True
        elif _state(model) != state:
            step.reduces = False
        elif model.run_eagerly:
            # It has only accumulated gradients.
            return logs
        model.train_function = step.function
        if step.reduces:
            _trainings.together = True
        elif step.reduces is False:
            _refuse_or_remember(model)
        return logs


def _state(model: keras.Model) -> tuple[Any, ...]:
    """Values that an update changes. In Keras' own step, its optimizer counts them."""
    # Variables, also of any tf.distribute strategy; tensors where gradients accumulate.
    iterations = [leaf.iterations for leaf in model_leaf_optimizers(model)]
    updates = [int(keras.ops.cast(each, "int64")) for each in iterations]
    own = _has_own_step(model)
    return updates, framework.equal_start.digest(
        model.trainable_variables
    ) if own else None


def _reduces(
    model: keras.Model, counts: framework.reductions.Counts, sent: int
) -> bool:
    if counts.handed_over or not _trains(model) or _is_alone(model):
        return True
    expected = sum(map(framework.reductions.elements_of, model.trainable_variables))
    if max(counts.elements, counts.in_forward_pass) >= expected:
        return True
    if not counts.elements:
        return False
    # A function inside the step may reduce several gradients, and is traced once.
    if basics.rank() == 0 and sent < len(model.trainable_variables):
        log.warn(
            f"the step of model {model.name!r} reduces {counts.elements} numbers over "
            f"the ranks, and its gradients are {expected}: if it does not reduce all "
            "gradients, the ranks' weights drift apart. A keras_hvd."
            "DistributedOptimizer or DistributedGradientTape reduces all of them",
            stacklevel=4,
        )
    return True


def _trains(model: keras.Model) -> bool:
    return not model.built or bool(model.trainable_variables)


def _is_alone(model: keras.Model) -> bool:
    """Whether no optimizer of a model has another rank to reduce with."""
    distributed = filter(is_distributed, model_leaf_optimizers(model))
    reductions = [each._settings.reduction for each in distributed]
    return bool(reductions) and all(each.is_alone() for each in reductions)


def _has_own_step(model: keras.Model) -> bool:
    kind, plain = type(model), keras.Model
    return (
        kind.train_step is not plain.train_step
        or kind.make_train_function is not plain.make_train_function
    )


def _is_known_later(model: keras.Model) -> bool:
    """Whether only a model's step can tell if its gradients are reduced.

    A `train_step` of its own may do so with a tape, or with collectives. A model that
    is not built may have nothing to train.
    """
    if not model.built:
        return True
    optimizers = model_optimizers(model)
    return _has_own_step(model) and not any(map(is_distributed, optimizers))


@dataclasses.dataclass
class _Trainings:
    """The trainings of this process."""

    together: bool = False
    # The warning about the first model that this rank has trained by itself.
    alone: str = ""


_trainings = _Trainings()


def _refuse_or_remember(model: keras.Model) -> None:
    if vars(model).get(_REFUSES):
        require_distributed(model)
    if any(map(is_distributed, model_optimizers(model))):
        raise RuntimeError(
            f"model {model.name!r} trains without reducing gradients over the "
            f"{basics.size()} ranks: its step does not use its distributed optimizer, "
            "or was traced before that was distributed. Distribute the optimizer "
            "first, and call compile() after that"
        )
    if not _trainings.alone and basics.rank() == 0 and basics.size() > 1:
        _trainings.alone = (
            f"each of the {basics.size()} ranks has trained a model {model.name!r} of "
            f"its own: nothing has reduced gradients over them. {_remedy(model)}"
        )


def _remedy(model: keras.Model) -> str:
    # Keras has it on TensorFlow alone.
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None and not framework.current_strategy.is_ours(strategy):
        return (
            f"It was made in the scope of a {type(strategy).__name__}, which knows of "
            "this process only: use keras_hvd.Strategy() in its place."
        )
    under_strategy = (
        "It was made outside of the scope of the keras_hvd.Strategy: make it, and "
        "compile it, inside of `with strategy.scope():`. Or without a strategy: "
        if framework.current_strategy.was_made()
        else ""
    )
    return (
        f"{under_strategy}Pass optimizer=keras_hvd.DistributedOptimizer(...) to "
        "compile(), or use keras_hvd.DistributedGradientTape in a train_step of your "
        "own; a model that was copied or loaded needs its optimizer distributed again "
        "(or keras_hvd.load_model)."
    )


def _warn_of_separate_trainings() -> None:
    """At Python's end, warns if ranks that could train together never did."""
    if not _trainings.alone or _trainings.together or hasattr(sys, "last_value"):
        return
    if not framework.reductions.handed_over():
        log.warn(_trainings.alone)
