"""The cost of coordination in large jobs: `python benchmarks/simulate.py`.

Simulates the coordination of steps of 161 gradients, from 2 to 16,384 ranks, 8 on each
host: the engine's own state machines do their work for real on a virtual network
(benchmarks/simulation). Prints where the time goes. `--compare` runs real jobs of up
to 8 ranks too, which have two virtual hosts on this machine, and simulates the same.
Where there is `perf`, it compares the CPU time of each part of the work too.
Prints tables, draws a plot, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import environments
import measurement
import plots
import tables
from tables import Check, Table

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PROGRAM = "benchmarks/simulation", "simulate"
RANKS = [2, 8, 16, 64, 256, 1024, 4096, 16384]
REQUESTS = 161
# Ranks on each host of the jobs that are also run.
REAL = [[2], [4], [1, 1], [2, 2], [4, 4]]
# Functions of the engine, and which part of the simulated work they are.
PARTS_OF_FUNCTIONS = {
    "SubmissionEncoder::Encode": "ranks encode",
    "SubmissionReader::HandleSubmission": "leaders read ranks",
    "SubmissionReader::HandleMessages": "leaders read leaders",
    "SubmissionMerger::Next": "leaders pass up",
    "MergedEncoder::Encode": "leaders pass up",
    "CoordinatorService::TakeMerged": "coordinator decides",
    "Coordinator::Next": "coordinator decides",
    "DecisionEncoder::Encode": "coordinator decides",
    "LeaderService::Note": "leaders pass down",
    "DecisionDecoder::Decode": "ranks decode",
    "Requests::Take": "ranks decode",
    "UnpackResults": "ranks decode",
}
# The most seconds of a step, by ranks, and the limits for the work of real jobs divided
# by that of simulated ones.
MOST_SECONDS = {4096: 1e-3}
LEAST_RATIO, MOST_RATIO = 0.75, 1.25
PROFILED_STEPS = 3000
SAMPLES_PER_SECOND = 4000


Points = dict[str, list[tuple[int, float]]]  # label: ranks and seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, metavar="N")
    parser.add_argument(
        "--hop", type=float, default=10, help="microseconds between hosts; default: 10"
    )
    parser.add_argument(
        "--connection",
        type=float,
        default=0,
        help="CPU time of each message that is sent to or comes from another host, in "
        "microseconds; default: 0",
    )
    parser.add_argument("--steps", type=int, default=11, help="default: 11")
    parser.add_argument("--compare", action="store_true", help="with real jobs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    machine = measurement.machine()
    program = built()
    real = compare(program, options.steps) if options.compare else Compared()
    simulated = simulate_sizes(program, options) if options.ranks else {}
    if simulated:
        options.output.mkdir(parents=True, exist_ok=True)
        medians = {ranks: step["critical"] for ranks, step in simulated.items()}
        title = f"Coordination of {REQUESTS} gradients, simulated: microseconds a step"
        plots.stacked(options.output / "simulate.svg", title, medians, real.points)
        real.tables.insert(0, sizes_table(title, simulated))
    checks = [*requirements(simulated), *real.checks]
    tables.publish(
        options.output,
        {
            "benchmark": "simulate",
            "machine": machine,
            "versions": {},
            "settings": {"hop": options.hop, "connection": options.connection},
            "measured": simulated,
            "checks": checks,
            "tables": [*real.tables, tables.check_table(checks)],
        },
    )


def built() -> Path:
    """Builds the simulator; returns its path."""
    command = ["bazel", "build", f"--repo_env=PYTHON_BIN_PATH={sys.executable}"]
    command += ["--repo_env=KERAS_HVD_TENSORFLOW=", f"//{PACKAGE}:{PROGRAM}"]
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / "bazel-bin" / PACKAGE / PROGRAM


def simulate(program: Path, *arguments: float) -> dict:
    """The simulator's result; its source describes the arguments."""
    command = [str(program), *map(str, arguments)]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )


def simulate_sizes(program: Path, options: argparse.Namespace) -> dict[int, dict]:
    """The median step of each number of ranks."""
    median_steps = {}
    for ranks in options.ranks:
        result = simulate(
            program, ranks, 8, options.hop, options.connection, 1, 0, options.steps, 0
        )
        steps = sorted(result["steps"], key=lambda step: step["seconds"])
        median_steps[ranks] = {**steps[len(steps) // 2], "hosts": result["hosts"]}
    return median_steps


def sizes_table(title: str, simulated: dict[int, dict]) -> Table:
    """A row for each number of ranks."""
    parts = list(next(iter(simulated.values()))["critical"])
    rows = [
        [f"{ranks:,}", f"{step['hosts']:,}", micro(step["seconds"])]
        + [micro(step["critical"][part]) for part in parts]
        for ranks, step in simulated.items()
    ]
    return Table(title, ["ranks", "hosts", "all", *parts], rows)


def requirements(simulated: dict[int, dict]) -> list[Check]:
    """The requirements on the time of coordination."""
    return [
        Check(
            f"a step of {ranks:,} ranks",
            simulated[ranks]["seconds"] * 1e6,
            most * 1e6,
            False,
            "us",
        )
        for ranks, most in MOST_SECONDS.items()
        if ranks in simulated
    ]


def micro(seconds: float) -> str:
    """Seconds as microseconds."""
    return f"{seconds * 1e6:.0f}"


@dataclass
class Compared:
    """The figures of real jobs, and of the same jobs simulated."""

    points: Points = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def compare(program: Path, steps: int) -> Compared:
    """Runs real jobs, and simulates the same ones."""
    hop = loopback_seconds() * 1e6
    compared = Compared()
    rows, work_rows = [], []
    for counts in REAL:
        real = run_job(counts)
        cores = os.cpu_count() or 1
        result = simulate(
            program, sum(counts), counts[0], hop, 0, 1, cores, steps, REQUESTS
        )
        simulated = statistics.median(step["seconds"] for step in result["steps"])
        where = "one host" if len(counts) == 1 else "two hosts"
        for how, seconds in (("measured", real), ("simulated", simulated)):
            label = f"{REQUESTS} floats, {where}, {how}"
            compared.points.setdefault(label, []).append((sum(counts), seconds))
        name = " + ".join(map(str, counts))
        rows.append([name, micro(real), micro(simulated), f"{real / simulated:.2f}"])
        if shutil.which("perf"):
            work = compare_work(counts, result)
            work_rows += [[name, part, *figures] for part, *figures in work]
            ratio = float(work[-1][-1])
            text = f"CPU time of {name} ranks, measured and simulated"
            compared.checks += [
                Check(text, ratio, LEAST_RATIO, True, "x"),
                Check(text, ratio, MOST_RATIO, False, "x"),
            ]
    title = f"{REQUESTS} allreduces of one float, a hop of {hop:.1f} us"
    header = ["ranks", "measured (us)", "simulated (us)", "ratio"]
    compared.tables.append(Table(title, header, rows))
    if not work_rows:
        print("without perf, the parts of the work are not compared")
        return compared
    title = "CPU time of the same, of all ranks together"
    header = ["ranks", "part", "measured (us)", "simulated (us)", "ratio"]
    compared.tables.append(Table(title, header, work_rows))
    return compared


def compare_work(counts: list[int], simulated: dict) -> list[list[str]]:
    """Each part's time in a real job, and in the simulated one; last, all of them."""
    measured = profile_job(counts)
    steps = simulated["steps"]
    work = {
        part: statistics.median(step["work"][part] for step in steps)
        for part in dict.fromkeys(PARTS_OF_FUNCTIONS.values())
    }
    measured["all"], work["all"] = sum(measured.values()), sum(work.values())
    return [
        [part, micro(measured[part]), micro(seconds), f"{measured[part] / seconds:.2f}"]
        for part, seconds in work.items()
        if seconds > 0
    ]


def profile_job(counts: list[int]) -> dict[str, float]:
    """Seconds of CPU time that a step of a real job takes, by part of the work."""
    with tempfile.TemporaryDirectory() as folder:
        record = ["perf", "record", "--quiet", "--call-graph", "fp", "--event"]
        record += ["cpu-clock", "--freq", str(SAMPLES_PER_SECOND), "--output"]
        record += [f"{folder}/samples", "--"]
        run_job(counts, PROFILED_STEPS, record)
        script = [
            "perf",
            "script",
            "--input",
            f"{folder}/samples",
            "--fields",
            "ip,sym",
        ]
        chains = subprocess.run(
            script, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ).stdout.decode(errors="replace")
    seconds = dict.fromkeys(PARTS_OF_FUNCTIONS.values(), 0.0)
    # Of functions that call each other, the outermost one tells the part of the work.
    for chain in chains.split("\n\n"):
        for line in reversed(chain.splitlines()):
            function = line.rpartition(" ")[2].removeprefix("keras_hvd::")
            part = PARTS_OF_FUNCTIONS.get(function)
            if part is not None:
                seconds[part] += 1 / SAMPLES_PER_SECOND / PROFILED_STEPS
                break
    return seconds


def run_job(counts: list[int], steps: int = 300, under: Sequence[str] = ()) -> float:
    """Seconds of a step of a real job with these ranks on each host.

    `under` is a program that runs the job, and its arguments.
    """
    program = ROOT / "benchmarks/contenders/coordination_steps.py"
    command = [*under, sys.executable, f"{ROOT}/tests/on_hosts.py", *map(str, counts)]
    command += [sys.executable, str(program)]
    command += ["--timed-calls", str(environments.compiled("timed_calls.c"))]
    command += ["--requests", str(REQUESTS), "--steps", str(steps)]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    ).stdout
    return json.loads(output[output.index("{") : output.index("}") + 1])["seconds"]


def loopback_seconds(times: int = 2000) -> float:
    """The time of a small message over TCP to another thread of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer() -> None:
        for _ in range(times):
            there.sendall(there.recv(64))

    thread = threading.Thread(target=answer)
    thread.start()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        here.sendall(b"12345678")
        here.recv(64)
        seconds.append(time.perf_counter() - start)
    thread.join()
    here.close()
    there.close()
    return statistics.median(seconds) / 2


if __name__ == "__main__":
    main()
