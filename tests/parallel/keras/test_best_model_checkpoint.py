"""BestModelCheckpoint: rank 0 saves, by the logs over all ranks' data."""

import pathlib
import tempfile

import keras
import pytest

import keras_hvd
from keras_hvd.callbacks import BestModelCheckpoint, MetricAverage


@pytest.fixture
def path_of_rank(rank):
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder) / "best.keras"


class Worse(keras.callbacks.Callback):
    """Makes the second epoch the best."""

    def on_epoch_end(self, epoch, logs=None):
        logs["loss"] = 1.0 if epoch == 1 else 2.0 + epoch


def test_best(rank, make_linear, points, path_of_rank):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    best = BestModelCheckpoint(monitor="loss")
    best.filepath = str(path_of_rank)
    callbacks = [MetricAverage(), Worse(), best]
    model.fit(*points, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert path_of_rank.exists() == (rank == 0)
    if rank == 0:
        loaded = keras.models.load_model(path_of_rank)
        assert int(loaded.optimizer.iterations) == 6


def test_weights_alone(rank, make_linear, points, path_of_rank):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    path = path_of_rank.with_name("best.weights.h5")
    best = BestModelCheckpoint("loss", save_weights_only=True, filepath=path)
    model.fit(*points, verbose=0, callbacks=[MetricAverage(), best])
    assert path.exists() == (rank == 0)
    if rank == 0:
        other = make_linear(None)
        other.load_weights(path)
        for one, loaded in zip(model.get_weights(), other.get_weights()):
            assert (one == loaded).all()


def test_without_a_path(make_linear, points):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="set its attribute filepath before fit"):
        model.fit(*points, verbose=0, callbacks=[BestModelCheckpoint()])


def test_before_metric_average(make_linear, points, several_ranks, path_of_rank):
    model = make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    best = BestModelCheckpoint(monitor="loss", filepath=path_of_rank)
    with pytest.raises(ValueError, match="MetricAverage before BestModelCheckpoint"):
        model.fit(*points, verbose=0, callbacks=[best, MetricAverage()])
