"""TensorBoard, W&B and MLflow, used as alone: one run, with the logs of all ranks."""

import json
import os
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

# MLflow's file store needs no server, but a variable. And nothing reports its use.
os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "DO_NOT_TRACK": "true"}

mlflow = pytest.importorskip("mlflow", reason="needs the extra 'trackers'")
wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

SCRIPT = Path(__file__).parent / "ranks" / "trackers.py"
LOGS = ("loss", "mae", "val_loss", "val_mae")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which two ranks have trained, under each of the trackers."""
    folder = tmp_path_factory.mktemp("trackers")
    command = (sys.executable, "-m", "keras_hvd.launch", "-np", "2", sys.executable)
    done = subprocess.run(
        [*command, SCRIPT],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def expected():
    """The logs of one process of plain Keras with all the data, epoch by epoch."""
    script = runpy.run_path(str(SCRIPT))
    x, y = script["data"]()
    model = script["model_with"](keras.optimizers.SGD(0.1))
    fitted = model.fit(
        x,
        y,
        batch_size=script["BATCH"],
        epochs=script["EPOCHS"],
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
    )
    return fitted.history


def require_equal(logged, expected):
    assert logged.keys() == set(LOGS)
    for name in LOGS:
        np.testing.assert_allclose(logged[name], expected[name], rtol=1e-5)


def test_tensorboard(folder, expected):
    from tensorboard.backend.event_processing import event_accumulator

    logged = {}
    for part, prefix in (("train", ""), ("validation", "val_")):
        (file,) = (folder / "logs" / part).iterdir()
        events = event_accumulator.EventAccumulator(str(file)).Reload()
        for name in ("loss", "mae"):
            values = events.Tensors(f"epoch_{name}")
            logged[prefix + name] = [
                struct.unpack("<f", each.tensor_proto.tensor_content)[0]
                for each in values
            ]
    require_equal(logged, expected)


def test_wandb_offline(folder, expected):
    (run,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    logged = {name: [] for name in LOGS}
    for record in records(run.read_bytes()):
        for item in record.history.item:
            key = "/".join(item.nested_key) or item.key
            if key.removeprefix("epoch/") in logged:
                logged[key.removeprefix("epoch/")].append(json.loads(item.value_json))
    require_equal(logged, expected)


def records(data):
    """The records of a run: LevelDB's log format, in blocks of 32 KiB."""
    whole = b""
    place = 7  # the file's own header
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all, or the last, of a record
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.mark.parametrize("way", ["callback", "autolog"])
def test_mlflow(folder, expected, way):
    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    runs = client.search_runs(["0"])
    assert len(runs) == 2
    (run,) = (each for each in runs if each.info.run_name == way)
    assert run.info.status == "FINISHED"
    logged = {}
    for name in LOGS:
        history = client.get_metric_history(run.info.run_id, name)
        of_times = {each.timestamp: each.value for each in history}
        logged[name] = [of_times[time] for time in sorted(of_times)]
    require_equal(logged, expected)
    if way == "autolog":
        # With the model, which needs neither of the two.
        (saved,) = (folder / "mlruns").rglob("model.keras")
        assert "SGD" in str(keras.models.load_model(saved).optimizer)
