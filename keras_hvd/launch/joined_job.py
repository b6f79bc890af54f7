"""The ranks of a host that has joined a membership service.

They are started as it asks for it, and go on while it is started again. A signal makes
them leave at their next commit.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch import report
from keras_hvd.launch.job import CANNOT_START, TRY_AGAIN, Stage
from keras_hvd.launch.rank import Rank
from keras_hvd.launch.speaking_job import SpeakingJob
from keras_hvd.launch.talk import Talk
from keras_hvd.version import __version__
from keras_hvd.world.launchers.variables import RENDEZVOUS
from keras_hvd.world.rendezvous import connection, gathering, network_interfaces
from keras_hvd.world.rendezvous.connection import Call, RefusedError
from keras_hvd.world.rendezvous.event_loop import EventLoop
from keras_hvd.world.rendezvous.gathering import Group
from keras_hvd.world.rendezvous.messages import MessageError
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.renewal import Renewal, Words

_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# For ranks of another job.
_OF_OTHER_JOBS = {RENDEZVOUS, "KERAS_HVD_REQUIRE_SIZE"}

_AT_ITS_START = {
    "turn": 0,
    "is_here": False,
    "waits": None,
    "joined": "",
    "leaves": False,
}

# The service may be gone.
_END_SECONDS = 2.0


class Decider:
    """The connection with who decides which ranks run here.

    Args:
        hello: makes the first message.
        on_told: acts on a message, and also on `lost`, the end of the connection, and
            on `gone`, the end of all patience, with what is to be said of it.
    """

    place = ""
    """The other end, in messages."""

    def __init__(
        self,
        hello: Callable[[], dict[str, Any]],
        on_told: Callable[[dict[str, Any]], None],
    ):
        self.own_address = ""
        """This host's, as it is reached from there."""
        self.patience = 0.0
        """The seconds for which another one is waited for."""
        self._hello = hello
        self._on_told = on_told
        self._talk: Talk | None = None
        self.loop = EventLoop()
        """Hears it, and sends what was said."""
        self.loop.start(self._keep())

    def say(self, **message: Any) -> None:
        """Sends a message. Without a connection, the next hello has it."""
        if self._talk is not None:
            self._talk.say(**message)

    @property
    def is_silent(self) -> bool:
        """Whether all that was said is sent."""
        return self._talk is None or self._talk.is_silent

    def close(self) -> None:
        """Ends it, once all that was said is sent."""
        self.loop.wait(lambda: self.is_silent, time.monotonic() + _END_SECONDS)
        self.loop.close()

    async def _keep(self) -> None:
        """Hears it, until there is nothing more to hear."""
        raise NotImplementedError

    async def _hear(self, talk: Talk) -> str:
        """Acts on what is said, until the connection ends; returns why it did."""
        with contextlib.closing(talk):
            self._talk = talk
            talk.say(**self._hello())
            try:
                while True:
                    told = await talk.hear()
                    self.patience = told.get("patience", self.patience)
                    self._on_told(told)
            except (OSError, MessageError) as error:
                self._talk = None
                return getattr(error, "strerror", None) or str(error)


class _Service(Decider):
    """The connection with the service, or with the one that is started after it."""

    def __init__(self, group: Group, *arguments: Any):
        super().__init__(*arguments)
        self.place = f"the membership service at {group.place}"
        self.patience = group.timeout
        self._group = group

    async def _keep(self) -> None:
        while True:
            try:
                talk = await self._connect()
            except (RefusedError, RendezvousError) as error:
                self._on_told({"refused": str(error)})
                return
            except OSError as error:
                why = f"{error.strerror or error}, for {self.patience:g} s"
                self._on_told({"gone": f"error: {self.place} is not there: {why}"})
                return
            how = await self._hear(talk)
            until = f"another one is awaited for {self.patience:g} s"
            self._on_told({"lost": f"{self.place} is lost: {how}; {until}"})

    async def _connect(self) -> Talk:
        group = self._group
        call = Call(group.key, Purpose.MEMBERSHIP, 1, 0, group.sources(), group.tls)
        deadline = time.monotonic() + self.patience
        proven = await connection.connect(call, group.resolved, deadline)
        why = gathering.difference_of("the service", proven, "this host", group)
        if why:
            raise RendezvousError(why)
        # That may be an address that other hosts do not reach.
        name = proven.stream.socket.getsockname()[0]
        self.own_address = network_interfaces.reached_as([name], group.interfaces)
        return Talk(self.loop, proven)


class JoinedJob(SpeakingJob):
    """The part of a job that this host has."""

    def __init__(self, *arguments: Any, group: Group | None):
        super().__init__(*arguments)
        self._listen(self._node_ranks.job)
        self._name = ""  # this host's, in the job
        self._record: dict[str, Any] | None = None
        # What was asked for each rank, how those are that run, and others have ended.
        self._asked: dict[int, dict[str, Any]] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, dict[str, Any]] = {}
        # Where the ranks of the first job meet, if rank 0 is here.
        self._offered = ""
        self._is_leaving = False
        self._code: int | None = None
        self._decider = self._decider_of(group)
        events = selectors.EVENT_READ
        self._selector.register(self._decider.loop, events, self._decider.loop.poll)

    def _decider_of(self, group: Group | None) -> Decider:
        assert group is not None, "a service has an address"
        return _Service(group, self._hello, self._on_told)

    def _start_ranks(self) -> None:
        """Begins to reach who asks for them."""
        self._decider.loop.poll()

    def _hello(self) -> dict[str, Any]:
        return {
            "slots": 0 if self._is_leaving else self._options.ranks,
            "host_name": socket.gethostname(),
            "name": self._name,
            "record": self._record,
            "ranks": [*self._states.items()],
            "ends": [*self._ends.items()],
            "meets": self._offered if self._asking else None,
            "version": __version__,
        }

    # ---- What it is asked for

    def _on_told(self, told: dict[str, Any]) -> None:
        if self._code is not None:
            return
        match told:
            case {"name": name}:
                self._name = name
            case {"record": record}:
                self._record = record
            case {"start": number}:
                self._start_as_asked(number, told)
            case {"signal": [number, given]}:
                for one in self._ranks:
                    if one.number == number:
                        one.was_told = True
                        one.signal(signal.Signals(given))
            case {"tell": number, "word": word, "rest": rest}:
                self._note_told(number, word)
                self._tell(self._words.get(number), word, **rest)
            case {"at": place}:
                self._tell_where_to_meet(place)
            case {"fails": True} if self._ranks and self._stage == Stage.RUNNING:
                self._enter(Stage.FAILING, self._options.term_after)
            case {"stops": True} if self._ranks and self._stage < Stage.TERMINATING:
                self._terminate()
            case {"end": code, "why": why}:
                self._finish(code, why)
            case {"refused": why}:
                self._finish(TRY_AGAIN, f"error: {self._decider.place} refuses: {why}")
            case {"lost": why}:
                self._say(why)
            case {"gone": why}:
                self._finish(TRY_AGAIN, why)

    def _start_as_asked(self, number: int, told: dict[str, Any]) -> None:
        self._asked[number] = told
        self._states[number] = dict(_AT_ITS_START)
        self._ends.pop(number, None)
        try:
            self._start_rank(number, told["count"])
        except (OSError, RendezvousError, subprocess.SubprocessError) as error:
            self._on_no_start(number, error)

    def _on_no_start(self, number: int, error: Exception) -> None:
        assert isinstance(error, OSError), "khvdrun has looked at all else"
        why = f"cannot be started: {self._what_failed(error)}: {error.strerror}"
        self._tell_of_end(number, CANNOT_START, why)

    def _environment(self, here: int) -> dict[str, str]:
        given = self._variables
        return {
            **{name: given[name] for name in given if name not in _OF_OTHER_JOBS},
            **self._asked[here]["variables"],
            **self._renewal(here, self._decider.own_address),
        }

    def _renewal(self, here: int, address: str) -> dict[str, str]:
        """What the rank is told of later jobs, as a variable."""
        told = self._asked[here]["renewal"]
        return Renewal(self._node_ranks.job, address=address, **told).variables()

    def _cores_of(self, here: int) -> set[int] | None:
        return super()._cores_of(self._asked[here]["renewal"]["slot"])

    def _note_told(self, number: int, word: str) -> None:
        """Keeps what another service would need to know."""
        state = self._states.get(number, {})
        if word == "join":
            state["joined"] = ""
        elif word == "go":
            state["waits"] = None
        elif word == "leave":
            state["leaves"] = True

    # ---- What ranks say, and their ends

    def _on_message(self, words: Words, told: dict[str, Any]) -> None:
        if told["word"] == "meets":
            self._asking.append(words)
            self._offered = self._offered or told["at"]
            self._decider.say(meets=told["at"])
            return
        if told["word"] == "here":
            self._has_joined = True
            if told.get("number") in self._states:
                self._words[told["number"]] = words
        number = self._number_of(words)
        if number is None:
            return
        match told:
            case {"word": "here", "turn": turn}:
                self._states[number] |= {"is_here": True, "turn": turn}
            case {"word": "waits", "at": place, "has_state": has_state}:
                waits = [place, has_state]
                self._states[number] |= {"waits": waits, "joined": ""}
            case {"word": "joined", "job": job}:
                self._states[number]["joined"] = job
        self._decider.say(said=number, message=told)

    def _on_gone(self, number: int) -> None:
        self._states[number] |= {"is_here": False, "waits": None, "joined": ""}
        self._decider.say(gone=number)

    def _on_end(self, ended: Rank, status: int) -> None:
        if not self._has_joined:
            self._hear_what_was_said()
        ended.status = status
        ended.was_told |= self._stage >= Stage.TERMINATING
        for stream in ended.streams:
            # Its last words may not have been read so far.
            if stream in self._streams:
                stream.pump()
        self._words.pop(ended.number, None)
        self._ranks.remove(ended)
        ended.end_rest()
        self._tell_of_end(
            ended.number,
            report.exit_code(ended),
            report.describe(ended),
            status,
            was_told=ended.was_told,
            blames_a_peer=report.blames_a_peer(ended.stderr.lines()),
        )
        if self._ranks:
            return
        if not self._is_over:
            self._stage, self._deadline = Stage.RUNNING, None
        if self._is_leaving:
            self._finish(0)

    def _tell_of_end(
        self,
        number: int,
        code: int,
        what: str,
        status: int = 0,
        was_told: bool = False,
        blames_a_peer: bool = False,
    ) -> None:
        del self._states[number]
        how = {"code": code, "what": what, "status": status, "was_told": was_told}
        told = self._ends[number] = {**how, "blames_a_peer": blames_a_peer}
        self._decider.say(ended=number, **told)

    # ---- Signals, times and the end

    def _forward(self, number: signal.Signals) -> None:
        if number not in _TO_LEAVE:
            super()._forward(number)
            return
        if self._is_leaving:
            # A process may get the others twice, as from a terminal that closes.
            if number == signal.SIGINT:
                self._code = 128 + number
                self._kill()
            return
        self._is_leaving = True
        self._decider.say(leaves=True)
        how = ""
        if self._ranks:
            how = ": its ranks do so at their next commit. SIGINT ends them now"
        self._say(f"this host leaves the job, since khvdrun got {number.name}{how}")
        if not self._ranks:
            self._finish(0)

    def _times(self) -> list[float | None]:
        return [*super()._times(), self._decider.loop.next_time]

    def _patience(self) -> float | None:
        patience = super()._patience()
        return None if patience == math.inf else patience

    def _act_at(self, now: float) -> None:
        super()._act_at(now)
        self._decider.loop.poll()

    @property
    def _is_over(self) -> bool:
        return self._code is not None or self._is_orphan

    @property
    def _have_ended(self) -> bool:
        return self._is_over and super()._have_ended

    def _on_children(self) -> None:
        super()._on_children()
        # Others may be started.
        self._has_children |= not self._is_over

    def _finish(self, code: int, why: str = "") -> None:
        self._code = code
        if why:
            self._say(why)
        if self._ranks:
            self._terminate()
        # Without children no SIGCHLD comes.
        self._on_children()

    def _conclude(self) -> int:
        self._selector.unregister(self._decider.loop)
        self._decider.close()
        if self._is_orphan:
            self._say("khvdrun itself was killed, and all ranks with it")
            return 128 + signal.SIGKILL
        assert self._code is not None, "or it would not have ended"
        return self._code
