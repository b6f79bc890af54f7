"""What khvdrun takes from a cluster's variables where its options do not say it."""

import json

import pytest

from keras_hvd.launch import clusters
from keras_hvd.launch.command_line import read
from keras_hvd.launch.usage import UsageError

PET = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2", "algo-3"]',
    "SM_CURRENT_HOST": "algo-3",
    "SM_NUM_GPUS": "0",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}
PYTORCH = {
    "WORLD_SIZE": "3",
    "RANK": "2",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
}
CHIEF_AND_WORKERS = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
POOLS = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]}


def tf_config(kind="worker", index=1, cluster=CHIEF_AND_WORKERS, name="TF_CONFIG"):
    return {
        name: json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    }


def cluster_spec(kind="workerpool1", index=1, cluster=POOLS):
    return tf_config(kind, index, cluster, "CLUSTER_SPEC")


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "KERAS_HVD_RANK"):
        monkeypatch.delenv(name, raising=False)


def read_with(monkeypatch, variables, *words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return read([*words, "true"])


@pytest.mark.parametrize(
    "variables, rendezvous, ranks",
    [
        (PET, "train-node-0-0.train:29501", 4),
        (SAGEMAKER, "algo-1:29400", 1),
        (SAGEMAKER | {"SM_NUM_GPUS": "8"}, "algo-1:29400", 8),
        (cluster_spec(), "a:2222", 1),
        (tf_config(), "a:2222", 1),
        (tf_config(index="1"), "a:2222", 1),
        (
            tf_config("worker", 2, {"worker": ["a", "b", "c"], "ps": ["d"]}),
            "a:29400",
            1,
        ),
        (PYTORCH, "train-master-0:23457", 1),
    ],
)
def test_the_last_of_three_nodes(monkeypatch, variables, rendezvous, ranks):
    options = read_with(monkeypatch, variables)
    assert (options.node.number, options.node.count) == (2, 3)
    assert (options.node.rendezvous, options.ranks) == (rendezvous, ranks)
    assert options.variables["KERAS_HVD_INIT_TIMEOUT_SECONDS"] == "600"


def test_what_was_taken_is_told(monkeypatch):
    options = read_with(monkeypatch, SAGEMAKER)
    assert options.node.interfaces == ("eth0",)
    assert options.taken == {
        "--nnodes 3": "SM_HOSTS",
        "--node-rank 2": "SM_CURRENT_HOST",
        "--rendezvous algo-1:29400": "SM_HOSTS",
        "-np 1": "no GPU is visible",
        "--start-timeout 600": "hosts of a cluster come late",
        "--network-interfaces eth0": "SM_NETWORK_INTERFACE_NAME",
    }


def test_options_win(monkeypatch):
    words = ("--nnodes", "4", "--node-rank", "3", "--rendezvous", "a:1", "-np", "2")
    more = ("--start-timeout", "5", "--nics", "lo")
    node = read_with(monkeypatch, SAGEMAKER, *words, *more).node
    assert (node.count, node.number, node.rendezvous, node.ranks) == (4, 3, "a:1", 2)
    # Of these the cluster is asked for one thing only.
    options = read_with(monkeypatch, SAGEMAKER, *words[:6], *more)
    assert options.taken == {"-np 1": "no GPU is visible"}
    assert options.variables["KERAS_HVD_INIT_TIMEOUT_SECONDS"] == "5"
    assert options.node.interfaces == ("lo",)


@pytest.mark.parametrize(
    "words, variables",
    [
        (["-np", "2", "--nnodes", "1"], {}),
        (["-H", "localhost:2"], {}),
        (["--scaling", "1,2"], {}),
        (["--join", "node0:29400", "-np", "2"], {}),
        # A rank's own jobs are on its host.
        (["-np", "2"], {"KERAS_HVD_RANK": "0"}),
    ],
)
def test_a_job_of_this_host_alone(monkeypatch, words, variables):
    assert read_with(monkeypatch, PET | variables, *words).node is None
    for name in variables:
        monkeypatch.delenv(name)
        assert read([*words, "true"]).node is not None


def test_a_rank_s_own_job_takes_no_hosts_of_a_scheduler(monkeypatch, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("node0\nnode1\n")
    pbs = {"PBS_JOBID": "7", "PBS_NODEFILE": str(nodes)}
    options = read_with(monkeypatch, pbs, "-np", "2")
    assert [each.name for each in options.hosts] == ["node0", "node1"]
    options = read_with(monkeypatch, {"KERAS_HVD_RANK": "0"}, "-np", "2")
    assert options.hosts == ()


def test_hosts_may_join_such_a_job(monkeypatch):
    options = read_with(monkeypatch, PET, "--min-np", "8")
    assert (options.may_join, options.least_ranks, options.most_ranks) == (True, 8, 12)


def test_a_cluster_of_one_node_tells_nothing(monkeypatch):
    one = PET | {"PET_NNODES": "1", "WORLD_SIZE": "1", "SM_HOSTS": '["algo-1"]'}
    with pytest.raises(UsageError, match="how many processes"):
        read_with(monkeypatch, one | tf_config("worker", 0, {"worker": ["a:1"]}))


def test_the_first_of_two_clusters_counts(monkeypatch):
    options = read_with(monkeypatch, PYTORCH | SAGEMAKER | PET)
    assert options.taken["--nnodes 3"] == "PET_NNODES"


def test_an_indexed_job_tells_the_number_alone(monkeypatch):
    pod = {"JOB_COMPLETION_INDEX": "1"}
    options = read_with(monkeypatch, pod, "--nnodes", "2", "--rendezvous", "train-0:1")
    assert (options.node.number, options.ranks) == (1, 1)
    assert options.taken["--node-rank 1"] == "JOB_COMPLETION_INDEX"
    without_number = {name: PET[name] for name in PET if name != "PET_NODE_RANK"}
    options = read_with(monkeypatch, pod | without_number)
    assert options.node.number == 1
    monkeypatch.delenv("PET_NNODES")
    assert read(["-np", "2", "true"]).node is None


@pytest.mark.parametrize(
    "told, gpus, ranks",
    [("auto", "0,1,2", 3), ("auto", "", 1), ("gpu", "0,1,-1,2", 2), ("cpu", "0", None)],
)
def test_the_ranks_of_torchruns_words(monkeypatch, told, gpus, ranks):
    monkeypatch.setattr(clusters.cores, "available", lambda: 6)
    variables = {"PET_NPROC_PER_NODE": told, "CUDA_VISIBLE_DEVICES": gpus}
    assert read_with(monkeypatch, PET | variables).ranks == (ranks or 6)


@pytest.mark.parametrize(
    "variables, message",
    [
        (
            PET | {"PET_NNODES": "1:3"},
            "PET_NNODES=1:3 is a range: if hosts are to come",
        ),
        (PET | {"PET_NNODES": "x"}, "PET_NNODES='x' is not a number from 1"),
        (PET | {"PET_NNODES": "0"}, "PET_NNODES='0' is not a number from 1"),
        (PET | {"PET_NODE_RANK": "3"}, "PET_NODE_RANK=3 and PET_NNODES=3 contradict"),
        (PET | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK='-1' is not a number from 0"),
        (PET | {"PET_NODE_RANK": ""}, "PET_NNODES=3, but PET_NODE_RANK is not set"),
        (PET | {"PET_MASTER_ADDR": ""}, "but PET_MASTER_ADDR is not set"),
        (PET | {"PET_MASTER_ADDR": "0.0.0.0"}, "'0.0.0.0:29501' names no host"),
        (PET | {"PET_MASTER_PORT": ""}, "but PET_MASTER_PORT is not set"),
        (PET | {"PET_MASTER_PORT": "65535"}, "'65535' is not a number from 1 to 65534"),
        (PET | {"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE='all' is not a num"),
        (PET | {"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE=gpu, and no GPU is"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS is not JSON"),
        (SAGEMAKER | {"SM_HOSTS": "{}"}, "SM_HOSTS is not a JSON array"),
        (SAGEMAKER | {"SM_HOSTS": "[1, 2]"}, "is not names of hosts"),
        (SAGEMAKER | {"SM_CURRENT_HOST": ""}, "but SM_CURRENT_HOST is not set"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "b"}, "SM_CURRENT_HOST=b is none of algo-1,"),
        (SAGEMAKER | {"SM_NUM_GPUS": "many"}, "SM_NUM_GPUS='many' is not a number"),
        ({"CLUSTER_SPEC": "[" * 100_000}, "CLUSTER_SPEC is not JSON"),
        ({"CLUSTER_SPEC": "7"}, "CLUSTER_SPEC is not a JSON object"),
        (cluster_spec("workerpool2", 0), "'workerpool2', and only workerpool0, "),
        (cluster_spec(index=2), "there is no workerpool1 2 of 2"),
        (cluster_spec(cluster=7), "CLUSTER_SPEC: 'cluster' is not an object"),
        (tf_config("ps", 0), "this is 'ps', and only chief, master, worker train"),
        (tf_config(index=None), "there is no worker None of 2"),
        (tf_config(index="9" * 5000), "there is no worker '999"),
        (tf_config(cluster={"worker": "a:1"}), "'worker' is not a list of addresses"),
        (tf_config(cluster={"worker": ["a:x", "b"]}), "'a:x' is not HOST:PORT"),
        (PYTORCH | {"RANK": ""}, "WORLD_SIZE=3, but RANK is not set"),
        (PYTORCH | {"RANK": "3"}, "RANK=3 and WORLD_SIZE=3 contradict each other"),
        (PYTORCH | {"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a number"),
        (PYTORCH | {"MASTER_PORT": ""}, "but MASTER_PORT is not set"),
    ],
)
def test_each_mistake_is_named(monkeypatch, variables, message):
    with pytest.raises(UsageError) as error:
        read_with(monkeypatch, variables)
    assert message in str(error.value)
    assert "Options of khvdrun win; --nnodes 1 is for this host" in str(error.value)


def test_ranks_of_another_launcher_are_no_nodes(monkeypatch):
    with pytest.raises(UsageError, match="how many processes"):
        read_with(monkeypatch, PYTORCH | {"LOCAL_RANK": "0"})


def test_a_number_beyond_the_nodes(monkeypatch):
    with pytest.raises(UsageError, match="there is no --node-rank 2 of 2"):
        read_with(
            *(monkeypatch, {"JOB_COMPLETION_INDEX": "2"}),
            *("--nnodes", "2", "--rendezvous", "a:1"),
        )
