"""One GPU for each rank, of whose memory TensorFlow takes what it needs.

`keras_hvd.init` does what scripts for Horovod do by hand, on the devices that
TensorFlow sees, which `CUDA_VISIBLE_DEVICES` may have made fewer. What the user has set
before counts, and so does what is set afterwards, until TensorFlow uses its devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from keras_hvd.environment import World
from keras_hvd.runtime import log

# Where a driver is loaded there is one of these: of Linux, and of Linux on Windows.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")

_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_CHOSEN = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """What TensorFlow says of a GPU.

    Args:
        is_visible: whether it is to use it.
        growth: whether it takes memory as it needs it; None: nobody has said.
        is_divided: whether the user has made logical devices of it.
    """

    is_visible: bool = True
    growth: bool | None = None
    is_divided: bool = False


@dataclass(frozen=True)
class Choice:
    """What to tell TensorFlow.

    Args:
        only: the number of the GPU that is to be visible alone; None: change nothing.
        growing: the GPUs that are to take memory as they need it.
        is_shared: whether ranks have to share them, for certain.
    """

    only: int | None
    growing: tuple[int, ...]
    is_shared: bool


def driver_is_loaded() -> bool:
    """Whether this machine has a GPU of NVIDIA's and its driver, without asking it.

    Returns:
        False where there is certainly nothing to do about GPUs.

    Example:

    >>> type(driver_is_loaded())
    <class 'bool'>
    """
    return any(map(os.path.exists, _DEVICE_FILES))


def choose(gpus: Sequence[Gpu], world: World, variables: Mapping[str, str]) -> Choice:
    """Decides which GPU a rank uses.

    Args:
        gpus: those that TensorFlow sees in this process.
        world: this process' place.
        variables: its environment.

    Returns:
        What to tell TensorFlow. Where a scheduler gives each rank one GPU, each sees
        one: its number 0.

    Example:

    >>> world = World(3, 4, 3, 4, 0, 1, "job")
    >>> choose([Gpu()] * 4, world, {})
    Choice(only=3, growing=(3,), is_shared=False)
    >>> choose([Gpu()], world, {})
    Choice(only=None, growing=(0,), is_shared=False)
    """
    visible = [number for number, gpu in enumerate(gpus) if gpu.is_visible]
    only = None
    if len(gpus) > 1 and len(visible) == len(gpus):
        only = world.local_rank % len(gpus)
        visible = [only]
    used = [gpus[number] for number in visible]
    # TensorFlow wants the same of all that are visible.
    is_said = any(gpu.growth is not None or gpu.is_divided for gpu in used)
    growing = () if is_said or variables.get(_GROWTH) else tuple(visible)
    # One GPU may be another one on each rank; not where khvdrun has started them all
    # and nobody has chosen.
    all_see_it = "KERAS_HVD_RANK" in variables and _CHOSEN not in variables
    sees_all = only is not None or (len(gpus) == 1 and all_see_it)
    is_shared = sees_all and world.local_size > len(gpus)
    return Choice(only, growing, is_shared)


def pin(world: World) -> None:
    """Has TensorFlow use one GPU, if there are any; imports it then.

    Args:
        world: this process' place in the job that it has joined.

    Example:

    >>> from keras_hvd import environment
    >>> pin(environment.world())
    """
    if not driver_is_loaded():
        return
    tf = _tensorflow()
    if tf is not None:
        pin_tensorflow(tf, world, os.environ)


def pin_tensorflow(tf: ModuleType, world: World, variables: Mapping[str, str]) -> None:
    """Has a TensorFlow use one of the GPUs that it sees.

    Args:
        tf: the module.
        world: this process' place.
        variables: its environment.

    Example:

    >>> import tensorflow as tf
    >>> pin_tensorflow(tf, World(0, 1, 0, 1, 0, 1, "job"), {})
    """
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return
    choice = choose(_described(tf, devices), world, variables)
    try:
        if choice.only is not None:
            tf.config.set_visible_devices(devices[choice.only], "GPU")
        for number in choice.growing:
            tf.config.experimental.set_memory_growth(devices[number], True)
    except RuntimeError:
        # It uses its devices already.
        text = too_late(choice, len(devices), world)
        if text:
            log.write("warning", text)
    if choice.is_shared and world.local_rank == 0:
        level = "info" if variables.get(_SHARING) == "1" else "warning"
        log.write(level, sharing(len(devices), world.local_size))


def too_late(choice: Choice, gpus: int, world: World) -> str:
    """What to say where TensorFlow has begun to use its GPUs before `init`.

    Args:
        choice: what it should have been told.
        gpus: how many it sees.
        world: this process' place.

    Returns:
        The line; "" where it makes no difference.

    Example:

    >>> too_late(Choice(1, (1,), False), 2, World(1, 2, 1, 2, 0, 1, "job"))
    'TensorFlow had begun to use its 2 GPUs before keras_hvd.init(), so that ...'
    """
    if world.local_size == 1:
        return ""
    remedy = (
        "call keras_hvd.init() before the first tensor is made, or tell TensorFlow "
        "yourself with tf.config.set_visible_devices and "
        "tf.config.experimental.set_memory_growth"
    )
    if choice.only is not None:
        return (
            f"TensorFlow had begun to use its {gpus} GPUs before keras_hvd.init(), so "
            f"that this rank computes on the first, like all others: {remedy}"
        )
    if choice.is_shared:
        return (
            "TensorFlow had begun to use its GPU before keras_hvd.init(), and takes "
            f"nearly all of the memory, which other ranks need too: {remedy}"
        )
    return ""


def sharing(gpus: int, ranks: int) -> str:
    """What to say where there are more ranks than GPUs.

    Args:
        gpus: how many all of them see.
        ranks: of this host.

    Returns:
        The line.

    Example:

    >>> sharing(1, 4).partition(":")[0]
    '4 ranks share 1 GPU'
    """
    shared = "1 GPU" if gpus == 1 else f"{gpus} GPUs in turn"
    return (
        f"{ranks} ranks share {shared}: NCCL takes several ranks on a GPU from 2.30 "
        f"on, with {_SHARING}=1 in the environment; otherwise their tensors go through "
        "host memory"
    )


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
    """None where there is none: the engine's own calls need none."""
    try:
        import tensorflow
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        return None
    return tensorflow
