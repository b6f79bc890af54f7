"""The report of a job: one page, which needs no other file and no network."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from keras_hvd.report.advice import advice
from keras_hvd.report.record import Event, JobRecord, Member, Tensor

# Drawn where the page's own color belongs, which follows light and dark.
_TEXT = "#010203"
_COMPUTING, _WAITING, _MOVING = "#6b9080", "#e07a3f", "#4a7fb5"
_MOST_TENSORS = 20

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
        record: What the job did.
        path: The file, which is replaced.

    Raises:
        OSError: It cannot be written.
    """
    parts = [*_front(record), *_charts(record), *_tables(record)]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Report of a job</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    Path(path).write_text(page, encoding="utf-8")


def _front(record: JobRecord) -> list[str]:
    begun = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(record.begin))
    hosts = {member.host for member in record.members}
    on_hosts = f" on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    steps = int(record.intervals.steps.sum())
    facts = [
        ("Command", record.command),
        ("Began", begun),
        ("Recorded", f"{_seconds(record.seconds)}, {steps:,} steps"),
        ("Ranks", f"{record.size}{'' if None in hosts else on_hosts}"),
        ("End", f"The job {record.ended}."),
    ]
    if record.left_out:
        facts.append(("Not recorded", f"{record.left_out:,} requests"))
    facts.append(("Not known", record.not_known))
    said = "".join(f"<p>{_marked(text)}</p>" for text in advice(record))
    return [
        "<h1>What the job did</h1>",
        said,
        _table((), [each for each in facts if each[1]]),
    ]


def _marked(text: str) -> str:
    """`text`, with what is between backquotes as code."""
    return "".join(
        f"<code>{escape(part)}</code>" if place % 2 else escape(part)
        for place, part in enumerate(text.split("`"))
    )


# --- charts -------------------------------------------------------------------------


def _charts(record: JobRecord) -> list[str]:
    times = record.intervals
    if not len(times.steps):
        return []
    charts = []
    if np.isfinite(times.samples).any():
        rate = times.samples / np.maximum(times.end - times.begin, 1e-9)
        charts += ["<h2>Throughput and loss</h2>", _line(times, rate, "samples/s")]
    if np.isfinite(times.loss).any():
        charts.append(_line(times, times.loss, "loss of rank 0"))
    charts += ["<h2>Time of a step</h2>", _split(record)]
    if record.size > 1:
        charts += ["<h2>Who waited</h2>", _heat(record)]
    return charts


def _line(times: Any, values: np.ndarray, name: str) -> str:
    def draw(axes: Any) -> None:
        edges = np.append(times.begin, times.end[-1])
        axes.stairs(values, edges, baseline=None, color=_MOVING, linewidth=1.2)
        axes.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
        axes.set_ylabel(name)

    finite = values[np.isfinite(values)]
    return _figure(draw, f"{name}: median {np.median(finite):,.4g}.")


def _split(record: JobRecord) -> str:
    times = record.intervals
    whole = times.end - times.begin
    steps = np.maximum(times.steps, 1)
    exposed = times.exposed_waiting + times.exposed_moving
    parts = [
        np.maximum(whole - exposed, 0),
        times.exposed_waiting,
        times.exposed_moving,
    ]

    each_step = 1000 * whole / steps
    # The first steps, which compile, would make all others flat.
    top = 1.5 * float(np.quantile(each_step, 0.95))

    def draw(axes: Any) -> None:
        axes.stackplot(
            np.append(times.begin, times.end[-1]),
            *(np.append(each, each[-1]) for each in (1000 * p / steps for p in parts)),
            step="post",
            colors=(_COMPUTING, _WAITING, _MOVING),
            labels=("computing", "waiting", "moving bytes"),
        )
        axes.set_ylabel("ms a step")
        axes.set_ylim(0, top)
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))

    total, many = max(float(whole.sum()), 1e-9), max(float(times.steps.sum()), 1.0)
    figures = [
        (
            name,
            f"{1000 * part.sum() / many:.3g} ms",
            f"{100 * part.sum() / total:.3g} %",
        )
        for name, part in zip(("computing", "waiting", "moving bytes"), parts)
    ]
    communicating = float((times.waiting + times.moving).sum())
    caption = "Waiting and moving bytes count while no computation of rank 0 is beside."
    if each_step.max() > top:
        caption += (
            f" The longest steps, of up to {each_step.max():,.4g} ms, are cut off."
        )
    if communicating > 0:
        beside = 1 - float(exposed.sum()) / communicating
        caption += (
            f" Of all its communication {100 * max(0.0, beside):.3g} % ran beside "
            "computation."
        )
    moving = float(times.moving.sum())
    if moving > 0:
        while_moving, of_all = (
            _bytes(float(times.bytes.sum()) / seconds) for seconds in (moving, total)
        )
        caption += (
            f" While it moved bytes, tensors of {while_moving} a second passed; over "
            f"all of the time, of {of_all}."
        )
    return _figure(draw, caption) + _table(("rank 0", "a step", "of the time"), figures)


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
    caption = "A rank waits while it has submitted a tensor that another has not."
    head = "rank", "waited", "all others waited for it"
    return _figure(draw, caption) + _table(head, rows)


def _figure(draw: Callable[[Any], None], caption: str) -> str:
    """A picture over time, with what is to be seen in it."""
    import matplotlib
    from matplotlib.figure import Figure

    colors = dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "xtick.color",
            "ytick.color",
        ),
        _TEXT,
    )
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": caption, **colors}
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
    if record.tensors:
        parts += ["<h2>Slowest tensors</h2>", _of_tensors(record.tensors)]
    if record.events:
        parts += ["<h2>Warnings, stalls and the end</h2>", _of_events(record.events)]
    known = [each for each in record.members if each.host]
    if known:
        parts += ["<h2>Who took part</h2>", _of_members(known)]
    if record.settings:
        settings = sorted(record.settings.items())
        parts += ["<h2>Versions and settings</h2>", _table((), settings)]
    return parts


def _of_tensors(tensors: Iterable[Tensor]) -> str:
    def seconds(tensor: Tensor) -> float:
        return tensor.negotiating + tensor.queued + tensor.running

    slowest = sorted(tensors, key=seconds, reverse=True)[:_MOST_TENSORS]
    rows = [
        (each.name, f"{each.times:,}", _size(each))
        + tuple(
            _seconds(part / max(each.times, 1))
            for part in (each.negotiating, each.queued, each.running)
        )
        for each in slowest
    ]
    head = "tensor", "times", "size", "from first to last rank", "queued", "running"
    return f'<div class="tensors">{_table(head, rows)}</div>'


def _size(tensor: Tensor) -> str:
    # An allgather's is not known.
    return _bytes(tensor.bytes / max(tensor.times, 1)) if tensor.bytes else ""


def _of_events(events: Sequence[Event]) -> str:
    rows = [(_seconds(each.time), each.kind, each.text) for each in events]
    return _table(("at", "what", "said"), rows)


def _of_members(members: Sequence[Member]) -> str:
    rows = [
        (
            each.rank,
            each.host,
            _known(each.process),
            _known(each.cores),
            _known(each.gpu),
        )
        for each in members
    ]
    return _table(("rank", "host", "process", "cores", "GPU"), rows)


def _known(value: object) -> str:
    return "" if value is None else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    table = f"<table>{top}<tbody>{cells}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1 or seconds == 0:
            return f"{seconds * scale:,.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB"
