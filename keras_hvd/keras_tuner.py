"""KerasTuner: searches whose trials train on all ranks."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import keras

try:
    import keras_tuner
except ModuleNotFoundError as error:
    if error.name != "keras_tuner":
        raise
    raise ImportError(
        "keras_hvd.keras_tuner needs KerasTuner: pip install keras-tuner"
    ) from error
from keras_tuner import errors
from keras_tuner.src.engine.tuner_utils import SaveBestEpoch

from keras_hvd.backends.current import framework
from keras_hvd.callbacks import meeting
from keras_hvd.callbacks.broadcast_global_variables import BroadcastGlobalVariables
from keras_hvd.callbacks.coordination import DistributedCallback, enclosing_list
from keras_hvd.callbacks.metric_average import MetricAverage
from keras_hvd.callbacks.metrics import means_over_ranks
from keras_hvd.job import arrival, basics
from keras_hvd.job.objects import allgather_object, broadcast_object
from keras_hvd.mixin import Mixin
from keras_hvd.optimizer.traced_steps import require_distributed

# From errors that may be tried again to errors that end the search.
_SEVERITIES = (RuntimeError, errors.FailedTrialError, errors.FatalRuntimeError)


def distribute(tuner_class: type) -> type:
    """A tuner whose trials train on all ranks.

    All ranks create it and call its methods in the same way; only the data may differ.
    Rank 0's oracle decides, and all ranks get the same trial. Only rank 0 prints and
    writes to the project's folder; the other ranks read it. The tuner adds
    `BroadcastGlobalVariables` and `MetricAverage` to the callbacks of `fit` unless they
    are there. Results of a `run_trial` of your own are averaged over ranks. If one rank
    fails, all ranks fail the trial, or end the search, together.

    Args:
        tuner_class: `keras_tuner.RandomSearch`, another tuner class, or your own.

    Returns:
        A subclass with the same arguments.

    Raises:
        TypeError: it is not a class of a tuner.
        NotInitializedError: `keras_hvd.init` was not called (when it is created).
        RuntimeError: KerasTuner's own parallel search is requested too (when it is
            created).
        ValueError: ranks search with different arguments (when the search begins).
        keras_tuner.errors.FatalRuntimeError: a model's optimizer is not distributed
            (before it is trained).

    Example:

    >>> import tempfile, keras, keras_tuner, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> def build(hp):
    ...     rate = hp.Choice("rate", [0.1, 0.01])
    ...     layer = keras.layers.Dense(1, kernel_initializer="zeros")
    ...     model = keras.Sequential([keras.Input((1,)), layer])
    ...     optimizer = keras.optimizers.SGD(rate)
    ...     model.compile(keras_hvd.DistributedOptimizer(optimizer), "mse")
    ...     return model
    >>> RandomSearch = keras_hvd.keras_tuner.distribute(keras_tuner.RandomSearch)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tuner = RandomSearch(build, "loss", max_trials=2, seed=1, directory=folder)
    ...     tuner.search(np.ones((4, 1)), np.ones(4), epochs=3, verbose=0)
    >>> tuner.get_best_hyperparameters()[0]["rate"]
    0.1
    """
    is_class = isinstance(tuner_class, type)
    if not is_class or not issubclass(tuner_class, keras_tuner.engine.tuner.Tuner):
        raise TypeError(
            "keras_hvd.keras_tuner.distribute takes the class of a tuner, such as "
            f"keras_tuner.RandomSearch; got {tuner_class!r}"
        )
    return _extended(_Distributed, tuner_class)


def is_distributed(tuner: Any) -> bool:
    """Whether a tuner's trials train on all ranks: its class comes from `distribute`.

    Args:
        tuner: any object.

    Returns:
        True for a tuner of a class from `distribute`.

    Example:

    >>> is_distributed(keras_tuner.RandomSearch)
    False
    """
    return isinstance(tuner, _Distributed)


class _Distributed(Mixin):
    """The changes to a tuner for several ranks."""

    # A Strategy looks for it.
    trains_on_all_ranks = True
    _is_starting = False

    def __init__(self, *args: Any, **kwargs: Any):
        arrival.require_arrived("keras_tuner.distribute")
        self._is_starting = True
        # Only rank 0 may clear the folder, or see its content.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self._empty_dir = folder
            super().__init__(*args, **kwargs)
        self._is_starting = False
        if not isinstance(self.oracle, _Shared):
            raise RuntimeError(
                "KerasTuner's own parallel search is on, but here several ranks train "
                "each trial: unset KERASTUNER_ORACLE_IP, KERASTUNER_ORACLE_PORT and "
                "KERASTUNER_TUNER_ID"
            )

    @property
    def project_dir(self) -> str:
        if self._is_starting and basics.rank() != 0:
            return self._empty_dir
        return super().project_dir

    def reload(self):
        if self._is_starting:
            self._start(reloads=True)
        super().reload()

    def _populate_initial_space(self):
        # Ranks other than 0 always come here, because their folder is empty.
        if self._is_starting and self._start(reloads=False):
            super().reload()
            return
        with _all_or_none():
            super()._populate_initial_space()

    def _start(self, reloads: bool) -> bool:
        self._is_starting = False
        self.oracle.__class__ = _extended(_Shared, type(self.oracle))
        return broadcast_object(reloads)

    def search(self, *fit_args: Any, **fit_kwargs: Any) -> None:
        self._require_same_search(fit_args, fit_kwargs)
        with _all_or_none():
            super().search(*fit_args, **fit_kwargs)

    def _require_same_search(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises, on every rank, if ranks would train differently."""
        mine = {
            "project": super().project_dir,
            "tuner": type(self).__name__,
            "executions_per_trial": self.executions_per_trial,
            "positional arguments": len(args),
        }
        plain = bool | int | float | str | None
        for name, value in kwargs.items():
            if name not in ("callbacks", "verbose"):
                mine[name] = value if isinstance(value, plain) else "data"
        firsts, *_ = of_ranks = allgather_object(mine)
        for rank, theirs in enumerate(of_ranks):
            for name in {**firsts, **theirs}:
                first, other = (one.get(name, "not given") for one in (firsts, theirs))
                if first != other:
                    raise ValueError(
                        f"search: {name} is {first!r} on rank 0, and {other!r} on rank "
                        f"{rank}: give all ranks the same, but for their data"
                    )

    def _run_and_update_trial(self, trial: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["callbacks"] = _with_ours(kwargs.get("callbacks"))
        with _all_or_none():
            super()._run_and_update_trial(trial, *args, **kwargs)

    def _configure_tensorboard_dir(self, *args: Any, **kwargs: Any) -> None:
        # The method adds a callback that writes files.
        if basics.rank() == 0:
            super()._configure_tensorboard_dir(*args, **kwargs)

    def save(self):
        if basics.rank() == 0:
            super().save()

    def search_space_summary(self, extended: bool = False) -> None:
        if basics.rank() == 0:
            super().search_space_summary(extended)

    def results_summary(self, num_trials: int = 10) -> None:
        if basics.rank() == 0:
            super().results_summary(num_trials)


class _Shared(Mixin):
    """The changes to an oracle for several ranks.

    Rank 0's oracle changes and the others follow, so a reader needs no other rank.
    """

    _is_changing = False

    def create_trial(self, *args: Any, **kwargs: Any) -> Any:
        return self._change("create_trial", *args, **kwargs)

    def update_trial(
        self, trial_id: str, metrics: dict[str, Any], step: int = 0
    ) -> Any:
        metrics = {**metrics, **means_over_ranks(metrics)}
        return self._change("update_trial", trial_id, metrics, step)

    def end_trial(self, *args: Any, **kwargs: Any) -> None:
        self._change("end_trial", *args, **kwargs)

    def update_space(self, *args: Any, **kwargs: Any) -> None:
        self._change("update_space", *args, **kwargs)

    def reload(self) -> None:
        self._change("reload")

    def save(self) -> None:
        if basics.rank() == 0:
            super().save()

    def _change(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(), name)
        if self._is_changing:
            return method(*args, **kwargs)
        result, error = None, None
        # A trial that ends is ongoing before the call, one that begins is after it.
        changed = list(self.ongoing_trials.values())
        if basics.rank() == 0:
            self._is_changing = True
            try:
                result = method(*args, **kwargs)
            except Exception as raised:
                error = raised
            finally:
                self._is_changing = False
        changed += self.ongoing_trials.values()
        trials = self.trials.values() if name == "reload" else changed
        text = None if error is None else f"{type(error).__name__}: {error}"
        news = result, text, list(trials), self.hyperparameters
        result, text, trials, space = broadcast_object(news)
        if error is not None:
            raise error
        if text is not None:
            raise RuntimeError(f"rank 0 failed in its oracle's {name}: {text}")
        if basics.rank() != 0:
            result = self._follow(result, trials, space)
        return result

    def _follow(self, result: Any, trials: list[Any], space: Any) -> Any:
        self.hyperparameters = space
        for each in trials:
            known = self.trials.setdefault(each.trial_id, each)
            # Updated in place, for holders of the trial.
            vars(known).update(vars(each))
        is_trial = isinstance(result, keras_tuner.engine.trial.Trial)
        return self.trials.get(result.trial_id, result) if is_trial else result


class _InTrial(DistributedCallback):
    """Makes a model train on all ranks or on none, and only rank 0 save it."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if basics.size() == 1:
            return
        _require_reduced(model)
        if basics.rank() != 0:
            for each in enclosing_list(self).callbacks:
                if isinstance(each, SaveBestEpoch):
                    each._save_model = lambda: None


def _require_reduced(model: keras.Model) -> None:
    """Raises an error that ends the search: other trials would fail too."""
    # Custom steps show only when they run whether they reduce.
    own_steps = type(model).train_step is not keras.Model.train_step
    if own_steps or framework.current_strategy.of_model(model) is not None:
        return
    try:
        require_distributed(model)
    except RuntimeError as error:
        raise errors.FatalRuntimeError(str(error)) from error


def _with_ours(callbacks: Any) -> list[keras.callbacks.Callback]:
    callbacks = keras.tree.flatten(callbacks or [])
    missing = [
        kind()
        for kind in (BroadcastGlobalVariables, MetricAverage)
        if not any(isinstance(each, kind) for each in callbacks)
    ]
    return [_InTrial(), *missing, *callbacks]


def _all_or_none() -> contextlib.AbstractContextManager[None]:
    return meeting.all_or_none(
        _severity, lambda number, text: _SEVERITIES[number](text)
    )


def _severity(error: Exception) -> int:
    if isinstance(error, errors.FatalError):
        return 2
    return 1 if isinstance(error, errors.FailedTrialError) else 0


def _extended(by: type, plain: type) -> type:
    """A subclass with the names of the plain class."""
    names = ("__doc__", "__module__", "__qualname__")
    return type(
        plain.__name__, (by, plain), {name: getattr(plain, name) for name in names}
    )
