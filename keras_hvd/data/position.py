"""Position: where training is in the data, to save it and to continue from it.

It is exact for any number of ranks, shuffles and prefetches:

- The order of samples in a piece (a file, or a row group) depends only on the seed, the
  epoch and the piece. So "its first n samples" means the same in every job, and the
  rest of an epoch is a few numbers per piece (see plan.py).
- A rank reads several pieces in turns. The piece of each sample is recorded as it
  leaves `from_files`, before steps that keep their order (`map`, `batch`, `prefetch`).
  If the training loop has consumed n samples, these are the first n recorded ones,
  however far the pipeline has read ahead.
- Saving gathers all ranks' parts. Restoring divides them among the ranks of that job.
- The rows of arrays have one order for all, of which the ranks have had a beginning.

The training loop, or the callback `BackupAndRestore`, reports the consumed samples with
`advance`, and the end of an epoch with `end_epoch`. Samples not consumed until then
(`even(mode="drop")` leaves some) are skipped: the next epoch has all samples again.
"""

from __future__ import annotations

import collections
import functools
import json
import threading
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_hvd.backends.same_job import Membership
from keras_hvd.data import plan as plans
from keras_hvd.data import shuffling
from keras_hvd.data.rows import Rows
from keras_hvd.data.shard import check_dataset
from keras_hvd.exceptions import MismatchError
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set

_VERSION = 1


class Position(tf.train.experimental.PythonState):
    r"""A place in the data of `from_files` or `from_arrays`, to continue from.

    Give it to one of them; an iteration of the dataset then begins at the position.
    Training moves it: call `advance` after each step and `end_epoch` after each epoch,
    or use the callback `keras_hvd.callbacks.BackupAndRestore`, which also saves and
    restores it together with the model, or `keras_hvd.elastic.fit`. Between that
    function and the training loop, use only steps that keep samples and their order
    (`map`, `batch`, `prefetch`), not steps that change them (`filter`, `repeat`,
    another `shuffle`).

    It can be part of a `tf.train.Checkpoint`; call `state` on all ranks right before
    saving.

    Example:

    >>> import keras_hvd, tempfile, pathlib
    >>> keras_hvd.init()
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("1 2 3 4".replace(" ", "\n"))
    >>> position = keras_hvd.data.Position()
    >>> lines = keras_hvd.data.from_files(
    ...     str(folder / "*.txt"), "text", shuffle=0, position=position)
    >>> for line in lines.as_numpy_iterator():
    ...     position.advance(1)
    ...     if line == b"2":
    ...         break
    >>> saved = position.state()
    >>> position.end_epoch()
    >>> position.restore(saved)
    >>> list(lines.as_numpy_iterator())
    [b'3', b'4']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plan: plans.Plan | Rows | None = None
        self._process_set: ProcessSet = global_process_set  # with a plan, its own
        self._restored: dict[str, Any] | None = None  # until there is a plan
        self._saved: dict[str, Any] | None = None  # the last `state()`, if still true
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0."""
        if self._restored is not None:
            return self._restored["epoch"]
        return self._epoch

    @property
    def is_inside_epoch(self) -> bool:
        """Whether it is within its epoch, because it was restored or moved there."""
        return self._restored is not None or self._inside

    def advance(self, samples: int) -> None:
        """Reports that this rank's training loop has consumed samples.

        Args:
            samples: number of further samples of this rank.

        Raises:
            TypeError: it is not a whole number.
            ValueError: it is negative, or more than were read.
            RuntimeError: the position belongs to no dataset.
        """
        samples = basics.whole_number("Position.advance", "samples", samples)
        self._require_plan("advance")
        with self._lock:
            if not 0 <= samples <= self._waiting:
                raise ValueError(
                    f"Position.advance({samples}): since the last call the dataset has "
                    f"handed out at most {self._waiting} samples in epoch {self._epoch}"
                )
            self._take(samples)

    def end_epoch(self) -> None:
        """Goes to the beginning of the next epoch and skips the rest of this one.

        Raises:
            RuntimeError: the position belongs to no dataset.
        """
        self.start_epoch(self.epoch + 1)

    def start_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch.

        Args:
            epoch: its number, from 0. The order of samples depends on it.

        Raises:
            TypeError: it is not a whole number.
            ValueError: it is negative.
            RuntimeError: the position belongs to no dataset.
        """
        epoch = basics.whole_number("Position.start_epoch", "epoch", epoch)
        self._require_plan("start_epoch")
        if epoch < 0:
            raise ValueError(f"Position.start_epoch({epoch}): epochs count from 0")
        with self._lock:
            self._begin_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """The place of all ranks. Every rank calls it, after the same step.

        Returns:
            The same state on all ranks, for `restore` on any number of ranks. It
            consists of numbers, strings and lists, for JSON or pickle.

        Raises:
            RuntimeError: the position belongs to no dataset, or to one of another job.
            MismatchError: the ranks are in different epochs.
            RankFailedError: another rank died or left.
        """
        plan = self._require_plan("state")
        self._membership.require_same(
            "Position", "Restore what state() gave before, there"
        )
        with self._lock:
            own = (self._epoch, self._inside, self._parts, self._digest_of_rest())
        of_ranks = allgather_object(
            own, name="keras_hvd/data/position", process_set=self._process_set
        )
        _require_same_epoch(of_ranks, self._process_set.ranks)
        inside = any(each[1] for each in of_ranks)
        parts = [_compact(each[2]) for each in of_ranks] if inside else None
        state = {"version": _VERSION, "epoch": own[0], **self._settings(plan)}
        with self._lock:
            self._saved = state | {"parts": parts}
            return self._saved

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a saved place, where the dataset's next iteration begins.

        Args:
            state: the result of `state`, in this job or in one with other ranks; the
                same on all ranks. If only one rank has read it from a file,
                `keras_hvd.broadcast_object` gives it to the others.

        Raises:
            ValueError: it belongs to other files, another seed or shuffle, or is not a
                state.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise ValueError(
                f"Position.restore: this is no state of a Position: {state!r}"
            )
        with self._lock:
            if self._plan is None:
                self._restored = state
            else:
                self._go_to(state)

    def serialize(self) -> str:
        """The last `state` as text, for `tf.train.Checkpoint`.

        Raises:
            RuntimeError: the position has moved since `state` was called.
        """
        is_alone = self._plan is not None and self._process_set.size() == 1
        saved = self.state() if is_alone else self._saved
        if saved is None:
            raise RuntimeError(
                "a keras_hvd.data.Position is saved as its last state(), and has moved "
                "since: call state() on all ranks, then save the checkpoint"
            )
        return json.dumps(saved)

    def deserialize(self, string_value: str | bytes) -> None:
        """Restores the result of `serialize`, for `tf.train.Checkpoint`."""
        self.restore(json.loads(string_value))

    # --- for what makes datasets and moves positions ----------------------------------

    def attach(self, plan: plans.Plan | Rows, process_set: ProcessSet) -> None:
        """Makes this the position in a dataset, which `process_set` shares.

        Raises ValueError if it belongs to another dataset, or was restored to other
        files.
        """
        with self._lock:
            if self._plan is not None:
                raise ValueError(
                    "this Position belongs to another dataset already: make another"
                )
            self._plan, self._process_set = plan, process_set
            self._membership = Membership(process_set)
            restored, self._restored = self._restored, None
            try:
                if restored is None:
                    self._begin_epoch(self._epoch)
                else:
                    self._go_to(restored)
            except ValueError:
                self._plan, self._restored = None, restored
                raise

    def begin(self) -> tuple[int, int, np.ndarray, int]:
        """Begins an iteration: its number, epoch, this rank's parts, and limit or -1.

        Raises RuntimeError if the previous epoch was read to its end, but not ended.
        """
        with self._lock:
            if self._ended and self._advanced:
                raise RuntimeError(
                    f"epoch {self._epoch} was read to its end, but not ended: call "
                    "Position.end_epoch() after it. A dataset with a Position cannot "
                    "be repeat()ed: iterate over it once for each epoch"
                )
            # `even` reads it one more time to count.
            if self._ended and self.iterations == 2:
                log.warn(
                    f"epoch {self._epoch} is read again, because the Position was not "
                    "moved: use keras_hvd.callbacks.BackupAndRestore, or call its "
                    "advance() and end_epoch()"
                )
            self._stop_iteration()
            self.iterations += 1
            return self._iteration, self._epoch, self._parts.copy(), self._limit

    def record(self, iteration: int, parts: np.ndarray) -> None:
        """Records from which parts (indexes) the next samples of an iteration come."""
        with self._lock:
            if iteration == self._iteration:
                self._read.append(parts)
                self._waiting += len(parts)

    def end(self, iteration: int) -> None:
        """Records that an iteration was read to its end."""
        with self._lock:
            if iteration == self._iteration:
                self._ended = True

    def advance_at_most(self, samples: int) -> None:
        """As `advance`, but the last step of an epoch may have fewer samples."""
        with self._lock:
            ended, waiting = self._ended, self._waiting
        self.advance(min(samples, waiting) if ended else samples)

    @property
    def batch(self) -> int:
        """The number of samples that this rank takes in a step.

        Raises RuntimeError if the position belongs to no dataset, or if that leaves the
        number to others.
        """
        batch = self._require_plan("batch").batch
        if not batch:
            raise RuntimeError(
                "from_files needs even=, the number of samples of this rank in a step, "
                "so that all ranks make as many steps with what is left of an epoch"
            )
        return batch

    def state_and_counts(self) -> dict[str, Any]:
        """The state, and what a later job of this run need not count again.

        Another run may read the same files in another way.
        """
        counts = getattr(self._plan, "counts", ())
        return {**self.state(), "counts": counts}

    def counts_of(self, plan: plans.Plan) -> list[int]:
        """The samples of each piece, if it was restored to a state that has them."""
        restored = self._restored or {}
        is_same = restored.get("files") == plan.digest()
        return restored.get("counts", []) if is_same else []

    def counted(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset's batches, which from here on are as many as it says.

        A batch of another size is an error, because `advance` would lose samples.
        """
        size = self.batch
        check_dataset("with a Position, elastic.fit", batches)
        least = size if isinstance(self._plan, plans.Plan) else 1

        def checked(*batch: Any) -> Any:
            rows = tf.shape(tf.nest.flatten(batch)[0])[0]
            is_one = (least <= rows) & (rows <= size)
            what = f"give each batch the {size} samples that from_files has as even="
            tf.debugging.Assert(is_one, [what, rows])
            return batch if len(batch) > 1 else batch[0]

        known = tf.data.experimental.assert_cardinality(self._steps)
        return batches.map(checked).apply(known)

    @property
    def left(self) -> int:
        """Samples that were read and not consumed."""
        return self._waiting

    # --- inside, with the lock held --------------------------------------------------

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._rest: list[np.ndarray] | None = None  # of all ranks; None: a whole epoch
        self._inside = False
        self._settle()

    def _go_to(self, state: dict[str, Any]) -> None:
        self._require_same_settings(state)
        self._epoch, parts = state["epoch"], state["parts"]
        self._rest = None if parts is None else [*map(_expand, parts)]
        self._inside = parts is not None
        self._settle()

    def _settle(self) -> None:
        """Begins at `_epoch` and `_rest`, regardless of the state before."""
        if self._plan is not None:
            self._parts = self._plan.share(self._rest).copy()
            self._limit = self._plan.limit(self._rest)
            self._steps = self._plan.steps(self._rest)
        self._saved = None
        self.iterations = 0  # begun since
        self._stop_iteration()

    def _stop_iteration(self) -> None:
        """Forgets samples that an iteration has read ahead; it may still be reading."""
        self._iteration = getattr(self, "_iteration", 0) + 1
        self._read: collections.deque[np.ndarray] = collections.deque()
        self._waiting = 0
        self._ended = self._advanced = False

    def _take(self, samples: int) -> None:
        self._advanced = self._advanced or samples > 0
        self._inside = self._inside or samples > 0
        self._saved = None
        self._waiting -= samples
        if self._limit >= 0:
            self._limit -= samples
        while samples:
            first = self._read.popleft()
            if len(first) > samples:
                self._read.appendleft(first[samples:])
                first = first[:samples]
            samples -= len(first)
            counts = np.bincount(first, minlength=len(self._parts))
            self._parts[:, plans.START] += counts * self._parts[:, plans.STEP]

    def _digest_of_rest(self) -> int:
        if self._rest is None:
            return 0
        return zlib.crc32(np.concatenate(self._rest).tobytes())

    def _require_plan(self, method: str) -> plans.Plan | Rows:
        if self._plan is None:
            raise RuntimeError(
                f"Position.{method}: give the position to keras_hvd.data.from_files "
                "or from_arrays first"
            )
        return self._plan

    def _settings(self, plan: plans.Plan | Rows) -> dict[str, Any]:
        shuffled = _shuffled() if plan.shuffle > 1 else []
        return {**plan.settings(), "shuffled": shuffled}

    def _require_same_settings(self, state: dict[str, Any]) -> None:
        """Raises if the saved rest of an epoch would not be the rest here."""
        if state["parts"] is None:
            return
        own = self._settings(self._require_plan("restore"))
        differ = [name for name in own if own[name] != state.get(name)]
        if not differ:
            return
        if "files" in differ:
            raise ValueError(
                "Position: the saved place is in other files (their names, sizes or "
                f"order differ): it has {state.get('pieces')} files or row groups, "
                f"this dataset {own['pieces']}"
            )
        if "shuffled" in differ:
            raise ValueError(
                "Position: the saved place is within an epoch, and this version of "
                f"TensorFlow ({tf.__version__}) shuffles differently from the version "
                "that saved it"
            )
        shown = ", ".join(f"{n}={state.get(n)!r}, now {own[n]!r}" for n in differ)
        raise ValueError(
            f"Position: the saved place is within an epoch of {shown}: use the same"
        )


def _require_same_epoch(of_ranks: list[tuple[Any, ...]], ranks: list[int]) -> None:
    if len({(each[0], each[3]) for each in of_ranks}) == 1:
        return
    shown = ", ".join(f"rank {r}: {each[0]}" for r, each in zip(ranks, of_ranks))
    raise MismatchError(
        f"Position.state: the ranks are in different epochs ({shown}), or were "
        "restored to different places. All ranks call end_epoch() and restore() alike"
    )


def _compact(parts: np.ndarray) -> list[int | list[int]]:
    """Parts for a file; a whole piece is only its number."""
    return [
        int(part[plans.PIECE]) if (part[1:] == (0, 1)).all() else part.tolist()
        for part in parts
    ]


def _expand(parts: list[int | list[int]]) -> np.ndarray:
    triples = [[each, 0, 1] if isinstance(each, int) else each for each in parts]
    return np.array(triples, np.int64).reshape(-1, 3)


@functools.cache
def _shuffled() -> list[int]:
    """An order that changes if TensorFlow shuffles differently."""
    windows = tf.data.Dataset.range(16).window(8)
    numbers = shuffling.shuffled(windows, 8, tf.constant(7, tf.int64))
    return [int(number) for number in numbers]
