"""Trainings in the pods that the manifests of examples/kubernetes become."""

import json
import re
import subprocess
import time
from pathlib import Path

import keras
import numpy as np
import pods
import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
USER = 1000
EVICTED, TRY_AGAIN = 143, 75
LAUNCHER = "train-launcher-launcher"
# As long as names of new pods have been seen to stay unknown.
LATE_SECONDS = 10

# Each step takes all rows, so one process makes the same ones.
TRAIN = """
import json
import os
import sys
import keras
import numpy as np
import keras_hvd

keras_hvd.init()
settings = json.load(open("settings.json"))
keras.utils.set_random_seed(7)
keras.backend.set_floatx("float64")
x, y = keras_hvd.data.part(*(np.load(f"{name}.npy") for name in "xy"))
layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((5,)), *layers])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
say = lambda epoch, logs: keras_hvd.rank() or print("epoch", epoch, flush=True)
callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
if settings["backup"]:
    backup = keras_hvd.callbacks.BackupAndRestore("backup", delete_checkpoint=False)
    callbacks.append(backup)
callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=say))
model.fit(x, y, len(x), settings["epochs"], 0, callbacks=callbacks, shuffle=False)
np.savez(f"weights-{keras_hvd.rank()}.npz", *model.get_weights())
keras_hvd.barrier()
# In one piece: others' lines may end one of rank 0's within which it pauses.
place = keras_hvd.rank(), keras_hvd.size(), keras_hvd.cross_rank()
pod = {name for name in os.environ if name.startswith(("K_MPI", "NVIDIA"))}
os.write(1, f"{place} {sorted(pod)}\\n".encode())
"""


@pytest.fixture
def data():
    generator = np.random.default_rng(3)
    x = generator.normal(size=(96, 5))
    return x, np.sin(x.sum(axis=1, keepdims=True))


@pytest.fixture
def shared(tmp_path, data) -> Path:
    """The folder that all pods see."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    for name, values in zip("xy", data, strict=True):
        np.save(folder / f"{name}.npy", values)
    folder.chmod(0o777)
    return folder


@pytest.fixture
def key(tmp_path) -> Path:
    """A key of ssh's; its public part is beside it."""
    made = tmp_path / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made]
    subprocess.run(words, check=True)
    return made


@pytest.fixture
def node(tmp_path, shared, key):
    if why := pods.unavailable():
        pytest.skip(f"there can be no pods: {why}")
    folder = tmp_path / "node"
    folder.mkdir()
    of_server = {
        "HostKey": "/root/.ssh/id_ed25519",
        "StrictModes": "no",
        # It does not pass on those that it has itself.
        "SetEnv": " ".join(f"{n}={value}" for n, value in pods.VARIABLES.items()),
    }
    of_client = {"StrictHostKeyChecking": "no", "LogLevel": "ERROR"}
    files = {
        f"etc/ssh/{name}": "".join(f"{n} {value}\n" for n, value in settings.items())
        for name, settings in (("sshd_config", of_server), ("ssh_config", of_client))
    }
    made = pods.Node(folder, shared, files)
    yield made
    made.close()


def manifest(name, kind):
    found = yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text())
    return next(each for each in found if each["kind"] == kind)


def order(shared, **settings):
    (shared / "settings.json").write_text(json.dumps(settings))


def require_weights(shared, ranks, data, epochs):
    """All ranks' weights must be those of one process of plain Keras."""
    floatx = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.fit(*data, len(data[0]), epochs, 0, shuffle=False)
    keras.backend.set_floatx(floatx)
    for rank in range(ranks):
        found = np.load(shared / f"weights-{rank}.npz").values()
        for weights, expected in zip(found, model.get_weights(), strict=True):
            np.testing.assert_allclose(weights, expected, atol=1e-9, rtol=0)


def test_an_indexed_job_loses_a_pod_and_goes_on_from_its_backup(node, shared, data):
    job = manifest("indexed_job", "Job")
    node.add_files(
        "train-keras-hvd", {"secret": b"the secret of all its pods"}, 0o440, USER
    )
    containers = [f"train-{index}-train" for index in range(3)]
    order(shared, epochs=10**9, backup=True)
    begun = time.monotonic()
    for pod in pods.of_indexed_job(job, "first"):
        node.start(pod)
    node.wait_for("node 0 cannot listen at", containers[0])
    time.sleep(max(0, begun + LATE_SECONDS - time.monotonic()))
    assert "epoch" not in node.output(containers[0])
    node.publish()
    node.wait_for("epoch 3", containers[0])

    node.podman("kill", "--signal=TERM", containers[1])
    assert node.exit_codes(containers) == [TRY_AGAIN, EVICTED, TRY_AGAIN]
    seen = int(re.findall(r"epoch (\d+)", node.output(containers[0]))[-1])
    node.remove()

    # As new pods, whose names still lead to those before them.
    order(shared, epochs=seen + 10, backup=True)
    for pod in pods.of_indexed_job(job, "first"):
        node.start(pod)
    node.wait_for("node 0 cannot listen at", containers[0])
    node.publish()
    assert node.exit_codes(containers) == [0, 0, 0], node.output(containers[0])
    said = node.output(containers[0])
    resumed = int(re.search(r"Resumed at epoch (\d+) from backup/", said)[1])
    assert resumed >= 4
    assert f"epoch {resumed - 1}" in said and "epoch 3\n" not in said
    require_weights(shared, 3, data, seen + 10)


@pytest.mark.parametrize("command", ["khvdrun", "mpirun"])
def test_the_workers_of_an_mpi_job_come_late(node, shared, data, key, command):
    job = manifest("mpijob", "MPIJob")
    public = key.with_suffix(".pub").read_bytes()
    keys = {"id_ed25519": key.read_bytes(), "authorized_keys": public}
    node.add_files("train-ssh", keys, 0o600)
    hosts = pods.hostfile_of(job)
    node.add_files("train-config", {"hostfile": hosts.encode()}, 0o644)
    order(shared, epochs=12, backup=False)
    launcher, workers = pods.of_mpi_job(job)
    begun = time.monotonic()
    if command == "khvdrun":
        node.start(launcher)
        node.wait_for("train-worker-0.train", LAUNCHER)
        time.sleep(max(0, begun + LATE_SECONDS - time.monotonic()))
    for pod in workers:
        node.start(pod)
    node.publish()
    if command == "mpirun":
        (container,) = launcher["spec"]["containers"]
        words = ["--allow-run-as-root", "python", "train.py"]
        container |= {"command": ["mpirun"], "args": words}
        node.start(launcher)
    (code,) = node.exit_codes([LAUNCHER])
    said = node.output(LAUNCHER)
    assert code == 0, said
    # The launcher's own variables have not come to the workers.
    places = re.findall(r"\((\d), 4, (\d)\) \[\]", said)
    assert sorted(places) == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")], said
    require_weights(shared, 4, data, 12)
