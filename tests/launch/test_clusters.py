"""khvdrun without its place: it takes that from the variables of a cluster.

Hosts are network namespaces. Each has a khvdrun of its own, with the same command.
"""

import json
import shutil
import sys
from pathlib import Path

import network
import pytest

TRY_AGAIN = 75

RANKS = Path(__file__).parent / "ranks"
SECRET = {"KERAS_HVD_SECRET": "the one of all pods of this job"}
SUM = f"""
import ctypes, os, sys
import numpy
sys.path.append({str(RANKS)!r})
import allreduce_loop, keras_hvd
keras_hvd.init()
values = numpy.random.default_rng(7).integers(0, 1 << 28, (3, 1001), numpy.int32)
rank = keras_hvd.rank()
total = (ctypes.c_int32 * 1001)(*values[rank])
allreduce_loop.reduce_in_place("total", total, allreduce_loop.SUM)
numpy.testing.assert_array_equal(total, values[:keras_hvd.size()].sum(axis=0))
place = rank, keras_hvd.size(), keras_hvd.local_rank(), keras_hvd.cross_rank()
# In one piece: others' lines may end one of rank 0's within which it pauses.
os.write(1, (" ".join(map(str, place)) + "\\n").encode())
"""

TRAIN = f"""
{SUM}
import keras
keras.backend.set_floatx("float64")
x, y = numpy.split(numpy.random.default_rng(7).standard_normal((48, 5)), [4], axis=1)

def weights_after(part, distribute):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(distribute(keras.optimizers.Adam(0.1)), "mse", run_eagerly=True)
    parts = [rows.reshape(4, 12, rows.shape[1])[:, part] for rows in (x, y)]
    rows = [each.reshape(-1, each.shape[2]) for each in parts]
    model.fit(*rows, len(rows[0]) // 4, shuffle=False, verbose=0)
    return model.get_weights()

own = slice(rank * 12 // keras_hvd.size(), (rank + 1) * 12 // keras_hvd.size())
trained = weights_after(own, keras_hvd.DistributedOptimizer)
for one, other in zip(trained, weights_after(slice(12), lambda plain: plain)):
    numpy.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
"""


def pet(number, names):
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": f"{number}",
        "PET_MASTER_ADDR": names[0],
        "PET_MASTER_PORT": "29500",
    }


def sagemaker(number, names):
    return {
        "SM_HOSTS": json.dumps(names),
        "SM_CURRENT_HOST": names[number],
        "SM_NUM_GPUS": "0",
        "SM_NETWORK_INTERFACE_NAME": "cable",
    }


def vertex(number, names):
    cluster = {"workerpool0": [f"{names[0]}:2222"], "workerpool1": [f"{names[1]}:2222"]}
    task = {"type": f"workerpool{number}", "index": 0}
    return {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}


def tfjob(number, names):
    cluster = {"chief": [f"{names[0]}:2222"], "worker": [f"{names[1]}:2222"]}
    task = {"type": ["chief", "worker"][number], "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def pytorchjob(number, names):
    return {
        "WORLD_SIZE": "2",
        "RANK": f"{number}",
        "MASTER_ADDR": names[0],
        "MASTER_PORT": "23456",
    }


def indexed_job(number, names):
    return {"JOB_COMPLETION_INDEX": f"{number}"}


@pytest.fixture
def dns(two_hosts, tmp_path) -> Path:
    """The file with all names that hosts know."""
    known = tmp_path / "hosts"
    known.touch()
    for each in two_hosts:
        each.run("mount", "--bind", str(known), "/etc/hosts")
    return known


@pytest.fixture
def names(two_hosts, dns) -> list[str]:
    """The hosts' names, as a cluster's DNS knows them."""
    found = [f"train-{number}.train" for number in range(len(two_hosts))]
    lines = [f"{host.address} {name}\n" for host, name in zip(two_hosts, found)]
    dns.write_text("".join(lines))
    return found


@pytest.mark.parametrize(
    "cluster", [pet, sagemaker, vertex, tfjob, pytorchjob, indexed_job]
)
def test_the_nodes_of_a_cluster_are_one_job_that_trains(
    khvdrun, two_hosts, names, cluster
):
    options = []
    if cluster is indexed_job:
        options = ["--nnodes", 2, "--rendezvous", f"{names[0]}:29400"]
    # The second node has a rank more, where nothing says how many.
    more = [] if cluster is pet else ["-np", 2]
    command = (sys.executable, "-c", TRAIN)
    jobs = [
        khvdrun.start(
            *(*options, *counts, *command),
            on=host,
            env={**SECRET, **cluster(number, names)},
        )
        for number, (host, counts) in enumerate(zip(two_hosts, ([], more)))
    ]
    said = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    lines = sorted(line for out, _ in said for line in out.splitlines())
    if cluster is pet:
        assert lines == ["[0] 0 2 0 0", "[1] 1 2 0 1"]
    else:
        assert lines == ["[0] 0 3 0 0", "[1] 1 3 0 1", "[2] 2 3 1 0"]


def test_a_dry_run_tells_what_it_takes(khvdrun):
    ended = khvdrun.run("--dry-run", "true", env=pet(1, ["a", "b"]))
    assert ended.stdout == (
        "1 times on this host: true\n"
        "--nnodes 2 from PET_NNODES\n"
        "--node-rank 1 from PET_NODE_RANK\n"
        "--rendezvous a:29501 from PET_MASTER_ADDR, PET_MASTER_PORT\n"
        "-np 1 from no GPU is visible\n"
        "--start-timeout 600 from hosts of a cluster come late\n"
    )


def test_a_mistake_is_an_error_at_once(khvdrun):
    variables = pet(0, ["a", "b"]) | {"PET_NODE_RANK": "2"}
    ended = khvdrun.run("-np", 2, "true", env=variables)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "PET_NODE_RANK=2 and PET_NNODES=2 contradict each other" in ended.stderr


@pytest.fixture
def mpi_operator(two_hosts, tmp_path):
    """What the launcher of an MPIJob has: variables, and a hostfile; and ssh."""
    if not network.has_ssh() or shutil.which("mpirun.openmpi") is None:
        pytest.skip("ssh or Open MPI's mpirun is not installed")
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "mpirun").symlink_to(shutil.which("mpirun.openmpi"))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("train-worker-0.train slots=1\ntrain-worker-1.train slots=1\n")
    with network.ssh(two_hosts, tmp_path) as variables:
        yield (
            {
                "PATH": f"{tmp_path}/mpi:{variables['PATH']}",
                "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
                "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "K_MPI_JOB_ROLE": "launcher",
                "NVIDIA_VISIBLE_DEVICES": "",
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            },
            hostfile,
        )


POD = "K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST"
SUM_IN_A_POD = f"import os; print(sorted({{*os.environ}} & {{*{POD}}}))\n{SUM}"


def test_workers_that_come_late_are_waited_for(khvdrun, two_hosts, dns, mpi_operator):
    variables, hostfile = mpi_operator
    own = ("--hostfile", hostfile, "--nics", "cable")
    command = (sys.executable, "-c", SUM_IN_A_POD)
    with khvdrun.start(*own, *command, on=two_hosts[0], env=variables) as job:
        line = job.stderr.readline()
        assert "train-worker-0.train cannot be reached by ssh at" in line, line
        assert "It tries for 60 s" in line
        first, second = (host.address for host in two_hosts)
        dns.write_text(f"{first} train-worker-0.train\n{second} train-worker-1.train\n")
        out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    # The pod's own variables do not travel; its ranks on this host inherit them.
    assert "[1] []\n" in out
    assert "[0] 0 2 0 0\n" in out and "[1] 1 2 0 1\n" in out


def test_workers_that_do_not_come_are_named(khvdrun, two_hosts, dns, mpi_operator):
    variables, hostfile = mpi_operator
    own = ("--hostfile", hostfile, "--start-timeout", 1)
    with khvdrun.start(*own, "true", on=two_hosts[0], env=variables) as job:
        _, err = job.communicate(timeout=100)
    assert job.returncode == TRY_AGAIN
    assert "train-worker-0.train could not be reached by ssh at " in err
    assert " within 1 s: " in err and "name" in err.rpartition(" within 1 s: ")[2]
