"""The callbacks, evaluate and load_model on torch."""

import os
import shutil
import tempfile

import keras
import numpy as np
import pytest
import torch

import keras_hvd
from keras_hvd.exceptions import MismatchError


@pytest.fixture
def folder(rank):
    """A folder that all ranks share."""
    path = keras_hvd.broadcast_object(tempfile.mkdtemp() if rank == 0 else None)
    yield path
    keras_hvd.allgather_object(None)
    if rank == 0:
        shutil.rmtree(path)


def made(*layers, optimizer=None):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    optimizer = keras_hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def rows(number, seed):
    random = np.random.default_rng(seed)
    return random.standard_normal((number, 4)), random.standard_normal((number, 1))


def are_equal(values) -> bool:
    first, *others = keras_hvd.allgather_object([np.asarray(v) for v in values])
    return all(
        np.array_equal(one, two) for each in others for one, two in zip(first, each)
    )


def fit(model, rank, *callbacks, **arguments):
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    arguments = {"batch_size": 4, "verbose": 0, **arguments}
    return model.fit(*rows(16, rank), callbacks=[broadcast, *callbacks], **arguments)


def test_all_ranks_start_from_one(rank, size):
    keras.utils.set_random_seed(rank)
    model = made(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    assert not are_equal(model.get_weights())
    fit(model, rank)
    assert are_equal(model.get_weights())
    assert are_equal([each.numpy() for each in model.optimizer.variables])


def test_modules_of_torch_too(rank, size):
    keras.utils.set_random_seed(rank)
    norm = torch.nn.BatchNorm1d(4)
    norm.running_mean += rank
    model = made(
        keras.layers.TorchModuleWrapper(norm),
        keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 4)),
    )
    fit(model, rank)
    assert are_equal(each.detach().numpy() for each in norm.buffers())
    assert are_equal(each.detach().numpy() for each in model.parameters())


def test_logs_are_those_of_all_data(rank, size):
    model = made()
    # Parts of different sizes, whose metrics are no mean of means.
    inputs, targets = rows(4 + 8 * rank, rank)
    average = keras_hvd.callbacks.MetricAverage()
    history = fit(model, rank, average, validation_data=(inputs, targets)).history
    every = [np.concatenate(each) for each in zip(*map(part, range(size)))]
    loss, mae = model.evaluate(*every, verbose=0)
    assert history["val_loss"][0] == pytest.approx(loss, rel=1e-5)
    assert history["val_mae"][0] == pytest.approx(mae, rel=1e-5)
    evaluated = keras_hvd.evaluate(model, inputs, targets, verbose=0)
    assert evaluated == pytest.approx([loss, mae], rel=1e-5)


def part(rank):
    return rows(4 + 8 * rank, rank)


def test_a_partial_last_batch_on_one_rank(rank, size):
    model = made()
    # Four steps on both.
    inputs, targets = rows(16 - rank, rank)
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    model.fit(inputs, targets, batch_size=4, verbose=0, callbacks=[broadcast])
    assert are_equal(model.get_weights())


def test_more_steps_on_one_rank_are_an_error_on_all(rank, size):
    def batches():
        for _ in range(3 + rank):
            yield rows(4, rank)

    model = made()
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    with pytest.raises(RuntimeError, match="different numbers of steps made"):
        model.fit(batches(), verbose=0, callbacks=[broadcast])


def test_loaders_with_workers(rank, size):
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, rows(16, rank)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    model = made()
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    model.fit(loader, epochs=2, verbose=0, callbacks=[broadcast])
    assert are_equal(model.get_weights())


def test_each_rank_gets_its_part(rank, size):
    inputs, targets = keras_hvd.data.part(*rows(9, 0))
    assert len(inputs) == 9 // size

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return rows(4, index)

    model = made()
    dataset = keras_hvd.data.ShardedPyDataset(Batches())
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    model.fit(dataset, epochs=2, verbose=0, callbacks=[broadcast])
    assert are_equal(model.get_weights())


def test_warms_up(rank, size):
    model = made(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(model.optimizer.learning_rate))

    warmup = keras_hvd.callbacks.LearningRateWarmup(0.1, warmup_epochs=1)
    fit(model, rank, warmup, Rates())
    assert rates == sorted(rates) and rates[-1] == pytest.approx(0.1)
    assert rates[0] < 0.1
    schedule = keras_hvd.warmup_schedule(0.1, warmup_steps=4)
    assert float(schedule(0)) == pytest.approx(rates[0])


def test_the_best_model_is_saved_and_loaded(rank, size, folder):
    path = os.path.join(folder, "best.keras")
    best = keras_hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
    model = made(optimizer=keras.optimizers.Adam(0.01))
    fit(model, rank, keras_hvd.callbacks.MetricAverage(), best, epochs=2)
    keras_hvd.allgather_object(None)
    loaded = keras_hvd.load_model(path)
    assert are_equal(loaded.get_weights())
    fit(loaded, rank)
    assert are_equal(loaded.get_weights())


def test_a_reloaded_optimizer_is_not_distributed(rank, size, folder):
    path = os.path.join(folder, "model.keras")
    model = made()
    fit(model, rank)
    model.save(path)
    keras_hvd.allgather_object(None)
    plain = keras.models.load_model(path)
    with pytest.raises(RuntimeError, match="is not distributed"):
        fit(plain, rank)


def test_training_goes_on_from_a_backup(rank, size, folder):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    backup = os.path.join(folder, "backup")
    model = made()
    with pytest.raises(KeyboardInterrupt):
        fit(model, rank, keras_hvd.callbacks.BackupAndRestore(backup), Stop(), epochs=3)
    keras_hvd.allgather_object(None)
    again = made()
    history = fit(again, rank, keras_hvd.callbacks.BackupAndRestore(backup), epochs=3)
    assert history.epoch == [1, 2]
    assert are_equal(again.get_weights())


def test_models_that_differ_are_an_error_on_all_ranks(rank, size):
    model = made(keras.layers.Dense(2 + rank))
    with pytest.raises(RuntimeError, match=r"(?s)\[4, 2\].*\[4, 3\]"):
        fit(model, rank)


def test_different_variables_are_not_broadcast(rank, size):
    variables = [keras.Variable(1.0) for _ in range(1 + rank)]
    with pytest.raises(MismatchError, match=f"from 1 to {size}"):
        keras_hvd.broadcast_variables(variables, 0)


def test_tensors_are_broadcast(rank, size):
    tensors = [torch.full((2, 3), float(rank)).T, torch.full((1,), rank == 1)]
    keras_hvd.broadcast_variables(tensors, root_rank=1)
    assert tensors[0].eq(1).all() and tensors[1].all()
