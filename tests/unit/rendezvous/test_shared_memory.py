"""Ranks that hand each other memory, and ranks that cannot."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from keras_hvd.world.rendezvous import shared_memory
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.rank_table import RankInfo

NAME = f"keras_hvd/memory/{'0' * 32}"


def rank_at(name: str, rank: int = 0) -> RankInfo:
    """A rank that offers its memory there."""
    return RankInfo(rank, 4, rank, 4, "key", "kernel", 0, "node0", 7, (), name)


def first_giver(*names: str, seconds: float = 20) -> tuple[int | None, str]:
    candidates = [rank_at(name, rank) for rank, name in enumerate(names)]
    asking = shared_memory.first_giver(candidates, time.monotonic() + seconds)
    giver, reason = EventLoop().run(asking)
    return None if giver is None else giver.rank, reason


@contextlib.contextmanager
def offered() -> Iterator[str]:
    """Memory that another process offers."""
    program = (
        "import sys, time\n"
        "from keras_hvd.world.rendezvous import event_loop, shared_memory\n"
        "async def offer():\n"
        "    with offered.open(time.monotonic() + 60):\n"
        "        print(offered.name, flush=True)\n"
        "        await event_loop.ready(sys.stdin, 1, time.monotonic() + 60)\n"
        "loop = event_loop.EventLoop()\n"
        "offered = shared_memory.Offer(loop)\n"
        "loop.run(offer())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_the_first_rank_that_hands_its_memory_over_is_found():
    with offered() as first, offered() as second:
        assert first_giver(first, second) == (0, "")
        giver, reason = first_giver(NAME, second, first)
    assert giver == 1
    assert reason == "rank 0 (process 7 on node0): Connection refused"


def nothing(connection: socket.socket) -> None:
    connection.close()


def too_little(connection: socket.socket) -> None:
    hand_over(connection, b"")


def something_else(connection: socket.socket) -> None:
    hand_over(connection, b"x" * len(NAME))


def hand_over(connection: socket.socket, content: bytes) -> None:
    memory = os.memfd_create("test")
    os.write(memory, content)
    socket.send_fds(connection, [b"!"], [memory])
    os.close(memory)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (nothing, "it hands nothing over"),
        (too_little, "it hands over too little memory"),
        (something_else, "it hands over other memory"),
    ],
)
def test_who_answers_something_else_shares_no_memory(
    threads, answer: Callable[[socket.socket], None], reason: str
):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(b"\0" + NAME.encode())
        listening.listen()
        threads.start("answer", lambda: answer(listening.accept()[0]))
        assert first_giver(NAME) == (None, f"rank 0 (process 7 on node0): {reason}")
        threads.end()


def test_who_does_not_answer_shares_no_memory_after_a_while():
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(b"\0" + NAME.encode())
        listening.listen()
        giver, reason = first_giver(NAME, seconds=0.2)
    assert (giver, reason) == (
        None,
        "rank 0 (process 7 on node0): it does not answer",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_processes_of_other_users_get_none():
    ask = (
        "import os, sys, time\n"
        "from keras_hvd.world.rendezvous import event_loop, shared_memory, rank_table\n"
        "os.setuid(65534)\n"
        "one = rank_table.RankInfo(0, 1, 0, 1, 'k', 'k', 0, 'n', 7, (), sys.argv[1])\n"
        "asking = shared_memory.first_giver([one], time.monotonic() + 20)\n"
        "print(event_loop.EventLoop().run(asking)[1])\n"
    )
    with offered() as name:
        ended = subprocess.run(
            [sys.executable, "-c", ask, name],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.stdout == "rank 0 (process 7 on n): it is a process of another user\n"


def test_ranks_that_cannot_hand_memory_over_are_on_hosts_of_their_own(
    new_job, monkeypatch
):
    job = new_job(4)
    ask = shared_memory.first_giver

    async def ask_through_a_wall(candidates, deadline):
        """Ranks 2 and 3 do not find ranks 0 and 1 where these offer their memory."""
        is_behind = len(candidates) >= 2
        found = [
            rank_at(NAME, one.rank) if is_behind and one.rank < 2 else one
            for one in candidates
        ]
        return await ask(found, deadline)

    monkeypatch.setattr(shared_memory, "first_giver", ask_through_a_wall)
    for rank in range(4):
        job.start(rank)
    meetings = job.end()
    assert [meeting.table.hosts() for meeting in meetings] == [[0, 0, 1, 1]] * 4
    assert [len(meeting.links) for meeting in meetings] == [4] * 4
    assert len(meetings[0].without_memory) == 2
    assert "rank 2" in meetings[0].without_memory[0]
    assert "Connection refused" in meetings[0].without_memory[0]
    for meeting in meetings:
        for stream in meeting.links.values():
            stream.close()


def test_what_is_offered_ends_with_the_meeting(new_job):
    job = new_job(2)
    for rank in range(2):
        job.start(rank)
    (table,) = {meeting.table for meeting in job.end()}
    assert [first_giver(one.memory)[0] for one in table.ranks] == [None, None]
