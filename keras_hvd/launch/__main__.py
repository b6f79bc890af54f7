"""The entry point of `khvdrun` and of `python -m keras_hvd.launch`."""

import os
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
    node_ranks,
    other_launchers,
    recorded,
)
from keras_hvd.launch.elastic import ElasticJob
from keras_hvd.launch.handed_over import HandedOver
from keras_hvd.launch.job import CANNOT_START, TRY_AGAIN, Job
from keras_hvd.launch.options import Options
from keras_hvd.launch.recorded import Recorded
from keras_hvd.recording import files
from keras_hvd.world.rendezvous.nodes import NodeRanks, NotMetError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `khvdrun` and returns its exit code."""
    _open_standard_files()
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
        if options.hosts:
            return _on_other_hosts(options)
        if options.dry_run:
            print(f"{options.ranks} times on this host: {shlex.join(options.command)}")
            return 0
        own, others = node_ranks.of_this_host(options)
        node_ranks.check_size(own.size, os.environ)
    except (RendezvousError, LibraryError, ValueError) as error:
        print(f"khvdrun: error: {error}", file=sys.stderr)
        return TRY_AGAIN if isinstance(error, NotMetError) else CANNOT_START
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    kind = Job if options.least_ranks is None else ElasticJob
    return _run(
        *(options, own),
        lambda held, mask, kept: kind(options, own, held, mask, kept, others),
    )


def _on_other_hosts(options: Options) -> int:
    node_ranks.check_size(options.ranks, os.environ)
    handed = other_launchers.hand_over(options, os.environ)
    if options.dry_run:
        print(handed.described(options.variables))
        return 0

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


def _is_read(descriptor: int) -> bool:
    """Whether a pipe still has its reader, unlike after `| head`."""
    watched = select.poll()
    watched.register(descriptor, 0)
    return not watched.poll(0)


if __name__ == "__main__":
    sys.exit(main())
