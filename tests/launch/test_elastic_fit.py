"""elastic.fit: one `fit`, whose callbacks go on in whatever job there is."""

import csv
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "elastic_fit.py"
EPOCHS, STEPS, ROWS = 30, 4, 12


@pytest.fixture
def train(khvdrun, tmp_path):
    """Runs the script on three ranks; returns what ranks saw, and the log's rows."""

    def run(*words, again=False, **variables):
        options = ("--blacklist-cooldown-range", 0, 0) if again else ()
        ended = khvdrun.run(
            *("-np", 3, "--min-np", 2, *options),
            *(sys.executable, SCRIPT, tmp_path, *words),
            timeout=200,
            env=variables,
        )
        assert ended.returncode == 0, ended.stderr
        seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
        with (tmp_path / "log.csv").open() as log:
            rows = list(csv.DictReader(log))
        return sorted(seen, key=lambda each: each["rank"]), rows

    return run


@pytest.fixture(scope="module")
def one_process():
    """The same training by one process of plain Keras."""
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        rng = np.random.default_rng(7)
        x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
        y += x @ [[1.0], [-2.0], [0.5]]
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        early = keras.callbacks.EarlyStopping("loss", min_delta=0.005, patience=3)
        plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 2, min_delta=0.05)
        history = model.fit(
            *(x, y),
            batch_size=ROWS,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[early, plateau],
        )
        # It stops by itself, after the learning rate has fallen.
        assert 8 < early.stopped_epoch < EPOCHS - 1
        assert len({*history.history["learning_rate"]}) > 1
        return {
            "history": history.history,
            "early": [early.best, early.wait, early.stopped_epoch, early.min_delta],
            "weights": [each.numpy() for each in model.weights],
        }
    finally:
        keras.config.set_floatx(floatx)


def check(seen, rows, one_process):
    """All are as if nothing had happened."""
    epochs = [*range(len(one_process["history"]["loss"]))]
    for each in seen:
        assert each["history's epochs"] == epochs
        assert each["ended"] == len(epochs)
        for name, values in one_process["history"].items():
            close(each["history"][name], values)
        close(each["early"], one_process["early"])
        for found, expected in zip(
            each["weights"], one_process["weights"], strict=True
        ):
            close(found, expected)
    assert [int(row["epoch"]) for row in rows] == epochs
    close([float(row["loss"]) for row in rows], one_process["history"]["loss"])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dies, epoch", [(0, 4), (2, 12)])
def test_callbacks_begin_and_end_once(train, one_process, dies, epoch):
    """Also where the rank that writes dies, or when they are about to stop."""
    seen, rows = train(dies, epoch)
    assert [each["started as"] for each in seen] == [*{0, 1, 2} - {dies}]
    check(seen, rows, one_process)
    for each in seen:
        assert each["sizes"] == [3, 2]
        assert each["said"] == ["begin", "end"]
        # It was begun again.
        assert each["epochs"] == [*range(epoch + 1), *range(epoch, len(rows))]


def test_a_rank_that_comes_goes_on_like_the_others(train, one_process):
    seen, rows = train(1, "2", again=True, MEMBERS="3")
    assert [each["started as"] for each in seen] == [0, 2, 1]
    check(seen, rows, one_process)
    *others, new = seen
    assert [each["sizes"] for each in others] == [[3, 2, 3]] * 2
    # It has made a step by itself before.
    assert new["sizes"] == [1, 3]
    assert new["said"] == ["begin", "end"]
    assert new["epochs"] == [*range(5, len(rows))]
