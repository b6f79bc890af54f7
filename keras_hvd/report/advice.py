"""The text in front of a job's report: the limits of its speed, and remedies."""

from __future__ import annotations

from keras_hvd.report.record import JobRecord

# Shares of the time below which nothing is worth mentioning.
_MUCH, _LITTLE = 0.1, 0.03
# Shares of the capacity of links or memory. From the first on, they are the limit;
# below the second, something else is.
_FULL, _IDLE = 0.7, 0.4


def advice(record: JobRecord) -> list[str]:
    """Names the obstacles to the job's speed, with figures, the largest first.

    Args:
        record: The job's record.

    Returns:
        Sentences, at least one.

    Example:

    >>> import numpy as np
    >>> from keras_hvd.report.record import Intervals
    >>> one, ranks = np.ones(1), np.array([[0.0, 0.9]])
    >>> intervals = Intervals(
    ...     begin=0 * one, end=3 * one, steps=one, bytes=one, moving=one, waiting=one,
    ...     exposed_moving=0.6 * one, exposed_waiting=0 * one, waits=ranks,
    ...     waited_for=ranks, samples=one, loss=one)
    >>> job = JobRecord(2, 0.0, 3.0, intervals, [], [], [], {}, "", "ended")
    >>> advice(job)[0][:46]
    'Moving bytes takes 20 % of the time, with no c'
    """
    if record.size == 1:
        return ["One rank took part, so there was nothing to exchange."]
    times = record.intervals
    seconds = float((times.end - times.begin).sum())
    if seconds <= 0:
        return ["No whole step was recorded, so there is nothing to say of its time."]
    waiting = float(times.exposed_waiting.sum()) / seconds
    moving = float(times.exposed_moving.sum()) / seconds
    found = []
    if waiting >= _LITTLE:
        found.append((waiting, _of_waiting(record, waiting, seconds)))
    if moving >= _LITTLE:
        found.append((moving, _of_moving(record, moving)))
    if max(waiting, moving) < _MUCH:
        rest = f"{percent(1 - waiting - moving)} of a step is computation"
        found.append((1.0, f"{rest}, so there is little to gain from communication."))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _of_waiting(record: JobRecord, share: float, seconds: float) -> str:
    waited_for = record.intervals.waited_for.sum(axis=0)
    said = f"Rank 0 waits for other ranks in {percent(share)} of the time"
    if not waited_for.any():
        return f"{said}, and nobody's tensors come late: the ranks may lack cores."
    rank = int(waited_for.argmax())
    last = float(waited_for[rank])
    others = (float(waited_for.sum()) - last) / max(1, record.size - 1)
    if last < 2 * others:
        return (
            f"{said}, for all ranks alike. More ranks than cores, batches that take "
            "different times or a shared disk do that: try fewer ranks on a host, or "
            "`keras_hvd.data.distribute`."
        )
    host = record.members[rank].host
    place = f" on {host}" if host else ""
    return (
        f"{said}. Most of all the ranks wait for rank {rank}{place}: {last:.3g} s, "
        f"{percent(last / seconds)} of the time. See what else runs there, whether it "
        "has as many cores, and whether its data takes longer to read."
    )


def _of_moving(record: JobRecord, share: float) -> str:
    moving = f"Moving bytes takes {percent(share)} of the time"
    said = f"{moving}, with no computation beside it."
    fewer = (
        "Larger batches, `gradient_accumulation_steps` of the optimizer and 16-bit "
        "compression of the gradients (`Compression.fp16`)"
    )
    rates = record.rates()
    used = rates.used if rates is not None else None
    if used is not None and used < _IDLE:
        return (
            f"{said} Meanwhile only {percent(used)} of what {record.medium} could "
            "pass is used, as with many small tensors, or cores that also compute: try "
            "autotuning (`khvdrun --autotune`), larger batches, and "
            "`gradient_accumulation_steps` of the optimizer."
        )
    if used is None or used < _FULL:
        return f"{said} {fewer}, and autotuning (`khvdrun --autotune`), make it less."
    faster = "" if record.hosts == 1 else ", as does a faster network"
    return (
        f"{said} Meanwhile {percent(used)} of what {record.medium} could pass is "
        f"used. {fewer} make it less{faster}."
    )


def percent(share: float) -> str:
    """A share, for people."""
    return f"{100 * share:.3g} %"
