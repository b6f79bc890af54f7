"""Searches for hyperparameters with Optuna: each trial trains on all ranks.

Rank 0 alone asks the study, and tells it the results; the others get what it was
answered. The study is a file, so that a search that is started again goes on.

khvdrun -np 2 python examples/optuna_search.py
"""

import argparse
from typing import Any

import keras
import optuna
from sklearn.datasets import load_digits

import keras_hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--trials", type=int, default=20, help="in all (%(default)s)")
parser.add_argument("--epochs", type=int, default=10, help="of a trial (%(default)s)")
parser.add_argument("--study", default="sqlite:///study.db", help="(%(default)s)")
arguments = parser.parse_args()

keras_hvd.init()
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16
train = keras_hvd.data.part(images[:1400], labels[:1400])
test = keras_hvd.data.part(images[1400:], labels[1400:], drop_remainder=False)


def ask(study: optuna.Study) -> tuple[optuna.Trial, dict[str, Any]]:
    """A new trial, and its hyperparameters."""
    trial = study.ask()
    settings = {
        "units": trial.suggest_int("units", 8, 128, log=True),
        "rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True),
        "activation": trial.suggest_categorical("activation", ["relu", "tanh"]),
    }
    return trial, settings


class Reports(keras.callbacks.Callback):
    """Tells the study of each epoch, and stops a trial that is not worth going on."""

    def __init__(self, trial: optuna.Trial):
        super().__init__()
        self.trial = trial
        self.is_pruned = False

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["val_accuracy"], epoch)
        self.is_pruned = self.trial.should_prune()
        # All ranks stop when one does.
        self.model.stop_training = self.is_pruned


def fit(settings: dict[str, Any], *callbacks: keras.callbacks.Callback) -> float:
    """Trains a model with all ranks; returns its accuracy over the tests of all."""
    keras.utils.clear_session()
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(settings["units"], settings["activation"]),
            keras.layers.Dense(10, "softmax"),
        ]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(settings["rate"]))
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        *train,
        batch_size=64 // size,
        epochs=arguments.epochs,
        validation_data=test,
        verbose=0,
        callbacks=[
            keras_hvd.callbacks.BroadcastGlobalVariables(0),
            keras_hvd.callbacks.MetricAverage(),
            *callbacks,
        ],
    )
    return history.history["val_accuracy"][-1]


if rank == 0:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=arguments.study,
        study_name="search",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
        load_if_exists=True,
    )
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    left = arguments.trials - len(study.get_trials(states=states))
    for _ in range(left):
        trial, settings = ask(study)
        keras_hvd.broadcast_object(settings)
        reports = Reports(trial)
        accuracy = fit(settings, reports)
        if reports.is_pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, accuracy)
        print(f"Trial {trial.number}: {accuracy:.4f} with {settings}", flush=True)
    keras_hvd.broadcast_object(None)
    best = study.best_trial
    print(f"Best of {len(study.trials)}: {best.value:.4f} with {best.params}")
else:
    while (settings := keras_hvd.broadcast_object(None)) is not None:
        fit(settings)
