"""The benchmarks' tables: figures as text, in Markdown, and as a result's JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

# Share of the cores in use up to which a machine counts as idle.
_QUIET = 0.05


@dataclass
class Table:
    """A table of text.

    Args:
        title: its heading.
        header: the columns' names.
        rows: a text for each column.
    """

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table in Markdown, its columns aligned for terminals too."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        rule = ["-" * width for width in widths[:1]]
        rule += ["-" * (width - 1) + ":" for width in widths[1:]]
        rendered = [_line(self.header, widths), _line(rule, widths)]
        rendered += [_line(row, widths) for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *rendered])


@dataclass
class Check:
    """One thing that a benchmark must show.

    Args:
        what: the figure.
        measured: its value.
        wanted: the limit.
        at_least: whether the figure must reach the limit, or stay at or below it.
        unit: how to write both: "us", "x" or "%"; those of
            "%", "traces" and "jobs" are whole.
    """

    what: str
    measured: float
    wanted: float
    at_least: bool
    unit: str

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        if self.at_least:
            return self.measured >= self.wanted
        return self.measured <= self.wanted


def check_table(checks: list[Check]) -> Table:
    """Each limit, its figure, and whether the figure is within it."""
    return Table(
        "Requirements",
        ["requirement", "wanted", "measured", "met"],
        [
            [
                check.what,
                ("at least " if check.at_least else "at most ")
                + _value(check.wanted, check.unit),
                _value(check.measured, check.unit),
                "yes" if check.met else "NO",
            ]
            for check in checks
        ],
    )


def machine_text(machine: dict) -> str:
    """A machine's description in one paragraph."""
    kind = "virtual machine" if machine["virtual"] else "machine"
    return (
        f"{machine['processor']}, {machine['cores']} cores ({kind}), "
        f"{', '.join(machine['caches'])}; {machine['memory_gib']} GiB of memory, "
        f"transparent huge pages: {machine['huge_pages']}; Linux {machine['kernel']}, "
        f"Python {machine['python']}"
    )


def publish(folder: Path, result: dict) -> None:
    """Writes a benchmark's result as JSON and prints it.

    Args:
        folder: for the JSON; is made if it does not exist.
        result: `benchmark` (its name), `machine`, `versions`, `tables`, `checks`, and
            the figures; lines that go before the tables as `notes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}.json"
    text = json.dumps(result, indent=1, default=asdict)
    path.write_text(text + "\n")
    print(report(json.loads(text)))
    print(f"\nWritten: {path}")


def report(result: dict) -> str:
    """A result as Markdown: the machine, the versions, the notes, the tables.

    Args:
        result: the JSON that `publish` wrote, parsed.

    Returns:
        The text.
    """
    parts = [f"Machine: {machine_text(result['machine'])}."]
    busy, cores = result["machine"]["busy_cores_before"], result["machine"]["cores"]
    if busy > _QUIET * cores:
        parts.append(
            f"The machine was not idle before this run (others used {busy:.1f} of its "
            f"{cores} cores): these figures say little."
        )
    versions = ", ".join(sorted(set(result["versions"].values())))
    if versions:
        parts.append(f"Versions: {versions}.")
    parts += result.get("notes", [])
    parts += [Table(**table).markdown() for table in result["tables"]]
    return "\n\n".join(parts)


def size_text(size: int) -> str:
    """A number of bytes, for a reader."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """A time with three digits."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
        if seconds < limit:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def spread(summary: dict[str, float]) -> str:
    """Median (and between which values four of five calls lie)."""
    low, high = duration(summary["p10"]), duration(summary["p90"])
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{duration(summary['median'])} ({low}-{high})"


def _digits(value: float) -> str:
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def _value(value: float, unit: str) -> str:
    text = f"{value:.0f}" if unit in ("%", "traces", "jobs") else _digits(value)
    return f"{text} {unit}"


def _line(cells: list[str], widths: list[int]) -> str:
    padded = [cells[0].ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])]
    return "| " + " | ".join(padded) + " |"
