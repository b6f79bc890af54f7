"""Runs a training again and again, in one job after another, until it is done."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_hvd.elastic import world
from keras_hvd.elastic.state import State, require_state
from keras_hvd.exceptions import HostsUpdatedInterrupt
from keras_hvd.job import basics, native


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a training go on when ranks of its job die, and when others come.

    The function begins with the same state on all ranks. If it fails because a rank has
    died, the others go back to their last commit; if ranks are to come, which a commit
    tells, all keep what they have. Those that are there then are a job of their own,
    and the function is called again. It must go on from what is in the state. A rank
    that is new is alone until it calls the function, so no collective may come before.

    Args:
        func: takes a `State` and then any arguments.

    Returns:
        A function that takes the same, and returns what `func` does. It raises

        TypeError: the first argument is not a State.
        NotInitializedError: `keras_hvd.init` was not called.
        RankFailedError: a rank has died, and there is no job to go on in.
        Exception: what `func`, or a reset callback, raises while no rank has
            failed.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> @keras_hvd.elastic.run
    ... def train(state, epochs):
    ...     while state.epoch < epochs:
    ...         state.epoch += 1
    ...         state.commit()
    ...     return "trained"
    >>> state = keras_hvd.elastic.ObjectState(epoch=0)
    >>> train(state, epochs=3), state.epoch
    ('trained', 3)
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        require_state("keras_hvd.elastic.run's function", state)
        basics.require_initialized("elastic.run")
        with world.connected():
            is_new = world.is_new()
            if is_new:
                world.renew()
            return in_jobs(is_new, state, *args, **kwargs)

    def in_jobs(is_later_job: bool, state: State, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                if is_later_job:
                    state.on_reset()
                state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                # What the state has is what all ranks have.
                world.renew()
            except Exception as error:
                # A death ends collectives, callbacks and the user's own code with all
                # kinds of exceptions, in words that TensorFlow chooses.
                has_failed = bool(native.engine().khvd_failure()) or _names_a_rank(
                    error
                )
                if not has_failed:
                    raise
                state.restore()
                world.renew()
            is_later_job = True

    return elastic


def _names_a_rank(error: Exception) -> bool:
    """Whether a collective has failed because a rank has ended its script before it.

    The job has not failed then: only what needs that rank has. The words are the
    engine's own.
    """
    return " left the job" in str(error)
