"""BroadcastGlobalVariables, and the common behaviour of keras_hvd's callbacks."""

import inspect
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.callbacks import BroadcastGlobalVariables, MetricAverage

X = np.linspace(-1, 1, 36, dtype="float32").reshape(12, 3)
Y = X[:, :2]


def distributed(rate: float = 0.1) -> keras.optimizers.Optimizer:
    return keras_hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))


def fit(model, *callbacks, verbose=0, **kwargs):
    return model.fit(
        X,
        Y,
        batch_size=4,
        verbose=verbose,
        callbacks=[BroadcastGlobalVariables(0), *callbacks],
        **kwargs,
    )


class Snapshots(keras.callbacks.Callback):
    """The weights at the end of the first step, and counts of batches and epochs."""

    def __init__(self):
        super().__init__()
        self.weights = None
        self.batches = 0
        self.epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.weights is None:
            self.weights = self.model.get_weights()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


class StopsAt(keras.callbacks.Callback):
    def __init__(self, batch=None, epoch=None):
        super().__init__()
        self.batch, self.epoch = batch, epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.model.stop_training = True


class StopsAtEpoch(keras.callbacks.Callback):
    """Has no hook between steps."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize("root", [0, -1], ids=["first", "last"])
def test_weights_and_optimizer_are_the_roots(
    root, rank, size, make_linear, equal_on_all_ranks
):
    root = root % size
    keras.utils.set_random_seed(rank)
    model = make_linear(distributed(0.1 * (rank + 1)))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(10 * rank)
    started = keras_hvd.broadcast_object(model.get_weights(), root)
    model.fit(
        X * 0,
        Y * 0,
        verbose=0,
        callbacks=[BroadcastGlobalVariables(root)],
        batch_size=4,
    )
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in model.optimizer.variables])
    assert int(model.optimizer.iterations) == 10 * root + 3
    np.testing.assert_allclose(model.optimizer.learning_rate, 0.1 * (root + 1))
    np.testing.assert_array_equal(model.get_weights()[0], started[0])


@pytest.mark.parametrize("which", ["root", "last"])
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_optimizer_that_only_one_rank_has_built(
    run_eagerly, which, rank, size, make_linear, equal_on_all_ranks
):
    model = make_linear(distributed(), run_eagerly=run_eagerly)
    if rank == (0 if which == "root" else size - 1):
        model.optimizer.build(model.trainable_variables)
        for slot in model.optimizer.momentums:
            slot.assign(slot + 1)
    fit(model)
    assert equal_on_all_ranks([v.numpy() for v in model.optimizer.variables])


@pytest.mark.parametrize(
    ("optimizer", "steps_per_execution"),
    [("sgd", 1), ("sgd", 2), ("schedule_free", 1), ("mixed_precision", 2)],
)
def test_model_without_input_shape(
    optimizer, steps_per_execution, rank, equal_on_all_ranks, difference
):
    """Its variables are broadcast when they are created, before the first step."""
    keras.utils.set_random_seed(rank)
    inner = {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "schedule_free": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
        "mixed_precision": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1)
        ),
    }[optimizer]()
    model = keras.Sequential(
        [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)]
    )
    model.compile(
        keras_hvd.DistributedOptimizer(inner),
        "mse",
        steps_per_execution=steps_per_execution,
    )
    seen = Snapshots()
    fit(model, seen, shuffle=False)
    assert equal_on_all_ranks(seen.weights)
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in model.optimizer.variables])
    # The same as if it had been built: the first step, too, was made from rank 0's.
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    built = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    kind = type(inner).from_config(inner.get_config())
    built.compile(kind, "mse")
    built.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    assert difference(model.get_weights(), built.get_weights()) < 1e-5


def test_optimizers_that_a_scaled_one_chooses_when_it_is_built(
    rank, equal_on_all_ranks, recwarn
):
    """The first step waits for the variables there too."""
    keras.utils.set_random_seed(rank)
    inner = keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD(0.1))
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras_hvd.DistributedOptimizer(inner)),
        "mse",
    )
    fit(model)
    assert equal_on_all_ranks(model.get_weights())
    assert not [each for each in recwarn if "not shared" in str(each.message)]


class WithUnusedLayer(keras.Model):
    """Never built as a whole, however long it trains."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = keras.layers.Dense(2), keras.layers.Dense(2)

    def call(self, inputs):
        return self.used(inputs)


@pytest.mark.filterwarnings("ignore:.build..` was called")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("built", [False, True], ids=["model", "optimizer"])
def test_model_with_a_layer_that_is_never_built(
    built, run_eagerly, rank, equal_on_all_ranks
):
    """Its existing variables are broadcast each time that `fit` begins."""
    keras.utils.set_random_seed(rank)
    model = WithUnusedLayer()
    model(X[:1])
    model.compile(distributed(0.0), "mse", run_eagerly=run_eagerly)
    if built:
        model.optimizer.build(model.trainable_variables)
    for _ in range(2):
        started = keras_hvd.broadcast_object(model.get_weights(), 0)
        fit(model)
        np.testing.assert_array_equal(model.get_weights()[0], started[0])
        assert equal_on_all_ranks(model.get_weights())
        model.used.kernel.assign_add(model.used.kernel + rank)


class WithTape(keras.Sequential):
    """Reduces in its step, and so has a plain optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        tape = keras_hvd.DistributedGradientTape(tape)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def without_shape(kind: type[keras.Sequential] = keras.Sequential) -> keras.Model:
    return kind([keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)], name="late")


def grown() -> keras.Model:
    model = WithUnusedLayer()
    model.unused.build((None, 2))
    model.unused.trainable = False
    return model


class Growing(WithUnusedLayer):
    def train_step(self, data):
        x, y = data
        layer = self.unused if int(self.optimizer.iterations) else self.used
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layer(x) - y) ** 2)
        weights = layer.trainable_weights
        gradients = keras_hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for gradient, weight in zip(gradients, weights):
            weight.assign_sub(0.1 * gradient)
        self.optimizer.iterations.assign_add(1)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore:.build..` was called")
@pytest.mark.parametrize(
    ("make", "run_eagerly", "steps"),
    [
        (lambda: without_shape(WithTape), False, 1),
        (lambda: without_shape(WithTape), False, 3),
        (lambda: without_shape(WithTape), True, 1),
        (without_shape, True, 1),
        (grown, True, 1),
        (Growing, True, 1),
    ],
    ids=["tape", "tape_steps", "tape_eager", "eager", "grown", "growing"],
)
def test_variables_that_are_made_too_late(
    make, run_eagerly, steps, rank, several_ranks, equal_on_all_ranks, recwarn
):
    """All go on from the root's after that step, and one line says so."""
    keras.utils.set_random_seed(rank)
    model = make()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if type(model).train_step is keras.Model.train_step:
        optimizer = keras_hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", run_eagerly=run_eagerly, steps_per_execution=steps)
    seen = Snapshots()
    fit(model, seen, epochs=2, validation_data=(X, Y))
    assert equal_on_all_ranks(seen.weights)
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in optimizer.variables])
    lines = [str(each.message) for each in recwarn if "not shared" in str(each.message)]
    expected = 0 if rank else 2 if isinstance(model, Growing) else 1
    assert len(lines) == expected
    assert all(model.name in line and "/kernel" in line for line in lines)


@pytest.mark.filterwarnings("ignore:.build..` was called")
def test_variables_that_validation_makes(rank, several_ranks, equal_on_all_ranks):
    """No step has used them yet."""
    keras.utils.set_random_seed(rank)
    model = WithUnusedLayer()
    model.test_step = lambda data: {"loss": tf.reduce_mean(model.unused(data[0]))}
    model(X[:1])
    model.compile(distributed(), "mse")
    fit(model, validation_data=(X, X))
    assert len(model.get_weights()) == 4
    assert equal_on_all_ranks(model.get_weights())


def test_random_layers_differ_between_ranks_and_repeat(rank, size):
    def train() -> np.ndarray:
        keras.utils.clear_session()
        keras.utils.set_random_seed(100 * rank)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
        )
        model.compile(distributed(), "mse")
        fit(model)
        return model.layers[0].seed_generator.state.numpy()

    state = train()
    np.testing.assert_array_equal(state, train())
    states = keras_hvd.allgather_object(state)
    for other, theirs in enumerate(states):
        np.testing.assert_array_equal(theirs - states[0], [other, 0])


def test_models_that_differ(rank, several_ranks, raises_on_all_ranks):
    layers = [keras.Input((3,))] + [keras.layers.Dense(2)] * (rank == 0)
    model = keras.Sequential([*layers, keras.layers.Dense(2, name=f"last_{rank}")])
    model.compile(distributed(), "mse")
    with pytest.raises(RuntimeError) as error:
        fit(model)
    raises_on_all_ranks(error.value, "differ between ranks", "last_0", "last_1")


@keras.saving.register_keras_serializable("tests")
class WithTwoParts(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.first = keras.layers.Dense(4)
        self.second = keras.Sequential([keras.layers.Dense(2)])

    def call(self, x):
        return self.second(self.first(x))


def without_input_shape(kind):
    if kind is WithTwoParts:
        return WithTwoParts()
    return keras.Sequential(
        [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )


@pytest.mark.parametrize("kind", [keras.Sequential, WithTwoParts])
@pytest.mark.parametrize("suffix", ["keras", "h5", None])
def test_model_that_one_rank_has_loaded(
    suffix, kind, rank, size, tmp_path, equal_on_all_ranks
):
    """The other ranks' models have no variables yet, and continue with its weights."""
    if suffix == "h5" and kind is WithTwoParts:
        pytest.skip("Keras saves no such model there")
    keras.utils.set_random_seed(rank)
    model = without_input_shape(kind)
    started = None
    if rank == size - 1:
        model(X)
        started = model.get_weights()
        if suffix is not None:
            model.save(tmp_path / f"model.{suffix}")
            model = keras.models.load_model(tmp_path / f"model.{suffix}")
    started = keras_hvd.broadcast_object(started, size - 1)
    model.compile(distributed(0.0), "mse")
    model.fit(X, Y, verbose=0, callbacks=[BroadcastGlobalVariables(size - 1)])
    np.testing.assert_array_equal(model.get_weights()[0], started[0])
    assert equal_on_all_ranks(model.get_weights())


class WithoutShape(keras.Sequential):
    def get_build_config(self):
        return None


def test_model_that_only_some_ranks_built(rank, several_ranks, raises_on_all_ranks):
    """The others cannot build it, since nothing tells them the input."""
    model = WithoutShape([keras.layers.Dense(2)])
    if rank == 0:
        model.build((None, 3))
    model.compile(distributed(), "mse")
    with pytest.raises(RuntimeError) as error:
        fit(model)
    raises_on_all_ranks(error.value, "rank 0", "rank 1", "model.build(")


def test_root_that_is_no_rank(size, several_ranks, make_linear):
    with pytest.raises(ValueError, match=f"root_rank={size}"):
        make_linear(distributed()).fit(
            X, Y, verbose=0, callbacks=[BroadcastGlobalVariables(size)]
        )


def test_roots_that_differ(rank, size, several_ranks, make_linear, raises_on_all_ranks):
    """Also where the last rank's is no rank at all."""
    for root in (1, size, "0"):
        callback = BroadcastGlobalVariables(root if rank == size - 1 else 0)
        with pytest.raises(ValueError) as error:
            make_linear(distributed()).fit(X, Y, verbose=0, callbacks=[callback])
        raises_on_all_ranks(
            error.value, f"is 0 on rank 0, and {root!r} on rank {size - 1}"
        )


@pytest.mark.parametrize(
    ("given", "shown", "default"),
    [
        ({"name": "mine"}, "name='mine'", "name=None"),
        ({"op": keras_hvd.Sum}, "op=Sum", "op=Average"),
        ({"groups": 2}, "groups=2", "groups=None"),
        ({"backward_passes_per_step": 2}, "per_step=2", "per_step=1"),
    ],
    ids=["name", "op", "groups", "passes"],
)
def test_optimizers_that_differ(
    given, shown, default, rank, several_ranks, make_linear, raises_on_all_ranks
):
    arguments = given if rank == 0 else {}
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(), **arguments)
    with pytest.raises(RuntimeError) as error:
        fit(make_linear(optimizer))
    raises_on_all_ranks(
        error.value, f"{shown} on rank 0, and ", f"{default} on rank 1", "'sgd'"
    )


def test_what_is_no_variable_cannot_be_local():
    with pytest.raises(TypeError, match="must be a variable; got 3"):
        BroadcastGlobalVariables(0, local_variables=[3])
    with pytest.raises(TypeError, match="must be a variable; got 'w'"):
        BroadcastGlobalVariables(0, device="/gpu:7").register_local_var("w")


def test_plain_optimizer_is_refused(several_ranks, make_linear):
    with pytest.raises(RuntimeError, match="SGD 'plain' is not distributed"):
        fit(make_linear(keras.optimizers.SGD(0.1, name="plain")))


def test_copied_model_is_refused(several_ranks, make_linear):
    model = make_linear(distributed())
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    with pytest.raises(RuntimeError, match="keras_hvd.load_model"):
        fit(clone)


class TwoOptimizers(keras.Sequential):
    def compile(self, first, second):
        super().compile()
        self.first, self.others = first, {"second": second}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        kernel, bias = tape.gradient(loss, self.trainable_weights)
        self.first.apply([kernel], [self.trainable_weights[0]])
        self.others["second"].apply([bias], [self.trainable_weights[1]])
        return {"loss": loss}


def test_model_with_optimizers_of_its_own(rank, several_ranks, equal_on_all_ranks):
    def model(second):
        made = TwoOptimizers([keras.Input((3,)), keras.layers.Dense(2)])
        made.compile(distributed(0.1 * (rank + 1)), second)
        return made

    fit(trained := model(distributed()))
    assert equal_on_all_ranks(trained.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in trained.first.variables])
    with pytest.raises(RuntimeError, match="'plain' is not distributed"):
        fit(model(keras.optimizers.SGD(0.1, name="plain")))


def test_rank_0_alone_prints(rank, make_linear, capsys):
    fit(make_linear(distributed()), verbose=1)
    assert ("loss" in capsys.readouterr().out) == (rank == 0)


class Board(keras.callbacks.TensorBoard):
    """Writes when it is given the model, and never after; needs no tensorboard."""


for hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(Board, hook, getattr(keras.callbacks.Callback, hook))


@pytest.mark.parametrize("own", [False, True], ids=["default", "every_rank"])
def test_rank_0_alone_writes(own, rank, make_linear, tmp_path):
    writers = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        Board(tmp_path / "board"),
    ]
    for writer in writers:
        writer.every_rank = own
    fit(make_linear(distributed()), *writers, validation_data=(X, Y))
    written = {path.name for path in pathlib.Path(tmp_path).iterdir()}
    expected = {"model.keras", "log.csv", "board"} if own or rank == 0 else set()
    assert written == expected


def test_tensorboard_must_come_later(several_ranks, make_linear, tmp_path):
    board = Board(tmp_path / "board")
    with pytest.raises(ValueError, match="before Board .a TensorBoard"):
        make_linear(distributed()).fit(
            X, Y, verbose=0, callbacks=[board, BroadcastGlobalVariables(0)]
        )


class Interrupted(Exception):
    pass


class InterruptsAt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_backup_of_rank_0_restores_all(
    first, rank, make_linear, tmp_path, equal_on_all_ranks
):
    """Each rank has its own disk here; rank 0's alone holds a backup."""

    def train(*callbacks):
        keras.utils.clear_session()
        model = make_linear(distributed())
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        ours = BroadcastGlobalVariables(0)
        order = [ours, backup] if first else [backup, ours]
        seen = Snapshots()
        model.fit(X, Y, epochs=5, verbose=0, callbacks=[*order, seen, *callbacks])
        return model, seen

    with pytest.raises(Interrupted):
        train(InterruptsAt())
    assert (tmp_path / "backup").exists() == (rank == 0)
    model, seen = train()
    assert seen.epochs == 3
    assert int(model.optimizer.iterations) == 5
    assert equal_on_all_ranks(model.get_weights())
    assert equal_on_all_ranks([v.numpy() for v in model.optimizer.variables])


def test_stopping_in_an_epoch_on_one_rank(rank, size, make_linear, equal_on_all_ranks):
    # The others have no callback that is run between steps.
    model = make_linear(distributed())
    own = [StopsAt(batch=1)] if rank == size - 1 else []
    fit(model, *own, epochs=3)
    assert model.optimizer.iterations == 2
    assert equal_on_all_ranks(model.get_weights())


def test_stopping_after_an_epoch_on_one_rank(rank, size, make_linear):
    seen = Snapshots()
    own = [StopsAtEpoch()] if rank == size - 1 else []
    fit(make_linear(distributed()), *own, seen, epochs=3)
    assert seen.epochs == 1


class Probe(keras.callbacks.Callback):
    """The moving mean as validation and the next callback find it."""

    def __init__(self):
        super().__init__()
        self.before, self.in_validation, self.after = None, None, None

    def _mean(self):
        return self.model.layers[0].moving_mean.numpy()

    def on_train_batch_end(self, batch, logs=None):
        self.before = self._mean()

    def on_test_batch_begin(self, batch, logs=None):
        self.in_validation = self._mean()

    def on_epoch_end(self, epoch, logs=None):
        self.after = self._mean()


@pytest.mark.parametrize("validates", [False, True])
def test_moving_statistics_are_averaged(validates, rank, equal_on_all_ranks):
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )
    model.compile(distributed(), "mse")
    probe = Probe()
    model.fit(
        X + rank,
        Y,
        verbose=0,
        validation_data=(X, Y) if validates else None,
        callbacks=[BroadcastGlobalVariables(0), probe],
    )
    mean = np.mean(keras_hvd.allgather_object(probe.before), axis=0)
    np.testing.assert_allclose(probe.after, mean, rtol=1e-6)
    if validates:
        np.testing.assert_allclose(probe.in_validation, mean, rtol=1e-6)
    assert equal_on_all_ranks(model.get_weights())


def test_statistics_of_renormalization_are_averaged(rank, equal_on_all_ranks):
    if "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters:
        pytest.skip("this Keras has none")
    layer = keras.layers.BatchNormalization(momentum=0.5, renorm=True)
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(distributed(), "mse")
    model.fit(X + rank, X, verbose=0, callbacks=[BroadcastGlobalVariables(0)])
    assert equal_on_all_ranks(model.get_weights())


def test_synchronized_statistics_are_warned_of(rank, several_ranks, recwarn):
    layer = keras.layers.BatchNormalization(synchronized=True, name="sync")
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
    model.compile(distributed(), "mse")
    fit(model, MetricAverage())
    found = [each for each in recwarn if "sync: BatchNorm" in str(each.message)]
    assert len(found) == (rank == 0)


def test_callbacks_outside_of_a_list(several_ranks, make_linear):
    with pytest.raises(RuntimeError, match="CallbackList"):
        BroadcastGlobalVariables(0).set_model(make_linear(distributed()))


def adapted(layer: keras.layers.Layer, data: np.ndarray) -> keras.Model:
    """A model whose first layer was adapted to `data`."""
    layer.adapt(data)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
    model.compile(distributed(0.0), "mse")
    return model


def test_statistics_of_data_are_those_of_the_root():
    rank = keras_hvd.rank()
    model = adapted(keras.layers.Normalization(), X * (1 + rank) + rank)
    fit(model)
    of_root = (X - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(model.layers[0](X), of_root, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("keras_hvd.size() == 1")
def test_bins_of_other_data_are_refused():
    layer = keras.layers.Discretization(num_bins=4, output_mode="int")
    model = adapted(layer, X + keras_hvd.rank())
    with pytest.raises(RuntimeError, match="is adapted to other data on rank 0"):
        fit(model)


@pytest.mark.skipif("keras_hvd.size() == 1")
def test_vocabularies_of_other_data_are_refused():
    layer = keras.layers.IntegerLookup()
    layer.adapt(np.arange(5) + keras_hvd.rank())
    inputs = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Embedding(9, 2)(layer(inputs))
    model = keras.Model(inputs, keras.layers.Flatten()(hidden))
    model.compile(distributed(), "mse")
    with pytest.raises(RuntimeError, match="is adapted to other data on rank 0"):
        model.fit(
            np.ones((4, 3), "int64"),
            np.ones((4, 6)),
            verbose=0,
            callbacks=[BroadcastGlobalVariables(0)],
        )
