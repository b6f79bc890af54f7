"""Gives each rank one GPU, and makes TensorFlow take memory only as needed.

`keras_hvd.init` sets the devices that scripts for Horovod set by hand, among those that
TensorFlow sees (`CUDA_VISIBLE_DEVICES` may hide some). The user's settings take
precedence, before `init` and after it, until TensorFlow uses its devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from keras_hvd.backends import gpu_sharing
from keras_hvd.job import gpu_libraries, log

_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


@dataclass(frozen=True)
class Gpu:
    """TensorFlow's settings of a GPU."""

    is_visible: bool = True
    growth: bool | None = None  # whether memory grows as needed; None: not set
    is_divided: bool = False  # whether the user has made logical devices of it


@dataclass(frozen=True)
class Choice:
    """The settings to make in TensorFlow."""

    only: int | None  # the only GPU to be visible; None: no change
    growing: tuple[int, ...]  # GPUs whose memory grows as needed
    is_shared: bool  # whether ranks certainly share GPUs


def choose(
    gpus: Sequence[Gpu], local_rank: int, local_size: int, variables: Mapping[str, str]
) -> Choice:
    """Decides which of TensorFlow's GPUs a rank uses.

    If a scheduler gives each rank one GPU, each rank sees one, with number 0.

    Example:

    >>> choose([Gpu()] * 4, 3, 4, {})
    Choice(only=3, growing=(3,), is_shared=False)
    >>> choose([Gpu()], 3, 4, {})
    Choice(only=None, growing=(0,), is_shared=False)
    """
    visible = [number for number, gpu in enumerate(gpus) if gpu.is_visible]
    only = None
    if len(gpus) > 1 and len(visible) == len(gpus):
        only = local_rank % len(gpus)
        visible = [only]
    used = [gpus[number] for number in visible]
    # TensorFlow requires the same setting for all visible GPUs.
    is_said = any(gpu.growth is not None or gpu.is_divided for gpu in used)
    growing = () if is_said or variables.get(_GROWTH) else tuple(visible)
    sees_all = only is not None or len(gpus) == 1
    is_certain = gpu_sharing.is_certain(len(gpus), local_size, variables)
    return Choice(only, growing, is_shared=sees_all and is_certain)


def pin(local_rank: int, local_size: int) -> None:
    """Makes TensorFlow use one GPU. Imports TensorFlow only if there are GPUs."""
    if not gpu_libraries.driver_is_loaded():
        return
    tf = _tensorflow()
    if tf is not None:
        pin_tensorflow(tf, local_rank, local_size, os.environ)


def pin_tensorflow(
    tf: ModuleType, local_rank: int, local_size: int, variables: Mapping[str, str]
) -> None:
    """Makes this TensorFlow use one of the GPUs that it sees."""
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return
    choice = choose(_described(tf, devices), local_rank, local_size, variables)
    try:
        if choice.only is not None:
            tf.config.set_visible_devices(devices[choice.only], "GPU")
        for number in choice.growing:
            tf.config.experimental.set_memory_growth(devices[number], True)
    except RuntimeError:
        # TensorFlow already uses its devices.
        text = too_late(choice, len(devices), local_size)
        if text:
            log.write("warning", text)
    if choice.is_shared and local_rank == 0:
        gpu_sharing.tell(len(devices), local_size, variables)


def name_of_gpu() -> str:
    """The name of the GPU that TensorFlow uses; "" if there is none."""
    import tensorflow as tf

    devices = tf.config.get_visible_devices("GPU")
    if not devices:
        return ""
    details = tf.config.experimental.get_device_details(devices[0])
    return str(details.get("device_name", devices[0].name))


def too_late(choice: Choice, gpus: int, local_size: int) -> str:
    """The warning if TensorFlow has used its GPUs before `init`; "" if it is harmless.

    Example:

    >>> too_late(Choice(1, (1,), False), 2, 2)
    'TensorFlow had begun to use its 2 GPUs before keras_hvd.init(), so this rank ...'
    """
    if local_size == 1:
        return ""
    remedy = (
        "call keras_hvd.init() before the first tensor is made, or tell TensorFlow "
        "yourself with tf.config.set_visible_devices and "
        "tf.config.experimental.set_memory_growth"
    )
    if choice.only is not None:
        return (
            f"TensorFlow had begun to use its {gpus} GPUs before keras_hvd.init(), so "
            f"this rank computes on the first, like all others: {remedy}"
        )
    if choice.is_shared:
        return (
            "TensorFlow had begun to use its GPU before keras_hvd.init(), and takes "
            f"nearly all of its memory, which other ranks need too: {remedy}"
        )
    return ""


def _described(tf: ModuleType, devices: Sequence) -> list[Gpu]:
    visible = tf.config.get_visible_devices("GPU")
    return [
        Gpu(
            is_visible=device in visible,
            growth=tf.config.experimental.get_memory_growth(device),
            is_divided=bool(tf.config.get_logical_device_configuration(device)),
        )
        for device in devices
    ]


def _tensorflow() -> ModuleType | None:
    """TensorFlow, or None if it is not installed: the engine does not need it."""
    try:
        import tensorflow
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        return None
    return tensorflow
