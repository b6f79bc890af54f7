"""The module of the Trainer: any script's lines for keras_hvd, in a `run_fn`."""

import os

import keras
import tensorflow as tf
from tensorflow_metadata.proto.v0 import schema_pb2
from tensorflow_transform.tf_metadata import schema_utils
from tfx_bsl.public import tfxio
from wine_features import FEATURES, LABEL

import keras_hvd

BATCH_SIZE = 24  # of all ranks together: a multiple of 1, 2, 3, 4, 6, 8, ... ranks


def schema() -> schema_pb2.Schema:
    number = tf.io.FixedLenFeature([1], tf.float32)
    label = tf.io.FixedLenFeature([1], tf.int64)
    return schema_utils.schema_from_feature_spec(
        {**{name: number for name in FEATURES}, LABEL: label}
    )


def options(batch_size: int) -> tfxio.TensorFlowDatasetOptions:
    return tfxio.TensorFlowDatasetOptions(
        batch_size=batch_size, num_epochs=1, label_key=LABEL
    )


def samples(fn_args, files) -> tf.data.Dataset:
    # The line that differs from fn_args.data_accessor.tf_dataset_factory(...).
    return keras_hvd.tfx.tf_dataset(
        fn_args.data_accessor, files, options(BATCH_SIZE), schema()
    )


def adapted_scale(fn_args) -> keras.layers.Normalization:
    """A layer adapted to all samples, on every rank: `adapt` reduces nothing."""
    everything = fn_args.data_accessor.tf_dataset_factory(
        fn_args.train_files, options(1000), schema()
    )
    scale = keras.layers.Normalization()
    scale.adapt(
        everything.map(lambda x, _: tf.concat([x[name] for name in FEATURES], axis=1))
    )
    return scale


def make_model(scale: keras.layers.Normalization) -> keras.Model:
    inputs = {name: keras.Input([1], name=name) for name in FEATURES}
    x = keras.layers.Concatenate()([inputs[name] for name in FEATURES])
    x = keras.layers.Dense(16, "relu")(scale(x))
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(x))
    model.compile(
        keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def run_fn(fn_args) -> None:
    keras_hvd.init()
    model = make_model(adapted_scale(fn_args))
    model.fit(
        samples(fn_args, fn_args.train_files),
        epochs=20,
        validation_data=samples(fn_args, fn_args.eval_files),
        callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
            keras_hvd.callbacks.BackupAndRestore(
                os.path.join(fn_args.working_dir, "backup")
            ),
            keras.callbacks.TensorBoard(fn_args.model_run_dir),
        ],
    )
    # On all ranks: the files of ranks other than 0 are thrown away.
    model.export(fn_args.serving_model_dir, verbose=False)
