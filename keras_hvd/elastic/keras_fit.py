"""`fit` in one job after another: its callbacks begin once, and go on."""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_hvd.callbacks.backup_and_restore import BackupAndRestore
from keras_hvd.callbacks.coordination import DistributedCallback
from keras_hvd.callbacks.writers import WRITERS
from keras_hvd.data.position import Position
from keras_hvd.elastic import world
from keras_hvd.elastic.loop import run
from keras_hvd.elastic.rehearsal import name_alike, rehearse
from keras_hvd.elastic.tensorflow_state import KerasState
from keras_hvd.job import arrival, basics
from keras_hvd.job.objects import broadcast_object

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic)

# What Keras sets in each `fit`.
_OF_KERAS = {"model", "_model", "params", "validation_data"}

# They would go back to what an earlier run of the script has left.
_RESTORING = (BackupAndRestore, keras.callbacks.BackupAndRestore)

# By callback: its attributes by name.
Attributes = dict[tuple[str, int], dict[str, Any]]


def fit(
    model: keras.Model,
    make_data: Callable[..., Any],
    *,
    make_validation_data: Callable[[], Any] | None = None,
    epochs: int = 1,
    initial_epoch: int = 0,
    batches_per_commit: int | None = None,
    callbacks: Iterable[keras.callbacks.Callback] | None = None,
    **arguments: Any,
) -> keras.callbacks.History:
    """Trains a model by its `fit`, and goes on as ranks of the job die and come.

    Each epoch begins with a commit. If a rank dies, the others begin the epoch again,
    with their share of the data; ranks that come begin with a commit. Callbacks
    begin and end once, and go on with what their attributes have, which also goes back
    to the commit: numbers, text, arrays, named functions, and lists and dicts of those.
    A rank that is new gets these, and all that `KerasState` keeps, from others. Before
    it joins, it makes a step with its data, and takes it back, so that nobody waits
    while it traces and compiles.

    With `batches_per_commit` there are commits within an epoch too. What is left of the
    epoch then is dealt to the ranks of the next job, so that each sample is in one step
    of the epoch, but for those of steps that are undone. It does not begin again for
    callbacks, and its metrics count what the ranks have seen that are there at its end.
    Batches of the rest are counted from 0.

    Args:
        model: a model that has its variables, compiled with a `DistributedOptimizer`.
        make_data: is called on each rank in each job, and by a new rank while it is
            alone, and returns what `fit` takes: a tuple `(x, y)` or
            `(x, y, sample_weight)`, or a dataset. With `batches_per_commit` it takes a
            `keras_hvd.data.Position`, and returns a dataset of batches that follows it,
            by `keras_hvd.data.from_arrays` or `keras_hvd.data.from_files(even=...)`.
        make_validation_data: the same for `fit`'s `validation_data`.
        epochs: the epoch to end with, as in `fit`.
        initial_epoch: the epoch to begin with, from 0.
        batches_per_commit: the number of batches between two commits within an epoch. A
            commit copies the model, and a rank's death costs what was trained since.
            None: epochs are not divided.
        callbacks: as in `fit`. `BroadcastGlobalVariables` is not needed.
        arguments: further ones of `fit`.

    Returns:
        What `fit` returns: the history of all epochs.

    Raises:
        TypeError: `make_data` is not a function, or `arguments` has data, or
            `batches_per_commit` is not a number.
        ValueError: the model has no variables yet, or is not compiled, or differs from
            that of other ranks; or `make_data` returns something else, or the same
            generator again; or
            `batches_per_commit` is not positive, or given with `steps_per_epoch`.
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: a rank has died, and there is no job to go on in.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> def make_data():
    ...     return keras_hvd.data.part(np.ones((8, 1)), np.zeros(8))
    >>> history = keras_hvd.elastic.fit(model, make_data, epochs=2, verbose=0)
    >>> history.epoch
    [0, 1]
    """
    _require_makers(make_data, make_validation_data, arguments)
    if batches_per_commit is not None:
        batches_per_commit = _checked(batches_per_commit, arguments)
        # Keras warns of what it is by default.
        arguments.setdefault("shuffle", False)
    given = keras.tree.flatten(callbacks) if callbacks else []
    if not any(isinstance(each, keras.callbacks.History) for each in given):
        given.append(keras.callbacks.History())
    state = _FitState(model, given, initial_epoch)
    is_new = world.is_new()

    def made_by(commits: _EpochCommit) -> tuple[Any, Any]:
        data = commits.made_by(make_data)
        return data, make_validation_data and make_validation_data()

    def arguments_of(commits: _EpochCommit, data: Any, of_validation: Any) -> dict:
        given = _arguments_of(commits.left_of(data))
        return {**arguments, **given, "validation_data": of_validation}

    if is_new:
        commits = _commits_of(state, batches_per_commit)
        with arrival.alone():
            rehearse(
                *(model, state.undo),
                lambda: arguments_of(commits, *made_by(commits)),
            )

    @run
    def train(state: _FitState) -> keras.callbacks.History:
        commits = _commits_of(state, batches_per_commit)
        made = made_by(commits)
        state.require_unread(made[0])
        name_alike(model)
        while True:
            with (
                _without("on_train_begin", _begun(given, state, is_new)),
                _without("on_epoch_begin", commits.begun(given)),
                contextlib.suppress(_RestIsOver),
            ):
                return model.fit(
                    **arguments_of(commits, *made),
                    epochs=epochs,
                    initial_epoch=state.epoch,
                    callbacks=[commits, *given],
                )

    return train(state)


class _FitState(KerasState):
    """A model, the epoch that begins next, and what callbacks have in attributes."""

    called_by = "elastic.fit"

    epoch: int
    # That of all ranks, as of the last commit.
    position: dict[str, Any] | None

    def __init__(
        self,
        model: keras.Model,
        callbacks: list[keras.callbacks.Callback],
        epoch: int,
    ):
        self.has_begun = False
        self.has_written = False
        self._generator: Any = None
        self._callbacks = callbacks
        # Set once the next `fit` has begun, since callbacks set their own as it does.
        self._to_set: Attributes | None = None
        super().__init__(model, epoch=epoch, position=None)

    def save(self) -> None:
        super().save()
        self._kept = copy.deepcopy(self._attributes())
        # Of this rank alone: together they are those of all that are there.
        metrics = self.model.metrics_variables
        self._of_metrics = [(each, each.numpy()) for each in metrics]

    def restore(self) -> None:
        super().restore()
        self._to_set = copy.deepcopy(self._kept)
        self.set_metrics()

    def undo(self) -> None:
        """Goes back to what was saved, where callbacks have taken no part."""
        super().restore()
        self.model.reset_metrics()

    def broadcast(self, root_rank: int) -> None:
        epoch = self.epoch
        super().broadcast(root_rank)
        if self.epoch != epoch:
            self.model.reset_metrics()
        name = "keras_hvd/elastic/callbacks"
        of_root = broadcast_object(self._attributes(), root_rank, name=name)
        if self._is_behind:
            self._to_set = of_root

    def require_unread(self, data: Any) -> None:
        """Raises ValueError for a generator that another job has read from."""
        if not isinstance(data, types.GeneratorType):
            return
        if data is self._generator:
            raise ValueError(
                "elastic.fit: make_data returned the generator that the job before has "
                "read from, so its samples would be missing, on this rank alone if "
                "others are new: return a new one each time"
            )
        self._generator = data

    def set_attributes(self) -> None:
        """Makes callbacks go on, once all of them have begun."""
        self.has_begun = True
        self.has_written = basics.rank() == 0
        to_set, self._to_set = self._to_set or {}, None
        for key, callback in _by_kind(self._callbacks).items():
            vars(callback).update(to_set.get(key, {}))

    def set_metrics(self) -> None:
        """Makes metrics go on, once Keras has reset them."""
        self.model.reset_metrics()
        for variable, value in self._of_metrics:
            variable.assign(value)

    def _attributes(self) -> Attributes:
        if self._to_set is not None:
            return self._to_set
        callbacks = _by_kind(self._callbacks)
        return {key: _attributes_of(each) for key, each in callbacks.items()}


class _EpochCommit(DistributedCallback):
    """Commits an epoch's begin, before other callbacks have begun it.

    By then all ranks have agreed on what the epoch before has led to.
    """

    def __init__(self, state: _FitState):
        super().__init__()
        self._state = state

    def made_by(self, make_data: Callable[..., Any]) -> Any:
        """The data of this job."""
        return make_data()

    def left_of(self, data: Any) -> Any:
        """The data that `fit` is to begin with."""
        return data

    def begun(
        self, callbacks: list[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        """The callbacks that have begun the epoch that `fit` is to begin with."""
        return []

    def on_epoch_begin(self, epoch, logs=None):
        self._state.set_attributes()
        self._state.epoch = epoch
        self._commit()

    def _commit(self) -> None:
        self._state.commit()


class _BatchCommit(_EpochCommit):
    """Commits within epochs too, and goes on with the rest of one.

    It does so before a batch, when all callbacks have ended the one before.
    """

    def __init__(self, state: _FitState, batches: int):
        super().__init__(state)
        self._batches = batches
        self._committed = 0  # batches of the data that `fit` has begun with
        self._is_rest = False
        self._position = Position()
        if state.position is not None:
            self._position.restore(state.position)

    def made_by(self, make_data: Callable[..., Any]) -> Any:
        return make_data(self._position)

    def left_of(self, data: Any) -> Any:
        return self._position.counted(data)

    def begun(
        self, callbacks: list[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        if not (self._position.is_inside_epoch and self._state.has_begun):
            return []
        return [each for each in callbacks if not isinstance(each, DistributedCallback)]

    def on_epoch_begin(self, epoch, logs=None):
        self._committed = 0
        if self._position.is_inside_epoch and self._position.epoch == epoch:
            self._is_rest = True
            return
        self._position.start_epoch(epoch)
        super().on_epoch_begin(epoch, logs)
        if self._is_rest:
            self._is_rest = False
            raise _RestIsOver

    def on_train_batch_begin(self, batch, logs=None):
        if self._is_rest and batch == 0:
            # By now callbacks that are new have begun the epoch.
            self._state.set_attributes()
            self._state.set_metrics()
        steps = batch - self._committed
        if steps >= self._batches:
            self._position.advance(steps * self._position.batch)
            self._committed = batch
            self._commit()

    def _commit(self) -> None:
        self._state.position = self._position.state_and_counts()
        super()._commit()


def _commits_of(state: _FitState, batches: int | None) -> _EpochCommit:
    return _EpochCommit(state) if batches is None else _BatchCommit(state, batches)


class _RestIsOver(Exception):
    """Ends a `fit` that has made the rest of an epoch: a whole one has more steps.

    Keras makes as many in all epochs of a `fit`.
    """


def _by_kind(
    callbacks: Iterable[keras.callbacks.Callback],
) -> dict[tuple[str, int], keras.callbacks.Callback]:
    """Callbacks by their class and their number among those of it: ranks may differ."""
    counts: collections.Counter[str] = collections.Counter()
    found = {}
    for each in callbacks:
        kind = type(each).__qualname__
        found[kind, counts[kind]] = each
        counts[kind] += 1
    return found


def _attributes_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    if isinstance(callback, keras.callbacks.CSVLogger):
        # They are of the open file.
        return {}
    # Those that keras_hvd hides are of this process and this job.
    hidden = "_" if isinstance(callback, DistributedCallback) else "__"
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in _OF_KERAS and not name.startswith(hidden) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    """Whether a value means the same in another process.

    >>> _is_plain({"loss": [0.5, np.float32(0.25)]}), _is_plain(np.less)
    (True, True)
    >>> _is_plain([keras.Variable(1.0)]), _is_plain(lambda: 1)
    (False, False)
    """
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple, set, collections.deque)):
        return all(map(_is_plain, value))
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, np.ufunc)):
        return _is_named(value)
    return isinstance(value, _PLAIN)


def _is_named(function: Any) -> bool:
    """Whether its name leads to it, as that of what Keras compares metrics by does."""
    # NumPy's own have no module.
    module = sys.modules.get(getattr(function, "__module__", None) or "numpy")
    return getattr(module, function.__name__, None) is function


def _begun(
    callbacks: list[keras.callbacks.Callback], state: _FitState, is_new: bool
) -> list[keras.callbacks.Callback]:
    """The callbacks that have begun, before `fit` begins once more."""
    if not state.has_begun:
        return [each for each in callbacks if is_new and isinstance(each, _RESTORING)]
    begun = [
        each
        for each in callbacks
        if isinstance(each, _RESTORING) or not isinstance(each, DistributedCallback)
    ]
    if state.has_written or basics.rank() != 0:
        return begun
    # The rank that has written so far is gone, and this one takes its place.
    for each in begun:
        if isinstance(each, keras.callbacks.CSVLogger):
            each.append = True
    return [
        each
        for each in begun
        if isinstance(each, _RESTORING) or not isinstance(each, WRITERS)
    ]


@contextlib.contextmanager
def _without(hook: str, callbacks: list[keras.callbacks.Callback]) -> Iterator[None]:
    """Keeps `fit` from beginning what callbacks have begun."""
    own = [vars(each).get(hook) for each in callbacks]
    for each in callbacks:
        vars(each)[hook] = _nothing
    try:
        yield
    finally:
        for each, before in zip(callbacks, own, strict=True):
            del vars(each)[hook]
            if before is not None:
                vars(each)[hook] = before


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _arguments_of(data: Any) -> dict[str, Any]:
    """What `make_data` has returned, by the names of `fit`'s arguments."""
    is_tuple = isinstance(data, tuple)
    if data is None or (is_tuple and not 1 <= len(data) <= 3):
        raise ValueError(
            "elastic.fit: make_data must return (x, y), (x, y, sample_weight) or a "
            f"dataset; got {f'a tuple of {len(data)}' if is_tuple else data}"
        )
    return dict(zip(("x", "y", "sample_weight"), data if is_tuple else (data,)))


def _checked(batches_per_commit: Any, arguments: dict[str, Any]) -> int:
    number = basics.whole_number(
        "elastic.fit", "batches_per_commit", batches_per_commit
    )
    if number < 1:
        raise ValueError(f"elastic.fit: batches_per_commit={number} must be at least 1")
    if arguments.get("steps_per_epoch") is not None:
        raise ValueError(
            "elastic.fit takes no steps_per_epoch with batches_per_commit: an epoch "
            "has all of the data"
        )
    return number


def _require_makers(
    make_data: Any, make_validation_data: Any, arguments: dict[str, Any]
) -> None:
    for name, value in (
        ("make_data", make_data),
        ("make_validation_data", make_validation_data or _nothing),
    ):
        if not callable(value):
            raise TypeError(
                f"elastic.fit: {name} must be a function that returns the data, "
                "because each job deals them anew, as in lambda: "
                f"keras_hvd.data.part(x, y); got {type(value).__name__}"
            )
    for name, instead in (
        ("x", "make_data"),
        ("y", "make_data"),
        ("sample_weight", "make_data"),
        ("validation_data", "make_validation_data"),
    ):
        if name in arguments:
            raise TypeError(
                f"elastic.fit takes no {name}: return it from {instead}(), which is "
                "called in each job"
            )
