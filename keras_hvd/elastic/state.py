"""What outlives a change of the job: the values that a training goes on from."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from keras_hvd.elastic import world
from keras_hvd.exceptions import HostsUpdatedInterrupt, RankFailedError
from keras_hvd.job import basics
from keras_hvd.job.objects import allgather_object, broadcast_object


class State:
    """What a training goes on from when ranks have died.

    A subclass says how this is kept, by `save`, `restore` and `broadcast`.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> class Count(keras_hvd.elastic.State):
    ...     steps = saved = 0
    ...     def save(self):
    ...         self.saved = self.steps
    ...     def restore(self):
    ...         self.steps = self.saved
    ...     def broadcast(self, root_rank):
    ...         self.steps = keras_hvd.broadcast_object(self.steps, root_rank)
    >>> count = Count()
    >>> count.steps = 3
    >>> count.commit()
    >>> count.steps = 4
    >>> count.restore()
    >>> count.steps
    3
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0
        self._has_synced = False
        # Whether another rank has committed more; known as `broadcast` is called.
        self._is_behind = False
        # Whether all have committed as often, in jobs before; known then too.
        self._are_even = False

    def register_reset_callbacks(
        self, callbacks: Iterable[Callable[[], object]]
    ) -> None:
        """Adds functions to be called in each later job, before its ranks synchronize.

        Those that are new call theirs too, so functions may use collectives.

        Args:
            callbacks: functions without arguments, such as one that sets a learning
                rate by the number of ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Runs `reset` and the reset callbacks, once this process is in a later job."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keeps the present values, to which a rank's death takes training back.

        All ranks call it at the same steps. It waits for no other rank, unless the job
        may gain ranks: then `check_host_updates` is part of it.

        Raises:
            HostsUpdatedInterrupt: as `check_host_updates` does.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Ends the function that runs, on all ranks, if others wait to join the job.

        All ranks call it at the same steps. What they have then, committed or not, is
        what training goes on from.

        Raises:
            HostsUpdatedInterrupt: others wait; for `elastic.run` to catch.
            RankFailedError: another rank has died.
        """
        if world.others_wait():
            raise HostsUpdatedInterrupt(
                "other ranks wait to join this job: keras_hvd.elastic.run goes on with "
                "them, if nothing catches this before"
            )

    def sync(self) -> None:
        """Gives all ranks the values of the one that has committed most; keeps them.

        Among equals that is the lowest rank. A rank that is new has nothing that counts
        unless all are.

        Raises:
            ValueError: this rank's state is made of something else than that rank's.
            RankFailedError: another rank has died, or all have that had the state.
        """
        mine = self._has_synced, self._commits
        of_ranks = allgather_object(
            (mine, self._parts(), world.is_without_state()),
            name="keras_hvd/elastic/commits",
        )
        if all(each[2] for each in of_ranks):
            raise RankFailedError(
                "the ranks that had the state of this training have died, and those "
                "that are left came later and did not get it: start the script again, "
                "from what it has saved"
            )
        commits = [each[0] for each in of_ranks]
        furthest = max(commits)
        root_rank = commits.index(furthest)
        _require_same(self._parts(), of_ranks[root_rank][1], root_rank)
        self._is_behind = mine != furthest
        self._are_even = self._has_synced and {*commits} == {mine}
        self.broadcast(root_rank)
        self.save()
        self._has_synced, self._commits = True, furthest[1]
        world.note_state()

    def save(self) -> None:
        """Copies the present values. `commit` calls it."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the values that were saved last."""
        raise NotImplementedError

    def broadcast(self, root_rank: int) -> None:
        """Gives all ranks the present values of one. `sync` calls it.

        Args:
            root_rank: the rank that sends its values.
        """
        raise NotImplementedError

    def _parts(self) -> list[str]:
        """Describes what the state is made of, which is the same on all ranks."""
        return []

    def reset(self) -> None:
        """Adapts to a later job, before its ranks synchronize; by default, nothing."""


class ObjectState(State):
    """Python objects that a training goes on from, as attributes.

    Args:
        kwargs: their names and first values. They are copied deeply at a commit, and
            pickled to be sent.

    Raises:
        ValueError: a method of the state has that name.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> state = keras_hvd.elastic.ObjectState(epoch=0, losses=[])
    >>> state.losses.append(0.5)
    >>> state.commit()
    >>> state.losses.append(0.4)
    >>> state.restore()
    >>> state.losses
    [0.5]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        for name in kwargs:
            if callable(getattr(type(self), name, None)):
                raise ValueError(
                    f"{type(self).__name__}: {name} is a method of it: give the value "
                    "another name"
                )
        self._names = tuple(kwargs)
        self._give_out(kwargs)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self._objects())

    def restore(self) -> None:
        # The copy must survive changes of what is given out.
        self._give_out(copy.deepcopy(self._saved))

    def broadcast(self, root_rank: int) -> None:
        name = "keras_hvd/elastic/objects"
        self._give_out(broadcast_object(self._objects(), root_rank, name=name))

    def _parts(self) -> list[str]:
        return [f"value {name}" for name in self._names]

    def _objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _give_out(self, objects: dict[str, Any]) -> None:
        for name, value in objects.items():
            setattr(self, name, value)


def _require_same(mine: list[str], of_root: list[str], root_rank: int) -> None:
    """Raises ValueError on the rank whose state differs: the others go on without it.

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> _require_same(["a", "b"], ["a", "c"], 0)
    Traceback (most recent call last):
    ValueError: the state of rank 0 differs from rank 0's: b here is c there. ...
    """
    for here, there in itertools.zip_longest(mine, of_root, fillvalue="nothing"):
        if here != there:
            raise ValueError(
                f"the state of rank {basics.rank()} differs from rank {root_rank}'s: "
                f"{here} here is {there} there. All ranks need the same model and the "
                "same values, also those that are started later"
            )


def require_state(function: str, state: Any) -> None:
    """Raises TypeError unless it is a State; `function` is the public caller's name.

    Example:

    >>> require_state("run", ObjectState(epoch=0))
    """
    if not isinstance(state, State):
        raise TypeError(
            f"{function} takes a keras_hvd.elastic.State, such as "
            f"keras_hvd.elastic.KerasState(model); got {state!r}"
        )
