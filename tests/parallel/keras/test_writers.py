"""Subclasses of Keras' callbacks that write: all ranks run them, and rank 0 writes."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.callbacks import remote_monitor

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage

pytestmark = pytest.mark.usefixtures("several_ranks")

callbacks = keras.callbacks


@pytest.fixture
def model(make_linear):
    return make_linear(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))


@pytest.fixture
def posts(monkeypatch) -> list[Any]:
    """The posts of `RemoteMonitor` on this rank."""
    sent: list[Any] = []

    class Requests:
        class exceptions:
            RequestException = OSError

        @staticmethod
        def post(*args, **kwargs):
            sent.append(args)

    monkeypatch.setattr(remote_monitor, "requests", Requests)
    return sent


def fit(model, rank, *others, epochs=2):
    x = np.random.default_rng(rank).standard_normal((6, 5))
    return model.fit(
        x[:, :3],
        x[:, 3:],
        batch_size=3,
        epochs=epochs,
        verbose=0,
        callbacks=[BroadcastGlobalVariables(0), MetricAverage(), *others],
    ).history


def with_a_collective(kind: type, *args, **kwargs):
    """An object of a subclass that adds the sum of ranks to the logs."""

    class Sums(kind):
        def on_epoch_end(self, epoch, logs=None):
            total = keras_hvd.allreduce(keras_hvd.rank() + 1.0, op=keras_hvd.Sum)
            logs["total"] = float(total)
            super().on_epoch_end(epoch, logs)

    return Sums(*args, **kwargs)


@pytest.mark.parametrize(
    "kind",
    ["BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard"],
)
def test_subclasses_run_on_all_ranks(kind, model, rank, size, tmp_path):
    if kind == "TensorBoard":
        pytest.importorskip("tensorboard")
    path = tmp_path / {"ModelCheckpoint": "m.keras"}.get(kind, "written")
    options = {"delete_checkpoint": False} if kind == "BackupAndRestore" else {}
    callback = with_a_collective(getattr(callbacks, kind), str(path), **options)
    history = fit(model, rank, callback)
    assert history["total"] == [size * (size + 1) / 2] * 2
    assert path.exists() == (rank == 0)
    if kind == "CSVLogger" and rank == 0:
        header, *rows = path.read_text().splitlines()
        assert header == "epoch,loss,total,val_loss,val_total"
        assert len(rows) == 2


def test_subclass_that_sends(model, rank, size, posts):
    history = fit(model, rank, with_a_collective(callbacks.RemoteMonitor))
    assert history["total"] == [size * (size + 1) / 2] * 2
    assert len(posts) == (2 if rank == 0 else 0)


def test_subclass_with_a_mixin(model, rank, tmp_path):
    class Counts:
        def on_epoch_end(self, epoch, logs=None):
            self.counted = epoch + 1
            super().on_epoch_end(epoch, logs)

    class Logger(Counts, callbacks.CSVLogger):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)
            self.csv_file.write("# mine\n")

    logger = Logger(tmp_path / "log.csv")
    fit(model, rank, logger)
    assert logger.counted == 2
    assert isinstance(logger, Logger)
    assert (tmp_path / "log.csv").exists() == (rank == 0)
    if rank == 0:
        assert (tmp_path / "log.csv").read_text().startswith("# mine\n")


def test_summaries_of_a_subclass(model, rank, tmp_path):
    """It takes part with Keras' settings, and its own summaries are rank 0's."""
    pytest.importorskip("tensorboard")
    batches = []

    class Board(callbacks.TensorBoard):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            batches.append(self._global_train_batch)
            with self._train_writer.as_default():
                self.summary.scalar("mine", 1.0, step=epoch)
            pathlib.Path(self._train_dir).relative_to(tmp_path)

    fit(model, rank, Board(tmp_path / "board", update_freq=1, histogram_freq=1))
    assert batches == [2, 4]
    assert (tmp_path / "board").exists() == (rank == 0)


class Wrapper(callbacks.Callback):
    """Hands its calls on to another callback."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]

    def set_model(self, model):
        super().set_model(model)
        self.inner[0].set_model(model)

    def on_train_begin(self, logs=None):
        self.inner[0].on_train_begin(logs)

    def on_epoch_end(self, epoch, logs=None):
        self.inner[0].on_epoch_end(epoch, logs)


@pytest.mark.parametrize("own", [False, True], ids=["default", "every_rank"])
def test_wrapped_writer(own, model, rank, tmp_path):
    wrapper = Wrapper(callbacks.CSVLogger(tmp_path / "log.csv"))
    wrapper.every_rank = own
    fit(model, rank, wrapper)
    assert (tmp_path / "log.csv").exists() == (own or rank == 0)


def test_all_ranks_know_the_best(model, rank, tmp_path, capsys):
    """A checkpoint decides as rank 0's does, which alone says so."""
    checkpoint = callbacks.ModelCheckpoint(
        tmp_path / "model.keras", "loss", verbose=1, save_best_only=True
    )
    history = fit(model, rank, checkpoint)
    assert checkpoint.best == min(history["loss"])
    assert ("saving model" in capsys.readouterr().out) == (rank == 0)
    assert (tmp_path / "model.keras").exists() == (rank == 0)


def test_a_writer_that_rank_0_lacks(model, rank, size, tmp_path):
    """Nothing is written, and the job says so before it trains."""
    others = [] if rank == 0 else [callbacks.CSVLogger(tmp_path / "log.csv")]
    there = ", ".join(map(str, range(1, size)))
    with pytest.warns(
        UserWarning,
        match=f"the callback CSVLogger on rank {there}, but not on rank 0, which alone",
    ):
        fit(model, rank, *others)
    assert not (tmp_path / "log.csv").exists()


def test_a_writer_of_one_rank_may_be_rank_0s(model, rank, tmp_path, recwarn):
    fit(model, rank, *[callbacks.CSVLogger(tmp_path / "log.csv")][rank:])
    assert not [each for each in recwarn if "CSVLogger" in str(each.message)]
    assert (tmp_path / "log.csv").exists() == (rank == 0)
