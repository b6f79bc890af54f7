"""A pipeline whose Trainer trains on one, two and three ranks: all make one model."""

import json
import logging
import os
import subprocess
import sys

import absl.logging
import numpy as np
import pytest
from ml_metadata.proto import metadata_store_pb2
from tfx import v1 as tfx
from tfx.dsl.components.base import executor_spec

import keras_hvd

RANKS = (1, 2, 3)


def by_executor(ranks, notes):
    """Only the executor of TFX's own Trainer is another one."""
    return lambda **arguments: tfx.components.Trainer(
        custom_config={"notes": notes, "num_ranks": ranks},
        custom_executor_spec=executor_spec.ExecutorClassSpec(keras_hvd.tfx.Executor),
        **arguments,
    )


def by_argument(ranks, notes):
    return lambda **arguments: keras_hvd.tfx.Trainer(
        custom_config={"notes": notes}, num_ranks=ranks, **arguments
    )


def by_runtime_parameter(ranks, notes):
    parameter = tfx.dsl.experimental.RuntimeParameter("ranks", int, default=ranks)
    return lambda **arguments: keras_hvd.tfx.Trainer(
        custom_config={"notes": notes}, num_ranks=parameter, **arguments
    )


# For each number of ranks another way to tell it.
WAYS = dict(zip(RANKS, (by_executor, by_argument, by_runtime_parameter)))


@pytest.fixture(scope="module")
def runs(workplace):
    """The workplace after three runs, and the lines that were logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    absl.logging.get_absl_logger().addHandler(handler)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        for ranks in RANKS:
            workplace.run(WAYS[ranks](ranks, str(workplace.notes(str(ranks)))))
    finally:
        os.sched_setaffinity(0, cores)
        absl.logging.get_absl_logger().removeHandler(handler)
    return workplace, lines


@pytest.fixture(scope="module")
def of_one_process(runs, network):
    """The model that plain Keras trains, with neither TFX nor keras_hvd."""
    workplace, _ = runs
    x, y = workplace.samples()
    batch_size = 12
    steps = len(x) // batch_size
    assert len(x) % batch_size
    model = network.make()
    model.compile(network.optimizer(), "mse")
    columns = {name: x[:, [i]] for i, name in enumerate("abc")}
    for _ in range(4):
        for step in range(steps):
            rows = slice(step * batch_size, (step + 1) * batch_size)
            model.train_on_batch(
                {name: column[rows] for name, column in columns.items()}, y[rows]
            )
    return model


@pytest.mark.parametrize("ranks", RANKS)
def test_the_weights_are_those_of_one_process(runs, of_one_process, ranks):
    workplace, _ = runs
    for rank in range(ranks):
        with np.load(workplace.notes(str(ranks)) / f"weights-{rank}.npz") as file:
            weights = [file[name] for name in file.files]
        for mine, its in zip(weights, of_one_process.get_weights()):
            np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
def test_one_model_is_published(runs, ranks):
    workplace, _ = runs
    execution = workplace.trainings()[ranks - 1]
    assert execution.last_known_state == metadata_store_pb2.Execution.COMPLETE
    events = workplace.store.get_events_by_execution_ids([execution.id])
    ids = [
        event.artifact_id
        for event in events
        if event.type == metadata_store_pb2.Event.OUTPUT
    ]
    published = {
        artifact.uri: metadata_store_pb2.Artifact.State.Name(artifact.state)
        for artifact in workplace.store.get_artifacts_by_id(ids)
    }
    folder = workplace.root / "pipeline" / "Trainer"
    model, model_run = (
        str(folder / name / str(execution.id)) for name in ("model", "model_run")
    )
    assert published == {model: "LIVE", model_run: "LIVE"}
    files = [path.name for path in (folder / "model" / str(execution.id)).iterdir()]
    assert files == ["Format-Serving"]
    assert [*(folder / "model_run" / str(execution.id) / "train").glob("events*")]
    assert len([*(workplace.root / "serving").iterdir()]) == len(RANKS)


@pytest.mark.parametrize("ranks", RANKS)
def test_only_rank_0_has_the_components_folders(runs, ranks):
    workplace, _ = runs
    execution = workplace.trainings()[ranks - 1]
    pipeline = str(workplace.root / "pipeline")
    for rank in range(ranks):
        path = workplace.notes(str(ranks)) / f"rank-{rank}.json"
        noted = json.loads(path.read_text())
        assert noted["size"] == ranks
        for name in ("serving_model_dir", "model_run_dir"):
            assert noted[name].startswith(pipeline) == (rank == 0)
        # The wheel was installed for the ranks alone.
        assert not noted["helper"].startswith(pipeline)
        assert not os.path.exists(noted["helper"])
    assert f"/{execution.id}/" in noted["serving_model_dir"] or rank > 0


def test_no_attempt_leaves_its_working_directory(runs):
    workplace, _ = runs
    folder = workplace.root / "pipeline/Trainer/.system/stateful_working_dir"
    assert [*folder.iterdir()] == []


def test_more_ranks_than_cores_are_worth_a_line(runs):
    _, lines = runs
    said = [line for line in lines if "take turns" in line]
    assert said == ["keras_hvd.tfx: 3 ranks train on 2 cores, and take turns"]


def test_what_was_trained_is_taken_from_the_cache(runs):
    workplace, _ = runs
    workplace.run(by_argument(2, str(workplace.notes("2"))))
    states = [execution.last_known_state for execution in workplace.trainings()]
    complete, cached = (
        metadata_store_pb2.Execution.COMPLETE,
        metadata_store_pb2.Execution.CACHED,
    )
    assert states == [complete] * 3 + [cached]


def test_the_model_predicts_without_keras_hvd(runs, of_one_process, tmp_path):
    workplace, _ = runs
    x, _ = workplace.samples()
    (tmp_path / "inputs.json").write_text(json.dumps(x.tolist()))
    program = tmp_path / "serve.py"
    program.write_text(SERVE)
    pushed = sorted((workplace.root / "serving").iterdir())[1]
    done = subprocess.run(
        [sys.executable, str(program), str(pushed), str(tmp_path / "inputs.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    columns = {name: x[:, [i]] for i, name in enumerate("abc")}
    expected = of_one_process.predict(columns, verbose=0)
    np.testing.assert_allclose(json.loads(done.stdout), expected, atol=1e-5)


SERVE = """
import json, sys
sys.modules["keras_hvd"] = None  # to import it would be an error
import tensorflow as tf
rows = tf.constant(json.load(open(sys.argv[2])), tf.float32)
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
(result,) = serve(a=rows[:, :1], b=rows[:, 1:2], c=rows[:, 2:]).values()
print(json.dumps(result.numpy().tolist()))
"""


def test_tfx_finds_its_own_trainer(runs):
    assert keras_hvd.tfx.Trainer.get_class_type() == (
        tfx.components.Trainer.get_class_type()
    )
