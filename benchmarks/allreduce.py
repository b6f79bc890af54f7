"""How long an allreduce takes, beside others': `python benchmarks/allreduce.py`.

Sums float32 tensors of 4 B to 256 MiB over ranks of one host, each rank bound to its
share of the cores: keras_hvd at its C API and in a `tf.function`, a bare probe of what
the memory gives, and Open MPI, MPICH and gloo. Prints tables, writes JSON and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import environments
import jobs
import measurement
import plots
import tables
from tables import Check, Table, duration, size_text, spread

SIZES = [4 << (2 * i) for i in range(14)]
KIB, MIB = 1 << 10, 1 << 20
OUR_SCRIPT = "keras_hvd_allreduce.py"
PROBE = "probe "
# Waiting ranks give their core to others: faster on shared cores, slower elsewhere.
YIELDING = ", yielding"
PEERS = ("Open MPI", "MPICH", "Open MPI" + YIELDING, "MPICH" + YIELDING, "gloo")
OURS = ("C API", "tf.function", "pass-through")
# Measured again beside four ranks, whose times are compared to it.
OF_TWO_RANKS = "C API, 2 ranks"

Summaries = dict[str, dict[str, float]]
# bytes: series: summary
Measured = dict[int, Summaries]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    measured: dict[int, Measured] = {}
    versions: dict[str, str] = {}
    for ranks in options.ranks:
        print(f"{ranks} ranks: starting the contenders ...", flush=True)
        series = start(ranks, options.peers)
        versions |= {each.name: each.job.version for each in series}
        try:
            measured[ranks] = measure(series, options)
        finally:
            for job in {each.job for each in series}:
                job.close()
    checks = requirements(measured)
    result = {
        "benchmark": "allreduce",
        "machine": options.machine,
        "versions": versions,
        "settings": {"seconds": options.seconds, "rounds": options.rounds},
        "measured": flat(measured),
        "checks": checks,
        "tables": [
            *(table(ranks, sizes) for ranks, sizes in measured.items()),
            *(probe_table(ranks, sizes) for ranks, sizes in measured.items()),
            tables.check_table(checks),
        ],
    }
    tables.publish(options.output, result)
    plots.by_size(
        options.output / "allreduce.svg",
        "Allreduce of float32, Sum",
        {ranks: plotted(sizes) for ranks, sizes in measured.items()},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_arguments(parser, seconds=0.5, rounds=5)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4"
    )
    parser.add_argument(
        "--most", type=int, default=SIZES[-1], metavar="BYTES", help="largest tensor"
    )
    parser.add_argument(
        "--no-peers",
        dest="peers",
        action="store_false",
        help="without others",
    )
    options = parser.parse_args()
    options.machine = measurement.machine()
    return options


def start(ranks: int, with_peers: bool) -> list[measurement.Series]:
    """Starts all series of one number of ranks; reports those that cannot start."""
    timed_calls = environments.compiled("timed_calls.c")
    ours = jobs.keras_hvd(OUR_SCRIPT, ranks, "--timed-calls", timed_calls)
    variants = ("c_api", "tf_function", "pass_through")
    series = [
        measurement.Series(name, ours, variant) for name, variant in zip(OURS, variants)
    ]
    if ranks == 4:
        of_two = jobs.keras_hvd(OUR_SCRIPT, 2, "--timed-calls", timed_calls)
        series.append(measurement.Series(OF_TWO_RANKS, of_two, "c_api"))
    bare = jobs.probe(ranks)
    series += [
        measurement.Series(PROBE + variant, bare, variant)
        for variant in jobs.PROBE_VARIANTS
    ]
    for name, begin in peers(ranks).items() if with_peers else ():
        try:
            series.append(measurement.Series(name, begin(), "in_place", True))
        except (environments.UnavailableError, measurement.ContenderError) as error:
            print(f"Without {name}: {error}", flush=True)
    return series


def peers(ranks: int) -> dict[str, Callable[[], measurement.Job]]:
    """The other libraries; where ranks share cores, also told to yield."""
    found = {
        "Open MPI": lambda: jobs.open_mpi(ranks, yielding=False),
        "MPICH": lambda: jobs.mpich(ranks, yielding=False),
        "gloo": lambda: jobs.gloo(ranks),
    }
    if ranks > measurement.cores.available():
        found["Open MPI" + YIELDING] = lambda: jobs.open_mpi(ranks, yielding=True)
        found["MPICH" + YIELDING] = lambda: jobs.mpich(ranks, yielding=True)
    return found


def measure(series: list[measurement.Series], options: argparse.Namespace) -> Measured:
    found = {}
    for size in (size for size in SIZES if size <= options.most):
        found[size] = measurement.interleave(
            series, size, options.seconds, options.rounds
        )
        print(f"{size_text(size)}: " + ", ".join(summarized(found[size])), flush=True)
    return found


def summarized(row: Summaries) -> list[str]:
    """A line that shows progress."""
    shown = [name for name in row if not name.startswith(PROBE)]
    texts = [f"{name} {duration(row[name]['median'])}" for name in shown]
    return [*texts, f"probe {duration(row[best(row, PROBE)]['median'])}"]


def best(row: Summaries, *starts: str) -> str | None:
    """The fastest series whose name begins with one of `starts`."""
    names = [name for name in row if name.startswith(starts)]
    return min(names, key=lambda name: row[name]["median"], default=None)


def table(ranks: int, measured: Measured) -> Table:
    first = next(iter(measured.values()))
    columns = [name for name in (*OURS, *PEERS) if name in first]
    rows = []
    for size, row in measured.items():
        cells = [size_text(size)]
        cells += [spread(row[name]) if name in row else "-" for name in columns]
        cells.append(spread(row[best(row, PROBE)]))
        peer = best(row, *PEERS)
        ours = row["C API"]["median"]
        cells.append(f"{row[peer]['median'] / ours:.2f} x" if peer else "-")
        cells.append(f"{row[best(row, PROBE)]['median'] / ours:.0%}")
        rows.append(cells)
    header = ["size", *columns, "probe's best", "against peers", "of the probe"]
    return Table(
        f"Allreduce, {ranks} ranks: median (10th-90th percentile)", header, rows
    )


def probe_table(ranks: int, measured: Measured) -> Table:
    names = [name for name in next(iter(measured.values())) if name.startswith(PROBE)]
    header = [readable(name) for name in names]
    rows = [
        [size_text(size), *(duration(row[name]["median"]) for name in names)]
        for size, row in measured.items()
    ]
    return Table(f"The probe, {ranks} ranks: median", ["size", *header], rows)


def readable(name: str) -> str:
    kind, slot = name.removeprefix(PROBE).split("/")
    return f"{kind.replace('_', ' ')}, {size_text(int(slot))}"


def requirements(measured: dict[int, Measured]) -> list[Check]:
    """The requirements on keras_hvd, checked against the figures."""
    checks = []
    for size, row in measured.get(2, {}).items():
        checks += two_ranks(size, row)
    for size, row in measured.get(4, {}).items():
        checks += four_ranks(size, row)
    return checks


def two_ranks(size: int, row: Summaries) -> list[Check]:
    checks = []
    ours = row["C API"]["median"]
    over = row["tf.function"]["median"] - row["pass-through"]["median"]
    text = f"{size_text(size)}, 2 ranks: "
    if size <= KIB:
        checks.append(Check(text + "C API", ours * 1e6, 10, False, "us"))
        what = text + "tf.function above pass-through"
        checks.append(Check(what, over * 1e6, 60, False, "us"))
    peer = best(row, *PEERS)
    wanted = {64 * KIB: 1, MIB: 1.5, 16 * MIB: 1.5, 64 * MIB: 3, 256 * MIB: 3}
    if peer and size in wanted:
        ratio = row[peer]["median"] / ours
        checks.append(Check(f"{text}as fast as {peer}", ratio, wanted[size], True, "x"))
    if size >= MIB:
        share = 100 * row[best(row, PROBE)]["median"] / ours
        checks.append(Check(text + "of the probe's best", share, 75, True, "%"))
    if size == 64 * MIB:
        ratio = row["tf.function"]["median"] / ours
        what = text + "tf.function against C API"
        checks.append(Check(what, ratio, 1.25, False, "x"))
    return checks


def four_ranks(size: int, row: Summaries) -> list[Check]:
    ours = row["C API"]["median"]
    text = f"{size_text(size)}, 4 ranks: "
    ratio = ours / row[OF_TWO_RANKS]["median"]
    checks = [Check(text + "time against 2 ranks", ratio, 4, False, "x")]
    peer = best(row, *PEERS)
    if peer:
        ratio = row[peer]["median"] / ours
        checks.append(Check(f"{text}as fast as {peer}", ratio, 1, True, "x"))
    return checks


def flat(measured: dict[int, Measured]) -> list[dict[str, object]]:
    return [
        {"ranks": ranks, "bytes": size, "series": name, **found}
        for ranks, sizes in measured.items()
        for size, row in sizes.items()
        for name, found in row.items()
    ]


def plotted(measured: Measured) -> dict[str, dict[int, dict[str, float]]]:
    """Series: size: summary, with the probe's best as one series."""
    lines: dict[str, dict[int, dict[str, float]]] = {}
    for size, row in measured.items():
        for name, found in row.items():
            if not name.startswith(PROBE):
                lines.setdefault(name, {})[size] = found
        lines.setdefault("probe's best", {})[size] = row[best(row, PROBE)]
    return lines


if __name__ == "__main__":
    main()
