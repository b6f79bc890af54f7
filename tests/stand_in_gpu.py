"""A GPU for torch's tensors without a GPU: over the libraries that stand in for CUDA.

The device reaches the host's memory, where torch computes at once, with the stream's
results before it. So a collective that reads too early, or whose end nobody awaits,
gives wrong numbers; the stand-in runs streams in the worst order.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from keras_hvd.backends.dense_collectives import Begun
from keras_hvd.backends.torch import gpu

CHECKOUT = Path(__file__).parents[1]
LIBRARIES = CHECKOUT / "bazel-bin" / "tf_ops" / "testing" / "gpu"


def choose() -> None:
    """Makes the engine open the stand-ins, before `keras_hvd.init`."""
    os.environ |= {
        "KERAS_HVD_CUDA_LIBRARY": str(LIBRARIES / "libcuda.so.1"),
        "KERAS_HVD_NCCL_LIBRARY": str(LIBRARIES / "libnccl.so.2"),
        "KERAS_HVD_STAND_IN_DEVICES": "1",
        # With this one the streams hold back what nobody asks for.
        "KERAS_HVD_STAND_IN_SEED": "4",
        "KERAS_HVD_STAND_IN_UNIFIED": "1",
    }


def use() -> None:
    """Makes all tensors in host memory tensors on a GPU."""
    sys.path.insert(0, str(CHECKOUT / "tests" / "gpu" / "ranks"))
    import cuda

    device = cuda.Gpu(os.environ["KERAS_HVD_CUDA_LIBRARY"], 0)
    current = SimpleNamespace(cuda_stream=device.new_stream(), device="cuda:0")
    gpu.has = lambda tensor: tensor.device.type == "cpu"
    gpu.stream_of = lambda tensor: current if gpu.has(tensor) else None
    gpu.wait_for = lambda streams: None
    finish = Begun.finish

    def finish_and_wait(begun: Begun) -> None:
        finish(begun)
        if begun.request.stream is not None:
            with device.current():
                device.synchronize(begun.request.stream)

    Begun.finish = finish_and_wait
