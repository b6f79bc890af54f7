"""keras_hvd.keras_tuner: plain KerasTuner's searches, with trials on all ranks."""

import json
import shutil
import tempfile
from pathlib import Path

import keras
import keras_tuner
import pytest
from keras_tuner import errors

import keras_hvd
from keras_hvd.keras_tuner import distribute

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:keras_tuner")

BATCH = 12
# Bayesian: the second is by the score of the first. Hyperband: trials go on from files.
TUNERS = {
    "random": (keras_tuner.RandomSearch, {"max_trials": 2, "executions_per_trial": 2}),
    "bayesian": (
        keras_tuner.BayesianOptimization,
        {"max_trials": 2, "num_initial_points": 1},
    ),
    "grid": (keras_tuner.GridSearch, {"max_trials": 2}),
    "hyperband": (keras_tuner.Hyperband, {"max_epochs": 2, "factor": 2}),
}


def build(hp, distributed=True, run_eagerly=True):
    layers = [keras.Input((3,))]
    if hp.Boolean("hidden"):
        with hp.conditional_scope("hidden", [True]):
            units = hp.Int("units", 2, 8)
        layers.append(
            keras.layers.Dense(
                units, "tanh", kernel_initializer=keras.initializers.GlorotNormal(5)
            )
        )
    last = keras.initializers.GlorotNormal(6)
    layers.append(keras.layers.Dense(2, kernel_initializer=last))
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(hp.Float("rate", 1e-3, 1e-1, sampling="log"))
    if distributed:
        optimizer = keras_hvd.DistributedOptimizer(optimizer)
    # Small as they are, to compile them would take most of the time.
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=run_eagerly)
    return model


def build_plain(hp):
    return build(hp, distributed=False)


@pytest.fixture
def folder():
    """One for all ranks, which rank 0 removes."""
    made = tempfile.mkdtemp() if keras_hvd.rank() == 0 else None
    yield Path(keras_hvd.broadcast_object(made))
    keras_hvd.barrier()
    if made is not None:
        shutil.rmtree(made)


@pytest.fixture
def data(points, part_of_batches, size):
    """The arguments of `search`: for one process, and for this rank."""
    x, y = points
    held_x, held_y = x[:8] + 1, y[:8]

    def arguments(part, batch, held):
        return {
            "x": part(x),
            "y": part(y),
            "validation_data": (held(held_x), held(held_y)),
            "batch_size": batch,
            "epochs": 2,
            "shuffle": False,
            "verbose": 0,
        }

    rank = keras_hvd.rank()
    whole = arguments(lambda rows: rows, BATCH, lambda rows: rows)
    # Unequal parts of the rows to validate on: 8 rows, of which rank 0 has more.
    cuts = [0, *(8 - each for each in range(size - 1, 0, -1)), 8]
    own = arguments(
        lambda rows: part_of_batches(rows, BATCH // size),
        BATCH // size,
        lambda rows: rows[cuts[rank] : cuts[rank + 1]],
    )
    return whole, own


def make(folder, kind=keras_tuner.RandomSearch, model=build, **arguments):
    arguments = {"max_trials": 2, **arguments} if "Random" in str(kind) else arguments
    return distribute(kind)(
        model, objective="val_loss", seed=7, directory=folder, **arguments
    )


def trials_in(folder):
    """The trials that are in a project's folder, and its oracle."""
    project = folder / "untitled_project"
    files = sorted(project.glob("trial_*/trial.json"))
    return (
        [json.loads(each.read_text()) for each in files],
        json.loads((project / "oracle.json").read_text()),
    )


def written(folder):
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


@pytest.mark.parametrize("kind", TUNERS)
def test_as_one_process(kind, folder, data, rank, difference):
    if kind == "bayesian":
        pytest.importorskip("scipy")
    whole, own = data
    tuner_class, arguments = TUNERS[kind]
    tuner = make(folder / "ranks", tuner_class, **arguments)
    tuner.search(**own)
    best = tuner.get_best_models()[0].get_weights()
    seen = [
        (each.trial_id, each.score, each.status, each.hyperparameters.values)
        for each in tuner.oracle.get_best_trials(20)
    ]
    assert all(seen == others for others in keras_hvd.allgather_object(seen))
    problems = []
    if rank == 0:
        plain = tuner_class(
            build_plain,
            objective="val_loss",
            seed=7,
            directory=folder / "plain",
            **arguments,
        )
        plain.search(**whole)
        problems = compare(folder / "ranks", folder / "plain")
        best_of_plain = plain.get_best_models()[0].get_weights()
    else:
        best_of_plain = None
    assert keras_hvd.broadcast_object(problems) == []
    assert difference(best, keras_hvd.broadcast_object(best_of_plain)) < 1e-6


def compare(ours, plain):
    """Compares the results that two searches left."""
    ours_trials, ours_oracle = trials_in(ours)
    plain_trials, plain_oracle = trials_in(plain)
    problems = []
    if written(ours) != written(plain):
        problems.append((written(ours), written(plain)))
    for name in ("start_order", "end_order", "tried_so_far", "hyperparameters", "seed"):
        one, other = ours_oracle[name], plain_oracle[name]
        if name == "tried_so_far":
            one, other = sorted(one), sorted(other)
        if one != other:
            problems.append((name, one, other))
    assert len(ours_trials) == len(plain_trials) > 1
    for one, other in zip(ours_trials, plain_trials, strict=True):
        if abs(one["score"] - other["score"]) > 1e-6:
            problems.append(("score", one["score"], other["score"]))
        for name in ("hyperparameters", "status", "best_step"):
            if one[name] != other[name]:
                problems.append((name, one[name], other[name]))
    return problems


def test_a_search_goes_on(folder, data, rank):
    make(folder, max_trials=1).search(**data[1])
    again = make(folder, max_trials=2)
    assert again.remaining_trials == 1
    assert len(again.oracle.trials) == 1
    again.search(**data[1])
    if rank == 0:
        trials, oracle = trials_in(folder)
        assert oracle["end_order"] == ["0", "1"]
        assert len({str(each["hyperparameters"]["values"]) for each in trials}) == 2
    keras_hvd.barrier()
    # And anew.
    anew = make(folder, max_trials=1, overwrite=True)
    assert anew.remaining_trials == 1
    keras_hvd.barrier()
    assert not list(folder.glob("untitled_project/*"))


class Own(keras_tuner.RandomSearch):
    """Trains without `Tuner.run_trial`, and returns this rank's measurements."""

    def run_trial(self, trial, x, y, **kwargs):
        model = self.hypermodel.build(trial.hyperparameters)
        model.fit(x, y, verbose=0, callbacks=kwargs["callbacks"])
        return {"val_loss": float(keras_hvd.rank()), "is_best": 3}


def test_own_results_are_averaged(folder, data, size):
    tuner = make(folder, Own, max_trials=1)
    tuner.search(data[1]["x"], data[1]["y"])
    trial = tuner.oracle.get_trial("0")
    assert trial.score == (size - 1) / 2
    assert trial.metrics.get_best_value("is_best") == 3


class FailsOnLastRank:
    """Raises on the last rank in the first trial, where `place` says."""

    def __init__(self, place, error):
        self.place, self.error = place, error
        self.trials = 0

    def fail(self, place):
        if place == self.place and keras_hvd.rank() == keras_hvd.size() - 1:
            self.place = None
            raise self.error


class FailingModel(keras_tuner.HyperModel):
    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.searches = False

    def build(self, hp):
        if self.searches:
            self.fails.fail("build")
        return build(hp)

    def fit(self, hp, model, *args, callbacks, **kwargs):
        class Failing(keras.callbacks.Callback):
            def on_train_batch_end(_, batch, logs=None):
                self.fails.fail("step")

            def on_epoch_end(_, epoch, logs=None):
                self.fails.fail("epoch")

        history = model.fit(*args, callbacks=[*callbacks, Failing()], **kwargs)
        self.fails.fail("result")
        return history


@pytest.mark.parametrize("place", ["build", "step", "epoch", "result"])
def test_a_trial_fails_on_one_rank(place, folder, data, rank):
    model = FailingModel(FailsOnLastRank(place, ValueError(f"no {place} today")))
    tuner = make(folder, model=model, max_trials=2)
    model.searches = True
    tuner.search(**data[1])
    trials = [tuner.oracle.get_trial(each) for each in ("0", "1")]
    assert [each.status for each in trials] == ["FAILED", "COMPLETED"]
    assert f"no {place} today" in trials[0].message


def test_a_trial_is_tried_again(folder, data):
    model = FailingModel(FailsOnLastRank("step", ValueError("once")))
    tuner = make(folder, model=model, max_trials=1, max_retries_per_trial=1)
    tuner.search(**data[1])
    assert tuner.oracle.get_trial("0").status == "COMPLETED"


def test_a_trial_that_is_to_fail(folder, data):
    error = errors.FailedTrialError("too large")
    model = FailingModel(FailsOnLastRank("build", error))
    tuner = make(folder, model=model, max_trials=2, max_retries_per_trial=1)
    model.searches = True
    tuner.search(**data[1])
    assert tuner.oracle.get_trial("0").status == "FAILED"


@pytest.mark.parametrize("place", ["build", "step"])
def test_fatal_errors_end_the_search(place, folder, data, raises_on_all_ranks):
    error = errors.FatalValueError("never")
    model = FailingModel(FailsOnLastRank(place, error))
    tuner = make(folder, model=model)
    model.searches = True
    with pytest.raises(errors.FatalError) as raised:
        tuner.search(**data[1])
    raises_on_all_ranks(raised.value, "never")


def test_build_fails_when_created(folder, raises_on_all_ranks):
    model = FailingModel(FailsOnLastRank("build", ValueError("no such layer")))
    model.searches = True
    with pytest.raises((ValueError, RuntimeError)) as raised:
        make(folder, model=model)
    raises_on_all_ranks(raised.value, "no such layer")


def test_plain_optimizer(folder, data, several_ranks, raises_on_all_ranks):
    steps = []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            steps.append(batch)

        def __deepcopy__(self, memo):
            return self

    tuner = make(folder, model=build_plain)
    with pytest.raises(errors.FatalError) as raised:
        tuner.search(**data[1], callbacks=[Steps()])
    raises_on_all_ranks(raised.value, "would train without reducing gradients")
    assert steps == []


def test_different_arguments(rank, several_ranks, folder, data, raises_on_all_ranks):
    tuner = make(folder)
    with pytest.raises(ValueError) as raised:
        tuner.search(**{**data[1], "epochs": 2 + rank})
    raises_on_all_ranks(raised.value, "epochs is 2 on rank 0, and 3 on rank 1")


def test_rank_0_alone_prints(folder, data, rank, capsys):
    tuner = make(folder)
    tuner.search(**{**data[1], "verbose": 1})
    tuner.results_summary()
    tuner.search_space_summary()
    printed = capsys.readouterr().out
    assert ("Running Trial" in printed) == (rank == 0)
    assert bool(printed) == (rank == 0)


@pytest.mark.usefixtures("on_tensorflow")
def test_under_a_strategy(folder, data, rank):
    strategy = keras_hvd.Strategy()

    def build_in_scope(hp):
        with strategy.scope():
            return build(hp, distributed=False, run_eagerly=False)

    whole, _ = data
    # KerasTuner takes it as well.
    tuner = make(folder / "ranks", model=build_in_scope, distribution_strategy=strategy)
    tuner.search(**whole)
    problems = []
    if rank == 0:
        plain = keras_tuner.RandomSearch(
            build_plain,
            objective="val_loss",
            seed=7,
            max_trials=2,
            directory=folder / "plain",
        )
        plain.search(**whole)
        problems = compare(folder / "ranks", folder / "plain")
    assert keras_hvd.broadcast_object(problems) == []


@pytest.mark.usefixtures("on_tensorflow")
@pytest.mark.parametrize("by", ["argument", "scope"])
@pytest.mark.parametrize("kind", [keras_tuner.RandomSearch, keras_tuner.Hyperband])
def test_plain_tuner_under_a_strategy(
    kind, by, folder, data, rank, several_ranks, raises_on_all_ranks
):
    """It would search on each rank by itself; `distribute` is named instead."""
    strategy = keras_hvd.Strategy()

    def build_in_scope(hp):
        with strategy.scope():
            return build_plain(hp)

    whole, _ = data
    with pytest.raises(errors.FatalError) as raised:
        tuner = kind(
            build_in_scope if by == "scope" else build_plain,
            objective="val_loss",
            directory=folder / f"rank{rank}",
            distribution_strategy=strategy if by == "argument" else None,
        )
        tuner.search(**whole)
    raises_on_all_ranks(
        raised.value, f"keras_hvd.keras_tuner.distribute({kind.__name__})"
    )


def test_no_tuner_class(folder):
    with pytest.raises(TypeError, match="takes the class of a tuner"):
        distribute(build)


def test_kerastuners_own_parallel_search(folder, monkeypatch):
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "127.0.0.1")
    monkeypatch.setenv("KERASTUNER_ORACLE_PORT", "8000")
    monkeypatch.setenv("KERASTUNER_TUNER_ID", "tuner1")
    with pytest.raises(RuntimeError, match="unset KERASTUNER_ORACLE_IP"):
        make(folder)
