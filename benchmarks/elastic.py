"""What it costs when ranks go and come: `python benchmarks/elastic.py`.

Kills ranks of small trainings, on one host and between hosts, pulls a host's cable, and
measures how long it takes until the others have finished another step; Horovod and
torchft do the same. A rank that is started again shows how long its joining keeps the
others from their steps, and how fast it gets a large state. Last, the speed of a
training under `elastic.fit` in which nothing fails is compared with that under `fit`.
Prints tables and writes JSON. Only as root there are hosts, which are network
namespaces of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import elastic_ranks
import jobs
import measurement

# A module of the tests, whose folder elastic_ranks has put on the path.
import network
import tables
from elastic_ranks import RANKS, Ranks
from environments import UnavailableError
from measurement import ContenderError, summary
from tables import Check, Table, duration, spread

PARTS = ("deaths", "state", "speed")
TRAININGS = {"numpy": "NumPy and the C API", "keras": "elastic.fit"}
PEERS = {"Horovod": elastic_ranks.horovod, "torchft": elastic_ranks.torchft}
PLAIN, ELASTIC = "fit", "elastic.fit"
# Name: a training without failures, and its counterpart that cannot go on.
SPEEDS: dict[str, tuple[str, list[object]]] = {
    PLAIN: ("", []),
    ELASTIC: (PLAIN, ["--elastic", "fit"]),
    "elastic.run, a commit every {} batches": (PLAIN, ["--elastic", "run"]),
    "fit of from_arrays": ("", ["--from-arrays"]),
    "elastic.fit, batches_per_commit={}": (
        "fit of from_arrays",
        ["--elastic", "fit", "--from-arrays"],
    ),
}
# Other work on the machine changes the cores' time less.
TIMES = {"seconds": "time", "core_seconds": "time of cores"}
MOST_PERCENT_MORE = 1


@dataclass
class Case:
    """One kind of job whose ranks die.

    Args:
        name: in tables.
        start: starts such a job.
        victims: the numbers of those that die, one after the other. One alone is not
            started again.
        limit: the most seconds until the others go on; None without a requirement.
        cut: the host whose cable is pulled instead.
    """

    name: str
    start: Callable[[], Ranks]
    victims: tuple[int, ...] = (0, 1, 2, 3)
    limit: float | None = None
    cut: network.Host | None = None
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    traces: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure(self, deaths: int) -> None:
        """So many deaths, in one job if those that have died come again.

        Raises:
            UnavailableError: such a job cannot be had.
        """
        comes_again = len(self.victims) > 1
        for _ in range(1 if comes_again else deaths):
            with contextlib.closing(self.start()) as ranks:
                try:
                    self._measure(ranks, deaths if comes_again else 1, comes_again)
                except ContenderError as error:
                    self.failures.append(str(error))

    def _measure(self, ranks: Ranks, deaths: int, comes_again: bool) -> None:
        before = ranks.changed(RANKS)
        self.version = ranks.version
        for _ in range(deaths):
            victim = self.victims[len(self.seconds) % len(self.victims)]
            before = self._after_death(ranks, victim, before)
            if comes_again:
                before = self._after_joining(ranks, before)

    def _after_death(self, ranks: Ranks, victim: int, before: list[dict]) -> list[dict]:
        if self.cut is None:
            since = ranks.kill(victim)
            after = ranks.changed(RANKS - 1)
        else:
            since = time.monotonic()
            self.cut.unplug()
            try:
                after = ranks.changed(RANKS // 2)
            finally:
                self.cut.plug_in()
        self.seconds.append(max(each["first"] for each in after) - since)
        self.traces.append(_new_traces(before, after))
        return after

    def _after_joining(self, ranks: Ranks, before: list[dict]) -> list[dict]:
        after = ranks.changed(RANKS)
        known = {each["process"] for each in before}
        stayed = [each for each in after if each["process"] in known]
        if len(stayed) != len(before):
            raise ContenderError(f"{self.name}: a rank that was left has ended")
        self.pauses.append(max(each["longest"] for each in stayed))
        self.steps.append(statistics.median(each["usual"] for each in stayed))
        return after

    def found(self) -> dict:
        """All that was measured."""
        found: dict = {
            "seconds": summary(self.seconds),
            "traces": max(self.traces),
            "failures": len(self.failures),
        }
        if self.pauses:
            found["pause"] = summary(self.pauses)
            found["step"] = summary(self.steps)
        return found


def _new_traces(before: list[dict], after: list[dict]) -> int:
    """The most that one process has traced in between.

    Raises:
        ContenderError: one is a process that was not there before.
    """
    of_process = {each["process"]: each.get("traces", 0) for each in before}
    if not of_process.keys() >= {each["process"] for each in after}:
        raise ContenderError("a rank that was left has another process")
    return max(each.get("traces", 0) - of_process[each["process"]] for each in after)


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    measured: dict[str, dict] = {}
    versions: dict[str, str] = {}
    notes: list[str] = []
    checks: list[Check] = []
    found_tables: list[Table] = []
    with contextlib.ExitStack() as stack:
        if "deaths" in options.parts:
            own = own_cases(options.trainings, stack, notes)
            cases = [*own, *peer_cases(options.peers)]
            measure_deaths(cases, options, notes)
            cases = [case for case in cases if case.seconds]
            measured["deaths"] = {case.name: case.found() for case in cases}
            versions |= {case.name: case.version for case in cases}
            checks += death_checks(cases)
            found_tables += [death_table(cases), joining_table(cases)]
    if "state" in options.parts:
        measured["state"], versions["state"] = measure_state(options)
        found_tables.append(state_table(options, measured["state"]))
    if "speed" in options.parts:
        measured["speed"], of_speed = measure_speed(options)
        versions |= of_speed
        checks += speed_checks(measured["speed"])
        found_tables.append(speed_table(options, measured["speed"]))
    result = {
        "benchmark": "elastic",
        "machine": options.machine,
        "versions": versions,
        "notes": notes,
        "settings": {
            name: getattr(options, name)
            for name in ("deaths", "rounds", "megabytes", "steps", "batch", "commit")
        },
        "measured": measured,
        "checks": checks,
        "tables": [*found_tables, tables.check_table(checks)],
    }
    tables.publish(options.output, result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_output_argument(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument(
        "--trainings",
        nargs="*",
        choices=list(TRAININGS),
        default=list(TRAININGS),
        help="whose ranks die",
    )
    parser.add_argument(
        "--deaths", type=int, default=4, help="of each kind in a round (default: 4)"
    )
    parser.add_argument(
        "--death-rounds", type=int, default=3, help="of deaths (default: 3)"
    )
    parser.add_argument(
        "--megabytes",
        type=int,
        default=512,
        help="of the state that a rank gets which comes (default: 512)",
    )
    parser.add_argument(
        "--joinings", type=int, default=10, help="that get it (default: 10)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=11,
        help="turns of each training without failures (default: 11)",
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="of a turn, an epoch (default: 40)"
    )
    parser.add_argument(
        "--batch", type=int, default=128, help="of each rank (default: 128)"
    )
    parser.add_argument(
        "--commit", type=int, default=10, help="batches of one (default: 10)"
    )
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def own_cases(
    trainings: list[str], stack: contextlib.ExitStack, notes: list[str]
) -> list[Case]:
    """Those of keras_hvd; the stack ends the hosts."""
    cases = [
        Case(
            f"one host, {TRAININGS[training]}",
            partial(elastic_ranks.on_one_host, training),
            limit=0.3,
        )
        for training in trainings
    ]
    if why := network.unavailable():
        notes.append(f"Without several hosts: {why}")
        return cases
    hosts = stack.enter_context(network.connected(2))
    cases += [
        Case(
            f"two hosts, {TRAININGS[training]}",
            partial(elastic_ranks.between_hosts, training, hosts),
            limit=0.5,
        )
        for training in trainings
    ]
    if "numpy" not in trainings:
        return cases
    if not network.has_ssh():
        notes.append("Without a host that vanishes: there is no sshd")
        return cases
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-ssh-"))
    variables = stack.enter_context(network.ssh(hosts, Path(folder)))
    vanishing = Case(
        f"two hosts, one vanishes, {TRAININGS['numpy']}",
        partial(elastic_ranks.by_ssh, "numpy", hosts, variables),
        victims=(2,),
        limit=6,
        cut=hosts[1],
    )
    return [*cases, vanishing]


def peer_cases(names: list[str]) -> list[Case]:
    # The last rank of Horovod has a host of its own.
    return [Case(f"one host, {name}", PEERS[name], (RANKS - 1,)) for name in names]


def measure_deaths(
    cases: list[Case], options: argparse.Namespace, notes: list[str]
) -> None:
    """Each kind in turn, round after round."""
    unavailable: list[Case] = []
    for number in range(options.death_rounds):
        for case in (case for case in cases if case not in unavailable):
            failures = len(case.failures)
            try:
                case.measure(options.deaths)
            except UnavailableError as error:
                unavailable.append(case)
                notes.append(f"Without {case.name}: {error}")
            for failure in case.failures[failures:]:
                notes.append(f"{case.name}, which counts as not going on: {failure}")
                print(notes[-1], flush=True)
            if case.seconds:
                row = spread(summary(case.seconds))
                print(f"Round {number + 1}, {case.name}: {row}", flush=True)


def death_checks(cases: list[Case]) -> list[Check]:
    checks = []
    for case in (case for case in cases if case.limit is not None):
        found = case.found()
        for which in ("median", "p90"):
            seconds = found["seconds"][which]
            what = f"{case.name}: until the others' next step, {which}"
            checks.append(Check(what, seconds, case.limit, False, "s"))
        what = f"{case.name}: traces of one that is left"
        checks.append(Check(what, found["traces"], 0, False, "traces"))
        what = f"{case.name}: jobs that did not go on"
        checks.append(Check(what, found["failures"], 0, False, "jobs"))
    return checks


def death_table(cases: list[Case]) -> Table:
    rows = []
    for case in cases:
        found = case.found()
        seconds = found["seconds"]
        rows.append(
            [case.name, str(seconds["count"])]
            + [duration(seconds[which]) for which in ("median", "p90")]
            + [duration(max(case.seconds)), str(found["traces"])]
            + [str(found["failures"])]
        )
    return Table(
        f"From a rank's death, of {RANKS}, until all others have finished a step of "
        "the next job",
        ["", "deaths", "median", "90th percentile", "longest", "traces"]
        + ["jobs that did not go on"],
        rows,
    )


def joining_table(cases: list[Case]) -> Table:
    rows = []
    for case in (case for case in cases if case.pauses):
        found = case.found()
        pause = found["pause"]
        rows.append(
            [case.name, str(pause["count"]), duration(found["step"]["median"])]
            + [duration(pause[which]) for which in ("median", "p90")]
        )
    return Table(
        "The longest time between two steps of the others around a rank's joining",
        ["", "joinings", "median step", "median", "90th percentile"],
        rows,
    )


def measure_state(options: argparse.Namespace) -> tuple[dict, str]:
    """A rank that gets a large state, again and again, in one job of three."""
    size = 3
    pauses, given, plain = [], [], []
    with contextlib.closing(
        elastic_ranks.on_one_host("state", size, options.megabytes)
    ) as ranks:
        plain = [each["plain"] for each in ranks.changed(size)]
        for number in range(options.joinings):
            ranks.kill(number % size)
            known = {each["process"] for each in ranks.changed(size - 1)}
            after = ranks.changed(size)
            new = [each for each in after if each["process"] not in known]
            stayed = [each for each in after if each["process"] in known]
            given += [each["given"] for each in new]
            pauses.append(max(each["longest"] for each in stayed))
        version = ranks.version
    return {
        "pause": summary(pauses),
        "given": summary(given),
        "plain": summary(plain),
    }, version


def state_table(options: argparse.Namespace, measured: dict) -> Table:
    rates = {
        name: f"{options.megabytes / 1e3 / measured[name]['median']:.2f} GB/s"
        for name in ("given", "plain")
    }
    rows = [
        ["the state's way to a rank that comes", spread(measured["given"])]
        + [rates["given"]],
        ["`broadcast` of as much, 3 ranks", spread(measured["plain"]), rates["plain"]],
        ["between two steps of the others", spread(measured["pause"]), "-"],
    ]
    return Table(
        f"A rank that joins two others gets {options.megabytes} MB: median "
        "(10th-90th percentile)",
        ["", "time", "rate"],
        rows,
    )


def measure_speed(options: argparse.Namespace) -> tuple[dict, dict[str, str]]:
    """Trainings in which nothing fails, an epoch each in turn."""
    given = ["--steps", options.steps, "--batch", options.batch]
    with contextlib.ExitStack() as stack:
        running = {}
        for name, (against, arguments) in SPEEDS.items():
            job = jobs.keras_hvd(
                "training.py",
                2,
                *(*given, *arguments),
                *(["--commit", options.commit] if "{}" in name else []),
                launcher=["--min-np", 1] if against else [],
            )
            stack.callback(job.close)
            job.ask()
            running[name] = job
        times: dict[str, dict[str, list[float]]] = {
            what: {name: [] for name in running} for what in TIMES
        }
        for name, answers in measurement.turns(running, options.rounds):
            for what, of_names in times.items():
                of_names[name].append(measurement.mean_of(answers, what))
        versions = {name: job.version for name, job in running.items()}
    measured: dict[str, dict] = {}
    for name, (against, _) in SPEEDS.items():
        measured[name.format(options.commit)] = found = {}
        for what, of_names in times.items():
            found[what] = summary(of_names[name])
            if against:
                pairs = zip(of_names[name], of_names[against], strict=True)
                found[f"more {what}"] = summary(
                    [100 * (own / plain - 1) for own, plain in pairs]
                )
    return measured, versions


def speed_checks(measured: dict) -> list[Check]:
    return [
        Check(
            f"{name}: more {TIMES[what]} than without, median of the pairs",
            found[f"more {what}"]["median"],
            MOST_PERCENT_MORE,
            False,
            "%",
        )
        for name, found in measured.items()
        for what in TIMES
        if f"more {what}" in found
    ]


def speed_table(options: argparse.Namespace, measured: dict) -> Table:
    rows = []
    for name, found in measured.items():
        cells = []
        for what in TIMES:
            cells += [spread(found[what]), _percent_text(found.get(f"more {what}"))]
        rows.append([name, *cells])
    return Table(
        f"A step without failures, 2 ranks, batch {options.batch} each: median "
        "(10th-90th percentile), and how much more than its counterpart's",
        ["trained by", "a step", "more", "time of cores, each rank", "more"],
        rows,
    )


def _percent_text(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:+.1f} % ({found['p10']:+.1f} to {found['p90']:+.1f} %)"


if __name__ == "__main__":
    main()
