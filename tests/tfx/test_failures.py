"""Faults of a rank: the execution fails, says why, and leaves nothing."""

import json
import os
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from ml_metadata.proto import metadata_store_pb2

import keras_hvd
from keras_hvd.tfx.executor import TrainingFailedError

# --- in a pipeline ------------------------------------------------------------------


@pytest.fixture
def run(workplace, request):
    """Runs the pipeline on two ranks; their notes go to a folder of the test."""
    notes = workplace.notes(request.node.name)

    def run():
        workplace.run(
            lambda **arguments: keras_hvd.tfx.Trainer(
                custom_config={"notes": str(notes)}, num_ranks=2, **arguments
            )
        )

    run.notes = notes
    return run


def failed(workplace) -> dict:
    """Checks the store's last training: a failure, with nothing published."""
    execution = workplace.trainings()[-1]
    assert execution.last_known_state == metadata_store_pb2.Execution.FAILED
    events = workplace.store.get_events_by_execution_ids([execution.id])
    assert {event.type for event in events} == {metadata_store_pb2.Event.INPUT}
    folder = workplace.root / "pipeline" / "Trainer"
    for name in ("model", "model_run"):
        assert not (folder / name / str(execution.id)).exists()
    assert not (workplace.root / "serving").exists()
    result = execution.custom_properties["__execution_result__"].string_value
    return json.loads(result)


def test_a_retry_goes_on_from_the_last_checkpoint(run, workplace, network):
    (run.notes / "fault").write_text("raise")
    with pytest.raises(Exception, match="the loss is odd"):
        run()
    message = failed(workplace)["resultMessage"]
    assert message.startswith("ArithmeticError: the loss is odd\non rank 1:\n")
    assert 'raise ArithmeticError("the loss is odd")' in message

    (run.notes / "fault").unlink()
    run()
    assert workplace.trainings()[-1].last_known_state == (
        metadata_store_pb2.Execution.COMPLETE
    )
    noted = json.loads((run.notes / "rank-1.json").read_text())
    assert noted["epochs"][-1] == 3
    assert noted["epochs"][0] > 0
    expected = trained_at_once(workplace, network)
    with np.load(run.notes / "weights-0.npz") as file:
        for name, weights in zip(file.files, expected):
            np.testing.assert_allclose(file[name], weights, rtol=0, atol=1e-5)
    shutil.rmtree(workplace.root / "serving")


def trained_at_once(workplace, network) -> list[np.ndarray]:
    """The weights that plain Keras comes to in one process, without a break."""
    x, y = workplace.samples()
    model = network.make()
    model.compile(network.optimizer(), "mse")
    for _ in range(4):
        for i in range(len(x) // 12):
            rows = slice(12 * i, 12 * i + 12)
            columns = {name: x[rows, [j]][:, None] for j, name in enumerate("abc")}
            model.train_on_batch(columns, y[rows])
    return model.get_weights()


def test_a_killed_rank_is_named(run, workplace, capfd):
    (run.notes / "fault").write_text("kill")
    with pytest.raises(Exception, match="rank 1"):
        run()
    message = failed(workplace)["resultMessage"]
    assert "RankFailedError" in message and "rank 1 (pid " in message
    assert "killed by signal 9" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cancellation_ends_all_ranks(run, workplace, number):
    (run.notes / "fault").write_text("hang")
    killer = threading.Thread(target=when_both_hang, args=(run.notes, number))
    killer.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Exception, match="cancelled"):
        run()
    killer.join()
    assert signal.getsignal(signal.SIGTERM) is before
    result = failed(workplace)
    assert result["code"] == 1  # gRPC's CANCELLED
    assert "all 2 ranks have ended" in result["resultMessage"]
    by = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "an interrupt"}[number]
    assert f"cancelled by {by}: " in result["resultMessage"]


def when_both_hang(notes, number):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if all((notes / f"hangs-{rank}").exists() for rank in (0, 1)):
            break
        time.sleep(0.05)
    os.kill(os.getpid(), number)


# --- modules that cannot train on ranks ---------------------------------------------


def fails(component, module, match, **properties) -> str:
    with pytest.raises(TrainingFailedError, match=match) as raised:
        component.execute(module, **{"num_ranks": 1, **properties})
    assert raised.value.executor_output.execution_result.result_message == (
        str(raised.value)
    )
    return str(raised.value)


def test_a_module_that_cannot_be_imported(component):
    said = fails(component, "import no_such_module", "No module named 'no_such_module'")
    assert "module_of_test.py" in said and "can be imported" in said


def test_a_module_without_a_run_fn(component):
    said = fails(component, "def train(fn_args): pass", "no attribute 'run_fn'")
    assert "module_of_test.py" in said and "run_fn(fn_args)" in said


def test_ranks_that_never_end(component):
    module = "import signal\ndef run_fn(fn_args): signal.pause()"
    with pytest.raises(TrainingFailedError) as raised:
        component.execute(module, num_ranks=2, time_limit=8)
    result = raised.value.executor_output.execution_result
    assert result.code == 4  # gRPC's DEADLINE_EXCEEDED
    said = result.result_message
    assert said.startswith("training had not ended after time_limit=8 s")
    for rank in (0, 1):
        assert f"rank {rank} was here:" in said
    assert len(re.findall(r'module_of_test\.py", line 2 in run_fn', said)) == 2


def test_a_run_fn_that_exports_nothing(component):
    said = fails(component, "def run_fn(fn_args): pass", "exported nothing on rank 0")
    assert str(component.model / "Format-Serving") in said
    assert "model.export(fn_args.serving_model_dir)" in said


# A run_fn, but for the lines that each test puts in place of `#`.
TRAINS = """
import pathlib
import keras, keras_hvd, numpy as np, tensorflow as tf

class Noted(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        (NOTES / f"step-{batch}").touch()

def run_fn(fn_args):
    global NOTES
    NOTES = pathlib.Path(fn_args.custom_config["notes"])
    x = np.ones([4, 1])
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    #
    model.compile(optimizer, "mse")
    model.fit(x, x, verbose=0, callbacks=[Noted()])
    model.export(fn_args.serving_model_dir, verbose=False)
"""


def test_a_run_fn_that_forgets_init(component):
    said = fails(component, TRAINS, r"Call keras_hvd\.init\(\)", num_ranks=2)
    assert "on rank " in said
    assert [*component.notes.iterdir()] == []


def test_a_run_fn_whose_optimizer_is_a_plain_one(component):
    module = TRAINS.replace("#", "keras_hvd.init()")
    said = fails(component, module, "SGD.*is not distributed", num_ranks=2)
    assert "keras_hvd.DistributedOptimizer" in said
    assert [*component.notes.iterdir()] == []


def test_a_loop_of_its_own_on_each_rank(component):
    loop = """keras_hvd.init()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return"""
    module = TRAINS.replace("#", loop)
    said = fails(component, module, "never exchanged anything", num_ranks=2)
    assert "keras_hvd.DistributedGradientTape" in said


def test_a_run_fn_that_returns_early_on_one_rank(component):
    early = """keras_hvd.init()
    if keras_hvd.rank() == 1:
        return
    optimizer = keras_hvd.DistributedOptimizer(optimizer)"""
    said = fails(component, TRAINS.replace("#", early), "rank 1", num_ranks=2)
    assert "on rank" in said
