"""A job on this machine: starts its ranks, serves them, and ends everything.

One loop waits for output, signals, ended children, time limits and the guardian's
death. The process is a subreaper, so orphans that the ranks leave become its children,
and it ends them too.
"""

import enum
import functools
import os
import selectors
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable

from keras_hvd.backends.current import allocator
from keras_hvd.job import cores, process_limit
from keras_hvd.launch import import_errors, processes, rank, report
from keras_hvd.launch.memory import OutOfMemoryWatch
from keras_hvd.launch.node_ranks import environment_of
from keras_hvd.launch.options import Options
from keras_hvd.launch.output import Screen, Stream, Tail
from keras_hvd.launch.rank import Rank
from keras_hvd.launch.recorded import Recorded
from keras_hvd.launch.separate import SeparateTrainings
from keras_hvd.launch.status import JobNow, RankEnd, Status
from keras_hvd.world import renewal
from keras_hvd.world.rendezvous import joined
from keras_hvd.world.rendezvous.nodes import NodeRanks, OtherNodes

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that khvdrun passes on to the ranks."""

JOB_CONTROL = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
"""Terminal signals, which do not reach the ranks in their own sessions."""

CANNOT_START = 2
"""khvdrun's exit code when there was nothing to run."""

TRY_AGAIN = os.EX_TEMPFAIL
"""khvdrun's exit code when hosts or ranks did not meet, or only others failed."""


class Stage(enum.IntEnum):
    """How far a job is."""

    RUNNING = 0
    FAILING = 1  # a rank failed: the others may end by themselves
    TERMINATING = 2  # the ranks that still run got SIGTERM
    CLEANING = 3  # no rank runs, and their leftovers got SIGTERM
    KILLING = 4  # everything got SIGKILL
    LEAVING = 5  # the leftovers cannot be found
    REPORTING = 6  # everything has ended


class Job:
    """The ranks of one job, from their start until all their processes have ended.

    `guardian` is a descriptor that becomes readable when the guardian dies.
    `signal_mask` has the signals that were blocked when khvdrun started. `recorded` is
    the ranks' recording, if any. `others` are the khvdruns of other hosts, if any.
    """

    def __init__(
        self,
        options: Options,
        ranks: NodeRanks,
        guardian: int,
        signal_mask: set[int],
        recorded: Recorded | None = None,
        others: OtherNodes | None = None,
    ):
        self._options = options
        self._node_ranks = ranks
        self._guardian = guardian
        self._recorded = recorded
        self._others = others
        self._joined = _listening_for_ranks(ranks)
        self._has_joined = False
        self._failed_elsewhere = ""
        self._ended = ""
        self._stdout = Screen(1)
        self._stderr = self._stdout if os.path.sameopenfile(1, 2) else Screen(2)
        self._memory = OutOfMemoryWatch()
        self._separate = SeparateTrainings(ranks)
        self._ranks: list[Rank] = []
        self._variables: dict[str, str] = {}
        # Those that are right for ranks of this host alone.
        self._of_this_host: set[str] = set()
        self._streams: list[Stream] = []
        self._stopped: list[int] = []
        self._stage = Stage.RUNNING
        self._deadline: float | None = None
        self._wake = 0
        self._has_children = True
        self._is_orphan = False
        self._could_start = True
        self._is_waiting = False
        self._has_told_of_loss = False
        self._interrupted_by: signal.Signals | None = None
        self._selector = selectors.PollSelector()
        self._selector.register(guardian, selectors.EVENT_READ, self._on_orphaned)
        self._signals = _catch_signals()
        os.set_blocking(self._signals, False)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)

    def run(self) -> int:
        """Runs the job to its end and returns khvdrun's exit code."""
        try:
            self._start()
            self._watch_others()
            # Last: a process that has threads should not fork.
            self._serve_status()
        except OSError as error:
            self._say(f"error: {self._what_failed(error)}: {_why(error)}")
            self._could_start = False
            self._kill()
        self._serve()
        for stream in [*self._streams]:
            self._close(stream)
        self._leave_others()
        code = self._conclude()
        self._serve()
        self._finish_recording()
        # Python's own end would leave them to the system, which ends the process for
        # them. To block them is not enough: a thread may be left that writes a report.
        for each in handled():
            signal.signal(each, signal.SIG_IGN)
        return code

    def _finish_recording(self) -> None:
        if self._recorded is None:
            return
        said = [*self._events()]
        recorded, made = self._recorded, []
        # Writing may block for ever, and a signal ends the wait for it.
        line = "no report: a signal came while it was written"
        try:
            self._wait_for(lambda: made.append(recorded.finish(self._ended, said)))
        except RuntimeError:
            line = f"no report: {process_limit.no_room()}"
        line = made[0] if made else line
        if line:
            self._say(line)
            self._serve()

    def _wait_for(self, act: Callable[[], object]) -> None:
        """Runs `act` in a thread, if there is room, until it ends or a signal comes."""
        ended, writing = os.pipe2(os.O_CLOEXEC)

        def run() -> None:
            with open(writing, "wb"):
                act()

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:
            os.close(writing)
            os.close(ended)
            raise
        self._stage = Stage.REPORTING
        self._selector.register(ended, selectors.EVENT_READ, self._stop_waiting)
        self._is_waiting = True
        while self._is_waiting:
            for key, _ in self._selector.select():
                key.data()
        self._selector.unregister(ended)
        os.close(ended)

    def _stop_waiting(self) -> None:
        self._is_waiting = False

    def _start(self) -> None:
        options = self._options
        self._note(f"job {self._node_ranks.job} runs {shlex.join(options.command)}")
        given = {**os.environ}
        # Variables of this khvdrun's own job, if it is itself a rank of one.
        for name in ("KERAS_HVD_REPORT", renewal.VARIABLE):
            given.pop(name, None)
        given |= options.variables
        threads = cores.thread_variables(self._count_here)
        allocated = allocator.variables(given)
        self._of_this_host = {*threads, *allocated} - given.keys()
        self._variables = {
            **threads,
            "PYTHONUNBUFFERED": "1",
            **given,
            **({} if self._recorded is None else self._recorded.variables),
            **allocated,
        }
        self._start_ranks()

    def _start_ranks(self) -> None:
        """Starts those that the job begins with. Raises OSError."""
        for here in range(self._options.ranks):
            self._start_rank(here)

    @property
    def _count_here(self) -> int:
        """The number of ranks on this host."""
        return self._options.ranks

    def _start_rank(self, here: int, start: int = 1) -> None:
        """Starts this host's `here`th rank, for the `start`th time. Raises OSError."""
        number = self._node_ranks.first_rank + here
        begin = functools.partial(self._begin_rank, here, start)
        outputs = self._stdout, self._stderr, start
        self._add(rank.start(number, self._options, begin, *outputs))

    def _add(self, started: Rank) -> None:
        self._ranks.append(started)
        self._streams += started.streams

    def _begin_rank(self, here: int, start: int, ends: tuple[int, int, int]) -> int:
        """Starts its process, with these descriptors; returns its id."""
        options, own = self._options, self._cores_of(here)
        given = options.command, options.executable, self._environment(here), own
        process = rank.spawn(*given, ends)
        where = f", bound to cores {sorted(own)}" if own else ""
        number = self._node_ranks.first_rank + here
        self._note(f"rank {number} is process {process}{where}")
        return process

    def _cores_of(self, here: int) -> set[int] | None:
        """The cores for that rank alone; None for any."""
        if self._options.bind_to != "cores":
            return None
        return cores.shares(self._count_here)[here]

    def _environment(self, here: int) -> dict[str, str]:
        """The variables of the rank that is started as this host's `here`th."""
        given = self._variables
        return environment_of(here, self._node_ranks, self._options, given)

    def _serve_status(self) -> None:
        recorded = self._recorded
        if recorded is None or recorded.listener is None:
            return
        try:
            recorded.listener.serve(Status(self._now))
        except RuntimeError:
            # The ranks are worth more than their status.
            self._say(f"warning: --status is not served: {process_limit.no_room()}")
            return
        self._say(f"the job's status is at {recorded.listener.address}/status")

    def _watch_others(self) -> None:
        if self._joined is not None:
            self._selector.register(self._joined, selectors.EVENT_READ, self._on_joined)
        if self._others is not None:
            self._selector.register(self._others, selectors.EVENT_READ, self._on_others)
            self._on_others()

    def _on_joined(self) -> None:
        """From here on the ranks know each other."""
        assert self._joined is not None, "it has just become readable"
        self._selector.unregister(self._joined)
        self._joined.close()
        self._has_joined = True
        # Commands that train nothing are none the slower.
        crowded = cores.crowded(sum(not one.host for one in self._ranks))
        if crowded:
            self._say(f"note: {crowded}")
        self._leave_others()

    def _on_others(self) -> None:
        """Ends the job if a rank of another host has failed before the ranks met."""
        failure = "" if self._others is None else self._others.failure()
        if failure and self._stage == Stage.RUNNING:
            self._failed_elsewhere = failure
            self._enter(Stage.FAILING, self._options.term_after)

    @property
    def _may_be_separate(self) -> bool:
        """Whether no rank has joined, as far as that could be known."""
        return self._joined is not None and not self._has_joined

    def _leave_others(self) -> None:
        if self._others is None:
            return
        if self._others.fileno() in self._selector.get_map():
            self._selector.unregister(self._others)
        self._others.leave()
        self._others = None

    def _now(self) -> JobNow:
        assert self._recorded is not None, "or there is no status"
        size = self._node_ranks.size
        return JobNow(self._recorded.of_now, size, self._rank_ends())

    def _rank_ends(self) -> list[RankEnd]:
        return [
            RankEnd(one.number, report.state(one), report.last_error(one))
            for one in self._ranks
        ]

    def _events(self) -> Iterable[tuple[float, str, str]]:
        """When what kind of thing was said, for the report."""
        for tail in self._last_words():
            for when, text in tail.warnings:
                yield when, "warning", text

    def _last_words(self) -> Iterable[Tail]:
        """The last lines of each rank's stderr."""
        return [one.stderr for one in self._ranks]

    @property
    def _program(self) -> str:
        return self._options.command[0]

    def _what_failed(self, error: OSError) -> str:
        logs = self._options.output_directory
        if logs is not None and str(error.filename).startswith(str(logs)):
            return f"--output-filename: cannot write {str(error.filename)!r}"
        return f"cannot execute {self._program!r}"

    def _serve(self) -> None:
        """Serves until no child is left, and nothing is left to read or to write."""
        while True:
            self._wake += 1
            self._choose_what_to_watch()
            events = self._selector.select(self._patience())
            if not events and not self._has_children:
                return
            for key, _ in events:
                key.data()
            self._act_at(time.monotonic())
            if self._stdout.why_incomplete and not self._has_told_of_loss:
                self._has_told_of_loss = True
                self._say(
                    "standard output cannot be written: "
                    f"{self._stdout.why_incomplete}. The job goes on, and lines are "
                    "missing"
                )

    def _act_at(self, now: float) -> None:
        """Does what is due."""
        for stream in self._streams:
            if stream.show_at is not None and now >= stream.show_at:
                stream.show_held()
        if self._deadline is not None and now >= self._deadline:
            self._escalate()

    def _times(self) -> list[float | None]:
        """When something is due."""
        return [self._deadline, *(stream.show_at for stream in self._streams)]

    def _choose_what_to_watch(self) -> None:
        for stream in [*self._streams]:
            if stream.screen.is_broken:
                # The reader is gone. The rank must see a broken pipe, as without
                # khvdrun.
                self._close(stream)
                continue
            wanted = selectors.EVENT_READ if not stream.screen.is_full else 0
            self._watch(
                stream.descriptor, wanted, functools.partial(self._pump, stream)
            )
        for screen in {self._stdout, self._stderr}:
            wanted = selectors.EVENT_WRITE if screen.is_waiting else 0
            self._watch(screen.descriptor, wanted, screen.flush)

    def _watch(self, descriptor: int, events: int, act: Callable[[], object]) -> None:
        is_watched = descriptor in self._selector.get_map()
        if events and not is_watched:
            self._selector.register(descriptor, events, act)
        elif is_watched and not events:
            self._selector.unregister(descriptor)

    def _patience(self) -> float | None:
        """Seconds to wait for an event; None without a limit."""
        if not self._has_children:
            is_writing = self._stdout.is_waiting or self._stderr.is_waiting
            return None if is_writing and not self._is_orphan else 0
        first = min((one for one in self._times() if one is not None), default=None)
        return None if first is None else max(0, first - time.monotonic())

    def _pump(self, stream: Stream) -> None:
        if self._may_be_separate:
            self._separate.look()
        if not stream.pump():
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        self._watch(stream.descriptor, 0, stream.pump)
        self._streams.remove(stream)
        stream.close()

    def _on_orphaned(self) -> None:
        self._selector.unregister(self._guardian)
        self._is_orphan = True
        if self._stage == Stage.REPORTING:
            self._stop_waiting()
            return
        self._kill()

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if number == signal.SIGCHLD:
                # The report may have children of its own.
                if self._stage != Stage.REPORTING:
                    self._on_children()
            elif number in FORWARDED:
                self._forward(signal.Signals(number))
            elif number == signal.SIGTSTP:
                self._signal_ranks(signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._signal_ranks(signal.SIGCONT)
            elif number == signal.SIGWINCH and self._ranks:
                rank.fit_terminals(self._ranks[0], self._options)

    def _on_children(self) -> None:
        ended, has_children = processes.reap()
        self._has_children = has_children and self._stage < Stage.LEAVING
        by_process = {one.process: one for one in self._ranks if one.status is None}
        for process, status in ended:
            if process in by_process:
                self._on_end(by_process[process], status)
            else:
                self._on_end_of_other(process, status)
        if self._stage == Stage.KILLING:
            # Orphans of the ended ranks have just become this process' children.
            processes.signal_descendants(signal.SIGKILL)
        elif self._has_children and self._have_ended:
            self._clean()

    def _on_end_of_other(self, process: int, status: int) -> None:
        """Notes that a process has ended that is no rank."""

    @property
    def _have_ended(self) -> bool:
        return all(one.status is not None for one in self._ranks)

    def _on_end(self, ended: Rank, status: int) -> None:
        ended.status = status
        ended.wake = self._wake
        ended.was_told = self._stage >= Stage.TERMINATING
        self._note(f"rank {ended.number} {report.describe(ended)}")
        if status != 0 and self._stage == Stage.RUNNING:
            self._enter(Stage.FAILING, self._options.term_after)
        if status != 0 and self._others is not None:
            # Its last words, which say why, may not have been read so far.
            for stream in ended.streams:
                if stream in self._streams:
                    stream.pump()
            self._others.fail(report.before_it_met(ended))

    def _forward(self, number: signal.Signals) -> None:
        if self._stage == Stage.REPORTING:
            self._is_waiting &= number in (signal.SIGUSR1, signal.SIGUSR2)
            return
        if number == signal.SIGINT and self._interrupted_by is not None:
            self._kill()
            return
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._interrupted_by = number
        self._signal_ranks(number)

    def _enter(self, stage: Stage, patience: float) -> None:
        self._stage = stage
        self._deadline = time.monotonic() + patience

    def _escalate(self) -> None:
        if self._stage == Stage.FAILING:
            self._terminate()
        elif self._stage < Stage.KILLING or not self._have_ended:
            self._kill()
        else:
            self._leave()

    def _terminate(self) -> None:
        self._enter(Stage.TERMINATING, self._options.kill_after)
        self._stopped = [
            one.number
            for one in self._ranks
            if one.status is None and not one.host and processes.is_stopped(one.process)
        ]
        self._signal_ranks(signal.SIGTERM)
        self._signal_ranks(signal.SIGCONT)

    def _clean(self) -> None:
        if self._stage >= Stage.CLEANING:
            return
        self._enter(Stage.CLEANING, self._options.kill_after)
        processes.signal_descendants(signal.SIGTERM)
        processes.signal_descendants(signal.SIGCONT)

    def _kill(self) -> None:
        self._enter(Stage.KILLING, self._options.kill_after)
        if processes.are_visible():
            self._deadline = None
        processes.signal_descendants(signal.SIGKILL)
        # Without children no SIGCHLD comes.
        self._on_children()

    def _leave(self) -> None:
        """Ends although something is left: hidden processes cannot be found."""
        self._stage = Stage.LEAVING
        self._deadline = None
        self._has_children = False
        self._say(
            "processes that ranks have started still run, and cannot be found: /proc "
            "does not show the processes here"
        )

    def _signal_ranks(self, number: signal.Signals) -> None:
        for one in self._ranks:
            one.signal(number)

    def _conclude(self) -> int:
        """Says how the job ended and returns khvdrun's exit code."""
        if not self._could_start:
            return CANNOT_START
        first = report.first_failure(self._ranks)
        if first is None:
            self._ended = "ended successfully"
            warning = self._separate.warning()
            if warning and self._may_be_separate:
                self._say(warning)
            return 0
        self._ended = f"failed: rank {first.number} {report.describe(first)}"
        if self._is_orphan and first.was_told:
            self._ended = "was ended: khvdrun itself was killed"
            self._say("khvdrun itself was killed, and all ranks with it")
            return 128 + signal.SIGKILL
        by = self._interrupted_by
        if by is not None and (first.was_told or report.exit_code(first) == 128 + by):
            self._ended = f"was ended by {by.name}"
            self._say(f"the job was ended by {by.name}")
            return 128 + by
        # Ranks of this host that were told to end say nothing of the cause.
        if not (self._failed_elsewhere and first.was_told):
            lines = report.report(self._ranks, self._memory, self._stopped)
            lines += import_errors.explain(first.stderr.lines(), self._options)
            for line in lines:
                self._say(line)
        why = ""
        if self._options.node is not None:
            why = report.of_others(self._ranks, first)
        if self._failed_elsewhere:
            self._say(self._failed_elsewhere)
            # One of this host may have failed by itself meanwhile.
            if why or first.was_told:
                why = report.NOT_HERE
        if why:
            self._ended = "failed on another host"
            self._say(f"{why}: the exit code is {TRY_AGAIN}")
            return TRY_AGAIN
        return report.exit_code(first)

    def _say(self, line: str) -> None:
        self._stderr.write_lines(f"khvdrun: {line}\n".encode())

    def _note(self, line: str) -> None:
        if self._options.verbose:
            self._say(line)


def _listening_for_ranks(ranks: NodeRanks) -> socket.socket | None:
    """A socket on which a rank tells that it has joined; None if that is impossible."""
    if not ranks.job:
        return None
    try:
        return joined.listen(ranks.job, ranks.first_rank)
    except OSError:
        return None


def _catch_signals() -> int:
    """Makes signals arrive as bytes at the descriptor that it returns."""
    arriving, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for number in handled():
        signal.signal(number, lambda number, frame: None)
    # Output from the background must not stop this process (stty tostop).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    return arriving


def handled() -> set[signal.Signals]:
    """The signals that khvdrun handles: those not ignored from the start (nohup)."""
    from_outside = {
        number
        for number in (*FORWARDED, *JOB_CONTROL)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    return {*from_outside, signal.SIGCHLD}


def _why(error: OSError) -> str:
    is_full = isinstance(error, BlockingIOError)
    return process_limit.no_room() if is_full else str(error.strerror)
