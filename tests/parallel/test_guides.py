"""Each Python block of the pages runs on several ranks, as it is written there.

A block stands here with the names and files that the page takes for granted, and the
text for its `...`. Blocks that other tests run, or that take more than one host or a
GPU, are listed too. So a new block fails until it is in one of the lists.
"""

import functools
import pathlib
import re
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf
from sklearn.model_selection import train_test_split
from tensorflow.python.distribute import multi_worker_util

import keras_hvd

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]

# By page and the first line; why they do not run here.
ELSEWHERE = {
    ("index", "import keras"): "tests/install/test_guides.py",
    ("hangs", "import tensorflow as tf"): "tests/install/test_guides.py",
    ("hangs", "import faulthandler, signal"): "tests/install/test_guides.py",
    ("failures", "import os"): "tests/install/test_guides.py",
    ("saving", "import keras"): "tests/install/test_guides.py",
    ("elastic", "import keras_hvd"): "tests/launch/test_function_elastic.py",
    ("launching", "import keras_hvd"): "tests/launch/test_interactive.py",
    ("collectives", "keras_hvd.init(comm=[3, 1])"): "tests/launch/test_parts.py",
    ("ray", "def train():"): "tests/clusters/test_ray.py",
    ("ray", "shard ="): "tests/clusters/test_ray.py",
    ("ray", "settings ="): "tests/clusters/test_ray.py",
    ("spark", "def train(epochs):"): "tests/clusters/test_spark.py",
    ("spark", "def train():"): "tests/clusters/test_spark.py",
    ("spark", "estimator ="): "tests/clusters/test_spark.py",
    ("torch", "accuracy = keras_hvd.allreduce("): "tests/torch/parallel",
    ("torch", "loss = torch.nn.functional.mse_loss("): "tests/torch/parallel",
    ("training", "callbacks = ["): "tests/launch/test_trackers.py",
    ("tfx", "trainer = keras_hvd.tfx.Trainer("): "tests/tfx/test_pipeline.py",
    ("tfx", "def run_fn(fn_args):"): "tests/tfx/test_pipeline.py",
    ("tfx", "def tuner_fn(fn_args):"): "tests/tfx/test_tuner.py",
    ("clusters", "losses = keras_hvd.run("): "tests/launch/test_run_on_hosts.py",
    ("gpus", 'gpus = tf.config.list_physical_devices("GPU")'): "tests/gpu",
}

Names = dict[str, Any]


def x_y(rows: int = 96) -> Names:
    x = np.random.default_rng(0).random((rows, 3)).astype("float32")
    return {"x": x, "y": x.sum(axis=1, keepdims=True)}


def for_validation() -> Names:
    rows = x_y().values()
    names = ("x_train", "x_test", "y_train", "y_test")
    return {**fit_names(), **dict(zip(names, train_test_split(*rows, random_state=0)))}


def for_even() -> Names:
    names = fit_names()
    rows = slice(0, 64 + 10 * keras_hvd.rank())
    slices = tf.data.Dataset.from_tensor_slices((names["x"][rows], names["y"][rows]))
    return {**names, "batches": slices.batch(32)}


def trained_model() -> Names:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse")
    return {"model": model, "optimizer": optimizer}


def fit_names() -> Names:
    start = keras_hvd.callbacks.BroadcastGlobalVariables(0)
    return {**x_y(), **trained_model(), "callbacks": [start]}


def record_files(options: str = "") -> list[str]:
    """Two files of numbers, which all ranks see: enough for two batches of each."""
    count = 64 * keras_hvd.size()
    paths = [f"train-{number}.tfrecord" for number in range(2)]
    if keras_hvd.rank() == 0:
        for path in paths:
            with tf.io.TFRecordWriter(path, options) as writer:
                for number in range(count):
                    writer.write(str(number / count).encode())
    keras_hvd.barrier()
    return paths


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    number = tf.strings.to_number(record)
    return tf.fill([3], number), tf.reshape(number, [1])


def rows_in_files() -> Names:
    record_files()
    return {**fit_names(), "parse": parse}


def loop_over_files() -> Names:
    record_files()
    position = keras_hvd.data.Position()
    samples = keras_hvd.data.from_files(
        "train-*.tfrecord", "tfrecord", even=64, position=position
    )
    seen: list[int] = []
    return {
        "position": position,
        "dataset": samples.map(parse).batch(64),
        "step": lambda x, y: seen.append(len(x)),
    }


class MyDataset(keras.utils.PyDataset):
    def __init__(self, *_: Any):
        super().__init__()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((8, 3), index, "float32"), np.full((8, 1), index, "float32")


class Hyperband(keras_tuner.Hyperband):
    """Two epochs for the best, where Keras Tuner's own makes a hundred."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, max_epochs=2, **kwargs)


def saved_model() -> Names:
    trained_model()["model"].save("model.keras")
    return {}


def for_join() -> Names:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def train_step(batch: tf.Tensor) -> None:
        keras_hvd.allreduce(batch, name="step")

    data = [tf.ones(2)] * (keras_hvd.rank() + 1)
    return {"model": model, "data": data, "train_step": train_step}


def for_loop() -> Names:
    names = {**x_y(), **trained_model()}
    names["optimizer"].build(names["model"].trainable_variables)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean((names["model"](names["x"]) - names["y"]) ** 2)
    return {**names, "tape": tape, "loss": loss}


def for_tape() -> Names:
    names = for_loop()
    plain = keras.optimizers.SGD(0.01)
    plain.build(names["model"].trainable_variables)
    return {**names, "optimizer": plain}


def for_strategy() -> Names:
    x, y = x_y().values()
    return {"dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(32)}


def for_accuracy() -> Names:
    strategy = keras_hvd.Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    x, _ = x_y().values()
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(96) % 10)).batch(32)
    return {"strategy": strategy, "model": model, "dataset": dataset}


def for_tfx() -> Names:
    record_files("GZIP")
    arguments = SimpleNamespace(train_files="train-*.tfrecord")
    return {"fn_args": arguments, "parse": parse}


def for_tuner() -> Names:
    x, y = keras_hvd.data.part(*x_y().values())
    tuner = SimpleNamespace(Hyperband=Hyperband)
    return {"x": x, "y": y, "x_val": x, "y_val": y, "keras_tuner": tuner}


DENSE = ("Sequential([...])", "Sequential([keras.layers.Dense(1)])")

# By page and the first line: names taken for granted, and the text for its `...`.
HERE: dict[tuple[str, str], tuple[Callable[[], Names], tuple[str, str] | None]] = {
    ("README", "with keras_hvd.Strategy().scope():"): (
        lambda: {**x_y(), "y": np.arange(96) % 10},
        ("...", 'keras.layers.Dense(10, activation="softmax")'),
    ),
    ("collectives", "keras_hvd.init()"): (lambda: {"x": tf.ones(4)}, None),
    ("collectives", "for batch in data:"): (for_join, None),
    ("data", "samples = tf.data.TFRecordDataset(paths)"): (
        lambda: {**fit_names(), "paths": record_files(), "parse": parse},
        ("callbacks=[...]", "callbacks=callbacks"),
    ),
    ("data", "batches = tf.data.Dataset"): (x_y, None),
    ("data", "x_train, x_test, y_train, y_test ="): (
        lambda: {**x_y(), "train_test_split": train_test_split},
        None,
    ),
    ("data", "dataset = keras_hvd.data.from_arrays("): (fit_names, None),
    ("data", "model.fit(keras_hvd.data.ShardedPyDataset("): (
        lambda: {**fit_names(), "MyDataset": MyDataset},
        ("callbacks=[...]", "callbacks=callbacks"),
    ),
    ("data", "dataset = tf.data.TFRecordDataset(paths)"): (
        lambda: {"paths": record_files(), "parse": parse},
        None,
    ),
    ("data", "dataset, rows ="): (for_even, None),
    ("data", "rows = 64"): (fit_names, None),
    ("data_files", "position = keras_hvd.data.Position()"): (rows_in_files, None),
    ("data_files", "for epoch in range(position.epoch, 10):"): (loop_over_files, None),
    ("failures", "keras_hvd.allreduce("): (dict, None),
    ("from_tf_distribute", "ranks = ["): (dict, None),
    ("from_tf_distribute", "with strategy.scope():"): (for_accuracy, None),
    ("saving", "if keras_hvd.rank() == 0:"): (trained_model, None),
    ("saving", "keras_hvd.barrier()"): (saved_model, None),
    ("strategy", "import keras_hvd, tensorflow as tf"): (for_strategy, None),
    ("strategy_fit", "keras_hvd.init()"): (x_y, None),
    ("tfx", "records = tf.data.TFRecordDataset("): (for_tfx, None),
    ("elastic", "def make_data():"): (fit_names, ("epochs=10", "epochs=2")),
    ("elastic", "def make_data(position):"): (fit_names, ("epochs=10", "epochs=2")),
    ("elastic", "state ="): (fit_names, ("epochs=10", "epochs=2")),
    ("timeline", 'keras_hvd.start_timeline("timeline.json")'): (fit_names, None),
    ("training", "x_train, y_train ="): (for_validation, None),
    ("training", "model = keras.Sequential("): (dict, None),
    ("training", "# In a step, the same numbers"): (lambda: {"step": 1}, None),
    ("training", "rate = 0.01 *"): (fit_names, None),
    ("training", "class StopAtLoss("): (fit_names, None),
    ("training", "class CountRows("): (fit_names, None),
    ("training", "class SaveEachEpoch("): (fit_names, None),
    ("training", "normalization ="): (x_y, None),
    ("training", "optimizer = keras_hvd.DistributedOptimizer("): (dict, None),
    ("training", "gradients = tape.gradient("): (for_loop, None),
    ("training", "optimizer = keras_hvd.PartialDistributedOptimizer("): (
        lambda: {
            "optimizer": keras.optimizers.SGD(),
            "head": keras.layers.Dense(1),
        },
        None,
    ),
    ("training", "with tf.GradientTape() as tape:"): (
        for_tape,
        ("loss = ...", "loss = tf.reduce_mean((model(x) - y) ** 2)"),
    ),
    ("training", 'with tf.profiler.experimental.Profile("logs")'): (fit_names, None),
    ("training", "def build(hp):"): (for_tuner, DENSE),
}


@functools.cache
def blocks() -> list[tuple[str, int, str, str]]:
    """Page, line and text of each block, and what stands below as its output."""
    block = r"^ *```python.*?\n(.*?)^ *```\n(?:\n```text\n(.*?)^```\n)?"
    found = []
    for page in PAGES:
        text = page.read_text()
        for each in re.finditer(block, text, re.M | re.S):
            line = text[: each.start(1)].count("\n")
            found.append((page.stem, line, each[1], each[2] or ""))
    return found


def entries(page: str, text: str, table: dict) -> list[tuple[str, str]]:
    return [
        (name, first)
        for name, first in table
        if name == page and text.startswith(first)
    ]


def test_each_block_is_run_somewhere():
    for page, _, text, _ in blocks():
        known = entries(page, text, HERE) + entries(page, text, ELSEWHERE)
        assert len(known) == 1, f"a block of {page} is in {len(known)} lists:\n{text}"
    for page, first in (*HERE, *ELSEWHERE):
        assert any(p == page and text.startswith(first) for p, _, text, _ in blocks())
    for where in ELSEWHERE.values():
        assert (CHECKOUT / where).exists()


@pytest.fixture
def in_shared_folder(tmp_path, monkeypatch) -> Iterator[None]:
    """The blocks read and write files of the folder that they run in."""
    monkeypatch.chdir(keras_hvd.broadcast_object(tmp_path, 0))
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    keras_hvd.barrier()
    yield
    keras_hvd.barrier()


def output_of(
    code: types.CodeType,
    names: Names,
    capsys: pytest.CaptureFixture[str],
    error: re.Match[str] | None,
) -> str:
    """What the code prints, or its error if the ranks can differ."""
    if error is None or keras_hvd.size() == 1:
        exec(code, names)
        return capsys.readouterr().out
    with pytest.raises(Exception, match=".") as raised:
        exec(code, names)
    message = str(getattr(raised.value, "message", raised.value))
    # TensorFlow begins with the node.
    return f"{type(raised.value).__name__}: {re.sub('^{{.*?}} ', '', message)}"


@pytest.mark.parametrize("key", HERE, ids=lambda key: f"{key[0]}: {key[1][:30]}")
@pytest.mark.usefixtures("in_shared_folder")
def test_block(key, capsys):
    page, line, text, shown = next(
        each for each in blocks() if each[0] == key[0] and each[2].startswith(key[1])
    )
    given, stands_for = HERE[key]
    if stands_for is not None:
        assert stands_for[0] in text
        text = text.replace(*stands_for)
    names = {"keras": keras, "keras_hvd": keras_hvd, "np": np, "tf": tf, **given()}
    # The third to tenth epoch show nothing more.
    text = text.replace("epochs=10", "epochs=2").replace("epoch, 10)", "epoch, 2)")
    # Three ranks cannot share the pages' batches.
    text = text.replace("batch_size=256", f"batch_size={64 * keras_hvd.size()}")
    # Errors name the page and its line.
    code = compile("\n" * line + text, f"{page}.md", "exec")
    said = output_of(code, names, capsys, re.match(r"\w+Error", shown))
    if keras_hvd.size() == 2 and keras_hvd.rank() == 0:
        assert " ".join(shown.split()) in said
    for each in names.values():
        if isinstance(each, keras_hvd.ProcessSet) and each.process_set_id:
            keras_hvd.remove_process_set(each)


def test_rank_0_is_the_chief_of_the_resolver(rank):
    """By the rule of TensorFlow's guide for Keras, and by that for custom loops."""
    text = next(text for _, _, text, _ in blocks() if "SimpleClusterResolver" in text)
    names = {"tf": tf, "keras_hvd": keras_hvd}
    exec(text, names)
    resolver = names["resolver"]
    task = resolver.task_type, resolver.task_id
    assert (task == ("worker", 0)) == (rank == 0)
    spec = resolver.cluster_spec()
    assert multi_worker_util.is_chief(spec, *task) == (rank == 0)
