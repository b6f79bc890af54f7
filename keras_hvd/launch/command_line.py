"""Reads and checks the command line of `khvdrun`. Errors exit with code 2."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import itertools
import os
import shutil
import stat
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from keras_hvd.job import cores, installed, settings
from keras_hvd.launch import clusters, config_file, hosts, values
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.options import (
    BY_NAME,
    DEFAULTS,
    DESCRIPTIONS,
    GROUPS,
    MOST_DIAGNOSED_RANKS,
    Option,
    Options,
)
from keras_hvd.launch.usage import UsageError
from keras_hvd.version import __version__
from keras_hvd.world.rendezvous.nodes import Node

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

# Options with other names in Python.
_OF_ARGUMENTS = {
    "cooldown_range": "--blacklist-cooldown-range",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "np": "--num-proc",
    "min_np": "--min-num-proc",
    "max_np": "--max-num-proc",
}

# Options for the ranks that a khvdrun starts.
_OF_RANKS = (
    *("--join", "--nnodes", "--node-rank", "--rendezvous", "-H", "--hostfile"),
    *("--host-discovery-script", "--launch-agent", "--slots", "--bind-to"),
    *("--output-filename", "--report", "--status", "--scaling", "--dry-run"),
)

# Options for a khvdrun that decides who is in the job, or is alone.
_OF_JOBS = (
    *("--nnodes", "--node-rank", "--rendezvous", "-H", "--hostfile", "--min-np"),
    *("--max-np", "--host-discovery-script", "--launch-agent", "--slots"),
    *("--blacklist-cooldown-range", "--elastic-timeout", "--reset-limit"),
    *("--report", "--status", "--scaling", "--dry-run"),
)

# Options for jobs with --min-np.
_OF_ELASTIC_JOBS = (
    *("--blacklist-cooldown-range", "--elastic-timeout", "--reset-limit", "--max-np"),
    *("--host-discovery-script", "--launch-agent", "--slots"),
)
# Options that a script hardly ever has of its own.
_UNLIKE_A_COMMANDS = {
    *("-np", "--num-proc", "--hosts", "-hostfile", "--hostfile"),
    *("--nnodes", "--node-rank", "--rendezvous", "--membership"),
}


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line, or prints an error and raises SystemExit(2)."""
    try:
        return read(arguments)
    except UsageError as error:
        sys.stderr.write(f"khvdrun: error: {error}\nSee khvdrun --help.\n")
        raise SystemExit(2) from None


def read(arguments: Sequence[str]) -> Options:
    """Reads the command line. Raises UsageError, which says why, if it is wrong.

    Example:

    >>> options = read(["-np", "2", "true"])
    >>> options.ranks, options.command
    (2, ('true',))
    >>> read(["-H", "node0:2,node1", "train"]).ranks
    3
    """
    own, command = _split(arguments)
    given = _parse_with_config_file(own)
    behind = _behind_the_command(given, arguments[len(own) :])
    given.without_effect = {**given.without_effect, **behind}
    try:
        if _may_have_other_hosts(given, os.environ):
            clusters.take(given, os.environ)
        return _checked(given, command)
    except UsageError as error:
        if not behind:
            raise
        raise UsageError(f"{error}\nkhvdrun: {settings.explain(behind)}") from None


def of_arguments(arguments: Mapping[str, Any], command: Sequence[str]) -> Options:
    """Reads arguments of `keras_hvd.run`; None and False stand for arguments not given.

    Raises UsageError, which names the argument.

    Example:

    >>> of_arguments({"num_proc": 2}, ["true"]).ranks
    2
    >>> of_arguments({"num_proc": 0}, ["true"])
    Traceback (most recent call last):
    keras_hvd...UsageError: num_proc: '0' is not a number of processes: give 1 or more
    """
    given = Namespace(**DEFAULTS)
    for argument, value in arguments.items():
        name = _OF_ARGUMENTS.get(argument) or "--" + argument.replace("_", "-")
        option = BY_NAME[name]
        if value is None or value is False or not (value or option.values):
            continue
        several = isinstance(value, (list, tuple))
        text = ",".join(map(str, value)) if several else str(value)
        if not config_file.can_be_passed_on(text):
            raise UsageError(f"{argument} cannot be passed to a process: {value!r}")
        count = len(option.values)
        if count > 1 and not (several and len(value) == count):
            raise UsageError(f"{argument}: give {count} values, not {value!r}")
        try:
            if count > 1:
                made = [option.value(str(each)) for each in value]
            else:
                made = option.value(text) if callable(option.value) else value
            option.take(given, name, made)
        except (argparse.ArgumentTypeError, UsageError) as error:
            reason = str(error).removeprefix(f"{name}: ")
            raise UsageError(f"{argument}: {reason}") from None
    return _checked(given, command)


def _may_have_other_hosts(given: Namespace, environment: Mapping[str, str]) -> bool:
    """Whether a cluster's variables may tell of other hosts that run `khvdrun` too."""
    # A rank's own jobs are on its host.
    of_this_host = (given.check_build, given.diagnose, given.scaling)
    by_other_means = (given.host_list, given.hostfile, given.discovery_script)
    by_a_service = (given.membership, given.join)
    return "KERAS_HVD_RANK" not in environment and not any(
        (*of_this_host, *by_other_means, *by_a_service)
    )


def _checked(given: Namespace, command: Sequence[str]) -> Options:
    _check_allocator(given.variables)
    if given.check_build:
        return Options(check_build=True)
    if given.membership:
        return _service(given, command)
    if given.join:
        _refuse("--join takes part in the job of others", given, _OF_JOBS)
    if given.nnodes is None:
        given.nnodes = (1, 1)
    if given.diagnose:
        return _diagnosis(given, command)
    others: tuple[HostSlots, ...] = ()
    if given.scaling:
        _check_scaling(given)
    else:
        # A rank's own jobs are on its host, whatever a scheduler has given to its job.
        is_here = given.join or "KERAS_HVD_RANK" in os.environ
        others = _hosts(given, {} if is_here else os.environ)
    if given.num_proc is None:
        raise UsageError(
            "how many processes? Say so with -np, as in: khvdrun -np 2 ..."
        )
    _allow_to_join(given)
    _check_elastic(given)
    if not command:
        raise UsageError("no command given, as in: khvdrun -np 2 python train.py")
    if given.output_directory is not None:
        _check_output_directory(given.output_directory)
    as_given = {name: getattr(given, name) for name in vars(Options())}
    return dataclasses.replace(
        Options(**as_given),
        ranks=given.num_proc,
        node=_node(given),
        hosts=others,
        ssh_options=_ssh_options(given),
        command=tuple(command),
        # Other hosts may have a command that this one lacks.
        executable="" if _is_elsewhere(given, others) else _executable(command[0]),
        report=_report(given),
    )


def _service(given: Namespace, command: Sequence[str]) -> Options:
    if command:
        raise UsageError(
            f"--membership takes no command, and {command[0]!r} is one: it is for the "
            "hosts that --join it"
        )
    _refuse("--membership decides for others", given, _OF_RANKS)
    if given.least_ranks is None:
        raise UsageError("--membership needs --min-np as well")
    if given.num_proc is None:
        given.num_proc = given.least_ranks
    _check_elastic(given)
    as_given = {name: getattr(given, name) for name in vars(Options())}
    return dataclasses.replace(Options(**as_given), ranks=given.num_proc)


def _are_given(given: Namespace, *names: str) -> list[str]:
    """Those of these options that have another value than by default."""
    sets = {name: BY_NAME[name].sets for name in names}
    return [
        name for name in names if getattr(given, sets[name]) != DEFAULTS[sets[name]]
    ]


def _refuse(why: str, given: Namespace, names: Sequence[str]) -> None:
    """Raises UsageError if one of these options is given."""
    for name in _are_given(given, *names):
        raise UsageError(f"{why}, without {name}")


def _is_elsewhere(given: Namespace, others: Sequence[HostSlots]) -> bool:
    """Whether khvdrun itself starts no rank on this host."""
    if not others or given.least_ranks is None:
        return bool(others)
    return not any(hosts.is_here(each.name) for each in others)


def _diagnosis(given: Namespace, command: Sequence[str]) -> Options:
    if command:
        raise UsageError(f"--diagnose takes no command, and {command[0]!r} is one")
    if given.num_proc is None:
        given.num_proc = max(2, min(cores.available(), MOST_DIAGNOSED_RANKS))
    _hosts(given, {})
    return Options(
        diagnose=True,
        ranks=given.num_proc,
        node=_node(given),
        bind_to=given.bind_to,
        variables=given.variables,
    )


def _parse_with_config_file(own: Sequence[str]) -> Namespace:
    parser = _parser()
    given = parser.read(own)
    path = given.config_file
    if path is None:
        return given
    from_file = config_file.arguments(path)
    try:
        parser.read(from_file)
    except UsageError as error:
        raise UsageError(f"--config-file: {str(path)!r}: {error}") from None
    # The last value wins: the command line's.
    return parser.read([*from_file, *own])


class _Parser(argparse.ArgumentParser):
    def read(self, words: Sequence[str]) -> Namespace:
        given, unknown = self.parse_known_args(words)
        if unknown:
            raise UsageError(_no_such_option(unknown[0].partition("=")[0]))
        return given

    def print_help(self, file: Any = None) -> None:
        # argparse itself drops what a reader that has left does not take.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Take(argparse.Action):
    def __init__(self, *arguments: Any, option: Option, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        self._option.take(namespace, str(option_string), values)


def _parser() -> _Parser:
    parser = _Parser(
        prog="khvdrun",
        usage="khvdrun -np N [options] command [argument ...]",
        description="Starts a command as the N ranks of one job on this machine, or as "
        "N of its ranks on each of several.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(**DEFAULTS)
    for title, rows in GROUPS.items():
        group = parser.add_argument_group(title, DESCRIPTIONS.get(title))
        for option in rows:
            count = len(option.values)
            group.add_argument(
                *option.names,
                action=_Take,
                option=option,
                # argparse spells "one value" None.
                nargs=None if count == 1 else count,
                metavar=tuple(option.values) or None,
                type=option.value if callable(option.value) else str,
                help=option.help,
            )
    # The last group that is shown.
    group.add_argument(
        "-v", "--version", action="version", version=f"khvdrun {__version__}"
    )
    group.add_argument("-h", "--help", action="help", help="show this and exit")
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Khvdrun's own arguments, and the command with everything that belongs to it."""
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])
        if not argument.startswith("-"):
            break
        at += 1 + (len(BY_NAME[argument].values) if argument in BY_NAME else 0)
    return list(arguments[:at]), list(arguments[at:])


def _no_such_option(name: str) -> str:
    shown = [each for each, row in BY_NAME.items() if row.help != argparse.SUPPRESS]
    similar = difflib.get_close_matches(name, shown, n=1)
    advice = f": did you mean {similar[0]}?" if similar else ""
    return f"there is no option {name}{advice}"


def _behind_the_command(given: Namespace, command: Sequence[str]) -> dict[str, str]:
    """Options that the command gets and that were probably meant for khvdrun, with why.

    A `--` shows that what follows is meant for the command.
    """
    words = itertools.takewhile(lambda word: word != "--", command)
    names = _UNLIKE_A_COMMANDS.intersection(word.partition("=")[0] for word in words)
    missing = names.difference(_are_given(given, *names))
    why = "behind the command, which gets it: khvdrun's own options come before"
    return dict.fromkeys(sorted(missing), why)


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is not None:
        return found
    path = Path(name)
    try:
        path.stat()
    except PermissionError as error:
        raise UsageError(f"{name!r} cannot be executed: {error.strerror}") from None
    except OSError:
        pass
    if path.is_dir():
        raise UsageError(f"{name!r} is a directory, not a command")
    if "/" not in name and not path.exists():
        raise UsageError(f"command not found: {name!r}")
    if not path.exists():
        raise UsageError(f"no such file: {name!r}")
    advice = f"put an interpreter before it (python {name}) or make it executable"
    if os.access(path, os.X_OK) and "/" not in name:
        advice = f"it is in this directory, so write ./{name}"
    elif not stat.S_ISREG(path.stat().st_mode):
        advice = "it is not a regular file"
    raise UsageError(f"{name!r} is not a command: {advice}")


def _check_output_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output-filename: cannot make {str(path)!r}: {error.strerror}"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--output-filename: cannot write in {str(path)!r}")


def _report(given: Namespace) -> Path | None:
    """The report's path, if this host can write it; ranks may change directory."""
    path = given.report
    if path is None or given.dry_run:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--report takes matplotlib: {installed.install_command('report')}"
        )
    try:
        values.file_to_write(str(path))
        # The recording is beside it until the end.
        return Path(values.file_to_replace(str(path)))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--report: {error}") from None


def _node(given: Namespace) -> Node | None:
    """This host's place among several; None if it is the only one."""
    least, most = given.nnodes
    if most == 1:
        return None
    nodes = str(least) if least == most else f"{least}:{most}"
    for option in ("--node-rank", "--rendezvous"):
        if not _are_given(given, option):
            raise UsageError(f"--nnodes {nodes} needs {option} as well")
    if given.node_rank >= least and not given.may_join:
        raise UsageError(f"there is no --node-rank {given.node_rank} of {least}")
    try:
        interfaces = settings.network_interfaces({**os.environ, **given.variables})
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Node(given.node_rank, least, given.num_proc, given.rendezvous, interfaces)


def _check_allocator(variables: Mapping[str, str]) -> None:
    """Checks the only variable of the ranks that khvdrun itself uses."""
    try:
        settings.allocator({**os.environ, **variables})
    except ValueError as error:
        raise UsageError(str(error)) from None


def _hosts(given: Namespace, environment: Mapping[str, str]) -> tuple[HostSlots, ...]:
    """The hosts of a job that has others than this one; none for this host alone."""
    if given.host_list is not None and given.hostfile is not None:
        raise UsageError(
            f"-H {given.host_list} and --hostfile {given.hostfile}: give one of them"
        )
    named: list[HostSlots] = []
    if given.host_list is not None:
        named = hosts.from_option(given.host_list)
    elif given.hostfile is not None:
        named = hosts.from_file(given.hostfile)
    elif given.nnodes == (1, 1):
        named = hosts.from_scheduler(environment)
    if given.least_ranks is not None:
        named = [HostSlots(one.name, one.slots or given.slots) for one in named]
    if given.num_proc is None and named:
        given.num_proc = sum(host.slots or 1 for host in named)
    hosts.check_slots(named, given.num_proc)
    if given.least_ranks is not None:
        _check_no_mpirun(given)
        _check_names(named)
        if not hosts.are_here(named):
            _check_recorded_here(given, named[0].name)
            return tuple(named)
        if named and given.most_ranks is not None:
            given.most_ranks = min(
                given.most_ranks, sum(one.slots or 1 for one in named)
            )
        return ()
    if hosts.are_here(named):
        _check_alone(given)
        return ()
    _check_handed_over(given, named[0].name)
    return tuple(named)


def _check_scaling(given: Namespace) -> None:
    """Refuses options that do not go with several jobs of different sizes."""
    why = "--scaling has jobs of its own on this host"
    if given.nnodes != (1, 1):
        raise UsageError(f"{why}, without --nnodes")
    others = "-np", "-H", "--hostfile", "--status", "--output-filename", "--dry-run"
    _refuse(why, given, others)
    given.num_proc = max(given.scaling)


def _allow_to_join(given: Namespace) -> None:
    """Lets hosts come and go, if their number is a range, or ranks may go."""
    least, most = given.nnodes
    given.may_join = least < most or (most > 1 and given.least_ranks is not None)
    if not given.may_join:
        return
    others = "-H", "--hostfile", "--host-discovery-script", "--launch-agent", "--slots"
    _refuse("--nnodes is for a khvdrun on each host", given, others)
    if given.least_ranks is None:
        given.least_ranks = least * given.num_proc
    if given.most_ranks is None:
        given.most_ranks = most * given.num_proc
    if given.least_ranks > given.most_ranks:
        raise UsageError(
            f"--min-np {given.least_ranks} is more than --max-np {given.most_ranks}, "
            "which is the most hosts times -np by default"
        )


def _check_elastic(given: Namespace) -> None:
    """Refuses options that do not go with ranks that leave, and those only for them."""
    if given.least_ranks is None:
        for option in _are_given(given, *_OF_ELASTIC_JOBS):
            raise UsageError(
                f"{option} is for jobs that go on when ranks die: say with --min-np "
                "how many are to be left"
            )
        return
    if given.elastic_timeout is None:
        given.elastic_timeout = 600.0
    if given.cooldown_range is not None:
        first, most = given.cooldown_range
        if first > most:
            raise UsageError(
                f"--blacklist-cooldown-range {first:g} {most:g}: the first number of "
                "seconds is more than the second"
            )
    if given.least_ranks > given.num_proc and not given.may_join:
        raise UsageError(
            f"--min-np {given.least_ranks} is more than -np {given.num_proc}"
        )
    if given.most_ranks is not None and given.most_ranks < given.num_proc:
        raise UsageError(
            f"--max-np {given.most_ranks} is less than -np {given.num_proc}"
        )
    if given.discovery_script and (given.host_list or given.hostfile):
        raise UsageError(
            "--host-discovery-script tells which hosts there are: give no -H or "
            "--hostfile as well"
        )
    if given.scaling:
        raise UsageError("--min-np does not go with --scaling, which has its own jobs")


def _check_names(named: Sequence[HostSlots]) -> None:
    """Raises UsageError if this host has two names there."""
    here = [one.name for one in named if hosts.is_here(one.name)]
    if len(here) > 1:
        raise UsageError(
            f"-H names this host {len(here)} times, {', '.join(here)}: add up its slots"
        )


def _check_no_mpirun(given: Namespace) -> None:
    if given.mpi_args:
        raise UsageError(
            "--mpi-args: no mpirun runs underneath: set variables for the ranks in "
            "khvdrun's own environment, bind ranks with --bind-to cores, or start the "
            "script with mpirun itself"
        )


def _check_alone(given: Namespace) -> None:
    """Refuses, or explains, options for other hosts, of which there are none."""
    _check_no_mpirun(given)
    for option in _are_given(given, "--ssh-port", "--ssh-identity-file"):
        why = "no other host is reached"
        given.without_effect = {**given.without_effect, option: why}


def _check_handed_over(given: Namespace, host: str) -> None:
    """Refuses options that cannot be handed over to mpirun or srun."""
    if given.nnodes != (1, 1):
        advice = "it is for a khvdrun on each host, without -H"
        raise _not_with(host, "--nnodes", advice)
    if given.diagnose:
        raise _not_with(host, "--diagnose", "start it on each host, with --nnodes")
    _check_recorded_here(given, host)


def _not_with(host: str, option: str, advice: str) -> UsageError:
    return UsageError(f"{option} does not go with other hosts ({host!r}): {advice}")


def _check_recorded_here(given: Namespace, host: str) -> None:
    """Refuses a recording of a job whose rank 0 begins on another host."""
    for option in _are_given(given, "--report", "--status"):
        if not hosts.is_here(host):
            raise _not_with(host, option, _RANK_0_HERE)


# Readers of rank 0's records must be on its host, which is the first.
_RANK_0_HERE = (
    "name this host first, where rank 0 then runs, or start khvdrun on each host, with "
    "--nnodes"
)


def _ssh_options(given: Namespace) -> tuple[str, ...]:
    """The options for ssh."""
    options: tuple[str, ...] = ()
    if given.ssh_port is not None:
        options += ("-p", str(given.ssh_port))
    if given.ssh_identity_file is not None:
        options += ("-i", given.ssh_identity_file)
    return options
