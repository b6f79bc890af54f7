"""The report of a job: one page, which needs no other file and no network."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from keras_hvd.recording.epochs import Epoch
from keras_hvd.report.advice import advice, percent
from keras_hvd.report.record import WAITING, Intervals, JobRecord, Rates, Tensor
from keras_hvd.timeline.summary import OWN

# Drawn in place of the page's own color, which follows light and dark.
_TEXT = "#010203"
COLORS = _COMPUTING, _WAITING, _MOVING = "#6b9080", "#e07a3f", "#4a7fb5"
_MOST_TENSORS = _MOST_EPOCHS = 20
# The number of stretches that a picture can show.
_MOST_DRAWN = 512
# A stretch with less of its time in steps is a gap in the lines.
_GAP = 0.1

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --page: #ffffff; --line: #d5d5d5 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #17191c; --line: #44484d }
}
body { color: var(--text); background: var(--page); margin: 0 auto; max-width: 54rem;
  padding: 1rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
svg { width: 100%; min-width: 36rem; height: auto; color: var(--text) }
figure { margin: 1rem 0 } figcaption { font-size: .9rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
  text-align: left; vertical-align: top }
th, td:first-child { white-space: nowrap }
td:last-child { overflow-wrap: anywhere }
.tensors td + td { white-space: nowrap }
.tensors td:first-child { white-space: normal; overflow-wrap: anywhere;
  min-width: 9rem }
"""


def write(record: JobRecord, path: str) -> None:
    """Writes the report of a job.

    Args:
        record: The job's record.
        path: The file, which is replaced.

    Raises:
        OSError: It cannot be written.
    """
    parts = [*_front(record), *_charts(record), *_tables(record)]
    Path(path).write_text(document("Report of a job", parts), encoding="utf-8")


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page, from the content of its `<main>` tags."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _front(record: JobRecord) -> list[str]:
    begun = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(record.begin))
    is_known = all(member.host is not None for member in record.members)
    on_hosts = f" on {record.hosts} host{'s' if record.hosts > 1 else ''}"
    steps = int(record.intervals.steps.sum())
    facts = {
        "Command": record.command,
        "Generation": record.generation,
        "Began": begun,
        "Recorded": f"{_seconds(record.seconds)}, {steps:,} steps",
        "Ranks": f"{record.size}{on_hosts if is_known else ''}",
        "End": f"The job {record.ended}.",
        "Not recorded": f"{record.left_out:,} requests" if record.left_out else "",
        "Not known": record.not_known,
    }
    said = "".join(f"<p>{_marked(text)}</p>" for text in advice(record))
    rows = [each for each in facts.items() if each[1]]
    return ["<h1>What the job did</h1>", said, table((), rows), *_shares(record)]


def _shares(record: JobRecord) -> list[str]:
    shares = {name: seconds for name, seconds in record.shares().items() if seconds}
    if not shares:
        return []
    all_of_it = sum(shares.values())
    rows = [
        (name, _seconds(seconds), percent(seconds / all_of_it))
        for name, seconds in shares.items()
    ]
    explained = f"<p>{WAITING}</p>" if record.size > 1 else ""
    head = "rank 0", "time", "of all"
    return ["<h2>Where the time went</h2>", table(head, rows), explained]


def _marked(text: str) -> str:
    """`text` as HTML, with the parts between backquotes as code."""
    return "".join(
        f"<code>{escape(part)}</code>" if place % 2 else escape(part)
        for place, part in enumerate(text.split("`"))
    )


# --- charts -------------------------------------------------------------------------


def _charts(record: JobRecord) -> list[str]:
    if not len(record.intervals.steps):
        return []
    times = _drawn(record.intervals)
    record = dataclasses.replace(record, intervals=times)
    charts = []
    rate = _without_gaps(times, times.samples / np.maximum(times.inside, 1e-9))
    loss = _without_gaps(times, times.loss)
    if np.isfinite(rate).any():
        charts += ["<h2>Throughput and loss</h2>", _line(times, rate, "samples/s")]
    if np.isfinite(loss).any():
        charts.append(_line(times, loss, "loss of rank 0"))
    if record.size == 1:
        return charts
    charts += ["<h2>Time of a step</h2>", _split(record)] if times.inside.any() else []
    rates = record.rates()
    if rates is not None:
        charts += ["<h2>Links and memory</h2>", _throughput(record, rates)]
    return [*charts, "<h2>Who waited</h2>", _heat(record)]


def _drawn(times: Intervals) -> Intervals:
    """The stretches to draw: neighbours together where there are too many."""
    count = len(times.steps)
    firsts = np.arange(0, count, -(-count // _MOST_DRAWN))
    # Values that are not known, such as those of a validation, count as none.
    known = {
        name: np.isfinite(value).astype(float)
        for name, value in (("samples", times.samples), ("loss", times.loss))
    }
    known["loss"] *= times.steps
    values = vars(times) | {
        "samples": np.nan_to_num(times.samples),
        "loss": np.nan_to_num(times.loss) * known["loss"],
    }
    sums = {name: np.add.reduceat(value, firsts) for name, value in values.items()}
    sums["begin"] = times.begin[firsts]
    sums["end"] = np.append(times.begin[firsts[1:]], times.end[-1])
    counts = {name: np.add.reduceat(value, firsts) for name, value in known.items()}
    sums["samples"][counts["samples"] == 0] = np.nan
    counts["loss"][counts["loss"] == 0] = np.nan
    sums["loss"] /= counts["loss"]
    return Intervals(**sums)


def _without_gaps(times: Intervals, values: np.ndarray) -> np.ndarray:
    return np.where(times.share < _GAP, np.nan, values)


def _line(times: Any, values: np.ndarray, name: str) -> str:
    def draw(axes: Any) -> None:
        edges = np.append(times.begin, times.end[-1])
        axes.stairs(values, edges, baseline=None, color=_MOVING, linewidth=1.2)
        axes.margins(x=0)
        axes.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
        axes.set_ylabel(name)

    finite = values[np.isfinite(values)]
    return figure(draw, f"{name}: median {_number(np.median(finite))}.")


def _split(record: JobRecord) -> str:
    times = record.intervals
    whole, parts = times.inside, times.parts()
    steps = np.maximum(times.steps, 1)
    each_step = 1000 * whole / steps
    # The first steps, which compile, would make all others flat.
    top = 1.5 * float(np.quantile(each_step, 0.95))

    def draw(axes: Any) -> None:
        edges = np.append(times.begin, times.end[-1])
        heights = (_without_gaps(times, 1000 * part / steps) for part in parts.values())
        drawn = [np.append(each, each[-1]) for each in heights]
        axes.stackplot(edges, *drawn, step="post", colors=COLORS, labels=parts)
        axes.set_ylabel("ms a step")
        axes.margins(x=0)
        axes.set_ylim(0, top)
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))

    total, many = max(float(whole.sum()), 1e-9), max(float(times.steps.sum()), 1.0)
    figures = [
        (name, f"{1000 * part.sum() / many:.3g} ms", percent(part.sum() / total))
        for name, part in parts.items()
    ]
    caption = WAITING
    if steps.max() > 1:
        caption += f" Drawn are means of {steps.max():,.0f} steps."
    if each_step.max() > top:
        longest = _number(each_step.max())
        caption += f" What takes longer, up to {longest} ms, is cut off."
    if record.left_out:
        lost = "Not all requests were recorded, so steps seem longer than they were."
        caption += f" {lost}"
    return figure(draw, caption) + table(
        ("rank 0", "a step", "of the steps' time"), figures
    )


def _throughput(record: JobRecord, rates: Rates) -> str:
    """The bytes that could pass, and the bytes that did."""
    bars = [
        ("could pass", rates.possible, _COMPUTING),
        ("passed while moving", rates.moving, _MOVING),
        ("passed over all", rates.overall, _MOVING),
    ]
    known = [each for each in bars if each[1]]

    def draw(axes: Any) -> None:
        names, values, colors = zip(*known)
        axes.barh(names, [value / 1e6 for value in values], color=colors, height=0.6)
        axes.invert_yaxis()
        axes.set_xlabel("MB of tensors in a second")

    return figure(draw, _of_rates(record, rates))


def _of_rates(record: JobRecord, rates: Rates) -> str:
    passed = (
        f"While rank 0 moved bytes, {_rate(rates.moving)} of tensors passed, and "
        f"{_rate(rates.overall)} over all of the time."
    )
    if not rates.possible:
        return passed
    sent = ""
    if record.hosts > 1:
        # Each host reduces a part, and sends the other parts and its result.
        sends = 2 * rates.possible * (record.hosts - 1) / record.hosts
        sent = f", for which each host sends {_rate(sends)}"
    medium = record.medium[0].upper() + record.medium[1:]
    return (
        f"{medium} could pass {_rate(rates.possible)} of tensors{sent}: so fast were "
        f"allreduces before the job's own work began. {passed} That is "
        f"{percent(rates.moving / rates.possible)} and "
        f"{percent(rates.overall / rates.possible)} of it."
    )


def _heat(record: JobRecord) -> str:
    times = record.intervals
    spans = np.maximum(times.end - times.begin, 1e-9)[:, None]
    shares = 100 * times.waits / spans

    def draw(axes: Any) -> None:
        edges = np.append(times.begin, times.end[-1])
        ranks = np.arange(record.size + 1) - 0.5
        mesh = axes.pcolormesh(
            edges, ranks, shares.T, cmap="magma_r", vmin=0, vmax=100, rasterized=True
        )
        axes.invert_yaxis()
        axes.set_ylabel("rank")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.figure.colorbar(mesh, ax=axes, label="waiting, % of the time")

    rows = [
        (rank, _seconds(waited), _seconds(others))
        for rank, (waited, others) in enumerate(
            zip(times.waits.sum(axis=0), times.waited_for.sum(axis=0))
        )
    ]
    head = "rank", "waited", "all others waited for it"
    return figure(draw, WAITING) + table(head, rows)


def figure(draw: Callable[[Any], None], caption: str) -> str:
    """A picture with its caption; over time unless the caption says otherwise."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = "text.color axes.labelcolor axes.edgecolor xtick.color ytick.color"
    settings: Any = dict.fromkeys(lines.split(), _TEXT)
    settings |= {"svg.fonttype": "none", "svg.hashsalt": caption}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(8, 2.8), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("seconds")
        draw(axes)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    picture = drawn.getvalue()
    picture = picture[picture.index("<svg") :].replace(_TEXT, "currentColor")
    label = f'<svg role="img" aria-label="{escape(caption)}" '
    return (
        f'<figure><div class="wide" tabindex="0">{picture.replace("<svg ", label, 1)}'
        f"</div><figcaption>{escape(caption)}</figcaption></figure>"
    )


# --- tables -------------------------------------------------------------------------


def _tables(record: JobRecord) -> list[str]:
    parts = []
    if record.epochs:
        parts += ["<h2>Epochs</h2>", _of_epochs(record.epochs)]
    if record.tensors:
        parts += ["<h2>Slowest tensors</h2>", _of_tensors(record.tensors)]
    if record.events:
        said = [(_seconds(each.time), each.kind, each.text) for each in record.events]
        parts.append("<h2>Warnings, stalls and the end</h2>")
        parts.append(table(("at", "what", "said"), said))
    known = [each for each in record.members if each.host]
    if known:
        ranks = [(m.rank, m.host, m.process, m.cores, m.gpu) for m in known]
        parts.append("<h2>Who took part</h2>")
        parts.append(table(("rank", "host", "process", "cores", "GPU"), ranks))
    if record.settings:
        settings = sorted(record.settings.items())
        parts += ["<h2>Versions and settings</h2>", table((), settings)]
    return parts


def _of_epochs(epochs: Sequence[Epoch]) -> str:
    """The first epoch, the last, the best, and as many between as there is room for."""
    names = list(dict.fromkeys(name for _, logs in epochs for name in logs))
    by = "val_loss" if "val_loss" in names else "loss"
    best = min(range(len(epochs)), key=lambda place: epochs[place][1].get(by, np.inf))
    count = min(len(epochs), _MOST_EPOCHS)
    shown = {*np.linspace(0, len(epochs) - 1, count).astype(int).tolist(), best}
    rows = [
        (
            f"{number} (best {by})" if place == best and by in logs else number,
            *(_number(logs[name]) if name in logs else None for name in names),
        )
        for place, (number, logs) in enumerate(epochs)
        if place in shown
    ]
    return table(("epoch", *names), rows)


def _of_tensors(tensors: Iterable[Tensor]) -> str:
    rows = []
    slowest = sorted(
        _with_own_together(tensors), key=lambda each: sum(each.phases), reverse=True
    )
    for each in slowest[:_MOST_TENSORS]:
        times = max(each.times, 1)
        # The size of an allgather is not known.
        size = _bytes(each.bytes / times) if each.bytes else ""
        phases = (_seconds(phase / times) for phase in each.phases)
        rows.append((each.name, f"{each.times:,}", size, *phases))
    head = "tensor", "times", "size", "from first to last rank", "queued", "running"
    return f'<div class="tensors">{table(head, rows)}</div>'


def _with_own_together(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of the user, and one that stands for all of keras_hvd's own."""
    of_user: list[Tensor] = []
    own: list[Tensor] = []
    for each in tensors:
        (own if each.name.startswith(OWN) else of_user).append(each)
    if own:
        numbers = zip(*(dataclasses.astuple(each)[1:] for each in own))
        times, _, *phases = map(sum, numbers)
        # Their sizes say nothing together.
        of_user.append(Tensor(f"keras_hvd's own ({len(own)})", times, 0, *phases))
    return of_user


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells, below their names if there are any. None makes an empty cell."""

    def cell(value: object) -> str:
        return f"<td>{'' if value is None else escape(str(value))}</td>"

    cells = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    table = f"<table>{top}<tbody>{cells}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1 or seconds == 0:
            return f"{_number(seconds * scale)} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _bytes(number: float) -> str:
    return _in_units(number, 1024, ("B", "KiB", "MiB", "GiB"))


def _rate(number: float) -> str:
    """Bytes a second, in the units of network hardware."""
    return _in_units(number, 1000, ("B/s", "kB/s", "MB/s", "GB/s"))


def _in_units(number: float, base: int, units: Sequence[str]) -> str:
    *smaller, largest = units
    for unit in smaller:
        # A number that would be rounded to `base` belongs to the next unit.
        if number < base - 0.5:
            return f"{number:.3g} {unit}"
        number /= base
    return f"{number:.3g} {largest}"
