"""The speeds on several numbers of ranks: a table, conclusions, and a page."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path
from typing import Any

from keras_hvd.report import page
from keras_hvd.report.advice import percent

# From here on there is little to win.
_GOOD = 0.9
# Training cannot be this much faster than its copies.
_BEYOND = 1.05
# The share of a loss from which on its cause is named alone.
_MOST_OF = 0.8
_HEAD = "ranks", "a step", "speed", "efficiency", "machine allows", "of that"
_WIDTHS = 5, 10, 18, 10, 14, 8


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of some ranks in training.

    Args:
        ranks: their number.
        seconds: of a step, the median.
        samples: of all ranks, in a step; None where unknown.
        waiting: the share of the steps' time in which the rank that waits longest
            does so, as in a report.
        moving: the share in which rank 0 moves bytes.
    """

    ranks: int
    seconds: float
    samples: float | None = None
    waiting: float = 0.0
    moving: float = 0.0


class Speeds:
    """The measured speeds of a script, one for each number of ranks.

    Each is compared with the copies of the first, each of its ranks alone.

    Args:
        command: the measured command.

    Example:

    >>> speeds = Speeds("python train.py")
    >>> one = Speed(1, 0.01, 64)
    >>> print(speeds.head, speeds.add(one, one), sep="\\n")
    ranks     a step              speed efficiency machine allows  of that
        1      10 ms    6,400 samples/s      100 %          100 %    100 %
    >>> print(speeds.add(Speed(2, 0.016, 128), Speed(2, 0.0125, 128)))
        2      16 ms    8,000 samples/s     62.5 %           80 %   78.1 %
    >>> speeds.advice()[0]
    '2 ranks train 1.25 times as many samples a second as one.'
    >>> speeds.advice()[2]
    'On 2 ranks, copies that reduce nothing reach 80 %: they share the cores ...
    >>> speeds.advice()[3]
    'On 2 ranks, reducing gradients takes 21.9 % of what the machine allows: ...
    """

    head = " ".join(f"{name:>{width}}" for name, width in zip(_HEAD, _WIDTHS))

    def __init__(self, command: str):
        self.command = command
        self._found: list[tuple[Speed, Speed]] = []

    def add(self, training: Speed, copies: Speed) -> str:
        """Adds a measurement, and returns its line of the table.

        Args:
            training: of ranks that reduce their gradients.
            copies: of as many ranks, which only wait for each other in each step.
        """
        self._found.append((training, copies))
        cells = self._cells(training, copies)
        return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS))

    def rate(self, speed: Speed) -> float:
        """Samples in a second of all ranks; where unknown, steps of all ranks."""
        first = self._found[0][1]
        # Without counts, ranks do as much in a step as the first ones.
        work = speed.ranks / first.ranks * (first.samples or first.ranks)
        return ((first.samples and speed.samples) or work) / speed.seconds

    def efficiency(self, speed: Speed) -> float:
        """The share of the speed that as many ranks would have, each alone."""
        first = self._found[0][1]
        return self.rate(speed) / speed.ranks / (self.rate(first) / first.ranks)

    @property
    def _unit(self) -> str:
        return "samples/s" if self._found[0][1].samples else "steps/s"

    def _cells(self, training: Speed, copies: Speed) -> tuple[str, ...]:
        allowed, reached = self.efficiency(copies), self.efficiency(training)
        return (
            str(training.ranks),
            f"{1000 * training.seconds:,.3g} ms",
            f"{self.rate(training):,.0f} {self._unit}",
            *(f"{100 * share:.3g} %" for share in (reached, allowed)),
            f"{100 * reached / allowed:.3g} %",
        )

    def advice(self) -> list[str]:
        """The conclusions from the largest number of ranks, as sentences."""
        fewest, most = self._found[0][0], self._found[-1][0]
        said = [] if most.ranks == fewest.ranks else [self._comparison(most, fewest)]
        said.append(
            f"On {most.ranks} ranks, waiting takes {percent(most.waiting)} of the time "
            f"and moving bytes {percent(most.moving)}, as --report counts them."
        )
        return [*said, *self._limits()]

    def _comparison(self, most: Speed, fewest: Speed) -> str:
        times = self.rate(most) / self.rate(fewest)
        does, what = ("train", "samples") if fewest.samples else ("make", "steps")
        return (
            f"{most.ranks} ranks {does} {times:.3g} times as many {what} a second as "
            f"{'one' if fewest.ranks == 1 else fewest.ranks}"
            f"{'.' if times >= 1 else ': they are slower.'}"
        )

    def _limits(self) -> list[str]:
        training, copies = self._found[-1]
        allowed, reached = self.efficiency(copies), self.efficiency(training)
        on = f"On {training.ranks} ranks"
        if reached > _BEYOND * allowed:
            return [
                f"{on}, training was faster than copies that reduce nothing: this "
                "machine did something else meanwhile. Measure again, with more "
                "--scaling-steps."
            ]
        said = []
        if allowed < _GOOD:
            why = "share the cores and the memory of this machine"
            if copies.waiting > _MOST_OF * (1 - allowed):
                why = f"wait for each other in {percent(copies.waiting)} of the time"
            share = percent(allowed)
            said.append(f"{on}, copies that reduce nothing reach {share}: they {why}.")
        if reached < _GOOD * allowed:
            said.append(
                f"{on}, reducing gradients takes {100 - 100 * reached / allowed:.3g} % "
                "of what the machine allows: khvdrun --report says where, and larger "
                "batches, gradient_accumulation_steps of the optimizer or compression "
                "make it less."
            )
        return said or [f"{on}, there is little to win."]

    def write(self, path: Path) -> None:
        """Writes a page with the table and a picture. Raises OSError."""
        rows = [self._cells(*each) for each in self._found]
        parts = [
            "<h1>Speed on several numbers of ranks</h1>",
            *(f"<p>{escape(text)}</p>" for text in self.advice()),
            page.figure(
                self._draw,
                "Speed of all ranks. The copies wait for each other in each step, and "
                "reduce nothing: their speed is what the machine allows.",
            ),
            page.table(_HEAD, rows),
            page.table((), [("Command", self.command)]),
        ]
        path.write_text(page.document("Speed on several numbers of ranks", parts))

    def _draw(self, axes: Any) -> None:
        ranks = [training.ranks for training, _ in self._found]
        first = self._found[0][1]
        lines = (
            ("each alone", "--", [n * self.rate(first) / first.ranks for n in ranks]),
            ("copies", "o-", [self.rate(copies) for _, copies in self._found]),
            ("training", "o-", [self.rate(training) for training, _ in self._found]),
        )
        for (name, style, rates), color in zip(lines, page.COLORS):
            axes.plot(ranks, rates, style, color=color, label=name)
        axes.set_xticks(ranks)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks")
        axes.set_ylabel(self._unit)
        axes.legend(frameon=False)
