"""A job that goes on with the ranks that are left after others have failed.

Its script calls `keras_hvd.elastic.run`. A rank whose job has failed asks here for its
place in the next one, so it does not matter which rank has failed. Ranks that have
failed may be started again, and others on hosts that come: such a new one waits here
until those of the job make room for it, and all get places in another job. Ranks on
other hosts are started there, by a process that is connected with this one.

Who is in which job is decided in `launch/membership.py`: here are its processes,
connections and times.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import selectors
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import settings
from keras_hvd.launch import pipes, report
from keras_hvd.launch.discovery import Discovery
from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.job import Stage
from keras_hvd.launch.joined_hosts import JoinedHosts
from keras_hvd.launch.membership import Kill, Membership, Say, Start, Tell
from keras_hvd.launch.other_hosts import OtherHosts
from keras_hvd.launch.other_launchers import travels
from keras_hvd.launch.output import Tail
from keras_hvd.launch.rank import Rank
from keras_hvd.launch.reached_hosts import SSH, ReachedHosts
from keras_hvd.launch.slots import Slots
from keras_hvd.launch.speaking_job import SpeakingJob
from keras_hvd.launch.status import JobNow, RankEnd
from keras_hvd.world.rendezvous import network_interfaces, secret
from keras_hvd.world.renewal import Renewal, Words


class ElasticJob(SpeakingJob):
    """A job that ends once fewer ranks are left than its options want."""

    def __init__(self, *arguments: Any, joined: JoinedHosts | None = None):
        super().__init__(*arguments)
        self._joined_hosts = joined
        options, job = self._options, self._node_ranks.job
        self._hosts: OtherHosts[Any] = joined or OtherHosts()
        if options.hosts and joined is None:
            agent = options.launch_agent or (*SSH, *options.ssh_options)
            self._hosts = ReachedHosts(agent, {**os.environ, **options.variables})
        self._discovery: Discovery | None = None
        if options.discovery_script:
            self._discovery = Discovery(options.discovery_script, options.slots)
        own = HostSlots("", options.most_ranks or options.ranks)
        self._slots = Slots(options.hosts or [own])
        self._membership = Membership.of_options(
            *(options, job, self._slots, time.monotonic),
            lists_change=self._discovery is not None or joined is not None,
            meets=bool(options.hosts),
        )
        # The last of each number that was in the job.
        self._lost: dict[int, Rank] = {}
        # The number of its present generation, and its ranks, also those that have
        # ended since.
        self._number = 1
        self._generation: list[Rank] = []
        # What is said of changes, and the last words of ranks that have ended.
        self._said: list[tuple[float, str, str]] = []
        self._ended_ones: list[Tail] = []
        # Where the ranks of the first job meet.
        self._meeting_place = ""
        # Where the output of ranks on other hosts is to be written: by a rank's number,
        # the count of its starts, and the descriptor.
        self._ends: dict[tuple[int, ...], int] = {}
        self._listen(job)
        if joined is not None:
            joined.on_change = self._on_hosts
        self._hosts.on_told, self._hosts.on_lost = self._on_told, self._on_lost
        loop = self._hosts.loop
        self._selector.register(loop, selectors.EVENT_READ, self._poll_hosts)

    # ---- The environment of ranks

    def _environment(self, here: int) -> dict[str, str]:
        variables, told = self._membership.start_of(here)
        renewal = Renewal(self._node_ranks.job, address=self._address(here), **told)
        given = super()._environment(here)
        del given["KERAS_HVD_REQUIRE_SIZE"]
        environment = {**given, **variables, **renewal.variables()}
        is_here = self._slots.is_here(here)
        if self._joined_hosts is not None:
            # All hosts have it, and it is sent to none.
            for name in (secret.VARIABLE, secret.FILE_VARIABLE):
                if name in self._variables and is_here:
                    environment[name] = self._variables[name]
        elif self._options.hosts:
            environment[secret.VARIABLE] = self._secret
        if not is_here:
            for name in self._of_this_host:
                del environment[name]
        return environment

    def _address(self, here: int) -> str:
        """Of this host, for a rank that others meet there; "" without others."""
        if not self._options.hosts or not self._slots.is_here(here):
            return ""
        name = self._slots[here].host
        if self._joined_hosts is not None:
            name = self._joined_hosts.place.host
        names = settings.network_interfaces({**os.environ, **self._options.variables})
        return network_interfaces.reached_as([name], names)

    @functools.cached_property
    def _secret(self) -> str:
        return secrets.token_hex(32)

    @property
    def _count_here(self) -> int:
        first = next((n for n in self._slots if self._slots.is_here(n)), None)
        return 1 if first is None else self._slots.count_at(first)

    def _cores_of(self, here: int) -> set[int] | None:
        # A host may have had more slots before.
        return super()._cores_of(self._slots[here].number % self._count_here)

    def _begin_rank(self, here: int, start: int, ends: tuple[int, int, int]) -> int:
        host, options = self._slots[here].host, self._options
        if self._slots.is_here(here):
            return super()._begin_rank(here, start, ends)
        for descriptor in (1, 2):
            end = self._ends[here, start, descriptor] = os.dup(ends[descriptor])
            os.set_blocking(end, False)
        variables = self._environment(here)
        _, renewal = self._membership.start_of(here)
        self._hosts.start(
            *(host, here, end),
            count=start,
            host=host,
            command=options.command,
            directory=os.getcwd(),
            variables={name: variables[name] for name in variables if travels(name)},
            renewal=renewal,
            ranks_here=self._slots.count_at(here),
            is_bound=options.bind_to == "cores",
            interfaces=settings.network_interfaces({**os.environ, **options.variables}),
        )
        self._note(f"rank {here} is on {host}")
        return 0

    def _start_rank(self, here: int, start: int = 1) -> None:
        super()._start_rank(here, start)
        if not self._slots.is_here(here):
            host = self._ranks[-1].host = self._slots[here].host
            self._ranks[-1].send = lambda n: self._hosts.ask(host, signal=[here, n])

    # ---- Times, signals and ends

    def _times(self) -> list[float | None]:
        asks_at = None
        if self._discovery is not None and self._membership.may_start:
            asks_at = self._discovery.next_time
        times = [self._membership.next_time, self._hosts.loop.next_time]
        known = [each for each in times if each != math.inf]
        return [*super()._times(), asks_at, *known]

    def _act_at(self, now: float) -> None:
        super()._act_at(now)
        self._membership.act()
        self._follow()
        if self._membership.may_start:
            self._discover(now)
        self._poll_hosts()

    def _enter(self, stage: Stage, patience: float) -> None:
        super()._enter(stage, patience)
        self._membership.close()
        self._follow()

    def _forward(self, number: signal.Signals) -> None:
        super()._forward(number)
        if self._interrupted_by is not None:
            self._membership.interrupt(self._interrupted_by.name)
            self._follow()

    def _on_joined(self) -> None:
        super()._on_joined()
        self._membership.note_met()

    def _on_end(self, ended: Rank, status: int) -> None:
        if not self._has_joined:
            self._hear_what_was_said()
        ended.status, ended.wake = status, self._wake
        self._words.pop(ended.number, None)
        what = f"{ended.name} {report.describe(ended)}"
        was_member = ended.number in self._membership.members
        goes_on = self._membership.note_end(ended.number, what, status != 0)
        if not goes_on and status != 0 and self._is_undisturbed:
            # The report looks for the first failure of all.
            lost = self._membership.lost
            self._ranks += [self._lost.pop(each) for each in lost]
        self._follow()
        if not goes_on:
            super()._on_end(ended, status)
            return
        self._ranks.remove(ended)
        self._ended_ones.append(ended.stderr)
        if was_member:
            self._lost[ended.number] = ended
        ended.end_rest()

    def _on_children(self) -> None:
        super()._on_children()
        # Ranks on other hosts are none.
        self._has_children |= not super()._have_ended

    @property
    def _have_ended(self) -> bool:
        return super()._have_ended and not self._hosts.reached

    def _kill(self) -> None:
        super()._kill()
        for one in [*self._ranks]:
            if one.host and one.status is None:
                self._on_end(one, signal.SIGKILL)
        self._on_children()

    @property
    def _is_undisturbed(self) -> bool:
        return self._stage == Stage.RUNNING and self._interrupted_by is None

    # ---- What is decided

    def _follow(self) -> None:
        """Does what the state machine has decided."""
        # Who hears that the job goes on may ask for its status at once.
        if self._number != self._membership.generation:
            self._note_generation()
        for act in self._membership.take_acts():
            match act:
                case Start(number, count):
                    self._start_one(number, count)
                case Kill(number, why):
                    self._kill_one(number, why)
                case Tell(number, word, rest):
                    if word == "join":
                        self._add_recording(rest)
                    # One of these reaches it, or it has gone.
                    self._tell(self._words.get(number), word, **rest)
                    host = self._slots[number].host
                    self._hosts.ask(host, tell=number, word=word, rest=rest)
                case Say(line):
                    self._say(line)
                    self._said.append((time.time(), "change", line))

    def _start_one(self, number: int, count: int) -> None:
        try:
            self._start_rank(number, count)
        except OSError as error:
            self._say(f"rank {number} {self._what_failed(error)}: {error.strerror}")
            self._membership.note_no_start(number)

    def _kill_one(self, number: int, why: str) -> None:
        for one in self._ranks:
            if one.number == number and one.status is None:
                one.was_told = True
                self._say(f"{one.name} {why}: it is killed")
                one.signal(signal.SIGKILL)

    # ---- The recording of each job

    def _start(self) -> None:
        super()._start()
        self._generation = [*self._ranks]
        # Now: later, this process may have threads.
        self._poll_hosts()

    def _add_recording(self, place: dict[str, Any]) -> None:
        """Adds the folder for its recording to a place in another job."""
        if self._recorded is not None:
            size = int(place["variables"]["KERAS_HVD_SIZE"])
            folder = self._recorded.folder_of(place["job"], size)
            place["variables"]["KERAS_HVD_REPORT"] = str(folder)

    def _note_generation(self) -> None:
        self._number = self._membership.generation
        running = {one.number: one for one in self._ranks}
        members = self._membership.members
        self._generation = [running[each] for each in members if each in running]
        if self._recorded is not None:
            self._recorded.note_generation(self._membership.job, self._number)

    def _now(self) -> JobNow:
        now = super()._now()
        of_job = {"generation": self._number}
        return JobNow(now.folder, len(now.ends), now.ends, of_job)

    def _rank_ends(self) -> list[RankEnd]:
        """Those of the present generation, by their ranks there."""
        return [
            RankEnd(
                *(rank, report.state(one), report.last_error(one)),
                {"started_as": one.number, **({"host": one.host} if one.host else {})},
            )
            for rank, one in enumerate(self._generation)
        ]

    def _events(self) -> Iterable[tuple[float, str, str]]:
        return [*super()._events(), *self._said]

    def _last_words(self) -> Iterable[Tail]:
        return [*self._ended_ones, *super()._last_words()]

    # ---- Hosts that come and go

    def _poll_hosts(self) -> None:
        try:
            self._hosts.loop.poll()
        except RendezvousError as error:
            self._say(f"no other host can join: {error}")

    def _on_hosts(self, named: Sequence[HostSlots]) -> None:
        self._membership.note_hosts(named)
        self._follow()

    def _conclude(self) -> int:
        code = super()._conclude()
        if self._joined_hosts is not None:
            self._selector.unregister(self._joined_hosts.loop)
            self._joined_hosts.end(code)
            self._joined_hosts, self._hosts = None, OtherHosts()
        return code

    def _discover(self, now: float) -> None:
        discovery = self._discovery
        if discovery is None or discovery.next_time is None:
            return
        if now < discovery.next_time:
            return
        if discovery.is_asking:
            discovery.stop()
            return
        try:
            discovery.start()
        except OSError as error:
            self._say(f"--host-discovery-script cannot start: {error.strerror}")
            self._discovery = None
            return
        self._selector.register(discovery, selectors.EVENT_READ, self._on_answer)

    def _on_answer(self) -> None:
        discovery = self._discovery
        # It may just have ended.
        if discovery is not None and discovery.is_asking and not discovery.hear():
            self._selector.unregister(discovery)

    def _on_end_of_other(self, process: int, status: int) -> None:
        discovery = self._discovery
        if discovery is None or not discovery.is_of(process):
            return
        if discovery.fileno() in self._selector.get_map():
            discovery.hear()
            self._selector.unregister(discovery)
        named, why = discovery.end(status)
        if why:
            self._say(f"--host-discovery-script: {why}. The last list holds")
        if named is not None:
            self._on_hosts(named)

    def _on_host(self, host: str) -> list[Rank]:
        """The ranks that run on another host; with "", on this one."""
        return [one for one in self._ranks if one.host == host and one.status is None]

    async def _on_told(self, host: str, told: dict[str, Any]) -> None:
        """Acts on what another host says."""
        match told:
            case {"output": [*of], "content": str(content)}:
                await self._show(host, tuple(of), content.encode("latin-1"))
            case {"text": str(text)}:
                for one in self._on_host(host)[:1]:
                    self._show_text(one, text.encode("latin-1"))
            case {"meets": str(place)}:
                self._on_meeting(place)
        for one in self._on_host(host):
            match told:
                case {"said": one.number, "message": message}:
                    self._on_said(one.number, message)
                case {"gone": one.number}:
                    self._membership.note_gone(one.number)
                case {"ended": one.number, "status": int(status)}:
                    self._on_end(one, status)
                    self._on_children()

    async def _show(self, host: str, of: tuple[int, ...], content: bytes) -> None:
        """Passes on a rank's output, whose end is an empty one."""
        if of not in self._ends:
            return
        try:
            await pipes.write(self._ends[of], content)
        except OSError:
            self._hosts.ask(host, close=of)
            content = b""
        if not content:
            os.close(self._ends.pop(of))

    def _show_text(self, one: Rank, text: bytes) -> None:
        """Shows what is to be said of a rank on another host, as if it said so."""
        end = self._ends.get((one.number, one.start, 2))
        # Nobody may read it.
        with contextlib.suppress(OSError):
            if end is not None:
                os.write(end, text)

    def _on_lost(self, host: str, why: str, status: int) -> None:
        """Ends the ranks of another host that is gone."""
        for one in self._on_host(host) if host else ():
            self._show_text(one, f"khvdrun: {why}\n".encode() if why else b"")
            self._on_end(one, status)
        self._on_children()

    # ---- Words of ranks

    def _on_message(self, words: Words, told: dict[str, Any]) -> None:
        if told["word"] == "meets":
            self._asking.append(words)
            self._on_meeting(told["at"])
            return
        number = told.get("number")
        if told["word"] == "here" and any(one.number == number for one in self._ranks):
            self._words[told["number"]] = words
        if (number := self._number_of(words)) is not None:
            self._on_said(number, told)

    def _on_said(self, number: int, told: dict[str, Any]) -> None:
        self._has_joined |= told["word"] == "here"
        self._membership.note_word(number, told)
        self._follow()

    def _on_gone(self, number: int) -> None:
        self._membership.note_gone(number)

    def _on_meeting(self, place: str) -> None:
        """Tells those of the first job where rank 0 is."""
        self._meeting_place = self._meeting_place or place
        if self._meeting_place:
            self._tell_where_to_meet(self._meeting_place)
            self._hosts.ask_all(at=self._meeting_place)
