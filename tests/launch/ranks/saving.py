"""A rank for the tests of saving: trains until another one dies in mid-epoch.

`python saving.py FOLDER WAY MOMENT`, where WAY is "optimizer" or "strategy", and MOMENT
when the others know of the death: "between" two steps, or "within" one. Rank 0 saves
after each step. Each survivor notes in FOLDER/N.json the error that ended its `fit`,
which other ways of saving were refused then, and whether any file has come or changed
since the last step that all made. Then the survivors join a job of their own, and note
which ways are refused before and after its variables have got values of the last file.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_hvd

# The step in which, or after which, rank 1 dies.
LAST = 2

FOLDER, WAY, MOMENT = Path(sys.argv[1]), *sys.argv[2:]


def files(folder: Path) -> dict[str, str]:
    """A hash of each file in a folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Dies(keras.callbacks.Callback):
    """Kills rank 1; between steps, the others know it before the next callback."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.before: dict[str, str] = {}

    def note_saved(self, batch: int, logs: dict | None = None) -> None:
        """Comes behind the saving callback: a step that all ranks made may be saved."""
        if batch < LAST:
            self.before = files(self.folder)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.before = files(self.folder)
        if MOMENT == "within" and batch == LAST and keras_hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if MOMENT == "within" or batch < LAST:
            return
        with contextlib.suppress(tf.errors.AbortedError):
            keras_hvd.barrier(name="all have made the step")
            if keras_hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            keras_hvd.barrier(name="the end of rank 1")


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    if WAY == "optimizer":
        optimizer = keras_hvd.DistributedOptimizer(optimizer)
    made.compile(optimizer, "mse")
    return made


def refused(trained: keras.Model, folder: Path) -> list[str]:
    """Names of the ways of saving that raise the right error."""
    path = str(folder / "model")
    checkpoint = tf.train.Checkpoint(model=trained)
    ways = {
        "save": lambda: trained.save(f"{path}.keras"),
        "save_h5": lambda: trained.save(f"{path}.h5"),
        "save_weights": lambda: trained.save_weights(f"{path}.weights.h5"),
        "save_model": lambda: keras.saving.save_model(trained, f"{path}.keras"),
        "export": lambda: trained.export(f"{path}.exported"),
        "write": lambda: checkpoint.write(f"{path}.written"),
        "checkpoint": lambda: checkpoint.save(f"{path}.saved"),
        "manager": lambda: tf.train.CheckpointManager(
            checkpoint, f"{path}.managed", max_to_keep=1
        ).save(),
    }
    found = []
    for name, save in ways.items():
        try:
            save()
        except keras_hvd.RankFailedError as error:
            if "rank 1 (pid " in str(error):
                found.append(name)
    return found


def next_job() -> None:
    """Makes the survivors join a job without rank 1."""
    rank, size = int(os.environ["KERAS_HVD_RANK"]), int(os.environ["KERAS_HVD_SIZE"])
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[f"KERAS_HVD_{name}"] = str(rank - (rank > 1))
    for name in ("SIZE", "LOCAL_SIZE"):
        os.environ[f"KERAS_HVD_{name}"] = str(size - 1)
    os.environ["KERAS_HVD_JOB"] += "-next"
    keras_hvd.init()


def state(trained: keras.Model) -> list[keras.Variable]:
    return [*trained.weights, *trained.optimizer.variables]


def note_next_job(note: dict, trained: keras.Model, folder: Path) -> None:
    """Notes the ways of saving that the next job refuses, and when it allows them."""
    rank = keras_hvd.rank()
    note["refused in the next job"] = refused(trained, folder)
    # Assigns its weights, as a half applied step does.
    zeros = [tf.zeros_like(each) for each in trained.trainable_variables]
    try:
        trained.optimizer.apply(zeros, trained.trainable_variables)
    except RuntimeError as error:
        # A strategy is one job's.
        if WAY == "optimizer" or "in another job" not in str(error):
            raise
    note["refused after another step"] = refused(trained, folder)
    new = model()
    new.optimizer.build(new.trainable_variables)
    note["refused of a new model"] = refused(new, folder)
    keras_hvd.broadcast_variables(state(new if rank else trained), root_rank=0)
    note["refused of what was sent"] = refused(new if rank else trained, folder)
    if rank == 0:
        trained.load_weights(folder / "model.keras")
    keras_hvd.broadcast_variables(state(trained), root_rank=0)
    note["refused of what was loaded"] = refused(trained, folder)
    if rank:
        note["still refused"] = refused(new, folder)
        keras_hvd.allow_saving()
        note["refused when allowed"] = refused(new, folder)


def main() -> None:
    keras_hvd.init()
    if WAY == "optimizer":
        trained = model()
    else:
        with keras_hvd.Strategy().scope():
            trained = model()
    x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
    rank = keras_hvd.rank()
    folder = FOLDER / f"rank{rank}"
    folder.mkdir()
    dies = Dies(folder)
    callbacks = [
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        dies,
        keras.callbacks.ModelCheckpoint(folder / "model.keras", save_freq=1),
        keras.callbacks.LambdaCallback(on_train_batch_end=dies.note_saved),
    ]
    try:
        trained.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        note = {"fit": "ended"}
    except Exception as error:
        note = {"fit": type(error).__name__, "text": str(error)}
    note["saved"] = len(dies.before)
    note["refused"] = refused(trained, folder)
    keras_hvd.shutdown()
    note["refused after shutdown"] = refused(trained, folder)
    note["changed"] = files(folder) != dies.before
    next_job()
    note_next_job(note, trained, folder)
    (FOLDER / f"{rank}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main()
