"""ShardedPyDataset: each rank gets its part of the batches of a `PyDataset`."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_hvd.backends.current import framework_name
from keras_hvd.backends.same_job import Membership
from keras_hvd.data.part import digest
from keras_hvd.data.place import place_in
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set

_REMEDY = "Make it anew after keras_hvd.init()"

MODES = ("split", "drop", "repeat")


class ShardedPyDataset(keras.utils.PyDataset):
    """This rank's part of a `keras.utils.PyDataset`.

    Every rank wraps the same dataset and gives the wrapper to `fit`, `evaluate` or
    `predict`, together with all ranks. A rank makes only the batches of its part, with
    the workers, threads or processes that the dataset asks for; on torch, where Keras
    gives batches of one epoch in the next, without them. All ranks together get
    each batch once in an epoch, in the same number of steps. With `steps_per_epoch`
    they get each batch once in a pass of several epochs if there is one worker; with
    several workers Keras starts again in each epoch.

    The dataset's `on_epoch_begin` and `on_epoch_end` run with the same seeds of
    Python's `random` and of `numpy.random` on all ranks, so all ranks shuffle alike. A
    dataset with its own random generator needs the same seed on all ranks. Creating the
    wrapper, and every end of an epoch, checks that the ranks' datasets agree.

    Args:
        inner: the dataset, the same on all ranks. Its batches are rows of arrays.
        shuffle: whether ranks get other batches in each epoch. (Keras also shuffles
            each rank's batches if `fit` has `shuffle=True`.)
        mode: the use of leftover batches if their number is not a multiple of the
            number of ranks. "split": ranks share their rows in one more, smaller step.
            "drop": they are left out. "repeat": some ranks get another batch again.
        seed: of the shuffling; by default rank 0 draws one.
        process_set: the ranks that share the dataset; by default all of them.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `inner` is not a `PyDataset`, or `seed` is not a whole number.
        ValueError: the mode does not exist; the process set is not part of the job, or
            does not contain this rank; the ranks' datasets or arguments differ; or
            there are too few batches, or rows in them, for all ranks.

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> class Squares(keras.utils.PyDataset):
    ...     def __len__(self):
    ...         return 5
    ...     def __getitem__(self, index):
    ...         return np.array([[index]]), np.array([index**2])
    >>> dataset = keras_hvd.data.ShardedPyDataset(Squares())
    >>> sorted(int(y[0]) for x, y in dataset)
    [0, 1, 4, 9, 16]
    """

    def __init__(
        self,
        inner: keras.utils.PyDataset,
        shuffle: bool = True,
        mode: str = "split",
        seed: int | None = None,
        process_set: ProcessSet = global_process_set,
    ):
        if not isinstance(inner, keras.utils.PyDataset):
            raise TypeError(
                "ShardedPyDataset takes a keras.utils.PyDataset; got a "
                f"{type(inner).__name__}"
            )
        if mode not in MODES:
            raise ValueError(
                f"ShardedPyDataset: mode must be one of {MODES}; got {mode!r}"
            )
        if seed is not None:
            seed = basics.whole_number("ShardedPyDataset", "seed", seed)
        # Stored here, because forked workers cannot ask the engine.
        self._size, self._rank = place_in(process_set, "ShardedPyDataset")
        self._membership = Membership(process_set)
        workers, use_multiprocessing = _workers_of(inner)
        super().__init__(
            workers=workers,
            use_multiprocessing=use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self.inner = inner
        self._shuffle = bool(shuffle)
        self._mode = mode
        self._process_set = process_set
        self._epoch = 0
        self._begin_pass()
        self._seed = 0 if seed is None else seed
        self._is_settled = False
        drawn = int.from_bytes(os.urandom(4), "little")
        first = self._agree({"arguments": (self._shuffle, mode, seed), "drawn": drawn})
        self._seed = first["drawn"] if seed is None else seed

    @property
    def num_batches(self) -> int | None:
        """The number of batches of each rank; None if the dataset is infinite.

        Keras reads it when a pass begins, and not within one.
        """
        self._membership.require_same("ShardedPyDataset", _REMEDY)
        self._begin_pass()
        count = self.inner.num_batches
        if count is None:
            return None
        whole, rest = divmod(count, self._size)
        return whole + (rest > 0 and self._mode != "drop")

    def __getitem__(self, index: int) -> Any:
        """Makes batch number `index` of this rank's part, or some rows of one."""
        count = self.inner.num_batches
        position = index * self._size + self._rank
        if count is None:
            return self.inner[position]
        if index in self._given:
            # A new pass of a caller that has not asked for the number of batches.
            self._begin_pass()
        self._given.add(index)
        whole = count // self._size * self._size
        if position >= whole and self._mode == "split":
            return self._rows_of_left_over(self._order(count)[whole:])
        return self.inner[self._order(count)[position % count]]

    def on_epoch_begin(self) -> None:
        """Begins an epoch."""
        with self._same_random_numbers("begin"):
            self.inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Ends an epoch on all ranks. With `shuffle`, the next one has other batches.

        A pass that continues, as with `steps_per_epoch`, keeps its order. The order
        changes here and not in `on_epoch_begin`, because Keras starts an epoch's
        workers before that. Keras also calls this once before the first epoch.
        """
        self._membership.require_same("ShardedPyDataset", _REMEDY)
        with self._same_random_numbers("end"):
            self.inner.on_epoch_end()
        self._epoch += 1
        self._agree({"epoch": self._epoch, "seed": self._seed})

    def _begin_pass(self) -> None:
        """Fixes the order of this epoch until the next pass begins."""
        self._epoch_of_pass = self._epoch
        self._given: set[int] = set()

    def _order(self, count: int) -> list[int]:
        """The inner dataset's batches in the order in which ranks take turns."""
        seed = f"{self._seed} {self._epoch_of_pass}" if self._shuffle else None
        whole = count // self._size * self._size
        return _order(count, seed, whole if self._mode == "split" else 0)

    def _rows_of_left_over(self, batches: list[int]) -> Any:
        """This rank's rows of the batch that it shares with other ranks."""
        shares = [place * len(batches) // self._size for place in range(self._size)]
        shared = shares[self._rank]
        sharing = [place for place, each in enumerate(shares) if each == shared]
        batch = self.inner[batches[shared]]
        rows = _rows_in(batch)
        place, parts = sharing.index(self._rank), len(sharing)
        part = slice(rows * place // parts, rows * (place + 1) // parts)
        return keras.tree.map_structure(
            lambda array: array if array is None else array[part], batch
        )

    def _agree(self, state: dict[str, Any]) -> dict[str, Any]:
        """Compares the ranks' states and returns the first one's."""
        state["rank"] = basics.rank()
        state["error"] = ""
        try:
            state["batches"] = self.inner.num_batches
            self._describe_first_batch(state)
        except Exception as error:
            # Sent to the others, which would otherwise wait for this rank.
            state["error"] = f"{type(error).__name__}: {error}"
        states = allgather_object(
            state, name="keras_hvd/sharded_py_dataset", process_set=self._process_set
        )
        _require_alike(states)
        _require_enough(states[0], self._size, self._mode)
        return states[0]

    def _describe_first_batch(self, state: dict[str, Any]) -> None:
        """Describes a batch, to compare it, unless each time it is another."""
        own, plain = type(self.inner), keras.utils.PyDataset
        hooks = own.on_epoch_begin, own.on_epoch_end
        is_static = hooks == (plain.on_epoch_begin, plain.on_epoch_end)
        if (self._is_settled and is_static) or state["batches"] == 0:
            return
        with self._same_random_numbers("check"):
            batch = self.inner[0]
        state["rows"] = _rows_in(batch)
        state["first batch"] = _digests(batch)
        if not self._is_settled:
            with self._same_random_numbers("check"):
                self._is_random = _digests(self.inner[0]) != state["first batch"]
            self._is_settled = True
        if self._is_random:
            del state["first batch"]

    @contextlib.contextmanager
    def _same_random_numbers(self, purpose: str) -> Iterator[None]:
        """Makes Python's and NumPy's generators draw the same on all ranks."""
        seed = f"{self._seed} {self._epoch} {purpose}".encode()
        python, numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(zlib.crc32(seed))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _workers_of(inner: keras.utils.PyDataset) -> tuple[int, bool]:
    """The number of workers that make batches, and whether they are processes."""
    given = inner.workers, inner.use_multiprocessing
    has_queue = inner.workers > 1 or inner.use_multiprocessing
    if framework_name() == "tensorflow" or not has_queue:
        return given
    # The first batches stay in Keras' queue when it has looked at one to build, and all
    # later ones come too late.
    log.warn(
        f"ShardedPyDataset: on {framework_name()} Keras gives batches of one epoch in "
        "the next where a PyDataset has workers, so the batches are made without. A "
        "torch.utils.data.DataLoader may have workers",
        stacklevel=3,
    )
    return 1, False


@functools.lru_cache(8)
def _order(count: int, seed: str | None, whole: int) -> list[int]:
    """Numbers of batches, shuffled if there is a seed; ranks share those from `whole`.

    Nothing is shared if that is 0.
    """
    order = [*range(count)]
    if seed is not None:
        random.Random(seed).shuffle(order)
    if whole and count - 1 in order[whole:]:
        # The last batch may have too few rows to be shared.
        place = order.index(count - 1)
        order[place], order[whole - 1] = order[whole - 1], order[place]
    return order


def _arrays(batch: Any) -> list[Any]:
    return [each for each in keras.tree.flatten(batch) if each is not None]


def _rows_in(batch: Any) -> int:
    return int(_arrays(batch)[0].shape[0])


def _digests(batch: Any) -> list[int]:
    return [digest(keras.ops.convert_to_numpy(each)) for each in _arrays(batch)]


def _require_alike(states: list[dict[str, Any]]) -> None:
    """Raises, on every rank, if one rank failed or the ranks differ."""
    first = states[0]
    for each in states:
        if each["error"]:
            raise ValueError(
                f"ShardedPyDataset: the dataset of rank {each['rank']} raised "
                f"{each['error']}"
            )
        for what in ("arguments", "batches", "epoch", "seed"):
            if each.get(what) != first.get(what):
                raise ValueError(
                    f"ShardedPyDataset: {what} is {first.get(what)} on rank "
                    f"{first['rank']}, and {each.get(what)} on rank {each['rank']}: "
                    "give all ranks the same dataset, and the same calls of fit, "
                    "evaluate and predict"
                )
        digests = (first.get("first batch"), each.get("first batch"))
        if None not in digests and digests[0] != digests[1]:
            raise ValueError(
                f"ShardedPyDataset: batch 0 of rank {each['rank']} has other rows than "
                f"that of rank {first['rank']}: samples would be read twice, or never. "
                "Give the dataset's random generator the same seed on all ranks; if "
                "each rank has its own part, do not use ShardedPyDataset"
            )


def _require_enough(state: dict[str, Any], size: int, mode: str) -> None:
    batches = state["batches"]
    if batches is None:
        return
    if batches == 0 or (mode == "drop" and batches < size):
        raise ValueError(
            f"ShardedPyDataset: the dataset has {batches} batches for {size} ranks "
            f"with mode={mode!r}"
        )
    left_over = batches % size
    if mode != "split" or not left_over or "rows" not in state:
        return
    parts = -(-size // left_over)
    if state["rows"] < parts:
        raise ValueError(
            f"ShardedPyDataset: of {batches} batches of {state['rows']} rows "
            f"{left_over} are left over for {size} ranks, too few rows to share: use "
            "mode='drop' or mode='repeat', or larger batches"
        )
