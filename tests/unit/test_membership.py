"""Who is in which elastic job: right after any order of deaths, words, hosts and times.

Ranks are played here, as `keras_hvd/elastic` makes them behave. A schedule is a random
order of all that may happen next, from a seed: --schedules says how many there are.
"""

import collections
import dataclasses
import itertools
import math
import random

import pytest

from keras_hvd.launch.hosts import HostSlots
from keras_hvd.launch.membership import Kill, Limits, Membership, Say, Start, Tell
from keras_hvd.launch.slots import Slots
from keras_hvd.launch.starts import Starts

TIMEOUT = 600.0
# Far more than any schedule needs.
MOST_EVENTS = 5_000


@dataclasses.dataclass(eq=False)
class Rank:
    """A process.

    It is in `job` while it trains, and in none while it waits.
    """

    number: int
    is_new: bool
    does: str = "loads"  # trains, has left, waits, joins, has joined, ends, has ended
    job: str = ""
    joins: str = ""  # the job that it is to join
    others_wait: bool = False
    is_done: bool = False
    is_stopped: bool = False
    has_failed: bool = False
    was_killed: bool = False
    has_state: bool = False
    is_odd: bool = False  # nobody can join a job with it, such as another version's
    turn: int = 1  # the function that it calls, or has called
    words: collections.deque = dataclasses.field(default_factory=collections.deque)
    # What it says, which khvdrun has not read; None once the connection is over.
    said: collections.deque | None = dataclasses.field(
        default_factory=collections.deque
    )

    # What its host tells a service that is started again.
    host_knows: dict = dataclasses.field(
        default_factory=lambda: {
            "turn": 0,
            "is_here": False,
            "waits": None,
            "joined": "",
            "leaves": False,
        }
    )

    @property
    def is_alive(self):
        return self.does not in ("ends", "has ended")

    def host_hears(self, word, *rest):
        """As `launch/joined_job.py` keeps it."""
        if word == "note_here":
            self.host_knows |= {"is_here": True, "turn": rest[0]}
        elif word == "note_waits":
            self.host_knows |= {"waits": rest, "joined": ""}
        elif word == "note_joined":
            self.host_knows["joined"] = rest[0]
        elif word == "note_gone":
            self.host_knows |= {"is_here": False, "waits": None, "joined": ""}

    def host_tells(self, word):
        if word == "join":
            self.host_knows["joined"] = ""
        elif word == "go":
            self.host_knows["waits"] = None
        elif word == "leave":
            self.host_knows["leaves"] = True


class Schedule:
    """One job, and all that happens to it."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        self.now = 0.0
        self.hosts = {
            f"host{n}": rng.randint(1, 3) for n in range(rng.choice((1, 1, 2, 3)))
        }
        self.listed = dict(self.hosts)
        self.slots = Slots([HostSlots(*each) for each in self.hosts.items()])
        count = len([*self.slots])
        ranks = rng.randint(1, count)
        least = rng.choice((1, rng.randint(1, ranks)))
        self.is_discovered = rng.random() < 0.5
        most = rng.randint(ranks, count + (2 if self.is_discovered else 0))
        self.limits = Limits(least, most, TIMEOUT, rng.choice((None, None, 1, 3)))
        self.cooldown = rng.choice((None, (0.0, 0.0), (1.0, 8.0)))
        self.may_grow = self.is_discovered or count > ranks
        self.meets = rng.random() < 0.5
        self.job = self.new_job(ranks)
        self.keep_record()
        # A service alone learns of its hosts as they come.
        self.restarts_left = rng.choice((0, 1, 5)) if self.is_discovered else 0
        self.ranks = [Rank(number, is_new=False) for number in range(ranks)]
        self.places = {"job": {*self.ranks}}
        self.steps_left = rng.randint(1, 20)
        self.steps_of_second = rng.choice((math.nan, self.steps_left // 2))
        self.mishaps_left = rng.choice((0, 1, 3, 10, 30))
        self.is_failing = False
        self.ends_before_joining = collections.Counter()
        # Hosts without a rank, until when, and how often that was so.
        self.left_out = {}
        self.times_left_out = collections.Counter()
        self.log = []

    def clock(self):
        return self.now

    def new_job(self, ranks):
        self.starts = Starts(self.cooldown, self.may_grow, range(ranks), self.clock)
        return Membership(
            *("job", ranks, self.limits, self.slots, self.starts, self.clock),
            lists_change=self.is_discovered,
            meets=self.meets,
        )

    def run(self):
        for _ in range(MOST_EVENTS):
            if all(each.does == "has ended" for each in self.ranks):
                return
            event, *ranks = self.choose()
            self.log.append((event.__name__, *(each.number for each in ranks)))
            event(*ranks)
            if self.random.random() < 0.5:
                self.job.act()
            self.follow()
            self.check()
        raise AssertionError("it does not end")

    # What may happen next

    def choose(self):
        events = [*self.events()]
        if self.mishaps_left and self.random.random() < 0.2:
            events = [*self.mishaps()] or events
            self.mishaps_left -= 1
        return self.random.choice(events or [(self.let_time_pass,)])

    def events(self):
        first = [
            each for each in self.ranks if not each.is_new and each.does == "loads"
        ]
        if first and len(first) == len(self.places["job"]):
            yield (self.meet,)
        for each in self.ranks:
            if each.does == "ends":
                yield self.is_collected, each
            if each.said or (each.does == "ends" and each.said is not None):
                yield self.is_read, each
            if not each.is_alive or each.is_stopped:
                continue
            if each.does == "loads" and each.is_new or each.does == "has met":
                yield self.calls, each
            elif each.does == "trains" and each.is_done:
                yield self.returns, each
                if any(other.has_failed for other in self.places[each.job]):
                    yield self.leaves, each
            elif each.does == "trains" and self.is_broken(each.job):
                yield self.leaves, each
            elif each.does == "has left":
                yield self.waits, each
            elif each.does in ("waits", "joins", "has joined") and each.words:
                yield self.hears, each
            if each.does == "joins":
                others = self.places[each.joins]
                is_odd = any(other.is_odd for other in others)
                if not is_odd and all(
                    self.is_joining(other, each.joins) for other in others
                ):
                    yield self.joins, each
                elif is_odd or any(
                    not other.is_alive or other.is_stopped or other.joins != each.joins
                    for other in others
                ):
                    yield self.cannot_join, each
        for job, ranks in self.places.items():
            if all(
                each.job == job
                and each.does == "trains"
                and not each.is_done
                and not each.is_stopped
                for each in ranks
            ):
                yield (self.commit, *sorted(ranks, key=lambda each: each.number))
        if self.is_failing:
            yield (self.kill_all,)
        if self.job.next_time < math.inf:
            yield (self.let_time_pass,)

    def mishaps(self):
        for each in self.ranks:
            if each.is_alive:
                yield self.dies, each
                yield (self.continues if each.is_stopped else self.stops), each
                if not each.is_stopped:
                    yield self.raises, each
                if each.does == "joins":
                    yield self.cannot_join, each
        if self.is_discovered:
            yield (self.hosts_change,)
        if self.random.random() < 0.02:
            yield (self.is_interrupted,)

    def is_broken(self, job):
        return any(
            not each.is_alive or job not in (each.job, each.joins)
            for each in self.places[job]
        )

    def is_joining(self, rank, job):
        return (
            rank.joins == job
            and rank.does in ("joins", "has joined")
            and not rank.is_stopped
        )

    # What ranks do

    def meet(self):
        self.job.note_met()
        for each in self.ranks:
            each.does, each.job, each.has_state = "has met", "job", True

    def calls(self, rank):
        rank.does = "has left" if rank.is_new else "trains"
        rank.said.append((self.job.note_here, rank.number, rank.turn))

    def commit(self, *ranks):
        """All make a step, and learn what rank 0 knows of others."""
        root = self.rank_0_of(ranks)
        while root.words:
            assert root.words.popleft().word == "others"
            root.others_wait = True
        assert root.others_wait or not self.somebody_waits(root), "it is kept out"
        if not any(each.has_state for each in ranks):
            # Those that had one are gone, which these say.
            for each in ranks:
                self.end(each, has_failed=True)
            return
        self.steps_left = max(0, self.steps_left - 1)
        for each in ranks:
            each.has_state = True
            if root.others_wait:
                each.does, each.job = "has left", ""
            elif not self.steps_left:
                each.is_done = True
        root.others_wait = False
        if self.steps_left == self.steps_of_second:
            self.call_the_second(ranks)

    def somebody_waits(self, root):
        """Whether khvdrun knows of a new rank that waits for this one's commit."""
        return not root.said and any(
            each.does == "waits"
            and not each.said
            and each.is_new
            and not each.words
            and each.turn == root.turn
            for each in self.ranks
        )

    def call_the_second(self, ranks):
        """All return from the first function that goes on, and call another one."""
        self.steps_of_second = math.nan
        for each in ranks:
            if each.does == "trains":
                each.turn = 2
                each.words.clear()
                each.said.append((self.job.note_gone, each.number))
                self.calls(each)

    def rank_0_of(self, ranks):
        return next(
            each for n in self.job.members for each in ranks if each.number == n
        )

    def returns(self, rank):
        self.end(rank, has_failed=False)

    def leaves(self, rank):
        rank.does, rank.job, rank.others_wait = "has left", "", False

    def waits(self, rank):
        rank.does = "waits"
        offered = f"address of {rank.number}"
        waits = self.job.note_waits, rank.number, offered, rank.has_state
        rank.said.append(waits)

    def hears(self, rank):
        told = rank.words.popleft()
        if told.word == "others":
            return
        if told.word == "join":
            rank.does, rank.joins = "joins", told.rest["job"]
        elif told.word == "late":
            if rank.does == "joins":
                self.cannot_join(rank)
        elif told.word == "go":
            assert rank.does == "has joined", "it goes on in what it has not joined"
            rank.does, rank.job, rank.joins = "trains", rank.joins, ""
            rank.is_new = rank.is_done = False
            self.ends_before_joining[rank.number] = 0
        else:
            self.end(rank, has_failed=told.word == "end")

    def joins(self, rank):
        rank.does = "has joined"
        rank.said.append((self.job.note_joined, rank.number, rank.joins))

    def cannot_join(self, rank):
        job, rank.does, rank.joins = rank.joins, "waits", ""
        why = "somebody is missing"
        rank.said.append((self.job.note_could_not, rank.number, job, why))

    # How they end

    def end(self, rank, has_failed):
        rank.does, rank.has_failed, rank.is_stopped = "ends", has_failed, False
        rank.joins = ""

    def dies(self, rank):
        self.end(rank, has_failed=True)

    raises = dies

    def stops(self, rank):
        rank.is_stopped = True

    def continues(self, rank):
        rank.is_stopped = False

    def is_read(self, rank):
        if rank.said:
            note, *what = rank.said.popleft()
            rank.host_hears(note.__name__, *what[1:])
            note(*what)
        else:
            rank.said = None
            rank.host_hears("note_gone")
            self.job.note_gone(rank.number)

    def is_collected(self, rank):
        # What it has said and khvdrun has not read is lost.
        rank.does, rank.said = "has ended", None
        self.ends_before_joining[rank.number] += rank.is_new
        self.note_end(rank)

    def note_end(self, rank):
        was_member = rank.number in self.job.members
        is_lost = rank.is_new or (was_member and rank.has_failed)
        what = f"rank {rank.number} has ended"
        goes_on = self.job.note_end(rank.number, what, rank.has_failed)
        if goes_on and is_lost:
            self.note_loss(rank)
        if not goes_on:
            assert was_member
            if rank.has_failed:
                self.is_failing = True
                self.job.close()

    def note_loss(self, rank):
        """A host on which no rank is left is left out."""
        host = self.slots[rank.number].host
        runs_there = any(
            self.slots[each.number].host == host and each.does != "has ended"
            for each in self.ranks
        )
        is_of_several = host in self.listed and len(self.listed) > 1
        is_listed = rank.number in self.slots
        if self.cooldown is None or runs_there or not (is_of_several and is_listed):
            return
        first, most = self.cooldown
        seconds = min(first * 2 ** self.times_left_out[host], most)
        self.times_left_out[host] += 1
        for number in self.slots:
            if self.slots[number].host == host:
                self.left_out[number] = self.now + seconds

    def kill_all(self):
        """As khvdrun does after a while."""
        for each in self.ranks:
            if each.is_alive:
                self.end(each, has_failed=True)

    def is_interrupted(self):
        self.job.interrupt("SIGINT")
        self.kill_all()

    # Hosts and times

    def hosts_change(self):
        names, before = [f"host{n}" for n in range(4)], {*self.slots}
        self.listed = {
            name: self.random.randint(1, 3)
            for name in self.random.sample(names, self.random.randint(1, 3))
        }
        self.job.note_hosts([HostSlots(*each) for each in self.listed.items()])
        for number in {*self.slots} - before:
            self.left_out.pop(number, None)

    def let_time_pass(self):
        """Those that are stopped go on, or are found out."""
        if self.job.next_time == math.inf:
            # Whoever waits for others is known to khvdrun, which finds it out.
            stopped = [
                each
                for each in self.ranks
                if each.is_stopped
                and (
                    each.does in ("loads", "has met", "trains", "has left")
                    or Tell(each.number, "go") in each.words
                )
            ]
            assert stopped, "a hang"
            self.dies(stopped[0])
            return
        self.now = max(self.now, self.job.next_time)
        self.job.act()

    # A service that is killed and started again

    def keep_record(self):
        self.record = {
            "slots": self.slots.known,
            "membership": self.job.record(),
        }

    def restart(self):
        """The hosts have heard more than the service before, and tell the next one."""
        self.restarts_left -= 1
        record = self.record
        members = record["membership"]["members"]
        listed = [HostSlots(*each) for each in self.listed.items()]
        self.slots = Slots(listed, record["slots"])
        self.job = self.new_job(1)
        self.left_out.clear()
        self.times_left_out.clear()
        last = {each.number: each for each in self.ranks}
        running = {
            number: rank for number, rank in last.items() if rank.does != "has ended"
        }
        for rank in running.values():
            for note, _, *what in rank.said or ():
                rank.host_hears(note.__name__, *what)
            if rank.said:
                rank.said.clear()
        knows = {number: rank.host_knows for number, rank in running.items()}
        self.job.resume(record["membership"], knows)
        for number in members:
            if number not in running:
                self.note_end(last[number])

    # What khvdrun decides

    def follow(self):
        at = self.random.randint(0, 3) if self.is_restarted() else math.inf
        if at > 0:
            self.keep_record()
        acts = [*self.job.take_acts()]
        self.check_state_stays(acts)
        for done, act in enumerate(acts):
            if done + 1 >= at:
                break
            self.log.append(act)
            match act:
                case Start(number):
                    self.start(number)
                case Kill(number):
                    self.kill(number)
                case Tell(number):
                    self.tell(number, act)
                case Say(line) if line.endswith(" such ends"):
                    assert self.ends_before_joining[int(line.split()[1])] >= 3
        if at < math.inf:
            self.log.append("the service is started again")
            self.restart()
            self.follow()

    def is_restarted(self):
        return self.restarts_left > 0 and self.random.random() < 0.1

    def check_state_stays(self, acts):
        """Who leaves has left its state to one of those that go on."""
        words = {"leave": [], "join": []}
        for act in acts:
            if isinstance(act, Tell) and act.word in words:
                words[act.word].append(self.last_of(act.number).has_state)
        assert not any(words["leave"]) or any(words["join"]), "the state leaves"

    def last_of(self, number):
        return next(each for each in reversed(self.ranks) if each.number == number)

    def start(self, number):
        assert not any(
            each.number == number and each.does != "has ended" for each in self.ranks
        ), "two processes have one place"
        assert self.now >= self.left_out.get(number, 0), "its host is left out"
        if self.random.random() < 0.02:
            self.job.note_no_start(number)
        else:
            is_odd = self.random.random() < 0.05
            self.ranks.append(Rank(number, is_new=True, is_odd=is_odd))

    def kill(self, number):
        for each in self.ranks:
            if each.number == number and each.is_alive:
                self.end(each, has_failed=True)

    def tell(self, number, told):
        rank = self.last_of(number)
        rank.host_tells(told.word)
        if rank.is_alive:
            rank.words.append(told)
        if told.word == "join":
            self.places.setdefault(told.rest["job"], set()).add(rank)

    def check(self):
        for job, ranks in self.places.items():
            here = [each for each in ranks if each.job == job and each.is_alive]
            # Those of hosts that are gone stay until others have their state.
            listed = [each for each in here if each.number in self.slots]
            assert len(listed) <= self.limits.most
            assert not here or len(ranks) >= self.limits.least


def test_a_host_on_which_no_rank_is_left_is_left_out():
    """A free slot elsewhere takes the place; its own wait, twice as long later."""
    now = 0.0
    hosts = [HostSlots("a", 1), HostSlots("b", 2), HostSlots("c", 1)]
    slots = Slots(hosts)
    starts = Starts((8.0, 20.0), True, range(3), lambda: now)
    limits = Limits(least=1, most=3, timeout=TIMEOUT)
    job = Membership("job", 3, limits, slots, starts, lambda: now)
    job.note_met()

    def acts():
        job.act()
        kinds = [act for act in job.take_acts() if isinstance(act, (Say, Start))]
        return [getattr(act, "line", getattr(act, "number", None)) for act in kinds]

    job.note_end(1, "rank 1 was killed", has_failed=True)
    assert acts() == [
        "rank 1 was killed; 2 ranks are left; it is started again after 8 s"
    ]
    now = 3.0
    job.note_end(2, "rank 2 was killed", has_failed=True)
    said, *started = acts()
    left_out = "no rank is left on b, which is left out for 8 s"
    assert said == f"rank 2 was killed; 1 rank is left; {left_out}"
    # Of three places, one is free on another host.
    assert started == [3]
    now = 10.5
    assert acts() == []
    now = 11.0
    assert acts() == [1]
    job.note_end(1, "rank 1 has ended", has_failed=True)
    (said,) = acts()
    assert said.endswith("no rank is left on b, which is left out for 16 s")
    now = 26.5
    assert acts() == []
    # What has happened before a host is listed anew counts no more.
    job.note_hosts([hosts[0], hosts[2]])
    job.note_hosts(hosts)
    assert len(acts()) == 1


@pytest.mark.parametrize("block", range(8))
def test_every_schedule_ends(block, request):
    count = request.config.getoption("--schedules") // 8
    for seed in itertools.islice(itertools.count(block, 8), count):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except Exception as error:
            told = "\n".join(map(str, schedule.log[-60:]))
            raise AssertionError(f"schedule {seed}: {error!r}\n{told}") from error


def test_only_the_one_that_is_stopped_is_killed_where_all_wait_for_it():
    """The time for joining may be longer than that for which ranks are waited for."""
    now = [0.0]
    slots = Slots([HostSlots("", 4)])
    starts = Starts(None, False, range(4), lambda: now[0])
    job = Membership("job", 4, Limits(2, 4, 5.0), slots, starts, lambda: now[0])
    for number in range(4):
        job.note_here(number, 1)
    job.note_end(0, "rank 0 has ended", has_failed=True)
    for number in (1, 2, 3):
        job.note_waits(number)
    [*_, last] = job.take_acts()
    now[0] = job.next_time
    job.act()
    late = [*job.take_acts()]
    assert late == [Tell(number, "late") for number in (1, 2, 3)]
    for number in (1, 2):
        job.note_could_not(number, last.rest["job"], "rank 3 is missing")
    now[0] = job.next_time
    job.act()
    assert [*job.take_acts()] == [Kill(3, "does not join the others")]
    job.note_end(3, "rank 3 was killed", has_failed=True)
    told = [(act.number, act.word) for act in job.take_acts() if isinstance(act, Tell)]
    assert told == [(1, "join"), (2, "join")]


def test_the_last_that_has_the_state_stays_until_another_one_has_it():
    """A rank that is new may die before, and then the others are without it."""
    slots = Slots([HostSlots("host0", 1)])
    starts = Starts(None, True, range(1), lambda: 0.0)
    limits = Limits(1, 3, TIMEOUT)
    job = Membership("job", 1, limits, slots, starts, lambda: 0.0, lists_change=True)
    job.note_here(0, 1)
    job.note_hosts([HostSlots("host1", 2)])
    job.act()
    for new in (1, 2):
        job.note_here(new, 1)
        job.note_waits(new, has_state=False)
    job.note_waits(0)
    assert join(job) == [0, 1, 2]
    job.note_end(1, "rank 1 has ended", has_failed=True)
    job.note_waits(2, has_state=False)
    job.note_waits(0)
    assert join(job) == [0, 2]
    # By now it has sent it.
    job.note_waits(2)
    job.note_waits(0)
    assert join(job) == [2]


def test_ranks_that_come_at_once_are_told_ranks_of_their_own():
    """Those that they get if all come, whichever is there first."""
    slots = Slots([HostSlots("", 4)])
    starts = Starts((1.0, 1.0), True, range(2), lambda: 0.0)
    job = Membership("job", 2, Limits(1, 4, TIMEOUT), slots, starts, lambda: 0.0)
    job.note_met()
    job.act()
    started = [act.number for act in job.take_acts() if isinstance(act, Start)]
    assert [rank_to_come(job, number) for number in started] == [2, 3]
    for number in reversed(started):
        job.note_here(number, 1)
        job.note_waits(number, has_state=False)
    for number in (0, 1):
        job.note_here(number, 1)
        job.note_waits(number)
    assert join(job) == [0, 1, *started]


def test_a_rank_that_is_started_again_is_told_no_other_ones_rank():
    now = [0.0]
    slots = Slots([HostSlots("", 4)])
    starts = Starts((1.0, 1.0), True, range(2), lambda: now[0])
    job = Membership("job", 2, Limits(1, 4, TIMEOUT), slots, starts, lambda: now[0])
    job.note_met()
    job.act()
    job.note_end(2, "rank 2 has ended", has_failed=True)
    now[0] = 1.0
    job.act()
    assert [rank_to_come(job, number) for number in (2, 3)] == [2, 3]


def rank_to_come(job, number):
    _, renewal = job.start_of(number)
    return renewal["rank_to_come"]


def join(job):
    """Those that are told to, and do."""
    told = [act for act in job.take_acts() if isinstance(act, Tell)]
    joining = [act for act in told if act.word == "join"]
    for act in joining:
        job.note_joined(act.number, act.rest["job"])
    return [act.number for act in joining]
