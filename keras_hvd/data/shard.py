"""shard: each rank gets its part of a dataset, before it is shuffled and batched."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tensorflow as tf

from keras_hvd.data.graph import FOR_ONE_JOB, DatasetGraph, InnerDataset, kinds
from keras_hvd.data.one_job import for_one_job
from keras_hvd.data.place import place_in
from keras_hvd.data.plan import DEALT
from keras_hvd.job import log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set
from keras_hvd.job.settings import DIVIDED

POLICIES = ("auto", "file", "data", "off")

_SHUFFLES = kinds("Shuffle ShuffleAndRepeat")
_REPEATS = kinds("Repeat ShuffleAndRepeat")

# After these an element is no longer one sample.
_BATCHES = kinds(
    "Batch DenseToRaggedBatch DenseToSparseBatch GroupByWindow MapAndBatch PaddedBatch"
)

# These make one sample of neighbours: the cut comes after them.
_WINDOWS = kinds("SlidingWindow Window")

# One element in, one element out, at the same place. A cut before them gives the same
# part as a cut after them, and is cheaper.
_ONE_TO_ONE = {FOR_ONE_JOB} | kinds(
    "Cache Map MaxIntraOpParallelism Model Options Prefetch PrivateThreadPool Snapshot"
)

# Each element stays or goes regardless of others, so it does not matter which rank has
# it.
_ELEMENTWISE = _ONE_TO_ONE | kinds("AssertCardinality Filter IgnoreErrors")

# These count elements by place. The original places of a rank's part are known.
_BY_PLACE = kinds("Skip Take")

# Their functions decide how many elements there are.
_COUNT_BY_FUNCTION = kinds("Filter FlatMap Interleave Scan TakeWhile")

# Each element becomes several, on any rank.
_EXPANDING = kinds("FlatMap Interleave Unbatch")

# The place of the first of two seeds among the arguments. Without seeds, each iteration
# draws new ones.
_SEEDS = {
    "RandomDataset": 0,
    "SamplingDataset": 2,
    "ShuffleAndRepeatDataset": 2,
    "ShuffleDataset": 2,
}


class _Cut(NamedTuple):
    """Where a dataset is divided between ranks."""

    policy: str
    dataset: str  # its elements, or files, are divided
    counting: tuple[str, ...] = ()  # datasets of `_BY_PLACE` behind it, in order


class _Unsuitable(Exception):
    """A graph cannot be divided in this way; the text says why."""


def shard(
    dataset: tf.data.Dataset,
    policy: str = "auto",
    process_set: ProcessSet = global_process_set,
) -> tf.data.Dataset:
    """Gives each rank its part of a dataset; all parts together are the whole, once.

    Every rank calls it with the same dataset. The part is taken where the order
    matters: before the first `shuffle`, `batch`, `padded_batch`, `window` or `repeat`,
    and before adjacent `map`, `take` and `skip`, so each rank maps only its part. Later
    steps work on this rank's part: a batch size is per rank, and so is a `take` after
    the batch. If elements are counted or dropped between a shuffle and the batch
    (`take`, `skip`, ...), the part is taken after the shuffle. The shuffle then has the
    same order on all ranks and in each epoch; a warning says so.

    It checks that the ranks' datasets begin with the same data. It cannot check a
    Python generator, which must yield the same on all ranks. A dataset of `from_files`
    or `from_arrays` already is this rank's part, and is returned unchanged.

    Args:
        dataset: the same on all ranks; not a part of it.
        policy: "file": ranks read different files. "data": ranks read all files and
            keep every n-th element. "auto": "file" if the dataset starts from at least
            as many files as ranks, and nothing counts elements before the batch; else
            "data". "off": the dataset unchanged. Rank 0 logs the choice (level `info`
            of `KERAS_HVD_LOG_LEVEL`).
        process_set: the ranks that share the dataset; by default all of them.

    Returns:
        A dataset of this rank's part, with the same type of elements. Reading it fails
        in a later job of another size, or in which this process has another rank.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        TypeError: `dataset` is not a `tf.data.Dataset`.
        ValueError: the policy does not exist; the process set is not part of the job,
            or does not contain this rank; the ranks' datasets or policies differ; with
            "file", the dataset cannot be divided by files; elements are dropped at
            random and then counted; or TensorFlow cannot write down the dataset's
            graph.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> dataset = tf.data.Dataset.range(6).shuffle(6, seed=1).batch(3)
    >>> sum(len(batch) for batch in keras_hvd.data.shard(dataset))
    6
    """
    part = part_of(dataset, policy, process_set)
    is_dealt = policy != "off" and not _is_dealt(dataset)
    # With one rank the whole is dealt to it.
    if not is_dealt or (part is dataset and process_set.size() > 1):
        return dataset
    return for_one_job(part, "shard", process_set)


def part_of(
    dataset: tf.data.Dataset, policy: str, process_set: ProcessSet
) -> tf.data.Dataset:
    """Like `shard`, without the check that fails in another job.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> ranks = keras_hvd.global_process_set
    >>> len(part_of(tf.data.Dataset.range(6), "auto", ranks))
    6
    """
    check_dataset("shard", dataset)
    if policy not in POLICIES:
        raise ValueError(f"shard: policy must be one of {POLICIES}; got {policy!r}")
    size, place = place_in(process_set, "shard")
    if policy == "off" or size == 1 or _is_dealt(dataset):
        return dataset
    graph, mine = _proposal(dataset, policy, size)
    plans = allgather_object(mine, name="keras_hvd/shard", process_set=process_set)
    _require_alike(plans, process_set)
    assert graph is not None, "it has an error"
    if _is_sharded_by_user(plans, place, size):
        return dataset
    if place == 0:
        _say(graph, mine, size)
    cut = mine["cut"]
    _settle(graph, cut, plans[0], place, size)
    graph.add_shard(cut.dataset, size, _count_own(graph, cut.counting, place, size))
    return graph.build()


def check_dataset(function: str, dataset: Any) -> None:
    """Raises TypeError unless `dataset` is a `tf.data.Dataset`."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"{function} takes a tf.data.Dataset; got a {type(dataset).__name__}"
        )


def _is_dealt(dataset: tf.data.Dataset) -> bool:
    """Whether the dataset contains one of `from_files` or `from_arrays`, a part."""
    try:
        graph = DatasetGraph(dataset, "shard")
    except ValueError:
        return False
    names = graph.before(graph.chain()[-1])
    return any(graph.has_mark(name, DEALT) for name in names)


def _proposal(
    dataset: tf.data.Dataset, policy: str, size: int
) -> tuple[DatasetGraph | None, dict[str, Any]]:
    """The dataset's graph, and this rank's proposal of a cut, to compare.

    Errors are part of it, so all ranks learn of them and none waits.
    """
    proposal: dict[str, Any] = {"policy": policy, "error": ""}
    try:
        graph = DatasetGraph(dataset, "shard")
        divided_by = os.environ.get(DIVIDED)
        if divided_by and _is_generated(graph):
            raise _Unsuitable(
                f"{divided_by} has given this rank its part already. A part of that "
                "would leave out rows: train on it as it is, in batches of this rank"
            )
        cut, proposal["files"], proposal["why"] = _choose(graph, policy, size)
    except (_Unsuitable, ValueError) as error:
        return None, {**proposal, "error": str(error)}
    before = graph.before(cut.dataset)
    inner = [each for name in before for each in graph.inner(name)]
    seeded = [name for name in before if graph.kind(name) in _SEEDS]
    shards = [
        (int(graph.argument(name, 1)), int(graph.argument(name, 2)))
        for name in graph.before(graph.chain()[-1])
        if graph.kind(name) == "ShardDataset"
    ]
    return graph, proposal | {
        "cut": cut,
        "counts": [_count_of(graph, name) for name in cut.counting],
        "kinds": [graph.kind(name) for name in before],
        "inner": [each.kind for each in inner],
        "digest": graph.digest(cut.dataset),
        "seeds": {name: _seeds(graph, name) for name in seeded},
        "inner seeds": [_inner_seeds(each) for each in inner],
        "shards": shards,
    }


def _is_generated(graph: DatasetGraph) -> bool:
    """Whether the dataset begins with a Python generator."""
    inner = [each for name in graph.chain() for each in graph.inner(name)]
    return any(each.kind == "GeneratorDataset" for each in inner)


def _choose(graph: DatasetGraph, policy: str, size: int) -> tuple[_Cut, int, str]:
    """The cut, the number of files, and the reason for not cutting by files."""
    if policy == "data":
        return _cut_by_elements(graph), 0, ""
    try:
        name, files = _file_cut(graph, size)
    except _Unsuitable as error:
        if policy == "file":
            raise
        return _cut_by_elements(graph), 0, str(error)
    return _Cut("file", name), files, ""


def _cut_by_elements(graph: DatasetGraph) -> _Cut:
    """Where to cut by elements: before functions too, if ranks can count for others."""
    chain = graph.chain()
    place = end = chain.index(_cut_in(graph, chain))
    for i in range(end, 0, -1):
        kind = graph.kind(chain[i])
        if kind in _ONE_TO_ONE:
            place = i - 1
        elif kind not in _BY_PLACE:
            break
    between = chain[place + 1 : end + 1]
    counting = [name for name in between if graph.kind(name) in _BY_PLACE]
    return _Cut("data", chain[place], tuple(counting))


def _file_cut(graph: DatasetGraph, size: int) -> tuple[str, int]:
    """The dataset of files to divide, and their number."""
    chain = graph.chain()
    readers = [name for name in chain if graph.reads_files(name)]
    if not readers:
        raise _Unsuitable("it does not start from files that tf.data reads")
    place = chain.index(readers[0])
    for name in chain[place + 1 : _batch(graph, chain)]:
        kind = graph.kind(name)
        if kind not in _ELEMENTWISE | _SHUFFLES | _REPEATS | _EXPANDING:
            raise _Unsuitable(f"{kind} counts the elements of all files")
    name = _cut_in(graph, chain[:place])
    files = _count(graph.build_part(name), size)
    if files < size:
        raise _Unsuitable(f"it has {files} files for {size} ranks")
    return name, files


def _count(dataset: tf.data.Dataset, enough: int) -> int:
    """The number of elements of a dataset; at most `enough` if it is unknown."""
    known = int(dataset.cardinality())
    if known >= 0:
        return known
    return sum(1 for _ in dataset.take(enough))


def _cut_in(graph: DatasetGraph, chain: list[str]) -> str:
    """The dataset of a chain whose elements are to be divided."""
    end = _batch(graph, chain)
    first = _first_that_orders(graph, chain, end)
    passing = _ELEMENTWISE | _SHUFFLES | _REPEATS
    if first < end and graph.kind(chain[first]) in _EXPANDING:
        # Their numbers depend on the rank's random numbers.
        passing |= _EXPANDING
    counting = [
        i for i in range(max(first, 1), end) if graph.kind(chain[i]) not in passing
    ]
    place = counting[-1] if counting else first - 1
    _require_settled(graph, chain[place])
    while place > 0 and graph.kind(chain[place]) in _ONE_TO_ONE:
        place -= 1
    return chain[place]


def _batch(graph: DatasetGraph, chain: list[str]) -> int:
    """The place in a chain at which samples become batches; its length if they do not.

    Batches of batches that are not unbatched are batches of sequences: of neighbours,
    unless they were shuffled before.
    """
    kinds = [graph.kind(name) for name in chain]
    shuffle = next((i for i, kind in enumerate(kinds) if kind in _SHUFFLES), len(kinds))
    batch, is_apart = len(kinds), False
    for i in range(len(kinds) - 1, 0, -1):
        is_batch = kinds[i] in _BATCHES or (kinds[i] in _WINDOWS and i > shuffle)
        if is_batch and (batch == len(kinds) or is_apart or i > shuffle):
            batch, is_apart = i, False
        elif kinds[i] == "UnbatchDataset":
            is_apart = True
    return batch


def _first_that_orders(graph: DatasetGraph, chain: list[str], batch: int) -> int:
    """The first place of a chain, from 1, that must come after the cut."""
    is_random = False
    for i, name in enumerate(chain):
        kind = graph.kind(name)
        is_random = is_random or graph.draws(name)
        if i == 0:
            continue
        if kind in _SHUFFLES | _REPEATS or i == batch:
            return i
        if is_random and kind in _COUNT_BY_FUNCTION | {"UnbatchDataset"}:
            return i
    return len(chain)


def _require_settled(graph: DatasetGraph, name: str) -> None:
    """Raises if ranks would get different elements before the cut."""
    is_random: dict[str, bool] = {}
    for each in graph.before(name):
        inputs = [is_random[source] for source in graph.inputs(each)]
        is_random[each] = graph.draws(each) or any(inputs)
        if is_random[each] and graph.kind(each) in _COUNT_BY_FUNCTION:
            raise _Unsuitable(
                f"{graph.kind(each)} may drop elements by random numbers, different "
                f"ones on each rank, and {_why_not_before(graph, each, name)}. Use "
                "random numbers that all ranks share (tf.random.stateless_uniform), or "
                "put keras_hvd.data.shard() before it"
            )


def _why_not_before(graph: DatasetGraph, dropping: str, cut: str) -> str:
    """Explains why the cut cannot come before a dataset that drops elements."""
    source = graph.chain()[0]
    kind = graph.kind(source)
    if dropping not in graph.before(source):
        return f"{graph.kind(cut)} counts them after it"
    if kind == "DirectedInterleaveDataset":
        return (
            f"{kind} mixes what is left with another dataset, as rejection_resample "
            "and sample_from_datasets do"
        )
    return f"{kind} puts what is left together with another dataset"


def _seeds(graph: DatasetGraph, name: str) -> tuple[int, int, bool]:
    """A dataset's seeds, or new ones, and whether they fix its order for good."""
    place = _SEEDS[graph.kind(name)]
    first, second = (int(graph.argument(name, place + i)) for i in range(2))
    if first or second:
        return first, second, not graph.varies(name)
    return *_new_seeds(), False


def _inner_seeds(inner: InnerDataset) -> tuple[int | None, int | None, bool]:
    """As `_seeds`; None for a seed that does not exist, or depends on elements."""
    if inner.kind not in _SEEDS:
        return None, None, True
    first, second = (inner.constant(_SEEDS[inner.kind] + i) for i in range(2))
    return (*_new_seeds(), False) if first == second == 0 else (first, second, True)


def _new_seeds() -> tuple[int, int]:
    first, second = (int.from_bytes(os.urandom(4), "little") + 1 for _ in range(2))
    return first, second


def _count_of(graph: DatasetGraph, name: str) -> int:
    """The number of elements that a `take` or `skip` takes; negative for all."""
    return int(graph.argument(name, 1))


def _count_own(
    graph: DatasetGraph, counting: tuple[str, ...], place: int, size: int
) -> int:
    """Changes each `take` and `skip` behind the cut to count this rank's elements only.

    `place` is the first element behind them that belongs to this rank. Returns that
    element's place before them, modulo `size`.
    """
    for name in reversed(counting):
        count = _count_of(graph, name)
        if count < 0:
            continue
        if graph.kind(name) == "SkipDataset":
            place = (place + count) % size
        graph.set_argument(name, 1, len(range(place, count, size)), tf.int64)
    return place


def _settle(
    graph: DatasetGraph, cut: _Cut, first: dict[str, Any], place: int, size: int
) -> None:
    """Makes all before the cut, as the `first` rank proposes it, alike on all ranks."""
    seeds = first["seeds"]
    inner = [each for n in graph.before(cut.dataset) for each in graph.inner(n)]
    for each, of_first in zip(inner, first["inner seeds"]):
        each.settle()
        for i in range(2):
            if of_first[i] is not None:
                each.set_constant(_SEEDS[each.kind] + i, of_first[i])
    for name, own in seeds.items():
        for i in range(2):
            graph.set_argument(name, _SEEDS[graph.kind(name)] + i, own[i], tf.int64)
        graph.stop_varying(name)
    for name in graph.before([cut.dataset, *cut.counting][-1]):
        graph.settle(name)
    for name in graph.before(graph.chain()[-1]):
        if graph.kind(name) in ("CacheDataset", "SnapshotDataset"):
            # Ranks cache different elements.
            file = graph.argument(name, 1).item().decode()
            if file:
                file = f"{file}-{place}-of-{size}"
                graph.set_argument(name, 1, file, tf.string)
    chain = graph.chain()
    for name in chain[chain.index(cut.dataset) + 1 :]:
        if graph.kind(name) == "AssertCardinalityDataset":
            # It has the number of elements of all ranks.
            graph.remove(name)


def _require_alike(plans: list[dict[str, Any]], process_set: ProcessSet) -> None:
    """Raises, on every rank, if one rank failed or the ranks differ."""
    ranks = process_set.ranks
    for rank, plan in zip(ranks, plans):
        if plan["error"]:
            raise ValueError(
                f"shard: the dataset of rank {rank} cannot be divided with policy="
                f"{plan['policy']!r}: {plan['error']}"
            )
    first = plans[0]
    for rank, plan in zip(ranks, plans):
        for what in ("policy", "cut", "files", "kinds", "inner", "counts"):
            if plan[what] != first[what]:
                raise ValueError(
                    f"shard: {what} is {_shown(first[what])} on rank {ranks[0]}, and "
                    f"{_shown(plan[what])} on rank {rank}: give all ranks the same "
                    "dataset and policy"
                )
        if plan["digest"] != first["digest"]:
            raise ValueError(
                f"shard: the dataset of rank {rank} begins with other data, or files "
                f"of other names, or in another order, than that of rank {ranks[0]}. "
                "Give all ranks the same dataset, from sorted names and arrays in the "
                "same order; where each rank has its own part, pass policy='off'"
            )


def _shown(value: Any) -> str:
    return f"by {value.policy}" if isinstance(value, _Cut) else str(value)


def _is_sharded_by_user(plans: list[dict[str, Any]], place: int, size: int) -> bool:
    """Whether the ranks already have different shards; warns on the first rank."""
    of_ranks = zip(*(plan["shards"] for plan in plans))
    different = next((each for each in of_ranks if len({*each}) > 1), None)
    if different is None:
        return False
    if place == 0:
        count, index = different[0]
        log.warn(
            f"shard: the dataset was sharded before, by .shard({count}, {index}) on "
            "this rank and with another index on others. It is left unchanged, because "
            f"each rank would get a part of its part, 1 of {size * size}. Remove that "
            ".shard, or pass policy='off'",
            stacklevel=3,
            from_any_rank=True,
        )
    return True


def _say(graph: DatasetGraph, mine: dict[str, Any], size: int) -> None:
    """Logs the choice, and warns of its costs."""
    if mine["cut"].policy == "file":
        text = f"by files, {mine['files']} for {size} ranks"
    else:
        text = "by elements, each rank every " + {2: "2nd", 3: "3rd"}.get(
            size, f"{size}th"
        )
        if mine["why"]:
            text += f"; not by files, as {mine['why']}"
    log.write("info", f"keras_hvd.data.shard: {text}")
    of_shuffles = [s for n, s in mine["seeds"].items() if graph.kind(n) in _SHUFFLES]
    if not all(settled for *_, settled in (*of_shuffles, *mine["inner seeds"])):
        log.warn(
            "shard: a shuffle comes before the place where the ranks' parts are taken, "
            "because elements are counted or read from files after it. It now has the "
            "same order on all ranks and in each epoch. To get a new order in each "
            "epoch, shuffle behind that place too",
            stacklevel=3,
        )
    copied = graph.copies()
    if copied:
        log.warn(
            f"shard: a function of the dataset uses {copied}. The part has a copy of "
            "its present value: if it will change, call shard() before map() of that "
            "function",
            stacklevel=3,
        )
