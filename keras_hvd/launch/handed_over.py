"""Runs a job that mpirun or srun starts, sorts its output, and reports how it ended."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keras_hvd.launch import import_errors, rank, report
from keras_hvd.launch.job import CANNOT_START, Job
from keras_hvd.launch.options import Options
from keras_hvd.launch.other_launchers import HandOver
from keras_hvd.launch.output import (
    Copy,
    Lines,
    Prefix,
    Screen,
    Stream,
    Tail,
    WholeLines,
)
from keras_hvd.launch.rank import Rank
from keras_hvd.launch.recorded import Recorded
from keras_hvd.launch.status import RankEnd
from keras_hvd.world.rendezvous import open_files
from keras_hvd.world.rendezvous.nodes import NodeRanks

# Text that may become a tag when more of it has come.
_BEGUN_TAG = re.compile(
    rb"(?:\[[\d,]{,20}|\[[\d,]{1,20}\](?:<[a-z]{,9}>?)?|(?m:^) {,9}\d{,9})\Z"
)

# The words of Open MPI, and of MPICH after MPI_Abort and of srun.
_NAMES_THE_FIRST = re.compile(
    r"process rank (\d{1,10}) with PID"
    r"|Process name: \[\[?[^\s,@]{1,255}[,@]\d{1,10}\]?,(\d{1,10})\]"
    r"|Abort\(\d{1,10}\) on node \d{1,10} \(rank (\d{1,10}) in "
    r"|srun: error: [^\s:]{1,255}: task (\d{1,10}): "
)

_MPICHS_FIRST = re.compile(r"=   PID (\d{1,10}) RUNNING AT (\S{1,255})")

# The text by which ranks name each other.
_PEER_TEXT = r"rank (\d{1,10}) \(pid (\d{1,10}) on ([^()\n]{1,255})\)"
_PEER = re.compile(_PEER_TEXT)
_KILLED = re.compile(_PEER_TEXT + r" was killed by (SIG[A-Z0-9+-]{1,20})")


class TaggedLines:
    """Formats the output of all ranks on one stream of their launcher.

    A tag names the rank of the following output, until the next tag or the line's end.
    The rest is the launcher's own.

    Args:
        tag: as in `HandOver`.
        tails: each rank's last lines; None for those of stdout, which are not needed.
        own: the launcher's last lines.
        copies: files that keep each rank's output; empty for none.
    """

    def __init__(
        self,
        options: Options,
        screen: Screen,
        tag: re.Pattern[bytes],
        tails: dict[int, Tail] | None,
        own: Tail,
        copies: Mapping[int, Copy],
    ):
        self._options = options
        self._screen = screen
        self._tag = tag
        self._tails = tails
        self._own = own
        self._copies = copies
        self._lines: dict[int | None, Lines] = {}
        self._speaker: int | None = None
        self._held = b""

    @property
    def is_holding(self) -> bool:
        """Whether the beginning of a line is not shown yet."""
        return bool(self._held) or any(one.is_holding for one in self._lines.values())

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        *lines, self._held = (self._held + data).splitlines(keepends=True) + [b""]
        if lines and not lines[-1].endswith(b"\n"):
            self._held = lines.pop()
        for line in lines:
            self._pass_on(line)

    def show_held(self) -> None:
        """Shows the beginning of a line whose rest has not arrived."""
        begun = _BEGUN_TAG.search(self._held)
        end = begun.start() if begun else len(self._held)
        now, self._held = self._held[:end], self._held[end:]
        # What only comes now is held for as long as on a rank's own pipe.
        held = [one for one in self._lines.values() if one.is_holding]
        self._pass_on(now)
        for one in held:
            one.show_held()

    def finish(self) -> None:
        """Shows the rest at the end of the stream."""
        self._pass_on(self._held)
        self._held = b""
        for one in self._lines.values():
            one.finish()
        for copy in self._copies.values():
            copy.close()

    def _pass_on(self, text: bytes) -> None:
        at = 0
        for tag in self._tag.finditer(text):
            self._feed(text[at : tag.start()])
            self._speaker = int(tag[1])
            at = tag.end()
        self._feed(text[at:])
        if text.endswith(b"\n"):
            self._speaker = None

    def _feed(self, text: bytes) -> None:
        if not text:
            return
        number = self._speaker
        if number not in self._lines:
            self._lines[number] = self._new_lines(number)
        self._lines[number].feed(text)
        if number is None:
            self._own.feed(text)
            return
        if number in self._copies:
            self._copies[number].feed(text)
        if self._tails is not None:
            self._tails.setdefault(number, Tail(rank.TAIL_LINES)).feed(text)

    def _new_lines(self, number: int | None) -> Lines:
        if number is None:
            return WholeLines(self._screen, Prefix(None, self._options.timestamps))
        return rank.lines(number, self._options, self._screen)


class HandedOver(Job):
    """A job whose ranks another launcher starts: it is this job's only process."""

    def __init__(
        self,
        options: Options,
        handed: HandOver,
        guardian: int,
        signal_mask: set[int],
        recorded: Recorded | None,
    ):
        ranks = NodeRanks(0, options.ranks, "")
        super().__init__(options, ranks, guardian, signal_mask, recorded)
        self._handed = handed
        self._tails: dict[int, Tail] = {}
        self._own = Tail(rank.TAIL_LINES)

    def _start(self) -> None:
        handed = self._handed
        # Two for each rank's output.
        open_files.allow(2 * self._options.ranks)
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        try:
            process = rank.spawn(
                *(handed.command, handed.command[0], handed.environment, None),
                (rank.stdin(0), ends[0][1], ends[1][1]),
            )
        finally:
            for _, write_end in ends:
                os.close(write_end)
        for (read_end, _), name, screen, tails in zip(
            ends,
            ("stdout", "stderr"),
            (self._stdout, self._stderr),
            (None, self._tails),
            strict=True,
        ):
            copies = self._copies(name, screen)
            lines = TaggedLines(
                self._options, screen, handed.tag, tails, self._own, copies
            )
            self._streams.append(Stream(read_end, lines, screen, None, None))
        self._ranks = [Rank(0, process, [], self._own)]
        self._note(f"process {process} is {handed.launcher}: {handed.command[0]}")

    @property
    def _program(self) -> str:
        return self._handed.command[0]

    def _copies(self, name: str, screen: Screen) -> dict[int, Copy]:
        options = self._options
        files = {
            number: rank.file(options.output_directory, number, name)
            for number in range(options.ranks)
        }
        return {number: Copy(path, screen) for number, path in files.items() if path}

    def _on_end(self, ended: Rank, status: int) -> None:
        ended.status = status
        self._note(f"{self._handed.launcher} {report.describe(ended)}")

    def _rank_ends(self) -> list[RankEnd]:
        # Only their launcher knows.
        return []

    def _last_words(self) -> Iterable[Tail]:
        return self._tails.values()

    def _conclude(self) -> int:
        if not self._could_start:
            return CANNOT_START
        (launcher,) = self._ranks
        code = report.exit_code(launcher)
        if code == 0:
            self._ended = "ended successfully"
            return 0
        self._ended = f"failed: {self._handed.launcher} {report.describe(launcher)}"
        by = self._interrupted_by
        if by is not None:
            self._ended = f"was ended by {by.name}"
            self._say(f"the job was ended by {by.name}")
            return 128 + by
        tails = {number: tail.lines() for number, tail in self._tails.items()}
        first = first_failure(tails, self._own.lines())
        last_words = itertools.chain.from_iterable(tails.values())
        explained = import_errors.explain(last_words, self._options)
        for line in [*self._report(first, tails), *explained]:
            self._say(line)
        return 128 + first.signal if first.signal else code

    def _report(
        self, first: Failure, tails: Mapping[int, Sequence[str]]
    ) -> Iterator[str]:
        ended = f"{self._handed.launcher} {report.describe(self._ranks[0])}"
        if first.rank is None:
            who = first.process or "it is not known which rank"
            yield f"{who} failed first; {ended}"
            return
        yield from report.last_words(first.rank, tails.get(first.rank, []))
        how = f": it was killed by {first.signal.name}" if first.signal else ""
        yield f"rank {first.rank} failed first{how}; {ended}"


@dataclass(frozen=True)
class Failure:
    """The first failure: a rank, else a process, else unknown."""

    rank: int | None
    process: str = ""
    signal: signal.Signals | None = None


def first_failure(tails: Mapping[int, Sequence[str]], own: Sequence[str]) -> Failure:
    """The first failure, according to the last lines of ranks and of their launcher.

    Ranks know which peer left them alone, while their launcher may see another one's
    end first. But MPICH's launcher may kill some before the others know the reason.

    Example:

    >>> first_failure({0: ["RankFailedError: rank 1 (pid 7 on a) has left"]}, [])
    Failure(rank=1, process='', signal=None)
    >>> first_failure({}, ["process rank 2 with PID 7 on node a exited on signal 9"])
    Failure(rank=2, process='', signal=None)
    >>> first_failure({}, ["=   PID 7 RUNNING AT a"])
    Failure(rank=None, process='process 7 on a', signal=None)
    >>> tails = {0: ["rank 0 (pid 7 on a)", "rank 1 (pid 7 on b)"]}
    >>> first_failure(tails, ["=   PID 7 RUNNING AT b.local"])
    Failure(rank=1, process='', signal=None)
    """
    texts = {number: "\n".join(lines) for number, lines in tails.items()}
    all_texts = "\n".join([*own, *texts.values()])
    if killed := _KILLED.search(all_texts):
        # Real-time signals have no names here.
        by = signal.Signals.__members__.get(killed[4])
        return Failure(int(killed[1]), signal=by)
    if ended := _MPICHS_FIRST.search(all_texts):
        process, host = ended.groups()
        ranks = {
            int(number): its_host.partition(".")[0]
            for number, its_process, its_host in _PEER.findall(all_texts)
            if its_process == process
        }
        if len(ranks) > 1:
            # As the first processes of containers, which all have the same number.
            short = host.partition(".")[0]
            ranks = {number: name for number, name in ranks.items() if name == short}
        if len(ranks) != 1:
            return Failure(None, f"process {process} on {host}")
        return Failure(next(iter(ranks)))
    for number, text in texts.items():
        left = _PEER.search(text)
        if left and int(left[1]) != number and report.blames_a_peer(text.splitlines()):
            return Failure(int(left[1]))
    named = _NAMES_THE_FIRST.search(all_texts)
    return Failure(int(next(filter(None, named.groups()))) if named else None)
