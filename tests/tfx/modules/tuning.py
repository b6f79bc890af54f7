"""A tuner_fn, on ranks or not, and a run_fn that notes its results."""

import json
import os
import pathlib
import signal

import keras
import keras_tuner
import tensorflow as tf
import wine_network
from tfx import v1 as tfx
from tfx_bsl.public import tfxio

import keras_hvd

BATCH_SIZE = 12


class Fault(keras.callbacks.Callback):
    """Notes the trials that a rank trains, and kills its last rank in the second."""

    def __init__(self, notes: str):
        super().__init__()
        self._notes = pathlib.Path(notes)

    def on_train_begin(self, logs=None):
        path = self._notes / f"trained-{keras_hvd.rank()}"
        with path.open("a") as file:
            file.write("a trial\n")
        fault = self._notes / "fault"
        is_second = len(path.read_text().splitlines()) == 2
        if is_second and keras_hvd.rank() == 1 and fault.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def build(hp: keras_tuner.HyperParameters) -> keras.Model:
    model = wine_network.make()
    rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
    optimizer = keras.optimizers.SGD(rate, hp.Choice("momentum", [0.0, 0.9]))
    if keras_hvd.is_initialized():
        optimizer = keras_hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse")
    return model


def tuner_fn(fn_args) -> tfx.components.TunerFnResult:
    config = fn_args.custom_config
    kind = keras_tuner.RandomSearch
    if config.get("notes"):
        keras_hvd.init()
        kind = keras_hvd.keras_tuner.distribute(kind)
    tuner = kind(
        build,
        "val_loss",
        max_trials=3,
        seed=5,
        directory=fn_args.working_dir,
        project_name="search",
    )
    data = {
        "x": dataset(fn_args, fn_args.train_files),
        "validation_data": dataset(fn_args, fn_args.eval_files),
    }
    callbacks = [Fault(config["notes"])] if config.get("notes") else []
    return tfx.components.TunerFnResult(
        tuner, {**data, "epochs": 2, "verbose": 0, "callbacks": callbacks}
    )


def dataset(fn_args, files):
    options = tfxio.TensorFlowDatasetOptions(
        batch_size=BATCH_SIZE,
        num_epochs=1,
        shuffle=False,
        drop_final_batch=True,
        label_key=wine_network.LABEL,
    )
    of_tfx = fn_args.data_accessor.tf_dataset_factory
    if not keras_hvd.is_initialized():
        # In its means Keras counts one batch too many if it does not know their number.
        data = of_tfx(files, options, wine_network.schema())
        return data.apply(tf.data.experimental.assert_cardinality(len(list(data))))
    return keras_hvd.tfx.tf_dataset(
        fn_args.data_accessor, files, options, wine_network.schema()
    )


def run_fn(fn_args):
    keras_hvd.init()
    hp = keras_tuner.HyperParameters.from_config(fn_args.hyperparameters)
    model = build(hp)
    train = dataset(fn_args, fn_args.train_files)
    model.fit(train, verbose=0)
    model.export(fn_args.serving_model_dir, verbose=False)
    notes = pathlib.Path(fn_args.custom_config["notes"])
    (notes / f"rank-{keras_hvd.rank()}.json").write_text(json.dumps(hp.values))
