"""TFX's Trainer, whose `run_fn` several ranks call."""

from __future__ import annotations

from typing import Any

from tfx.components.trainer import component
from tfx.dsl.components.base import executor_spec
from tfx.dsl.placeholder import placeholder
from tfx.orchestration import data_types
from tfx.types import standard_component_specs
from tfx.utils import json_utils

from keras_hvd.tfx import settings
from keras_hvd.tfx.executor import Executor


class Trainer(component.Trainer):
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

    EXECUTOR_SPEC = executor_spec.ExecutorClassSpec(Executor)

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

    @classmethod
    def get_class_type(cls) -> str:
        # The records are those of TFX's Trainer: whoever looks for these finds them.
        return component.Trainer.get_class_type()


def _is_known_later(value: Any) -> bool:
    return isinstance(value, (data_types.RuntimeParameter, placeholder.Placeholder))
