"""TFX's Trainer and Tuner on several ranks, which all call `run_fn` or `tuner_fn`."""

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
    """Adds the number of ranks and a time limit to a component."""

    def __init__(
        self,
        *args: Any,
        num_ranks: int | data_types.RuntimeParameter | None = None,
        time_limit: float | data_types.RuntimeParameter | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        given = {settings.NUM_RANKS: num_ranks, settings.TIME_LIMIT: time_limit}
        # TFX adds module_path in the same way, without changing its specification.
        properties = self.spec.exec_properties
        properties |= {name: each for name, each in given.items() if each is not None}
        config = properties[standard_component_specs.CUSTOM_CONFIG_KEY]
        later = data_types.RuntimeParameter, placeholder.Placeholder
        if not any(isinstance(each, later) for each in (*given.values(), config)):
            # Raises for wrong values here, before the component runs.
            read = settings.Settings.read(properties, json_utils.loads(config))
            properties |= {
                name: getattr(read, name) for name in given if name in properties
            }


class Trainer(_OnRanks, trainer.Trainer):
    """TFX's `Trainer`, with a `run_fn` that every rank of a job calls.

    Arguments, inputs, outputs and records are those of `tfx.components.Trainer`. The
    `run_fn` needs the lines of any script for keras_hvd: `keras_hvd.init()`, and a
    `DistributedOptimizer` or a `Strategy`. TFX publishes the files of rank 0 in
    `serving_model_dir` and `model_run_dir`; other ranks' files are thrown away.

    Args:
        *args: of TFX's `Trainer`.
        num_ranks: number of ranks, also as a `RuntimeParameter`. None: as in
            `custom_config`.
        time_limit: seconds after which a running job is ended, and the execution fails;
            also as a `RuntimeParameter`. None: no limit.
        **kwargs: of TFX's `Trainer`.

    Raises:
        ValueError: a number is invalid; or an error of TFX's `Trainer`.

    Example (TFX is not installed with keras_hvd: see docs/tfx.md):

    >>> trainer = Trainer(  # doctest: +SKIP
    ...     module_file="penguins.py", examples=example_gen.outputs["examples"],
    ...     train_args=tfx.proto.TrainArgs(num_steps=100), num_ranks=4)
    """

    EXECUTOR_SPEC = executor_spec.ExecutorClassSpec(executor.Executor)

    @classmethod
    def get_class_type(cls) -> str:
        # TFX's own name, by which others find this component in the records.
        return trainer.Trainer.get_class_type()


class Tuner(_OnRanks, tuner.Tuner):
    """TFX's `Tuner`, with trials that train on all ranks of a job.

    Arguments, inputs, outputs and records are those of `tfx.components.Tuner`. Every
    rank calls the `tuner_fn`, which begins with `keras_hvd.init()` and creates a tuner
    of a class from `keras_hvd.keras_tuner.distribute`. TFX publishes rank 0's results.
    Another attempt continues the search if the tuner's `directory` is
    `fn_args.working_dir`.

    Args:
        *args: of TFX's `Tuner`.
        **kwargs: of TFX's `Tuner`, except `tune_args`. Also `num_ranks`, the number of
            ranks that train each trial (None: as in `custom_config`), and `time_limit`,
            the seconds after which a running search is ended, and the execution fails
            (None: no limit); both also as a `RuntimeParameter`.

    Raises:
        ValueError: a number is invalid, or `tune_args` are given; or an error of TFX's
            `Tuner`.

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
                "keras_hvd.tfx.Tuner: remove tune_args, which would train trials at "
                "the same time; here all ranks train each trial, one after the other"
            )

    @classmethod
    def get_class_type(cls) -> str:
        return tuner.Tuner.get_class_type()
