"""The job that this process is in, and the next one after ranks have failed."""

from __future__ import annotations

import contextlib
import os

from keras_hvd.exceptions import KerasHvdError, RankFailedError
from keras_hvd.job import basics
from keras_hvd.world import initialization, renewal


def renew() -> None:
    """Leaves the job, which has failed, and joins the next one, of those that are left.

    Raises RankFailedError if there is none.
    """
    if renewal.VARIABLE not in os.environ:
        raise RankFailedError(
            "this job keeps its ranks, so it ends with the first that fails. Start it "
            "with khvdrun --min-np N, and it goes on as long as N are left"
        )
    basics.shutdown()
    try:
        with contextlib.closing(renewal.connect(os.environ)) as words:
            _join_next(words)
    except OSError as error:
        raise RankFailedError(f"khvdrun names no next job: {error}") from error


def _join_next(words: renewal.Words) -> None:
    while (told := words.hear())["word"] != "go":
        if told["word"] == "end":
            raise RankFailedError(f"the job does not go on: {told['why']}")
        # A later place calls off the one before.
        basics.shutdown()
        renewal.take_place(told)
        try:
            initialization.rejoin(cancel=words.fileno())
        except KerasHvdError as error:
            words.say("could not", job=told["job"], why=str(error))
        else:
            words.say("joined", job=told["job"])
