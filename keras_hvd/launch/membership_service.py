"""The membership service: it decides who is in an elastic job, and starts no rank.

Each host has a `khvdrun` of its own, which joins the service, starts the ranks that it
is asked for, and passes on what they say. The service may end and be started again at
the same address: the hosts keep its last record, and tell how their ranks are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import socket
import sys
import time
import uuid
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.job import TRY_AGAIN
from keras_hvd.launch.membership import Kill, Membership, Say, Start, Tell
from keras_hvd.launch.options import Options
from keras_hvd.launch.slots import Slots
from keras_hvd.launch.talk import Talk
from keras_hvd.world.rendezvous import connection, event_loop, gathering
from keras_hvd.world.rendezvous.connection import ProvenConnection
from keras_hvd.world.rendezvous.event_loop import READ, EventLoop
from keras_hvd.world.rendezvous.gathering import Group
from keras_hvd.world.rendezvous.listener import Listener
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.nodes import NotMetError
from keras_hvd.world.rendezvous.proof import Hello, Purpose

# A host that has a job tries to reach the next service twice a second, and must come
# before another job begins.
_FIRST_SECONDS = 1.5

# The hosts may be gone.
_END_SECONDS = 2.0

# Those of the job before that have not come back by then are lost.
_RETURN_SECONDS = 10.0


def run(options: Options, group: Group) -> int:
    """Serves a job, and returns its exit code. Raises NotMetError if it cannot."""
    loop = EventLoop()
    try:
        return loop.run(_Service(loop, options, group).run())
    except RendezvousError as error:
        raise NotMetError(str(error)) from None


@dataclasses.dataclass(eq=False)
class _Host:
    """A host, as long as it is connected."""

    talk: Talk
    slots: int
    machine: str
    name: str  # in the job; "" before
    told: dict[str, Any]
    ranks: set[int] = dataclasses.field(default_factory=set)  # those that run
    # What is to be acted on once there is a job.
    heard: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Failure:
    """How a rank has failed."""

    was_told: bool
    blames_a_peer: bool
    code: int
    what: str = ""


_LOST = _Failure(was_told=False, blames_a_peer=False, code=TRY_AGAIN)


class _Service:
    def __init__(self, loop: EventLoop, options: Options, group: Group):
        self._loop = loop
        self._options = options
        self._group = group
        proving = connection.proving(group.key, group.tls, _is_expected)
        self._listener = Listener(loop, proving, self._welcome)
        self._hosts: list[_Host] = []
        self._named = 0  # hosts so far
        self._may_begin = False
        self._job = ""
        self._slots: Slots
        self._membership: Membership | None = None
        self._meeting_place = ""
        # The last one, by which another service may go on; before the job is taken up,
        # that of the service before.
        self._record: dict[str, Any] = {"version": 0}
        self._is_ending = False
        self._interrupted_by: signal.Signals | None = None
        self._failures: list[_Failure] = []
        self._code: int | None = None

    async def run(self) -> int:
        deadline = time.monotonic() + self._group.timeout
        for each in await gathering.listen_for(self._group, deadline):
            self._listener.start(each)
        self._waits_to_begin = self._loop.start(self._begin_after(_FIRST_SECONDS))
        self._loop.start(self._heed_interrupts())
        _say(f"the membership service is at {self._group.place}")
        while self._code is None:
            at = self._next_time
            await event_loop.until(functools.partial(self._has_news, at), at)
            if self._membership is not None:
                self._follow()
        self._listener.close()
        why = self._why(self._code)
        if why:
            _say(why)
        self._say_to_all(end=self._code, why=why)
        deadline = time.monotonic() + _END_SECONDS
        await event_loop.until(lambda: not self._hosts, deadline)
        return self._code

    @property
    def _next_time(self) -> float:
        return math.inf if self._membership is None else self._membership.next_time

    def _has_news(self, next_time: float) -> bool:
        return self._code is not None or self._next_time != next_time

    # ---- Begin and end of the job

    async def _begin_after(self, seconds: float) -> None:
        await event_loop.pause(seconds)
        self._may_begin = True
        self._begin_if_enough()

    def _begin_if_enough(self) -> None:
        if self._membership is not None:
            return
        if self._record["version"]:
            back = {each.name for each in self._hosts}
            if self._may_begin or back.issuperset(self._record["hosts"]):
                self._resume()
            return
        if not self._may_begin:
            return
        ranks = self._options.ranks
        if sum(each.slots for each in self._hosts) < ranks:
            return
        self._job = f"khvdrun-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        self._slots = Slots(self._names())
        self._membership = self._new_membership()
        _say(f"the job begins with {_counted(ranks, 'rank')}")
        self._tell_record()
        for number in range(ranks):
            self._start_one(number, 1)

    def _new_membership(self) -> Membership:
        given = self._options, self._job, self._slots, time.monotonic
        return Membership.of_options(*given, lists_change=True, meets=True)

    def _note_end(self, number: int, failure: _Failure | None, what: str) -> None:
        membership = self._membership
        assert membership is not None, "or no rank would have been started"
        what = f"{self._name_of(number)} {what}"
        if membership.note_end(number, what, failure is not None):
            return
        self._is_ending = True
        if failure is None:
            return
        if not self._failures:
            self._say_to_all(fails=True)
            membership.close()
        self._failures.append(dataclasses.replace(failure, what=what))

    def _why(self, code: int) -> str:
        if self._interrupted_by is not None:
            return f"the job was ended by {self._interrupted_by.name}"
        if code == 0:
            return ""
        return f"the job has failed: first, {self._first_failure.what}"

    @property
    def _first_failure(self) -> _Failure:
        # The first to be heard of may have failed because another one has.
        return min(self._failures, key=lambda each: (each.was_told, each.blames_a_peer))

    def _conclude_if_all_have_ended(self) -> None:
        if not self._is_ending or any(each.ranks for each in self._hosts):
            return
        if self._interrupted_by is not None:
            self._code = 128 + self._interrupted_by
        else:
            self._code = self._first_failure.code if self._failures else 0

    async def _heed_interrupts(self) -> None:
        arriving, written = socket.socketpair()
        for end in (arriving, written):
            end.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        # Others end this process alone, and nohup leaves this one ignored.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: None)
        while await event_loop.ready(arriving, READ, math.inf):
            arriving.recv(1)
            if self._membership is None or self._interrupted_by is not None:
                self._code = 128 + signal.SIGINT
            self._interrupted_by = signal.SIGINT
            if self._membership is not None:
                self._membership.interrupt("SIGINT")
                self._say_to_all(stops=True)
                self._follow()

    # ---- What is decided

    def _follow(self) -> None:
        """Does what the state machine decides by now."""
        membership = self._membership
        assert membership is not None, "or nothing would be decided"
        membership.act()
        self._tell_record()
        for act in membership.take_acts():
            match act:
                case Start(number, count):
                    self._start_one(number, count)
                case Kill(number, why):
                    _say(f"{self._name_of(number)} {why}: it is killed")
                    self._say_to(number, signal=[number, signal.SIGKILL])
                case Tell(number, word, rest):
                    self._say_to(number, tell=number, word=word, rest=rest)
                case Say(line):
                    _say(line)
        self._conclude_if_all_have_ended()

    def _start_one(self, number: int, count: int) -> None:
        membership, host = self._membership, self._host_of(number)
        assert membership is not None, "it has decided so"
        if host is None:
            # It has just gone.
            membership.note_no_start(number)
            return
        variables, renewal = membership.start_of(number)
        host.ranks.add(number)
        host.talk.say(start=number, count=count, variables=variables, renewal=renewal)

    def _tell_record(self) -> None:
        """Lets the hosts keep what another service needs, before they act on it."""
        assert self._membership is not None, "or there would be nothing to keep"
        record = {
            "version": self._record["version"],
            "job": self._job,
            "named": self._named,
            "hosts": [each.name for each in self._hosts],
            "slots": self._slots.known,
            "meeting_place": self._meeting_place,
            "membership": self._membership.record(),
        }
        if record != self._record:
            self._record = {**record, "version": record["version"] + 1}
            self._say_to_all(record=self._record)

    def _host_of(self, number: int) -> _Host | None:
        name = self._slots[number].host
        return next((each for each in self._hosts if each.name == name), None)

    def _name_of(self, number: int) -> str:
        return f"rank {number} (on {self._slots[number].host})"

    def _say_to(self, number: int, **message: Any) -> None:
        host = self._host_of(number)
        if host is not None:
            host.talk.say(**message)

    def _say_to_all(self, **message: Any) -> None:
        for host in self._hosts:
            host.talk.say(**message)

    # ---- Hosts

    def _names(self) -> list[HostSlots]:
        """The hosts that have slots. Those that are new get names."""
        for host in self._hosts:
            if not host.name:
                host.name = f"node{self._named}@{host.machine}"
                self._named += 1
                host.talk.say(name=host.name)
        return [HostSlots(each.name, each.slots) for each in self._hosts if each.slots]

    def _note_hosts(self) -> None:
        if self._membership is None:
            self._begin_if_enough()
        else:
            self._membership.note_hosts(self._names())
            self._follow()

    async def _welcome(self, proven: ProvenConnection) -> None:
        # A host that is lost needs to know nothing.
        lost = contextlib.suppress(OSError, MessageError)
        with contextlib.closing(proven.stream), lost:
            its = f"a host ({proven.host})"
            if gathering.difference_of(its, proven, "the service", self._group):
                # The other end finds the same, and says so.
                return
            with contextlib.closing(Talk(self._loop, proven)) as talk:
                await self._serve(talk)

    async def _serve(self, talk: Talk) -> None:
        told = await talk.hear()
        why = self._why_not_back(told["record"])
        if why:
            talk.say(refused=why)
            # It ends the connection.
            await talk.hear()
            return
        host = _Host(talk, told["slots"], told["host_name"], told["name"], told)
        self._hosts.append(host)
        _say(f"{host.machine} has joined, with {_counted(host.slots, 'slot')}")
        talk.say(patience=self._options.elastic_timeout)
        try:
            self._note_hosts()
            if told["meets"] is not None:
                self._on_heard(host, {"meets": told["meets"]})
            while True:
                self._on_heard(host, await talk.hear())
        finally:
            self._hosts.remove(host)
            if self._code is None:
                for number in sorted(host.ranks):
                    self._note_end(number, _LOST, "was lost with its host")
                self._note_hosts()

    def _on_heard(self, host: _Host, told: dict[str, Any]) -> None:
        membership = self._membership
        match told:
            case {"alive": True}:
                return
            case {"leaves": True}:
                host.slots = 0
                self._note_hosts()
                return
        if membership is None:
            host.heard.append(told)
            return
        match told:
            case {"meets": place}:
                self._meeting_place = self._meeting_place or place
                if self._meeting_place:
                    self._say_to_all(at=self._meeting_place)
            case {"said": number, "message": message} if number in host.ranks:
                membership.note_word(number, message)
            case {"gone": number} if number in host.ranks:
                membership.note_gone(number)
            case {"ended": number, "what": what} if number in host.ranks:
                host.ranks.remove(number)
                self._note_end(number, _failure_of(told), what)
        self._follow()

    # ---- Another service before

    def _why_not_back(self, record: dict[str, Any] | None) -> str:
        """Takes the record of a host that comes from the service before this one.

        Returns why that host cannot join; "" if it can.
        """
        if record is None:
            return ""
        if record["job"] != (self._job or record["job"]):
            return "it serves another job"
        if self._membership is not None:
            return "the job goes on without this host, which was lost"
        if not self._job:
            self._job = record["job"]
            _say(f"hosts of the job {self._job} come back")
            self._loop.cancel(self._waits_to_begin)
            self._may_begin = False
            self._loop.start(self._begin_after(_RETURN_SECONDS))
        if record["version"] > self._record["version"]:
            self._record = record
        return ""

    def _resume(self) -> None:
        """Takes up the job of the record, with the ranks that hosts tell of."""
        record = self._record
        ranks: dict[int, dict[str, Any]] = {}
        ends: dict[int, dict[str, Any]] = {}
        self._named, self._meeting_place = record["named"], record["meeting_place"]
        for host in self._hosts:
            of_host = dict(host.told["ranks"])
            host.ranks.update(of_host)
            ranks |= of_host
            ends |= dict(host.told["ends"])
        self._slots = Slots(self._names(), record["slots"])
        membership = self._membership = self._new_membership()
        members = record["membership"]["members"]
        _say(f"the job goes on with this service, and {_counted(len(ranks), 'rank')}")
        membership.resume(record["membership"], ranks)
        for number in members:
            if number in ends:
                told = ends[number]
                self._note_end(number, _failure_of(told), told["what"])
            elif number not in ranks:
                self._note_end(number, _LOST, "was lost with its host")
        self._follow()
        for host in [*self._hosts]:
            for told in host.heard:
                self._on_heard(host, told)
            host.heard.clear()


def _failure_of(told: dict[str, Any]) -> _Failure | None:
    """How a rank has failed, of which a host tells; None if it has not."""
    if told["code"] == 0:
        return None
    return _Failure(told["was_told"], told["blames_a_peer"], told["code"])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _is_expected(theirs: Hello) -> bool:
    return theirs.receiver == 0 and theirs.purpose == Purpose.MEMBERSHIP


def _say(text: str) -> None:
    # Its reader may be gone.
    with contextlib.suppress(OSError):
        print(f"khvdrun: {text}", file=sys.stderr, flush=True)
