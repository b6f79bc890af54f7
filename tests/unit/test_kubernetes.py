"""The manifests of examples/kubernetes against the schemas of what reads them."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from keras_hvd.launch.command_line import read

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
KUBEFLOWS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
# Nobody publishes a schema of the MPI operator's for Python.
MPI_JOB = {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs"}
REPLICAS = {"replicas", "restartPolicy", "template"}


def require_valid(manifest):
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, version, strict=True)


def pods(manifest):
    """The templates of pods in a manifest."""
    if isinstance(manifest, dict):
        if isinstance(manifest.get("spec"), dict) and "containers" in manifest["spec"]:
            yield manifest
        for each in manifest.values():
            yield from pods(each)
    if isinstance(manifest, list):
        for each in manifest:
            yield from pods(each)


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_nothing_is_unknown_or_of_another_type(manifest):
    kind = manifest["kind"]
    if kind == "MPIJob":
        assert manifest["spec"].keys() <= MPI_JOB
        for replicas in manifest["spec"]["mpiReplicaSpecs"].values():
            assert replicas.keys() <= REPLICAS
    elif kind in KUBEFLOWS:
        # They leave out what they do not know.
        assert KUBEFLOWS[kind].from_dict(manifest).to_dict() == manifest
    else:
        require_valid(manifest)
    for pod in pods(manifest):
        named = {"metadata": {"name": "pod"}, **pod}
        require_valid({"apiVersion": "v1", "kind": "Pod", **named})


@pytest.mark.parametrize(
    "name, value", [("completionMod", "Indexed"), ("completions", "3")]
)
def test_the_schema_finds_a_mistake(name, value):
    (job,) = (each.values[0] for each in MANIFESTS if each.id == "indexed_job-Job")
    changed = {**job, "spec": {**job["spec"], name: value}}
    with pytest.raises(kubernetes_validate.ValidationError, match=value):
        require_valid(changed)


COMMANDS = {
    "indexed_job": {"JOB_COMPLETION_INDEX": "2"},
    "jobset": {"JOB_COMPLETION_INDEX": "2"},
    "trainer": {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29399",
    },
}
PLACES = {"indexed_job": "train-0.train:29400"}


@pytest.mark.parametrize("name", COMMANDS)
def test_khvdrun_understands_the_command_of_the_last_pod(monkeypatch, name):
    monkeypatch.delenv("KERAS_HVD_RANK", raising=False)
    for variable, value in COMMANDS[name].items():
        monkeypatch.setenv(variable, value)
    found = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    (container,) = (
        each
        for manifest in found
        for pod in pods(manifest)
        for each in pod["spec"]["containers"]
    )
    assert container["command"] == ["khvdrun"]
    node = read(container["args"]).node
    place = PLACES.get(name, "train-node-0-0.train:29400")
    assert (node.number, node.count, node.rendezvous) == (2, 3, place)
