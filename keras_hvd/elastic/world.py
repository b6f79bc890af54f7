"""The job that this process is in, and the next one with fewer ranks or with more."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import numpy as np

from keras_hvd.exceptions import KerasHvdError, RankFailedError
from keras_hvd.job import arrival, basics, objects
from keras_hvd.world import initialization, renewal

# The connection with `khvdrun`, while a function of `elastic.run` is under way in a job
# that may change.
_words: renewal.Words | None = None

# The functions that it was made for.
_turns = itertools.count(1)

# Whether this process came later, and has not got the others' state so far.
_is_without_state = False


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Hears what `khvdrun` says of other ranks, if the job may change.

    Raises RankFailedError if there is none any more.
    """
    global _words
    arrival.arrive()
    told = renewal.of(os.environ)
    if told is None or _words is not None:
        yield
        return
    try:
        _words = renewal.connect(told, next(_turns))
    except OSError as error:
        raise _names_no_job(error) from error
    try:
        yield
    finally:
        _words.close()
        _words = None


def is_new() -> bool:
    """Whether this process was started later than its job, and is not in it so far."""
    told = renewal.of(os.environ)
    return told is not None and told.is_new


def is_without_state() -> bool:
    """Whether this process came later than its job, and has not got its state so far.

    What it has then is of no training.
    """
    return _is_without_state


def note_state() -> None:
    """Records that this process has the state of its job."""
    global _is_without_state
    _is_without_state = False


def others_wait() -> bool:
    """Whether new ranks wait for a place in this job.

    All ranks ask at the same time, and get the answer that rank 0 has.
    """
    told = renewal.of(os.environ)
    if _words is None or told is None or not told.gains:
        return False
    answer = np.array([_words.are_there()], np.uint8)
    objects.broadcast_array(answer, 0, "keras_hvd/elastic/others wait")
    return bool(answer[0])


def renew() -> None:
    """Leaves the job, and joins the next one, of those that are there.

    Raises RankFailedError if there is none, and Left if this rank is to leave.
    """
    if _words is None:
        raise RankFailedError(
            "this job keeps its ranks, so it ends with the first that fails. Start it "
            "with khvdrun --min-np N, and it goes on as long as N are left"
        )
    global _is_without_state
    basics.shutdown()
    try:
        told = renewal.of(os.environ)
        assert told is not None, "or there would be no words"
        _is_without_state |= told.is_new
        offered = renewal.offer(told)
        try:
            _words.say("waits", at=offered, has_state=not _is_without_state)
            _join_next(_words)
        finally:
            renewal.withdraw(offered)
    except OSError as error:
        raise _names_no_job(error) from error


def _join_next(words: renewal.Words) -> None:
    while (told := words.hear())["word"] != "go":
        if told["word"] in ("others", "late"):
            # They are to join the same job; or it has ended a wait for one that does
            # not come.
            continue
        if told["word"] == "leave":
            # Nothing has gone wrong.
            raise renewal.Left(0)
        if told["word"] == "end":
            raise RankFailedError(f"the job does not go on: {told['why']}")
        if words.are_there():
            # A later place calls this one off.
            continue
        # And the one before.
        basics.shutdown()
        place = renewal.of(os.environ)
        assert place is not None, "or there would be no words"
        renewal.take_place(place, told["variables"], told["generation"])
        try:
            initialization.rejoin(cancel=words.fileno())
        except KerasHvdError as error:
            words.say("could not", job=told["job"], why=str(error))
        else:
            words.say("joined", job=told["job"])


def _names_no_job(error: OSError) -> RankFailedError:
    return RankFailedError(f"khvdrun names no next job: {error}")
