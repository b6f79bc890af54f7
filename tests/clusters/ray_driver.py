"""A user's program, which trains on Ray: ray_driver.py SCENARIO ARGUMENT..."""

import functools
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import ray
import ray.data
import ray.train
import ray.tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

import keras_hvd.ray

ROWS = 48
EPOCHS = 4


def data():
    import numpy as np

    x = np.random.default_rng(0).random((ROWS, 3))
    return x, x.sum(axis=1, keepdims=True)


def build(rate=0.1):
    import keras

    import keras_hvd

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(rate))
    model.compile(optimizer, "mse")
    return model


def train(config):
    """The training of a rank; the result is of all of them."""
    import socket

    import keras

    import keras_hvd

    keras.config.set_floatx("float64")
    keras_hvd.init()
    rank, size = keras_hvd.rank(), keras_hvd.size()
    model, first = keras_hvd.ray.resume(
        functools.partial(build, config.get("rate", 0.1))
    )

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if rank == 1 and epoch == config.get("epoch") and once(config):
                if config["how"] == "raises":
                    raise ValueError("on purpose")
                if config["how"] == "is killed":
                    os.kill(os.getpid(), 9)
                Path(config["mark"], "waits").touch()
                while True:
                    keras_hvd.broadcast_object(0)

    x, y = keras_hvd.data.part(*data())
    callbacks = [
        keras_hvd.callbacks.BroadcastGlobalVariables(0),
        keras_hvd.callbacks.MetricAverage(),
        keras_hvd.ray.ReportCallback(config.get("every", "epoch")),
        Fails(),
    ]
    model.fit(
        *(x, y),
        batch_size=ROWS // size,
        epochs=EPOCHS,
        initial_epoch=first,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return keras_hvd.allgather_object(
        {
            "rank": rank,
            "size": size,
            "local": (keras_hvd.local_rank(), keras_hvd.local_size()),
            "cross": (keras_hvd.cross_rank(), keras_hvd.cross_size()),
            "host": socket.gethostname(),
            "threads": os.environ["TF_NUM_INTRAOP_THREADS"],
            "first": first,
            "weights": [weight.tolist() for weight in model.get_weights()],
        }
    )


def once(config):
    try:
        Path(config["mark"], "failed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fit(function, folder, workers, failures=0, **options):
    config = options.pop("config", {})
    trainer = keras_hvd.ray.KerasTrainer(
        function,
        train_loop_config={"mark": folder, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=folder, failure_config=FailureConfig(max_failures=failures)
        ),
        **options,
    )
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        return {rank: repr(each) for rank, each in error.worker_failures.items()}
    return {"metrics": result.metrics, "ranks": result.return_value}


def trains(folder, workers):
    return fit(train, folder, int(workers))


def fails(folder, how, failures):
    config = {"epoch": 2, "how": how}
    return fit(train, folder, 2, int(failures), config=config)


def loses_a_node(folder):
    return fit(train, folder, (2, 3), 1, config={"epoch": 2, "how": "waits"})


def reads_ray_data(folder):
    def function(config):
        import keras_hvd

        keras_hvd.init()
        shard = ray.train.get_dataset_shard("train")
        rows = [float(row["y"]) for row in shard.iter_rows()]
        dataset = shard.to_tf(feature_columns="x", label_columns="y", batch_size=8)
        try:
            keras_hvd.data.shard(dataset.unbatch())
        except ValueError as error:
            said = str(error)
        model = build()
        model.fit(
            dataset,
            verbose=0,
            callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)],
        )
        weights = [weight.tolist() for weight in model.get_weights()]
        return keras_hvd.allgather_object({"y": rows, "said": said, "weights": weights})

    rows = [{"x": row, "y": float(number)} for number, row in enumerate(data()[0][:47])]
    return fit(function, folder, 2, datasets={"train": ray.data.from_items(rows)})


def tunes(folder):
    def trial(config):
        trainer = keras_hvd.ray.KerasTrainer(
            train,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, callbacks=[TuneReportCallback()]),
        )
        trainer.fit()

    tuner = ray.tune.Tuner(
        ray.tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"rate": ray.tune.grid_search([0.1, 0.001])},
        tune_config=ray.tune.TuneConfig(max_concurrent_trials=2),
        run_config=ray.tune.RunConfig(storage_path=folder),
    )
    results = tuner.fit()
    return {each.config["rate"]: each.metrics["loss"] for each in results}


def runs_the_page():
    """The Python blocks of docs/ray.md, with the names that they take for granted."""
    page = Path(__file__).parents[2] / "docs" / "ray.md"
    trainer, data_of_ray, executors = re.findall(
        r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S
    )
    names = globals()
    names["x"], names["y"] = data()
    exec(trainer, names)
    found = [names["result"].metrics["epoch"]]
    rows = [{"x": row, "y": float(row.sum())} for row in data()[0]]

    def reads():
        keras_hvd.init()
        model = build()
        callbacks = [keras_hvd.callbacks.BroadcastGlobalVariables(0)]
        exec(data_of_ray, {"ray": ray, "model": model, "callbacks": callbacks})
        return int(model.optimizer.iterations) > 0

    datasets = {"train": ray.data.from_items(rows)}
    folder = names["result"].path
    found.append(fit(reads, folder, 2, datasets=datasets)["ranks"])
    names["train"] = lambda number: number + 1
    exec(executors, names)
    return [*found, names["results"]]


def executor(**options):
    settings = keras_hvd.ray.RayExecutor.create_settings(
        timeout_s=120, placement_group_timeout_s=200
    )
    return keras_hvd.ray.RayExecutor(settings, **options)


def place():
    import keras_hvd

    keras_hvd.init()
    weights = keras_hvd.allreduce([1.0 + keras_hvd.rank()], op=keras_hvd.Sum)
    own = keras_hvd.rank(), keras_hvd.size(), keras_hvd.local_rank()
    return [*own, float(weights[0]), os.environ.get("OWN", "")]


class Kept:
    def __init__(self, first, step):
        self.number, self.step = first, step

    def count(self):
        self.number += self.step
        return self.number


def two_executors():
    """At once, each of a worker on each host."""
    made = [executor(num_hosts=2), executor(num_hosts=2)]
    for number, one in enumerate(made):
        one.start(Kept, [10], {"step": 2}, {"OWN": str(number)})
    asked = [one.run_remote(place) for one in made]
    found = [ray.get(each) for each in asked]
    kept = made[0].execute(Kept.count)
    single = made[0].execute_single(Kept.count)
    for one in made:
        one.shutdown()
    return {"places": found, "kept": kept, "single": single}


def errors_of_an_executor():
    one = executor(num_workers=2)
    one.start()

    def raises():
        import keras_hvd

        keras_hvd.init()
        if keras_hvd.rank() == 1:
            raise KeyError("of rank 1")
        keras_hvd.broadcast_object(0)

    def dies():
        import keras_hvd

        keras_hvd.init()
        if keras_hvd.rank() == 1:
            os.kill(os.getpid(), 9)
        keras_hvd.broadcast_object(0)

    said = [error_of(lambda: one.run(raises))]
    # The actors go on, in a new job.
    again = one.run(place)
    said += [
        error_of(lambda: one.run(sys.exit)),
        error_of(lambda: one.run(threading.Lock)),
    ]
    said += [error_of(lambda: one.run(dies)), error_of(lambda: one.run(place))]
    one.start()
    final = one.run(place)
    one.shutdown()
    return {"said": said, "again": again, "final": final}


def refused():
    made = keras_hvd.ray.RayExecutor
    settings = made.create_settings(placement_group_timeout_s=2)
    return [
        error_of(lambda: made(settings, num_workers=9).start()),
        error_of(lambda: made(settings, num_hosts=3).start()),
        error_of(lambda: made(settings, min_workers=1)),
        error_of(lambda: made(settings)),
        error_of(lambda: made(settings, num_workers=1, gpus_per_worker=1)),
        error_of(lambda: keras_hvd.ray.ElasticRayExecutor(settings)),
        error_of(lambda: keras_hvd.ray.resume(build)),
        error_of(lambda: keras_hvd.ray.ReportCallback(every=0)),
    ]


def error_of(call):
    try:
        return f"no error: {call()}"
    except Exception as error:
        cause = f" from {error.__cause__}" if error.__cause__ else ""
        return f"{type(error).__name__}: {error}{cause}"


if __name__ == "__main__":
    ray.init()
    # What the last driver had may be taken for a moment longer.
    latest = time.monotonic() + 60
    while time.monotonic() < latest and (
        ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU")
    ):
        time.sleep(0.1)
    scenario, *arguments = sys.argv[1:]
    print("RETURNED", json.dumps(globals()[scenario](*arguments)), flush=True)
