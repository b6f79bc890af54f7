"""Each rank's part in a component: it calls the user's function as TFX would."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import sys
from collections.abc import Callable
from typing import Any

from tfx.components.trainer import executor, fn_args_utils
from tfx.components.tuner import executor as tuner_executor
from tfx.components.util import udf_utils
from tfx.types import standard_component_specs
from tfx.utils import json_utils

from keras_hvd.tfx import joint_training
from keras_hvd.world import environment

# The user's function of each component, and its purpose.
_PURPOSES = {
    standard_component_specs.RUN_FN_KEY: "trains a model and exports it",
    standard_component_specs.TUNER_FN_KEY: "makes a tuner, and what its search takes",
}


@dataclasses.dataclass(frozen=True)
class Component:
    """The facts that ranks need about the component."""

    artifacts: str  # inputs and outputs, as TFX serializes them
    exec_properties: dict[str, Any]
    module_dirs: list[str]  # where to import the user's module from
    working_dir: str  # shared by all attempts
    scratch: str  # a temporary folder
    time_limit: float | None  # seconds

    def of_rank(self, number: int, name: str) -> str:
        """The path of a temporary file or folder of one rank."""
        return os.path.join(self.scratch, f"rank-{number}", name)


def train(component: Component) -> None:
    """Calls the user's `run_fn` on this rank."""
    world = _begin(component)
    fn_args = _fn_args(component, world.rank)
    run_fn = _load(component, standard_component_specs.RUN_FN_KEY)
    if world.size > 1:
        joint_training.require_in_fit()
    run_fn(fn_args)
    if world.size > 1:
        joint_training.require_has_been()


def tune(component: Component) -> None:
    """Searches with the tuner that the user's `tuner_fn` makes on this rank."""
    world = _begin(component)
    inputs, outputs = json_utils.loads(component.artifacts)
    fn_args = fn_args_utils.get_common_fn_args(
        inputs, component.exec_properties, component.working_dir
    )
    tuner_fn = _load(component, standard_component_specs.TUNER_FN_KEY)
    tuner, arguments = tuner_fn(fn_args)
    if world.size > 1:
        joint_training.require_one_search(tuner)
    tuner.search_space_summary()
    tuner.search(**arguments)
    tuner.results_summary()
    if world.rank == 0:
        tuner_executor.write_best_hyperparameters(tuner, outputs)


def _begin(component: Component) -> environment.World:
    world = environment.world()
    os.makedirs(component.of_rank(world.rank, ""))
    if component.time_limit is not None:
        _end_after(component.time_limit, component.of_rank(world.rank, _LATE))
    return world


# --- the time limit -----------------------------------------------------------------

_LATE = "where-it-was-late"


def _end_after(seconds: float, path: str) -> None:
    """Ends this process after `seconds`, in any state, and writes its traceback."""
    # Never closed, because a thread of the interpreter writes to it.
    file = open(path, "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(seconds, exit=True, file=file)


def where_late(component: Component, ranks: int) -> str:
    """The places where the time limit ended ranks; "" if it ended none."""
    said = []
    for number in range(ranks):
        path = component.of_rank(number, _LATE)
        if os.path.exists(path) and os.path.getsize(path):
            with open(path) as file:
                said.append(f"rank {number} was here:\n{file.read().rstrip()}")
    if not said:
        return ""
    limit = f"training had not ended after time_limit={component.time_limit:g} s"
    return "\n".join([limit, *said])


# --- the user's function -------------------------------------------------------------


def _fn_args(component: Component, number: int) -> fn_args_utils.FnArgs:
    inputs, outputs = json_utils.loads(component.artifacts)
    # Normally TFX's executor fills them. Here, because data accessors cannot be
    # pickled.
    fn_args = executor.GenericExecutor()._GetFnArgs(
        inputs, outputs, component.exec_properties
    )
    fn_args.working_dir = component.working_dir
    if number > 0:
        for name in ("serving_model_dir", "eval_model_dir", "model_run_dir"):
            setattr(fn_args, name, component.of_rank(number, name))
        os.makedirs(fn_args.model_run_dir)  # as TFX does on rank 0
    return fn_args


def _load(component: Component, name: str) -> Callable[[fn_args_utils.FnArgs], Any]:
    sys.path += component.module_dirs
    properties = component.exec_properties
    try:
        function = udf_utils.get_fn(properties, name)
    except Exception as error:
        specs = standard_component_specs
        keys = (specs.MODULE_PATH_KEY, specs.MODULE_FILE_KEY, name)
        where = next(filter(None, map(properties.get, keys)), None)
        raise ImportError(
            f"cannot load {name} from {where!r}: {type(error).__name__}: {error}. That "
            f"must be a module that can be imported, with a function {name}(fn_args), "
            f"which {_PURPOSES[name]}"
        ) from error
    return function
