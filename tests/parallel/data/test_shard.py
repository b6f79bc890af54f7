"""shard: all ranks together read every sample once, with any steps after it."""

import random
import warnings
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.data import shard

COUNT = 1200
ONCE = Counter(range(COUNT))
IN_FILES = Counter(range(10_000))


def in_memory() -> tf.data.Dataset:
    return tf.data.Dataset.range(COUNT)


DATASETS = {
    "plain": lambda files, numbers: in_memory().batch(50),
    "shuffled": lambda files, numbers: in_memory().shuffle(500).batch(64).prefetch(2),
    "mapped": lambda files, numbers: (
        in_memory()
        .map(lambda x: x, num_parallel_calls=2, deterministic=False)
        .shuffle(COUNT)
        .batch(7)
    ),
    "arrays": lambda files, numbers: (
        tf.data.Dataset.from_tensor_slices(np.arange(COUNT)).shuffle(100).batch(10)
    ),
    "generator": lambda files, numbers: (
        tf.data.Dataset.from_generator(
            lambda: iter(range(COUNT)), output_signature=tf.TensorSpec([], tf.int64)
        )
        .shuffle(100)
        .batch(3)
    ),
    "zipped": lambda files, numbers: (
        tf.data.Dataset.zip((in_memory().shuffle(50), in_memory()))
        .map(lambda x, y: x)
        .batch(10)
    ),
    "filtered": lambda files, numbers: (
        in_memory().map(lambda x: x).filter(lambda x: x >= 0).shuffle(100).batch(8)
    ),
    "taken": lambda files, numbers: (
        tf.data.Dataset.range(2 * COUNT).take(COUNT).shuffle(100).batch(64)
    ),
    "files": lambda files, numbers: (
        tf.data.TFRecordDataset(files).map(numbers).shuffle(1000).batch(64)
    ),
    "files, interleaved": lambda files, numbers: (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(7)
        .interleave(tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=False)
        .map(numbers)
        .cache()
        .shuffle(1000)
        .batch(64)
    ),
    "shuffled by a function": lambda files, numbers: (
        tf.data.Dataset.range(0, COUNT, 100)
        .interleave(lambda x: tf.data.Dataset.range(x, x + 100).shuffle(50))
        .batch(10)
    ),
    "two files, shuffled": lambda files, numbers: (
        tf.data.Dataset.from_tensor_slices([[*files[:3]], [*files[3:6]]])
        .unbatch()
        .concatenate(tf.data.Dataset.from_tensors(files[6]))
        .shuffle(7)
        .flat_map(tf.data.TFRecordDataset)
        .map(numbers)
        .batch(64)
    ),
}


@pytest.mark.filterwarnings("ignore:shard. a shuffle comes before")
@pytest.mark.parametrize(
    ("kind", "policy"),
    [(kind, "data") for kind in DATASETS]
    + [(kind, "auto") for kind in DATASETS if "files" in kind],
)
def test_each_sample_once(kind, policy, files, numbers, read_by_all):
    dataset = shard(DATASETS[kind](files, numbers), policy)
    for _ in range(2):
        once = IN_FILES if "files" in kind else ONCE
        assert read_by_all(dataset) == once


def test_orders_differ_between_epochs_and_ranks_get_their_part(read, rank, size):
    dataset = shard(in_memory().shuffle(COUNT).batch(64))
    first, second = read(dataset), read(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == [*range(rank, COUNT, size)]
    assert all(len(batch) == 64 for batch in dataset.take(4))


@pytest.mark.parametrize("policy", ["auto", "file"])
def test_by_files(policy, files, numbers, read, rank, size):
    dataset = shard(tf.data.TFRecordDataset(files).map(numbers).batch(100), policy)
    whole = tf.data.TFRecordDataset(files[rank::size]).map(numbers)
    assert read(dataset) == read(whole)


def test_fewer_files_than_ranks_are_shared_by_elements(
    files, numbers, read_by_all, size
):
    some = files[: max(1, size - 1)]
    dataset = tf.data.Dataset.from_tensor_slices(some).shuffle(7)
    dataset = dataset.interleave(tf.data.TFRecordDataset).map(numbers).batch(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part = shard(dataset)
    if keras_hvd.rank() == 0 and size > 1:
        assert "same order on all ranks and" in str(caught[0].message)
    assert read_by_all(part) == Counter(range([0, 100, 100, 1300, 2000][size]))


def test_file_policy_says_why_not(files, numbers, several_ranks):
    with pytest.raises(ValueError, match="does not start from files"):
        shard(in_memory(), "file")
    with pytest.raises(ValueError, match="1 files for"):
        shard(tf.data.TFRecordDataset(files[:1]), "file")
    with pytest.raises(ValueError, match="TakeDataset counts the elements"):
        shard(tf.data.TFRecordDataset(files).take(1000), "file")


def test_what_is_counted_is_counted_before(files, numbers, read_by_all):
    dataset = tf.data.TFRecordDataset(files).map(numbers).skip(1000).take(5000)
    assert read_by_all(shard(dataset.batch(10))) == Counter(range(1000, 6000))


@pytest.mark.parametrize(
    ("skip", "take"),
    [(0, 0), (1, 700), (500, 2 * COUNT), (2 * COUNT, 5), (-1, 9), (7, -1)],
)
def test_who_counts_maps_its_part_only(skip, take, read, rank, size):
    mapped = []

    def record(number: np.ndarray) -> np.ndarray:
        mapped.append(int(number))
        return number

    dataset = (
        in_memory()
        .map(lambda x: tf.ensure_shape(tf.numpy_function(record, [x], tf.int64), []))
        .skip(skip)
        .map(lambda x: x, num_parallel_calls=2, deterministic=False)
        .take(take)
        .skip(1)
    )
    expected = [*in_memory().skip(skip).take(take).skip(1).as_numpy_iterator()]
    assert read(shard(dataset.batch(10))) == expected[rank::size]
    assert len(mapped) <= -(-COUNT // size)
    assert len({number % size for number in mapped}) <= 1


@pytest.mark.filterwarnings("ignore:shard. a shuffle comes before")
def test_seeds_of_ranks_do_not_matter(read_by_all, rank):
    tf.random.set_seed(rank)
    dataset = DATASETS["shuffled by a function"]([], None)
    assert read_by_all(shard(dataset)) == ONCE


@pytest.mark.parametrize("policy", ["auto", "data"])
def test_windows_have_neighbours(policy, read_by_all, files, numbers):
    windows = (
        tf.data.TFRecordDataset(files)
        .map(numbers)
        .window(3, shift=3, drop_remainder=True)
        .flat_map(lambda window: window.batch(3))
    )
    of_first = shard(windows.shuffle(100).batch(8), policy).map(lambda x: x[:, 0])
    assert read_by_all(of_first) == Counter(range(0, 9999, 3))
    sequences = tf.data.Dataset.range(COUNT).batch(3).shuffle(100).batch(8)
    of_first = shard(sequences, policy).map(lambda x: x[:, 0])
    assert read_by_all(of_first) == Counter(range(0, COUNT, 3))


@pytest.mark.filterwarnings("ignore:shard. a shuffle comes before")
@pytest.mark.parametrize("seed", [None, 5])
def test_a_split_of_a_shuffled_dataset(seed, read_by_all):
    dataset = in_memory().shuffle(COUNT, seed=seed, reshuffle_each_iteration=False)
    kept = shard(dataset.take(300).batch(10))
    assert len(read_by_all(kept)) == 300
    assert read_by_all(kept) == read_by_all(kept)
    if seed is not None:
        rest = shard(dataset.skip(300).batch(10))
        assert read_by_all(kept) + read_by_all(rest) == ONCE


@pytest.mark.filterwarnings("ignore:shard. a shuffle comes before")
def test_each_rank_may_read_once_more(read, read_by_all, rank):
    """A rank that reads some samples before training changes no rank's part."""
    dataset = shard(in_memory().shuffle(COUNT, seed=3).take(900).batch(9))
    for _ in range(rank):
        read(dataset.take(1))
    assert set(read_by_all(dataset).values()) == {1}


def test_random_filters_are_after_the_cut(read_by_all, rank):
    tf.random.set_seed(rank)
    dataset = in_memory().filter(lambda x: tf.random.uniform([]) < 0.5).batch(10)
    counts = read_by_all(shard(dataset))
    assert 0.4 * COUNT < len(counts) < 0.6 * COUNT
    assert set(counts.values()) == {1}


def test_random_filters_before_what_counts_are_refused(several_ranks):
    some = in_memory().filter(lambda x: tf.random.uniform([]) < 0.5)
    dropped = "different ones on each rank, "
    with pytest.raises(ValueError, match=f"{dropped}and TakeDataset counts them"):
        shard(some.take(100).batch(10))
    with pytest.raises(ValueError, match=f"{dropped}and ZipDataset puts what is left"):
        shard(tf.data.Dataset.zip((some, in_memory())).batch(10))


@pytest.mark.parametrize("initial_dist", [None, [0.1, 0.9]])
def test_resampling_is_after_the_part(initial_dist, read, rank, size, several_ranks):
    def resampled(dataset: tf.data.Dataset) -> tf.data.Dataset:
        dataset = dataset.rejection_resample(
            lambda x: tf.cast(x // 12 % 10 > 0, tf.int32), [0.5, 0.5], initial_dist
        )
        return dataset.map(lambda label, x: x)

    with pytest.raises(ValueError, match="mixes what is left .* rejection_resample"):
        shard(resampled(in_memory()).batch(10))
    part = resampled(shard(in_memory())).batch(10)
    own = {*read(part)}
    assert own and own <= {*range(rank, COUNT, size)}


def test_repeated(read_by_all, size):
    dataset = shard(in_memory().shuffle(COUNT).repeat().batch(10))
    steps = COUNT // size // 10
    for count in read_by_all(dataset.take(steps)).values():
        assert count == 1


def test_a_shard_of_the_users_is_not_sharded_again(read_by_all, rank, size):
    dataset = in_memory().shard(size, rank).batch(10)
    if rank == 0 and size > 1:
        with pytest.warns(UserWarning, match="was sharded before"):
            part = shard(dataset)
    else:
        part = shard(dataset)
    assert read_by_all(part) == ONCE


def test_the_same_shard_on_all_ranks_is_a_sample(read_by_all):
    dataset = shard(in_memory().shard(10, 3).batch(10))
    assert read_by_all(dataset) == Counter(range(3, COUNT, 10))


def test_caches_are_not_shared(tmp_path_factory, read_by_all):
    folder = keras_hvd.broadcast_object(str(tmp_path_factory.mktemp("cache")))
    whole = in_memory().cache(f"{folder}/numbers").shuffle(100).batch(10)
    dataset = shard(whole)
    for _ in range(2):
        assert read_by_all(dataset) == ONCE
    whole = in_memory().batch(10).snapshot(f"{folder}/snapshot")
    for _ in range(2):
        assert read_by_all(shard(whole)) == ONCE


def test_a_cache_filled_before_is_not_the_parts(read, read_by_all):
    whole = in_memory().cache().shuffle(COUNT).batch(10)
    assert len(read(whole)) == COUNT
    assert read_by_all(shard(whole)) == ONCE


def test_off(read, size):
    assert read(shard(in_memory(), "off")) == [*range(COUNT)]


def test_options_and_structure_are_kept():
    dataset = tf.data.Dataset.from_tensor_slices(({"a": np.zeros((8, 2))}, np.zeros(8)))
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    part = shard(dataset.batch(2).with_options(options))
    assert part.options().threading.private_threadpool_size == 3
    assert part.element_spec == dataset.batch(2).element_spec
    assert {"a"} == next(iter(part))[0].keys()


def test_different_data_is_an_error(several_ranks, rank, files):
    with pytest.raises(ValueError, match="begins with other data"):
        shard(tf.data.Dataset.from_tensor_slices(np.arange(10) + rank))
    mixed = random.Random(rank).sample(files, 7)
    with pytest.raises(ValueError, match="files of other names, or in another order"):
        shard(tf.data.TFRecordDataset(mixed))
    with pytest.raises(ValueError, match="policy is auto on rank 0, and data on rank"):
        shard(in_memory(), "data" if rank else "auto")
    mapped = in_memory().map(lambda x: x)
    with pytest.raises(ValueError, match=r"counts is \[9\] on rank 0, and \[8\] on"):
        shard(mapped.take(8 if rank else 9))
    other = in_memory().batch(3) if rank == 0 else in_memory().take(3).batch(3)
    with pytest.raises(ValueError, match="give all ranks the same dataset"):
        shard(other)


def test_a_process_set(read, rank, size):
    if size < 3:
        pytest.skip("needs at least 3 ranks")
    pair = keras_hvd.add_process_set([0, 1])
    try:
        if rank < 2:
            part = read(shard(in_memory(), process_set=pair))
            assert part == [*range(rank, COUNT, 2)]
        else:
            with pytest.raises(ValueError, match="is not in"):
                shard(in_memory(), process_set=pair)
    finally:
        keras_hvd.remove_process_set(pair)


def test_an_iterator_of_a_part_is_saved_and_restored(tmp_path):
    part = keras_hvd.data.shard(tf.data.Dataset.range(24)).batch(2)
    iterator = iter(part)
    next(iterator)
    path = tf.train.Checkpoint(data=iterator).save(str(tmp_path / "saved"))
    expected = next(iterator)
    other = iter(part)
    tf.train.Checkpoint(data=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(next(other), expected)
