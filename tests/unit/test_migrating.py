"""docs/ tells the truth about Horovod's names: its tables, row by row."""

import functools
import inspect
import pathlib
import re

import keras
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.job import settings
from keras_hvd.launch import command_line, usage

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "horovod_names.md").read_text()
GUIDE = (DOCS / "migrating.md").read_text()
ROWS = dict(re.findall(r"^\| `([^`]+)` \| ([^|`]+) \| .*\|$", PAGE, re.M))
VERDICTS = {"same", "same, and more", "by keyword", "instead", "not there"}

CALLS = {row: here for row, here in ROWS.items() if re.match(r"[\w.]+(\(|$)", row)}
OPTIONS = {row: here for row, here in ROWS.items() if row.startswith("-")}
VARIABLES = {row: here for row, here in ROWS.items() if row.startswith("HOROVOD_")}

# Horovod 0.28.1's names in horovod.tensorflow, .keras, their callbacks and elastic.
HOROVODS_NAMES = """
init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
is_homogeneous start_timeline stop_timeline mpi_threads_supported mpi_enabled mpi_built
gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_ alltoall
reducescatter grouped_reducescatter join rank_op size_op local_rank_op local_size_op
process_set_included_op Average Sum Adasum Min Max Product
broadcast_variables broadcast_object broadcast_object_fn allgather_object
broadcast_global_variables BroadcastGlobalVariablesHook
ProcessSet ProcessSet.size ProcessSet.rank ProcessSet.included ProcessSet.ranks
ProcessSet.process_set_id ProcessSet.mpi_comm
global_process_set add_process_set remove_process_set
DistributedOptimizer optimizer.register_local_var PartialDistributedOptimizer
DistributedGradientTape PartialDistributedGradientTape tape.gradient
tape.register_local_source tape.get_local_and_global_gradients
SyncBatchNormalization Compression.none Compression.fp16
check_num_rank_power_of_2 handle_average_backwards_compatibility load_model run
callbacks.BroadcastGlobalVariablesCallback callbacks.MetricAverageCallback
callbacks.LearningRateScheduleCallback callbacks.LearningRateWarmupCallback
callbacks.BestModelCheckpoint
elastic.run elastic.KerasState elastic.TensorFlowKerasState elastic.TensorFlowState
elastic.CommitStateCallback elastic.UpdateBatchStateCallback
elastic.UpdateEpochStateCallback
compute_service.TfDataServiceConfig compute_service.tf_data_service
compute_service.send_to_data_service compute_service.compute_worker_fn
"""

HOROVODRUNS_OPTIONS = """
-np --num-proc -H --hosts -hostfile --hostfile --start-timeout --output-filename
--verbose -v --version -cb --check-build --disable-cache --config-file
--network-interface --network-interfaces -p --ssh-port -i --ssh-identity-file
--fusion-threshold-mb --cycle-time-ms --cache-capacity
--hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather
--torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc
--slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range
--host-discovery-script --timeline-filename --timeline-mark-cycles
--no-timeline-mark-cycles --no-stall-check --stall-check
--stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
--num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
--log-with-timestamp --log-without-timestamp --log-hide-timestamp
--no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp
--gloo --mpi --jsrun
"""

HOROVODS_VARIABLES = """
FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER
TORUS_ALLREDUCE AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE
AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE TIMELINE
TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS
STALL_SHUTDOWN_TIME_SECONDS MPI_THREADS_DISABLE NUM_NCCL_STREAMS THREAD_AFFINITY
GLOO_TIMEOUT_SECONDS GLOO_IFACE LOG_LEVEL LOG_HIDE_TIME START_TIMEOUT
DYNAMIC_PROCESS_SETS DISABLE_GROUP_FUSION BATCH_D2D_MEMCOPIES ENABLE_ASYNC_COMPLETION
ENABLE_XLA_OPS CPU_OPERATIONS CONTROLLER CCL_CACHE ADASUM_MPI_CHUNK_SIZE
DISABLE_NVTX_RANGES ELASTIC_TIMEOUT
"""


READERS = (
    settings.read,
    settings.timeline,
    settings.network_interfaces,
    settings.cpu_operations,
)


class Public(dict):
    """Names of the package, where Python looks up those in defaults."""

    def __missing__(self, name: str):
        return getattr(keras_hvd, name)


def horovods(call: str) -> inspect.Signature | None:
    """The signature that a row gives; None if it is no function."""
    if "(" not in call:
        return None
    scope = Public()
    exec(f"def function({call.split('(', 1)[1]}: ...", {}, scope)
    return inspect.signature(scope["function"])


def ours(call: str):
    """The package's object under the name of a row."""
    path = call.split("(")[0].split(".")
    value = keras_hvd
    if len(path) == 2 and path[0] in ("optimizer", "tape", "ProcessSet"):
        keras_hvd.init()
        value = {
            "optimizer": lambda: keras_hvd.DistributedOptimizer(keras.optimizers.SGD()),
            "tape": lambda: keras_hvd.DistributedGradientTape(tf.GradientTape()),
            "ProcessSet": lambda: keras_hvd.global_process_set,
        }[path.pop(0)]()
    return functools.reduce(getattr, path, value)


def arguments(signature: inspect.Signature) -> list[tuple[str, object]]:
    """Names and defaults."""
    return [(each.name, each.default) for each in signature.parameters.values()]


def by_keyword_only(signature: inspect.Signature) -> set[str]:
    return {
        each.name
        for each in signature.parameters.values()
        if each.kind is each.KEYWORD_ONLY
    }


def each(verdict: str) -> pytest.MarkDecorator:
    """All rows that say this, each by the name of its call."""
    rows = [row for row, here in CALLS.items() if here == verdict]
    return pytest.mark.parametrize("call", rows, ids=lambda row: row.split("(")[0])


@each("same")
def test_the_same(call):
    value, wanted = ours(call), horovods(call)
    if wanted is not None:
        given = inspect.signature(value)
        assert arguments(given) == arguments(wanted)
        assert not by_keyword_only(given)


@each("same, and more")
def test_the_same_and_more(call):
    wanted, given = horovods(call), inspect.signature(ours(call))
    assert arguments(given) != arguments(wanted)
    assert not by_keyword_only(given) & set(wanted.parameters)
    for (name, default), (horovods_name, horovods_default) in zip(
        arguments(given), arguments(wanted), strict=False
    ):
        assert name == horovods_name
        assert horovods_default in (default, inspect.Parameter.empty)
    assert len(given.parameters) >= len(wanted.parameters)


@each("by keyword")
def test_by_keyword(call):
    wanted, given = arguments(horovods(call)), arguments(inspect.signature(ours(call)))
    assert given[0] == wanted[0]
    assert set(wanted) <= set(given)


@each("not there")
def test_not_there(call):
    with pytest.raises(AttributeError):
        ours(call)


def test_what_the_text_names_is_there():
    named = set(re.findall(r"`hvd\.([\w.]+)", GUIDE + PAGE))
    assert len(named) > 10
    for name in named:
        ours(name)


def test_every_row_says_one_of_the_words():
    assert set(CALLS.values()) == VERDICTS
    assert set(OPTIONS.values()) == {"same", "without effect", "refused"}
    assert set(VARIABLES.values()) == {"same", "without effect"}
    assert len(CALLS) + len(OPTIONS) + len(VARIABLES) == len(ROWS)


def test_all_of_horovods_names_have_rows():
    assert {call.split("(")[0] for call in CALLS} == set(HOROVODS_NAMES.split())
    assert {row.split("=")[0] for row in VARIABLES} == {
        f"HOROVOD_{name}" for name in HOROVODS_VARIABLES.split()
    }
    written = set(re.findall(r"`(--?[a-zA-Z][a-z-]*)", PAGE))
    assert set(HOROVODRUNS_OPTIONS.split()) <= written


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("hosts").write_text("localhost slots=2\n")
    pathlib.Path("config.yaml").write_text("verbose: true\n")
    # The last one wins, so that -np is asked for as well where the row is of it.
    command = ["-np", "2", *option.split(), "true"]
    if OPTIONS[option] == "refused":
        with pytest.raises(usage.UsageError, match=option.split()[0]):
            command_line.read(command)
        return
    if option == "--version":
        with pytest.raises(SystemExit, match="^0$"):
            command_line.read(command)
        return
    explained = command_line.read(command).without_effect
    assert bool(explained) == (OPTIONS[option] == "without effect")


@pytest.mark.parametrize("row", VARIABLES)
@pytest.mark.parametrize("prefix", ["HOROVOD_", "KERAS_HVD_"])
def test_variables(row, prefix):
    name, value = row.replace("HOROVOD_", prefix).split("=")
    explained = settings.without_effect({name: value})
    if VARIABLES[row] == "without effect":
        assert name in explained
        return
    assert explained == ""
    changes = any(read({name: value}) != read({}) for read in READERS)
    assert changes or is_named(name)


def is_named(variable: str) -> bool:
    """Whether a module reads it by itself."""
    package = pathlib.Path(keras_hvd.__file__).parent
    return any(f'"{variable}"' in path.read_text() for path in package.rglob("*.py"))
