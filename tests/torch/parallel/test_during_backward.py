"""Gradients that leave while backward computes others, and where none may."""

import ctypes
import functools
import gc
import time
import warnings
import weakref

import keras
import numpy as np
import pytest
import torch

import keras_hvd
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.torch.gradients import during_backward
from keras_hvd.exceptions import MismatchError
from keras_hvd.job import native

LENGTH = 1 << 10  # A square of it is a bucket.


def tensors_reduced() -> int:
    counters = native.Counters(struct_size=ctypes.sizeof(native.Counters))
    assert native.engine().khvd_get_counters(ctypes.byref(counters)) == 0
    return counters.tensors


class Watches(torch.autograd.Function):
    """In backward, waits until the engine has reduced something."""

    @staticmethod
    def forward(context, value):
        context.before = tensors_reduced()
        return value.clone()

    @staticmethod
    def backward(context, grad):
        limit = time.monotonic() + 30
        while tensors_reduced() == context.before:
            assert time.monotonic() < limit, "nothing was reduced during backward"
            time.sleep(0.001)
        return grad


class Watching(keras.layers.Layer):
    def call(self, inputs):
        return Watches.apply(inputs)


def network(*middle, width=4):
    first, last = (
        keras.layers.Dense(width, use_bias=False, kernel_initializer="ones", name=name)
        for name in ("first", "last")
    )
    return keras.Sequential([keras.Input((width,)), first, *middle, last])


def distributed(**arguments):
    return keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments)


def train(model, optimizer, rank, width=4):
    model.compile(optimizer, "mse")
    model.train_on_batch(np.full((2, width), rank + 1.0), np.zeros((2, width)))


@pytest.fixture
def begun(groups, monkeypatch) -> list[str]:
    """The names of the groups of gradients that begin in backward, in their order."""
    names, plain = [], torch.Tensor.backward

    def backward(self, *arguments, **named):
        before = len(groups)
        try:
            plain(self, *arguments, **named)
        finally:
            names.extend(each.name for each in groups[before:])

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    return names


def test_the_last_layers_gradients_are_reduced_before_backward_ends(rank, size, begun):
    train(network(Watching(), width=LENGTH), distributed(), rank, LENGTH)
    assert begun == ["0", "1"]


@pytest.mark.parametrize("step", [1, 2], ids=lambda step: f"step {step}")
def test_the_engine_gets_the_gradients_themselves(step, rank, size, groups):
    model = network()
    model.compile(distributed(), "mse")
    for _ in range(step):
        model.train_on_batch(np.full((2, 4), rank + 1.0), np.zeros((2, 4)))
    grads = [layer.kernel.value.grad for layer in model.layers]
    assert {each.data_ptr() for each in grads} == {*groups[-1].addresses}
    # They may share memory with what backward still reads, so each stays as it is.
    of_ranks = keras_hvd.allgather_object(grads[0].tolist())
    assert of_ranks[0] != of_ranks[1]


def test_the_gradients_of_a_step_are_not_kept(rank, size, begun):
    model = network()
    train(model, distributed(), rank)
    assert begun
    grads = [weakref.ref(each.value.grad) for each in model.trainable_weights]
    model.zero_grad()
    assert [each() for each in grads] == [None, None]


def test_a_process_set_that_is_added_again(rank, size):
    """It then has another number; steps over its old one would fail."""
    ranks = keras_hvd.add_process_set([0])
    reduction = GradientReduction(process_set=ranks)
    terms = during_backward.Terms(reduction, "sgd", network().weights, (), "")
    early = during_backward.EarlyReduction(terms)
    assert early.may_begin(terms)
    keras_hvd.remove_process_set(ranks)
    keras_hvd.add_process_set(ranks)
    assert not early.may_begin(terms)
    keras_hvd.remove_process_set(ranks)


class Changing(keras.layers.Layer):
    """Uses the one weight, the other or none; the one is not always in one order."""

    mode = "rows"

    def build(self, shape):
        self.own, self.other = (
            self.add_weight(shape=(4, 4), name=name) for name in ("own", "other")
        )

    def call(self, inputs):
        if self.mode == "unused":
            return inputs
        if self.mode == "other":
            return inputs @ self.other.value
        data = self.own.value.data
        # Its gradient then has the same order.
        ordered = data.T.contiguous().T if self.mode == "columns" else data.contiguous()
        self.own.value.data = ordered
        return inputs @ self.own.value


MODES = ["rows", "rows", "columns", "columns", "unused", "unused", "rows", "other"]


def test_steps_whose_gradients_differ_train_as_one_process(rank, size, groups):
    rows = np.random.default_rng(3).standard_normal((size, 4)).astype("float32")

    def trained(optimizer, x):
        keras.utils.set_random_seed(1)
        middle = Changing()
        model = network(middle)
        random = np.random.default_rng(4)
        shapes = (each.shape for each in model.weights)
        model.set_weights([random.standard_normal(shape) for shape in shapes])
        model.compile(optimizer, "mse")
        for mode in MODES:
            middle.mode = mode
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Gradients do not exist")
                model.train_on_batch(x, np.zeros((len(x), 4)))
        return model.get_weights()

    alone = trained(keras.optimizers.SGD(0.01), rows)
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    together = trained(optimizer, rows[rank : rank + 1])
    assert [len(each.addresses) for each in groups] == [
        2 if mode == "unused" else 3 for mode in MODES
    ]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_step_after_one_that_failed(rank, size):
    middle = Changing()
    model = network(middle)
    model.compile(distributed(), "mse")
    step = functools.partial(
        model.train_on_batch, np.full((2, 4), rank + 1.0), np.zeros((2, 4))
    )
    step()
    for mode, message in (("unused", "own"), ("columns", "strides")):
        middle.mode = "rows" if rank else mode
        with pytest.raises(MismatchError, match=message):
            step()
        grads = [weakref.ref(each.value.grad) for each in model.layers[0].weights]
        model.zero_grad()
        gc.collect()  # The error and its frames refer to each other.
        assert [each() for each in grads] == [None]
    middle.mode = "rows"
    step()
    first, *others = weights_of_ranks(model)
    assert all(each == first for each in others)


def test_a_layer_that_is_frozen_between_steps(rank, size, groups):
    model, optimizer = network(), distributed()
    train(model, optimizer, rank)
    model.layers[0].trainable = False
    train(model, optimizer, rank)
    assert [len(each.addresses) for each in groups] == [2, 1]


class Position(keras.layers.Layer):
    """Adds its weight, whose gradient is that of the inputs where there is one row."""

    def build(self, shape):
        self.position = self.add_weight(shape=shape[1:], name="position")

    def call(self, inputs):
        return inputs + keras.ops.expand_dims(self.position, 0)


@pytest.mark.parametrize(
    "arguments", [{"groups": 3}, {"gradient_predivide_factor": 2.0}], ids=str
)
def test_a_gradient_may_share_memory_with_one_that_others_wait_for(
    arguments, rank, size, begun
):
    """As one process trains on the rows of all ranks."""
    rows = np.random.default_rng(3).standard_normal((size, 4)).astype("float32")

    def trained(optimizer, x):
        keras.utils.set_random_seed(1)
        model = network(Position())
        model.compile(optimizer, "mse")
        model.train_on_batch(x, np.zeros((len(x), 4)))
        return model.get_weights()

    alone = trained(keras.optimizers.SGD(0.1), rows)
    assert begun == []
    together = trained(distributed(**arguments), rows[rank : rank + 1])
    assert begun == (["0", "1", "2"] if "groups" in arguments else ["0"])
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_parameter_that_torch_froze(rank, size, begun):
    inner = torch.nn.Linear(4, 4)
    layer = keras.layers.TorchModuleWrapper(inner)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    inner.requires_grad_(False)
    before = inner.weight.detach().clone()
    model.compile(distributed(), "mse")
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        model.train_on_batch(np.ones((2, 4)), np.zeros((2, 1)))
    assert begun == ["0"]
    assert torch.equal(inner.weight, before)


class Auxiliary(keras.Sequential):
    """Its loss has a backward pass of its own, of a weight that the other lacks."""

    def compute_loss(self, *arguments, **named):
        if torch.is_grad_enabled():  # Not where Keras builds the model.
            (self.layers[0].own.value ** 2).sum().backward()
        return super().compute_loss(*arguments, **named)


class WithOwn(keras.layers.Layer):
    def build(self, shape):
        self.own = self.add_weight(shape=(2,), initializer="ones", name="own")

    def call(self, inputs):
        return inputs


def test_a_gradient_of_another_backward_pass_of_the_step(rank, size, begun):
    model = Auxiliary([keras.Input((4,)), WithOwn(), keras.layers.Dense(1)])
    model.compile(distributed(), "mse")
    model.train_on_batch(np.full((2, 4), rank + 1.0), np.zeros((2, 1)))
    # 1 - 0.1 * 2, on all ranks.
    np.testing.assert_allclose(model.layers[0].own.numpy(), [0.8, 0.8], rtol=1e-6)


class Twice(torch.autograd.Function):
    """Its backward pass has another one in it, to the same weight."""

    @staticmethod
    def forward(context, value, weight):
        context.weight = weight
        return value.clone()

    @staticmethod
    def backward(context, grad):
        with torch.enable_grad():
            (context.weight**2).sum().backward()
            (context.weight**2).sum().backward()
        return grad, None


class Computing(keras.layers.Layer):
    def build(self, shape):
        self.own = self.add_weight(shape=(2,), initializer="ones", name="own")

    def call(self, inputs):
        return Twice.apply(inputs, self.own.value)


def test_a_gradient_that_is_computed_twice_is_an_error(rank, size):
    model = network(Computing())
    with pytest.raises(RuntimeError, match="twice while the ranks reduced it.*apply"):
        train(model, distributed(), rank)


class Doubles(keras.optimizers.SGD):
    """Changes gradients on the way, which must not be reduced yet."""

    def apply(self, grads, trainable_variables=None):
        super().apply([2 * grad for grad in grads], trainable_variables)


class OwnStep(keras.Model):
    """Clips each rank's own gradients."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.compute_loss(x, y, self(x, training=True))
        self.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        weights = self.trainable_weights
        for each in weights:
            each.value.grad.clamp_(-0.5, 0.5)
        with torch.no_grad():
            self.optimizer.apply([each.value.grad for each in weights], weights)
        return {"loss": loss}


def own_step():
    inputs = keras.Input((4,))
    layer = keras.layers.Dense(4, kernel_initializer="ones", name="last")
    return OwnStep(inputs, layer(inputs))


CASES = {
    "apply of one's own": lambda: (network(), Doubles(0.1)),
    "train_step of one's own": lambda: (own_step(), keras.optimizers.SGD(0.1)),
    "accumulation": lambda: (
        network(),
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    ),
    "loss scale": lambda: (network(), keras.optimizers.SGD(0.1, loss_scale_factor=2.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_none_leaves_where_it_may_still_change(case, rank, size, begun):
    model, optimizer = CASES[case]()
    train(model, keras_hvd.DistributedOptimizer(optimizer, op=keras_hvd.Sum), rank)
    assert begun == []
    weights = keras_hvd.allgather_object([w.tolist() for w in model.get_weights()])
    assert weights[0] == weights[1]


def scaled_outside(plain, **arguments):
    inner = keras_hvd.DistributedOptimizer(plain, **arguments)
    return keras.optimizers.LossScaleOptimizer(inner)


def scaled_inside(plain, **arguments):
    scaling = keras.optimizers.LossScaleOptimizer(plain)
    return keras_hvd.DistributedOptimizer(scaling, **arguments)


def scaled_by_compile(plain, **arguments):
    """Of a model in mixed_float16."""
    return keras_hvd.DistributedOptimizer(plain, **arguments)


@pytest.fixture(params=[scaled_outside, scaled_inside, scaled_by_compile])
def scaled(request):
    if request.param is scaled_by_compile:
        keras.mixed_precision.set_dtype_policy("mixed_float16")
    yield request.param
    keras.mixed_precision.set_dtype_policy("float32")


def loss_scale(model) -> float:
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return float(model.optimizer.dynamic_scale)


def weights_of_ranks(model) -> list:
    return keras_hvd.allgather_object([w.tolist() for w in model.get_weights()])


def test_scaled_gradients_are_reduced_before_backward_ends(scaled, rank, size, begun):
    model = network(Watching(), width=LENGTH)
    # Of a network of ones, they would be too large for float16.
    model.set_weights([weight / LENGTH for weight in model.get_weights()])
    train(model, scaled(keras.optimizers.SGD(0.1)), rank, LENGTH)
    assert begun == ["0", "1"]
    assert int(model.optimizer.iterations) == 1
    first, *others = weights_of_ranks(model)
    assert all(each == first for each in others)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"op": keras_hvd.Sum}, {"gradient_predivide_factor": 2.0, "groups": 2}],
    ids=str,
)
def test_scaled_gradients_train_as_one_process(scaled, arguments, rank, size, begun):
    # With larger ones the scale is too large for float16 at first.
    rows = np.random.default_rng(3).standard_normal((size, 4)).astype("float32") / 10

    def trained(optimizer, x):
        keras.utils.set_random_seed(1)
        inner = keras.layers.Dense(3, activation="tanh")
        model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        for _ in range(3):
            model.train_on_batch(x, np.zeros((len(x), 1)))
        assert int(model.optimizer.iterations) == 3
        return model.get_weights()

    ranks = size if "op" in arguments else 1
    plain = keras.optimizers.SGD(0.1 * ranks, global_clipnorm=0.05 / ranks)
    alone = trained(keras.optimizers.LossScaleOptimizer(plain), rows)
    assert begun == []
    optimizer = scaled(keras.optimizers.SGD(0.1, global_clipnorm=0.05), **arguments)
    together = trained(optimizer, rows[rank : rank + 1])
    assert begun == (["0", "1"] if "groups" in arguments else ["0"]) * 3
    is_half = keras.mixed_precision.dtype_policy().name == "mixed_float16"
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 if is_half else 1e-6)


@pytest.mark.parametrize("of_the_last", [np.inf, np.nan], ids=str)
def test_all_ranks_skip_a_step_that_one_has_to(scaled, of_the_last, rank, size, begun):
    model = network()
    model.compile(scaled(keras.optimizers.SGD(1e-3)), "mse")
    good, targets = np.full((2, 4), 0.01), np.zeros((2, 4))
    model.train_on_batch(good, targets)
    scale, before = loss_scale(model), model.get_weights()
    wrong = np.full((2, 4), of_the_last) if rank == size - 1 else good
    model.train_on_batch(wrong, targets)
    assert loss_scale(model) == scale / 2
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    model.train_on_batch(good, targets)
    assert begun == ["0", "0", "0"] and int(model.optimizer.iterations) == 2
    first, *others = weights_of_ranks(model)
    assert all(each == first for each in others)


def test_scaled_gradients_leave_early_on_some_ranks_only(scaled, rank, size, begun):
    """A hook of the user's is on one rank, to which scaling is the same."""
    model, seen = network(), []
    if rank == 0:
        weight = model.layers[0].kernel.value
        weight.register_post_accumulate_grad_hook(seen.append)
    train(model, scaled(keras.optimizers.SGD(0.1)), rank)
    assert begun == ([] if rank == 0 else ["0"])
    train(model, model.optimizer, rank)
    first, *others = weights_of_ranks(model)
    assert all(each == first for each in others)


@pytest.mark.parametrize(
    "arguments",
    [
        {"compression": keras_hvd.Compression.fp16},
        {"op": keras_hvd.Adasum},
        {"backward_passes_per_step": 2},
    ],
    ids=str,
)
def test_gradients_that_are_reduced_once_they_are_not_scaled(
    scaled, arguments, rank, size, begun
):
    model = network()
    model.compile(scaled(keras.optimizers.SGD(1e-3), **arguments), "mse")
    good, targets = np.full((2, 4), 0.01), np.zeros((2, 4))
    model.train_on_batch(good, targets)
    scale = loss_scale(model)
    wrong = np.full((2, 4), np.inf) if rank == size - 1 else good
    model.train_on_batch(wrong, targets)
    assert begun == [] and loss_scale(model) == scale / 2
    first, *others = weights_of_ranks(model)
    assert all(each == first for each in others)


def test_a_loop_of_ones_own_with_loss_scaling(rank, size):
    """Its first step builds the optimizer."""
    model = network()
    optimizer = scaled_outside(keras.optimizers.SGD(0.1))
    for number in range(2):
        model.zero_grad()
        loss = (model(torch.full((2, 4), rank + 1.0)) ** 2).mean()
        optimizer.scale_loss(loss).backward()
        variables = model.trainable_variables
        if number == 1 and rank == 0:
            variables[0].value.grad[0, 0] = torch.inf
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in variables], variables)
    assert int(optimizer.iterations) == 1
    first, *others = weights_of_ranks(model)
    assert all(each == first for each in others)


def test_a_hook_of_the_users_sees_the_ranks_own_gradients(rank, size, begun):
    model, seen = network(), []
    weight = model.layers[0].kernel.value
    weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
    train(model, distributed(), rank)
    assert begun == [] and len(seen) == 1


def test_other_backward_passes_reduce_nothing(rank, size, begun):
    model, optimizer = network(), distributed()
    train(model, optimizer, rank)
    assert begun == ["0"]
    for _ in range(1 + rank):
        model(torch.ones(1, 4)).sum().backward()
    assert begun == ["0"]
    train(model, optimizer, rank)
    assert begun == ["0", "0"]


class Branches(keras.Model):
    """Leaves a layer out on the ranks that it is told."""

    def __init__(self, is_left_out):
        super().__init__()
        self.one = keras.layers.Dense(1, kernel_initializer="ones", name="one")
        self.other = keras.layers.Dense(1, kernel_initializer="ones", name="other")
        self.is_left_out = is_left_out

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)

    def call(self, inputs):
        left_out = self.one(inputs)
        return left_out if self.is_left_out else left_out + self.other(inputs)


def test_a_layer_that_no_rank_uses(rank, size):
    model = Branches(is_left_out=True)
    model.build((2, 4))
    before = model.other.kernel.numpy()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        train(model, distributed(), rank)
    np.testing.assert_array_equal(model.other.kernel.numpy(), before)
    weights = keras_hvd.allgather_object(model.one.kernel.numpy().tolist())
    assert weights[0] == weights[1]


def test_a_layer_that_one_rank_does_not_use(rank, size):
    model = Branches(is_left_out=rank == 0)
    model.build((2, 4))
    before = model.get_weights()
    with pytest.raises(MismatchError):
        train(model, distributed(), rank)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Fails(torch.autograd.Function):
    """Fails in backward, where the last layer's gradients are under way."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, grad):
        raise ArithmeticError("in backward")


class Failing(keras.layers.Layer):
    fails = True

    def call(self, inputs):
        return Fails.apply(inputs) if self.fails else inputs


def test_an_error_in_backward_leaves_nothing_under_way(rank, size, begun):
    failing = Failing()
    model, optimizer = network(failing, width=LENGTH), distributed()
    with pytest.raises(ArithmeticError):
        train(model, optimizer, rank, LENGTH)
    assert begun == ["0"]
    failing.fails = False
    train(model, optimizer, rank, LENGTH)
    assert begun == ["0", "0", "1"]
    checksums = keras_hvd.allgather_object(
        [float(np.sum(each)) for each in model.get_weights()]
    )
    assert checksums[0] == checksums[1]


def test_sparse_gradients_are_made_dense(rank, size, begun):
    table = torch.nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    layer = keras.layers.TorchModuleWrapper(table, name="table")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    model.compile(distributed(sparse_as_dense=True), "mse")
    rows = np.array([[rank, rank + 1]])
    model.train_on_batch(rows, np.zeros((1, 2, 3)))
    assert begun == ["0"]
    # Each of 6 numbers has the gradient 2 / 6, and ranks are averaged.
    expected = np.ones((6, 3))
    for each in range(size):
        expected[[each, each + 1]] -= 0.1 * 2 / 6 / size
    np.testing.assert_allclose(table.weight.detach().numpy(), expected, atol=1e-6)


def test_compression_and_a_factor_before(rank, size, begun):
    model = network()
    optimizer = distributed(
        compression=keras_hvd.Compression.fp16, gradient_predivide_factor=2.0
    )
    train(model, optimizer, rank)
    assert begun == ["0"]
    of_all = keras_hvd.allgather_object(model.layers[0].kernel.numpy().tolist())
    assert of_all[0] == of_all[1]
    # Mean over ranks and rows of 2 * y / 4 * x, with y = 16 x, through 4 ones.
    xs = np.arange(1.0, size + 1)
    step = 0.1 * np.mean(4 * 2 * 16 * xs / 4 * xs)
    np.testing.assert_allclose(of_all[0], 1 - np.full((4, 4), step), rtol=2e-3)


def test_local_gradients_stay(rank, size, begun):
    model, optimizer = network(), distributed()
    optimizer.register_local_var(model.layers[0].kernel)
    train(model, optimizer, rank)
    assert begun == ["0"]
    first, last = (
        keras_hvd.allgather_object(layer.kernel.numpy().tolist())
        for layer in (model.layers[0], model.layers[-1])
    )
    assert first[0] != first[1] and last[0] == last[1]
