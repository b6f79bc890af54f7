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
    return _resnet(3, 4, 6, 3)


def resnet101() -> list[list[int]]:
    """ResNet-101's 314 gradients, likewise.

    Example:

    >>> len(resnet101()), total_bytes(resnet101())
    (314, 178196640)
    """
    return _resnet(3, 4, 23, 3)


def vgg16() -> list[list[int]]:
    """VGG-16's 32 gradients, each layer's kernel and bias.

    Example:

    >>> len(vgg16()), total_bytes(vgg16())
    (32, 553430176)
    """
    channels = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    kernels = [[3, 3, *each] for each in zip(channels, channels[1:])]
    kernels += [[7 * 7 * 512, 4096], [4096, 4096], [4096, 1000]]
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


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


def _resnet(*blocks: int) -> list[list[int]]:
    """A ResNet of four parts, with these numbers of blocks of three convolutions."""
    shapes = _convolution(7, 3, 64)
    inputs = 64
    for width, count in zip((64, 128, 256, 512), blocks):
        for block in range(count):
            shapes += _convolution(1, inputs, width)
            shapes += _convolution(3, width, width)
            shapes += _convolution(1, width, 4 * width)
            if block == 0:
                shapes += _convolution(1, inputs, 4 * width)
            inputs = 4 * width
    return [*shapes, [inputs, 1000], [1000]]


def _convolution(kernel: int, inputs: int, outputs: int) -> list[list[int]]:
    """A convolution and its batch normalization, which has a scale and an offset."""
    return [[kernel, kernel, inputs, outputs], [outputs], [outputs]]


WORKLOADS = {"resnet50": resnet50(), "tiny": tiny()}
