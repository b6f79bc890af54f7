"""KerasTrainer: Ray Train's workers are the ranks of a job."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from keras_hvd.job import basics
from keras_hvd.job.settings import DIVIDED
from keras_hvd.launch.places import Node
from keras_hvd.ray import places


@dataclass
class Config(BackendConfig):
    """How the workers meet.

    Args:
        tls: whether they encrypt what passes between nodes, as `khvdrun --tls`.
        network_interfaces: the networks to use, as `khvdrun --network-interfaces`.
        start_timeout: seconds that workers wait for each other, in Ray's hands and in
            `keras_hvd.init`.
        divides_data: whether Ray Data divides their data; `KerasTrainer` sets it.

    Example:

    >>> from keras_hvd.ray import Config
    >>> Config(network_interfaces="eth1").start_timeout
    120
    """

    tls: bool = False
    network_interfaces: str = ""
    start_timeout: int = 120
    divides_data: bool = False

    @property
    def backend_cls(self) -> type:
        """Ray Train's backend of this configuration."""
        return KerasHvdBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Ray Train's context of each rank's function."""
        return _leaving

    @property
    def interfaces(self) -> list[str]:
        """The names of the networks."""
        return self.network_interfaces.split(",") if self.network_interfaces else []

    def variables(self) -> dict[str, str]:
        """These settings for the ranks."""
        found = {"KERAS_HVD_INIT_TIMEOUT_SECONDS": str(self.start_timeout)}
        if self.tls:
            found["KERAS_HVD_TLS"] = "1"
        if self.network_interfaces:
            found["KERAS_HVD_NETWORK_INTERFACES"] = self.network_interfaces
        if self.divides_data:
            found[DIVIDED] = "ray.train.get_dataset_shard"
        return found


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Leaves the job at the end. Ray kills the processes, which others would report.

    After an error they stay: Ray is to see no other errors than the first.
    """
    yield
    basics.shutdown()


class KerasHvdBackend(Backend):
    """Tells the workers of each attempt their places in a job of its own."""

    # NCCL needs to see the GPUs of the other workers, and `init` takes that of its
    # local rank.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        nodes = [Node(*each) for each in worker_group.execute(places.look())]
        seat(backend_config, nodes, worker_group.execute_single_async)


def seat(config: Config, nodes: Sequence[Node], ask: places.Ask) -> None:
    """Tells each worker its place, in a job of this configuration."""
    timeout = config.start_timeout
    places.seat(nodes, ask, config.variables(), config.interfaces, timeout)


class KerasTrainer(DataParallelTrainer):
    """Trains a Keras model on the workers of a Ray cluster, with Ray Train V2.

    Each worker is a rank, whose function calls `keras_hvd.init`. Each attempt, after a
    failure or with another number of workers, is a job of new processes: the function
    goes on from `keras_hvd.ray.resume`.

    Args:
        train_loop_per_worker: the function, without arguments or with
            `train_loop_config`.
        train_loop_config: its argument.
        scaling_config: how many workers, or `(min, max)`, and their resources.
        run_config: where results go, and how often to try again.
        datasets: Ray Data's datasets, of which `ray.train.get_dataset_shard` gives each
            worker its part. `keras_hvd.data` must not take a part of that.
        dataset_config: how they are divided.
        config: how the workers meet.

    Raises:
        ValueError: Ray Train V2 is turned off (`RAY_TRAIN_V2_ENABLED=0`).

    Example::

        def train(config):
            keras_hvd.init()
            model, epoch = keras_hvd.ray.resume(build)
            model.fit(x, y, epochs=10, initial_epoch=epoch, callbacks=[
                keras_hvd.callbacks.BroadcastGlobalVariables(0),
                keras_hvd.callbacks.MetricAverage(),
                keras_hvd.ray.ReportCallback(),
            ])

        trainer = keras_hvd.ray.KerasTrainer(
            train, scaling_config=ray.train.ScalingConfig(num_workers=4)
        )
        result = trainer.fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        config: Config | None = None,
    ):
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=dataclasses.replace(
                config or Config(), divides_data=bool(datasets)
            ),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
        )
