"""A run_fn that trains; custom_config names a folder for notes and for the fault."""

import json
import os
import pathlib
import signal

import keras
import numpy as np
import wine_network
from tfx_bsl.public import tfxio

import keras_hvd

BATCH_SIZE = 12
EPOCHS = 4


class Fault(keras.callbacks.Callback):
    """Makes a rank fail at the end of an epoch, while a file is there."""

    def __init__(self, config):
        super().__init__()
        self._file = pathlib.Path(config["notes"]) / "fault"
        self._is_mine = keras_hvd.rank() == keras_hvd.size() - 1

    def on_epoch_end(self, epoch, logs=None):
        if epoch != 2 or not self._file.exists():
            return
        fault = self._file.read_text()
        if fault == "hang":
            (self._file.parent / f"hangs-{keras_hvd.rank()}").touch()
            signal.pause()
        if self._is_mine and fault == "raise":
            raise ArithmeticError("the loss is odd")
        if self._is_mine and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def run_fn(fn_args):
    keras_hvd.init()
    config = fn_args.custom_config
    train = keras_hvd.tfx.tf_dataset(
        fn_args.data_accessor,
        fn_args.train_files,
        tfxio.TensorFlowDatasetOptions(
            batch_size=BATCH_SIZE,
            num_epochs=1,
            shuffle=False,
            drop_final_batch=True,
            label_key=wine_network.LABEL,
        ),
        wine_network.schema(),
    )
    model = wine_network.make()
    model.compile(keras_hvd.DistributedOptimizer(wine_network.optimizer()), "mse")
    history = model.fit(
        train,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.BackupAndRestore(
                os.path.join(fn_args.working_dir, "backup")
            ),
            keras.callbacks.TensorBoard(fn_args.model_run_dir),
            Fault(config),
        ],
    )
    model.export(fn_args.serving_model_dir, verbose=False)
    rank = keras_hvd.rank()
    notes = pathlib.Path(config["notes"])
    np.savez(notes / f"weights-{rank}.npz", *model.get_weights())
    noted = {
        "size": keras_hvd.size(),
        "serving_model_dir": fn_args.serving_model_dir,
        "model_run_dir": fn_args.model_run_dir,
        "epochs": history.epoch,
        "helper": wine_network.__file__,
    }
    (notes / f"rank-{rank}.json").write_text(json.dumps(noted))
