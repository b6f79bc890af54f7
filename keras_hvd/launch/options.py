"""The options of `khvdrun`, in one table, and their checked result: `Options`.

Options of `horovodrun` that tune something this version lacks are accepted and
explained. Those that ask for a different kind of job are refused, with advice.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_hvd.job import settings
from keras_hvd.job.settings import WITHOUT_EFFECT
from keras_hvd.launch import values
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.usage import UsageError
from keras_hvd.world.rendezvous.nodes import Node

MOST_DIAGNOSED_RANKS = 8
"""More ranks say little more about the machine and take long."""


@dataclass(frozen=True)
class Options:
    """One call of `khvdrun`, checked."""

    check_build: bool = False
    diagnose: bool = False
    ranks: int = 0  # on this host
    node: Node | None = None  # this host among several; None: the only one
    may_join: bool = False  # whether other hosts may come and go
    taken: Mapping[str, str] = field(default_factory=dict)  # option: cluster's variable
    membership: str | None = None  # HOST:PORT at which it is a service alone
    join: str | None = None  # HOST:PORT of such a service
    hosts: tuple[HostSlots, ...] = ()  # where mpirun or srun is to start the ranks
    mpi_args: tuple[str, ...] = ()  # more arguments for mpirun
    ssh_options: tuple[str, ...] = ()  # for ssh
    dry_run: bool = False  # only show the command
    command: tuple[str, ...] = ()
    executable: str = ""  # the file that the command names
    bind_to: str = "none"  # or "cores"
    output_directory: Path | None = None  # keeps every rank's output, if given
    report: Path | None = None  # the file for a report of the job
    status_port: int | None = None  # serves the job's state; 0: any
    scaling: tuple[int, ...] = ()  # numbers of ranks to be compared
    steps: int = 50  # measured steps for each of them
    prefix: bool = True
    timestamps: bool = False
    live_output: bool = False  # whether the reader follows carriage returns
    variables: Mapping[str, str] = field(default_factory=dict)  # of the ranks
    without_effect: Mapping[str, str] = field(default_factory=dict)  # option: reason
    verbose: bool = False
    term_after: float = 5.0  # seconds from the first failure until SIGTERM
    kill_after: float = 5.0  # seconds from SIGTERM until SIGKILL
    least_ranks: int | None = None  # the job goes on as long as so many are left
    most_ranks: int | None = None  # to which it may grow
    slots: int = 1  # on a host that is given without a number
    discovery_script: str = ""  # tells again and again which hosts there are
    launch_agent: tuple[str, ...] = ()  # runs a command on another host, as ssh does
    elastic_timeout: float | None = None  # seconds that they wait for each other then
    reset_limit: int | None = None  # the most times that it goes on
    # Seconds before a rank that ended is started again, at first and at most.
    cooldown_range: tuple[float, float] | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the ranks make a recording."""
        return self.report is not None or self.status_port is not None


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Args:
        usage: its names, and the placeholders for its values.
        sets: a field of `Options`, or an argument for one; or a variable of the ranks.
        value: the new value: this, or the result of this function of the text.
        key: its name in a configuration file: `section.key`; "" for none.
        help: for `--help`, which does not show options without.
        off: the option that `false` stands for in a configuration file.

    Example:

    >>> given = argparse.Namespace(variables={})
    >>> option = Option("-f --fast LEVEL", "KERAS_HVD_FAST", str)
    >>> option.take(given, "-f", option.value("2"))
    >>> given.variables
    {'KERAS_HVD_FAST': '2'}
    """

    usage: str
    sets: str
    value: Any
    key: str = ""
    help: str = argparse.SUPPRESS
    off: str = ""

    @property
    def names(self) -> list[str]:
        """The names, with their hyphens."""
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def values(self) -> list[str]:
        """The placeholders for its values."""
        return [word for word in self.usage.split() if not word.startswith("-")]

    @property
    def long_name(self) -> str:
        """The first of its names with two hyphens."""
        return next(name for name in self.names if name.startswith("--"))

    def take(self, given: argparse.Namespace, name: str, value: Any) -> None:
        """Stores this option's setting in `given`, for one of its names.

        `value` is the result of `Option.value` for the text. Raises UsageError if the
        option is refused.
        """
        if self.sets == _REFUSED:
            raise UsageError(f"{name}: {self.value}")
        if not callable(self.value):
            value = self.value
        # New dicts: the defaults must not change.
        if self.sets == _IGNORED:
            given.without_effect = {**given.without_effect, name: value}
        elif self.sets.isupper():
            given.variables = {**given.variables, self.sets: value}
        else:
            setattr(given, self.sets, value)


_IGNORED = "without_effect"
_REFUSED = "refused"

_AUTOTUNE = "KERAS_HVD_AUTOTUNE"
_DISABLE = "KERAS_HVD_STALL_CHECK_DISABLE"
_MARK_CYCLES = "KERAS_HVD_TIMELINE_MARK_CYCLES"
_TIMESTAMP = "KERAS_HVD_LOG_TIMESTAMP"

_THE_JOB = (
    Option(
        *("-np -n --num-proc N", "num_proc", values.rank_count, "num-proc"),
        "number of processes to start",
    ),
    Option(
        *(
            "--bind-to {none,cores}",
            "bind_to",
            values.one_of("none", "cores"),
            "bind-to",
        ),
        "give every rank cores of its own (default: none)",
    ),
    Option(
        f"--allocator {{{','.join(settings.ALLOCATORS)}}}",
        *("KERAS_HVD_ALLOCATOR", values.one_of(*settings.ALLOCATORS), "allocator"),
        "pool: TensorFlow keeps the memory of freed tensors, which spares page faults "
        "(default, unless you have chosen an allocator by MALLOC_..., GLIBC_TUNABLES, "
        "LD_PRELOAD or TF_...); unchanged: leave it as it is",
    ),
    Option(
        *("-H --hosts --host HOST[:SLOTS],...", "host_list", str, "hosts"),
        "start the ranks on these hosts by mpirun, or by srun inside a Slurm "
        "allocation, or by ssh with --min-np, so many at most on each (default: this "
        "host alone)",
    ),
    Option(
        *("-hostfile --hostfile FILE", "hostfile", Path, "hostfile"),
        "the same from a file, with lines such as: node0 slots=4",
    ),
    Option("--dry-run", "dry_run", True, "", "show what would run, and start nothing"),
    Option(
        *("--mpi-args WORDS", "mpi_args", values.words, ""),
        "more arguments for mpirun, as one word: --mpi-args='--mca a b'",
    ),
    Option(
        *("-p --ssh-port PORT", "ssh_port", values.port(1), ""),
        "of the other hosts, for ssh",
    ),
    Option(
        *("-i --ssh-identity-file FILE", "ssh_identity_file", str, ""),
        "with the private key that opens them, for ssh",
    ),
    Option(
        *(
            "--start-timeout SECONDS",
            "KERAS_HVD_INIT_TIMEOUT_SECONDS",
            values.seconds_text,
        ),
        "start-timeout",
        "how long the ranks wait for each other in keras_hvd.init (default: 60)",
    ),
    Option(
        *("--config-file FILE", "config_file", Path, ""),
        "take options from a YAML file; those given here win",
    ),
)

_SEVERAL_HOSTS = (
    Option(
        *("--nnodes N", "nnodes", values.host_counts, ""),
        "number of hosts (default: what a cluster's variables say, or 1); 2:4 for a "
        "job that begins with 2 and goes on as hosts come and go, by default with 2 to "
        "4 times as many ranks as each has",
    ),
    Option(
        *("--node-rank K", "node_rank", values.whole(0), ""),
        "number of this host, from 0, in the order of their ranks",
    ),
    Option(
        *("--rendezvous HOST:PORT", "rendezvous", values.rendezvous, ""),
        "where they find each other: the first host, and a free port; all need the "
        "same KERAS_HVD_SECRET or KERAS_HVD_SECRET_FILE",
    ),
    Option(
        *("--job-id TEXT", "KERAS_HVD_JOB_ID", str, ""),
        "what sets this start of the job apart from the one before, which has the same "
        "secret: the same on all hosts, such as the job's number in a cluster",
    ),
    Option(
        *("--membership HOST:PORT", "membership", values.rendezvous, ""),
        "run no command, and decide there, on this host, which ranks are in a job of "
        "hosts that --join it; with --min-np, and what else is for its end",
    ),
    Option(
        *("--join HOST:PORT", "join", values.rendezvous, ""),
        "join the job of the --membership service there, with at most -np ranks; all "
        "need the same secret",
    ),
    Option(
        "--network-interfaces --network-interface --nics NAME[,NAME]",
        *("KERAS_HVD_NETWORK_INTERFACES", values.interfaces, ""),
        "use the first of these that a host has (default: the one that reaches HOST)",
    ),
    Option(
        *("--ports FIRST-LAST", "KERAS_HVD_PORTS", values.ports, ""),
        "ranks of several hosts listen at these ports only (default: any)",
    ),
    Option(
        *("--tls", "KERAS_HVD_TLS", "1", ""),
        "encrypt everything between hosts with TLS 1.3, which takes OpenSSL; all hosts "
        "need this option",
    ),
)

_ITS_OUTPUT = (
    Option(
        *("--output-filename DIR", "output_directory", Path, "output-filename"),
        "keep every rank's output in DIR/rank.N/stdout and stderr too",
    ),
    Option(
        "--timeline-filename FILE",
        *("KERAS_HVD_TIMELINE", values.file_to_write, "timeline.filename"),
        "write where the time of each tensor goes to FILE, for chrome://tracing, "
        "ui.perfetto.dev and python -m keras_hvd.timeline",
    ),
    Option(
        *("--timeline-mark-cycles", _MARK_CYCLES, "1", "timeline.mark-cycles"),
        "mark each round of decisions in it",
    ),
    Option("--no-timeline-mark-cycles", _MARK_CYCLES, "0"),
    Option(
        *("--report FILE", "report", Path, "report"),
        "write a page to FILE at the end, however that comes: what the job did, where "
        "its time went, and who waited for whom",
    ),
    Option(
        *("--status PORT", "status_port", values.port(0), "status"),
        "serve how far each rank is at http://127.0.0.1:PORT/status, in JSON, and "
        "/metrics, for Prometheus; 0: any port that is free",
    ),
    Option(
        *("--no-prefix", "prefix", False, ""),
        "do not start lines with the rank that wrote them",
    ),
    Option(
        *("-prefix-timestamp --prefix-output-with-timestamp", "timestamps", True),
        "prefix-output-with-timestamp",
        "start lines with the time at which they came",
    ),
    Option(
        *("--live-output", "live_output", True, ""),
        "pass on how rank 0 rewrites a line, such as a progress bar, although the "
        "output goes to no terminal",
    ),
    Option(
        *("--all-output", "KERAS_HVD_ALL_OUTPUT", "1", "all-output"),
        "show what Keras prints, and warnings, from all ranks (default: rank 0 alone)",
    ),
    Option("--verbose", "verbose", True, "verbose", "report each start and end"),
)

_ITS_END = (
    Option(
        *("--term-after SECONDS", "term_after", values.seconds, "term-after"),
        "SIGTERM for the others so long after the first failure (default: 5)",
    ),
    Option(
        *("--kill-after SECONDS", "kill_after", values.seconds, "kill-after"),
        "SIGKILL so long after SIGTERM (default: 5)",
    ),
    Option(
        *("--min-np --min-num-proc N", "least_ranks", values.rank_count, ""),
        "go on after a failure as long as N ranks are left, in a script that calls "
        "keras_hvd.elastic.run (default: the first failure ends the job)",
    ),
    Option(
        *("--max-np --max-num-proc N", "most_ranks", values.rank_count, ""),
        "with --min-np: start more ranks, up to N, in slots that are free (default: "
        "as -np)",
    ),
    Option(
        *("--host-discovery-script COMMAND", "discovery_script", str, ""),
        "with --min-np: run it again and again; it prints the hosts of the job, as "
        "HOST or HOST:SLOTS, one in each line",
    ),
    Option(
        *("--slots --slots-per-host N", "slots", values.whole(1), ""),
        "with --min-np: of hosts that are given without a number (default: 1)",
    ),
    Option(
        *("--launch-agent COMMAND", "launch_agent", values.words, ""),
        "with --min-np: start ranks on other hosts by this instead of ssh; it gets a "
        "host, and a command for a shell there",
    ),
    Option(
        *("--blacklist-cooldown-range FROM TO", "cooldown_range", values.seconds, ""),
        "start a rank that has ended again: after FROM seconds, and after twice as "
        "many as before each further time, at most TO (default: never)",
    ),
    Option(
        *("--elastic-timeout SECONDS", "elastic_timeout", values.seconds, ""),
        "how long the ranks that are left wait for each other, and for N to be there "
        "(default: 600)",
    ),
    Option(
        *("--reset-limit N", "reset_limit", values.whole(0), ""),
        "the most times that the job goes on (default: no limit)",
    ),
)

_OF_THE_ENGINE = (
    Option(
        *("--fusion-threshold-mb MIB", "KERAS_HVD_FUSION_BYTES", values.mebibytes),
        "params.fusion-threshold-mb",
        "the most that travels as one batch (default: 64)",
    ),
    Option(
        *("--cache-capacity N", "KERAS_HVD_CACHE_CAPACITY", values.whole_text(0)),
        "params.cache-capacity",
        "names of tensors that travel as numbers (default: 16384)",
    ),
    Option(
        *("--autotune", _AUTOTUNE, "1", "autotune.enabled"),
        "look for settings of the engine that are faster for this job",
        off="--no-autotune",
    ),
    Option("--no-autotune", _AUTOTUNE, "0"),
    Option(
        *("--autotune-log-file FILE", f"{_AUTOTUNE}_LOG", values.file_to_replace),
        "autotune.log-file",
        "keep what --autotune finds, for this and the next start of the job",
    ),
    Option(
        "--autotune-warmup-samples N",
        *(
            f"{_AUTOTUNE}_WARMUP_SAMPLES",
            values.whole_text(0),
            "autotune.warmup-samples",
        ),
        "samples that do not count (default: 3)",
    ),
    Option(
        "--autotune-steps-per-sample N",
        *(
            f"{_AUTOTUNE}_STEPS_PER_SAMPLE",
            values.whole_text(1),
            "autotune.steps-per-sample",
        ),
        "steps of a sample (default: 10)",
    ),
    Option(
        *("--autotune-bayes-opt-max-samples N", f"{_AUTOTUNE}_BAYES_OPT_MAX_SAMPLES"),
        *(values.whole_text(1), "autotune.bayes-opt-max-samples"),
        "samples after which nothing else is tried (default: no limit)",
    ),
    Option(
        *("--no-stall-check", _DISABLE, "1", ""),
        "neither report nor end a job over a tensor that some ranks never reach",
    ),
    Option(
        *("--stall-check", _DISABLE, "0", "stall-check.enabled"), off="--no-stall-check"
    ),
    Option(
        "--stall-check-warning-time-seconds SECONDS",
        *("KERAS_HVD_STALL_WARNING_SECONDS", values.seconds_text),
        "stall-check.warning-time-seconds",
        "when such a tensor is reported (default: 60)",
    ),
    Option(
        "--stall-check-shutdown-time-seconds SECONDS",
        *("KERAS_HVD_STALL_ABORT_SECONDS", values.seconds_text),
        "stall-check.shutdown-time-seconds",
        "when such a tensor ends the job (default: 0, never)",
    ),
    Option(
        "--gloo-timeout-seconds SECONDS",
        *("KERAS_HVD_GLOO_TIMEOUT_SECONDS", values.seconds_text),
        "library-options.gloo-timeout-seconds",
    ),
    Option(
        *(
            "--log-level LEVEL",
            "KERAS_HVD_LOG_LEVEL",
            values.log_level,
            "logging.level",
        ),
        f"{', '.join(settings.LOG_LEVELS)} (default: warning)",
    ),
    Option(
        *("--log-with-timestamp", _TIMESTAMP, "1", "logging.with-timestamp"),
        "start keras_hvd's own lines with the time",
        off="--log-without-timestamp",
    ),
    Option("--no-log-hide-timestamp", _TIMESTAMP, "1"),
    Option(
        *("--log-without-timestamp --log-hide-timestamp", _TIMESTAMP, "0"),
        "logging.hide-timestamp",
        off="--log-with-timestamp",
    ),
)

_INSTEAD_OF_A_JOB = (
    Option(
        *("-cb --check-build", "check_build", True, ""),
        "print what is built and what can be opened on this machine",
    ),
    Option(
        *("--diagnose", "diagnose", True, ""),
        "measure what this machine gives -np ranks (default: one a core, at least 2, "
        f"at most {MOST_DIAGNOSED_RANKS}), with advice",
    ),
    Option(
        *("--scaling N,N,...", "scaling", values.rank_counts, ""),
        "run the command on so many ranks, one job after the other, for some steps "
        "each, and compare their speeds, in a page too if --report is given",
    ),
    Option(
        *("--scaling-steps N", "steps", values.whole(1), ""),
        "steps that it measures of each (default: 50)",
    ),
)


def _ignored(usage: str, variable: str, key: str = "") -> Option:
    """An option without effect, for the same reason as Horovod's variable."""
    return Option(usage, _IGNORED, WITHOUT_EFFECT[variable], key)


_HOROVODS = (
    _ignored("--cycle-time-ms X", "CYCLE_TIME", "params.cycle-time-ms"),
    _ignored(
        *("--autotune-gaussian-process-noise X", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
        "autotune.gaussian-process-noise",
    ),
    Option("--disable-cache", _IGNORED, "nothing is kept from one start to the next"),
    _ignored("--gloo --mpi", "CONTROLLER"),
    _ignored("--tcp", "MPI_THREADS_DISABLE"),
    *(
        _ignored(f"--{name} --no-{name}", "HIERARCHICAL_ALLREDUCE", f"params.{name}")
        for name in ("hierarchical-allreduce", "hierarchical-allgather")
    ),
    _ignored(
        *("--torus-allreduce --no-torus-allreduce", "TORUS_ALLREDUCE"),
        "params.torus-allreduce",
    ),
    _ignored(
        *("--mpi-threads-disable --no-mpi-threads-disable", "MPI_THREADS_DISABLE"),
        "library-options.mpi-threads-disable",
    ),
    *(
        _ignored(
            *(f"--{name} X", name.replace("-", "_").upper(), f"library-options.{name}")
        )
        for name in (
            *("num-nccl-streams", "thread-affinity", "ccl-bgt-affinity"),
            "mlsl-bgt-affinity",
        )
    ),
    Option("--binding-args X", _REFUSED, "bind ranks with --bind-to cores"),
    Option("--jsrun", _REFUSED, "khvdrun starts the ranks itself: leave it out"),
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "the job": _THE_JOB,
    "several hosts": _SEVERAL_HOSTS,
    "its output": _ITS_OUTPUT,
    "its end": _ITS_END,
    "settings of the engine": _OF_THE_ENGINE,
    "instead of a job": (*_INSTEAD_OF_A_JOB, *_HOROVODS),
}
"""The options, in the order of `--help`."""

DESCRIPTIONS = {
    "several hosts": "start khvdrun on each, with the same command",
    "settings of the engine": "each instead of an environment variable",
}

_ROWS = [each for rows in GROUPS.values() for each in rows]

BY_NAME = {name: each for each in _ROWS for name in each.names}

BY_KEY = {each.key: each for each in _ROWS if each.key}
"""The options that a configuration file may have."""

DEFAULTS = {
    **dict.fromkeys(each.sets for each in _ROWS if each.sets.islower()),
    **vars(Options()),
}
"""The values of options that are not given."""
