"""A run_fn that notes the FnArgs of a rank, and its samples."""

import json
import pathlib

import attrs
import tensorflow as tf
import wine_network
from tfx_bsl.public import tfxio

import keras_hvd


def run_fn(fn_args):
    keras_hvd.init()
    notes = pathlib.Path(fn_args.custom_config["notes"])
    noted = attrs.asdict(fn_args, filter=lambda field, _: field.name != "data_accessor")
    noted["samples"] = {name: read(fn_args) for name, read in READERS.items()}
    batches = fn_args.data_accessor.record_batch_factory(
        fn_args.train_files,
        tfxio.RecordBatchesOptions(batch_size=7, num_epochs=1),
        wine_network.schema(),
    )
    noted["record batch rows"] = sum(batch.num_rows for batch in batches)
    (notes / f"rank-{keras_hvd.rank()}.json").write_text(json.dumps(noted))
    pathlib.Path(fn_args.serving_model_dir).mkdir(parents=True)


def through_tfxio(policy, shuffle, epochs):
    def read(fn_args):
        dataset = keras_hvd.tfx.tf_dataset(
            fn_args.data_accessor,
            fn_args.train_files,
            tfxio.TensorFlowDatasetOptions(
                batch_size=6, num_epochs=epochs, shuffle=shuffle, label_key="y"
            ),
            wine_network.schema(),
            policy=policy,
        )
        if epochs is None:
            dataset = dataset.take(40)
        return [y.numpy().ravel().tolist() for _, y in dataset]

    return read


def plain(fn_args):
    files = tf.io.gfile.glob(fn_args.train_files)
    records = tf.data.TFRecordDataset(files, "GZIP")
    parsed = records.map(
        lambda record: tf.io.parse_single_example(record, wine_network.features())["y"]
    )
    dataset = keras_hvd.data.distribute(parsed, batch_size=6, policy="data")
    return [y.numpy().ravel().tolist() for y in dataset]


def by_files(fn_args):
    dataset = keras_hvd.data.from_files(
        fn_args.train_files, "tfrecord", compression="GZIP"
    ).map(
        lambda record: tf.io.parse_single_example(record, wine_network.features())["y"]
    )
    return [y.numpy().ravel().tolist() for y in dataset.batch(3)]


READERS = {
    "in order": through_tfxio("data", False, 1),
    "shuffled": through_tfxio("data", True, 2),
    "without end": through_tfxio("data", True, None),
    "by file": through_tfxio("file", False, 1),
    "plain parsing": plain,
    "from_files": by_files,
}
