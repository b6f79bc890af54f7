"""The text in front of a job's report: the limits of its speed, and remedies."""

from __future__ import annotations

from keras_hvd.job import settings
from keras_hvd.recording import facts
from keras_hvd.report.record import JobRecord

# Shares of the time below which nothing is worth mentioning.
_MUCH, _LITTLE = 0.1, 0.03
# Shares of the capacity of links or memory. From the first on, they are the limit;
# below the second, something else is.
_FULL, _IDLE = 0.7, 0.4
_AUTOTUNE = "KERAS_HVD_AUTOTUNE", "HOROVOD_AUTOTUNE"


def advice(record: JobRecord) -> list[str]:
    """Names the obstacles to the job's speed, with figures, the largest first.

    Args:
        record: The job's record.

    Returns:
        Sentences, at least one.

    Example:

    >>> import numpy as np
    >>> from keras_hvd.report.record import Intervals
    >>> one, ranks = np.ones(1), np.zeros((1, 2))
    >>> intervals = Intervals(
    ...     begin=0 * one, end=3 * one, steps=one, bytes=one, moving=one, waiting=one,
    ...     exposed_moving=0.6 * one, exposed_waiting=0 * one, waits=ranks,
    ...     waited_for=ranks, samples=one, loss=one, outside=0 * one)
    >>> job = JobRecord(2, 0.0, 3.0, intervals, [], [], [], {}, "", "ended")
    >>> advice(job)[0][:42]
    "Moving bytes takes 20 % of the steps' time"
    """
    if record.size == 1:
        return ["One rank took part, so there was nothing to exchange."]
    times = record.intervals
    seconds = float(times.inside.sum())
    if seconds <= 0:
        return ["No whole step was recorded, so there is nothing to say of its time."]
    waits = times.in_steps(times.waits) / seconds
    waiting = float(waits.max())
    moving = float(times.parts()["moving bytes"].sum()) / seconds
    found = []
    if waiting >= _LITTLE:
        found.append((waiting, _of_waiting(record, int(waits.argmax()), waiting)))
    if moving >= _LITTLE:
        found.append((moving, _of_moving(record, moving)))
    if max(waiting, moving) < _MUCH:
        rest = f"{percent(1 - waiting - moving)} of a step is computation"
        found.append((1.0, f"{rest}, so there is little to gain from communication."))
    said = [text for _, text in sorted(found, key=lambda each: -each[0])]
    return said + _of_worth(record)


def _of_waiting(record: JobRecord, rank: int, share: float) -> str:
    said = f"Rank {rank} waits for other ranks in {percent(share)} of the steps' time"
    times = record.intervals
    waited_for = times.in_steps(times.waited_for)
    late = int(waited_for.argmax())
    last = float(waited_for[late])
    others = (float(waited_for.sum()) - last) / max(1, record.size - 1)
    if last <= 2 * others:
        return (
            f"{said}, for all ranks alike. More ranks than cores, batches that "
            "take different times or a shared disk do that: try fewer ranks on a host, "
            "or `keras_hvd.data.distribute`."
        )
    host = record.members[late].host
    place = f" on {host}" if host else ""
    part = percent(last / float(times.inside.sum()))
    return (
        f"{said}. Most of all the ranks wait for rank {late}{place}, in {part} of "
        "it. See what else runs there, whether it has as many cores, and whether its "
        "data takes longer to read."
    )


def _of_worth(record: JobRecord) -> list[str]:
    # It measures on one host.
    if record.hosts > 1:
        return []
    return [
        f"`khvdrun --scaling 1,{record.size}` measures whether {record.size} ranks are "
        "faster than one."
    ]


def _of_moving(record: JobRecord, share: float) -> str:
    moving = f"Moving bytes takes {percent(share)} of the steps' time"
    said = f"{moving}, with no computation beside it."
    batches, fewer, smaller, autotuning = _remedies(record)
    rates = record.rates()
    used = rates.used if rates is not None else None
    if used is not None and used < _IDLE:
        return (
            f"{said} Meanwhile only {percent(used)} of what {record.medium} could "
            "pass is used, as with many small tensors, or cores that also compute: try "
            f"{_listed(autotuning, batches, fewer)}."
        )
    if used is None or used < _FULL:
        tried = _listed(batches, fewer, smaller, autotuning)
        return f"{said} It is less with {tried}."
    faster = "" if record.hosts == 1 else "a faster network"
    # More passed than when that was measured, on a machine that was busy then.
    passed = "all" if used > 1 else percent(used)
    return (
        f"{said} Meanwhile {passed} of what {record.medium} could pass is "
        f"used. It is less with {_listed(batches, fewer, smaller, faster)}."
    )


def _remedies(record: JobRecord) -> tuple[str, str, str, str]:
    """What makes moving bytes less; "" for what the job does already."""
    own = record.settings
    tunes = settings.read({each: own.get(each, "") for each in _AUTOTUNE}).autotune
    accumulates = own.get(facts.ACCUMULATION, "1") != "1"
    compresses = own.get(facts.COMPRESSION) not in (None, facts.NO_COMPRESSION)
    fewer = "`gradient_accumulation_steps` of the optimizer"
    smaller = "16-bit compression of the gradients (`Compression.fp16`)"
    return (
        "larger batches",
        "" if accumulates else fewer,
        "" if compresses else smaller,
        "" if tunes else "autotuning (`khvdrun --autotune`)",
    )


def _listed(*remedies: str) -> str:
    *others, last = filter(None, remedies)
    return f"{', '.join(others)} and {last}" if others else last


def percent(share: float) -> str:
    """A share, for people."""
    return f"{100 * share:.3g} %"
