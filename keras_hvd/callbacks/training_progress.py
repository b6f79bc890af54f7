"""The progress of `fit`: for a job's recording, and for rank 0's progress bar."""

from __future__ import annotations

import math
import time

import keras

from keras_hvd.backends.current import framework
from keras_hvd.job import basics
from keras_hvd.recording import recorder
from keras_hvd.recording.phases import REST, STEPS, TRACING
from keras_hvd.report import recording

# How often Keras' counts are read, which may wait for a GPU.
_PERIOD_SECONDS = 0.2
# At most how far back the samples' rate and the waits reach.
_RECENT_SECONDS = 5.0
# Less waiting than this is not shown.
_SHOWN_WAITING = 0.1
# Of less time, waits say little.
_LEAST_SECONDS = 0.5
# The engine records half a second later: earlier, waits would be of what came before.
_SETTLED_SECONDS = 0.7


class TrainingProgress:
    """Counts this rank's steps, samples and loss, in all calls of `fit`.

    Keras' tracker of the loss counts samples, but not those of a `train_step` that
    leaves it alone: these stay unknown.
    """

    def __init__(self) -> None:
        self.samples_per_second = math.nan
        """Of this rank, in the last seconds."""
        self.is_shown = False
        """Whether a progress bar has it, on this rank."""
        self._samples = self._loss = 0.0
        self._counted = self._lost = 0.0
        self._counts = False
        self._steps = 0
        self._read_at = self._settled_at = 0.0
        self._recent: list[tuple[float, float]] = []
        self._recent_waits: list[recording.Waits] = []
        self._waits: recording.Waits | None = None

    def begin(self, epoch: int) -> None:
        """Begins an epoch, in which Keras counts from 0."""
        self._counted = self._lost = 0.0
        self._counts = True
        self._read_at = time.monotonic()
        self._recent = [(self._read_at, self._samples)]
        own = recorder.current()
        if own is None:
            return
        own.record.epoch = epoch + 1
        own.record.gpu = own.record.gpu or framework.gpu_pinning.name_of_gpu()
        is_first = own.phases.now == REST
        own.phases.enter(TRACING if is_first else STEPS)
        self._pass_on(own, always=True)
        if is_first:
            # The counts are read after its first step.
            self._read_at = -math.inf

    def count(self, model: keras.Model, steps: int) -> None:
        """Counts steps that have been made."""
        self._steps += steps
        if time.monotonic() - self._read_at >= _PERIOD_SECONDS:
            self._read(model, always=False)

    def pause(self, model: keras.Model, phase: str) -> str:
        """Reads the last counts of training: Keras may now count a validation's.

        Begins a phase of the recording, and returns the one before.
        """
        if self._counts:
            self._read(model, always=True)
        self._counts = False
        return recorder.enter(phase)

    def _read(self, model: keras.Model, always: bool) -> None:
        own = recorder.current()
        if own is None and not self.is_shown:
            # Reading Keras' counts may wait for a GPU.
            return
        self._read_at = time.monotonic()
        tracker = getattr(model, "_loss_tracker", None)
        counted, lost = 0.0, 0.0
        if tracker is not None:
            counted, lost = float(tracker.count), float(tracker.total)
        if counted < self._counted:
            # Keras has begun anew: a callback has called evaluate.
            self._counted = self._lost = 0.0
        self._samples += counted - self._counted
        self._loss += lost - self._lost
        self._counted, self._lost = counted, lost
        self._add_recent()
        if own is None:
            return
        if own.phases.now == TRACING:
            own.phases.enter(STEPS)
            # Ranks that trace for longer than others keep them waiting.
            self._settled_at = self._read_at + _SETTLED_SECONDS
            self._recent_waits = []
            always = True
        record = own.record
        record.step, record.last_step = self._steps, time.time()
        if self._samples > 0:
            record.samples = self._samples
            record.samples_per_second = self.samples_per_second
        if counted > 0:
            record.loss = lost / counted
        self._pass_on(own, always)
        if record.rank == 0 and self._read_at >= self._settled_at:
            self._add_waits(recording.waits(own.folder))

    def _add_recent(self) -> None:
        now, recent = self._read_at, self._recent
        recent.append((now, self._samples))
        while len(recent) > 2 and now - recent[1][0] >= _RECENT_SECONDS:
            recent.pop(0)
        seconds = now - recent[0][0]
        grown = self._samples - recent[0][1]
        self.samples_per_second = grown / seconds if seconds > 0 < grown else math.nan

    def _add_waits(self, waits: recording.Waits) -> None:
        recent = self._recent_waits
        recent.append(waits)
        while len(recent) > 2 and waits.seconds - recent[1].seconds >= _RECENT_SECONDS:
            recent.pop(0)
        latest = waits.since(recent[0])
        if latest.seconds >= _LEAST_SECONDS:
            self._waits = latest

    def _pass_on(self, own: recorder.Recorder, always: bool) -> None:
        own.write()
        of_all = self._samples * basics.size()
        own.sums = of_all, self._loss, self._samples, self._steps
        own.add_point(always)

    def shown(self) -> str:
        """The text for rank 0's progress bar; "" for nothing yet.

        Waiting, as the report means it, is shown if the rank that waits longest does
        so in more than a tenth of the last seconds, while it is recorded: under
        `khvdrun --report` and `--status`.
        """
        rate = self.samples_per_second * basics.size()
        if math.isnan(rate):
            return ""
        return f" - {describe(rate, self._waits)}"


progress = TrainingProgress()
"""The progress of this process."""


def describe(rate: float, waits: recording.Waits | None) -> str:
    """Describes the speed of all ranks and, if ranks wait much, who waits for whom.

    Args:
        rate: samples in a second, of all ranks.
        waits: the ranks' waits in some stretch of time; None if not known.

    Example:

    >>> describe(1240.4, recording.Waits(10, [2.5, 0.1, 2], [0.1, 2.2, 0]))
    '1,240 samples/s - 25% waiting, most for rank 1'
    >>> describe(9.87, recording.Waits(10, [0.5, 0.1], [0.1, 0.5]))
    '9.9 samples/s'
    """
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    text += " samples/s"
    if waits is None:
        return text
    share = max(waits.waits) / waits.seconds
    if share < _SHOWN_WAITING:
        return text
    rank = waits.waited_for.index(max(waits.waited_for))
    return f"{text} - {share:.0%} waiting, most for rank {rank}"


def show(callbacks: list[keras.callbacks.Callback]) -> None:
    """Makes the progress bar of a new epoch show the progress as well.

    Args:
        callbacks: those of `fit`.
    """
    progress.is_shown = False
    for each in callbacks:
        bar = getattr(each, "progbar", None)
        if not isinstance(each, keras.callbacks.ProgbarLogger) or bar is None:
            continue
        # Keras' own text on the time of a step, which comes before the metrics.
        own = getattr(bar, "_format_time", None)
        if own is not None:
            bar._format_time = lambda *times, own=own: own(*times) + progress.shown()
            progress.is_shown = True
