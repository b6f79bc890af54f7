"""The entry point of `khvdrun` and of `python -m keras_hvd.launch`."""

import dataclasses
import os
import pickle
import select
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from keras_hvd.exceptions import LibraryError, RendezvousError
from keras_hvd.job import settings
from keras_hvd.launch import (
    command_line,
    guardian,
    membership_service,
    node_ranks,
    other_launchers,
    processes,
    reachable,
    recorded,
)
from keras_hvd.launch.discovery import Discovery
from keras_hvd.launch.elastic import ElasticJob
from keras_hvd.launch.handed_over import HandedOver
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.job import CANNOT_START, TRY_AGAIN, Job
from keras_hvd.launch.joined_hosts import JoinedHosts
from keras_hvd.launch.joined_job import JoinedJob
from keras_hvd.launch.options import Options
from keras_hvd.launch.recorded import Recorded
from keras_hvd.launch.remote_ranks import RemoteRanks
from keras_hvd.recording import files
from keras_hvd.world import tls
from keras_hvd.world.rendezvous import address as addresses
from keras_hvd.world.rendezvous import network_interfaces, secret
from keras_hvd.world.rendezvous.gathering import Group
from keras_hvd.world.rendezvous.nodes import NodeRanks, NotMetError
from keras_hvd.world.rendezvous.proof import Purpose


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `khvdrun` and returns its exit code."""
    _open_standard_files()
    _let_sigterm_end_a_first_process()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return run(command_line.parse(given))
        finally:
            # Python would do so at its very end, and complain there. It has no stdout
            # if it was started without one.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if _is_read(1):
            raise
        # Nothing is left to flush there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def run_for(parent: str, options: str) -> int:
    """Runs `khvdrun` for the process `parent`, with options from a file."""
    processes.die_with_parent(int(parent))
    with open(options, "rb") as file:
        return run(pickle.load(file))


def run(options: Options) -> int:
    """Runs what the options ask for, and returns the exit code."""
    if options.check_build:
        from keras_hvd.launch import check_build

        return check_build.run()
    if options.diagnose:
        from keras_hvd.launch.diagnosis import report

        return report.run(options)
    if options.scaling:
        from keras_hvd.launch import scaling

        return scaling.run(options)
    ignored = settings.explain(options.without_effect)
    if ignored:
        print(f"khvdrun: warning: {ignored}", file=sys.stderr)
    try:
        if options.hosts and options.least_ranks is None:
            return _on_other_hosts(options)
        group, joined = _to_join(options), None
        if group is not None and options.membership:
            return membership_service.run(options, group)
        if group is not None and options.node is not None:
            node = options.node
            # The first host has the job.
            if node.number == 0:
                joined = JoinedHosts(group, node.ranks)
                named = joined.wait_for_all(options.least_ranks or 1)
                options, group = _with_hosts(options, named), None
            else:
                options = dataclasses.replace(
                    options,
                    node=None,
                    report=None,
                    status_port=None,
                    output_directory=None,
                )
        if options.discovery_script:
            options = _discover(options)
        if options.hosts:
            # Ranks of this host must be reached.
            names = settings.network_interfaces({**os.environ, **options.variables})
            network_interfaces.reachable(names)
        if options.dry_run:
            what = shlex.join(options.command)
            print(f"{options.ranks} times on {_where(options)}: {what}")
            for option, variable in options.taken.items():
                print(f"{option} from {variable}")
            return 0
        own, others = node_ranks.of_this_host(options)
        if group is None:
            node_ranks.check_size(own.size, os.environ)
    except (RendezvousError, LibraryError, ValueError) as error:
        print(f"khvdrun: error: {error}", file=sys.stderr)
        return TRY_AGAIN if isinstance(error, NotMetError) else CANNOT_START
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

    def job(held: int, mask: set[int], kept: Recorded | None) -> Job:
        if group is not None:
            joined_job = JoinedJob if options.join else RemoteRanks
            return joined_job(options, own, held, mask, group=group)
        if options.least_ranks is None:
            return Job(options, own, held, mask, kept, others)
        return ElasticJob(options, own, held, mask, kept, joined=joined)

    return _run(options, own, job)


def _to_join(options: Options) -> Group | None:
    """A membership service, or the hosts of a job that others may join, if any.

    Raises RendezvousError, LibraryError.
    """
    node, place = options.node, options.membership or options.join
    if node is not None and options.may_join and not options.dry_run:
        who = "node", Purpose.HOSTS, node.number, node.count
        place = node.rendezvous
    elif place is not None:
        who = "service", Purpose.MEMBERSHIP, 0, 1
    else:
        return None
    variables = {**os.environ, **options.variables}
    group = Group(
        *(*who, [addresses.parse(place)]),
        key=secret.read(variables).key(""),
        timeout=settings.init_timeout(variables),
        interfaces=settings.network_interfaces(variables),
        tls=tls.chosen(variables),
    )
    # Another try does not change a malformed name.
    group.sources()
    return group


def _with_hosts(options: Options, named: Sequence[HostSlots]) -> Options:
    """The options for a job that begins on these hosts."""
    slots = sum(each.slots or 1 for each in named)
    ranks = min(slots, options.most_ranks or slots)
    return dataclasses.replace(options, node=None, hosts=tuple(named), ranks=ranks)


def _discover(options: Options) -> Options:
    """The options with the hosts that there are. Raises RendezvousError."""
    # Some parents leave it ignored, and then no process can wait for a child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    discovery = Discovery(options.discovery_script, options.slots)
    timeout = settings.init_timeout({**os.environ, **options.variables})
    named = discovery.wait_for(options.ranks, timeout)
    return dataclasses.replace(options, hosts=tuple(named))


def _where(options: Options) -> str:
    if not options.hosts:
        return "this host"
    return "slots of " + ", ".join(f"{one.name}:{one.slots}" for one in options.hosts)


def _on_other_hosts(options: Options) -> int:
    node_ranks.check_size(options.ranks, os.environ)
    handed = other_launchers.hand_over(options, os.environ)
    if options.dry_run:
        print(handed.described(options.variables))
        return 0
    if handed.launcher != "srun":
        reachable.wait_for_hosts(options, os.environ)

    def job(held: int, mask: set[int], kept: Recorded | None) -> Job:
        told = handed.with_variables({} if kept is None else kept.variables)
        return HandedOver(options, told, held, mask, kept)

    return _run(options, NodeRanks(0, options.ranks, ""), job)


def _run(
    options: Options,
    own: NodeRanks,
    job: Callable[[int, set[int], Recorded | None], Job],
) -> int:
    """Runs a job, with this host's recording."""
    kept = None
    try:
        kept = recorded.wanted(options, own)
    except OSError as error:
        reason = recorded.what_failed(error, options)
        is_full = files.is_full(error)
        kind = "warning" if is_full else "error"
        print(f"khvdrun: {kind}: {reason}", file=sys.stderr)
        if not is_full:
            return CANNOT_START
    launcher = os.getpid()
    code = guardian.run(lambda held, mask: job(held, mask, kept))
    # The job's process comes here as well, unless it was killed.
    left = kept.left() if os.getpid() == launcher and kept is not None else ""
    if left:
        print(f"khvdrun: {left}", file=sys.stderr)
    return code


def _open_standard_files() -> None:
    """Keeps pipes from becoming standard input, output or error by accident."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # open() takes the lowest number that is free: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _let_sigterm_end_a_first_process() -> None:
    """Ends this process by SIGTERM before it has a job, if it is a container's first.

    The kernel keeps signals that it does not handle from such a process.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _is_read(descriptor: int) -> bool:
    """Whether a pipe still has its reader, unlike after `| head`."""
    watched = select.poll()
    watched.register(descriptor, 0)
    return not watched.poll(0)


if __name__ == "__main__":
    sys.exit(main())
