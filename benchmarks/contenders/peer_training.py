"""One process of a peer in speed.py: trains the CNN of training.py, and its data."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np
import rank
import training


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--peer", choices=list(PEERS), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--addresses", nargs="+", required=True, help="of each rank")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="in an epoch")
    options = parser.parse_args()
    # Before the libraries count their cores.
    rank.bind(options.cores, options.rank)
    PEERS[options.peer](options)


def train_ddp(options: argparse.Namespace) -> None:
    """A loop of PyTorch's, over gloo."""
    import torch
    from torch import distributed, nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{options.addresses[0]}",
        rank=options.rank,
        world_size=options.size,
    )
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    )
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = map(torch.from_numpy, training.data(options, options.rank))
    images = images.permute(0, 3, 1, 2).contiguous()

    def epoch() -> None:
        for rows in torch.randperm(len(labels)).split(options.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()

    session = rank.Session(
        options.socket, options.rank, options.size, f"torch {torch.__version__}"
    )
    serve(
        session,
        options.steps,
        epoch,
        lambda: [each.detach().numpy() for each in model.parameters()],
    )
    distributed.destroy_process_group()


def train_jax(options: argparse.Namespace) -> None:
    """`fit` of Keras on JAX, on rows that each process brings itself."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras

    if options.size > 1:
        keras.distribution.initialize(
            ",".join(options.addresses), options.size, options.rank
        )
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(auto_shard_dataset=False)
        )
    keras.utils.set_random_seed(1)  # all processes begin with the same weights
    model = training.cnn()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    session = rank.Session(
        options.socket,
        options.rank,
        options.size,
        f"jax {jax.__version__}, Keras {keras.__version__}",
    )
    training.fit(model, session, options, options.rank)


def train_multi_worker(options: argparse.Namespace) -> None:
    """A custom loop: `fit` raises under this strategy with Keras 3."""
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": options.addresses},
            "task": {"type": "worker", "index": options.rank},
        }
    )
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = training.cnn()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(images, labels):
        def on_replica(images, labels):
            with tf.GradientTape() as tape:
                # Keras divides it by the number of replicas.
                loss = loss_of(labels, model(images, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables))

        strategy.run(on_replica, args=(images, labels))

    images, labels = training.data(options, options.rank)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(len(labels)).batch(options.batch)

    def epoch() -> None:
        for batch in dataset:
            step(*batch)

    session = rank.Session(
        options.socket,
        options.rank,
        options.size,
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
    )
    serve(session, options.steps, epoch, model.get_weights)


def serve(
    session: rank.Session,
    steps: int,
    epoch: Callable[[], None],
    weights: Callable[[], list[np.ndarray]],
) -> None:
    """Trains an epoch for each command and answers as `training.fit` does."""
    while session.command() is not None:
        begin = time.perf_counter()
        epoch()
        seconds = (time.perf_counter() - begin) / steps
        session.reply(seconds=[seconds], norm=training.norm(weights()))


PEERS = {
    "ddp": train_ddp,
    "jax": train_jax,
    "multi-worker": train_multi_worker,
}


if __name__ == "__main__":
    main()
