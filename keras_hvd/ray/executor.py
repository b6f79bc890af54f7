"""RayExecutor: Horovod's class, which keeps actors that are the ranks of a job."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keras_hvd.exceptions import KerasHvdError, RankFailedError
from keras_hvd.job import basics
from keras_hvd.launch import function
from keras_hvd.launch.call import Outcome, outcome_of
from keras_hvd.launch.places import Node
from keras_hvd.ray import places
from keras_hvd.ray.trainer import Config, seat

_ELASTIC = (
    "a job that loses and gains workers is keras_hvd.ray.KerasTrainer's, with "
    "ray.train.ScalingConfig(num_workers=(min, max))"
)


# Time for the other ranks to end after one has failed, as in keras_hvd.spark.
_PATIENCE_SECONDS = 10


@dataclass
class Settings:
    """The arguments of `RayExecutor.create_settings`."""

    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    nics: Sequence[str] | None = None


class _Worker:
    """An actor: the process of a rank."""

    def __init__(self) -> None:
        self.executable: Any = None

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def make(self, made: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.executable = made(*args, **kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException:
            _leave()
            raise

    def outcome(self, *args: Any, **kwargs: Any) -> Outcome:
        made = outcome_of(*args, **kwargs)
        if made.error is not None:
            _leave()
        return made

    def execute(self, function: Callable[[Any], Any]) -> Outcome:
        return self.outcome(function, self.executable)


def _leave() -> None:
    """Leaves the job, though this process goes on: others wait for it."""
    basics.shutdown()


class RayExecutor:
    """Runs functions on all ranks of a job, each an actor in a placement group.

    It has Horovod's arguments and methods. The functions call `keras_hvd.init`.

    Args:
        settings: from `create_settings`.
        num_workers: the number of ranks, as near to each other as can be; or give
            `num_hosts`.
        num_hosts: the number of nodes, each with `num_workers_per_host` ranks.
        num_workers_per_host: ranks of a node.
        cpus_per_worker: CPUs of a rank.
        use_gpu: whether ranks have GPUs.
        gpus_per_worker: GPUs of a rank; 1 by default.
        use_current_placement_group: whether to use the placement group that this
            process is in, if it is in one, such as that of a trial of Ray Tune.
        min_workers: for elastic jobs, which this class does not have.
        max_workers: for elastic jobs.
        reset_limit: for elastic jobs.
        cooldown_range: for elastic jobs.
        elastic_timeout: for elastic jobs.
        override_discovery: for elastic jobs.

    Raises:
        ValueError: an argument is wrong, or for elastic jobs.

    Example::

        executor = keras_hvd.ray.RayExecutor(
            keras_hvd.ray.RayExecutor.create_settings(), num_workers=4
        )
        executor.start()
        losses = executor.run(train, kwargs={"epochs": 3})
        executor.shutdown()
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Sequence[str] | None = None,
    ) -> Settings:
        """Settings of a job.

        Args:
            timeout_s: seconds that ranks wait for each other at the start.
            ssh_identity_file: without effect: nothing goes by ssh.
            ssh_str: without effect.
            placement_group_timeout_s: seconds to wait for the resources.
            nics: network interfaces to use.

        Returns:
            The settings, for the constructor.
        """
        return Settings(timeout_s, placement_group_timeout_s, nics)

    def __init__(
        self,
        settings: Settings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ):
        if any((min_workers, max_workers, reset_limit, cooldown_range)):
            raise ValueError(f"RayExecutor: {_ELASTIC}")
        if bool(num_workers) == bool(num_hosts):
            raise ValueError("RayExecutor: give either num_workers or num_hosts")
        if gpus_per_worker is not None and (not use_gpu or gpus_per_worker < 1):
            raise ValueError(
                "RayExecutor: gpus_per_worker must be 1 or more, with use_gpu=True"
            )
        self.settings = settings
        self.num_workers = num_workers or (num_hosts or 0) * num_workers_per_host
        self._per_bundle = 1 if num_workers else num_workers_per_host
        self._strategy = "PACK" if num_workers else "STRICT_SPREAD"
        self._resources = {"CPU": float(cpus_per_worker)}
        if use_gpu:
            self._resources["GPU"] = float(gpus_per_worker or 1)
        self._uses_current = use_current_placement_group
        self._own_group: PlacementGroup | None = None
        self._nodes: list[Node] = []
        self.workers: list[Any] = []

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the actors.

        Args:
            executable_cls: a class, of which each actor makes the object that `execute`
                passes to its function.
            executable_args: its arguments.
            executable_kwargs: its keyword arguments.
            extra_env_vars: environment variables of the actors.

        Raises:
            KerasHvdError: the cluster has too few resources, or a node another version
                of keras_hvd.
        """
        try:
            self._start(extra_env_vars or {})
            if executable_cls is not None:
                args = executable_args or (), executable_kwargs or {}
                ray.get(
                    [one.make.remote(executable_cls, *args) for one in self.workers]
                )
        except BaseException:
            self.shutdown()
            raise

    def _start(self, variables: Mapping[str, str]) -> None:
        group = get_current_placement_group() if self._uses_current else None
        if group is None:
            group = self._own_group = self._placement_group()
        # The bundles of another one are not known.
        per_bundle = self._per_bundle if self._own_group is not None else 0
        actor: Any = ray.remote(_Worker)
        actors = [
            actor.options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                runtime_env={"env_vars": dict(variables)} if variables else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, rank // per_bundle if per_bundle else -1
                ),
            ).remote()
            for rank in range(self.num_workers)
        ]
        self.workers = actors
        limit = self.settings.placement_group_timeout_s
        try:
            found = ray.get(
                [one.ask.remote(places.look()) for one in actors], timeout=limit
            )
        except GetTimeoutError:
            raise KerasHvdError(
                f"RayExecutor: not all {self.num_workers} actors have started within "
                f"{limit} s (placement_group_timeout_s): `ray status` shows why"
            ) from None
        nodes = [Node(*each) for each in found]
        # Neighbours on a node have neighbouring ranks.
        keys = [node.key for node in nodes]
        order = sorted(range(len(nodes)), key=lambda n: keys.index(keys[n]))
        self.workers = [actors[n] for n in order]
        self._nodes = [nodes[n] for n in order]
        self._seat()

    def _seat(self) -> None:
        nics = ",".join(self.settings.nics or ())
        config = Config(network_interfaces=nics, start_timeout=self.settings.timeout_s)
        seat(
            config,
            self._nodes,
            lambda rank, *asked: self.workers[rank].ask.remote(*asked),
        )

    def _placement_group(self) -> PlacementGroup:
        bundle = {name: n * self._per_bundle for name, n in self._resources.items()}
        bundles = [dict(bundle) for _ in range(self.num_workers // self._per_bundle)]
        group = placement_group(bundles, strategy=self._strategy)
        limit = self.settings.placement_group_timeout_s
        if group.wait(limit):
            return group
        remove_placement_group(group)
        wanted = " and ".join(
            f"{n * self.num_workers:g} {name}" for name, n in self._resources.items()
        )
        free = ray.available_resources()
        there = " and ".join(
            f"{free.get(name, 0):g} {name}" for name in self._resources
        )
        spread = f" on {len(bundles)} nodes" if self._strategy != "PACK" else ""
        raise KerasHvdError(
            f"RayExecutor: {self.num_workers} workers take {wanted}{spread}, and the "
            f"cluster had {there} free after {limit} s (placement_group_timeout_s)"
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Calls a function on all ranks.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            callbacks: of Horovod's logger for Ray, which this version does not have.

        Returns:
            Its results, in the order of ranks.

        Raises:
            Exception: the error of the rank that failed first, with its traceback as
                cause, as from `keras_hvd.run`.
            RankFailedError: an actor died.
        """
        _refuse(callbacks)
        given = args or (), kwargs or {}
        return self._results(
            [one.outcome.remote(fn, *given[0], **given[1]) for one in self._started()]
        )

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, without waiting.

        Returns:
            A reference for `ray.get` to each rank's result.
        """
        given = args or (), kwargs or {}
        return [one.call.remote(fn, *given[0], **given[1]) for one in self._started()]

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Calls a function with each rank's object of `executable_cls`, as `run`."""
        _refuse(callbacks)
        return self._results([one.execute.remote(fn) for one in self._started()])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """As `execute`, on rank 0 alone; returns its result."""
        (result,) = self._results([self._started()[0].execute.remote(fn)])
        return result

    def shutdown(self) -> None:
        """Ends the actors, and gives their resources back."""
        asked = [one.ask.remote(_leave) for one in self.workers]
        # One may have died, or still run a function.
        with contextlib.suppress(GetTimeoutError, RayError):
            ray.get(asked, timeout=_PATIENCE_SECONDS)
        for one in self.workers:
            ray.kill(one)
        self.workers = []
        if self._own_group is not None:
            remove_placement_group(self._own_group)
            self._own_group = None

    def _results(self, references: Sequence[Any]) -> list[Any]:
        """The results, or the error of the rank that failed first."""
        outcomes: dict[int, Outcome] = {}
        died: dict[int, str] = {}
        waiting = {reference: rank for rank, reference in enumerate(references)}
        limit = None
        while waiting:
            ended, _ = ray.wait([*waiting], timeout=limit)
            if not ended:
                break
            rank = waiting.pop(ended[0])
            try:
                # By the order of the ends: each node has a clock of its own.
                outcomes[rank] = dataclasses.replace(
                    ray.get(ended[0]), when=float(len(outcomes))
                )
            except RayActorError as error:
                died[rank] = str(error)
            except RayTaskError as error:
                # Ray could not send the result.
                outcomes[rank] = outcome_of(_raise, error.as_instanceof_cause())
            if died or any(each.error is not None for each in outcomes.values()):
                limit = _PATIENCE_SECONDS
        if limit is None:
            return [outcomes[rank].value for rank in range(len(references))]
        if died or waiting:
            self.shutdown()
        else:
            asked = [one.ask.remote(_leave) for one in self.workers]
            ray.get(asked, timeout=self.settings.timeout_s)
            self._seat()
        if died:
            # A rank that was left knows how the other one ended.
            left = next(
                (one for one in outcomes.values() if one.error is not None), None
            )
            first, text = next(iter(died.items()))
            raise RankFailedError(
                f"the actor of rank {first} ended before the function had returned, "
                "and the others have been ended: call start() again. "
                + (left.description if left else text)
            )
        function.raise_first_error(outcomes, {})
        raise AssertionError("no rank has failed")

    def _started(self) -> list[Any]:
        if not self.workers:
            raise KerasHvdError("RayExecutor: call start() first")
        return self.workers


class ElasticRayExecutor:
    """Horovod's class for jobs that lose and gain workers: it is refused.

    Raises:
        NotImplementedError: always; it names what to use instead.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"ElasticRayExecutor: {_ELASTIC}")


def _raise(error: Exception) -> None:
    raise error


def _refuse(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    if callbacks:
        raise ValueError(
            "RayExecutor: callbacks get what Horovod's logger for Ray is told, which "
            "this version does not have: return values from the function instead"
        )
