"""Draws figures of docs/measurements.md, so that pictures and tables cannot differ."""

from __future__ import annotations

import io
import re
from pathlib import Path

from matplotlib.figure import Figure
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGE = Path(__file__).parents[1] / "measurements.md"
MICROSECONDS = {"us": 1.0, "ms": 1e3, "s": 1e6}
BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
COLORS = {
    "keras_hvd": "#3949ab",
    "Open MPI": "#d55e00",
    "MPICH": "#009e73",
    "gloo": "#7a7a7a",
}
# picture: where its table begins, and its columns
PICTURES = {
    "one_host.svg": (
        "**Allreduce, 2 ranks:",
        {"C API": "keras_hvd", "Open MPI": "", "MPICH": "", "gloo": ""},
    ),
    "two_hosts.svg": (
        "## Several hosts",
        {
            "keras_hvd, 1 Gbit/s": "keras_hvd",
            "Open MPI, 1 Gbit/s": "Open MPI",
            "gloo, 1 Gbit/s": "gloo",
        },
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, (start, columns) in PICTURES.items():
        drawn = _drawn(_table(start), columns)
        files.append(File.generated(config, name, content=drawn))
    return files


def _table(start: str) -> list[dict[str, str]]:
    """The rows of the first table after a text of the page."""
    text = PAGE.read_text()
    after = text[text.index(start) :]
    lines = re.search(r"(^\|.*\n)+", after, re.M)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row)) for row in rows[2:]]


def _drawn(rows: list[dict[str, str]], columns: dict[str, str]) -> str:
    first = next(iter(rows[0]))
    sized = [row for row in rows if row[first].split()[-1] in BYTES]
    sizes = [_value(row[first], BYTES) for row in sized]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for column, label in columns.items():
        times = [_value(row[column], MICROSECONDS) for row in sized]
        name = label or column
        axes.loglog(sizes, times, marker="o", ms=4, color=COLORS[name], label=name)
    axes.set_xticks(sizes, [row[first] for row in sized], rotation=45, minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks([1, 1e2, 1e4, 1e6], ["1 us", "100 us", "10 ms", "1 s"])
    axes.set_ylabel("time of an allreduce")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()


def _value(cell: str, units: dict[str, float]) -> float:
    number, unit = cell.split()[:2]
    return float(number) * units[unit]
