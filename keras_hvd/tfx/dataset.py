"""The data of a TFX component, divided between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tfx.components.trainer.fn_args_utils import DataAccessor
from tfx_bsl.tfxio import dataset_options

from keras_hvd.data.even import even
from keras_hvd.data.place import place_in
from keras_hvd.data.shard import shard
from keras_hvd.job.process_sets import global_process_set


def tf_dataset(
    data_accessor: DataAccessor,
    file_pattern: Sequence[str],
    options: dataset_options.TensorFlowDatasetOptions,
    schema: Any = None,
    policy: str = "data",
) -> tf.data.Dataset:
    """Each rank's part of the dataset from `data_accessor.tf_dataset_factory`.

    `options.batch_size` counts all ranks together. Each rank gets its part of the
    samples in batches of its share, and as many batches as the others. Together they
    get each sample once per epoch, except for a last batch that not all ranks have:
    with "data" that is less than one sample per rank. Files are read in the same order
    in all epochs; samples are shuffled behind that.

    Args:
        data_accessor: `fn_args.data_accessor`.
        file_pattern: `fn_args.train_files` or `fn_args.eval_files`.
        options: as for one process.
        schema: of the data, as for one process.
        policy: "data": every rank reads all files and keeps every n-th sample. "file":
            ranks read different files, which pays for many files of about the same
            size.

    Returns:
        A dataset. With `options.num_epochs=None` it is infinite.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        ValueError: the batch size is not a multiple of the number of ranks; or an error
            of `keras_hvd.data.shard` and `even`.

    Example (TFX is not installed with keras_hvd: see docs/tfx.md):

    >>> dataset = tf_dataset(  # doctest: +SKIP
    ...     fn_args.data_accessor, fn_args.train_files,
    ...     tfxio.TensorFlowDatasetOptions(batch_size=64, label_key="species"), schema)
    """
    size, _ = place_in(global_process_set, "tf_dataset")
    if options.batch_size % size:
        raise ValueError(
            "tf_dataset: options.batch_size is that of all ranks together, a multiple "
            f"of their number, {size}; got {options.batch_size}"
        )
    epoch = options._replace(batch_size=options.batch_size // size, num_epochs=1)
    dataset: tf.data.Dataset = data_accessor.tf_dataset_factory(
        list(file_pattern), epoch, schema
    )
    with warnings.catch_warnings():
        # TFXIO also shuffles the files, from here on in the same order on all ranks.
        warnings.filterwarnings("ignore", "shard: a shuffle comes before")
        dataset = even(shard(dataset, policy))
    return dataset if options.num_epochs == 1 else dataset.repeat(options.num_epochs)
