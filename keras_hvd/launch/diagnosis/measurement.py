"""Measures the speed of ranks on this machine in a real job, and judges it."""

import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from keras_hvd.backends.current import allocator
from keras_hvd.job import cores
from keras_hvd.launch import processes
from keras_hvd.launch.diagnosis import machine, network, probes
from keras_hvd.launch.diagnosis.findings import Finding, count, failure, warning
from keras_hvd.launch.diagnosis.limits import amount, free_memory
from keras_hvd.launch.options import Options
from keras_hvd.world.rendezvous.nodes import Node

_ROOT = Path(__file__).parents[3]
_LAUNCHER = "import sys; from keras_hvd.launch.__main__ import main; sys.exit(main())"
_RANK = "from keras_hvd.launch.diagnosis import rank; rank.main()"
_PATIENCE_SECONDS = 40
# Between hosts 64 MiB may take seconds each time, and khvdrun waits for the other ones.
_PATIENCE_BETWEEN_HOSTS_SECONDS = 400
_INIT_TIMEOUT_SECONDS = 20

_LARGEST = 64 << 20
_SMALLEST_LARGEST = 2 << 20
_ROUND_TRIPS = 3000
_WAKE_SECONDS = 1.0
_TOUCHES = 3

# Figures above these are unusually slow. On a virtual machine with two cores, a futex
# round trip usually takes 38 us and a small allreduce 4 us. An allreduce moves as much
# as one or two copies; if everything fits into caches, copies are faster still.
_SLOW_ROUND_TRIP = 150e-6
_SLOW_SMALL_ALLREDUCE = 60e-6
# Up to this factor, new memory costs little compared to the op that fills it.
_SLOW_NEW_MEMORY = 2.0
_SLOW_IN_COPIES = 5.0
_SLOW_IN_CACHED_COPIES = 15.0


@dataclass(frozen=True)
class Figures:
    """The figures of this host's measuring ranks. Dicts are by size in bytes."""

    ranks: int
    largest: int  # bytes of the largest tensor, and of each copy
    alone: float  # seconds of the first rank's copy while the others slept
    together: dict[int, float]  # seconds of a copy by all ranks at once
    # "median" and "p90" of the seconds on the first rank, and "calls"
    allreduce: dict[int, dict[str, float]]
    sleeps: int  # how often the engines slept
    lost_wakes: int  # sleeps that only a time-out ended
    shared_bytes: int
    throttled: int  # how often the CPU quota stopped them


def wake_up() -> Finding:
    """Measures the time to wake a sleeping process on the next core."""
    places = cores.shares(2)
    trips = probes.round_trips(places, _ROUND_TRIPS, _WAKE_SECONDS)
    median, p90 = statistics.median(trips), probes.percentile(trips, 0.9)
    where = "two cores" if places[0] != places[1] else "one core"
    figure = (
        f"{probes.duration(median)} for a round trip of two processes on {where} "
        f"(p90 {probes.duration(p90)})"
    )
    if median > _SLOW_ROUND_TRIP:
        return warning(
            *("wake-up", figure),
            "small tensors wait for it where ranks do not arrive together: keep the "
            "cores from sleeping deeply (cpupower idle-set -D 10; in a virtual "
            "machine: cpuidle_haltpoll) and free of other work",
        )
    return Finding("wake-up", figure)


def new_memory(options: Options) -> Finding:
    """Measures the cost of large tensors if TensorFlow does not keep their memory."""
    name = "new memory"
    size = _largest_size(1)
    pairs = [probes.touches(size) for _ in range(_TOUCHES)]
    new, used = (statistics.median(times) for times in zip(*pairs))
    environment = {**os.environ, **options.variables}
    is_kept = allocator.uses_pool(environment)
    chosen = allocator.chosen_by(environment) or "--allocator unchanged"
    figure = (
        f"{amount(size)} take {probes.duration(new)}, when used again "
        f"{probes.duration(used)}: "
        + ("TensorFlow keeps it" if is_kept else f"chosen by {chosen}")
    )
    if is_kept or new < _SLOW_NEW_MEMORY * used:
        return Finding(name, figure)
    return warning(
        *(name, figure),
        "large tensors in new memory take that much longer: compare with "
        "khvdrun --allocator pool",
    )


def run(options: Options) -> Figures | Finding:
    """Starts measuring ranks with khvdrun. Returns their figures, or the failure."""
    largest = _largest_size(options.ranks)
    throttled_before = machine.times_throttled()
    command = [*_python(_LAUNCHER), "-np", str(options.ranks), "--no-prefix"]
    command += ["--bind-to", options.bind_to, "--term-after", "1"]
    command += _place(options.node)
    command += [*_python(_RANK), str(largest)]
    timeout = {"KERAS_HVD_INIT_TIMEOUT_SECONDS": str(_INIT_TIMEOUT_SECONDS)}
    patience = _PATIENCE_SECONDS
    advice = "the machine is overloaded, or has far fewer cores than ranks: try -np 2"
    if options.node is not None:
        patience = _PATIENCE_BETWEEN_HOSTS_SECONDS
        advice = "the network between the hosts is very slow: try iperf3 between them"
    try:
        ended = _end_in_time(
            patience, command, {**timeout, **os.environ, **options.variables}
        )
    except subprocess.TimeoutExpired:
        return failure(
            count(options.ranks, "rank"), f"not done after {patience} s", advice
        )
    answers = [
        json.loads(line) for line in ended.stdout.splitlines() if line[:1] == "{"
    ]
    if ended.returncode != 0 or len(answers) < options.ranks:
        return _explain(options.ranks, answers, ended)
    throttled = machine.times_throttled() - throttled_before
    return _figures(sorted(answers, key=lambda one: one["rank"]), throttled)


def judge(figures: Figures, options: Options) -> list[Finding]:
    """Turns the figures into findings."""
    return [
        *_shared_memory(figures),
        *_copies(figures),
        *_allreduces(figures, options),
        _lost_wakes(figures),
        *_throttling(figures),
    ]


def _allreduces(figures: Figures, options: Options) -> list[Finding]:
    if options.node is not None:
        medians = {size: one["median"] for size, one in figures.allreduce.items()}
        return [network.trip(medians[4]), *network.rate(medians, options.node)]
    return [
        *(_small(figures, options, size, name) for size, name in _SMALL_SIZES),
        *(_large(figures, size) for size in figures.allreduce if size >= 1 << 20),
    ]


def _place(node: Node | None) -> list[str]:
    """The options for this host's place among several."""
    if node is None:
        return []
    place = ["--nnodes", str(node.count), "--node-rank", str(node.number)]
    if node.interfaces:
        place += ["--network-interfaces", ",".join(node.interfaces)]
    return [*place, "--rendezvous", node.rendezvous]


_SMALL_SIZES = ((4, "allreduce 4 B"), (1 << 10, "allreduce 1 KiB"))


def _python(program: str) -> list[str]:
    """A Python command that runs a program with this copy of keras_hvd."""
    path = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
    return [sys.executable, "-c", path + program]


def _end_in_time(
    patience: float, command: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess:
    """Runs khvdrun, which ends its ranks itself after a time-out or Ctrl-C."""
    parent = os.getpid()

    def prepare() -> None:
        processes.die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Ctrl-C while Popen starts a process would leave that process behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        preexec_fn=prepare,
    )
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        out, err = job.communicate(timeout=patience)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        job.terminate()
        job.communicate()
        raise
    return subprocess.CompletedProcess(command, job.returncode, out, err)


def _largest_size(ranks: int) -> int:
    """The largest size at which two blocks per rank take half of the free memory."""
    size = _LARGEST
    while size > _SMALLEST_LARGEST and 2 * size * ranks > free_memory() // 2:
        size //= 2
    return size


def _explain(
    ranks: int, answers: list[dict], ended: subprocess.CompletedProcess
) -> Finding:
    name = count(ranks, "rank")
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        return failure(name, "do not run", errors[0])
    words = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return failure(
        *(name, f"do not run: {words[-1]}"),
        "run the same by hand to see all it says: khvdrun -np "
        f"{ranks} {sys.executable} -c 'import keras_hvd; keras_hvd.init()'",
    )


def _figures(answers: list[dict], throttled: int) -> Figures:
    first = answers[0]
    allreduce = {int(size): one for size, one in first["allreduce"].items()}
    return Figures(
        ranks=len(answers),
        largest=max(allreduce),
        alone=first["alone"],
        together={int(size): one for size, one in first["together"].items()},
        allreduce=allreduce,
        sleeps=sum(answer["sleeps"] for answer in answers),
        lost_wakes=sum(answer["lost_wakes"] for answer in answers),
        shared_bytes=first["shared_bytes"],
        throttled=throttled,
    )


def _shared_memory(figures: Figures) -> list[Finding]:
    if figures.ranks == 1:
        return []
    size = amount(figures.shared_bytes)
    figure = f"{size} for {figures.ranks} ranks, in a memory file without a name"
    return [Finding("shared memory", figure)]


def _copies(figures: Figures) -> list[Finding]:
    alone = figures.largest / figures.alone
    findings = [Finding("copy, 1 rank", probes.gigabytes(alone))]
    if figures.ranks == 1:
        return findings
    together = figures.ranks * figures.largest / figures.together[figures.largest]
    name = f"copy, {figures.ranks} ranks"
    figure = (
        f"{probes.gigabytes(together)} together, {together / alone:.2g} x that of one"
    )
    is_crowded = figures.ranks > cores.available()
    if together < alone and not is_crowded:
        return findings + [
            warning(
                *(name, figure),
                "the ranks slow each other down, because of other processes, threads "
                "that share a physical core, or an overcommitted host of this virtual "
                "machine: try fewer ranks",
            )
        ]
    return [*findings, Finding(name, figure)]


def _small(figures: Figures, options: Options, size: int, name: str) -> Finding:
    one = figures.allreduce[size]
    figure = f"{probes.duration(one['median'])} (p90 {probes.duration(one['p90'])})"
    if one["median"] <= _SLOW_SMALL_ALLREDUCE:
        return Finding(name, figure)
    advice = "end other programs; see also 'wake-up' above"
    if figures.ranks > cores.available():
        advice = f"ranks wait for a core: start {cores.available()} with -np"
    elif options.bind_to == "none":
        advice = "try --bind-to cores, and end other programs"
    return warning(name, figure, advice)


def _large(figures: Figures, size: int) -> Finding:
    name = f"allreduce {size >> 20} MiB"
    seconds = figures.allreduce[size]["median"]
    copies = seconds / figures.together[size]
    figure = (
        f"{probes.duration(seconds)}, {probes.gigabytes(size / seconds)}: "
        f"the time of {copies:.2g} copies of as much"
    )
    is_largest = size == figures.largest
    most = _SLOW_IN_COPIES if is_largest else _SLOW_IN_CACHED_COPIES
    if figures.ranks > cores.available() or copies <= most:
        return Finding(name, figure)
    return warning(
        *(name, figure),
        "the ranks' cores are far from each other or busy: try --bind-to cores, cores "
        "of one memory node (taskset, docker run --cpuset-cpus), and an idle machine",
    )


def _lost_wakes(figures: Figures) -> Finding:
    figure = f"{figures.lost_wakes} in {figures.sleeps} sleeps"
    if figures.lost_wakes == 0:
        return Finding("lost wake-ups", figure)
    return warning(
        *("lost wake-ups", figure),
        "an error of keras_hvd or of this kernel, which costs time but no result: "
        "please report it with this text and the output of uname -a",
    )


def _throttling(figures: Figures) -> list[Finding]:
    if figures.throttled == 0:
        return []
    return [
        warning(
            *("CPU quota", f"stopped the ranks {figures.throttled} times meanwhile"),
            "raise it (docker run --cpus; Kubernetes: limits.cpu) or start fewer "
            "ranks: every stop delays all of them",
        )
    ]
