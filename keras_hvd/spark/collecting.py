"""Collects the rows of a DataFrame whose tasks Spark must start all at once.

Spark itself says that it has too few slots for them after ten minutes, or never under
Spark Connect; until then, it starts them even if they were given up. For slots that
others have it waits without a limit.
"""

from __future__ import annotations

import contextlib
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
    is_local = re.match(r"local(\[|$)", session.conf.get("spark.master", ""))
    end = time.monotonic() + limit
    found, has_told = 0, False
    while True:
        count, is_exact = _slots(session, wanted, limit)
        found = max(found, count)
        if found >= wanted:
            return
        lacks = (
            f"{wanted} ranks need {wanted} slots of Spark at once, and there are "
            f"{found}. A slot is spark.task.cpus cores of an executor"
        )
        if is_local and is_exact:
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


def _slots(session: SparkSession, most: int, limit: float) -> tuple[int, bool]:
    """The number of tasks that Spark can run at once, and whether it is exact.

    Spark Connect does not say it: `most` tasks are run, and those counted that are
    there at once.
    """
    if not is_remote(session):
        context = session.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return context.maxNumConcurrentTasks(profile), True
    if threads := re.match(r"local\[(\d+)", session.conf.get("spark.master", "")):
        return int(threads[1]) // int(session.conf.get("spark.task.cpus", "1")), True
    held = _HELD_SECONDS

    def hold(batches: Iterator) -> Iterator:
        import time

        import pyarrow

        start = time.time()
        time.sleep(held)
        yield pyarrow.RecordBatch.from_pylist([{"start": start, "end": time.time()}])

    frame = session.range(0, most, 1, most).mapInArrow(hold, "start double, end double")
    rows = collect(session, frame, limit)
    at_once = (sum(each.start <= row.start < each.end for each in rows) for row in rows)
    return max(at_once), False


class _Collecting:
    """The collecting, in a thread of its own."""

    def __init__(self, session: SparkSession, frame: DataFrame):
        self._session = session
        self._frame = frame
        self._is_remote = is_remote(session)
        self._tag = f"keras_hvd-{secrets.token_hex(8)}"
        self._thread = InheritableThread(target=self._collect, session=session)
        self._thread.daemon = True
        # A thread whose `join` is interrupted is no longer said to be alive.
        self._has_ended = threading.Event()
        # Under Spark Connect: tasks of a stage are there, and none runs.
        self._is_pending = False
        self._rows: Sequence[Any] = ()
        self._error: Exception | None = None

    def rows(self, limit: float) -> list[Any]:
        if self._is_remote:
            self._session.registerProgressHandler(self._on_progress)
        self._thread.start()
        try:
            self._watch(limit)
        except BaseException:
            # The user's own interrupt counts more than an error here.
            with contextlib.suppress(Exception):
                self._cancel()
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
        finally:
            self._has_ended.set()

    def _cancel(self) -> None:
        """Ends the job; again and again, since it may not have begun so far."""
        end = time.monotonic() + _END_SECONDS
        while not self._has_ended.is_set() and time.monotonic() < end:
            if self._is_remote:
                self._session.interruptTag(self._tag)
            else:
                # There interruptTag finds no job of a thread.
                context = self._session.sparkContext._jsc.sc()
                context.cancelJobGroupAndFutureJobs(self._tag)
            self._has_ended.wait(_POLL_SECONDS)

    def _watch(self, limit: float) -> None:
        since = time.monotonic()
        while not self._has_ended.wait(_POLL_SECONDS):
            if not self._waits_for_slots():
                since = time.monotonic()
            if time.monotonic() - since > limit:
                raise KerasHvdError(
                    f"run: Spark has started no task for {limit:g} s (start_timeout): "
                    "other jobs use its slots"
                )

    def _on_progress(
        self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool
    ) -> None:
        # Others of the session are told of in their own threads.
        if threading.current_thread() is self._thread:
            begun = any(not each.done for each in stages or ())
            self._is_pending = begun and not inflight_tasks

    def _waits_for_slots(self) -> bool:
        """Whether Spark has tasks to run, and runs none of them."""
        if self._is_remote:
            return self._is_pending
        tracker = self._session.sparkContext.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._tag))
        own = {number for job in jobs if job is not None for number in job.stageIds}
        active = [*map(tracker.getStageInfo, own & {*tracker.getActiveStageIds()})]
        return bool(active) and not any(one and one.numActiveTasks for one in active)
