"""Drivers of Spark jobs, for test_spark.py: each scenario prints what it returns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

from pyspark.sql import SparkSession

import keras_hvd.spark


def session(kind: str) -> SparkSession:
    if kind == "connect":
        return SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
    settings = json.loads(os.environ["SETTINGS"])
    builder = SparkSession.builder.master(os.environ["CLUSTER"])
    return builder.config(map=settings).getOrCreate()


def trained(rows: int, epochs: int, part: bool = False):
    """What a rank learns: its weights, and where it is."""
    import keras
    import numpy as np

    import keras_hvd

    keras_hvd.init()
    rank, size = keras_hvd.rank(), keras_hvd.size()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1 + rank)
    if part:
        table = keras_hvd.spark.rows()
        x = np.stack([table[name].to_numpy() for name in "abc"], axis=1)
    else:
        x = np.random.default_rng(0).random((rows, 3))[rank::size]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    model.set_weights([np.full((3, 1), 0.25 + rank), np.full(1, rank)])
    model.fit(
        *(x, x.sum(axis=1, keepdims=True)),
        # The mean over all rows, where ranks have different numbers of them.
        sample_weight=np.full(len(x), len(x) * size / rows),
        batch_size=len(x),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)],
    )
    return {
        "weights": [each.tolist() for each in model.get_weights()],
        "rank": [rank, size],
        "local": [keras_hvd.local_rank(), keras_hvd.local_size()],
        "cross": [keras_hvd.cross_rank(), keras_hvd.cross_size()],
        "threads": os.environ["TF_NUM_INTRAOP_THREADS"],
        "rows": len(x),
        "process": os.getpid(),
    }


def fails(how: str, folder: str):
    import subprocess

    import numpy as np

    import keras_hvd

    keras_hvd.init()
    # A process of the rank's own, such as one that loads data.
    own = subprocess.Popen(["sleep", "1000"])
    path = Path(folder) / f"rank-{keras_hvd.rank()}"
    part = path.with_suffix(".part")
    part.write_text(f"{os.getppid()} {os.getpid()} {own.pid}")
    part.rename(path)
    if keras_hvd.rank() == 1:
        if how == "raises":
            raise LookupError("no such thing")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises while another computes":
            raise LookupError("no such thing")
    if "computes" in how:
        while True:
            time.sleep(1)
    while True:
        keras_hvd.allreduce(np.ones(3))
        time.sleep(0.01)


def said(function, *args, **kwargs) -> list[str]:
    """The error of a call: its type, text and cause."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except BaseException as error:
        took = time.monotonic() - start
        return [type(error).__name__, str(error), str(error.__cause__), took]
    raise AssertionError("it raised nothing")


def failing(spark: SparkSession, how: str, folder: str):
    return said(keras_hvd.spark.run, fails, args=(how, folder), num_proc=2)


def trains(spark: SparkSession, ranks: str):
    """Jobs of these sizes in one session, one after the other."""
    return [
        keras_hvd.spark.run(trained, args=(48, 4), num_proc=int(each))
        for each in ranks.split(",")
    ]


def frame(spark: SparkSession, rows: int):
    """Rows in partitions of very different sizes."""
    import numpy as np

    x = np.random.default_rng(0).random((rows, 3)).tolist()
    whole = spark.createDataFrame(x, "a double, b double, c double")
    return whole.where("a < 0.1").coalesce(1).union(whole.where("a >= 0.1"))


def trains_on_rows(spark: SparkSession, ranks: str, rows: str):
    data = frame(spark, int(rows))
    return keras_hvd.spark.run(
        trained, args=(int(rows), 4, True), num_proc=int(ranks), df=data
    )


def seen(spark: SparkSession, ranks: str, rows: str):
    """The rows that each rank has."""

    def own():
        return keras_hvd.spark.rows()["id"].to_pylist()

    data = spark.range(0, int(rows), 1, 7)
    return keras_hvd.spark.run(own, num_proc=int(ranks), df=data)


def divides_twice(spark: SparkSession):
    def divides():
        import tensorflow as tf

        import keras_hvd

        keras_hvd.init()
        ids = keras_hvd.spark.rows()["id"].to_pylist()
        data = tf.data.Dataset.from_generator(
            lambda: iter(ids), output_signature=tf.TensorSpec((), tf.int64)
        )
        keras_hvd.data.shard(data)

    return said(keras_hvd.spark.run, divides, num_proc=2, df=spark.range(9))


def refused(spark: SparkSession, what: str):
    run = keras_hvd.spark.run
    if what == "too many ranks":
        return said(run, len, args=("",), num_proc=9, start_timeout=15)
    if what == "an empty part":
        return said(run, len, args=("",), num_proc=2, df=spark.range(1))
    if what == "no rows":
        return said(run, len, args=("",), num_proc=2, df=spark.range(0))
    if what == "no function":
        return said(run, "train.py", num_proc=2)
    if what == "cannot be pickled":
        return said(run, len, args=(threading.Lock(),), num_proc=2)
    if what == "a result that cannot be pickled":
        return said(run, threading.Lock, num_proc=2)
    if what == "exits":
        return said(run, os._exit, args=(0,), num_proc=1)
    if what == "no ranks":
        return said(run, len, num_proc=0)
    if what == "output":
        return said(run, len, num_proc=1, stdout=sys.stdout)
    if what == "another version":
        with (
            mock.patch("keras_hvd.spark.function.__version__", "9.9.9"),
            mock.patch("keras_hvd.launch.places.__version__", "9.9.9"),
        ):
            return said(run, len, args=("",), num_proc=2)
    if what == "elastic":
        return said(keras_hvd.spark.run_elastic, len)
    if what == "outside of a rank":
        return said(keras_hvd.spark.rows)
    return said(run, len, num_proc=2)


def busy(spark: SparkSession):
    """A job while another one holds a slot."""
    import pyspark

    free, held = threading.Event(), threading.Event()

    def hold(batches):
        time.sleep(40)
        yield from batches

    def other():
        spark.sparkContext.setJobGroup("other", "")
        held.set()
        with contextlib.suppress(Exception):
            spark.range(0, 1, 1, 1).mapInArrow(hold, "id long").collect()
        free.set()

    pyspark.InheritableThread(target=other).start()
    tracker = spark.sparkContext.statusTracker()
    while not tracker.getActiveStageIds():
        held.wait()
    found = said(keras_hvd.spark.run, len, num_proc=2, start_timeout=3)
    spark.sparkContext.cancelJobGroup("other")
    free.wait(30)
    return found


def without_a_session(spark: SparkSession):
    spark.stop()
    return said(keras_hvd.spark.run, len, num_proc=1)


def runs_the_page(spark: SparkSession, folder: str, ranks: int):
    """The Python blocks of docs/spark.md, with the names that they take for granted.

    They run on this number of ranks.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    page = Path(__file__).parents[2] / "docs" / "spark.md"
    run, of_rows, estimator = re.findall(
        r"^```python\n(.*?)^```$",
        page.read_text().replace("num_proc=4", f"num_proc={ranks}"),
        re.M | re.S,
    )
    # Each partition's task imports TensorFlow, to predict.
    data = frame(spark, 48).coalesce(2).selectExpr("a", "b", "c", "a + b + c AS y")
    x = np.random.default_rng(0).random((48, 3))
    names = globals()
    names |= {"keras": keras, "np": np, "tf": tf, "build": build}
    names |= {"callbacks": callbacks, "x": x, "y": x.sum(axis=1), "df": data}
    exec(run, names)
    exec(of_rows, names)
    names["model"] = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    os.chdir(folder)
    exec(estimator, names)
    loaded = keras_hvd.spark.KerasModel.load("model")
    return {
        "weights": len(names["weights"]),
        "counts": names["counts"],
        "losses": names["trained"].getHistory()["loss"],
        "rows": names["predicted"].columns,
        "predicted": column(names["predicted"]),
        "loaded": column(loaded.transform(data)),
        "model": names["trained"]
        .getModel()
        .predict(np.array(data.select("a", "b", "c").collect()), verbose=0)
        .ravel()
        .tolist(),
    }


def column(predicted) -> list[float]:
    return [row.y__output for row in predicted.select("y__output").collect()]


def build():
    import keras

    import keras_hvd

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    return model


def callbacks():
    import keras_hvd

    return [keras_hvd.callbacks.BroadcastGlobalVariables(0)]


def counted(spark: SparkSession):
    try:
        return keras_hvd.spark.run(size)[:2]
    except ValueError as error:
        return type(error).__name__, str(error)


def size() -> int:
    import keras_hvd

    keras_hvd.init()
    return keras_hvd.size()


def plain(spark: SparkSession, expression: str):
    """One rank's values of an expression."""

    def value():
        import keras_hvd

        keras_hvd.init()
        return eval(expression, {"os": os, "keras_hvd": keras_hvd})

    return keras_hvd.spark.run(value, num_proc=1, env={"OF_THE_RANK": "yes"})


if __name__ == "__main__":
    # A shell's background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spark = session(sys.argv[1])
    for line in sys.stdin:
        scenario, *arguments = json.loads(line)
        try:
            result = globals()[scenario](spark, *arguments)
        except BaseException:
            print("\nRAISED " + json.dumps(traceback.format_exc()), flush=True)
        else:
            print("\nRETURNED " + json.dumps(result), flush=True)
