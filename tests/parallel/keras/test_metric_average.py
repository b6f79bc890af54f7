"""MetricAverage and keras_hvd.evaluate: the metrics of one process on all the data."""

import functools

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage
from keras_hvd.callbacks.metrics import means_over_ranks

# Means, an area, a ratio, and a sum.
NAMES = ["loss", "accuracy", "auc", "precision", "positives"]


def make_model(rate: float = 0.0) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile(
        keras_hvd.DistributedOptimizer(keras.optimizers.SGD(rate)),
        "binary_crossentropy",
        metrics=[
            "accuracy",
            "auc",
            keras.metrics.Precision(name="precision"),
            keras.metrics.TruePositives(name="positives"),
        ],
    )
    return model


def part(rank: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's data: ranks have different amounts, in equally many batches of 8."""
    generator = np.random.default_rng([seed, rank])
    rows = 17 + 2 * rank
    x = generator.standard_normal((rows, 5)).astype("float32")
    return x, (x[:, 0] + generator.standard_normal(rows) > rank / 2).astype("int64")


def all_parts(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = zip(*[part(rank, seed) for rank in range(size)])
    return np.concatenate(x), np.concatenate(y)


@functools.cache
def of_one_process(size: int, seed: int) -> dict[str, float]:
    return make_model().evaluate(
        *all_parts(size, seed), batch_size=7, verbose=0, return_dict=True
    )


class Reads(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = {}

    def on_epoch_end(self, epoch, logs=None):
        self.logs = dict(logs)


@pytest.mark.parametrize("validation_freq", [1, 2])
def test_fit(validation_freq, rank, size):
    """The learning rate is 0, so that one process can compute the expected logs."""
    reader = Reads()
    history = make_model().fit(
        *part(rank, seed=1),
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=part(rank, seed=2),
        validation_freq=validation_freq,
        callbacks=[BroadcastGlobalVariables(0), MetricAverage(), reader],
    )
    expected = of_one_process(size, seed=1)
    validation = of_one_process(size, seed=2)
    for name in NAMES:
        assert history.history[name] == pytest.approx([expected[name]] * 2, rel=1e-6)
        values = [validation[name]] * (2 // validation_freq)
        assert history.history[f"val_{name}"] == pytest.approx(values, rel=1e-6)
        assert reader.logs[f"val_{name}"] == history.history[f"val_{name}"][-1]


def test_fit_without_validation(rank, size):
    history = make_model().fit(
        *part(rank, seed=1), batch_size=8, verbose=0, callbacks=[MetricAverage()]
    )
    expected = of_one_process(size, seed=1)
    for name in NAMES:
        assert history.history[name] == pytest.approx([expected[name]], rel=1e-6)


@pytest.mark.parametrize("return_dict", [False, True], ids=["list", "dict"])
def test_evaluate(return_dict, rank, size):
    results = keras_hvd.evaluate(
        make_model(),
        *part(rank, seed=2),
        batch_size=8,
        verbose=0,
        return_dict=return_dict,
    )
    expected = of_one_process(size, seed=2)
    names = list(results) if return_dict else NAMES
    values = list(results.values()) if return_dict else results
    assert sorted(names) == sorted(NAMES)
    assert values == pytest.approx([expected[name] for name in names], rel=1e-6)


def test_evaluate_hands_on_what_keras_takes(rank, size):
    parts = [part(each, seed=2) for each in range(size)]
    weights = [np.linspace(0.5, 2 + each, len(y)) for each, (_, y) in enumerate(parts)]
    loss, *_ = keras_hvd.evaluate(
        make_model(), *parts[rank], sample_weight=weights[rank], batch_size=8, verbose=0
    )
    alone, *_ = make_model().evaluate(
        *all_parts(size, seed=2), sample_weight=np.concatenate(weights), verbose=0
    )
    assert loss == pytest.approx(alone, rel=1e-6)


class Shares(keras.metrics.Metric):
    """Two results: the number of rows with each label."""

    def __init__(self):
        super().__init__(name="shares")
        self.counts = self.add_weight(shape=(2,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ones = keras.ops.sum(keras.ops.cast(y_true, "float32"))
        rows = keras.ops.cast(keras.ops.size(y_true), "float32")
        self.counts.assign_add(keras.ops.stack([rows - ones, ones]))

    def result(self):
        return {"zeros": self.counts[0], "ones": self.counts[1]}


def test_metrics_of_several_results(rank, size):
    model = make_model()
    model.compile(model.optimizer, model.loss, metrics=[Shares()])
    logs = keras_hvd.evaluate(model, *part(rank, seed=2), verbose=0, return_dict=True)
    _, labels = all_parts(size, seed=2)
    found = {name.split("/")[-1]: value for name, value in logs.items()}
    assert found["ones"] == labels.sum()
    assert found["zeros"] == len(labels) - labels.sum()


class Seen(keras.callbacks.Callback):
    def on_test_end(self, logs=None):
        self.logs = dict(logs)


def test_callbacks_of_evaluate_see_what_it_returns(rank, size):
    seen = Seen()
    keras_hvd.evaluate(
        make_model(), *part(rank, seed=2), batch_size=8, verbose=0, callbacks=[seen]
    )
    expected = of_one_process(size, seed=2)
    assert seen.logs == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("verbose", [1, 2])
def test_evaluate_prints_on_rank_0_what_it_returns(verbose, rank, capsys):
    loss, *_ = keras_hvd.evaluate(make_model(), *part(rank, seed=2), verbose=verbose)
    printed = capsys.readouterr().out
    assert (f"loss: {loss:.4f}" in printed) == (rank == 0)
    assert bool(printed) == (rank == 0)


def test_variables_are_left_alone(rank):
    """Only the logs are of all ranks; the metrics themselves stay this rank's."""
    model = make_model()
    keras_hvd.evaluate(model, *part(rank, seed=2), batch_size=8, verbose=0)
    own = make_model().evaluate(*part(rank, seed=2), batch_size=8, verbose=0)
    found = model.get_metrics_result()
    assert [float(found[name]) for name in NAMES] == pytest.approx(own, rel=1e-6)


class CustomLogs(keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return {"own": keras.ops.sum(data[1])}


def test_logs_that_are_no_metrics(rank):
    model = CustomLogs([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    history = model.fit(
        np.ones((4, 5)), np.full(4, rank), verbose=0, callbacks=[MetricAverage()]
    )
    ranks = np.arange(keras_hvd.size())
    assert history.history["own"] == pytest.approx([4 * ranks.mean()])


def test_logs_that_only_some_ranks_have(rank, size):
    """Their mean is that of the ranks that have them, and only these get it."""
    logs = {"all": rank, f"of {rank}": 1.5, "none": "no number"}
    expected = {"all": (size - 1) / 2, f"of {rank}": 1.5}
    if rank > 0:
        logs["not of 0"], expected["not of 0"] = rank, size / 2
    assert means_over_ranks(logs) == pytest.approx(expected)


class Adds(keras.callbacks.Callback):
    """Logs a number of NumPy's, which is no float."""

    def on_epoch_end(self, epoch, logs=None):
        logs["added"] = np.float32(keras_hvd.rank())


@pytest.mark.filterwarnings("ignore:Adds comes before")
def test_logs_of_a_callback(rank, size):
    callbacks = [Adds(), MetricAverage()]
    history = make_model().fit(*part(rank, seed=1), verbose=0, callbacks=callbacks)
    assert history.history["added"] == [(size - 1) / 2]


@pytest.mark.parametrize(
    "reader",
    [
        lambda: keras.callbacks.EarlyStopping("loss"),
        lambda: keras.callbacks.ReduceLROnPlateau("loss"),
        lambda: keras.callbacks.ModelCheckpoint("never.keras", save_freq=10**6),
    ],
)
def test_must_come_before_readers(reader, rank, several_ranks):
    """ModelCheckpoint writes on rank 0 alone, and has its name on all ranks."""
    callbacks = [reader(), MetricAverage()]
    name = type(callbacks[0]).__name__
    with pytest.raises(ValueError, match=f"put MetricAverage before {name} in"):
        make_model().fit(*part(rank, seed=1), verbose=0, callbacks=callbacks)


def test_warns_of_callbacks_that_may_read(rank, several_ranks):
    with pytest.warns(UserWarning, match="Reads comes before MetricAverage"):
        make_model().fit(
            *part(rank, seed=1), verbose=0, callbacks=[Reads(), MetricAverage()]
        )


class Plateau(keras.callbacks.ReduceLROnPlateau):
    """A user's own."""


def around(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    wrapper = Reads()
    wrapper.inner = callback
    return wrapper


def report(epoch, logs):
    """Would print them."""


def test_order_names_what_is_behind(rank, several_ranks):
    callbacks = [Plateau("loss"), MetricAverage()]
    name = r"Plateau \(a ReduceLROnPlateau\)"
    with pytest.raises(ValueError, match=f"put MetricAverage before {name} in"):
        make_model().fit(*part(rank, seed=1), verbose=0, callbacks=callbacks)
    callbacks[0] = around(callbacks[0])
    with pytest.warns(UserWarning, match=r"Reads \(around Plateau\) comes before"):
        make_model().fit(*part(rank, seed=1), verbose=0, callbacks=callbacks)


def test_order_names_functions(rank, several_ranks):
    function = keras.callbacks.LambdaCallback(on_epoch_end=report)
    place = r"on_epoch_end=report at test_metric_average.py:\d+"
    with pytest.warns(UserWarning, match=rf"LambdaCallback\({place}\) comes before"):
        make_model().fit(
            *part(rank, seed=1), verbose=0, callbacks=[function, MetricAverage()]
        )


class Evaluates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(np.full((4, 5), 9.0), np.zeros(4), verbose=0)


@pytest.mark.filterwarnings("ignore:Evaluates comes before")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_callback_that_evaluates(first, validates, rank, size):
    """It resets the metrics that MetricAverage needs, in either order of the two."""
    callbacks = [MetricAverage(), Evaluates()]
    history = make_model().fit(
        *part(rank, seed=1),
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=part(rank, seed=2) if validates else None,
        callbacks=callbacks[::-1] if first else callbacks,
    )
    expected = of_one_process(size, seed=1)
    validation = of_one_process(size, seed=2)
    for name in NAMES:
        assert history.history[name] == pytest.approx([expected[name]] * 2, rel=1e-6)
        if validates:
            found = history.history[f"val_{name}"]
            assert found == pytest.approx([validation[name]] * 2, rel=1e-6)


@pytest.mark.parametrize(
    "decides",
    [
        lambda: keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
        lambda: keras.callbacks.EarlyStopping(
            "val_loss", patience=9, restore_best_weights=True
        ),
    ],
    ids=["rate", "best_weights"],
)
def test_decisions_by_local_logs(decides, rank, several_ranks, raises_on_all_ranks):
    """Rank 0's validation becomes better with each epoch, the others' worse."""
    x = np.ones((8, 5), "float32")
    with pytest.raises(RuntimeError) as error:
        make_model(0.1).fit(
            x,
            np.ones(8),
            epochs=9,
            verbose=0,
            validation_data=(x, np.full(8, rank == 0, "int64")),
            callbacks=[BroadcastGlobalVariables(0), decides()],
        )
    raises_on_all_ranks(error.value, "rank 0", "rank 1", "MetricAverage")


def test_validation_on_one_rank_only(rank, several_ranks, raises_on_all_ranks):
    with pytest.raises(RuntimeError) as error:
        make_model().fit(
            *part(rank, seed=1),
            batch_size=8,
            verbose=0,
            validation_data=part(rank, seed=2) if rank == 0 else None,
            callbacks=[BroadcastGlobalVariables(0), MetricAverage()],
        )
    raises_on_all_ranks(error.value, "rank 1", "validation")


def test_early_stopping_and_plateaus_agree(rank, size, equal_on_all_ranks):
    """They read the same logs on all ranks, so that rates and weights stay equal."""
    model = make_model(rate=0.5)
    history = model.fit(
        *part(rank, seed=1),
        batch_size=8,
        epochs=8,
        verbose=0,
        callbacks=[
            BroadcastGlobalVariables(0),
            MetricAverage(),
            keras.callbacks.ReduceLROnPlateau("accuracy", patience=1, min_delta=0.2),
            keras.callbacks.EarlyStopping("accuracy", patience=3, min_delta=0.2),
        ],
    )
    epochs = keras_hvd.allgather_object(len(history.epoch))
    assert len(set(epochs)) == 1 and epochs[0] < 8
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in model.optimizer.variables])
