"""One rank that times steps of Keras on torch: `khvdrun -np 2 python torch_steps.py`.

With KERAS_BACKEND=torch. Each rank has one thread and trains the CNN of scaling.py: as
a copy that exchanges nothing, by keras_hvd with gradients that leave during backward,
and with gradients that are reduced at its end, and by PyTorch's DistributedDataParallel
over gloo. All are in the same processes and take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time

import keras
import torch
import training
from torch import distributed

import keras_hvd


class AtTheEnd(keras.Sequential):
    """Makes Keras' step by itself: only then nothing leaves during backward."""

    forward_pass = None

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = (self.forward_pass or self)(x)
        self.zero_grad()
        loss = self._compute_loss(x=x, y=y, y_pred=y_pred, training=True)
        self._loss_tracker.update_state(loss, sample_weight=len(x))
        self.optimizer.scale_loss(loss).backward()
        weights = self.trainable_weights[:]
        with torch.no_grad():
            self.optimizer.apply([each.value.grad for each in weights], weights)
        return self.compute_metrics(x, y, y_pred)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    keep_memory()
    keras_hvd.init()
    models = {
        "copies": model(AtTheEnd, is_distributed=False),
        "keras_hvd": model(keras.Sequential, is_distributed=True),
        "keras_hvd, at the end of backward": model(AtTheEnd, is_distributed=True),
        "DistributedDataParallel": of_ddp(),
    }
    data = training.data(options, keras_hvd.rank())
    seconds = {name: [] for name in models}
    core_seconds = {name: [] for name in models}
    for turn in range(options.rounds + 1):
        for name, each in models.items():
            keras_hvd.allgather_object(None)
            begin, begin_of_cores = time.perf_counter(), time.process_time()
            each.fit(*data, batch_size=options.batch, verbose=0)
            # All have traced and allocated in the first turn.
            if turn:
                seconds[name].append(time.perf_counter() - begin)
                core_seconds[name].append(time.process_time() - begin_of_cores)
    for name in models:
        if name != "copies":
            require_equal(name, models[name])
    if keras_hvd.rank() == 0:
        report(options, seconds, core_seconds)
    distributed.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default, text in (
        ("rounds", 11, "turns of each"),
        ("steps", 20, "of a turn, an epoch"),
        ("batch", 64, "of each rank"),
    ):
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    return parser.parse_args()


def keep_memory() -> None:
    """Keeps what torch frees: new pages take up to a fifth of a step, by chance."""
    libc, (trim, mmap) = ctypes.CDLL(None), (-1, -3)  # of glibc's malloc.h
    for option, most in ((trim, 1 << 30), (mmap, 32 << 20)):
        if libc.mallopt(option, most) != 1:
            raise OSError(f"mallopt({option}, {most}) failed")


def model(kind: type, is_distributed: bool) -> keras.Sequential:
    keras.utils.set_random_seed(1)
    made = kind(training.cnn().layers)
    made.build((None, 28, 28, 1))
    optimizer = keras.optimizers.Adam()
    if is_distributed:
        optimizer = keras_hvd.DistributedOptimizer(optimizer)
    made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def of_ddp() -> AtTheEnd:
    folder = tempfile.mkdtemp() if keras_hvd.rank() == 0 else None
    store = os.path.join(keras_hvd.broadcast_object(folder, 0), "store")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=keras_hvd.rank(),
        world_size=keras_hvd.size(),
    )
    made = model(AtTheEnd, is_distributed=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(made)
    # Not as an attribute of the module, which it would be a part of.
    made.__dict__["forward_pass"] = wrapped
    return made


def require_equal(name: str, made: keras.Model) -> None:
    norms = keras_hvd.allgather_object(training.norm(made.get_weights()))
    if len({*norms}) != 1:
        raise RuntimeError(f"{name}: the ranks' weights differ, of norms {norms}")


def report(
    options: argparse.Namespace,
    seconds: dict[str, list[float]],
    core_seconds: dict[str, list[float]],
) -> None:
    print(f"keras_hvd {keras_hvd.__version__}, torch {torch.__version__}")
    for name in seconds:
        times, of_cores = seconds[name], core_seconds[name]
        ratios = [
            statistics.median(one / other for one, other in zip(each, base))
            for each, base in (
                (times, seconds["copies"]),
                (of_cores, core_seconds["copies"]),
            )
        ]
        step = statistics.median(times) / options.steps
        print(
            f"{name:36} {1e3 * step:6.1f} ms a step, {ratios[0]:.3f} of the copies' "
            f"time, {ratios[1]:.3f} of their time of a core"
        )


if __name__ == "__main__":
    main()
