"""Sends gradients while backward still computes others.

Only in the `train_step` that is Keras' own, with an `apply` that is Keras' own: there
nothing reads or changes a gradient between backward and the update. Everywhere else
gradients are reduced once `apply` is called, as they then are.

Loss scaling gets gradients that are reduced, and still scaled. So all ranks find the
same ones finite, and skip the same steps. That must not depend on what only a rank
knows: those that send before `apply` and those that send then wait in the same order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras
import torch
from keras.src.backend.torch import trainer

from keras_hvd.backends.compression import NoneCompressor
from keras_hvd.backends.gradient_reduction import KIND, GradientReduction
from keras_hvd.backends.reduce_op import Average, Sum
from keras_hvd.backends.torch.gradients import equal_start
from keras_hvd.backends.torch.gradients.step_reduction import StepReduction, reducible
from keras_hvd.backends.variables import identity
from keras_hvd.job import basics
from keras_hvd.job.process_sets import number_of
from keras_hvd.recording import recorder


class Terms(NamedTuple):
    """The arguments of a reduction that are known before there are gradients."""

    reduction: GradientReduction
    prefix: str
    variables: Sequence[Any]
    local: Collection[int]
    agreed: str


class _Thread(threading.local):
    # The optimizer of the step that runs, until its gradients are sent early.
    optimizer: Any = None
    early: EarlyReduction | None = None
    # The optimizer in a running loss scaling that has been given reduced gradients.
    has_reduced: Any = None


_thread = _Thread()

# An attribute of optimizers: the reduction of the last step, for the next one.
_REDUCTION = "_keras_hvd_reduction"


@functools.cache
def install(terms_of: Callable[[Any], tuple[Any, ...] | None]) -> None:
    """Makes steps of `fit` reduce while backward runs.

    `terms_of` returns None for optimizers that do not reduce gradients themselves.

    Example:

    >>> install(lambda optimizer: None)
    """
    plain_step = trainer.TorchTrainer.train_step
    scaling = keras.optimizers.LossScaleOptimizer
    plain_apply = scaling.apply

    @functools.wraps(plain_step)
    def train_step(self, data):
        if torch.compiler.is_compiling():
            return plain_step(self, data)
        outer = _thread.optimizer, _thread.early
        _thread.optimizer, _thread.early = self.optimizer, None
        try:
            return plain_step(self, data)
        finally:
            try:
                _abandon()
            finally:
                _thread.optimizer, _thread.early = outer

    @functools.wraps(plain_apply)
    def apply(self, grads, trainable_variables=None):
        if torch.compiler.is_compiling() or not _is_plain_scaling(self):
            return plain_apply(self, grads, trainable_variables)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built and trainable_variables:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        terms = _terms_within(self, terms_of)
        if terms is None:
            return plain_apply(self, grads, trainable_variables)
        grads = _reduced(terms, self, grads, trainable_variables or terms.variables)
        outer, _thread.has_reduced = _thread.has_reduced, self.inner_optimizer
        try:
            return plain_apply(self, grads, trainable_variables)
        finally:
            _thread.has_reduced = outer

    trainer.TorchTrainer.train_step = train_step
    scaling.apply = apply
    for each in (keras.optimizers.Optimizer, scaling):
        _begin_before_backward(each, terms_of)


def _begin_before_backward(
    kind: Any, terms_of: Callable[[Any], tuple[Any, ...] | None]
) -> None:
    # It is the last that Keras calls before backward, so no other pass is meant.
    plain = kind.scale_loss

    @functools.wraps(plain)
    def scale_loss(self, loss):
        if not torch.compiler.is_compiling() and _thread.optimizer is self:
            _thread.optimizer = None
            _thread.early = _begun(self, terms_of)
        return plain(self, loss)

    kind.scale_loss = scale_loss


def _abandon() -> None:
    """Waits for what was sent in a step that raises."""
    if _thread.early is not None:
        _thread.early.abandon()


def take(prefix: str) -> EarlyReduction | None:
    """The reduction that has begun during backward under this name, if one has."""
    early = _thread.early
    if early is None or early.prefix != prefix:
        return None
    _thread.early = None
    return early


def has_reduced(optimizer: Any) -> bool:
    """Whether the optimizer, in a loss scaling, gets gradients that are reduced.

    >>> has_reduced(keras.optimizers.SGD())
    False
    """
    return _thread.has_reduced is optimizer


class EarlyReduction:
    """The reduction of a step's gradients, of variables that are known before."""

    def __init__(self, terms: Terms):
        self.prefix = terms.prefix
        self._reduction = terms.reduction
        self._key = _key(terms)
        self._is_running = False
        # The gradients that backward has computed, by their places, and their hooks.
        self._grads: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._shared = [
            each
            for each in terms.variables
            if each.value.requires_grad and identity(each) not in terms.local
        ]
        values = [each.value for each in self._shared]
        self._places = {
            identity(each): place for place, each in enumerate(self._shared)
        }
        self._step = StepReduction(
            terms.reduction,
            terms.prefix,
            self._shared,
            [value.numel() * value.element_size() for value in values],
            terms.agreed,
            in_place=False,
        )

    def may_begin(self, terms: Terms) -> bool:
        """Whether it is for such a step, and no step still uses it."""
        return not self._is_running and self._key == _key(terms)

    def begin(self) -> None:
        """Begins a step."""
        self._is_running = True

    def send_in_backward(self) -> None:
        """Sends each gradient as soon as the next backward pass has computed it."""
        for place, variable in enumerate(self._shared):
            give = functools.partial(self._give, place)
            self._hooks.append(variable.value.register_post_accumulate_grad_hook(give))

    def finish(
        self, grads: Sequence[torch.Tensor], variables: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Reduces the rest, and returns the gradients of these variables, reduced.

        Raises RuntimeError if they are not those that backward has computed.
        """
        self._remove_hooks()
        places = [self._places[identity(variable)] for variable in variables]
        try:
            for grad, variable, place in zip(grads, variables, places, strict=True):
                if not self._step.has(place):
                    # Another backward pass has computed it, before this one.
                    dense = reducible(self._reduction, grad, variable)
                    self._step.give(place, dense)
                elif self._grads[place] is not grad:
                    raise _unexpected(f"replaced a gradient of {self.prefix!r}")
            results = self._step.finish()
        except BaseException:
            self.abandon()
            raise
        self._end()
        return [results[place] for place in places]

    def abandon(self) -> None:
        """Waits for what was sent, after an error that is about to be raised."""
        self._remove_hooks()
        self._step.abandon()
        self._end()

    def _end(self) -> None:
        self._grads.clear()
        self._is_running = False

    def _give(self, place: int, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if self._step.has(place):
            raise _unexpected(f"computed a gradient of {self.prefix!r} twice")
        assert grad is not None, "the hook runs once there is a gradient"
        self._grads[place] = grad
        self._step.give(place, grad)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _unexpected(what: str) -> RuntimeError:
    return RuntimeError(
        f"the step {what} while the ranks reduced it. An optimizer whose class defines "
        "apply(), if only to call super().apply(), reduces after backward alone: use "
        "such a one here"
    )


def _begun(
    optimizer: Any, terms_of: Callable[[Any], tuple[Any, ...] | None]
) -> EarlyReduction | None:
    """Gets ready to send what backward computes; None if it must wait for `apply`."""
    terms = _terms_within(optimizer, terms_of)
    if terms is None or any(
        getattr(each.value, "_post_accumulate_grad_hooks", None)
        for each in terms.variables
    ):
        return None
    equal_start.compare(terms.variables, terms.reduction, terms.local)
    early = _of_step(terms, optimizer)
    early.send_in_backward()
    return early


def _of_step(terms: Terms, optimizer: Any) -> EarlyReduction:
    early = vars(optimizer).get(_REDUCTION)
    if early is None or not early.may_begin(terms):
        early = vars(optimizer)[_REDUCTION] = EarlyReduction(terms)
    early.begin()
    return early


def _key(terms: Terms) -> tuple[Any, ...]:
    """What a reduction is made for, which has to be the same to begin it again."""
    variables = [(identity(x), x.value.requires_grad) for x in terms.variables]
    # A process set that is added again gets another number.
    number = number_of(terms.reduction.process_set, KIND)
    local = {*terms.local}
    return terms._replace(variables=variables, local=local), number, basics.epoch()


def _reduced(
    terms: Terms, scaling: Any, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """The gradients for a loss scaling, of which some may be under way, reduced."""
    scaling.inner_optimizer._check_variables_are_known(variables)
    early = take(terms.prefix)
    if early is None:
        equal_start.compare(terms.variables, terms.reduction)
        early = _of_step(terms, scaling)
    results = [*grads]
    pairs = enumerate(zip(results, variables))
    places = [place for place, (grad, _) in pairs if grad is not None]
    reduced = early.finish(
        [results[place] for place in places], [variables[place] for place in places]
    )
    for place, grad in zip(places, reduced, strict=True):
        results[place] = grad
    return results


def _is_plain_scaling(optimizer: Any) -> bool:
    # The class of a distributed one says that it is Keras' own.
    return optimizer.__class__ is keras.optimizers.LossScaleOptimizer


def _terms_within(
    optimizer: Any, terms_of: Callable[[Any], tuple[Any, ...] | None]
) -> Terms | None:
    """The terms of a reduction before `apply`; None if that has to come first."""
    is_scaling = _is_plain_scaling(optimizer)
    leaf = optimizer.inner_optimizer if is_scaling else optimizer
    given = None if recorder.scaling() else terms_of(leaf)
    if given is None:
        return None
    terms = Terms(*given)
    is_plain = _is_plain(leaf, terms.variables)
    if is_plain and (not is_scaling or _may_be_scaled(terms)):
        return terms
    return None


def _is_plain(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether nothing else takes or makes gradients between backward and the hook."""
    return (
        not optimizer.gradient_accumulation_steps
        and optimizer.loss_scale_factor is None
        and optimizer._plain_class.apply is keras.optimizers.Optimizer.apply
        and not any(getattr(x, "overwrite_with_gradient", False) for x in variables)
    )


def _may_be_scaled(terms: Terms) -> bool:
    """Whether gradients that are scaled are reduced as well, and are all reduced."""
    reduction = terms.reduction
    return (
        reduction.op in (Average, Sum)
        and reduction.compression is NoneCompressor
        and not terms.local
    )
