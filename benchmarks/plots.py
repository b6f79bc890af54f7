"""The benchmarks' plots, where matplotlib is installed (it is in the extra `dev`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from tables import size_text

# Told apart by those who do not see red and green as well.
GROUPED_COLORS = ["#3949ab", "#b8b8b8", "#d55e00", "#009e73", "#e69f00"]


def by_size(
    path: Path, title: str, figures: dict[int, dict[str, dict[int, dict[str, float]]]]
) -> None:
    """Time against size, both logarithmic, one picture for each number of ranks.

    Args:
        path: an SVG or PNG file.
        title: above all.
        figures: ranks: series: bytes: summary.
    """

    def draw(axes: list) -> None:
        for axis, (ranks, lines) in zip(axes, figures.items()):
            for name, points in lines.items():
                sizes = list(points)
                low, median, high = (
                    [points[size][key] for size in sizes]
                    for key in ("p10", "median", "p90")
                )
                (line,) = axis.plot(sizes, median, label=name, marker=".")
                axis.fill_between(sizes, low, high, alpha=0.15, color=line.get_color())
            axis.set(xscale="log", yscale="log", ylabel="seconds")
            axis.set_title(f"{title}, {ranks} ranks")
            ticks = list(next(iter(lines.values())))
            axis.set_xticks(ticks, map(size_text, ticks), rotation=60)
            axis.minorticks_off()
            axis.legend(fontsize="small")

    _save(path, len(figures), draw)


def bars(
    path: Path, unit: str, figures: dict[str, dict[str, dict[str, float]]]
) -> None:
    """One picture for each group, a bar for each series, with its spread.

    Args:
        path: an SVG or PNG file.
        unit: of the values.
        figures: group: series: summary.
    """

    def draw(axes: list) -> None:
        for axis, (group, found) in zip(axes, figures.items()):
            medians = [each["median"] for each in found.values()]
            below = [each["median"] - each["p10"] for each in found.values()]
            above = [each["p90"] - each["median"] for each in found.values()]
            axis.barh(list(found), medians, xerr=[below, above], capsize=3)
            axis.invert_yaxis()
            axis.set(xlabel=unit, title=group)

    _save(path, len(figures), draw)


def grouped(
    path: Path, unit: str, figures: dict[str, dict[str, dict[str, float]]]
) -> None:
    """One picture, a group of bars beside each other for each group, with their values.

    Args:
        path: an SVG or PNG file.
        unit: of the values.
        figures: group: series: summary; a group may lack series of the others.
    """

    def draw(axes: list) -> None:
        names = list(dict.fromkeys(name for each in figures.values() for name in each))
        width = 0.9 / len(names)
        for number, name in enumerate(names):
            found = {
                place + (number - (len(names) - 1) / 2) * width: each[name]["median"]
                for place, each in enumerate(figures.values())
                if name in each
            }
            color = GROUPED_COLORS[number % len(GROUPED_COLORS)]
            bars = axes[0].bar(
                list(found), list(found.values()), 0.92 * width, color=color, label=name
            )
            axes[0].bar_label(bars, fmt="%.1f", fontsize="small")
        axes[0].set_xticks(range(len(figures)), list(figures))
        axes[0].set_ylabel(unit)
        axes[0].spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))

    _save(path, 1, draw, height=4)


def stacked(
    path: Path,
    title: str,
    figures: dict[int, dict[str, float]],
    points: dict[str, list[tuple[int, float]]],
) -> None:
    """One picture: each part's share of the time, for each number of ranks.

    Args:
        path: an SVG or PNG file.
        title: above it.
        figures: ranks: part: seconds.
        points: marks beside the bars: label: ranks and seconds.
    """

    def draw(axes: list) -> None:
        places = range(len(figures))
        below = [0.0] * len(figures)
        for part in next(iter(figures.values())):
            values = [each[part] * 1e6 for each in figures.values()]
            if max(values) == 0:
                continue
            axes[0].bar(places, values, bottom=below, label=part)
            below = [low + value for low, value in zip(below, values)]
        for (label, marked), marker in zip(points.items(), "ox^v"):
            at = [place_of(ranks, list(figures)) for ranks, _ in marked]
            micros = [seconds * 1e6 for _, seconds in marked]
            axes[0].scatter(at, micros, marker=marker, color="black", label=label)
        axes[0].set_xticks(places, [f"{ranks:,}" for ranks in figures])
        axes[0].set(xlabel="ranks", ylabel="us", title=title)
        axes[0].legend(fontsize="small")

    _save(path, 1, draw)


def place_of(ranks: int, shown: list[int]) -> float:
    """Where a number of ranks is between those that have a bar."""
    after = next(i for i, each in enumerate(shown) if each >= ranks)
    if shown[after] == ranks:
        return after
    low, high = shown[after - 1], shown[after]
    return after - 1 + math.log(ranks / low) / math.log(high / low)


def _save(
    path: Path, pictures: int, draw: Callable[[list], None], height: float = 6
) -> None:
    if pictures == 0:
        return
    try:
        import matplotlib
    except ImportError:
        print("No plot: matplotlib is not installed (pip install '.[dev]')")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, pictures, figsize=(8 * pictures, height), squeeze=False, layout="constrained"
    )
    draw(list(axes[0]))
    # The same figures make the same file, with its text as text.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    pyplot.close(figure)
    print(f"Written: {path}")
