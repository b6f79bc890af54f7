"""The rank that failed first, how it ended, and its last lines."""

import os
import re
import signal
import socket
from collections.abc import Iterable, Sequence

from keras_hvd.launch.memory import OutOfMemoryWatch
from keras_hvd.launch.output import is_of_tensorflows_start
from keras_hvd.launch.rank import Rank

# The text of a rank that ends because another rank ended.
_BLAMES_A_PEER = re.compile(
    r"RankFailedError|AbortedError|The job cannot go on"
    # The engine's own message, for scripts that catch the error.
    r"|keras_hvd \[rank \d{1,10}\] error: rank \d{1,10} \(pid "
)

# "ValueError: ...", "keras_hvd [rank 0] error: ...", "... E0000 00:00:...". Patterns
# that read lines of ranks begin with a word of their own, and repeat nothing without a
# bound. Otherwise the time may grow with the square of a line's length.
_TELLS_OF_ERROR = re.compile(r"(?:Error|Exception|Interrupt)\b|\berror: ")

# The error of a rank that has not met the others.
_DID_NOT_MEET = "keras_hvd.exceptions.RendezvousError: "

NOT_HERE = "no rank of this host failed by itself"

# The signals with which khvdrun ends ranks.
_LAUNCHERS_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)

_PEER_PROCESS = re.compile(r"rank \d{1,10} \(pid (\d{1,10}) on ([^()\n]{1,255})\)")


def first_failure(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that made the job fail, or None if every rank ended with exit code 0.

    The order of the ends does not decide alone. A rank that raises because a peer died
    may be gone before that peer, because a large process takes long to tear down. Ends
    seen in one round of the launcher's loop have no known order. So a rank that blames
    a peer comes last, and among those seen together a rank that a signal killed comes
    first.
    """
    failed = [rank for rank in ranks if rank.status != 0]
    return min(failed, key=_order, default=None)


def blames_a_peer(lines: Iterable[str]) -> bool:
    """Whether these last lines of a rank blame its end on a peer.

    Example:

    >>> blames_a_peer(["keras_hvd.exceptions.RankFailedError: rank 1 (pid 7 on a) ..."])
    True
    >>> blames_a_peer(["MemoryError"])
    False
    """
    return any(_BLAMES_A_PEER.search(line) for line in lines)


def exit_code(rank: Rank) -> int:
    """The rank's exit code as a shell shows it: 128 + N if signal N killed the rank."""
    code = os.waitstatus_to_exitcode(_status(rank))
    return code if code >= 0 else 128 - code


def describe(rank: Rank, memory: OutOfMemoryWatch | None = None) -> str:
    """Describes how a rank ended, as a clause that follows its name.

    `memory` tells whether the kernel killed it; None if the cause is clear.
    """
    code = os.waitstatus_to_exitcode(_status(rank))
    if code >= 0:
        return f"ended with exit code {code}"
    # Only the first and the last real-time signal have names.
    names = {-each: each.name for each in signal.Signals}
    text = f"was killed by signal {-code} ({names.get(code, 'real-time')})"
    if os.WCOREDUMP(_status(rank)):
        text += ", core dumped"
    by_kernel = None
    if memory is not None and -code == signal.SIGKILL:
        by_kernel = memory.killed(rank.process)
    return f"{text}, {by_kernel}" if by_kernel else text


def state(rank: Rank) -> str:
    """`running`, or how a rank ended."""
    return "running" if rank.status is None else describe(rank)


def last_error(rank: Rank) -> str:
    """The last line of a rank's stderr that tells of an error, or ""."""
    lines = [line for line in rank.stderr.lines() if _TELLS_OF_ERROR.search(line)]
    return lines[-1] if lines else ""


def before_it_met(rank: Rank) -> str:
    """Explains why a rank that has failed will not meet the others, for other hosts."""
    said = last_error(rank)
    return (
        f"rank {rank.number} on {socket.gethostname()} (process {rank.process}) "
        f"{describe(rank)} before the ranks had met" + (f": {said}" if said else "")
    )


def of_others(ranks: Sequence[Rank], first: Rank) -> str:
    """Says why the rank that failed first is not at fault, or "" if it may be.

    That is so where it has failed because of ranks of other hosts, or where the ranks
    have not met, so that another try may succeed.
    """
    lines = [*first.stderr.lines()]
    if any(_DID_NOT_MEET in line for line in lines):
        return "the ranks have not met"
    blaming = [line for line in lines if _BLAMES_A_PEER.search(line)]
    named = _processes_here(blaming)
    if not blaming or any(rank.process in named for rank in ranks):
        return ""
    return NOT_HERE


def report(
    ranks: Sequence[Rank], memory: OutOfMemoryWatch, stopped: Sequence[int]
) -> list[str]:
    """The last lines that a failed job shows, without line ends.

    `stopped` are the ranks that a signal held when khvdrun told them to end.
    """
    first = first_failure(ranks)
    assert first is not None, "none has failed"
    lines = []
    others = [rank for rank in ranks if rank is not first]
    for rank in others:
        told = " after khvdrun told it to end" if rank.was_told else ""
        held = ", stopped by a signal until then" if rank.number in stopped else ""
        lines.append(f"rank {rank.number} {describe(rank)}{told}{held}")
    lines += last_words(first.number, first.stderr.lines())
    lines.append(f"{first.name} failed first: it {describe(first, memory)}")
    lines += _early_leavers(ranks, first)
    return lines


def last_words(rank: int, stderr: Iterable[str]) -> list[str]:
    """The lines that show the last ones of a rank's stderr."""
    shown = [f"    {line}" for line in stderr if not is_of_tensorflows_start(line)]
    if not shown:
        return [f"rank {rank} wrote nothing to stderr"]
    return [f"rank {rank}'s stderr ended with:", *shown]


def _early_leavers(ranks: Sequence[Rank], first: Rank) -> list[str]:
    """Names the ranks that `first` waited for and that had ended with exit code 0."""
    awaited = _processes_here(first.stderr.lines())
    return [
        f"rank {rank.number} had left with exit code 0 while others still waited for "
        "it: all ranks must make the same collective calls (look for one that is "
        "inside `if keras_hvd.rank() == 0:`)"
        for rank in ranks
        if rank.status == 0 and rank.process in awaited and _blames_a_peer(first)
    ]


def _processes_here(lines: Iterable[str]) -> set[int]:
    """The processes of the ranks of this host that the lines name.

    The first process of each container has the same number.
    """
    here = socket.gethostname()
    found = (each for line in lines for each in _PEER_PROCESS.findall(line))
    return {int(process) for process, host in found if host == here}


def _order(rank: Rank) -> tuple[bool, bool, int, bool, int]:
    was_killed = os.WIFSIGNALED(_status(rank))
    # Writing a core file may take so long that the rank is told to end meanwhile.
    crashed = was_killed and os.WTERMSIG(_status(rank)) not in _LAUNCHERS_SIGNALS
    was_ended = rank.was_told and not crashed
    return was_ended, _blames_a_peer(rank), rank.wake, not was_killed, rank.number


def _blames_a_peer(rank: Rank) -> bool:
    return blames_a_peer(rank.stderr.lines())


def _status(rank: Rank) -> int:
    assert rank.status is not None, "it has not ended"
    return rank.status
