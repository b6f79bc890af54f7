"""Gives each rank one GPU: the current one of torch, on which Keras computes.

The user's choice takes precedence: `torch.cuda.set_device` before `init` or after it,
`CUDA_VISIBLE_DEVICES`, and KERAS_TORCH_DEVICE.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

from keras_hvd.backends import gpu_sharing
from keras_hvd.job import gpu_libraries, log


def pin(local_rank: int, local_size: int) -> None:
    """Makes torch compute on one GPU. Imports torch only if there are GPUs."""
    if not gpu_libraries.driver_is_loaded():
        return
    # Keras' default is the current GPU. On other devices torch leaves it alone.
    if os.environ.get("KERAS_TORCH_DEVICE", "cuda") == "cuda":
        import torch

        pin_torch(torch.cuda, local_rank, local_size, os.environ)


def pin_torch(
    cuda: ModuleType, local_rank: int, local_size: int, variables: Mapping[str, str]
) -> None:
    """Chooses one of the GPUs of this `torch.cuda`, unless the user has."""
    gpus = cuda.device_count()
    if gpus == 0:
        return
    own = local_rank % gpus
    if not cuda.is_initialized():
        cuda.set_device(own)
    elif own != 0 and cuda.current_device() == 0:
        log.write(
            "warning",
            f"torch had begun to use the first of {gpus} GPUs before keras_hvd.init(), "
            "so this rank computes there, like others: call keras_hvd.init() before "
            "the first tensor is made, or torch.cuda.set_device yourself",
        )
    if local_rank == 0 and gpu_sharing.is_certain(gpus, local_size, variables):
        gpu_sharing.tell(gpus, local_size, variables)


def name_of_gpu() -> str:
    """The name of the GPU on which Keras computes, for the recording; "" for none.

    >>> name_of_gpu()
    ''
    """
    import torch
    from keras.src.backend.torch.core import get_device

    device = get_device()
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
