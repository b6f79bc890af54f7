"""How long an allreduce takes between hosts: `python benchmarks/hosts.py`.

Sums float32 tensors of 4 B to 64 MiB, and ResNet-50's gradients, over hosts that are
network namespaces of this machine: keras_hvd over TCP and by Open MPI, Open MPI over
TCP and gloo, in networks of several speeds. Prints tables and writes JSON. Only root
can run it.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import hosts_jobs
import measurement

# A module of the tests, whose folder hosts_jobs has put on the path.
import network
import tables
from contenders.workloads import WORKLOADS, total_bytes
from hosts_jobs import Place
from tables import Check, Table, size_text, spread

SIZES = [4 << (2 * i) for i in range(13)]
KIB, MIB = 1 << 10, 1 << 20
GRADIENTS = "ResNet-50's gradients"
# Name: a cable's rate, and its delay.
NETWORKS = {
    "unshaped": ("", 0.0),
    "1 Gbit/s": ("1gbit", 0.0),
    "100 Mbit/s": ("100mbit", 0.0),
    "1 Gbit/s, 0.1 ms": ("1gbit", 1e-4),
    "1 Gbit/s, 2 ms": ("1gbit", 2e-3),
}
# In bytes per second.
RATES = {"1gbit": 1e9 / 8, "100mbit": 1e8 / 8}
# The bytes of each frame that Ethernet, IP and TCP take, and Ethernet alone. Then the
# largest frame without Ethernet's, which is larger in networks with a delay.
HEADER_BYTES, ETHERNET_BYTES = 66, 14
FRAME_BYTES = {False: 1500, True: 9000}
OURS = "keras_hvd"
BY_MPI = "keras_hvd by MPI"
PEERS = ("Open MPI", "gloo")
OTHERS = (BY_MPI, *PEERS)


class Visits(measurement.Series):
    """The average time of a call, visit by visit.

    A rank of MPI may be a call ahead of another, which then finds the data there. So
    far from each other every second call takes no time, and the others twice as long.
    """

    def measure(self, size: int, repeats: int) -> list[float]:
        """One visit: the mean of `repeats` calls."""
        return [statistics.fmean(super().measure(size, repeats))]


Summaries = dict[str, dict[str, float]]
# A size, or the gradients: series: summary
Measured = dict[str, Summaries]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    if why := network.unavailable():
        sys.exit(f"There can be no network namespaces here: {why}")
    measured: dict[str, Measured] = {}
    versions: dict[str, str] = {}
    checks: list[Check] = []
    for hosts in options.hosts:
        for name in options.networks:
            rate, delay = NETWORKS[name]
            with network.connected(hosts, rate, delay) as connected:
                place = Place(connected, options.ranks, options.tls)
                title = f"{hosts} hosts of {options.ranks}, {name}"
                title += ", keras_hvd with TLS" if options.tls else ""
                print(f"{title}: starting the contenders ...", flush=True)
                measured[title], found = compare(place, options)
                versions |= found
                checks += requirements(title, measured[title])
                if rate:
                    line = line_seconds(hosts, RATES[rate], FRAME_BYTES[delay > 0])
                    checks += line_requirement(title, line, measured[title])
    tables.publish(
        options.output,
        {
            "benchmark": "hosts",
            "machine": options.machine,
            "versions": versions,
            "settings": {"seconds": options.seconds, "rounds": options.rounds},
            "measured": measured,
            "checks": checks,
            "tables": [
                *(table(*each) for each in measured.items()),
                tables.check_table(checks),
            ],
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_arguments(parser, seconds=1, rounds=5)
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="of each host; default: 1"
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=list(NETWORKS),
        default=list(NETWORKS),
        help="default: all",
    )
    parser.add_argument("--tls", action="store_true", help="keras_hvd encrypts")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=OTHERS,
        default=OTHERS,
        metavar="NAME",
        help=f"of {', '.join(OTHERS)}, those to compare with; default: all",
    )
    parser.add_argument(
        "--least", type=int, default=SIZES[0], metavar="BYTES", help="smallest tensor"
    )
    parser.add_argument(
        "--most", type=int, default=SIZES[-1], metavar="BYTES", help="largest tensor"
    )
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def compare(
    place: Place, options: argparse.Namespace
) -> tuple[Measured, dict[str, str]]:
    """Times of all contenders in one network, and their versions."""
    with_gradients = options.most == SIZES[-1]
    jobs = hosts_jobs.start(place, options.peers, with_gradients)
    try:
        tensors = [
            Visits(name, jobs[name], "c_api", name in OTHERS)
            for name in (OURS, *OTHERS)
            if name in jobs
        ]
        measured = {}
        for size in (size for size in SIZES if options.least <= size <= options.most):
            measured[size_text(size)] = row = measurement.interleave(
                tensors, size, options.seconds, options.rounds
            )
            show(size_text(size), row)
        if with_gradients:
            gradients = Visits(OURS, jobs["gradients"], "resnet50/c_api_group")
            measured[GRADIENTS] = row = measurement.interleave(
                [gradients, *(each for each in tensors if each.name in PEERS)],
                total_bytes(WORKLOADS["resnet50"]),
                options.seconds,
                options.rounds,
            )
            show(GRADIENTS, row)
        return measured, {name: job.version for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.close()


def show(what: str, row: Summaries) -> None:
    """Prints a line that shows progress."""
    texts = [f"{name} {spread(found)}" for name, found in row.items()]
    print(f"{what}: " + ", ".join(texts), flush=True)


def table(title: str, measured: Measured) -> Table:
    names = [
        name for name in (OURS, *OTHERS) if any(name in r for r in measured.values())
    ]
    header = ["size", *names, *(f"{name} / ours" for name in names if name != OURS)]
    rows = []
    for what, row in measured.items():
        ours = row[OURS]["median"]
        cells = [spread(row[name]) if name in row else "-" for name in names]
        cells += [
            f"{row[name]['median'] / ours:.2f} x" if name in row else "-"
            for name in names
            if name != OURS
        ]
        rows.append([what, *cells])
    return Table(
        f"Allreduce, {title}: median of visits (10th-90th percentile)", header, rows
    )


def requirements(title: str, measured: Measured) -> list[Check]:
    """The requirements on keras_hvd: large tensors as fast as any peer's."""
    large = [size_text(size) for size in SIZES if size >= 256 * KIB]
    checks = []
    for what, row in measured.items():
        for peer in (peer for peer in PEERS if peer in row):
            ratio = row[peer]["median"] / row[OURS]["median"]
            if what in large:
                wanted = 0.9
            elif what == GRADIENTS or peer == "gloo":
                wanted = 1
            else:
                wanted = 1 / 3
            text = f"{title}, {what}: as fast as {peer}"
            checks.append(Check(text, ratio, wanted, True, "x"))
    return [*checks, *requirements_by_mpi(title, measured.get(size_text(64 * MIB), {}))]


def line_seconds(hosts: int, rate: float, frame: int) -> float:
    """A line's time for the bytes that a host must send of 64 MiB in any scheme."""
    on_line = frame + ETHERNET_BYTES
    return (
        2 * (hosts - 1) / hosts * 64 * MIB * on_line / (on_line - HEADER_BYTES) / rate
    )


def line_requirement(title: str, line: float, measured: Measured) -> list[Check]:
    """The requirement to use nearly all of the cables' rate."""
    row = measured.get(size_text(64 * MIB))
    if row is None:
        return []
    text = f"{title}, 64 MiB: of the line's {line * 1e3:.0f} ms"
    return [Check(text, 100 * line / row[OURS]["median"], 90, True, "%")]


def requirements_by_mpi(title: str, row: Summaries) -> list[Check]:
    """Where MPI carries 64 MiB, keras_hvd must lose little to MPI alone, and to TCP."""
    if BY_MPI not in row:
        return []
    return [
        Check(
            f"{title}, 64 MiB by MPI: as fast as {name}",
            row[name]["median"] / row[BY_MPI]["median"],
            0.9,
            True,
            "x",
        )
        for name in ("Open MPI", OURS)
        if name in row
    ]


if __name__ == "__main__":
    main()
