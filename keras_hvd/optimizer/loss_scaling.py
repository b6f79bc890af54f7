"""Loss scaling: all ranks agree on whether gradients are finite."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_hvd.backends.current import framework
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.labels import name_in_program
from keras_hvd.backends.reduce_op import Min
from keras_hvd.backends.variables import identity
from keras_hvd.job import arrival
from keras_hvd.job.process_sets import number_of

# The loss scaling around an inner optimizer.
_around: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()


def counts(optimizer: Any) -> list[Any]:
    """The scalars that an update changes, whatever the gradients are.

    Those of loss scaling around the optimizer are among them, once it has begun.

    >>> optimizer = keras.optimizers.SGD()
    >>> optimizer.build([keras.Variable([1.0])])
    >>> [each.path for each in counts(optimizer)]
    ['sgd/iteration']
    """
    around = _around[optimizer]() if optimizer in _around else None
    variables = [*optimizer.variables, *(around.variables if around else ())]
    found = {identity(each): each for each in variables if each.shape == ()}
    for each in filter(None, (optimizer, around)):
        found.pop(identity(each._learning_rate), None)
    return list(found.values())


@functools.cache
def agree_on_finite_gradients(
    reduction_of: Callable[[Any], GradientReduction | None],
) -> None:
    """Makes Keras' loss scaling skip a step on all ranks if any rank must skip it.

    Mostly, loss scaling checks gradients before they are reduced. The patch is on the
    class because `compile` wraps optimizers in a `LossScaleOptimizer` unasked.
    `reduction_of` returns None for inner optimizers that do not reduce gradients.
    """
    plain = keras.optimizers.LossScaleOptimizer.check_finite

    @framework.traced_updates.left_out
    @functools.wraps(plain)
    def check_finite(self, grads):
        finite = plain(self, grads)
        inner = self.inner_optimizer
        _around[inner] = weakref.ref(self)
        reduction = reduction_of(inner)
        if reduction is None or framework.reduction.has_reduced(inner):
            return finite
        number = number_of(reduction.process_set, "check_finite")
        names = [name_in_program(each, number) for each in (self, inner)]
        name = framework.name_in_graph("/".join([*names, "finite"]))
        # The host reads the result, to decide on the step.
        with framework.on_cpu(), arrival.within_step():
            return framework.allreduce(
                finite, op=Min, name=name, process_set=reduction.process_set
            )

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite
