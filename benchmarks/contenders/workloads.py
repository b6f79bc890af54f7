"""The groups of gradients that gradients.py reduces: the tensors' shapes."""

from __future__ import annotations

import math


def resnet50() -> list[list[int]]:
    """ResNet-50's 161 gradients, as in its paper: convolutions without biases.

    Returns:
        Shapes, first layer first: 25.6 million numbers.

    Example:

    >>> len(resnet50()), total_bytes(resnet50())
    (161, 102228128)
    """
    shapes = _convolution(7, 3, 64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _convolution(1, inputs, width)
            shapes += _convolution(3, width, width)
            shapes += _convolution(1, width, 4 * width)
            if block == 0:
                shapes += _convolution(1, inputs, 4 * width)
            inputs = 4 * width
    return [*shapes, [inputs, 1000], [1000]]


def cnn() -> list[list[int]]:
    """The gradients of the network that training.py trains.

    Example:

    >>> total_bytes(cnn())
    4799528
    """
    convolutions = [[3, 3, 1, 32], [32], [3, 3, 32, 64], [64]]
    return [*convolutions, [9216, 128], [128], [128, 10], [10]]


def tiny() -> list[list[int]]:
    """160 tensors of 100 numbers, whose time is all overhead."""
    return [[100]] * 160


def total_bytes(shapes: list[list[int]]) -> int:
    """The bytes of float32 tensors of these shapes."""
    return 4 * sum(map(math.prod, shapes))


def _convolution(kernel: int, inputs: int, outputs: int) -> list[list[int]]:
    """A convolution and its batch normalization, which has a scale and an offset."""
    return [[kernel, kernel, inputs, outputs], [outputs], [outputs]]


WORKLOADS = {"resnet50": resnet50(), "tiny": tiny()}
