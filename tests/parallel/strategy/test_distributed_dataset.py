"""Datasets of keras_hvd.Strategy: every row on one rank, in order; all end together."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd


@pytest.fixture
def strategy():
    return keras_hvd.Strategy()


@pytest.fixture
def part(rank, size):
    """This rank's rows of a batch."""
    return lambda rows: np.array_split(rows, size)[rank]


def uncounted(dataset):
    """The same elements, whose number TensorFlow does not know."""
    return dataset.filter(lambda *_: True)


COUNTS = {"known": lambda dataset: dataset, "unknown": uncounted}


@pytest.fixture(params=COUNTS)
def counted(request):
    """Makes a dataset one whose number of elements is known, or is not."""
    return COUNTS[request.param]


@pytest.fixture
def raises_everywhere():
    """Asserts that every rank got an error that says something."""

    def check(error, *parts):
        assert all(keras_hvd.allgather_object(all(p in str(error) for p in parts))), (
            str(error)
        )

    return check


def test_every_row_is_on_one_rank_in_order(strategy, counted, part):
    numbers = np.arange(1000)
    dataset = counted(tf.data.Dataset.from_tensor_slices(numbers).batch(64))
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert isinstance(distributed, tf.distribute.DistributedDataset)
    batches = [numbers[i : i + 64] for i in range(0, 1000, 64)]
    mine = list(distributed)
    for got, batch in zip(mine, batches, strict=True):
        np.testing.assert_array_equal(got, part(batch))
        np.testing.assert_array_equal(strategy.gather(got, axis=0), batch)
    assert distributed.cardinality in (16, -2)
    # Again, from the start.
    np.testing.assert_array_equal(next(iter(distributed)), part(batches[0]))


def test_fewer_rows_than_ranks(strategy, part):
    dataset = tf.data.Dataset.range(7).batch(6)
    rows = [each.numpy() for each in strategy.experimental_distribute_dataset(dataset)]
    np.testing.assert_array_equal(rows[0], part(np.arange(6)))
    np.testing.assert_array_equal(rows[1], part(np.array([6])))


def test_structures_are_kept(strategy, part, size):
    words = np.array([b"a", b"bc", b"", b"def", b"g"])
    sparse = np.diag(np.arange(5.0))[:, :4]
    ragged = tf.ragged.constant([[1], [], [2, 3], [4, 5, 6], [7]])
    elements = {
        "words": words,
        "pair": (np.arange(10).reshape(5, 2), np.arange(5.0)),
        "sparse": tf.sparse.from_dense(sparse),
        "ragged": ragged,
    }
    dataset = tf.data.Dataset.from_tensor_slices(elements).batch(5)
    distributed = strategy.experimental_distribute_dataset(dataset)
    [got] = distributed
    np.testing.assert_array_equal(got["words"], part(words))
    np.testing.assert_array_equal(got["pair"][0], part(elements["pair"][0]))
    np.testing.assert_array_equal(got["pair"][1], part(elements["pair"][1]))
    np.testing.assert_array_equal(tf.sparse.to_dense(got["sparse"]), part(sparse))
    rows = part(np.arange(5))
    assert got["ragged"].to_list() == [ragged.to_list()[row] for row in rows]
    tf.nest.assert_same_structure(distributed.element_spec, dataset.element_spec)


@pytest.mark.parametrize(
    "element", [(1,), (1, 2), ((1, 2),), ({"a": 1},), {"a": (1,)}, [1, 2]]
)
def test_small_structures_are_kept(strategy, element):
    element = tf.nest.map_structure(lambda _: [1, 2, 3, 4], element)
    dataset = tf.data.Dataset.from_tensor_slices(element).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    tf.nest.assert_same_structure(distributed.element_spec, dataset.element_spec)
    [got], [whole] = distributed, dataset
    tf.nest.assert_same_structure(got, whole)


def test_nothing_stays_nothing(strategy):
    dataset = tf.data.Dataset.range(4).batch(4).map(lambda x: (x, None))
    [(rows, nothing)] = strategy.experimental_distribute_dataset(dataset)
    assert nothing is None
    assert strategy.reduce("SUM", rows, axis=0).numpy() == 6


def test_element_spec(strategy, size):
    numbers = tf.data.Dataset.range(96).batch(24)
    spec = strategy.experimental_distribute_dataset(numbers).element_spec
    assert spec == tf.TensorSpec([None], tf.int64)
    # 24 rows divide by 1, 2, 3 and 4.
    numbers = tf.data.Dataset.range(96).batch(24, drop_remainder=True)
    spec = strategy.experimental_distribute_dataset(numbers).element_spec
    assert spec == tf.TensorSpec([24 // size], tf.int64)


def test_iteration_in_functions(strategy, counted, size):
    dataset = counted(tf.data.Dataset.range(11).batch(4))
    distributed = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def of_loop():
        total = tf.constant(0, tf.int64)
        for rows in distributed:
            total += strategy.reduce("SUM", rows, axis=0)
        return total

    @tf.function
    def of_iterator_loop(iterator):
        total = tf.constant(0, tf.int64)
        for rows in iterator:
            total += strategy.reduce("SUM", rows, axis=0)
        return total

    @tf.function
    def next_sum(iterator):
        return strategy.reduce("SUM", next(iterator), axis=0)

    @tf.function
    def next_if_any(iterator):
        optional = iterator.get_next_as_optional()
        if optional.has_value():
            return strategy.reduce("SUM", optional.get_value(), axis=0)
        return tf.constant(-1, tf.int64)

    for _ in range(2):
        assert of_loop() == 55
        assert of_iterator_loop(iter(distributed)) == 55
        iterator = iter(distributed)
        assert [int(next_sum(iterator)) for _ in range(3)] == [6, 22, 27]
        with pytest.raises(tf.errors.OutOfRangeError):
            next_sum(iterator)
        iterator = iter(distributed)
        sums = [int(next_if_any(iterator)) for _ in range(4)]
        assert sums == [6, 22, 27, -1]
    for function in of_iterator_loop, next_sum, next_if_any:
        assert function.experimental_get_tracing_count() == 1


def test_optionals_eagerly(strategy, counted):
    dataset = counted(tf.data.Dataset.range(4).batch(4))
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    assert isinstance(iterator, tf.distribute.DistributedIterator)
    rows = iterator.get_next_as_optional().get_value()
    assert strategy.reduce("SUM", rows, axis=0) == 6
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_function_that_distributes(strategy):
    @tf.function
    def total():
        result = tf.constant(0, tf.int64)
        dataset = tf.data.Dataset.range(11).batch(4)
        for rows in strategy.experimental_distribute_dataset(dataset):
            result += strategy.reduce("SUM", rows, axis=0)
        return result

    assert total() == 55


def test_input_context(strategy, rank, size):
    contexts = []

    def make(context):
        contexts.append(context)
        return tf.data.Dataset.range(96).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )

    dataset = strategy.distribute_datasets_from_function(make)
    [context] = contexts
    assert context.num_replicas_in_sync == context.num_input_pipelines == size
    assert context.input_pipeline_id == rank
    assert context.get_per_replica_batch_size(12 * size) == 12
    mine = [int(each) for each in dataset]
    assert mine == list(range(rank, 96, size))


def steps(dataset):
    return sum(1 for _ in dataset)


@pytest.mark.usefixtures("several_ranks")
def test_the_first_rank_at_its_end_ends_all(strategy, counted, rank, size):
    # Rank 0 has the most.
    def make(context):
        return counted(tf.data.Dataset.range(3 + size - rank))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = strategy.distribute_datasets_from_function(make)
        assert steps(dataset) == 4
    said = [str(each.message) for each in caught]
    if counted is uncounted:
        expected = [] if rank == size - 1 else [f"because rank {size - 1} has no more"]
    else:
        expected = [f"rank 0 {3 + size}, "] if rank == 0 else []
    assert len(said) == len(expected)
    assert all(part in text for part, text in zip(expected, said, strict=True))

    @tf.function
    def next_of(iterator):
        return next(iterator)

    iterator = iter(dataset)
    assert [int(next_of(iterator)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(tf.errors.OutOfRangeError):
        next_of(iterator)


@pytest.mark.usefixtures("several_ranks")
def test_endless_on_some_ranks(strategy, rank):
    def make(context):
        dataset = tf.data.Dataset.range(3)
        return dataset.repeat() if rank == 0 else dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = strategy.distribute_datasets_from_function(make)
    assert steps(dataset) == 3


def test_endless_on_all_ranks(strategy):
    endless = tf.data.Dataset.range(4).batch(4).repeat()
    distributed = strategy.experimental_distribute_dataset(endless)
    assert distributed.cardinality == -1
    for _, rows in zip(range(5), distributed, strict=False):
        assert strategy.reduce("SUM", rows, axis=0) == 6


@pytest.mark.usefixtures("several_ranks")
def test_different_elements_are_an_error(strategy, rank, raises_everywhere):
    dtype = tf.float32 if rank == 0 else tf.int64
    with pytest.raises(keras_hvd.MismatchError) as error:
        strategy.distribute_datasets_from_function(
            lambda _: tf.data.Dataset.range(3, output_type=dtype)
        )
    raises_everywhere(error.value, "rank 0 TensorSpec of float32", "int64")


def test_what_cannot_be_sliced_is_refused(strategy):
    distribute = strategy.experimental_distribute_dataset
    with pytest.raises(ValueError, match="batch the dataset first"):
        distribute(tf.data.Dataset.range(3))
    with pytest.raises(TypeError, match=r"takes a tf\.data\.Dataset"):
        distribute([1, 2])
    with pytest.raises(TypeError, match="cannot slice DatasetSpec"):
        distribute(tf.data.Dataset.range(3).window(2))
    with pytest.raises(TypeError, match=r"takes a tf\.data\.Dataset"):
        strategy.distribute_datasets_from_function(lambda _: 1)
    with pytest.raises(ValueError, match="different numbers of rows"):
        distribute(tf.data.Dataset.from_tensors((tf.ones([4]), tf.ones([3]))))


def test_parts_of_a_batch_have_as_many_rows(strategy):
    def batches():
        yield np.zeros(4), np.zeros(3)

    spec = tf.TensorSpec([None])
    dataset = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers"):
        next(iter(strategy.experimental_distribute_dataset(dataset)))


def test_options(strategy):
    several = tf.distribute.InputReplicationMode.PER_REPLICA
    dataset = tf.data.Dataset.range(4).batch(4)
    for refused in (
        tf.distribute.InputOptions(experimental_replication_mode=several),
        tf.distribute.InputOptions(
            experimental_fetch_to_device=False,
            experimental_place_dataset_on_device=True,
        ),
    ):
        with pytest.raises(NotImplementedError, match="experimental_distribute_data"):
            strategy.experimental_distribute_dataset(dataset, refused)
        with pytest.raises(NotImplementedError, match="distribute_datasets_from"):
            strategy.distribute_datasets_from_function(lambda _: dataset, refused)
    taken = tf.distribute.InputOptions(
        experimental_fetch_to_device=False, experimental_per_replica_buffer_size=3
    )
    [rows] = strategy.experimental_distribute_dataset(dataset, taken)
    assert strategy.reduce("SUM", rows, axis=0) == 6


def test_an_iterator_is_saved_and_restored(strategy, part, tmp_path):
    dataset = tf.data.Dataset.range(12).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(distributed)
    next(iterator)
    path = tf.train.Checkpoint(data=iterator).save(str(tmp_path / "saved"))
    next(iterator)
    another = iter(distributed)
    tf.train.Checkpoint(data=another).restore(path).assert_consumed()
    np.testing.assert_array_equal(next(another), part(np.arange(4, 8)))


def test_datasets_of_a_process_set(rank, size):
    if size < 3:
        pytest.skip("needs at least 3 ranks")
    some = keras_hvd.add_process_set(range(1, size))
    if rank > 0:
        strategy = keras_hvd.Strategy(process_set=some)
        for dataset in (
            tf.data.Dataset.range(5).batch(5),
            uncounted(tf.data.Dataset.range(5).batch(5)),
        ):
            [rows] = strategy.experimental_distribute_dataset(dataset)
            mine = np.array_split(np.arange(5), size - 1)[rank - 1]
            np.testing.assert_array_equal(rows, mine)
            np.testing.assert_array_equal(strategy.gather(rows, 0), np.arange(5))
    keras_hvd.remove_process_set(some)


def test_a_dataset_of_a_removed_process_set_says_so(rank, size):
    if size < 2:
        pytest.skip("needs at least 2 ranks")
    some = keras_hvd.add_process_set([0])
    if rank == 0:
        strategy = keras_hvd.Strategy(process_set=some)
        dataset = uncounted(tf.data.Dataset.range(5).batch(5))
        distributed = strategy.experimental_distribute_dataset(dataset)
    keras_hvd.remove_process_set(some)
    if rank == 0:
        # With all ranks asked, it would wait for those that have no such dataset.
        with pytest.raises(ValueError, match="is not part of the job"):
            iter(distributed)
