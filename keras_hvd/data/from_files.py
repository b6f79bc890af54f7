"""from_files: samples of many files, each file read by one rank."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from keras_hvd.backends.tensorflow.collectives import job_values
from keras_hvd.data import plan as plans
from keras_hvd.data import readers, shuffling
from keras_hvd.data.position import Position
from keras_hvd.exceptions import MismatchError
from keras_hvd.job import arrival, basics, log
from keras_hvd.job.objects import allgather_object, broadcast_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set, number_of

# The origin of samples is recorded after this many.
_RECORDED = 256
# More samples than a part has.
_LARGEST_PART = 2**40
# Number of samples read ahead from a file that is not shuffled.
_AHEAD = 64
# A warning comes if more than this share of the samples is left out.
_MOST_LEFT_OUT = 0.1
# Rank 0 reads this many files' sizes at once: each takes a while on remote systems.
_ASKED = 32


def from_files(
    pattern: str | Sequence[str],
    reader: str | Callable[[tf.Tensor], tf.data.Dataset],
    *,
    shuffle: int = 1024,
    seed: int = 0,
    interleave: int = 4,
    even: int | None = None,
    position: Position | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> tf.data.Dataset:
    r"""The samples of many files: each file is read by one rank.

    Files are divided so that ranks read about the same number of bytes. With fewer
    files than ranks, each rank reads all of them and keeps every n-th sample. Either
    way each sample appears exactly once in an epoch, on one rank. Ranks keep their
    files, so all epochs of a rank have the same length, as `fit` expects. Ranks'
    numbers of samples may differ; see `even`.

    Every iteration of the dataset is an epoch with its own order of files and samples.
    A rank reads `interleave` files in turns, and shuffles each sample among `shuffle`
    neighbours in its file. The order depends only on the seed and the epoch's number,
    so it is the same in every run.

    Every rank calls it with the same arguments. Rank 0 lists the files.

    Args:
        pattern: a pattern for `tf.io.gfile.glob`, or a list of patterns and files.
        reader: "tfrecord", "text", "csv", "parquet" or "avro" (see `options` for their
            samples); or a function from a file's name, a string tensor, to a dataset of
            its samples, always the same in the same order.
        shuffle: number of neighbouring samples of a file that are shuffled together; a
            rank keeps `shuffle * interleave` in memory. 0: no shuffling, also of files.
        seed: of the orders, from 0 to 2**32 - 1.
        interleave: number of files that a rank reads in turns.
        even: a batch size. Every rank gives the same number of samples in an epoch: as
            many whole batches as the rank with the fewest has. The others leave out
            different samples in each epoch. Files are read once to count. Unlike
            `keras_hvd.data.even`, it also works for the rest of an epoch after a
            `position` was restored. None: all samples.
        position: follows the place in the data, to save it and to continue from it.
        process_set: the ranks that share the files; by default all of them.
        **options: of the reader:
            "tfrecord", "text": `compression`, "GZIP" or "ZLIB". Samples are strings.
            "csv": `columns`, a dict of names and types, or of names and defaults for
            empty fields; by default all columns, as strings. `header=False` for files
            without a first line of names, `delimiter`, `compression`. Samples are dicts
            of scalars.
            "parquet": `columns`, a list of names; `engine`, "tensorflow-io" (on
            TensorFlow 2.16 only) or "pyarrow", which divides row groups instead of
            files; by default the first that is installed. Samples are dicts.
            "avro": through tensorflow-io, on TensorFlow 2.16 only. `schema`, the
            reader's, in JSON; `features`, as `tfio.experimental.columnar.parse_avro`
            takes them. Samples are dicts; without `features`, unparsed strings.

    Returns:
        A `tf.data.Dataset` of this rank's samples. Do not shard it again.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: an argument has the wrong type, or the reader has no such option.
        ValueError: no file matches, a file is given twice, or a value is out of range;
            the process set is not part of the job; a file has another format; or with
            `even` a rank has less than a batch.
        ImportError: a library for these files is not installed, or does not load.
        MismatchError: the ranks give different arguments, or one of them does not see
            the files that rank 0 sees.
        RankFailedError: another rank died or left.

    Example:

    >>> import keras_hvd, tempfile, pathlib
    >>> keras_hvd.init()
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     _ = (folder / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    >>> lines = keras_hvd.data.from_files(str(folder / "*.txt"), "text", seed=1)
    >>> sorted(lines.as_numpy_iterator())
    [b'a1', b'a2', b'b1', b'b2']
    """
    arrival.require_arrived("from_files")
    number_of(process_set, "from_files")
    patterns = _patterns(pattern)
    shuffle = _at_least(0, "shuffle", shuffle)
    seed = _at_least(0, "seed", seed)
    interleave = _at_least(1, "interleave", interleave)
    even = 0 if even is None else _at_least(1, "even", even)
    if seed >= 2**32:
        raise ValueError(f"from_files: seed={seed} must be below 2**32")
    if not isinstance(position, (Position, type(None))):
        raise TypeError(f"from_files: position must be a Position, got {position!r}")
    opener = readers.make(reader, options)
    given = {
        "pattern": patterns,
        "reader": reader if isinstance(reader, str) else "a function",
        "shuffle": shuffle,
        "seed": seed,
        "interleave": interleave,
        "even": even,
        "options": {name: repr(value) for name, value in options.items()},
        "a position": position is not None,
    }
    _require_alike(given, process_set)
    pieces = _agreed_pieces(patterns, opener, process_set)
    plan = plans.Plan(pieces, seed, shuffle, process_set.rank(), process_set.size())
    _require_readable(plan, process_set)
    _report(plan)
    if even:
        known = None if position is None else position.counts_of(plan)
        counts = known or _counts(plan, opener, process_set)
        plan = _evened(plan, counts, even)
    if position is not None:
        position.attach(plan, process_set)
    return _dataset(plan, opener, interleave, position, process_set)


def _patterns(pattern: Any) -> list[str]:
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns or not all(isinstance(each, str) for each in patterns):
        raise TypeError(
            "from_files: pattern must be a string, or a list of at least one; got "
            f"{pattern!r}"
        )
    return patterns


def _at_least(least: int, argument: str, value: Any) -> int:
    value = basics.whole_number("from_files", argument, value)
    if value < least:
        raise ValueError(f"from_files: {argument}={value} must be at least {least}")
    return value


def _require_alike(arguments: dict[str, Any], process_set: ProcessSet) -> None:
    of_ranks = allgather_object(
        arguments, name="keras_hvd/data/arguments", process_set=process_set
    )
    for name in arguments:
        values = [each[name] for each in of_ranks]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            ranks = process_set.ranks
            raise MismatchError(
                f"from_files: {name} is {values[0]!r} on rank {ranks[0]}, "
                f"{values[other]!r} on rank {ranks[other]}. All ranks that share files "
                "give the same"
            )


# --- the list of files ----------------------------------------------------------------


def _agreed_pieces(
    patterns: list[str], opener: readers.Reader, process_set: ProcessSet
) -> list[plans.Piece]:
    """The files that the set's first rank finds. The reader learns their format."""
    found: Any = None
    if process_set.rank() == 0:
        try:
            found = _find(patterns, opener)
        except Exception as error:
            found = _picklable(error)
    root = process_set.ranks[0]
    found = broadcast_object(
        found, root, name="keras_hvd/data/files", process_set=process_set
    )
    if isinstance(found, Exception):
        raise found
    pieces, opener.format = found
    return pieces


def _picklable(error: Exception) -> Exception:
    """Replaces TensorFlow's errors, which cannot be unpickled."""
    if isinstance(error, (ImportError, TypeError, ValueError)):
        return type(error)(str(error))
    return ValueError(f"from_files: {type(error).__name__}: {error}")


def _find(patterns: list[str], opener: readers.Reader) -> tuple[list[plans.Piece], Any]:
    paths = []
    for pattern in patterns:
        matches = sorted(tf.io.gfile.glob(pattern))
        # A file's name may contain characters of patterns.
        if not matches and tf.io.gfile.exists(pattern):
            matches = [pattern]
        if not matches:
            raise ValueError(f"from_files: no file matches {pattern!r}")
        paths += matches
    [(path, times)] = collections.Counter(paths).most_common(1)
    if times > 1:
        raise ValueError(
            f"from_files: {path!r} is there twice; each file is read once in an epoch"
        )
    with ThreadPoolExecutor(_ASKED) as pool:
        sizes = list(pool.map(_size, paths))
        opener.learn(paths[0])
        groups = list(pool.map(opener.groups, paths, sizes))
    pieces = [
        plans.Piece(path, group, size)
        for path, of_path in zip(paths, groups)
        for group, size in of_path
    ]
    if not pieces:
        raise ValueError(f"from_files: there is nothing in the files of {patterns!r}")
    return pieces, opener.format


def _size(path: str) -> int:
    stat = tf.io.gfile.stat(path)
    if stat.is_directory:
        raise ValueError(f"from_files: {path!r} is a folder; give its files, {path}/*")
    return stat.length


def _require_readable(plan: plans.Plan, process_set: ProcessSet) -> None:
    """Raises, on every rank, if a rank does not see its files."""
    own = [plan.pieces[i] for i in plan.share()[:, plans.PIECE]]
    with ThreadPoolExecutor(_ASKED) as pool:
        problems = [each for each in pool.map(_problem, own) if each]
    of_ranks = allgather_object(
        problems[:1], name="keras_hvd/data/problems", process_set=process_set
    )
    for rank, of_rank in zip(process_set.ranks, of_ranks):
        if of_rank:
            raise MismatchError(
                f"from_files: rank {rank} does not see the files of rank "
                f"{process_set.ranks[0]}: {of_rank[0]}. All ranks need the same files, "
                "under the same names"
            )


def _problem(piece: plans.Piece) -> str:
    try:
        size = tf.io.gfile.stat(piece.path).length
    except tf.errors.OpError as error:
        return f"{piece.path}: {error.message}"
    if piece.group < 0 and size != piece.size:
        return f"{piece.path} has {size} bytes there, {piece.size} here"
    return ""


def _counts(
    plan: plans.Plan, opener: readers.Reader, process_set: ProcessSet
) -> list[int]:
    """The numbers of samples of all pieces; each is read by one rank."""
    own: Sequence[int] = range(plan.rank, len(plan.pieces), plan.size)
    if len(plan.pieces) >= plan.size:
        own = [int(piece) for piece in plan.share()[:, plans.PIECE]]
    counted: Any
    try:
        counted = dict(zip(own, _count([plan.pieces[i] for i in own], opener)))
    except Exception as error:
        counted = _picklable(error)
    of_ranks = allgather_object(
        counted, name="keras_hvd/data/counts", process_set=process_set
    )
    counts: dict[int, int] = {}
    for rank, of_rank in zip(process_set.ranks, of_ranks):
        if isinstance(of_rank, Exception):
            raise ValueError(f"from_files: on rank {rank}: {of_rank}")
        counts.update(of_rank)
    return [counts[i] for i in range(len(plan.pieces))]


def _evened(plan: plans.Plan, counts: list[int], batch: int) -> plans.Plan:
    """The plan with the numbers of samples, for as many whole batches on all ranks."""
    plan = dataclasses.replace(plan, batch=batch, counts=counts)
    if plan.limit() == 0:
        raise ValueError(
            f"from_files: even={batch}: of {sum(counts)} samples some rank "
            f"would get less than a batch: {plan.size} ranks need smaller batches, or "
            "more files, of about the same size"
        )
    left_out = sum(counts) - plan.limit() * plan.size
    if plan.rank == 0 and left_out > _MOST_LEFT_OUT * sum(counts):
        log.warn(
            f"from_files: with even={batch} each epoch leaves out {left_out} of "
            f"{sum(counts)} samples, because files differ in size and each is "
            f"read by one of {plan.size} ranks. More, smaller files avoid that",
            stacklevel=3,
            from_any_rank=True,
        )
    return plan


def _count(pieces: list[plans.Piece], opener: readers.Reader) -> list[int]:
    def count(path: tf.Tensor, group: tf.Tensor) -> tf.Tensor:
        return opener.open(path, group).reduce(np.int64(0), lambda n, *_: n + 1)

    if not pieces:
        return []
    paths = [piece.path for piece in pieces]
    groups = np.array([piece.group for piece in pieces], np.int64)
    counts = tf.data.Dataset.from_tensor_slices((paths, groups))
    counts = counts.map(count, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return [int(each) for each in counts.as_numpy_iterator()]


def _report(plan: plans.Plan) -> None:
    if plan.rank == 0 and len(plan.pieces) < plan.size:
        what = "row groups" if plan.pieces[0].group >= 0 else "files"
        log.warn(
            f"from_files: {len(plan.pieces)} {what} for {plan.size} ranks: each rank "
            f"reads all of them, and keeps one of {plan.size} samples. With as many "
            f"{what} as ranks each would be read once",
            stacklevel=3,
            from_any_rank=True,
        )


# --- the dataset ----------------------------------------------------------------------


def _dataset(
    plan: plans.Plan,
    opener: readers.Reader,
    interleave: int,
    position: Position | None,
    process_set: ProcessSet,
) -> tf.data.Dataset:
    number_of_set = number_of(process_set, "from_files")
    epochs = itertools.count()
    all_parts, limit = plan.share(), plan.limit()

    def begin() -> list[np.ndarray]:
        """The parts that an iteration reads; runs when it begins."""
        if position is None:
            return _reads(plan, 0, next(epochs), all_parts, limit)
        return _reads(plan, *position.begin())

    def open_part(number, *part):
        samples = _samples_of(part, opener, plan.shuffle)
        if position is None:
            return samples
        # A range, because repeating the part's number is slow.
        first = number * _LARGEST_PART
        numbers = tf.data.Dataset.range(first, first + _LARGEST_PART)
        return tf.data.Dataset.zip((numbers, samples))

    def iteration(_: tf.Tensor) -> tf.data.Dataset:
        made_by = "keras_hvd.data.from_files"
        checks = job_values.require_as_traced(
            "size", "rank", process_set=number_of_set, dataset=made_by
        )
        with tf.control_dependencies(checks):
            number, limit, *columns = tf.numpy_function(begin, [], _READ)
        number.set_shape([])
        # Without it TensorFlow's optimizer crashes: `take` of an op's second output.
        limit = tf.reshape(limit, [])
        for column in columns:
            column.set_shape([None])
        samples = tf.data.Dataset.from_tensor_slices(tuple(columns)).interleave(
            open_part, cycle_length=interleave, block_length=1
        )
        samples = samples.take(limit)
        return samples if position is None else _followed(samples, number, position)

    # The name tells `shard` that this is already the rank's part.
    dataset = tf.data.Dataset.range(1).flat_map(iteration, name=plans.DEALT)
    options = tf.data.Options()
    options.deterministic = True
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def _followed(
    samples: tf.data.Dataset, iteration: tf.Tensor, position: Position
) -> tf.data.Dataset:
    """The samples of an iteration. Its position records where they come from."""

    def record(iteration: np.ndarray, numbers: np.ndarray) -> np.int64:
        position.record(int(iteration), numbers // _LARGEST_PART)
        return np.int64(0)

    def end(iteration: np.ndarray) -> np.int64:
        position.end(int(iteration))
        return np.int64(0)

    def recorded(numbers: tf.data.Dataset, samples: Any) -> tf.data.Dataset:
        numbers = numbers.batch(_RECORDED).get_single_element()
        done = tf.numpy_function(record, [iteration, numbers], tf.int64)
        return shuffling.together(samples).skip(tf.reshape(done, []))

    followed = samples.window(_RECORDED).flat_map(recorded)

    def ended(_: tf.Tensor) -> tf.data.Dataset:
        done = tf.numpy_function(end, [iteration], tf.int64)
        return followed.take(tf.reshape(done, []))

    return followed.concatenate(tf.data.Dataset.range(1).flat_map(ended))


# The types of the results of `_reads`.
_READ = [*[tf.int64] * 3, tf.string, *[tf.int64] * 4]


def _reads(
    plan: plans.Plan, iteration: int, epoch: int, parts: np.ndarray, limit: int
) -> list[np.ndarray]:
    """An iteration's number and limit; its parts' numbers, paths, ..., seeds."""
    places, seeds = plan.order(epoch)
    order = np.argsort(places[parts[:, plans.PIECE]], kind="stable")
    parts = parts[order]
    pieces = [plan.pieces[i] for i in parts[:, plans.PIECE]]
    return [
        np.int64(iteration),
        np.int64(limit),
        order,
        np.array([piece.path.encode() for piece in pieces], object),
        np.array([piece.group for piece in pieces], np.int64),
        parts[:, plans.START],
        parts[:, plans.STEP],
        seeds[parts[:, plans.PIECE]],
    ]


def _samples_of(
    part: tuple[tf.Tensor, ...], opener: readers.Reader, shuffle: int
) -> tf.data.Dataset:
    """The samples of a part, in the order of its epoch."""
    path, group, start, step, seed = part
    samples = opener.open(path, group)
    size = shuffle if shuffle > 1 else _AHEAD
    first = start // size
    windows = samples.skip(first * size).window(size).prefetch(1)
    if shuffle > 1:
        samples = shuffling.shuffled(windows, size, seed, first)
    else:
        samples = shuffling.unshuffled(windows)
    return samples.skip(start % size).shard(step, 0)
