"""elastic.fit with commits within an epoch: those that are left have the rest of it."""

import json
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "elastic_rest.py"
EPOCHS, FILES = 4, 6


@pytest.fixture
def train(khvdrun, tmp_path):
    """Runs the script on three ranks; returns what ranks saw, and the steps of each."""

    def run(rows, source, *deaths, again=False, **variables):
        for number, of_file in enumerate(np.split(np.arange(rows)[: rows // 6 * 6], 6)):
            (tmp_path / f"{number}.txt").write_text("\n".join(map(str, of_file)))
        options = ("--blacklist-cooldown-range", 0, 0) if again else ()
        ended = khvdrun.run(
            *("-np", 3, "--min-np", 1, *options),
            *(sys.executable, SCRIPT, tmp_path, rows, source, *deaths),
            timeout=200,
            env=variables,
        )
        assert ended.returncode == 0, ended.stderr
        seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
        steps = {
            int(each.stem): {
                tuple(step): found
                for step, found in map(json.loads, each.read_text().splitlines())
            }
            for each in tmp_path.glob("*.steps")
        }
        return sorted(seen, key=lambda each: each["rank"]), steps

    return run


def one_process(rows, steps, members):
    """The weights of plain Keras after steps of the same rows, and epochs' losses.

    A loss is that of the rows which an epoch's `members` had in its steps.
    """
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        rng = np.random.default_rng(7)
        x, y = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 1))
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        losses = [[] for _ in range(EPOCHS)]
        for (epoch, *_), by_rank in steps.items():
            error = (np.ravel(model(x)) - np.ravel(y)) ** 2
            for rank in members[epoch] & by_rank.keys():
                losses[epoch].extend(error[by_rank[rank]])
            # A row that several ranks have is one of the step all the same.
            step = sorted({row for rows in by_rank.values() for row in rows})
            model.train_on_batch(x[step], y[step])
        return [each.numpy() for each in model.weights], [*map(np.mean, losses)]
    finally:
        keras.config.set_floatx(floatx)


def check(rows, seen, steps, undone):
    """Each row is in one step of each epoch, and these make the weights and losses."""
    [first, *_] = seen
    order = [step for step in steps[first["pid"]] if step not in undone]
    made = {
        step: {rank: own[step] for rank, own in steps.items() if step in own}
        for step in order
    }
    for epoch in range(EPOCHS):
        of_steps = [by_rank for step, by_rank in made.items() if step[0] == epoch]
        counts = Counter(
            row for by_rank in of_steps for row in {*sum(by_rank.values(), [])}
        )
        assert counts == Counter(range(rows))
        for by_rank in of_steps[:-1]:
            shared = Counter(sum(by_rank.values(), []))
            assert {*shared.values()} == {1}
    last = {step[0]: by_rank for step, by_rank in made.items()}
    members = {epoch: {*by_rank} for epoch, by_rank in last.items()}
    weights, losses = one_process(rows, made, members)
    hooks = [[f"epoch {epoch}", f"epoch {epoch}'s end"] for epoch in range(EPOCHS)]
    for each in seen:
        for found, expected in zip(each["weights"], weights, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(each["loss"], losses, rtol=0, atol=1e-9)
        assert each["epochs"] == [*range(EPOCHS)]
        assert each["hooks"] == ["train", *sum(hooks, []), "train's end"]


@pytest.mark.parametrize(
    "rows, source, dies", [(97, "arrays", 2), (97, "arrays", 0), (96, "files", 1)]
)
def test_the_others_have_the_rest_of_the_epoch(train, rows, source, dies):
    """The last commit was before step 4, so that this one is undone."""
    seen, steps = train(rows, source, dies, "1.5")
    assert [each["started as"] for each in seen] == [*{0, 1, 2} - {dies}]
    assert [each["jobs"] for each in seen] == [[3, 2]] * 2
    assert [each["begun"] for each in seen] == [[*range(EPOCHS)]] * 2
    check(rows, seen, steps, undone={(1, 3, 4)})


def test_one_epoch_loses_a_rank_twice(train):
    """Steps of the rest are counted from 0, and the last commit is before step 6."""
    seen, steps = train(105, "arrays", 2, "1.5", 1, "1.7")
    assert [each["jobs"] for each in seen] == [[3, 2, 1]]
    check(105, seen, steps, undone={(1, 3, 4), (1, 2, 6)})


@pytest.mark.parametrize("rows, source", [(97, "arrays"), (96, "files")])
def test_a_rank_that_comes_has_its_share_of_the_rest(train, rows, source):
    seen, steps = train(rows, source, 1, "1.5", again=True, MEMBERS="3")
    assert [each["started as"] for each in seen] == [0, 2, 1]
    *others, new = seen
    assert [each["jobs"] for each in others] == [[3, 2, 3]] * 2
    assert [each["begun"] for each in others] == [[*range(EPOCHS)]] * 2
    # It has made a step by itself before.
    assert new["jobs"] == [1, 3]
    assert new["begun"] == [2, 3]
    assert min(steps[new["pid"]]) == (2, 3, 0)
    check(rows, seen, steps, undone={(1, 3, 4)})
