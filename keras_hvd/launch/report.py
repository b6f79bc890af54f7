"""Which rank failed first, how, and with what last words."""

import os
import re
import signal
from collections.abc import Iterable, Sequence

from keras_hvd.launch.memory import OutOfMemoryWatch
from keras_hvd.launch.output import is_of_tensorflows_start
from keras_hvd.launch.rank import Rank

# What a rank says when it ends because another one did.
_BLAMES_A_PEER = re.compile(
    r"RankFailedError|AbortedError|The job cannot go on"
    # The engine's own words, where the script catches the error.
    r"|keras_hvd \[rank \d+\] error: rank \d+ \(pid "
)

# How khvdrun ends ranks.
_LAUNCHERS_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)

_PEER_PROCESS = re.compile(r"rank \d+ \(pid (\d+) on ")


def first_failure(ranks: Sequence[Rank]) -> Rank | None:
    """The rank that brought the job down.

    A rank that raises because another died may be gone before that one has been: taking
    a large process apart takes long. Ends seen in one round of the launcher's loop have
    no known order. So a rank that blames a peer comes last, and of those seen together
    one that a signal killed comes first.

    Args:
        ranks: All ranks, ended.

    Returns:
        The rank, or None if every rank ended with exit code 0.
    """
    failed = [rank for rank in ranks if rank.status != 0]
    return min(failed, key=_order, default=None)


def blames_a_peer(lines: Iterable[str]) -> bool:
    """Whether a rank that ended with these lines did so because another one did.

    Example:

    >>> blames_a_peer(["keras_hvd.exceptions.RankFailedError: rank 1 (pid 7 on a) ..."])
    True
    >>> blames_a_peer(["MemoryError"])
    False
    """
    return any(_BLAMES_A_PEER.search(line) for line in lines)


def exit_code(rank: Rank) -> int:
    """What a shell would call the rank's end: its code, or 128 and its signal."""
    code = os.waitstatus_to_exitcode(_status(rank))
    return code if code >= 0 else 128 - code


def describe(rank: Rank, memory: OutOfMemoryWatch | None = None) -> str:
    """Says how a rank ended.

    Args:
        rank: A rank that has ended.
        memory: Knows whether the kernel killed it; None if it is clear who did.

    Returns:
        A clause that follows the rank's name.
    """
    code = os.waitstatus_to_exitcode(_status(rank))
    if code >= 0:
        return f"ended with exit code {code}"
    text = f"was killed by signal {-code} ({_name(-code)})"
    if os.WCOREDUMP(_status(rank)):
        text += ", core dumped"
    by_kernel = None
    if memory is not None and -code == signal.SIGKILL:
        by_kernel = memory.killed(rank.process)
    return f"{text}, {by_kernel}" if by_kernel else text


def report(
    ranks: Sequence[Rank], memory: OutOfMemoryWatch, stopped: Sequence[int]
) -> list[str]:
    """The last lines that a failed job shows.

    Args:
        ranks: All ranks, ended, at least one of them not with exit code 0.
        memory: Knows whether the kernel killed one.
        stopped: Ranks that had to be ended while a signal held them.

    Returns:
        Lines without their ends.
    """
    first = first_failure(ranks)
    assert first is not None, "none has failed"
    lines = []
    others = [rank for rank in ranks if rank is not first]
    for rank in others:
        told = " after khvdrun told it to end" if rank.was_told else ""
        held = ", stopped by a signal until then" if rank.number in stopped else ""
        lines.append(f"rank {rank.number} {describe(rank)}{told}{held}")
    last_words = [
        line for line in first.stderr.lines() if not is_of_tensorflows_start(line)
    ]
    if last_words:
        lines.append(f"rank {first.number}'s stderr ended with:")
        lines += [f"    {line}" for line in last_words]
    else:
        lines.append(f"rank {first.number} wrote nothing to stderr")
    lines.append(
        f"rank {first.number} (process {first.process}) failed first: it "
        f"{describe(first, memory)}"
    )
    lines += _early_leavers(ranks, first)
    return lines


def _early_leavers(ranks: Sequence[Rank], first: Rank) -> list[str]:
    """Names the ranks that `first` waited for and that ended well themselves."""
    awaited = {
        int(process)
        for line in first.stderr.lines()
        for process in _PEER_PROCESS.findall(line)
    }
    return [
        f"rank {rank.number} had left with exit code 0 while others still waited for it"
        for rank in ranks
        if rank.status == 0 and rank.process in awaited and _blames_a_peer(first)
    ]


def _order(rank: Rank) -> tuple[bool, bool, int, bool, int]:
    was_killed = os.WIFSIGNALED(_status(rank))
    # A crashing process may write its core for so long that it is told to end.
    crashed = was_killed and os.WTERMSIG(_status(rank)) not in _LAUNCHERS_SIGNALS
    was_ended = rank.was_told and not crashed
    return was_ended, _blames_a_peer(rank), rank.wake, not was_killed, rank.number


def _blames_a_peer(rank: Rank) -> bool:
    return blames_a_peer(rank.stderr.lines())


def _status(rank: Rank) -> int:
    assert rank.status is not None, "it has not ended"
    return rank.status


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Real-time signals but the first and last have no names.
        return "real-time"
