"""Work that every keras_hvd callback does besides its own.

The first of them puts two companions around the callbacks of `fit`'s list.
`_BeforeOthers`, at the front, does the work that all callbacks must find done (moving
statistics, verbosity). `_AfterOthers`, at the end, does the work that depends on all of
them (restored state, `stop_training`), whatever order the user chose.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import keras

from keras_hvd.backends.automatic_names import without_number
from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.backends.current import framework
from keras_hvd.callbacks import stopping, training_progress
from keras_hvd.callbacks.meeting import meet
from keras_hvd.callbacks.model_parts import layers_of
from keras_hvd.callbacks.training_progress import progress
from keras_hvd.callbacks.weights import (
    SharedWeights,
    average_statistics,
    process_sets_of,
)
from keras_hvd.callbacks.writers import callbacks_in, let_write, writers_among
from keras_hvd.job import basics, log, said_once
from keras_hvd.job.objects import allgather_object
from keras_hvd.optimizer.distributed_class import is_distributed, shared_settings
from keras_hvd.optimizer.nested_optimizers import model_leaf_optimizers
from keras_hvd.optimizer.retracing import trace_anew_in_another_job
from keras_hvd.optimizer.traced_steps import require_reducing
from keras_hvd.recording import facts, files, recorder
from keras_hvd.recording.phases import CALLBACKS, REST, VALIDATION

# Users see this name if a rank stalls here.
_BEGINNING = "keras_hvd/beginning of fit"


class DistributedCallback(keras.callbacks.Callback):
    """Base class of keras_hvd's callbacks.

    At size 1 it only counts for a recording, makes Keras trace another job's steps
    anew, and lets callbacks write that another job has kept from it.
    """

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trace_anew_in_another_job(model)
        if basics.size() > 1:
            framework.guarded_saving.install()
            framework.random_numbers.install(is_distributed)
            surround(enclosing_list(self), model)
            return
        called_by = calling(keras.callbacks.CallbackList)
        if called_by is None:
            return
        let_write(called_by.callbacks, True)
        if recorder.current() is not None:
            _count(called_by.callbacks, model)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Makes Keras end batches in the thread that trains.

        On torch it would otherwise call callbacks from another one, unless one of the
        list has such a method, and ranks would agree in another order than they train.
        """
        super().on_train_batch_end(batch, logs)

    def on_epoch_over(self) -> None:
        """Runs on every rank before any callback's `on_epoch_end`, if size > 1.

        Ranks have waited for each other by then: to time a rank's own steps, take the
        time in `on_train_batch_end`.
        """

    def on_ranks_ready(self) -> None:
        """Runs on every rank after all callbacks' `on_train_begin`, if size > 1."""

    def check_order(self, others: list[keras.callbacks.Callback], place: int) -> None:
        """Raises if this callback, at `place`, must come before one of the others.

        Runs on every rank at the beginning of training, if size > 1.
        """

    def locals_among(self, variables: list[keras.Variable]) -> set[int]:
        """The `identity` of each variable that stays different on each rank."""
        return set()


class _Counting(keras.callbacks.Callback):
    """Counts steps of training."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = _Steps()
        self._before_test = REST

    def on_train_batch_end(self, batch, logs=None):
        progress.count(self.model, self.steps.count(self.model))

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.begin(self.model)
        progress.begin(epoch)

    def on_test_begin(self, logs=None):
        self._before_test = progress.pause(self.model, VALIDATION)

    def on_test_end(self, logs=None):
        recorder.enter(self._before_test)

    def on_epoch_end(self, epoch, logs=None):
        progress.pause(self.model, CALLBACKS)
        if basics.size() == 1:
            _note_epoch(epoch, logs)

    def on_train_end(self, logs=None):
        recorder.enter(REST)


class _BeforeOthers(_Counting):
    """At the front of the list: work that the other callbacks must find done."""

    def __init__(self, others: list[keras.callbacks.Callback], weights: SharedWeights):
        super().__init__()
        self._others = others
        self._weights = weights
        self._statistics_differ = False
        self._epoch = 0
        self._meets = False

    def set_params(self, params: dict[str, Any] | None) -> None:
        # The same dict goes to all callbacks, the progress bar among them.
        if params and said_once.hides():
            params["verbose"] = 0
        super().set_params(params)

    def on_train_begin(self, logs=None):
        # A keras_hvd.Strategy reduces by itself.
        if framework.current_strategy.of_model(self.model) is None:
            require_reducing(self.model)
        _note_settings(self.model)
        for place, callback in enumerate(self._others):
            if isinstance(callback, DistributedCallback):
                callback.check_order(self._others, place)
        _warn_of_unsynchronized(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        self._statistics_differ = True
        self._epoch = epoch
        self._meets = True
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs=None):
        super().on_test_begin(logs)
        self._meet()
        self._average_statistics()

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self._meet()
        self._average_statistics()
        for callback in self._others if logs is not None else ():
            if isinstance(callback, DistributedCallback):
                callback.on_epoch_over()

    def _meet(self):
        """Waits, once an epoch, for ranks that are still in a step.

        Ranks in a step would otherwise wait for ever for the gradients of this rank,
        whose data has ended.
        """
        if not self._meets:
            return
        self._meets = False
        framework.join()
        of_ranks = meet(
            (self.steps.made, _trained_with(self.model), self._weights.checksums())
        )
        made = f"made in epoch {self._epoch + 1}"
        _require_same_steps([each[:2] for each in of_ranks], made)
        self._weights.after_steps([each[2] for each in of_ranks], self._epoch)

    def _average_statistics(self):
        if not self._statistics_differ:
            return
        self._statistics_differ = False
        average_statistics(self.model)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self._weights.before_end()


def _note_settings(model: keras.Model) -> None:
    """Adds the settings of a model's optimizer to the recording, on rank 0."""
    own = recorder.current()
    if own is None or basics.rank() != 0:
        return
    for leaf in filter(is_distributed, model_leaf_optimizers(model)):
        compression = shared_settings(leaf)["compression"]
        is_plain = compression == NoneCompressor.__name__
        facts.add(
            own.folder / files.FACTS,
            {
                facts.COMPRESSION: facts.NO_COMPRESSION if is_plain else compression,
                facts.ACCUMULATION: str(leaf.gradient_accumulation_steps or 1),
            },
        )


def _note_epoch(epoch: int, logs: dict[str, Any] | None) -> None:
    """Adds an epoch to the recording, on rank 0."""
    own = recorder.current()
    if own is not None and own.epochs is not None:
        own.epochs.add(epoch + 1, logs or {})


class _Steps:
    """The number of steps that this rank has made in an epoch.

    With `steps_per_execution` Keras does not say how many steps of an execution had
    data, but the optimizer counts them.
    """

    def __init__(self) -> None:
        self.made = 0
        # Whether the data ended within an execution.
        self.over = False
        self._iterations = 0

    def begin(self, model: keras.Model) -> None:
        self.made, self.over = 0, False
        self._iterations = _iterations(model)

    def count(self, model: keras.Model) -> int:
        """Counts the steps of an execution, and returns how many they are."""
        at_most = model.steps_per_execution
        if at_most == 1:
            self.made += 1
            return 1
        before, self._iterations = self._iterations, _iterations(model)
        # A step that updates without an optimizer is not counted.
        steps = self._iterations - before or at_most
        self.made += steps
        self.over = steps < at_most
        return steps


def _iterations(model: keras.Model) -> int:
    iterations = getattr(model.optimizer, "iterations", 0)
    return int(iterations)


class _AfterOthers(keras.callbacks.Callback):
    """At the end of the list: work that depends on all other callbacks."""

    def __init__(
        self,
        callback_list: keras.callbacks.CallbackList,
        steps: _Steps,
        weights: SharedWeights,
    ):
        super().__init__()
        self._list = callback_list
        self._steps = steps
        self._weights = weights
        self._stopping = stopping.Stopping()

    def on_train_begin(self, logs=None):
        needs = stopping.needs(
            each for each in self._list.callbacks if not isinstance(each, _OURS)
        )
        params = self.params or {}
        steps, epochs = params.get("steps"), params.get("epochs")
        trained_with, suspects = _trained_with(self.model), self._weights.suspects()
        writers = writers_among(self._list.callbacks)
        mine = needs, epochs, steps, trained_with, suspects, writers
        ranks = allgather_object(mine, name=_BEGINNING)
        _require_same_epochs([each[1] for each in ranks])
        _require_same_steps([each[2:4] for each in ranks], "to make in an epoch")
        _warn_of_no_writer([each[5] for each in ranks])
        self._weights.begin([each[4] for each in ranks])
        self._stopping.begin(each[0] for each in ranks)
        for callback in self._list.callbacks:
            if isinstance(callback, DistributedCallback):
                callback.on_ranks_ready()

    def on_train_batch_end(self, batch, logs=None):
        # If data has run out here, other ranks may be in a step and wait for this rank.
        if not self._steps.over:
            self._stopping.after_batch(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        if basics.rank() == 0:
            training_progress.show(self._list.callbacks)
        self._weights.before_steps(epoch)

    def on_epoch_end(self, epoch, logs=None):
        _require_same_decisions(self.model, self._list.callbacks, self._weights)
        self._stopping.agree(self.model)
        framework.equal_start.warn_of_difference()
        # MetricAverage has replaced them.
        _note_epoch(epoch, logs)

    def on_train_end(self, logs=None):
        self._stopping.end()
        self._weights.after_end()


# These do not stop training by themselves.
_OURS = (DistributedCallback, _BeforeOthers, _AfterOthers)


def _trained_with(model: keras.Model) -> list[list[int]]:
    """The sets of ranks that the model's gradients are reduced in."""
    return [each.ranks for each in process_sets_of(model)]


def _require_same_epochs(epochs: list[int | None]) -> None:
    """Raises, on every rank, if the ranks have different numbers of epochs."""
    if len({*epochs}) > 1:
        raise RuntimeError(
            f"fit has epochs={_by_rank(epochs)}: the ranks with more would wait for "
            "the others. Give all ranks the same number"
        )


def _require_same_steps(
    ranks: list[tuple[int | None, list[list[int]]]], what: str
) -> None:
    """Raises, on every rank, if ranks that train together make different steps.

    `ranks` has each rank's number of steps, None if unknown, and its sets of ranks.
    """
    steps = [each[0] for each in ranks]
    for _, sets in ranks:
        for members in sets:
            known = [steps[rank] for rank in members if steps[rank] is not None]
            if len({*known}) > 1:
                raise RuntimeError(
                    f"the ranks have different numbers of steps {what}: "
                    f"{_by_rank(steps, members)}. Those with more would wait for the "
                    "gradients of the others. Give each rank as much data, with "
                    "keras_hvd.data.even(dataset), keras_hvd.data.distribute() or "
                    "arrays of the same length, or the same steps_per_epoch to fit"
                )


def _warn_of_no_writer(of_ranks: list[list[str]]) -> None:
    """Warns, on every rank, of callbacks that only other ranks than 0 have."""
    for name in sorted(set().union(*of_ranks).difference(of_ranks[0])):
        there = [rank for rank, names in enumerate(of_ranks) if name in names]
        log.warn(
            f"fit has the callback {name} on rank {', '.join(map(str, there))}, but "
            "not on rank 0, which alone writes: nothing will be written. Give it to "
            "rank 0, or to all ranks",
            stacklevel=2,
        )


def _by_rank(values: list[Any], ranks: Iterable[int] | None = None) -> str:
    ranks = range(len(values)) if ranks is None else ranks
    return ", ".join(
        f"{'unknown' if values[rank] is None else values[rank]} on rank {rank}"
        for rank in ranks
    )


def _require_same_decisions(
    model: keras.Model,
    callbacks: list[keras.callbacks.Callback],
    weights: SharedWeights,
) -> None:
    """Raises, on every rank, if callbacks decided by the logs of one rank only.

    Otherwise the ranks' weights would drift apart silently. Weights that a callback of
    only some ranks would restore, all ranks get when they are restored.
    """
    decisions: dict[str, str] = {}
    for leaf in model_leaf_optimizers(model):
        if isinstance(leaf._learning_rate, keras.Variable):
            what = f"the learning rate of optimizer {without_number(leaf.name)!r}"
            # The model may have others of that name.
            what += f" (number {len(decisions) + 1}) is" if decisions else " is"
            decisions[what] = f"{float(leaf.learning_rate):g}"
    for each in callbacks:
        restores = getattr(each, "restore_best_weights", False)
        if restores and getattr(each, "best_weights", None) is not None:
            what = f"the weights that {type(each).__name__} would restore are those"
            decisions[what] = f"of epoch {each.best_epoch + 1}"
    of_ranks = allgather_object(decisions, name="keras_hvd/decisions")
    for what in {key: None for each in of_ranks for key in each}:
        values = [each.get(what) for each in of_ranks]
        decided = [rank for rank, value in enumerate(values) if value is not None]
        if len({values[rank] for rank in decided}) > 1:
            raise RuntimeError(
                f"{what} {_by_rank(values, decided)}: the ranks' weights would drift "
                "apart. Give the same callbacks to all ranks, and put "
                "keras_hvd.callbacks.MetricAverage() before those that decide by the "
                "logs, so that all see the same"
                f"{weights.about_callbacks()}."
            )


def surround(callback_list: keras.callbacks.CallbackList, model: keras.Model) -> None:
    """Puts the two companions around the callbacks of a list, once."""
    callbacks = callback_list.callbacks
    if any(isinstance(each, _BeforeOthers) for each in callbacks):
        return
    _require_before_tensorboard(callbacks)
    let_write(callbacks, basics.rank() == 0)
    others = list(callbacks)
    weights = SharedWeights(model, others, lambda each: _locals_among(others, each))
    before = _BeforeOthers(others, weights)
    after = _AfterOthers(callback_list, before.steps, weights)
    # In place: Keras is iterating over this list. As the list grows at the front, Keras
    # meets the calling callback a second time.
    callbacks[:] = [before, *others, after]
    for companion in (before, after):
        companion.set_model(model)


def _count(callbacks: list[keras.callbacks.Callback], model: keras.Model) -> None:
    """Puts the counting callback at the front of a list, once."""
    if any(isinstance(each, _Counting) for each in callbacks):
        return
    counting = _Counting()
    # In place, as in `surround`.
    callbacks.insert(0, counting)
    counting.set_model(model)


def _require_before_tensorboard(callbacks: list[keras.callbacks.Callback]) -> None:
    """TensorBoard writes as soon as it gets the model, before training begins."""
    kinds = (DistributedCallback, keras.callbacks.TensorBoard)
    first = next((each for each in callbacks if isinstance(each, kinds)), None)
    if not isinstance(first, keras.callbacks.TensorBoard):
        return
    raise ValueError(
        f"put keras_hvd's callbacks before {described(first)} in the list of "
        "callbacks: they keep other ranks than 0 from writing"
    )


def described(callback: keras.callbacks.Callback) -> str:
    """The name of a callback, and its functions or Keras class if the name says little.

    Example:

    >>> described(keras.callbacks.LambdaCallback(on_epoch_end=print))
    'LambdaCallback(on_epoch_end=print)'
    """
    kind = type(callback)
    if kind is keras.callbacks.LambdaCallback:
        hooks = [
            f"{name}={_place_of(function)}"
            for name, function in vars(callback).items()
            if name.startswith("on_")
        ]
        return f"{kind.__name__}({', '.join(hooks)})"
    inner = [type(each).__name__ for each in callbacks_in(callback)]
    if inner:
        return f"{kind.__name__} (around {', '.join(inner)})"
    if kind.__module__.startswith(("keras.", "keras_hvd.")):
        return kind.__name__
    # The Keras classes that a subclass has as bases.
    of_keras = [each for each in kind.__mro__ if each.__module__.startswith("keras.")]
    if of_keras[:1] in ([], [keras.callbacks.Callback]):
        return kind.__name__
    return f"{kind.__name__} (a {of_keras[0].__name__})"


def _place_of(function: Any) -> str:
    """The name of a function, and its place in the code."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    file = os.path.basename(code.co_filename)
    return f"{name} at {file}:{code.co_firstlineno}"


def _locals_among(
    callbacks: list[keras.callbacks.Callback], variables: list[keras.Variable]
) -> set[int]:
    ours = [each for each in callbacks if isinstance(each, DistributedCallback)]
    return {identity for each in ours for identity in each.locals_among(variables)}


def enclosing_list(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList:
    """The CallbackList that is calling this callback's `set_model`."""
    # Keras does not pass it on.
    found = calling(keras.callbacks.CallbackList)
    if found is not None:
        return found
    raise RuntimeError(
        f"{type(callback).__name__} works together with the other callbacks of its "
        "keras.callbacks.CallbackList, which fit() makes; in a loop of your own, make "
        "one with keras.callbacks.CallbackList(callbacks, model=model)"
    )


def calling(kind: type) -> Any:
    """The object of a class among the callers' `self`; None if there is none.

    >>> class Caller:
    ...     def call(self):
    ...         return calling(Caller) is self
    >>> Caller().call(), calling(Caller)
    (True, None)
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None


def _warn_of_unsynchronized(model: keras.Model) -> None:
    if framework.current_strategy.of_model(model) is not None:
        return
    names = [
        layer.name
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and getattr(layer, "synchronized", False)
    ]
    if names and basics.rank() == 0:
        log.warn(
            f"{', '.join(names)}: BatchNormalization(synchronized=True) synchronizes "
            "under a tf.distribute strategy only. Here each rank normalizes by its own "
            "batch; moving statistics are averaged over ranks after each epoch. "
            "keras_hvd.SyncBatchNormalization normalizes by all ranks' batches.",
            stacklevel=2,
        )
