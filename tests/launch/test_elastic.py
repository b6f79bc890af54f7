"""khvdrun --min-np: what is left of a job goes on, and its weights are right."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "elastic.py"
STEPS, ROWS = 20, 12


@pytest.fixture
def train(khvdrun, tmp_path):
    """Runs the script on four ranks; returns how khvdrun ended, and what ranks saw."""

    def run(*words, minimum=2, script=SCRIPT):
        options = [each for each in words if str(each).startswith("--")]
        values = [each for each in words if each not in options]
        ended = khvdrun.run(
            *("-np", 4, "--min-np", minimum, *options),
            *(sys.executable, script, tmp_path, *values),
            timeout=120,
        )
        seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
        return ended, sorted(seen, key=lambda each: each["rank"])

    return run


@pytest.fixture(scope="module")
def one_process():
    """The weights after the same training on one process of plain Keras."""
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        rng = np.random.default_rng(7)
        x, y = rng.normal(size=(STEPS * ROWS, 3)), rng.normal(size=(STEPS * ROWS, 1))
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        return [each.numpy() for each in model.weights]
    finally:
        keras.config.set_floatx(floatx)


def check(seen, one_process, sizes):
    assert [each["rank"] for each in seen] == [*range(sizes[-1])]
    for each in seen:
        assert each["sizes"] == sizes
        # Batches of each size have their own shape, once.
        assert each["traces"] <= 2
        assert each["step"] == STEPS
        for found, expected in zip(each["weights"], one_process, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        assert each["weights"] == seen[0]["weights"]


def test_the_others_go_on(train, one_process, tmp_path):
    """Without the one whom all would have met."""
    ended, seen = train(0, "7")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 3])
    assert "rank 0 (process " in ended.stderr
    assert "was killed by signal 9 (SIGKILL); 3 ranks are left\n" in ended.stderr
    assert "the job goes on with 3 of 4 ranks after " in ended.stderr
    # The state is whole, and may be saved.
    saved = keras.saving.load_model(tmp_path / "model.keras").get_weights()
    np.testing.assert_allclose(saved[0], one_process[0], rtol=0, atol=1e-9)


def test_one_rank_after_another_fails_by_mistakes_and_kills(train, one_process):
    ended, seen = train(1, "3!", 0, "9")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 3, 2])
    assert "ValueError: a mistake of this rank alone" in ended.stderr


def test_two_die_at_once(train, one_process):
    ended, seen = train(0, "5", 2, "5")
    assert ended.returncode == 0, ended.stderr
    assert seen[0]["sizes"] in ([4, 2], [4, 3, 2])
    check(seen, one_process, seen[0]["sizes"])


def test_another_one_dies_while_they_join(train, one_process):
    """They do not wait for it until the time for joining is over."""
    since = time.monotonic()
    ended, seen = train(1, "5", 2, "5?")
    assert time.monotonic() - since < 50
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 2])


def test_one_that_is_stopped_is_killed(train, one_process):
    ended, seen = train(3, "6-", "--elastic-timeout=2")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 2])
    assert (
        "has not left the job that failed for 2 s (--elastic-timeout)" in ended.stderr
    )


@pytest.mark.parametrize(
    "words, why",
    [
        ((2, "4"), "3 are fewer than --min-np 4"),
        ((2, "4", "--reset-limit=0"), "--reset-limit 0 is reached"),
    ],
)
def test_too_few_are_the_end(train, words, why):
    minimum = 2 if "--reset-limit=0" in words else 4
    ended, seen = train(*words, minimum=minimum)
    assert ended.returncode == 128 + signal.SIGKILL
    assert seen == []
    assert f"the job does not go on: rank 2 has ended, and {why}" in ended.stderr
    assert ended.stderr.rstrip().endswith("it was killed by signal 9 (SIGKILL)")


NOT_ELASTIC = """
import os, signal
import tensorflow as tf
import keras_hvd
keras_hvd.init()
if keras_hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
keras_hvd.allreduce(tf.ones(3))
"""


def test_a_script_that_does_not_go_on_ends(train, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NOT_ELASTIC)
    ended, _ = train(script=script)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "was killed by signal 9 (SIGKILL)" in ended.stderr.splitlines()[-1]


def test_an_interrupt_ends_it(khvdrun, tmp_path):
    words = (sys.executable, SCRIPT, tmp_path, 3, "6-")
    with khvdrun.start("-np", 4, "--min-np", 2, *words) as running:
        for line in running.stderr:
            if "3 ranks are left" in line:
                break
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "options, why",
    [
        (("--min-np", "5"), "--min-np 5 is more than -np 4"),
        (("--min-np", "0"), "'0' is not a number of processes"),
        (("--min-np", "2", "--status", "0"), "does not go with --status"),
        (("--min-np", "2", "--max-np", "6"), "join later"),
    ],
)
def test_what_is_refused(khvdrun, options, why):
    ended: subprocess.CompletedProcess = khvdrun.run("-np", 4, *options, "true")
    assert ended.returncode == 2
    assert why in ended.stderr
