"""ShardedPyDataset: the ranks together get each batch once, and equally many each."""

import random
from collections import Counter

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.data import ShardedPyDataset


class Numbers(keras.utils.PyDataset):
    """Batches of 8 of the numbers below `count`."""

    def __init__(self, count: int, **arguments):
        super().__init__(**arguments)
        self.order = np.arange(count)

    def __len__(self):
        return -(-len(self.order) // 8)

    def __getitem__(self, index):
        rows = self.order[8 * index : 8 * index + 8, np.newaxis].astype("float32")
        return rows, np.zeros_like(rows)


class Shuffled(Numbers):
    def on_epoch_end(self):
        np.random.shuffle(self.order)


def numbers_in(batches) -> list[int]:
    return [int(number) for x, _ in batches for number in x[:, 0]]


def of_all(numbers: list[int]) -> Counter:
    return Counter(n for each in keras_hvd.allgather_object(numbers) for n in each)


def steps_of_all(dataset) -> set[int]:
    return set(keras_hvd.allgather_object(len([*dataset])))


@pytest.mark.parametrize("count", [1000, 1001, 1015, 8 * 12])
@pytest.mark.parametrize("kind", [Numbers, Shuffled])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_once(shuffle, kind, count, rank, size):
    keras.utils.set_random_seed(rank)
    dataset = ShardedPyDataset(kind(count), shuffle, seed=5)
    seen = []
    for _ in range(3):
        dataset.on_epoch_begin()
        batches = [dataset[index] for index in range(dataset.num_batches)]
        dataset.on_epoch_end()
        seen.append(numbers_in(batches))
        assert of_all(seen[-1]) == Counter(range(count))
        assert len(set(keras_hvd.allgather_object(len(batches)))) == 1
        assert all(len(x) > 0 for x, _ in batches)
    assert (seen[0] != seen[1]) == (shuffle or kind is Shuffled)


def test_drop_and_repeat(size):
    inner = Numbers(8 * (3 * size + 1))
    for mode, steps in [("drop", 3 + (size == 1)), ("repeat", 4)]:
        dataset = ShardedPyDataset(inner, mode=mode)
        assert len([*dataset]) == dataset.num_batches == steps
        counts = of_all(numbers_in(dataset))
        assert sum(counts.values()) == 8 * size * steps
        assert max(counts.values()) == (2 if mode == "repeat" and size > 1 else 1)


@pytest.fixture
def fit():
    """Trains on a dataset, with all ranks, and returns this rank's samples."""
    keras.utils.clear_session()
    seen = []

    class Watched(keras.Sequential):
        def train_step(self, data):
            seen.extend(data[0].numpy()[:, 0].astype(int).tolist())
            return super().train_step(data)

    class Stop(keras.callbacks.Callback):
        def __init__(self, step):
            super().__init__()
            self.step = step

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == self.step

    model = Watched([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", run_eagerly=True)

    def run(dataset, stop_after=None, **arguments):
        callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0), Stop(stop_after)]
        seen.clear()
        model.fit(dataset, verbose=0, callbacks=callbacks, **arguments)
        return [*seen]

    return run


class Draws(Numbers):
    """Notes random numbers of each epoch."""

    def on_epoch_begin(self):
        self.drawn = [*getattr(self, "drawn", ()), random.random(), np.random.random()]


def test_random_numbers_are_those_of_an_epoch(rank):
    """The same on all ranks, others in each epoch, and none of the script's own."""

    def numbers_of_the_script(epochs):
        random.seed(rank)
        np.random.seed(rank)
        for _ in range(epochs):
            dataset.on_epoch_begin()
            dataset.on_epoch_end()
        return random.random(), np.random.random()

    inner = Draws(64)
    dataset = ShardedPyDataset(inner, seed=5)
    assert numbers_of_the_script(epochs=3) == numbers_of_the_script(epochs=0)
    assert len({*inner.drawn}) == 2 * 3
    assert all(each == inner.drawn for each in keras_hvd.allgather_object(inner.drawn))


@pytest.mark.filterwarnings("ignore:ShardedPyDataset. on torch")
def test_fit_trains_on_all_of_it(fit):
    """With workers, which Keras starts before it says that the epoch begins."""
    dataset = ShardedPyDataset(Shuffled(400, workers=3), seed=7)
    assert dataset.workers == (3 if keras.backend.backend() != "torch" else 1)
    assert of_all(fit(dataset, epochs=2)) == Counter([*range(400)] * 2)


def test_a_pass_of_several_epochs_has_each_batch_once(fit):
    """With steps_per_epoch Keras goes on, in the next epoch, where the last ended."""
    batches = 24
    dataset = ShardedPyDataset(Numbers(8 * batches), seed=7)
    passes = []
    for _ in range(2):
        epochs = dataset.num_batches // 2
        passes.append(fit(dataset, epochs=epochs, steps_per_epoch=2))
        assert of_all(passes[-1]) == Counter(range(8 * batches))
    assert passes[0] != passes[1]
    fit(dataset, epochs=1, steps_per_epoch=2)
    fit(dataset, stop_after=1)
    assert of_all(fit(dataset)) == Counter(range(8 * batches))


def test_a_loop_that_knows_the_number_of_batches():
    dataset = ShardedPyDataset(Numbers(400), seed=7)
    count = dataset.num_batches
    orders = []
    for _ in range(2):
        dataset.on_epoch_begin()
        orders.append(numbers_in(dataset[index] for index in range(count)))
        dataset.on_epoch_end()
        assert of_all(orders[-1]) == Counter(range(400))
    assert orders[0] != orders[1]


@pytest.mark.usefixtures("on_tensorflow")
def test_processes_need_no_engine(size):
    inner = Numbers(200, workers=2, use_multiprocessing=True, max_queue_size=3)
    dataset = ShardedPyDataset(inner)
    assert dataset.use_multiprocessing and dataset.max_queue_size == 3
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    adapter = PyDatasetAdapter(dataset, shuffle=True)
    for _ in range(2):
        adapter.on_epoch_begin()
        assert of_all(numbers_in(adapter._get_iterator())) == Counter(range(200))
        adapter.on_epoch_end()


def test_without_an_end(rank, size):
    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index):
            return np.array([index])

    dataset = ShardedPyDataset(Endless())
    assert dataset.num_batches is None
    assert [dataset[i].item() for i in range(3)] == [rank, rank + size, rank + 2 * size]


def test_the_same_seed_is_the_same_order():
    orders = [
        numbers_in(ShardedPyDataset(Numbers(400), seed=seed)) for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_own_random_generators_are_found(several_ranks, rank):
    class Own(Numbers):
        def __init__(self, count):
            super().__init__(count)
            self.generator = np.random.default_rng(rank)

        def on_epoch_end(self):
            self.generator.shuffle(self.order)

    dataset = ShardedPyDataset(Own(800))
    with pytest.raises(ValueError, match="batch 0 of rank 1 has other rows"):
        dataset.on_epoch_end()
    shuffled = Numbers(800)
    np.random.default_rng(rank).shuffle(shuffled.order)
    with pytest.raises(ValueError, match="has other rows than that of rank 0"):
        ShardedPyDataset(shuffled)


def test_augmentation_is_no_difference(rank):
    class Augmented(Shuffled):
        generator = np.random.default_rng(rank)

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, y + self.generator.random()

    dataset = ShardedPyDataset(Augmented(100))
    dataset.on_epoch_end()
    assert of_all(numbers_in(dataset)) == Counter(range(100))


def test_errors_on_all_ranks(rank, size, several_ranks):
    with pytest.raises(ValueError, match="batches is 10 on rank 0, and 11 on rank"):
        ShardedPyDataset(Numbers(80 if rank == 0 else 88))
    with pytest.raises(ValueError, match="has 0 batches"):
        ShardedPyDataset(Numbers(0))

    class Fails(Numbers):
        def __getitem__(self, index):
            if rank == 1:
                raise OSError("no such file")
            return super().__getitem__(index)

    with pytest.raises(ValueError, match="of rank 1 raised OSError: no such file"):
        ShardedPyDataset(Fails(80))
    dataset = ShardedPyDataset(Numbers(80))
    if rank == 0:
        dataset._epoch += 1
    with pytest.raises(ValueError, match="epoch is 2 on rank 0, and 1 on rank 1"):
        dataset.on_epoch_end()


def test_arguments():
    with pytest.raises(TypeError, match="takes a keras.utils.PyDataset; got a list"):
        ShardedPyDataset([1])
    with pytest.raises(ValueError, match="mode must be one of"):
        ShardedPyDataset(Numbers(8), mode="pad")
    with pytest.raises(TypeError, match="seed must be a whole number"):
        ShardedPyDataset(Numbers(8), seed="a")
