"""Tells users that several ranks compute on one GPU, and what NCCL needs for that."""

from __future__ import annotations

from collections.abc import Mapping

from keras_hvd.job import log

_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_CHOSEN = "CUDA_VISIBLE_DEVICES"


def is_certain(gpus: int, local_size: int, variables: Mapping[str, str]) -> bool:
    """Whether ranks of this host certainly share the GPUs that a rank sees.

    A single GPU may be a different one on each rank, unless khvdrun has started the
    ranks and nobody has chosen GPUs.

    Example:

    >>> is_certain(1, 2, {"KERAS_HVD_RANK": "0"}), is_certain(1, 2, {})
    (True, False)
    """
    all_see_them = "KERAS_HVD_RANK" in variables and _CHOSEN not in variables
    return local_size > gpus and (gpus > 1 or all_see_them)


def tell(gpus: int, local_size: int, variables: Mapping[str, str]) -> None:
    """Writes a warning, or a note if the user has told NCCL of it."""
    level = "info" if variables.get(_SHARING) == "1" else "warning"
    log.write(level, message(gpus, local_size))


def message(gpus: int, ranks: int) -> str:
    """The message if there are more ranks on this host than GPUs.

    Example:

    >>> message(1, 2)
    '2 ranks share 1 GPU: from version 2.30, NCCL accepts several ranks on a GPU ...'
    """
    shared = "1 GPU" if gpus == 1 else f"{gpus} GPUs in turn"
    return (
        f"{ranks} ranks share {shared}: from version 2.30, NCCL accepts several ranks "
        f"on a GPU with {_SHARING}=1 in the environment; otherwise their tensors go "
        "through host memory"
    )
