"""Settings on their way to the ranks: options, configuration files, variables."""

import re
import sys
from pathlib import Path

import pytest

from keras_hvd.job import settings
from keras_hvd.launch import command_line
from keras_hvd.launch.usage import UsageError

ENVIRONMENT = Path(__file__).parents[2] / "docs" / "environment.md"
JOIN_AND_LEAVE = "import keras_hvd; keras_hvd.init(); keras_hvd.shutdown()"
# TensorFlow takes long to import.
REDUCE = f"""
import sys
sys.path.append({str(Path(__file__).parent / "ranks")!r})
from allreduce_loop import allreduce
import keras_hvd
keras_hvd.init()
allreduce("told", 1)
"""

# As Horovod documents it, but for the parts that this version does not have.
CONFIG = """\
controller: gloo
verbose: true
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: false
  log_file: /tmp/autotune.csv
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 30
  gaussian_process_noise: 0.9
stall_check:
  enabled: true
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  gloo_timeout_seconds: 45
logging:
  level: INFO
  hide_timestamp: true
"""

CONFIG_VARIABLES = {
    "KERAS_HVD_FUSION_BYTES": str(32 << 20),
    "KERAS_HVD_CACHE_CAPACITY": "2048",
    "KERAS_HVD_AUTOTUNE": "0",
    "KERAS_HVD_AUTOTUNE_LOG": "/tmp/autotune.csv",
    "KERAS_HVD_AUTOTUNE_WARMUP_SAMPLES": "5",
    "KERAS_HVD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
    "KERAS_HVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "30",
    "KERAS_HVD_STALL_CHECK_DISABLE": "0",
    "KERAS_HVD_STALL_WARNING_SECONDS": "120",
    "KERAS_HVD_STALL_ABORT_SECONDS": "240",
    "KERAS_HVD_GLOO_TIMEOUT_SECONDS": "45",
    "KERAS_HVD_LOG_LEVEL": "info",
    "KERAS_HVD_LOG_TIMESTAMP": "0",
}


def read(*arguments: object) -> command_line.Options:
    return command_line.read([*map(str, arguments), "-np", "1", "true"])


def settings_of(options: command_line.Options) -> settings.Settings:
    return settings.read(options.variables)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fusion-threshold-mb", "32"], {"fusion_bytes": 32 << 20}),
        (["--fusion-threshold-mb=0.5"], {"fusion_bytes": 1 << 19}),
        (["--fusion-threshold-mb", "0"], {"fusion_bytes": 1}),
        (["--cache-capacity", "0"], {"cache_capacity": -1}),
        (["--no-stall-check"], {"stall_warning": -1}),
        (["--no-stall-check", "--stall-check"], {"stall_warning": 0}),
        (["--stall-check-warning-time-seconds", "2.5"], {"stall_warning": 2.5}),
        (["--stall-check-shutdown-time-seconds", "9"], {"stall_abort": 9}),
        (["--start-timeout", "120"], {"init_timeout": 120}),
        (["--gloo-timeout-seconds", "45"], {"init_timeout": 45}),
        (["--autotune"], {"autotune": True}),
        (["--autotune", "--no-autotune"], {"autotune": False}),
        (["--autotune-log-file", "/tmp/log"], {"autotune_log": b"/tmp/log"}),
        (["--autotune-warmup-samples", "0"], {"autotune_warmup": -1}),
        (["--autotune-steps-per-sample", "5"], {"autotune_steps": 5}),
        (["--autotune-bayes-opt-max-samples=9"], {"autotune_samples": 9}),
        (["--log-level", "DEBUG"], {"log_level": 2}),
        (["--log-with-timestamp"], {"log_timestamp": True}),
        (["--log-with-timestamp", "--log-hide-timestamp"], {"log_timestamp": False}),
        (["--log-without-timestamp"], {"log_timestamp": False}),
    ],
)
def test_an_option_is_a_setting(arguments, expected):
    found = vars(settings_of(read(*arguments)))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    "option", ["--nics", "--network-interface", "--network-interfaces"]
)
def test_the_names_of_network_interfaces(option):
    variables = read(option, "eth0,ib0").variables
    assert settings.network_interfaces(variables) == ("eth0", "ib0")


def test_an_option_comes_before_the_environment(khvdrun):
    show = "import keras_hvd.job.settings as s; print(s.read().fusion_bytes)"
    ended = khvdrun.run(
        *("-np", 1, "--fusion-threshold-mb", 2, sys.executable, "-c", show),
        env={"KERAS_HVD_FUSION_BYTES": "7", "HOROVOD_FUSION_THRESHOLD": "8"},
    )
    assert ended.stdout == f"[0] {2 << 20}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cycle-time-ms", "3.5"],
        ["--autotune-gaussian-process-noise", "0.8"],
        ["--hierarchical-allreduce"],
        ["--no-torus-allreduce"],
        ["--gloo"],
        ["--mpi"],
        ["--tcp"],
        ["--ssh-port", "22"],
        ["--ssh-identity-file", "key"],
        ["--disable-cache"],
        ["--num-nccl-streams", "2"],
        ["--thread-affinity", "1"],
        ["--mpi-threads-disable"],
    ],
)
def test_an_option_without_effect_is_explained_once(khvdrun, arguments):
    (reason,) = read(*arguments).without_effect.values()
    ended = khvdrun.run(*arguments, "-np", 2, "true")
    assert ended.returncode == 0
    assert ended.stderr == (
        f"khvdrun: warning: without effect here: {arguments[0]} ({reason})\n"
    )


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--max-num-proc", "2"], "--max-np .* say with --min-np"),
        (["--host-discovery-script", "find"], "--host-discovery-script .* say with"),
        (["--blacklist-cooldown-range", "1", "2"], "say with --min-np how many"),
        (["--elastic-timeout", "9"], "--elastic-timeout .* say with --min-np"),
        (["--slots", "2"], "--slots .* say with --min-np"),
        (["--reset-limit", "0"], "--reset-limit .* say with --min-np"),
        (["--min-np", "1", "--blacklist-cooldown-range", "2", "1"], "2 1: the first"),
        (["--mpi-args=-x A"], "--mpi-args: no mpirun runs underneath: .*--bind-to"),
        (["--binding-args=-map-by slot"], "--bind-to cores"),
        (["--jsrun"], "starts the ranks itself"),
        (["--fusion-threshold-mb", "big"], "'big' is not a number of MiB"),
        (["--fusion-threshold-mb", "-1"], "argument"),
        (["--autotune-steps-per-sample", "0"], "'0' is not a whole number from 1"),
        (["--autotune-log-file", "/"], "'/' is a directory"),
        (["--autotune-log-file", "/missing/log"], "cannot write '/missing/log'"),
        (["--timeline-filename", "/etc/passwd/a"], "cannot write '/etc/passwd/a'"),
        (["--timeline-filename", 300 * "a"], "cannot write 'a*': File name too long"),
        (["--cache-capacity", "1.5"], "'1.5' is not a whole number from 0"),
        (["--log-level", "loud"], "'loud' is not one of trace, debug"),
        (["--start-timeout", "soon"], "'soon' is not a number of seconds"),
    ],
)
def test_an_option_that_asks_for_something_else_is_refused(arguments, advice):
    with pytest.raises(UsageError, match=advice):
        read(*arguments)


def test_a_hostfile_has_slots_in_either_form(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost:1\n127.0.0.1 slots=1\n")
    assert command_line.read(["-np", "2", "-hostfile", str(hostfile), "true"])
    with pytest.raises(UsageError, match="more processes than the 2 slots"):
        command_line.read(["-np", "3", "-hostfile", str(hostfile), "true"])


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file."""

    def write(text: str) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("hyphens", [False, True])
def test_a_config_file_is_laid_out_as_horovods(config, hyphens):
    text = re.sub(r"(?m)_(?=.*:)", "-", CONFIG) if hyphens else CONFIG
    options = read("--config-file", config(text))
    assert options.variables == CONFIG_VARIABLES
    assert options.verbose
    assert set(options.without_effect) == {
        *("--gloo", "--cycle-time-ms", "--hierarchical-allreduce"),
        *("--mpi-threads-disable", "--num-nccl-streams"),
        "--autotune-gaussian-process-noise",
    }


def test_a_config_file_may_hold_the_job_itself(config):
    path = config("num-proc: 2\nbind_to: cores\nterm-after: 1.5\nhosts: localhost:2\n")
    options = command_line.read(["--config-file", path, "true"])
    assert (options.ranks, options.bind_to, options.term_after) == (2, "cores", 1.5)


@pytest.mark.parametrize("after", [True, False])
def test_the_command_line_comes_before_the_config_file(config, after):
    given = ["--config-file", config(CONFIG)]
    own = ["--fusion-threshold-mb", "1", "--log-with-timestamp"]
    options = read(*(given + own if after else own + given))
    assert options.variables == {
        **CONFIG_VARIABLES,
        "KERAS_HVD_FUSION_BYTES": str(1 << 20),
        "KERAS_HVD_LOG_TIMESTAMP": "1",
    }


def test_an_empty_config_file_says_nothing(config):
    assert read("--config-file", config("# nothing\n")) == read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fusion: 1", "unknown key fusion; keys are: .*params"),
        ("params:\n  fusion_mb: 1", "unknown key params.fusion_mb; keys in params are"),
        ("params: 3", "params must hold keys with values, not 3"),
        ("- params", "must hold keys with values, not "),
        ("params:\n  cycle_time_ms: [1]", "params.cycle_time_ms must be a number or"),
        ("params:\n  cycle_time_ms: true", "params.cycle_time_ms must be a number or"),
        ("verbose: 2", "verbose must be true or false, not 2"),
        ("controller: nccl", "controller must be gloo or mpi, not 'nccl'"),
        ("logging:\n  level: LOUD", "argument --log-level: 'LOUD' is not one of"),
        ("num_proc: none", "'none' is not a number of processes"),
        ("params: {", "is not YAML: "),
        ("output-filename: 2026-13-45", "is not YAML: "),
        ("a: " + 2000 * "[", "is not YAML: "),
        ("{verbose: true, verbose: false}", "verbose appears twice, in lines 1 and 1"),
        (
            "timeline:\n  mark_cycles: true\n  mark-cycles: false",
            "timeline.mark-cycles appears twice, in lines 2 and 3",
        ),
        (
            "params:\n  cache-capacity: 1\n\nparams:\n  cycle-time-ms: 1",
            "params appears twice, in lines 1 and 4",
        ),
        ("a: &a [*b]", "is not YAML: "),
        ("num_proc: !!timestamp soon", "is not YAML: AttributeError: "),
        ("verbose: !!bool maybe", "is not YAML: KeyError: 'maybe'"),
        ("controller: [gloo]", r"controller must be gloo or mpi, not \['gloo'\]"),
        ('timeline:\n  filename: "a\\0b"', "timeline.filename cannot be passed to a"),
        ('output-filename: "\\ud800"', "output-filename cannot be passed to a process"),
    ],
)
def test_a_wrong_config_file_is_named_with_its_key(config, text, message):
    path = config(text)
    with pytest.raises(UsageError) as error:
        read("--config-file", path)
    assert str(error.value).startswith(f"--config-file: {path!r}: ")
    assert re.search(message, str(error.value))


def test_a_config_file_that_is_not_there():
    with pytest.raises(UsageError, match="'/no/file': cannot be read: No such file"):
        read("--config-file", "/no/file")


def test_horovods_variables_are_explained_by_rank_0_alone(khvdrun):
    twice = f"{JOIN_AND_LEAVE}; keras_hvd.init()"
    environment = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_NUM_NCCL_STREAMS": "2"}
    ended = khvdrun.run("-np", 2, sys.executable, "-c", twice, env=environment)
    assert ended.returncode == 0
    explained = settings.without_effect(environment)
    assert ended.stderr == f"[0] keras_hvd [rank 0] warning: {explained}\n"


def test_a_malformed_variable_is_an_error_on_every_rank(khvdrun):
    ended = khvdrun.run(
        *("-np", 2, sys.executable, "-c", JOIN_AND_LEAVE),
        env={"HOROVOD_FUSION_THRESHOLD": "64MB"},
    )
    wanted = "HOROVOD_FUSION_THRESHOLD must be a whole number of bytes, got '64MB'"
    assert ended.returncode == 1
    of_ranks = [line for line in ended.stderr.splitlines() if line.startswith("[")]
    assert sorted(of_ranks) == [f"[{rank}] ValueError: {wanted}" for rank in range(2)]


def lines_of_the_engine(khvdrun, program: str, **environment: str) -> list[str]:
    ended = khvdrun.run("-np", 2, sys.executable, "-c", program, env=environment)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stderr.splitlines())


def test_the_engine_is_silent_unless_told(khvdrun):
    assert lines_of_the_engine(khvdrun, REDUCE) == []


def test_the_engine_says_as_much_as_the_level_allows(khvdrun):
    found = {
        level: lines_of_the_engine(khvdrun, REDUCE, HOROVOD_LOG_LEVEL=level)
        for level in ("warning", "info", "debug", "trace")
    }
    assert found["warning"] == []
    assert len(found["info"]) == 4
    for rank, line in enumerate(found["info"][::2]):
        what = r"info: joined job 'khvdrun-[\w-]+' of 2 ranks"
        assert re.fullmatch(rf"\[{rank}\] keras_hvd \[rank {rank}\] {what}", line)
    name = "allreduce 'told'"
    batch = rf"\[1\] keras_hvd \[rank 1\] debug: runs batch 1: {name}, 4 bytes"
    assert len(found["debug"]) == 6
    assert any(re.fullmatch(batch, line) for line in found["debug"])
    assert len(found["trace"]) == 8
    assert f"[0] keras_hvd [rank 0] trace: submits {name}" in found["trace"]


def test_the_engines_lines_start_with_the_time_if_told(khvdrun):
    lines = lines_of_the_engine(
        *(khvdrun, JOIN_AND_LEAVE),
        KERAS_HVD_LOG_LEVEL="info",
        KERAS_HVD_LOG_TIMESTAMP="1",
    )
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}"
    assert len(lines) == 4
    for line in lines:
        assert re.match(rf"\[\d\] {time} keras_hvd \[rank \d\] info: ", line), line
    (documented,) = re.findall(rf"^    {time}( .*)", ENVIRONMENT.read_text(), re.M)
    joined = re.sub("khvdrun-[^']+", "khvdrun-71-5eed", lines[0])
    assert joined.endswith(documented)


@pytest.mark.parametrize("prefix", [True, False])
def test_output_starts_with_the_time_if_told(khvdrun, prefix):
    shown = [] if prefix else ["--no-prefix"]
    ended = khvdrun.run(
        *("-np", 2, "--prefix-output-with-timestamp", *shown),
        *("sh", "-c", "echo out; echo err >&2"),
    )
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    rank = r"\[\d\] " if prefix else ""
    for text, word in ((ended.stdout, "out"), (ended.stderr, "err")):
        lines = text.splitlines()
        assert len(lines) == 2
        for line in lines:
            assert re.fullmatch(time + rank + word, line), line


def test_kept_output_has_no_timestamps(khvdrun, tmp_path):
    khvdrun.run(
        *("-np", 1, "-prefix-timestamp", "--output-filename", tmp_path),
        *("echo", "out"),
    )
    assert (tmp_path / "rank.0" / "stdout").read_text() == "out\n"
