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
_REASONS = (
    "See what else runs there, whether it has as many cores, and whether its data "
    "takes longer to read."
)
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
    >>> one, ranks = np.ones(1), np.array([[0.0, 0.9]])
    >>> intervals = Intervals(
    ...     begin=0 * one, end=3 * one, steps=one, bytes=one, moving=one, waiting=one,
    ...     exposed_moving=0.6 * one, exposed_waiting=0 * one, waits=ranks,
    ...     waited_for=ranks, samples=one, loss=one, outside=0 * one)
    >>> job = JobRecord(2, 0.0, 3.0, intervals, [], [], [], {}, "", "ended")
    >>> advice(job)[0][:41]
    "Moving bytes takes 20 % of rank 0's steps"
    """
    if record.size == 1:
        return ["One rank took part, so there was nothing to exchange."]
    times = record.intervals
    seconds = float(times.inside.sum())
    if seconds <= 0:
        return ["No whole step was recorded, so there is nothing to say of its time."]
    parts = {name: float(part.sum()) / seconds for name, part in times.parts().items()}
    waiting, moving = parts["waiting"], parts["moving bytes"]
    behind = float(record.behind()[0]) / seconds if _late_rank(record) == 0 else 0.0
    found = []
    if behind >= _LITTLE:
        found.append((behind, _of_rank_0(record, behind)))
    if waiting >= _LITTLE:
        found.append((waiting, _of_waiting(record, waiting, seconds)))
    if moving >= _LITTLE:
        found.append((moving, _of_moving(record, moving)))
    if max(behind, waiting, moving) < _MUCH:
        rest = f"{percent(parts['computing'])} of a step is computation"
        found.append((1.0, f"{rest}, so there is little to gain from communication."))
    said = [text for _, text in sorted(found, key=lambda each: -each[0])]
    return said + _of_worth(record)


def _late_rank(record: JobRecord) -> int | None:
    """The rank that is behind far more than the others, if any."""
    behind = record.behind()
    rank = int(behind.argmax())
    last = float(behind[rank])
    others = (float(behind.sum()) - last) / max(1, record.size - 1)
    return None if last <= 2 * others else rank


def _of_rank_0(record: JobRecord, share: float) -> str:
    return (
        f"The other ranks are ahead of rank 0{_place(record, 0)} in {percent(share)} "
        f"of its steps. {_REASONS}"
    )


def _of_waiting(record: JobRecord, share: float, seconds: float) -> str:
    said = f"Rank 0 waits for other ranks in {percent(share)} of its steps"
    behind = record.behind()
    if not behind.any():
        return f"{said}, and nobody's tensors come late: the ranks may lack cores."
    rank = _late_rank(record)
    if rank == 0:
        return f"{said}."
    if rank is None:
        return (
            f"{said}, for all ranks alike. More ranks than cores, batches that take "
            "different times or a shared disk do that: try fewer ranks on a host, or "
            "`keras_hvd.data.distribute`."
        )
    return (
        f"{said}. All others are ahead of rank {rank}{_place(record, rank)} in "
        f"{percent(float(behind[rank]) / seconds)} of them. {_REASONS}"
    )


def _place(record: JobRecord, rank: int) -> str:
    host = record.members[rank].host
    return f" on {host}" if host else ""


def _of_worth(record: JobRecord) -> list[str]:
    # It measures on one host.
    if record.hosts > 1:
        return []
    return [
        f"`khvdrun --scaling 1,{record.size}` measures whether {record.size} ranks are "
        "faster than one."
    ]


def _of_moving(record: JobRecord, share: float) -> str:
    moving = f"Moving bytes takes {percent(share)} of rank 0's steps"
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
    return (
        f"{said} Meanwhile {percent(used)} of what {record.medium} could pass is "
        f"used. It is less with {_listed(batches, fewer, smaller, faster)}."
    )


def _remedies(record: JobRecord) -> tuple[str, str, str, str]:
    """What makes moving bytes less; "" for what the job does already."""
    own = record.settings
    tunes = settings.read({each: own.get(each, "") for each in _AUTOTUNE}).autotune
    accumulates = own.get(facts.ACCUMULATION, "1") != "1"
    compresses = (
        own.get(facts.COMPRESSION, facts.NO_COMPRESSION) != facts.NO_COMPRESSION
    )
    return (
        "larger batches",
        "" if accumulates else "`gradient_accumulation_steps` of the optimizer",
        ""
        if compresses
        else "16-bit compression of the gradients (`Compression.fp16`)",
        "" if tunes else "autotuning (`khvdrun --autotune`)",
    )


def _listed(*remedies: str) -> str:
    *others, last = filter(None, remedies)
    return f"{', '.join(others)} and {last}" if others else last


def percent(share: float) -> str:
    """A share, for people."""
    return f"{100 * share:.3g} %"
