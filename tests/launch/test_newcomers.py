"""A rank that joins has traced its steps before, and the others keep theirs."""

import itertools
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "newcomer.py"
EPOCHS, STEPS, ROWS = 8, 4, 12


@pytest.fixture
def train(khvdrun, tmp_path):
    """Runs the script on three ranks; returns how khvdrun ended, and what ranks saw."""

    def run(way, again=(0, 0), **variables):
        ended = khvdrun.run(
            *("-np", 3, "--min-np", 2, "--blacklist-cooldown-range", *again),
            *(sys.executable, SCRIPT, tmp_path, way),
            timeout=200,
            env=variables,
        )
        seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
        return ended, sorted(seen, key=lambda each: each["rank"])

    return run


@pytest.fixture(scope="module")
def one_process():
    """The weights after the same training by one process of plain Keras."""
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        rng = np.random.default_rng(7)
        x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
        keras.utils.set_random_seed(0)
        layers = [keras.Input((3,)), keras.layers.Dropout(0), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse")
        model.fit(x, y, batch_size=ROWS, epochs=EPOCHS, shuffle=False, verbose=0)
        return [each.numpy() for each in model.weights]
    finally:
        keras.config.set_floatx(floatx)


def check_weights(seen, one_process):
    for each in seen:
        for found, expected in zip(each["weights"], one_process, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", ["graph", "xla", "executions"])
def test_nobody_traces_in_the_job_that_it_joins(train, one_process, way):
    ended, seen = train(way)
    assert ended.returncode == 0, ended.stderr
    *others, new = seen
    assert [each["is new"] for each in seen] == [False, False, True]
    check_weights(seen, one_process)
    for each in seen:
        assert sorted({*each["traces"]}) == ["test", "train"]
        assert len(each["traces"]) == len(others[0]["traces"])
    assert [each["sizes"] for each in others] == [[3, 2, 3]] * 2
    # Its first job is that of the rehearsal, which leaves nothing behind.
    assert new["sizes"] == [1, 3]
    assert new["epochs"] == [[epoch, 3, epoch * STEPS] for epoch in range(5, EPOCHS)]
    assert new["hooks"] == ["begin"]
    rehearsed, first = new["drawn"]
    assert rehearsed == first


def test_a_step_that_reads_the_job_is_traced_in_each(train, one_process):
    ended, seen = train("reads")
    assert ended.returncode == 0, ended.stderr
    check_weights(seen, one_process)
    *others, new = seen
    for each in others:
        assert sizes_of(each) == [3, 2, 3]
    assert sizes_of(new) == [1, 3]


def sizes_of(seen):
    """Those that its step has read; Keras traces the first one twice."""
    sizes = [each for each in seen["traces"] if each not in ("train", "test")]
    return [size for size, _ in itertools.groupby(sizes)]


def test_a_mistake_of_one_that_is_new_disturbs_nobody(train, one_process):
    ended, seen = train("graph", MISTAKE="1")
    assert ended.returncode == 0, ended.stderr
    check_weights(seen, one_process)
    assert [each["sizes"] for each in seen] == [[3, 2]] * 2
    assert "expected axis -1" in ended.stderr
    assert "with 3 of 3 ranks" not in ended.stderr
