"""environment.world() on the variables of launchers, right and wrong.

The variables are as recorded from Open MPI 4.1.4, MPICH 5.0.2 and Slurm 22.05, and Open
MPI 5's and Horovod's as documented; tests/launch/test_launchers.py runs the launchers.
"""

import json
import re

import pytest

from keras_hvd.environment import LaunchEnvironmentError, World, check_size, world
from keras_hvd.world.environment import _LAUNCHERS
from keras_hvd.world.launchers.mpi import ByMpi
from keras_hvd.world.launchers.slurm import Step

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
PYTORCH = {
    name: value
    for name, value in TORCHRUN.items()
    if name not in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE")
}
PALS = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PALS_RANKID": "3",
    "PALS_APID": "a7",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1891500033",
}
MPIRUN_RSH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f27",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
HERE = {"KERAS_HVD_RENDEZVOUS": "node0:29400"}
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
                way=Step("slurm-1.0", "a01", is_on_first_node=False),
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
                way=Step("slurm-1.0", "a01", is_on_first_node=False),
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
            World(1, 4, 1, 2, None, None, "", way=ByMpi("Open MPI")),
            id="open-mpi-on-several-hosts",
        ),
        pytest.param(
            {**MPICH, "PMI_RANK": "5", "PMI_SIZE": "7", "KERAS_HVD_HOST_KEY": "left"},
            World(5, 7, 1, 2, None, None, "", host_key="left", way=ByMpi("MPICH")),
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
            PYTORCH,
            World(1, 2, 1, 0, None, None, "", "node0:29501"),
            id="pytorchs-variables",
        ),
        pytest.param(
            {**PYTORCH, "LOCAL_WORLD_SIZE": "2", **HERE},
            World(1, 2, 1, 2, None, None, "", "node0:29400"),
            id="pytorchs-variables-and-a-place-to-meet",
        ),
        pytest.param(
            {**SRUN, **PYTORCH},
            World(1, 2, 1, 2, 0, 1, "slurm-1.0"),
            id="pytorchs-variables-inside-srun",
        ),
        *(
            pytest.param(
                variables,
                World(3, 4, 1, 2, None, None, "", way=ByMpi(mpi)),
                id=f"{name}-on-several-hosts",
            )
            for name, variables, mpi in (
                ("pals", PALS, "MPICH"),
                ("jsrun", JSRUN, "Open MPI"),
                ("mpirun-rsh", MPIRUN_RSH, "MPICH"),
            )
        ),
        pytest.param(
            {**PALS, "PMI_RANK": "1", "PMI_SIZE": "2"},
            World(1, 2, 1, 2, 0, 1, "pals-a7"),
            id="pals",
        ),
        pytest.param(
            {
                **{name: PALS[name] for name in PALS if name != "PALS_APID"},
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
            },
            World(1, 2, 1, 2, None, None, "", way=ByMpi("MPICH")),
            id="pals-without-the-job's-name",
        ),
        pytest.param(
            {**JSRUN, "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
            World(1, 2, 1, 2, 0, 1, "jsrun-1891500033"),
            id="jsrun",
        ),
        pytest.param(
            {**MPIRUN_RSH, "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            World(1, 2, 1, 2, None, None, "", way=ByMpi("MPICH")),
            id="mpirun-rsh",
        ),
        pytest.param(
            {**MPIRUN_RSH, **HERE},
            World(3, 4, 1, 2, None, None, "", "node0:29400"),
            id="mpirun-rsh-with-a-place-to-meet",
        ),
        pytest.param(
            {**FLUX, **HERE},
            World(3, 4, 1, 0, None, None, "", "node0:29400"),
            id="flux-on-several-nodes",
        ),
        pytest.param(
            {**FLUX, "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"},
            World(3, 4, 3, 4, 0, 1, "flux-f27"),
            id="flux",
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
            {name: PYTORCH[name] for name in PYTORCH if name != "LOCAL_RANK"},
            id="pytorchs-variables-that-count-nodes",
        ),
    ],
)
def test_is_alone_without_a_launcher(variables):
    first, second = world(variables), world(variables)
    assert (first.rank, first.size) == (0, 1)
    assert (first.local_rank, first.local_size) == (0, 1)
    assert (first.cross_rank, first.cross_size) == (0, 1)
    assert first.job != second.job


def test_every_launcher_has_variables_above():
    given = [each for each in globals().values() if isinstance(each, dict)]
    assert [each for each in _LAUNCHERS if not any(map(each.is_here, given))] == []


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
    assert world(variables).way.first_node == first


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
    assert found.way.is_on_first_node == (node == "0")


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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (FLUX, r"on 2 nodes \(FLUX_JOB_NNODES\), and they have no place to meet"),
        ({**FLUX, "FLUX_JOB_NNODES": ""}, "FLUX_JOB_NNODES is empty"),
        ({"FLUX_TASK_RANK": "0"}, "FLUX_JOB_NNODES is not set"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_NNODES": "1"}, "FLUX_JOB_ID is not set"),
        ({**FLUX, **HERE, "FLUX_TASK_RANK": "4"}, "FLUX_TASK_RANK='4' is not an"),
        ({**FLUX, **HERE, "FLUX_TASK_LOCAL_ID": "4"}, "FLUX_TASK_LOCAL_ID='4' is not"),
        ({"PALS_RANKID": "0"}, "PMI_SIZE is not set"),
        ({**PALS, "PMI_LOCAL_SIZE": "5"}, "PMI_LOCAL_SIZE=5 and PMI_SIZE=4 contradict"),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_SIZE is not set"),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_RANK": "2"}, "LOCAL_RANK='2' is not an"),
        ({**PYTORCH, "RANK": "two"}, "RANK='two' is not an integer from 0 to 1"),
        ({**PYTORCH, "MASTER_PORT": "0"}, "MASTER_PORT='0' is not an integer from 1"),
        ({**PYTORCH, "MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({**PYTORCH, "MASTER_ADDR": "0.0.0.0"}, "'0.0.0.0:29501' names no host"),
    ],
)
def test_names_what_is_wrong_with_the_variables_of_other_launchers(variables, message):
    with pytest.raises(LaunchEnvironmentError, match=message):
        world(variables)


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


# Variables of launchers that world() does not read, for the first of their processes.
UNREAD = {
    "MPI": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "nodes for PyTorch": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"},
    "SageMaker": {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"},
    "Vertex": {
        "CLUSTER_SPEC": json.dumps(
            {
                "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},
                "task": {"type": "workerpool0", "index": 0},
            }
        )
    },
    "TensorFlow": {
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
                "task": {"type": "worker", "index": 0},
            }
        )
    },
    "torchrun in pods": {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
    "torchrun in a pod": {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"},
}


@pytest.mark.parametrize("launcher", UNREAD)
def test_a_launcher_that_is_not_read_is_noticed(launcher):
    variables = UNREAD[launcher]
    assert world(variables).size == 1
    sign = check_size(1, variables)
    assert sign.is_first
    name = sign.said.partition("=")[0].split()[0]
    assert name in variables, sign
    assert " 2 " in sign.said
    assert "start the script on each node with khvdrun -" in sign.remedy


@pytest.mark.parametrize(
    ("launcher", "change"),
    [
        ("MPI", {"PMI_RANK": "1"}),
        ("nodes for PyTorch", {"RANK": "1"}),
        ("SageMaker", {"SM_CURRENT_HOST": "algo-2"}),
        ("Vertex", {}),
        ("torchrun in pods", {"PET_NODE_RANK": "1"}),
    ],
)
def test_one_process_speaks_for_all_of_such_a_launcher(launcher, change):
    variables = {**UNREAD[launcher], **change}
    if launcher == "Vertex":
        given = json.loads(variables["CLUSTER_SPEC"])
        given["task"] = {"type": "workerpool1", "index": 0}
        variables["CLUSTER_SPEC"] = json.dumps(given)
    assert not check_size(1, variables).is_first


def test_the_second_pod_of_an_indexed_job_knows_that_there_are_others():
    pods = [check_size(1, {"JOB_COMPLETION_INDEX": str(n)}) for n in range(3)]
    assert pods[0] is None
    assert [pod.is_first for pod in pods[1:]] == [True, False]
    assert "KERAS_HVD_REQUIRE_SIZE=1" in str(pods[1])


def tf_config(cluster, kind):
    task = {"type": kind, "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="nothing"),
        pytest.param({**UNREAD["MPI"], "PMI_SIZE": "1"}, id="one-process"),
        pytest.param({"SM_HOSTS": '["algo-1"]'}, id="one-host"),
        pytest.param(tf_config({"worker": ["a:1"]}, "worker"), id="one-worker"),
        pytest.param(
            tf_config({"chief": ["a:1"], "ps": ["b:1"], "evaluator": ["c:1"]}, "chief"),
            id="one-that-trains",
        ),
        pytest.param(
            tf_config({"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}, "evaluator"),
            id="who-evaluates-is-alone",
        ),
        pytest.param({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, id="not-known"),
        pytest.param({"WORLD_SIZE": "4"}, id="a-word-of-others"),
        pytest.param({**SBATCH_SHELL, **UNREAD["MPI"]}, id="handed-on-by-sbatch"),
        pytest.param(
            {**SALLOC_INTERACTIVE_STEP, **UNREAD["MPI"]}, id="handed-on-by-salloc"
        ),
        pytest.param(
            {**UNREAD["SkyPilot"], "KERAS_HVD_REQUIRE_SIZE": "1"},
            id="meant-to-be-alone",
        ),
        *(
            pytest.param({**UNREAD["TensorFlow"], **known}, id=name)
            for name, known in (
                ("khvdrun-in-a-pod", KHVDRUN),
                ("srun-in-a-pod", SRUN),
                ("torchrun-in-a-pod", TORCHRUN),
            )
        ),
        *(
            pytest.param({name: text}, id=f"{name}-{number}")
            for name in ("TF_CONFIG", "CLUSTER_SPEC", "SM_HOSTS", "PMI_SIZE")
            for number, text in enumerate(
                ("", "{", "[[" * 100000, "1", '"a"', '{"cluster": 7}', "9" * 5000)
            )
        ),
    ],
)
def test_no_alarm_where_a_process_is_alone_by_right_or_its_launcher_is_read(variables):
    assert check_size(1, variables) is None


def test_a_size_that_is_required_is_the_only_one():
    required = {"KERAS_HVD_REQUIRE_SIZE": "4"}
    assert check_size(4, required) is None
    with pytest.raises(LaunchEnvironmentError, match="SIZE=4, but .* has the size 2"):
        check_size(2, required)
    with pytest.raises(LaunchEnvironmentError, match="PMI_SIZE=2 says that MPI"):
        check_size(1, {**required, **UNREAD["MPI"]})
    with pytest.raises(ValueError, match="KERAS_HVD_REQUIRE_SIZE must be .* got '0'"):
        check_size(1, {"KERAS_HVD_REQUIRE_SIZE": "0"})


def test_horovods_variables_without_a_place_to_meet_make_no_rank():
    # khvdrun sets them for scripts; a process of a rank may have lost the others.
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    variables = {f"HOROVOD_{name}": "2" for name in names}
    assert world(variables).size == 1
    assert world({**SRUN, **variables}) == world(SRUN)
