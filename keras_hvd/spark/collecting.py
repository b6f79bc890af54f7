"""Collects the rows of a DataFrame whose tasks Spark must start all at once.

Spark itself says that it has too few slots for them after ten minutes, or never under
Spark Connect; until then, it starts them even if they were given up. For slots that
others have it waits without a limit.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.util import InheritableThread

from keras_hvd.exceptions import KerasHvdError

_POLL_SECONDS = 0.25
# For Spark to end the tasks of what was interrupted.
_END_SECONDS = 30.0
# How long each slot is held, to count them.
_HELD_SECONDS = 1.0


class JobError(Exception):
    """Spark's job has failed, with this error."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def collect(session: SparkSession, frame: DataFrame, limit: float) -> list[Any]:
    """The rows. Raises JobError.

    Raises KerasHvdError if none of its tasks runs for `limit` seconds.
    """
    return _Collecting(session, frame).rows(limit)


def await_slots(
    session: SparkSession, wanted: int, limit: float, tell: Callable[[str], object]
) -> None:
    """Waits for executors, so that Spark can run so many tasks at once.

    `tell` gets what is awaited. Raises KerasHvdError after `limit` seconds, or at once
    where no executors can come.
    """
    # A program without executors has these threads, and never more.
    local = re.match(r"local\[(\d+)", session.conf.get("spark.master", ""))
    end = time.monotonic() + limit
    has_told = False
    while True:
        found = int(local[1]) if local else _slots(session, wanted, limit)
        if found >= wanted:
            return
        lacks = (
            f"{wanted} ranks need {wanted} slots of Spark at once, and there are "
            f"{found}. A slot is spark.task.cpus cores of an executor"
        )
        if local:
            raise KerasHvdError(f"run: {lacks}")
        if time.monotonic() > end:
            raise KerasHvdError(
                f"run: {lacks}. No more came within {limit:g} s (start_timeout)"
            )
        if not has_told:
            has_told = True
            tell(f"waits up to {limit:g} s for more executors: {lacks}")
        time.sleep(_POLL_SECONDS)


def is_remote(session: SparkSession) -> bool:
    """Whether it is a session of Spark Connect, which has no Spark context here."""
    return type(session).__module__.startswith("pyspark.sql.connect.")


def _slots(session: SparkSession, most: int, limit: float) -> int:
    """The number of tasks that Spark can run at once, also if others do so now.

    Spark Connect does not say it: `most` tasks are run, and those counted that are
    there at once.
    """
    if not is_remote(session):
        context = session.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return context.maxNumConcurrentTasks(profile)
    held = _HELD_SECONDS

    def hold(batches: Iterator) -> Iterator:
        import time

        import pyarrow

        start = time.time()
        time.sleep(held)
        yield pyarrow.RecordBatch.from_pylist([{"start": start, "end": time.time()}])

    frame = session.range(0, most, 1, most).mapInArrow(hold, "start double, end double")
    rows = collect(session, frame, limit)
    return max(sum(one.start <= row.start < one.end for one in rows) for row in rows)


class _Collecting:
    """The collecting, in a thread of its own."""

    def __init__(self, session: SparkSession, frame: DataFrame):
        self._session = session
        self._frame = frame
        self._is_remote = is_remote(session)
        self._tag = f"keras_hvd-{secrets.token_hex(8)}"
        self._running = 0
        self._rows: Sequence[Any] = ()
        self._error: Exception | None = None

    def rows(self, limit: float) -> list[Any]:
        thread = InheritableThread(target=self._collect, session=self._session)
        thread.daemon = True
        if self._is_remote:
            self._session.registerProgressHandler(self._on_progress)
        thread.start()
        try:
            self._watch(thread, limit)
        except BaseException:
            self._cancel()
            thread.join(_END_SECONDS)
            raise
        finally:
            if self._is_remote:
                self._session.removeProgressHandler(self._on_progress)
        if self._error is not None:
            raise JobError(self._error)
        return [*self._rows]

    def _collect(self) -> None:
        try:
            if self._is_remote:
                self._session.addTag(self._tag)
            else:
                self._session.sparkContext.setJobGroup(self._tag, "keras_hvd.spark")
            self._rows = self._frame.collect()
        except Exception as error:
            self._error = error

    def _cancel(self) -> None:
        if self._is_remote:
            self._session.interruptTag(self._tag)
        else:
            # There interruptTag finds no job of a thread.
            self._session.sparkContext.cancelJobGroup(self._tag)

    def _watch(self, thread: threading.Thread, limit: float) -> None:
        since = time.monotonic()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if self._count():
                since = time.monotonic()
            if time.monotonic() - since > limit and thread.is_alive():
                raise KerasHvdError(
                    f"run: Spark has started no task for {limit:g} s (start_timeout): "
                    "other jobs use its slots"
                )

    def _on_progress(
        self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool
    ) -> None:
        self._running = inflight_tasks

    def _count(self) -> int:
        """The number of tasks that run."""
        if self._is_remote:
            return self._running
        tracker = self._session.sparkContext.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._tag))
        stages = [number for job in jobs if job is not None for number in job.stageIds]
        infos = map(tracker.getStageInfo, stages)
        return sum(info.numActiveTasks for info in infos if info is not None)
