"""Executes a component: starts a job with ranks that call the user's function."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging
from tfx import types
from tfx.components.trainer import executor
from tfx.components.tuner import executor as tuner_executor
from tfx.components.util import udf_utils
from tfx.dsl.io import fileio
from tfx.orchestration.portable import launcher
from tfx.proto.orchestration import execution_result_pb2
from tfx.types import artifact_utils, standard_component_specs
from tfx.utils import json_utils, path_utils

from keras_hvd.job import cores
from keras_hvd.launch import function as interactive
from keras_hvd.mixin import Mixin
from keras_hvd.tfx import rank
from keras_hvd.tfx.settings import NUM_RANKS, TIME_LIMIT, Settings

_Artifacts = dict[str, list[types.Artifact]]

# Codes of gRPC, as TFX records them.
_CANCELLED = 1
_UNKNOWN = 2
_DEADLINE_EXCEEDED = 4


class TrainingFailedError(launcher._ExecutionFailedError):
    """Training on ranks failed: TFX records the execution as failed, with this text.

    `message` has the rank, the reason and the traceback; `code` is one of gRPC's.
    """

    # TFX's launcher records no details of other exceptions. Runners that do not use the
    # launcher would ignore a returned result.
    def __init__(self, message: str, code: int = _UNKNOWN):
        result = execution_result_pb2.ExecutionResult(code=code, result_message=message)
        output = execution_result_pb2.ExecutorOutput(execution_result=result)
        super().__init__(message, output)


class _OnRanks(Mixin):
    """The changes to TFX's executors."""

    # Runs on each rank.
    _on_rank: Callable[[rank.Component], None]

    def Do(
        self,
        input_dict: _Artifacts,
        output_dict: _Artifacts,
        exec_properties: dict[str, Any],
    ) -> None:
        """Runs the component; the properties may have `num_ranks` and `time_limit`.

        Raises TrainingFailedError if a rank failed, nothing was exported, the time was
        over, or the orchestrator ended it. TFX then publishes nothing.
        """
        self._log_startup(input_dict, output_dict, exec_properties)
        with _failures_in_records():
            settings = _settings(exec_properties)
            _say(settings.num_ranks)
            with contextlib.ExitStack() as stack:
                scratch = tempfile.mkdtemp(prefix="keras_hvd-tfx-")
                stack.callback(shutil.rmtree, scratch, ignore_errors=True)
                working_dir = self._working_dir(input_dict, exec_properties, scratch)
                component = rank.Component(
                    artifacts=json_utils.dumps([input_dict, output_dict]),
                    exec_properties=_with_installed_module(exec_properties, scratch),
                    module_dirs=_module_dirs(exec_properties, scratch),
                    working_dir=working_dir,
                    scratch=scratch,
                    time_limit=settings.time_limit,
                )
                _run(self._on_rank, component, settings)
                self._require_result(output_dict)
        # Only after success: after a failure, the next attempt continues from there.
        if fileio.exists(working_dir):
            fileio.rmtree(working_dir)

    def _working_dir(
        self, input_dict: _Artifacts, exec_properties: dict[str, Any], scratch: str
    ) -> str:
        """A folder that the next attempt at the same execution finds again.

        TFX's own folder has another name in each execution.
        """
        own = self._context and self._context.stateful_working_dir
        if not own:
            logging.info(
                "keras_hvd.tfx: this runner keeps no working directory: another "
                "attempt starts from the beginning"
            )
            path = os.path.join(scratch, "working_dir")
        else:
            name = f"keras_hvd-{_fingerprint(input_dict, exec_properties)}"
            path = os.path.join(os.path.dirname(own.rstrip("/")), name)
        fileio.makedirs(path)
        return path

    def _require_result(self, output_dict: _Artifacts) -> None:
        """Raises if there is nothing to publish."""


class Executor(_OnRanks, executor.GenericExecutor):
    """Executes TFX's Trainer on several ranks.

    Use it as `custom_executor_spec=ExecutorClassSpec(Executor)` of TFX's `Trainer`,
    with the number of ranks in `custom_config`. `keras_hvd.tfx.Trainer` already uses
    it.

    Example (TFX is not installed with keras_hvd: see docs/tfx.md):

    >>> trainer = tfx.components.Trainer(  # doctest: +SKIP
    ...     module_file="penguins.py", examples=example_gen.outputs["examples"],
    ...     custom_config={"num_ranks": 4},
    ...     custom_executor_spec=executor_spec.ExecutorClassSpec(Executor))
    """

    _on_rank = staticmethod(rank.train)

    def _require_result(self, output_dict: _Artifacts) -> None:
        models = output_dict[standard_component_specs.MODEL_KEY]
        path = path_utils.serving_model_dir(artifact_utils.get_single_uri(models))
        if not fileio.exists(path):
            raise TrainingFailedError(
                f"run_fn has exported nothing on rank 0: there is no {path}. End "
                "run_fn with model.export(fn_args.serving_model_dir), on rank 0 or on "
                "all ranks"
            )


class TunerExecutor(_OnRanks, tuner_executor.Executor):
    """Executes `keras_hvd.tfx.Tuner`."""

    _on_rank = staticmethod(rank.tune)


def _settings(exec_properties: dict[str, Any]) -> Settings:
    config = exec_properties.get(standard_component_specs.CUSTOM_CONFIG_KEY)
    return Settings.read(exec_properties, json_utils.loads(config or "null"))


def _say(ranks: int) -> None:
    available = cores.available()
    said = f"keras_hvd.tfx: {ranks} ranks train"
    if ranks > available:
        logging.warning("%s on %d cores, and take turns", said, available)
    else:
        logging.info(said)


def _fingerprint(input_dict: _Artifacts, exec_properties: dict[str, Any]) -> str:
    """A digest that is the same in two executions with the same training."""
    uris = {key: [each.uri for each in value] for key, value in input_dict.items()}
    # A wheel's name contains the digest of its content.
    told = _without_settings(exec_properties)
    key = standard_component_specs.CUSTOM_CONFIG_KEY
    config = json_utils.loads(told.pop(key, None) or "null")
    if isinstance(config, dict):
        config = _without_settings(config)
    digest = hashlib.sha256(json_utils.dumps([uris, told, config]).encode())
    module_file = exec_properties.get(standard_component_specs.MODULE_FILE_KEY)
    if module_file:
        with fileio.open(module_file, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _without_settings(told: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in told.items() if k not in (NUM_RANKS, TIME_LIMIT)}


def _with_installed_module(
    exec_properties: dict[str, Any], scratch: str
) -> dict[str, Any]:
    """The properties for ranks, with the module's wheel unpacked once for all."""
    key = standard_component_specs.MODULE_PATH_KEY
    module, wheels = udf_utils.decode_user_module_key(exec_properties.get(key))
    for wheel in wheels:
        udf_utils.install_to_temp_directory(wheel, _modules(scratch))
    return {**exec_properties, key: module}


def _module_dirs(exec_properties: dict[str, Any], scratch: str) -> list[str]:
    """The folders of the module and its helpers."""
    module_file = exec_properties.get(standard_component_specs.MODULE_FILE_KEY)
    beside = [os.path.dirname(os.path.abspath(module_file))] if module_file else []
    return [*beside, _modules(scratch)]


def _modules(scratch: str) -> str:
    return os.path.join(scratch, "modules")


def _run(
    on_rank: Callable[[rank.Component], None],
    component: rank.Component,
    settings: Settings,
) -> None:
    with _ended_by_sigterm():
        try:
            interactive.run(on_rank, args=(component,), np=settings.num_ranks)
        except KeyboardInterrupt as error:
            raise TrainingFailedError(
                f"training was cancelled by {str(error) or 'an interrupt'}: all "
                f"{settings.num_ranks} ranks have ended",
                _CANCELLED,
            ) from error
        except Exception as error:
            late = rank.where_late(component, settings.num_ranks)
            if late:
                raise TrainingFailedError(late, _DEADLINE_EXCEEDED) from error
            raise TrainingFailedError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """The text to record: the error, the rank and its traceback."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    cause = error.__cause__
    return f"{text}\n{cause}" if isinstance(cause, interactive.RankTraceback) else text


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM, with which orchestrators end components, act like Ctrl-C.

    Otherwise it ends this process before it can report to TFX. Only a program's main
    thread may set a handler; the program's own handler stays.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield
        return

    def interrupt(number, frame):
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _failures_in_records() -> Iterator[None]:
    """Makes TFX record errors that happen before any rank has started."""
    try:
        yield
    except TrainingFailedError:
        raise
    except Exception as error:
        raise TrainingFailedError(_reason(error)) from error
