"""TFX's Trainer and Tuner, whose `run_fn` and `tuner_fn` several ranks call."""

from __future__ import annotations

from typing import Any

from tfx.components.trainer import component as trainer
from tfx.components.tuner import component as tuner
from tfx.dsl.components.base import executor_spec
from tfx.dsl.placeholder import placeholder
from tfx.orchestration import data_types
from tfx.types import standard_component_specs
from tfx.utils import json_utils

from keras_hvd.mixin import Mixin
from keras_hvd.tfx import executor, settings


class _OnRanks(Mixin):
    """A component that also takes on how many ranks, and for how long."""

    def __init__(
        self,
        *args: Any,
        num_ranks: int | data_types.RuntimeParameter | None = None,
        time_limit: float | data_types.RuntimeParameter | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        given = {settings.NUM_RANKS: num_ranks, settings.TIME_LIMIT: time_limit}
        # As TFX adds module_path: the specification is TFX's own.
        properties = self.spec.exec_properties
        properties |= {name: each for name, each in given.items() if each is not None}
        config = properties[standard_component_specs.CUSTOM_CONFIG_KEY]
        if not any(map(_is_known_later, (*given.values(), config))):
            # What is wrong is said here already, and not when the component runs.
            read = settings.Settings.read(properties, json_utils.loads(config))
            properties |= {
                name: getattr(read, name) for name in given if name in properties
            }


class Trainer(_OnRanks, trainer.Trainer):
    """TFX's `Trainer`, whose `run_fn` is called by every rank of a job.

    Arguments, inputs, outputs and records are those of `tfx.components.Trainer`. The
    `run_fn` has the lines that any script for keras_hvd has: `keras_hvd.init()`, and a
    `DistributedOptimizer` or a `Strategy`. What rank 0 writes to `serving_model_dir`
    and `model_run_dir` is published; the other ranks' are scratch.

    Args:
        *args: of TFX's `Trainer`.
        num_ranks: how many ranks train, also as a `RuntimeParameter`. None: as
            `custom_config` says.
        time_limit: seconds after which a job that still runs is ended, and the
            execution fails; may be a `RuntimeParameter` too. None: no limit.
        **kwargs: of TFX's `Trainer`.

    Raises:
        ValueError: a number is none; or what TFX's `Trainer` raises.

    Example (TFX is not installed with keras_hvd: see docs/tfx.md):

    >>> trainer = Trainer(  # doctest: +SKIP
    ...     module_file="penguins.py", examples=example_gen.outputs["examples"],
    ...     train_args=tfx.proto.TrainArgs(num_steps=100), num_ranks=4)
    """

    EXECUTOR_SPEC = executor_spec.ExecutorClassSpec(executor.Executor)

    @classmethod
    def get_class_type(cls) -> str:
        # The records are those of TFX's: whoever looks for these finds them.
        return trainer.Trainer.get_class_type()


class Tuner(_OnRanks, tuner.Tuner):
    """TFX's `Tuner`, whose trials train on all ranks of a job.

    Arguments, inputs, outputs and records are those of `tfx.components.Tuner`. Every
    rank calls the `tuner_fn`, which begins with `keras_hvd.init()` and makes a tuner
    of a class that `keras_hvd.keras_tuner.distribute` has made. Rank 0's results are
    published. A further attempt goes on with the search where `directory` of the
    tuner is `fn_args.working_dir`.

    Args:
        *args: of TFX's `Tuner`.
        num_ranks: how many ranks train each trial, also as a `RuntimeParameter`. None:
            as `custom_config` says.
        time_limit: seconds after which a search that still runs is ended, and the
            execution fails; may be a `RuntimeParameter` too. None: no limit.
        **kwargs: of TFX's `Tuner`, but `tune_args`.

    Raises:
        ValueError: a number is none, or `tune_args` are given; or what TFX's `Tuner`
            raises.

    Example (TFX is not installed with keras_hvd: see docs/tfx.md):

    >>> tuner = Tuner(  # doctest: +SKIP
    ...     module_file="penguins.py", examples=example_gen.outputs["examples"],
    ...     train_args=tfx.proto.TrainArgs(num_steps=100), num_ranks=4)
    """

    EXECUTOR_SPEC = executor_spec.ExecutorClassSpec(executor.TunerExecutor)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.spec.exec_properties.get(standard_component_specs.TUNE_ARGS_KEY):
            raise ValueError(
                "keras_hvd.tfx.Tuner: tune_args would have trials train at the same "
                "time; here all ranks train each trial, one after the other: leave it "
                "out"
            )

    @classmethod
    def get_class_type(cls) -> str:
        return tuner.Tuner.get_class_type()


def _is_known_later(value: Any) -> bool:
    return isinstance(value, (data_types.RuntimeParameter, placeholder.Placeholder))
