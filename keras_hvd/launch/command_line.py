"""Reads and checks the command line of `khvdrun`. Errors exit with code 2."""

import argparse
import functools
import importlib.util
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from keras_hvd.job import cores, settings
from keras_hvd.launch import config_file, horovod_options, hosts
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.usage import UsageError
from keras_hvd.version import __version__
from keras_hvd.world.rendezvous import address
from keras_hvd.world.rendezvous.nodes import Node

# More ranks say little more about the machine and take long.
_MOST_DIAGNOSED_RANKS = 8

_LARGEST_PORT = 2**16 - 1

_EXAMPLES = """\
examples:
  khvdrun -np 4 python train.py --epochs 10
  khvdrun -np 2 --bind-to cores --output-filename logs python train.py
  khvdrun -np 8 -H node0:4,node1:4 python train.py
  khvdrun --nnodes 2 --node-rank 0 --rendezvous node0:29400 -np 2 python train.py
  khvdrun --check-build
  khvdrun --diagnose -np 2
  khvdrun --scaling 1,2,4 python train.py

Everything from the command on belongs to the command. khvdrun exits with 0 if every
rank did, with the code of the rank that failed first (128 + N if signal N killed it),
or with 2 if nothing could be started. Other options of horovodrun are accepted and
explained, or refused with advice.
"""


@dataclass(frozen=True)
class Options:
    """One call of `khvdrun`, checked."""

    check_build: bool
    diagnose: bool = False
    ranks: int = 0  # on this host
    node: Node | None = None  # this host among several; None: the only one
    hosts: tuple[HostSlots, ...] = ()  # where mpirun or srun is to start the ranks
    mpi_args: tuple[str, ...] = ()  # more words for mpirun
    ssh_options: tuple[str, ...] = ()  # for the ssh that mpirun starts
    dry_run: bool = False  # show what would run
    command: tuple[str, ...] = ()
    executable: str = ""  # the file that the command names
    bind_to: str = "none"  # or "cores"
    output_directory: Path | None = None  # keeps every rank's output, if given
    report: Path | None = None  # where a report of the job goes
    status_port: int | None = None  # where its state can be read; 0: any
    scaling: tuple[int, ...] = ()  # numbers of ranks to be compared
    steps: int = 0  # that are measured of each of them
    prefix: bool = True
    timestamps: bool = False
    live_output: bool = False  # whether the reader follows carriage returns
    variables: Mapping[str, str] = field(default_factory=dict)  # of the ranks
    without_effect: Mapping[str, str] = field(default_factory=dict)  # option: reason
    verbose: bool = False
    term_after: float = 5.0  # seconds from the first failure until SIGTERM
    kill_after: float = 5.0  # seconds from SIGTERM until SIGKILL

    @property
    def is_recorded(self) -> bool:
        """Whether the ranks record what they do."""
        return self.report is not None or self.status_port is not None


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line, or prints an error and raises SystemExit(2)."""
    try:
        return read(arguments)
    except UsageError as error:
        sys.stderr.write(f"khvdrun: error: {error}\nSee khvdrun --help.\n")
        raise SystemExit(2) from None


def read(arguments: Sequence[str]) -> Options:
    """Reads the command line. Raises UsageError if it is wrong; the text says why.

    Example:

    >>> options = read(["-np", "2", "true"])
    >>> options.ranks, options.command
    (2, ('true',))
    >>> read(["-H", "node0:2,node1", "train"]).ranks
    3
    """
    parser = _parser()
    own, command = _split(parser, arguments)
    given = _parse_with_config_file(parser, own)
    _check_allocator(parser, given.variables)
    if given.check_build:
        return Options(check_build=True)
    if given.diagnose:
        return _diagnosis(parser, given, command)
    others: tuple[HostSlots, ...] = ()
    if given.scaling:
        _check_scaling(parser, given)
    else:
        others = _hosts(parser, given, os.environ)
    if given.ranks is None:
        parser.error("how many processes? Say so with -np, as in: khvdrun -np 2 ...")
    if not command:
        parser.error("no command given, as in: khvdrun -np 2 python train.py")
    if given.output_directory is not None:
        _check_output_directory(parser, given.output_directory)
    return Options(
        check_build=False,
        ranks=given.ranks,
        node=_node(parser, given),
        hosts=others,
        mpi_args=given.mpi_args,
        ssh_options=_ssh_options(given),
        dry_run=given.dry_run,
        command=tuple(command),
        # Other hosts may have what this one lacks.
        executable="" if others else _executable(parser, command[0]),
        bind_to=given.bind_to,
        output_directory=given.output_directory,
        report=_report(parser, given),
        status_port=given.status_port,
        scaling=given.scaling,
        steps=int(given.scaling_steps),
        prefix=given.prefix,
        timestamps=given.timestamps,
        live_output=given.live_output,
        variables=given.variables,
        without_effect=given.without_effect or {},
        verbose=given.verbose,
        term_after=given.term_after,
        kill_after=given.kill_after,
    )


def _diagnosis(
    parser: "_Parser", given: argparse.Namespace, command: Sequence[str]
) -> Options:
    if command:
        parser.error(f"--diagnose takes no command, and {command[0]!r} is one")
    if given.ranks is None:
        given.ranks = max(2, min(cores.available(), _MOST_DIAGNOSED_RANKS))
    _hosts(parser, given, {})
    return Options(
        check_build=False,
        diagnose=True,
        ranks=given.ranks,
        node=_node(parser, given),
        bind_to=given.bind_to,
        variables=given.variables,
    )


def _parse_with_config_file(
    parser: "_Parser", own: Sequence[str]
) -> argparse.Namespace:
    given = parser.parse_args(own)
    path = given.config_file
    if path is None:
        return given
    from_file = config_file.arguments(path, parser.values())
    try:
        parser.parse_args(from_file)
    except UsageError as error:
        raise UsageError(f"--config-file: {str(path)!r}: {error}") from None
    # The last value wins: the command line's.
    return parser.parse_args([*from_file, *own])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def values(self) -> dict[str, int]:
        """The number of values that each option takes."""
        return {
            option: 1 if action.nargs is None else int(action.nargs)
            for action in self._actions
            for option in action.option_strings
        }


class _SetVariable(argparse.Action):
    """An option that sets an environment variable of the ranks."""

    def __init__(self, *arguments: Any, variable: str, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.variable = variable

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        # A new dict: the parser's default must not change.
        changed = {**namespace.variables, self.variable: value}
        namespace.variables = changed


def _parser() -> _Parser:
    parser = _Parser(
        prog="khvdrun",
        usage="khvdrun -np N [options] command [argument ...]",
        description="Starts a command as the N ranks of one job on this machine, or as "
        "N of its ranks on each of several.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(variables={})
    _add_job(parser.add_argument_group("the job"))
    _add_hosts(
        parser.add_argument_group(
            "several hosts", "start khvdrun on each, with the same command"
        )
    )
    _add_output(parser.add_argument_group("its output"))
    _add_end(parser.add_argument_group("its end"))
    _add_settings(
        parser.add_argument_group(
            "settings of the engine", "each instead of an environment variable"
        )
    )
    _add_questions(parser.add_argument_group("instead of a job"))
    horovod_options.add(parser.add_argument)
    return parser


def _add_job(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("-np", "-n", "--num-proc"),
        dest="ranks",
        metavar="N",
        type=_rank_count,
        help="number of processes to start",
    )
    add(
        "--bind-to",
        choices=("none", "cores"),
        default="none",
        help="give every rank cores of its own (default: none)",
    )
    add(
        "--allocator",
        choices=settings.ALLOCATORS,
        action=_SetVariable,
        variable="KERAS_HVD_ALLOCATOR",
        help="pool: TensorFlow keeps the memory of freed tensors, which spares page "
        "faults (default, unless you have chosen an allocator by MALLOC_..., "
        "GLIBC_TUNABLES, LD_PRELOAD or TF_...); unchanged: leave it as it is",
    )
    add(
        *("-H", "--hosts", "--host"),
        dest="hosts",
        metavar="HOST[:SLOTS],...",
        help="start the ranks on these hosts by mpirun, or by srun inside a Slurm "
        "allocation, so many at most on each (default: this host alone)",
    )
    add(
        *("-hostfile", "--hostfile"),
        metavar="FILE",
        type=Path,
        help="the same from a file, with lines such as: node0 slots=4",
    )
    add(
        "--dry-run",
        action="store_true",
        help="show what would run, and start nothing",
    )
    add(
        "--mpi-args",
        metavar="WORDS",
        type=_words,
        default=(),
        help="more arguments for mpirun, as one word: --mpi-args='--mca a b'",
    )
    add(
        *("-p", "--ssh-port"),
        metavar="PORT",
        type=_port,
        help="of the other hosts, for mpirun",
    )
    add(
        *("-i", "--ssh-identity-file"),
        metavar="FILE",
        help="with the private key that opens them, for mpirun",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        type=_seconds_text,
        action=_SetVariable,
        variable="KERAS_HVD_INIT_TIMEOUT_SECONDS",
        help="how long the ranks wait for each other in keras_hvd.init (default: 60)",
    )
    add(
        "--config-file",
        metavar="FILE",
        type=Path,
        help="take options from a YAML file; those given here win",
    )


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--nnodes",
        metavar="N",
        type=_node_count,
        default=1,
        help="number of hosts (default: 1)",
    )
    add(
        "--node-rank",
        metavar="K",
        type=_node_number,
        help="number of this host, from 0, in the order of their ranks",
    )
    add(
        "--rendezvous",
        metavar="HOST:PORT",
        type=_rendezvous,
        help="where they find each other: the first host, and a free port; all need "
        "the same KERAS_HVD_SECRET or KERAS_HVD_SECRET_FILE",
    )
    add(
        *("--network-interfaces", "--network-interface", "--nics"),
        metavar="NAME[,NAME]",
        type=_interfaces,
        action=_SetVariable,
        variable="KERAS_HVD_NETWORK_INTERFACES",
        help="use the first of these that a host has (default: the one that reaches "
        "HOST)",
    )
    add(
        "--tls",
        nargs=0,
        const="1",
        action=_SetVariable,
        variable="KERAS_HVD_TLS",
        help="encrypt everything between hosts with TLS 1.3, which takes OpenSSL; all "
        "hosts need this option",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output-filename",
        dest="output_directory",
        metavar="DIR",
        type=Path,
        help="keep every rank's output in DIR/rank.N/stdout and stderr too",
    )
    add(
        "--timeline-filename",
        metavar="FILE",
        type=_timeline,
        action=_SetVariable,
        variable="KERAS_HVD_TIMELINE",
        help="write where the time of each tensor goes to FILE, for chrome://tracing, "
        "ui.perfetto.dev and python -m keras_hvd.timeline",
    )
    for option, value, text in (
        ("--timeline-mark-cycles", "1", "mark each round of decisions in it"),
        ("--no-timeline-mark-cycles", "0", argparse.SUPPRESS),
    ):
        add(
            option,
            nargs=0,
            const=value,
            action=_SetVariable,
            variable="KERAS_HVD_TIMELINE_MARK_CYCLES",
            help=text,
        )
    add(
        "--report",
        metavar="FILE",
        type=Path,
        help="write a page to FILE at the end, however that comes: what the job did, "
        "where its time went, and who waited for whom",
    )
    add(
        "--status",
        dest="status_port",
        metavar="PORT",
        type=_status_port,
        help="serve how far each rank is at http://127.0.0.1:PORT/status, in JSON, and "
        "/metrics, for Prometheus; 0: any port that is free",
    )
    add(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="do not start lines with the rank that wrote them",
    )
    add(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        dest="timestamps",
        action="store_true",
        help="start lines with the time at which they came",
    )
    add(
        "--live-output",
        action="store_true",
        help="pass on how rank 0 rewrites a line, such as a progress bar, although the "
        "output goes to no terminal",
    )
    add("--verbose", action="store_true", help="report each start and end")


def _add_end(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--term-after",
        metavar="SECONDS",
        type=_seconds,
        default=5.0,
        help="SIGTERM for the others so long after the first failure (default: 5)",
    )
    add(
        "--kill-after",
        metavar="SECONDS",
        type=_seconds,
        default=5.0,
        help="SIGKILL so long after SIGTERM (default: 5)",
    )


def _add_settings(group: argparse._ArgumentGroup) -> None:
    def add(*options: str, **keywords: Any) -> None:
        group.add_argument(*options, action=_SetVariable, **keywords)

    def add_switch(*options: str, value: str, **keywords: Any) -> None:
        add(*options, nargs=0, const=value, **keywords)

    add(
        "--fusion-threshold-mb",
        metavar="MIB",
        type=_mebibytes,
        variable="KERAS_HVD_FUSION_BYTES",
        help="the most that travels as one batch (default: 64)",
    )
    add(
        "--cache-capacity",
        metavar="N",
        type=_count,
        variable="KERAS_HVD_CACHE_CAPACITY",
        help="names of tensors that travel as numbers (default: 16384)",
    )
    add_switch(
        "--autotune",
        value="1",
        variable="KERAS_HVD_AUTOTUNE",
        help="look for settings of the engine that are faster for this job",
    )
    add_switch(
        "--no-autotune",
        value="0",
        variable="KERAS_HVD_AUTOTUNE",
        help=argparse.SUPPRESS,
    )
    add(
        "--autotune-log-file",
        metavar="FILE",
        type=_autotune_log,
        variable="KERAS_HVD_AUTOTUNE_LOG",
        help="keep what --autotune finds, for this and the next start of the job",
    )
    for name, least, text in (
        ("warmup-samples", 0, "samples that do not count (default: 3)"),
        ("steps-per-sample", 1, "steps of a sample (default: 10)"),
        (
            *("bayes-opt-max-samples", 1),
            "samples after which nothing else is tried (default: no limit)",
        ),
    ):
        add(
            f"--autotune-{name}",
            metavar="N",
            type=functools.partial(_count, least=least),
            variable=f"KERAS_HVD_AUTOTUNE_{name.replace('-', '_').upper()}",
            help=text,
        )
    add_switch(
        "--no-stall-check",
        value="1",
        variable="KERAS_HVD_STALL_CHECK_DISABLE",
        help="neither report nor end a job over a tensor that some ranks never reach",
    )
    add_switch(
        "--stall-check",
        value="0",
        variable="KERAS_HVD_STALL_CHECK_DISABLE",
        help=argparse.SUPPRESS,
    )
    add(
        "--stall-check-warning-time-seconds",
        metavar="SECONDS",
        type=_seconds_text,
        variable="KERAS_HVD_STALL_WARNING_SECONDS",
        help="when such a tensor is reported (default: 60)",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        metavar="SECONDS",
        type=_seconds_text,
        variable="KERAS_HVD_STALL_ABORT_SECONDS",
        help="when such a tensor ends the job (default: 0, never)",
    )
    add(
        "--gloo-timeout-seconds",
        metavar="SECONDS",
        type=_seconds_text,
        variable="KERAS_HVD_GLOO_TIMEOUT_SECONDS",
        help=argparse.SUPPRESS,
    )
    add(
        "--log-level",
        metavar="LEVEL",
        type=_log_level,
        variable="KERAS_HVD_LOG_LEVEL",
        help=f"{', '.join(settings.LOG_LEVELS)} (default: warning)",
    )
    add_switch(
        "--log-with-timestamp",
        value="1",
        variable="KERAS_HVD_LOG_TIMESTAMP",
        help="start keras_hvd's own lines with the time",
    )
    add_switch(
        "--no-log-hide-timestamp",
        value="1",
        variable="KERAS_HVD_LOG_TIMESTAMP",
        help=argparse.SUPPRESS,
    )
    add_switch(
        *("--log-without-timestamp", "--log-hide-timestamp"),
        value="0",
        variable="KERAS_HVD_LOG_TIMESTAMP",
        help=argparse.SUPPRESS,
    )


def _add_questions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("-cb", "--check-build"),
        action="store_true",
        help="print what is built and what can be opened on this machine",
    )
    add(
        "--diagnose",
        action="store_true",
        help="measure what this machine gives -np ranks (default: one a core, at "
        f"least 2, at most {_MOST_DIAGNOSED_RANKS}), with advice",
    )
    add(
        "--scaling",
        metavar="N,N,...",
        type=_rank_counts,
        default=(),
        help="run the command on so many ranks, one job after the other, for some "
        "steps each, and compare their speeds, in a page too if --report is given",
    )
    add(
        "--scaling-steps",
        metavar="N",
        type=functools.partial(_count, least=1),
        default="50",
        help="steps that it measures of each (default: 50)",
    )
    add("-v", "--version", action="version", version=f"khvdrun {__version__}")
    add("-h", "--help", action="help", help="show this and exit")


def _split(parser: _Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Khvdrun's own arguments, and the command with everything that belongs to it."""
    values = parser.values()
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])
        if not argument.startswith("-"):
            break
        at += 1 + values.get(argument, 0)
    return list(arguments[:at]), list(arguments[at:])


def _rank_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of processes: give 1 or more"
        )
    return int(text)


def _rank_counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({_rank_count(each) for each in text.split(",")}))
    if counts == (1,):
        raise argparse.ArgumentTypeError("one rank has nothing to be compared with")
    return counts


def _node_count(text: str) -> int:
    return int(_count(text, least=1))


def _node_number(text: str) -> int:
    return int(_count(text))


def _rendezvous(text: str) -> str:
    try:
        address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _interfaces(text: str) -> str:
    try:
        settings.network_interfaces({"KERAS_HVD_NETWORK_INTERFACES": text})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not names of network interfaces, with commas"
        ) from None
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # This form also refuses NaN.
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _seconds_text(text: str) -> str:
    """A number of seconds as text for a variable."""
    _seconds(text)
    return text.strip()


def _mebibytes(text: str) -> str:
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of MiB")
    return str(int(size * 2**20))


def _count(text: str, least: int = 0) -> str:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return text


def _log_level(text: str) -> str:
    if text.lower() not in settings.LOG_LEVELS:
        known = ", ".join(settings.LOG_LEVELS)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}")
    return text.lower()


def _executable(parser: argparse.ArgumentParser, name: str) -> str:
    found = shutil.which(name)
    if found is not None:
        return found
    path = Path(name)
    try:
        path.stat()
    except PermissionError as error:
        parser.error(f"{name!r} cannot be executed: {error.strerror}")
    except OSError:
        pass
    if path.is_dir():
        parser.error(f"{name!r} is a directory, not a command")
    if "/" not in name and not path.exists():
        parser.error(f"command not found: {name!r}")
    if not path.exists():
        parser.error(f"no such file: {name!r}")
    advice = f"put an interpreter before it (python {name}) or make it executable"
    if os.access(path, os.X_OK) and "/" not in name:
        advice = f"it is in this directory, so write ./{name}"
    elif not stat.S_ISREG(path.stat().st_mode):
        advice = "it is not a regular file"
    parser.error(f"{name!r} is not a command: {advice}")


def _check_output_directory(parser: argparse.ArgumentParser, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-filename: cannot make {str(path)!r}: {error.strerror}")
    if not os.access(path, os.W_OK | os.X_OK):
        parser.error(f"--output-filename: cannot write in {str(path)!r}")


def _timeline(text: str) -> str:
    return _file_to_write(Path(text), is_replaced=False)


def _autotune_log(text: str) -> str:
    return _file_to_write(Path(text), is_replaced=True)


def _file_to_write(path: Path, is_replaced: bool) -> str:
    """The absolute path of a file that a rank is to write.

    One that is replaced, if it exists, takes the right to write in its folder.
    """
    try:
        is_folder = path.is_dir()
        written = path.parent if is_replaced or not path.exists() else path
        can_write = path.parent.is_dir() and os.access(written, os.W_OK)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write {str(path)!r}: {error.strerror}"
        ) from None
    if is_folder:
        raise argparse.ArgumentTypeError(f"{str(path)!r} is a directory")
    if not can_write:
        raise argparse.ArgumentTypeError(f"cannot write {str(path)!r}")
    # Ranks may change their directory before they open the file.
    return os.path.abspath(path)


def _report(parser: _Parser, given: argparse.Namespace) -> Path | None:
    """The report's path, if this host can write it; ranks may change directory."""
    path = given.report
    if path is None or given.dry_run:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--report takes matplotlib: pip install 'keras_hvd[report]'")
    try:
        _file_to_write(path, is_replaced=False)
        # The recording is beside it until the end.
        return Path(_file_to_write(path, is_replaced=True))
    except argparse.ArgumentTypeError as error:
        parser.error(f"--report: {error}")


def _node(parser: _Parser, given: argparse.Namespace) -> Node | None:
    """This host's place among several; None if it is the only one."""
    if given.nnodes == 1:
        return None
    for option, value in (
        ("--node-rank", given.node_rank),
        ("--rendezvous", given.rendezvous),
    ):
        if value is None:
            parser.error(f"--nnodes {given.nnodes} needs {option} as well")
    if given.node_rank >= given.nnodes:
        parser.error(f"there is no --node-rank {given.node_rank} of {given.nnodes}")
    try:
        interfaces = settings.network_interfaces({**os.environ, **given.variables})
    except ValueError as error:
        parser.error(str(error))
    return Node(
        given.node_rank, given.nnodes, given.ranks, given.rendezvous, interfaces
    )


def _check_allocator(parser: _Parser, variables: Mapping[str, str]) -> None:
    """Checks the one variable of the ranks that khvdrun itself uses."""
    try:
        settings.allocator({**os.environ, **variables})
    except ValueError as error:
        parser.error(str(error))


def _hosts(
    parser: _Parser, given: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[HostSlots, ...]:
    """The hosts of a job that others than this one take part in; none: this one."""
    if given.hosts is not None and given.hostfile is not None:
        parser.error(
            f"-H {given.hosts} and --hostfile {given.hostfile}: give one of them"
        )
    named: list[HostSlots] = []
    if given.hosts is not None:
        named = hosts.from_option(given.hosts)
    elif given.hostfile is not None:
        named = hosts.from_file(given.hostfile)
    elif given.nnodes == 1:
        named = hosts.from_lsf(environment)
    if given.ranks is None and named:
        given.ranks = sum(host.slots or 1 for host in named)
    hosts.check_slots(named, given.ranks)
    if hosts.are_here(named):
        _check_alone(parser, given)
        return ()
    _check_handed_over(parser, given, named[0].name)
    return tuple(named)


def _check_scaling(parser: _Parser, given: argparse.Namespace) -> None:
    """Refuses what does not go with several jobs, of so many ranks each."""
    for is_given, option in (
        (given.ranks is not None, "-np"),
        (given.nnodes > 1, "--nnodes"),
        (given.hosts is not None, "-H"),
        (given.hostfile is not None, "--hostfile"),
        (given.status_port is not None, "--status"),
        (given.output_directory is not None, "--output-filename"),
        (given.dry_run, "--dry-run"),
    ):
        if is_given:
            parser.error(
                f"--scaling has jobs of its own on this host, without {option}"
            )
    given.ranks = max(given.scaling)


def _check_alone(parser: _Parser, given: argparse.Namespace) -> None:
    """Refuses, or explains, what is for mpirun, which does not start these ranks."""
    if given.mpi_args:
        parser.error(
            "--mpi-args: no mpirun runs underneath: set variables for the ranks in "
            "khvdrun's own environment, bind ranks with --bind-to cores, or start the "
            "script with mpirun itself"
        )
    for option, value in (
        ("--ssh-port", given.ssh_port),
        ("--ssh-identity-file", given.ssh_identity_file),
    ):
        if value is not None:
            ignored = given.without_effect or {}
            given.without_effect = {**ignored, option: "no other host is reached"}


def _check_handed_over(parser: _Parser, given: argparse.Namespace, host: str) -> None:
    """Refuses what mpirun or srun cannot be told."""
    is_recorded = given.report is not None or given.status_port is not None
    is_elsewhere = is_recorded and not hosts.is_here(host)
    for is_given, option, advice in (
        (given.nnodes > 1, "--nnodes", "it is for a khvdrun on each host, without -H"),
        (given.diagnose, "--diagnose", "start it on each host, with --nnodes"),
        (is_elsewhere and given.report is not None, "--report", _RANK_0_HERE),
        (is_elsewhere and given.status_port is not None, "--status", _RANK_0_HERE),
    ):
        if is_given:
            parser.error(f"{option} does not go with other hosts ({host!r}): {advice}")


# What reads rank 0's records must be on its host, which is the first.
_RANK_0_HERE = (
    "name this host first, where rank 0 then runs, or start khvdrun on each host, with "
    "--nnodes"
)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _port(text: str) -> str:
    if int(_count(text, least=1)) > _LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return text


def _status_port(text: str) -> int:
    if int(_count(text)) > _LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _ssh_options(given: argparse.Namespace) -> tuple[str, ...]:
    """What ssh is told."""
    options: tuple[str, ...] = ()
    if given.ssh_port is not None:
        options += ("-p", given.ssh_port)
    if given.ssh_identity_file is not None:
        options += ("-i", given.ssh_identity_file)
    return options
