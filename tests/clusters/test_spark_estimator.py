"""keras_hvd.spark's estimator and model, on a Spark of this machine."""

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession, functions

from keras_hvd.spark import estimator, fitting
from keras_hvd.spark.columns import Rows
from keras_hvd.spark.estimator import KerasEstimator
from keras_hvd.spark.model import KerasModel, _predicting

ROWS = 48
X = np.random.default_rng(0).random((ROWS, 3))
Y = X.sum(axis=1)
WEIGHTS = np.arange(ROWS) / ROWS


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder
    if "SPARK_REMOTE" not in os.environ:
        builder = builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def df(spark) -> DataFrame:
    """A row has its number, three features as an array and a vector, and more."""
    rows = [
        (number, x.tolist(), float(y), float(weight), number % 4 == 0)
        for number, (x, y, weight) in enumerate(zip(X, Y, WEIGHTS))
    ]
    names = (
        "number int, features array<double>, label double, weight double, held boolean"
    )
    made = spark.createDataFrame(rows, names)
    return made.withColumn("vector", array_to_vector("features"))


@pytest.fixture
def one_rank(monkeypatch) -> None:
    """Estimators train in this process, as the only rank."""

    def run(fn: Callable, args: tuple, *, df: DataFrame, **_: object) -> list[Any]:
        monkeypatch.setattr(fitting, "rows", df.toArrow)
        return [fn(*args)]

    monkeypatch.setattr(estimator, "run", run)


@pytest.fixture
def float64() -> Iterator[None]:
    for set_type in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_type("float64")
    yield
    for set_type in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_type("float32")


NOTED: list[Any] = []


def note_row(row: dict[str, Any]) -> dict[str, Any]:
    NOTED.append(row["number"])
    return row


class NoteBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        NOTED.append("trained")

    def on_test_batch_end(self, batch, logs=None):
        NOTED.append("validated")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def make_estimator(**arguments: object) -> KerasEstimator:
    return KerasEstimator(
        **{
            "model": make_model(),
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "mse",
            "feature_cols": ["features"],
            "label_cols": ["label"],
            "verbose": 0,
            **arguments,
        }
    )


def plain_weights(**arguments: object) -> list[np.ndarray]:
    """The weights of plain Keras, after three steps with all rows."""
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y[:, None], batch_size=ROWS, epochs=3, verbose=0, **arguments)
    return model.get_weights()


def require_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("column", ["features", "vector"])
def test_two_ranks_train_as_one_process(df, float64, column):
    trained = make_estimator(
        num_proc=2, batch_size=ROWS // 2, epochs=3, feature_cols=[column]
    ).fit(df)
    require_equal(trained.getModel().get_weights(), plain_weights())
    assert len(trained.getHistory()["loss"]) == 3


def test_ranks_with_unequal_parts_make_as_many_steps(df):
    parts = df.coalesce(1).where("number < 17")
    trained = make_estimator(num_proc=2, batch_size=8).fit(parts)
    assert trained.getModel().optimizer.iterations == 1


def test_rows_have_weights(df, float64, one_rank):
    weighted = make_estimator(batch_size=ROWS, epochs=3, sample_weight_col="weight")
    expected = plain_weights(sample_weight=WEIGHTS)
    require_equal(weighted.fit(df).getModel().get_weights(), expected)


def test_a_pipeline_trains_a_model_of_a_function(df, float64, one_rank):
    stage = make_estimator(model=make_model, batch_size=ROWS)
    pipeline = Pipeline(stages=[stage]).fit(df, {stage.epochs: 3})
    require_equal(pipeline.stages[0].getModel().get_weights(), plain_weights())
    assert stage.getEpochs() == 1


@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_compiled_model_goes_on_with_its_optimizer(df, float64, one_rank, loss):
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y[:, None], batch_size=ROWS, verbose=0)
    trained = make_estimator(
        model=model, optimizer=None, loss=loss, batch_size=ROWS, epochs=2
    ).fit(df)
    require_equal(trained.getModel().get_weights(), plain_weights())
    assert trained.getModel().optimizer.iterations == 3


def test_an_epoch_takes_each_row_once_in_another_order(df, one_rank):
    NOTED.clear()
    shuffled = make_estimator(
        feature_cols=["features"], label_cols=["number"], transformation_fn=note_row
    )
    shuffled.setEpochs(2).setBatchSize(5).fit(df)
    # Before and after the epochs, one row shows the shapes.
    first, second = NOTED[1 : ROWS + 1], NOTED[ROWS + 1 : -1]
    assert sorted(first) == sorted(second) == [*range(ROWS)]
    assert first != second


def test_a_seed_makes_runs_equal(df, one_rank):
    seeded = make_estimator(model=make_model, random_seed=3, batch_size=5)
    first, again = (seeded.fit(df).getModel().get_weights() for _ in range(2))
    require_equal(first, again)


@pytest.mark.parametrize("validation", [0.25, "held"])
def test_some_rows_validate(df, one_rank, validation):
    NOTED.clear()
    trained = make_estimator(
        validation=validation, batch_size=1, val_batch_size=3, callbacks=[NoteBatches()]
    ).fit(df)
    assert NOTED == ["trained"] * 36 + ["validated"] * 4
    assert len(trained.getHistory()["val_loss"]) == 1


def test_steps_of_an_epoch_can_be_given(df, one_rank):
    trained = make_estimator(
        model=make_model(), batch_size=10, epochs=2, train_steps_per_epoch=7
    ).fit(df)
    assert trained.getModel().optimizer.iterations == 14


def test_a_checkpoint_decides_which_model_is_kept(df, float64, one_rank):
    callback = keras.callbacks.ModelCheckpoint(
        "of the user.keras", monitor="loss", mode="max", save_best_only=True
    )
    kept = make_estimator(batch_size=ROWS, epochs=3, checkpoint_callback=callback)
    assert kept.fit(df).getModel().optimizer.iterations == 1


def test_losses_may_be_functions(df, one_rank):
    def absolute(wanted: Any, found: Any) -> Any:
        return keras.ops.abs(wanted - found)

    trained = make_estimator(loss=absolute, metrics=[absolute]).fit(df)
    assert trained.getModel().compiled
    assert "absolute" in trained.getHistory()


def test_columns_take_the_shapes_of_inputs_and_outputs(spark, one_rank):
    image, number = keras.Input((2, 2, 1)), keras.Input((1,))
    flat = keras.layers.Flatten()(image)
    joined = keras.layers.Concatenate()([flat, number])
    outputs = [keras.layers.Dense(1)(joined), keras.layers.Reshape((2, 2))(flat)]
    frame = spark.createDataFrame(
        [([[float(n)] * 2] * 2, n, n, [0.0, 1.0, 2.0, 3.0]) for n in range(6)],
        "image array<array<float>>, number int, sum long, mask array<double>",
    )
    trained = make_estimator(
        model=keras.Model([image, number], outputs),
        loss=["mse", "mse"],
        feature_cols=["image", "number"],
        label_cols=["sum", "mask"],
    ).fit(frame)
    row = trained.transform(frame).where("number = 3").first()
    assert row["mask__output"] == [3.0] * 4
    x = np.full((1, 2, 2, 1), 3.0), np.array([[3.0]])
    expected = trained.getModel().predict(x, verbose=0)[0].item()
    assert row["sum__output"] == pytest.approx(expected, rel=1e-6)


def test_labels_take_a_given_shape(spark, one_rank):
    def squares(wanted: Any, found: Any) -> Any:
        assert wanted.shape[1:] == (2, 2)
        return keras.ops.mean((wanted - found[:, None]) ** 2, axis=(1, 2))

    frame = spark.createDataFrame(
        [([1.0, 2.0], [0.0, 1.0, 2.0, 3.0])], "x array<float>, y array<float>"
    )
    make_estimator(
        model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]),
        loss=squares,
        feature_cols=["x"],
        label_cols=["y"],
        label_shapes=[(-1, 2, 2)],
    ).fit(frame)


def test_columns_of_numbers_are_put_side_by_side(df, float64, one_rank):
    split = df.select("label", *(df["features"][n].alias(f"x{n}") for n in range(3)))
    trained = make_estimator(
        feature_cols=["x0", "x1", "x2"], batch_size=ROWS, epochs=3
    ).fit(split)
    require_equal(trained.getModel().get_weights(), plain_weights())


def test_a_model_that_does_not_know_its_shapes_trains(df, float64, one_rank):
    class Model(keras.Model):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self.dense = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    trained = make_estimator(model=Model, custom_objects={"Model": Model}).fit(df)
    row = trained.transform(df).where("number = 5").first()
    expected = trained.getModel().predict(X[5:6], verbose=0)[0]
    np.testing.assert_allclose(row["label__output"], expected, rtol=1e-6)


def test_a_transformed_frame_keeps_its_columns(spark, df):
    others = df.withColumns(
        {
            "text": functions.lit("a"),
            "when": functions.lit(datetime.datetime(2026, 1, 2, 3, 4, 5)),
            "map": functions.create_map(functions.lit("b"), "number"),
            "nothing": functions.lit(None).cast("decimal(10,2)"),
        }
    )
    model = make_model()
    predicting = KerasModel(
        model=model, feature_columns=["vector"], label_columns=["label"]
    )
    made = predicting.transform(others)
    assert made.columns == [*others.columns, "label__output"]
    found, kept = made.orderBy("number").collect(), others.orderBy("number").collect()
    assert [row[:-1] for row in found] == [tuple(row) for row in kept]
    expected = model.predict(X, verbose=0)[:, 0]
    np.testing.assert_allclose([row[-1] for row in found], expected, rtol=1e-6)


def test_a_frame_without_rows_is_transformed(df):
    predicting = KerasModel(
        model=make_model(), feature_columns=["features"], label_columns=["label"]
    )
    assert predicting.transform(df.where("number < 0")).collect() == []
    empty = pyarrow.RecordBatch.from_pydict({"features": []})
    assert [*_predicting(b"", ["features"], [], 1)([empty])] == []


def test_a_worker_loads_the_model_once(spark, df, tmp_path):
    class Noting(keras.layers.Dense):
        def __init__(self, units: int, **options: Any):
            super().__init__(units, **options)
            Path(tmp_path, f"{os.getpid()}-{id(self)}").touch()

    model = keras.Sequential([keras.Input((3,)), Noting(1)])
    predicting = KerasModel(
        model=model,
        feature_columns=["features"],
        label_columns=["label"],
        custom_objects={"Noting": Noting},
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "3")
    predicting.transform(df.repartition(6)).collect()
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    loads = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    loads.remove(str(os.getpid()))
    assert 1 <= len(loads) == len({*loads}) <= 2


def test_a_saved_model_is_loaded(df, tmp_path):
    model = make_model()
    saved = KerasModel(
        model=model,
        history={"loss": [0.5]},
        feature_columns=["features"],
        label_columns=["label"],
    ).setOutputCols(["out"])
    saved.save(tmp_path / "saved")
    loaded = KerasModel.load(tmp_path / "saved")
    require_equal(loaded.getModel().get_weights(), model.get_weights())
    assert loaded.getHistory() == {"loss": [0.5]}
    assert loaded.transform(df).columns[-1] == "out"
    assert keras.saving.load_model(tmp_path / "saved" / "model.keras").built
    with pytest.raises(FileExistsError):
        saved.save(tmp_path / "saved")


def test_arguments_without_effect_are_said(df, one_rank):
    given = make_estimator(store="/horovod", run_id="first").setInMemoryCacheAll(True)
    with pytest.warns(UserWarning, match="without effect") as said:
        given.fit(df)
    (text,) = [str(each.message) for each in said if "effect" in str(each.message)]
    assert "without effect: store, run_id, inmemory_cache_all. " in text


def test_arguments_have_getters_setters_and_docs():
    made = make_estimator().setBatchSize(7).setShufflingBufferSize(0)
    assert (made.getBatchSize(), made.getLabelCols()) == (7, ["label"])
    assert "rows in each rank's batch" in made.explainParam("batch_size")
    changed = made.copy({made.batch_size: 8})
    assert (changed.getBatchSize(), made.getBatchSize()) == (8, 7)
    with pytest.raises(TypeError, match="no argument 'batchsize'"):
        KerasEstimator(batchsize=7)


COMPILED = make_model()
COMPILED.compile("sgd", "mse")
WRONG = {
    "model must be a Keras model": {"model": "model.keras"},
    "no column 'there'; it has number, features": {"feature_cols": ["there"]},
    "column 'text' is of type string": {"label_cols": ["text"]},
    "feature_cols must be names": {"feature_cols": "features"},
    "label_cols must be names": {"label_cols": []},
    "has 1 outputs, got label_cols": {"label_cols": ["label", "weight"]},
    "give a loss and an optimizer": {"loss": None},
    "compiled with .* another": {"model": COMPILED},
    "go with a loss": {"loss": None, "metrics": ["mae"]},
    "1 or more, got 0, 32": {"num_proc": 0},
    "a share below 1; got 2": {"validation": 2},
    "save whole models": {
        "checkpoint_callback": keras.callbacks.ModelCheckpoint(
            "a.weights.h5", save_weights_only=True
        )
    },
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_arguments_start_nothing(df, monkeypatch, said):
    monkeypatch.setattr(estimator, "run", None)
    with pytest.raises(ValueError, match=said):
        make_estimator(**WRONG[said]).fit(df.withColumn("text", functions.lit("a")))


def test_what_only_a_rank_knows_is_refused_there(df, one_rank):
    with pytest.raises(ValueError, match="give a loss and an optimizer"):
        make_estimator(model=make_model, loss=None).fit(df)
    with pytest.raises(ValueError, match="0 rows for training and 48 for validation"):
        make_estimator(validation="all").fit(df.withColumn("all", functions.lit(True)))
    with pytest.raises(ValueError, match=r"takes rows of shape \(3,\).* \(2,\)"):
        make_estimator().fit(
            df.withColumn("features", functions.array("label", "label"))
        )


@pytest.mark.parametrize("column", ["features", "vector"])
def test_a_null_is_named(df, one_rank, column):
    is_fifth = functions.col("number") == 5
    holed = df.withColumn(column, functions.when(~is_fifth, df[column]))
    with pytest.raises(ValueError, match=f"column '{column}' has nulls"):
        make_estimator(feature_cols=[column]).fit(holed)
    predicting = KerasModel(
        model=make_model(), feature_columns=[column], label_columns=["label"]
    )
    with pytest.raises(PySparkException, match=f"column '{column}' has nulls"):
        predicting.transform(holed).collect()


def test_a_frame_that_cannot_be_transformed_is_refused(df):
    predicting = KerasModel(
        model=make_model(), feature_columns=["features"], label_columns=["label"]
    )
    with pytest.raises(ValueError, match="a model and feature_columns"):
        KerasModel(model=make_model()).transform(df)
    with pytest.raises(ValueError, match="has no column 'features'"):
        predicting.transform(df.drop("features"))
    with pytest.raises(ValueError, match="none of the columns .*label__output"):
        predicting.transform(df.withColumn("label__output", df["label"]))
    with pytest.raises(ValueError, match="the model has 1 outputs"):
        predicting.setOutputCols(["a", "b"]).transform(df)


def test_rows_are_taken_from_several_chunks():
    values = np.arange(24.0).reshape(8, 3)
    chunks = [pyarrow.array(part.tolist()) for part in (values[:3], values[3:])]
    rows = Rows("x", pyarrow.chunked_array(chunks))
    numbers = np.array([7, 0, 3, 2, 7])
    np.testing.assert_array_equal(rows.take(numbers), values[numbers])
    assert np.shares_memory(rows._parts[0], chunks[0].flatten().to_numpy())


@pytest.mark.parametrize("parts", [[[[1, 2], [3]]], [[[1, 2]], [[1, 2, 3]]]])
def test_arrays_of_several_lengths_are_named(parts):
    chunks = pyarrow.chunked_array([*map(pyarrow.array, parts)])
    with pytest.raises(ValueError, match="'x' has arrays of several lengths"):
        Rows("x", chunks)


def test_spark_connect_serves_too(tmp_path):
    if "SPARK_REMOTE" in os.environ:
        pytest.skip("this is Spark Connect")
    chosen = "two_ranks_train or keeps_its_columns or null_is_named or pipeline"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", chosen],
        env={**os.environ, "SPARK_REMOTE": "local[2]"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
