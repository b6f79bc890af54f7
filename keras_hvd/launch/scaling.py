"""`khvdrun --scaling`: how fast a script trains on several numbers of ranks.

Each job is ended after some steps. Ranks share the cores and the memory of a machine,
so the copies of each job are measured too. These are the same ranks, which wait for
each other in each step and reduce nothing. Their speed is what the machine allows.
"""

from __future__ import annotations

import dataclasses
import os
import select
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keras_hvd.launch import guardian, node_ranks, processes, recorded
from keras_hvd.launch.job import CANNOT_START, Job
from keras_hvd.launch.options import Options
from keras_hvd.recording import files
from keras_hvd.report import recording
from keras_hvd.report.record import Intervals, JobRecord
from keras_hvd.report.speeds import Speed, Speeds

# The first steps compile, and fill caches.
_LEFT_OUT = 10
# A shorter time says little on a machine that also does other work.
_LEAST_SECONDS = 3.0
_LOOK_SECONDS = 0.2


class _NotMeasuredError(Exception):
    """A job ended before its speed was known; the text says why."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def run(options: Options) -> int:
    """Measures, prints a table, and writes the page of `--report`.

    Returns:
        0; the exit code of the first job that failed; 1 if a job made too few steps;
        130 after Ctrl-C.
    """
    # Processes that a job leaves behind become children of this process.
    processes.adopt_orphans()
    print(
        f"khvdrun: each job is ended after {_LEFT_OUT + options.steps} steps or "
        f"{_LEAST_SECONDS:g} s of them, whatever is later; Keras and TensorFlow save "
        "no models in it",
        flush=True,
    )
    speeds = Speeds(shlex.join(options.command))
    try:
        for line in _measure(options, speeds):
            print(line, flush=True)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _NotMeasuredError as error:
        print(f"khvdrun: error: {error}", file=sys.stderr)
        return error.code
    print("\n".join(speeds.advice()))
    return 0 if options.report is None else _write(speeds, options.report)


def _write(speeds: Speeds, path: Path) -> int:
    try:
        speeds.write(path)
    except OSError as error:
        print(f"khvdrun: error: the page cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"khvdrun: the page is in {str(path)!r}")
    return 0


def _measure(options: Options, speeds: Speeds) -> Iterator[str]:
    """Measures each number of ranks, and yields the table's lines as they come."""
    yield speeds.head
    for ranks in options.scaling:
        copies = _speed(options, ranks, "meet")
        # One rank has nothing to reduce.
        training = copies if ranks == 1 else _speed(options, ranks, "train")
        yield speeds.add(training, copies)


def _speed(options: Options, ranks: int, kind: str) -> Speed:
    with tempfile.TemporaryDirectory(prefix="khvdrun-scaling-") as name:
        folder = Path(name)
        told = {**options.variables, "KERAS_HVD_REPORT": name}
        job = dataclasses.replace(options, ranks=ranks, variables=told)
        recorded.prepare(folder, job)
        (folder / files.SCALING).write_text(kind)
        output = folder / "output"
        try:
            code = _run_until(job, output, folder)
        finally:
            # Ranks that still run would write to the folder while it is removed.
            _end_everything()
        record = _recorded(folder)
        made = _steps(record)
        if record is None or made < _LEFT_OUT + options.steps:
            raise _NotMeasuredError(_why(job, output, code, made), code or 1)
        return _speed_of(record)


def _run_until(job: Options, output: Path, folder: Path) -> int:
    """Runs a job until it has made its steps, or has ended. Returns its exit code."""
    launcher = os.getpid()
    guard = os.fork()
    if guard == 0:
        _be_launched(launcher, job, output)
    with open(os.pidfd_open(guard), "rb") as ended:
        while not select.select([ended], [], [], _LOOK_SECONDS)[0]:
            if _is_enough(_recorded(folder), job.steps):
                break
    # The job's own process kills the ranks when its guardian has died.
    os.kill(guard, signal.SIGKILL)
    _, status = os.waitpid(guard, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_launched(launcher: int, job: Options, output: Path) -> None:
    """Becomes the guardian of a job, and never returns."""
    code = CANNOT_START
    try:
        processes.die_with_parent(launcher)
        written = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        for descriptor in (1, 2):
            os.dup2(written, descriptor)
        own, _ = node_ranks.of_this_host(job)
        code = guardian.run(lambda held, mask: Job(job, own, held, mask))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_everything() -> None:
    """Waits for leftovers of a job, which are being killed."""
    has_children = True
    while has_children:
        processes.signal_descendants(signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            has_children = False


def _recorded(folder: Path) -> JobRecord | None:
    """The recording so far, if any."""
    try:
        return recording.read(folder)
    except recording.NotARecordingError:
        return None


def _steps(record: JobRecord | None) -> int:
    return 0 if record is None else int(record.intervals.steps.sum())


def _is_enough(record: JobRecord | None, steps: int) -> bool:
    if record is None or _steps(record) < _LEFT_OUT + steps:
        return False
    times = record.intervals
    counts = _that_count(times)
    return bool(times.end[-1] - times.begin[counts][0] >= _LEAST_SECONDS)


def _that_count(times: Intervals) -> np.ndarray:
    return np.cumsum(times.steps) > _LEFT_OUT


def _why(job: Options, output: Path, code: int, steps: int) -> str:
    who = f"the job of {job.ranks} rank{'s' if job.ranks > 1 else ''}"
    if code != 0:
        # Its report has the last lines of the rank that failed.
        lines = output.read_text(errors="replace").splitlines()
        told = [line for line in lines if line.startswith("khvdrun: ")]
        return "\n".join([f"{who} failed", *told])
    if steps > 0:
        return (
            f"{who} ended after {steps} steps: {_LEFT_OUT} that do not count and "
            f"{job.steps} more are needed. Have the script train longer, or say fewer "
            "with --scaling-steps"
        )
    return (
        f"{who} ended without a step: is the model compiled with a "
        "keras_hvd.DistributedOptimizer, or trained with a DistributedGradientTape or "
        "a Strategy?"
    )


def _speed_of(record: JobRecord) -> Speed:
    times = record.intervals
    counts = _that_count(times)
    steps = times.steps[counts]
    each = (times.end - times.begin)[counts] / steps
    # Keras' counts come a few times a second, so the counts of a single step are a
    # guess.
    known = np.isfinite(times.samples)
    samples = times.samples[known].sum() / max(times.steps[known].sum(), 1)
    # The samples of steps that were not recorded are included.
    samples *= not record.left_out
    in_steps = max(float(times.inside[counts].sum()), 1e-9)
    waits = (times.waits * times.share[:, None])[counts].sum(axis=0)
    moving = times.parts()["moving bytes"][counts].sum()
    return Speed(
        record.size,
        float(np.median(np.repeat(each, steps.astype(int)))),
        float(samples) or None,
        waiting=float(waits.max()) / in_steps,
        moving=float(moving) / in_steps,
    )
