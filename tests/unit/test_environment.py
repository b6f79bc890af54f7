"""environment.world() on what launchers leave in the environment, right and wrong.

The variables are as recorded from Open MPI 4.1.4, MPICH 5.0.2 and Slurm 22.05, and Open
MPI 5's and Horovod's as documented; tests/launch/test_launchers.py runs the launchers.
"""

import re

import pytest

from keras_hvd.environment import LaunchEnvironmentError, World, world
from keras_hvd.rendezvous.slurm import Step

KHVDRUN = {
    "KERAS_HVD_RANK": "1",
    "KERAS_HVD_SIZE": "4",
    "KERAS_HVD_LOCAL_RANK": "1",
    "KERAS_HVD_LOCAL_SIZE": "4",
    "KERAS_HVD_CROSS_RANK": "0",
    "KERAS_HVD_CROSS_SIZE": "1",
    "KERAS_HVD_JOB": "khvdrun-17-5eed",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_precondition_transports": "7442b5621d34142a-974b67868f8cd3e2",
    "PMIX_NAMESPACE": "1891500033",
}
OPEN_MPI_5 = {
    **{k: v for k, v in OPEN_MPI_4.items() if not k.startswith("OMPI_MCA")},
    "PMIX_NAMESPACE": "prterun-host-7232@1",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
}
# On nodes of 2, 2, 2 and 1 tasks, the third of which this is.
SRUN_ON_NODES = {
    **SRUN,
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NODELIST": "a[01-03,07]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "r17",
}
MEETING = {
    "KERAS_HVD_RANK": "3",
    "KERAS_HVD_SIZE": "4",
    "KERAS_HVD_LOCAL_RANK": "1",
    "KERAS_HVD_LOCAL_SIZE": "2",
    "KERAS_HVD_RENDEZVOUS": "node0:29400",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "42001",
}
SBATCH_SHELL = {
    "SLURM_JOB_ID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
}
SALLOC_INTERACTIVE_STEP = {
    **SRUN,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param(KHVDRUN, World(1, 4, 1, 4, 0, 1, "khvdrun-17-5eed"), id="khvdrun"),
        pytest.param(
            OPEN_MPI_4,
            World(
                *(1, 2, 1, 2, 0, 1),
                "openmpi-1891500033-7442b5621d34142a-974b67868f8cd3e2",
            ),
            id="open-mpi-4",
        ),
        pytest.param(
            OPEN_MPI_5,
            World(1, 2, 1, 2, 0, 1, "openmpi-prterun-host-7232@1"),
            id="open-mpi-5",
        ),
        pytest.param(SRUN, World(1, 2, 1, 2, 0, 1, "slurm-1.0"), id="srun"),
        pytest.param(
            SRUN_ON_NODES,
            World(
                *(5, 7, 1, 2, None, None, "slurm-1.0"),
                step=Step("slurm-1.0", "a01", is_on_first_node=False),
            ),
            id="srun-on-several-nodes",
        ),
        pytest.param(
            {**SRUN_ON_NODES, "KERAS_HVD_RENDEZVOUS": "b:29400"},
            World(5, 7, 1, 2, None, None, "slurm-1.0", "b:29400"),
            id="srun-with-a-place-to-meet",
        ),
        pytest.param(
            {**SRUN_ON_NODES, "KERAS_HVD_HOST_KEY": "left"},
            World(
                *(5, 7, 1, 2, None, None, "slurm-1.0"),
                host_key="left",
                step=Step("slurm-1.0", "a01", is_on_first_node=False),
            ),
            id="srun-with-a-host-key",
        ),
        pytest.param(
            {**SRUN, "KERAS_HVD_RENDEZVOUS": "b:29400"},
            World(1, 2, 1, 2, 0, 1, "slurm-1.0"),
            id="srun-on-one-node-meets-nowhere",
        ),
        pytest.param(
            {**SRUN, **HOROVODRUN},
            World(1, 2, 1, 2, 0, 1, "horovodrun-10.0.0.1-42001"),
            id="horovodrun-inside-srun",
        ),
        pytest.param(
            {**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2"},
            World(1, 2, 1, 2, 0, 1, "slurm-1.0"),
            id="srun-pmi2",
        ),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_TASKS": "1", **OPEN_MPI_5},
            World(1, 2, 1, 2, 0, 1, "openmpi-prterun-host-7232@1"),
            id="open-mpi-inside-srun",
        ),
        pytest.param(
            TORCHRUN,
            World(1, 2, 1, 2, 0, 1, "torchrun-r17-node0-29500"),
            id="torchrun",
        ),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "4"},
            World(
                *(1, 4, 1, 2, None, None, "torchrun-r17-node0-29500", "node0:29501"),
            ),
            id="torchrun-on-several-hosts",
        ),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "4", "MASTER_ADDR": "fd00::2"},
            World(
                *(1, 4, 1, 2, None, None, "torchrun-r17-fd00::2-29500"),
                "[fd00::2]:29501",
            ),
            id="torchrun-ipv6",
        ),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "4", "MASTER_PORT": "65535"},
            World(
                *(1, 4, 1, 2, None, None, "torchrun-r17-node0-65535", "node0:65534"),
            ),
            id="torchrun-last-port",
        ),
        pytest.param(
            {**TORCHRUN, "KERAS_HVD_RENDEZVOUS": "node1:7"},
            World(1, 2, 1, 2, None, None, "torchrun-r17-node0-29500", "node1:7"),
            id="torchrun-another-port",
        ),
        pytest.param(
            {**TORCHRUN, **SRUN},
            World(1, 2, 1, 2, 0, 1, "slurm-1.0"),
            id="torchrun-variables-inside-srun",
        ),
        pytest.param(
            MEETING,
            World(3, 4, 1, 2, None, None, "", "node0:29400"),
            id="several-hosts",
        ),
        pytest.param(
            {
                **MEETING,
                "KERAS_HVD_JOB": "khvdrun-17-5eed",
                "KERAS_HVD_CROSS_RANK": "1",
                "KERAS_HVD_CROSS_SIZE": "2",
                "KERAS_HVD_HOST_KEY": "left",
            },
            World(3, 4, 1, 2, 1, 2, "khvdrun-17-5eed", "node0:29400", "left"),
            id="several-hosts-all-variables",
        ),
        pytest.param(
            {**OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE": "4"},
            World(1, 4, 1, 2, None, None, "", mpi="Open MPI"),
            id="open-mpi-on-several-hosts",
        ),
        pytest.param(
            {**MPICH, "PMI_RANK": "5", "PMI_SIZE": "7", "KERAS_HVD_HOST_KEY": "left"},
            World(5, 7, 1, 2, None, None, "", host_key="left", mpi="MPICH"),
            id="mpich-on-several-hosts",
        ),
        pytest.param(
            {**MPICH, "PMI_SIZE": "4", "KERAS_HVD_RENDEZVOUS": "node0:29400"},
            World(1, 4, 1, 2, None, None, "", "node0:29400"),
            id="mpich-with-a-place-to-meet",
        ),
        pytest.param(
            {**OPEN_MPI_5, "KERAS_HVD_RENDEZVOUS": "node0:29400"},
            World(1, 2, 1, 2, None, None, "", "node0:29400"),
            id="open-mpi-on-one-host-with-a-place-to-meet",
        ),
        pytest.param(
            {**OPEN_MPI_4, **SRUN, **KHVDRUN},
            World(1, 4, 1, 4, 0, 1, "khvdrun-17-5eed"),
            id="khvdrun-inside-all-others",
        ),
    ],
)
def test_reads_what_a_launcher_set(variables, expected):
    assert world(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="nothing"),
        pytest.param(SBATCH_SHELL, id="sbatch"),
        pytest.param({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2"}, id="salloc"),
        pytest.param(SALLOC_INTERACTIVE_STEP, id="salloc-interactive-step"),
        pytest.param(
            {k: v for k, v in TORCHRUN.items() if k != "TORCHELASTIC_RUN_ID"},
            id="variables-that-others-set-too",
        ),
    ],
)
def test_is_alone_without_a_launcher(variables):
    first, second = world(variables), world(variables)
    assert (first.rank, first.size) == (0, 1)
    assert (first.local_rank, first.local_size) == (0, 1)
    assert (first.cross_rank, first.cross_size) == (0, 1)
    assert first.job != second.job


def test_reads_this_process_environment_by_default(monkeypatch):
    for name, value in KHVDRUN.items():
        monkeypatch.setenv(name, value)
    assert world() == world(KHVDRUN)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({**HOROVODRUN, "HOROVOD_CROSS_SIZE": "2"}, id="horovodrun"),
        pytest.param({**HOROVODRUN, "HOROVOD_SIZE": "4"}, id="horovodrun-2"),
    ],
)
def test_refuses_more_than_one_host(variables):
    with pytest.raises(LaunchEnvironmentError, match="more than one host .*one host"):
        world(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a,b", "a"),
        ("gpu-1.cluster,b", "gpu-1.cluster"),
        ("a[01-03,7],b", "a01"),
        ("a[7,01-03],b", "a7"),
        ("rack[0-1]node[10-12]", "rack0node10"),
        ("[3-4]", "3"),
        ("a[1]-ib[2-3]", "a1-ib2"),
    ],
)
def test_ranks_of_a_step_meet_at_its_first_node(nodes, first):
    variables = {**SRUN_ON_NODES, "SLURM_STEP_NODELIST": nodes}
    assert world(variables).step.first_node == first


@pytest.mark.parametrize(
    ("node", "local_size"), [("0", 3), ("1", 1), ("2", 1), ("3", 2)]
)
def test_nodes_of_a_step_have_their_own_numbers_of_tasks(node, local_size):
    variables = {
        **SRUN_ON_NODES,
        "SLURM_STEP_TASKS_PER_NODE": "3,1(x2),2",
        "SLURM_NODEID": node,
        "SLURM_LOCALID": "0",
    }
    found = world(variables)
    assert found.local_size == local_size
    assert found.step.is_on_first_node == (node == "0")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(
            ({"SLURM_STEP_NODELIST": nodes}, "does not begin with the name of a node")
            for nodes in (
                *("a[", "a[1", "a]1", "a[]", "a[x]", "a[1-]", "a[1-2", "a b", "a[[1]]"),
                *(",a", "[1-2]]", "a[1]*", "\u0663[1]", "a" * 254, "a[" + "1," * 60000),
            )
        ),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        *(
            ({"SLURM_STEP_TASKS_PER_NODE": tasks}, "is not the numbers of 7 tasks")
            for tasks in (
                *(
                    "x",
                    "2(x",
                    "2(x3)",
                    "2(x3),1,",
                    "2(x3),2",
                    "2(x4)",
                    "7",
                    "-1,8",
                    "2x3",
                ),
                *("1(x99999999999)", "9" * 60000, "2(x0),2(x3),1,0(x9999999999)"),
            )
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,2,0,3"}, "PER_NODE='0' is not an integer"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID='4' is not an integer from 0 to 3"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID='2' is not an integer from 0 to 1"),
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID='7' is not an integer from 0 to 6"),
        ({"SLURM_PROCID": "0"}, "SLURM_NODEID=2 contradict each other: .* rank 0 must"),
        ({"SLURM_STEP_NUM_NODES": "many"}, "SLURM_STEP_NUM_NODES='many' is not an int"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is empty"),
        ({"KERAS_HVD_RENDEZVOUS": "b"}, "KERAS_HVD_RENDEZVOUS: 'b' is not HOST:PORT"),
    ],
)
def test_what_srun_cannot_have_said_is_named(change, expected):
    with pytest.raises(LaunchEnvironmentError, match=expected):
        world({**SRUN_ON_NODES, **change})


@pytest.mark.parametrize(
    "change", [{"KERAS_HVD_CROSS_SIZE": "2"}, {"KERAS_HVD_LOCAL_SIZE": "2"}]
)
def test_ranks_of_several_hosts_need_a_place_to_meet(change):
    with pytest.raises(
        LaunchEnvironmentError, match="no place to meet: set KERAS_HVD_RENDEZVOUS"
    ):
        world({**KHVDRUN, **change})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"KERAS_HVD_RENDEZVOUS": "node0"}, "KERAS_HVD_RENDEZVOUS: 'node0' is not H"),
        ({"KERAS_HVD_LOCAL_SIZE": "5"}, "LOCAL_SIZE=5 and KERAS_HVD_SIZE=4 contradict"),
        ({"KERAS_HVD_RANK": "4"}, "KERAS_HVD_RANK='4' is not an integer from 0 to 3"),
        ({"KERAS_HVD_LOCAL_RANK": "2"}, "LOCAL_RANK='2' is not an integer from 0 to 1"),
        ({"KERAS_HVD_CROSS_RANK": "0"}, "KERAS_HVD_CROSS_SIZE is not set"),
        ({"KERAS_HVD_CROSS_SIZE": "2"}, "KERAS_HVD_CROSS_RANK is not set"),
        (
            {"KERAS_HVD_CROSS_SIZE": "5", "KERAS_HVD_CROSS_RANK": "0"},
            "KERAS_HVD_CROSS_SIZE='5' is not an integer from 1 to 4",
        ),
        ({"KERAS_HVD_HOST_KEY": "k" * 257}, "KERAS_HVD_HOST_KEY has 257 characters"),
    ],
)
def test_names_what_contradicts_or_is_malformed_on_several_hosts(change, expected):
    with pytest.raises(LaunchEnvironmentError, match=re.escape(expected)):
        world({**MEETING, **change})


@pytest.mark.parametrize("name", sorted(TORCHRUN.keys() - {"TORCHELASTIC_RUN_ID"}))
def test_names_a_missing_variable_of_torchrun(name):
    variables = {k: v for k, v in TORCHRUN.items() if k != name}
    with pytest.raises(LaunchEnvironmentError, match=f"{name} is not set"):
        world(variables)


def test_a_job_of_one_rank_meets_nobody():
    alone = {
        f"KERAS_HVD_{name}": value
        for name, value in (("RANK", 0), ("SIZE", 1), ("LOCAL_RANK", 0))
    }
    found = world(
        {
            **{name: str(value) for name, value in alone.items()},
            "KERAS_HVD_LOCAL_SIZE": "1",
            "KERAS_HVD_RENDEZVOUS": "node0:29400",
        }
    )
    assert (found.size, found.rendezvous, found.cross_size) == (1, None, 1)
    assert found.job


@pytest.mark.parametrize("value", ["", "x", "-1", "4", "1.0", " 1", "1_0", "٣"])
@pytest.mark.parametrize("name", ["KERAS_HVD_RANK", "KERAS_HVD_LOCAL_RANK"])
def test_names_a_malformed_variable_and_its_value(name, value):
    expected = f"{name} is empty" if not value else f"{name}={value!r}"
    with pytest.raises(LaunchEnvironmentError, match=re.escape(expected)):
        world({**KHVDRUN, name: value})


def test_no_number_of_ranks_is_cut_short():
    size = str(2**32 + 4)
    sizes = {"KERAS_HVD_SIZE": size, "KERAS_HVD_LOCAL_SIZE": size}
    with pytest.raises(LaunchEnvironmentError, match=f"SIZE='{size}' is not an int"):
        world({**KHVDRUN, **sizes})


@pytest.mark.parametrize("name", sorted(KHVDRUN.keys() - {"KERAS_HVD_RANK"}))
def test_names_a_missing_variable_of_khvdrun(name):
    variables = {k: v for k, v in KHVDRUN.items() if k != name}
    with pytest.raises(LaunchEnvironmentError, match=f"{name} is not set"):
        world(variables)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS"])
def test_names_a_missing_variable_of_srun(name):
    variables = {k: v for k, v in SRUN.items() if k != name}
    with pytest.raises(LaunchEnvironmentError, match=f"{name} is not set"):
        world(variables)


def test_refuses_ranks_that_contradict_each_other():
    with pytest.raises(
        LaunchEnvironmentError,
        match="KERAS_HVD_RANK=1 and KERAS_HVD_LOCAL_RANK=0 contradict",
    ):
        world({**KHVDRUN, "KERAS_HVD_LOCAL_RANK": "0"})


def test_refuses_mpich_variables_without_mpich():
    with pytest.raises(LaunchEnvironmentError, match="MPI_LOCALRANKID is set.*unset"):
        world(MPICH)


def test_shortens_a_job_name_that_the_engine_would_refuse():
    host = "h" * 64
    jobs = [
        world({**OPEN_MPI_5, "PMIX_NAMESPACE": f"prterun-{host}-{pid}@1"}).job
        for pid in (72321, 72322)
    ]
    assert all(len(job) <= 80 for job in jobs)
    assert jobs[0] != jobs[1]
