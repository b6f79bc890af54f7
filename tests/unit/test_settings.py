"""settings.read() on Horovod's variables and ours: the one that counts, and errors."""

import os
import pathlib
import re
import warnings

import pytest

from keras_hvd.job import log, settings

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "environment.md"
DEFAULTS = vars(settings.read({}))


def changed(environment: dict[str, str]) -> dict[str, object]:
    """The settings that differ from the defaults."""
    found = vars(settings.read(environment))
    return {name: value for name, value in found.items() if value != DEFAULTS[name]}


def test_nothing_set_leaves_the_engine_its_defaults():
    assert changed({}) == {}
    assert settings.LOG_LEVELS[DEFAULTS["log_level"] - 1] == "warning"
    assert not DEFAULTS["log_timestamp"]
    # 0 is the default of khvd_options.
    others = {n: v for n, v in DEFAULTS.items() if not n.startswith("log_")}
    assert not any(others.values())


@pytest.mark.parametrize("prefix", ["HOROVOD_", "KERAS_HVD_"])
@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        ("FUSION_THRESHOLD", "1048576", {"fusion_bytes": 1 << 20}),
        ("FUSION_THRESHOLD", "0", {"fusion_bytes": 1}),
        ("CACHE_CAPACITY", "2048", {"cache_capacity": 2048}),
        ("CACHE_CAPACITY", "0", {"cache_capacity": -1}),
        ("STALL_CHECK_TIME_SECONDS", "30", {"stall_warning": 30}),
        ("STALL_SHUTDOWN_TIME_SECONDS", "90", {"stall_abort": 90}),
        ("STALL_CHECK_DISABLE", "1", {"stall_warning": -1}),
        ("STALL_CHECK_DISABLE", "0", {}),
        ("START_TIMEOUT", "120", {"init_timeout": 120}),
        ("GLOO_TIMEOUT_SECONDS", "45", {"init_timeout": 45}),
        ("AUTOTUNE", "1", {"autotune": True}),
        ("AUTOTUNE", "0", {}),
        ("AUTOTUNE_LOG", "/tmp/log.csv", {"autotune_log": b"/tmp/log.csv"}),
        ("AUTOTUNE_WARMUP_SAMPLES", "5", {"autotune_warmup": 5}),
        ("AUTOTUNE_WARMUP_SAMPLES", "0", {"autotune_warmup": -1}),
        ("AUTOTUNE_STEPS_PER_SAMPLE", "20", {"autotune_steps": 20}),
        ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "40", {"autotune_samples": 40}),
        ("LOG_LEVEL", "trace", {"log_level": 1}),
        ("LOG_LEVEL", "FATAL", {"log_level": 6}),
        ("LOG_TIMESTAMP", "1", {"log_timestamp": True}),
        ("LOG_HIDE_TIME", "1", {}),
        ("LOG_HIDE_TIME", "0", {"log_timestamp": True}),
        ("LOG_LEVEL", "", {}),
        ("DISABLE_NVTX_RANGES", "1", {"disable_ranges": True}),
        ("DISABLE_NVTX_RANGES", "0", {}),
    ],
)
def test_horovods_variables_under_both_prefixes(prefix, suffix, text, expected):
    assert changed({prefix + suffix: text}) == expected


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        ("INIT_TIMEOUT_SECONDS", "1.5", {"init_timeout": 1.5}),
        ("STALL_WARNING_SECONDS", "-1", {"stall_warning": -1}),
        ("STALL_ABORT_SECONDS", "0.5", {"stall_abort": 0.5}),
        ("EXCHANGE_BYTES", "65536", {"exchange_bytes": 65536}),
        ("FUSION_BYTES", "4096", {"fusion_bytes": 4096}),
        ("HOST_TIMEOUT_SECONDS", "20", {"host_timeout": 20}),
        ("CHECK", "1", {"check": True}),
        ("CHECK", "0", {}),
        ("NCCL_LIBRARY", "/opt/libnccl.so.2", {"nccl_library": b"/opt/libnccl.so.2"}),
        ("NCCL_LIBRARY", "libnccl.so.2", {"nccl_library": b"libnccl.so.2"}),
        ("NVTX_LIBRARY", "/opt/libnvtx.so.1", {"nvtx_library": b"/opt/libnvtx.so.1"}),
        ("CUDA_LIBRARY", "/opt/libcuda.so.1", {"cuda_library": b"/opt/libcuda.so.1"}),
    ],
)
def test_our_own_variables_are_not_horovods(suffix, text, expected):
    assert changed({"KERAS_HVD_" + suffix: text}) == expected
    if suffix in ("EXCHANGE_BYTES", "CHECK"):
        assert changed({"HOROVOD_" + suffix: text}) == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(
            {"HOROVOD_LOG_LEVEL": "info", "KERAS_HVD_LOG_LEVEL": "error"},
            {"log_level": 5},
            id="same-name",
        ),
        pytest.param(
            {"HOROVOD_FUSION_THRESHOLD": "1", "KERAS_HVD_FUSION_BYTES": "2"},
            {"fusion_bytes": 2},
            id="own-name",
        ),
        pytest.param(
            {"KERAS_HVD_FUSION_THRESHOLD": "1", "KERAS_HVD_FUSION_BYTES": "2"},
            {"fusion_bytes": 2},
            id="own-name-before-alias",
        ),
        pytest.param(
            {"HOROVOD_START_TIMEOUT": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "2"},
            {"init_timeout": 1},
            id="start-before-gloo",
        ),
        pytest.param(
            {"HOROVOD_LOG_HIDE_TIME": "1", "KERAS_HVD_LOG_TIMESTAMP": "1"},
            {"log_timestamp": True},
            id="timestamp",
        ),
        pytest.param(
            {
                "HOROVOD_STALL_CHECK_DISABLE": "1",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
            },
            {"stall_warning": -1},
            id="horovods-stall-check-disabled",
        ),
        pytest.param(
            {
                "HOROVOD_STALL_CHECK_DISABLE": "1",
                "KERAS_HVD_STALL_WARNING_SECONDS": "30",
                "KERAS_HVD_STALL_ABORT_SECONDS": "60",
            },
            {"stall_warning": 30, "stall_abort": 60},
            id="ours-before-horovods-disabled",
        ),
        pytest.param(
            {
                "KERAS_HVD_STALL_CHECK_DISABLE": "1",
                "KERAS_HVD_STALL_WARNING_SECONDS": "30",
                "KERAS_HVD_STALL_ABORT_SECONDS": "60",
            },
            {"stall_warning": -1},
            id="ours-disabled",
        ),
        pytest.param(
            {
                "KERAS_HVD_STALL_CHECK_DISABLE": "0",
                "HOROVOD_STALL_CHECK_DISABLE": "1",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
            },
            {"stall_warning": 30},
            id="ours-enables",
        ),
    ],
)
def test_which_of_several_counts(environment, expected):
    assert changed(environment) == expected


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "a whole number of bytes"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "a whole number of bytes"),
        ("KERAS_HVD_FUSION_BYTES", str(2**63), "a whole number of bytes"),
        ("KERAS_HVD_CACHE_CAPACITY", "1.5", "a whole number of names from 0"),
        ("HOROVOD_AUTOTUNE", "on", "0 or 1"),
        (
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
            "-1",
            "a whole number from 0 to 2147483647",
        ),
        (
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
            "0",
            "a whole number from 1 to 2147483647",
        ),
        (
            "KERAS_HVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            str(2**31),
            "a whole number from 1 to 2147483647",
        ),
        ("HOROVOD_STALL_CHECK_DISABLE", "yes", "0 or 1"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "1m", "a number of seconds"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "nan", "a number of seconds from 0"),
        ("HOROVOD_START_TIMEOUT", "-3", "a number of seconds from 0"),
        ("KERAS_HVD_STALL_ABORT_SECONDS", "inf", "a number of seconds from 0"),
        ("HOROVOD_LOG_LEVEL", "loud", "trace, debug, info, warning, error or fatal"),
        ("HOROVOD_LOG_HIDE_TIME", "2", "0 or 1"),
        ("KERAS_HVD_CHECK", "10", "0 or 1"),
    ],
)
def test_names_a_malformed_variable_and_its_value(name, text, wanted):
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {wanted}, got ")):
        settings.read({name: text})


def test_the_names_of_network_interfaces():
    found = settings.network_interfaces
    assert found({}) == ()
    assert found({"KERAS_HVD_NETWORK_INTERFACES": "eth0, ib0"}) == ("eth0", "ib0")
    assert found({"HOROVOD_GLOO_IFACE": "eth0"}) == ("eth0",)
    both = {"KERAS_HVD_NETWORK_INTERFACES": "ib0", "HOROVOD_GLOO_IFACE": "eth0"}
    assert found(both) == ("ib0",)
    with pytest.raises(ValueError, match="KERAS_HVD_NETWORK_INTERFACES must be names"):
        found({"KERAS_HVD_NETWORK_INTERFACES": "eth0,,ib0"})


def test_the_ports_where_ranks_listen():
    assert settings.ports({}) == range(0)
    assert settings.ports({"KERAS_HVD_PORTS": "30000-30100"}) == range(30000, 30101)
    for wrong in ("30000", "30100-30000", "0-10", "30000-65536", "a-b"):
        with pytest.raises(
            ValueError, match="PORTS must be two port numbers, as 30000"
        ):
            settings.ports({"KERAS_HVD_PORTS": wrong})


def test_how_many_connections_carry_tensors():
    name = "KERAS_HVD_DATA_CONNECTIONS"
    counts = [settings.data_connections({name: text}) for text in ("", "1", "16")]
    assert counts == [1, 1, 16]
    for text in ("0", "17", "many"):
        with pytest.raises(
            ValueError, match=f"{name} must be a whole number from 1 to"
        ):
            settings.data_connections({name: text})


@pytest.mark.parametrize(("text", "seconds"), [("", 60), ("0", 60), ("1.5", 1.5)])
def test_how_long_processes_wait_for_each_other(text, seconds):
    variables = {"KERAS_HVD_INIT_TIMEOUT_SECONDS": text}
    assert settings.init_timeout(variables) == seconds


def test_what_carries_tensors_between_hosts():
    assert settings.cpu_operations({}) == ""
    for name in ("KERAS_HVD_CPU_OPERATIONS", "HOROVOD_CPU_OPERATIONS"):
        for text, carrier in {"mpi": "mpi", "MPI": "mpi", "gloo": "tcp"}.items():
            assert settings.cpu_operations({name: text}) == carrier
        with pytest.raises(ValueError, match=f"{name} must be mpi, tcp or gloo"):
            settings.cpu_operations({name: "ccl"})


def test_a_malformed_time_is_an_error_also_where_the_stall_check_is_disabled():
    with pytest.raises(ValueError, match="HOROVOD_STALL_CHECK_TIME_SECONDS must be"):
        settings.read(
            {
                "KERAS_HVD_STALL_CHECK_DISABLE": "1",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "soon",
            }
        )


def test_the_autotune_log_stays_where_it_was_meant(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = settings.read({"HOROVOD_AUTOTUNE_LOG": "log.csv"}).autotune_log
    assert found == os.fsencode(tmp_path / "log.csv")


@pytest.mark.parametrize("prefix", ["HOROVOD_", "KERAS_HVD_"])
@pytest.mark.parametrize("suffix", sorted(settings.WITHOUT_EFFECT))
def test_explains_what_means_nothing_here(prefix, suffix):
    environment = {prefix + suffix: "1"}
    assert changed(environment) == {}
    reason = settings.WITHOUT_EFFECT[suffix]
    expected = f"without effect here: {prefix}{suffix} ({reason})"
    assert settings.without_effect(environment) == expected


def test_explains_all_at_once_and_nothing_else():
    environment = {
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_NUM_NCCL_STREAMS": "2",
        "HOROVOD_NUM_STREAMS": "1",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "",
        "HOROVOD_FUSION_THRESHOLD": "1",
    }
    nccl = settings.WITHOUT_EFFECT["NUM_NCCL_STREAMS"]
    cycles = settings.WITHOUT_EFFECT["CYCLE_TIME"]
    assert settings.without_effect(environment) == (
        f"without effect here: HOROVOD_CYCLE_TIME ({cycles}); "
        f"HOROVOD_NUM_NCCL_STREAMS, HOROVOD_NUM_STREAMS ({nccl})"
    )
    assert settings.without_effect({}) == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("STALL_WARNING_TIME", "STALL_WARNING_SECONDS"),
        ("STALL_CHECK_TIME", "STALL_CHECK_TIME_SECONDS"),
        ("FUSION_TRESHOLD", "FUSION_THRESHOLD"),
    ],
)
def test_a_misspelled_variable_is_named(given, meant):
    expected = f"KERAS_HVD_{given} (not a variable; KERAS_HVD_{meant} is)"
    assert settings.without_effect({f"KERAS_HVD_{given}": "1"}).endswith(expected)
    assert settings.without_effect({f"KERAS_HVD_{given}": ""}) == ""


def test_no_documented_variable_counts_as_misspelled():
    names = set(re.findall(r"KERAS_HVD_[A-Z_]+", PAGE.read_text()))
    assert "KERAS_HVD_LOCAL_RANK" in names
    assert settings.without_effect(dict.fromkeys(names, "1")) == ""


def test_the_documentation_lists_what_means_nothing_here():
    section = PAGE.read_text().partition("## Without effect")[2]
    listed = re.findall(r"`HOROVOD_(\w+)`", section)
    assert sorted(listed) == sorted(settings.WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("level", "count"), [("trace", 1), ("warning", 1), ("error", 0), ("fatal", 0)]
)
def test_warnings_of_python_obey_the_level_too(monkeypatch, level, count):
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.warn("it goes on, but not as it should")
    assert [warning.filename for warning in caught] == [__file__] * count
