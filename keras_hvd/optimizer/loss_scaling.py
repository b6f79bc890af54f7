"""Loss scaling: all ranks agree on whether gradients are finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_hvd.backends.current import framework
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.labels import name_in_program
from keras_hvd.backends.reduce_op import Min
from keras_hvd.job.process_sets import number_of


@functools.cache
def agree_on_finite_gradients(
    reduction_of: Callable[[Any], GradientReduction | None],
) -> None:
    """Makes Keras' loss scaling skip a step on all ranks if any rank must skip it.

    Loss scaling checks gradients before the inner optimizer reduces them. The patch is
    on the class because `compile` wraps optimizers in a `LossScaleOptimizer` unasked.
    `reduction_of` returns None for inner optimizers that do not reduce gradients.
    """
    plain = keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(plain)
    def check_finite(self, grads):
        finite = plain(self, grads)
        inner = self.inner_optimizer
        reduction = reduction_of(inner)
        if reduction is None:
            return finite
        number = number_of(reduction.process_set, "check_finite")
        names = [name_in_program(each, number) for each in (self, inner)]
        name = framework.name_in_graph("/".join([*names, "finite"]))
        # The host reads the result, to decide on the step.
        with framework.on_cpu():
            return framework.allreduce(
                finite, op=Min, name=name, process_set=reduction.process_set
            )

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite
