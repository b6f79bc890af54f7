"""Fixtures of the tests of TFX: examples, pipelines, and a check for leftovers."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import tempfile
import types
import uuid
from collections.abc import Iterator
from typing import Any

import ml_metadata
import numpy as np
import pytest
import tensorflow as tf
from ml_metadata.proto import metadata_store_pb2
from tfx import v1 as tfx
from tfx.types import standard_artifacts

from keras_hvd.tfx import Executor

MODULES = pathlib.Path(__file__).parent / "modules"
TRAINER_TYPE = "tfx.components.trainer.component.Trainer"

# Every process of a test carries it, even if its parent has changed.
_MARK = "KERAS_HVD_TEST_MARK"


# In the background of a shell pytest ignores interrupts, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _marked() -> dict[int, str]:
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if f"{_MARK}={os.environ[_MARK]}".encode() in environment.split(b"\0"):
            found[int(process.name)] = command.decode()
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch) -> Iterator[None]:
    """No process, and no scratch folder, even if the test failed."""
    monkeypatch.setenv(_MARK, uuid.uuid4().hex)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    # This process has the environment that it was started with.
    assert _marked() == {}
    assert [*scratch.glob("keras_hvd*")] == []


@pytest.fixture(scope="session")
def network() -> types.ModuleType:
    """The module of the network, which no rank could import from this process' path."""
    path = MODULES / "wine_network.py"
    spec = importlib.util.spec_from_file_location("wine_network", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> "Workplace":
    """The place for the pipelines of a test file: they share store and examples."""
    made = Workplace(tmp_path_factory.mktemp("pipeline"))
    made.write_data()
    return made


@dataclasses.dataclass
class Workplace:
    """A pipeline's folders, and the records of its store."""

    root: pathlib.Path
    rows: int = 101
    modules = MODULES

    @property
    def connection(self) -> metadata_store_pb2.ConnectionConfig:
        return tfx.orchestration.metadata.sqlite_metadata_connection_config(
            str(self.root / "metadata.sqlite")
        )

    @property
    def store(self) -> ml_metadata.MetadataStore:
        return ml_metadata.MetadataStore(self.connection)

    @property
    def data(self) -> pathlib.Path:
        return self.root / "data"

    def write_data(self) -> None:
        self.data.mkdir()
        numbers = np.random.default_rng(0).normal(size=(self.rows, 3))
        target = numbers @ [1.0, -2.0, 0.5] + 0.25
        table = np.column_stack([numbers, target])
        lines = [",".join(map(repr, row)) for row in table.tolist()]
        (self.data / "rows.csv").write_text("\n".join(["a,b,c,y", *lines]))

    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """The training data from CsvExampleGen, in its order."""
        (path,) = self.root.glob("pipeline/CsvExampleGen/examples/*/Split-train/*.gz")
        rows = []
        for record in tf.data.TFRecordDataset(str(path), "GZIP").as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            rows.append([features[name].float_list.value[0] for name in "abcy"])
        rows = np.array(rows)
        return rows[:, :3], rows[:, 3:]

    def run(self, make_trainer) -> None:
        """Runs CsvExampleGen, a Trainer and Pusher."""
        example_gen = tfx.components.CsvExampleGen(input_base=str(self.data))
        trainer = make_trainer(
            module_file=str(MODULES / "training.py"),
            examples=example_gen.outputs["examples"],
        )
        pusher = tfx.components.Pusher(
            model=trainer.outputs["model"],
            push_destination=tfx.proto.PushDestination(
                filesystem=tfx.proto.PushDestination.Filesystem(
                    base_directory=str(self.root / "serving")
                )
            ),
        )
        self.run_components([example_gen, trainer, pusher])

    def run_components(self, components: list[Any]) -> None:
        """Runs a pipeline of these."""
        pipeline = tfx.dsl.Pipeline(
            pipeline_name="test",
            pipeline_root=str(self.root / "pipeline"),
            components=components,
            enable_cache=True,
            metadata_connection_config=self.connection,
        )
        tfx.orchestration.LocalDagRunner().run(pipeline)

    def notes(self, name: str) -> pathlib.Path:
        """A folder for the notes of a run's ranks."""
        folder = self.root / f"notes-{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def trainings(self) -> list[metadata_store_pb2.Execution]:
        """The executions of Trainers, in the order of their ids."""
        return sorted(
            self.store.get_executions_by_type(TRAINER_TYPE), key=lambda each: each.id
        )


@pytest.fixture
def component(tmp_path):
    """Executes the component by itself, on examples of a few files."""
    return Component(tmp_path)


class Component:
    """A Trainer's execution without a pipeline."""

    MODULES = MODULES
    # Sizes that nothing divides.
    FILES = (5, 7, 11)

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.model = folder / "model"
        self.inputs = {"examples": [self._examples(folder / "examples")]}
        self.outputs = {
            "model": [self._artifact(standard_artifacts.Model, self.model)],
            "model_run": [
                self._artifact(standard_artifacts.ModelRun, folder / "model_run")
            ],
        }

    def execute(
        self,
        module: str | pathlib.Path,
        executor: type = Executor,
        **properties: Any,
    ) -> None:
        """Executes a module, given as its path or its text.

        Args:
            module: its `run_fn` is called, or another function, as the executor does.
            executor: the class.
            **properties: `num_ranks` and others.
        """
        if isinstance(module, str):
            path = self.folder / "module_of_test.py"
            path.write_text(module)
            module = path
        config = {"notes": str(self.notes), **properties.pop("custom_config", {})}
        executor().Do(
            self.inputs,
            self.outputs,
            {
                "module_file": str(module),
                "train_args": "{}",
                "eval_args": "{}",
                "custom_config": json.dumps(config),
                **properties,
            },
        )

    def noted(self, rank: int) -> dict[str, Any]:
        return json.loads((self.notes / f"rank-{rank}.json").read_text())

    def add(self, key: str, kind: type, content: dict[str, str]) -> None:
        """Adds an input, of files with their texts."""
        folder = self.folder / key
        for name, text in content.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.inputs[key] = [self._artifact(kind, folder)]

    def output(self, kind: type) -> list[Any]:
        """An output of a kind, whose folder has its name."""
        return [self._artifact(kind, self.folder / kind.TYPE_NAME)]

    @staticmethod
    def _artifact(kind: type, folder: pathlib.Path) -> Any:
        folder.mkdir(exist_ok=True)
        artifact = kind()
        artifact.uri = str(folder)
        return artifact

    def _examples(self, folder: pathlib.Path) -> standard_artifacts.Examples:
        artifact = self._artifact(standard_artifacts.Examples, folder)
        artifact.split_names = '["train", "eval"]'
        row = 0
        for number, rows in enumerate(self.FILES):
            for split in ("train", "eval"):
                path = folder / f"Split-{split}" / f"data-{number:05d}.gz"
                path.parent.mkdir(exist_ok=True)
                with tf.io.TFRecordWriter(str(path), "GZIP") as writer:
                    for i in range(row, row + rows):
                        writer.write(_example(i))
            row += rows
        return artifact


def _example(row: int) -> bytes:
    values = {"a": row % 3, "b": row % 5, "c": 1, "y": row}
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                name: tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
                for name, value in values.items()
            }
        )
    ).SerializeToString()
