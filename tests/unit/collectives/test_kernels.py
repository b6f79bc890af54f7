"""The ops' kernels, and the arguments that stay in the host's memory on a GPU."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from keras_hvd.job import native

native.ops()
OPS = {
    kernel.op
    for kernel in kernels.get_all_registered_kernels().kernel
    if kernel.op.startswith("KerasHvd")
}
# Of other ops none does.
IN_HOST_MEMORY = {
    "KerasHvdAllgather": {"first_dims"},
    "KerasHvdAlltoall": {"splits", "received_splits"},
    "KerasHvdDone": {"handles"},
    "KerasHvdJoin": {"last"},
    "KerasHvdJobValue": {"value"},
    "KerasHvdStart": {"handle"},
    "KerasHvdWholeStep": {"zero"},
}


@pytest.mark.parametrize("op", sorted(OPS))
def test_kernels(op):
    found = {
        kernel.device_type: set(kernel.host_memory_arg)
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
    }
    expected = {"CPU": set()}
    if op != "KerasHvdNoteChange":
        expected["GPU"] = IN_HOST_MEMORY.get(op, set())
    # A program of XLA cannot join, and no graph notes a change.
    of_programs = op not in ("KerasHvdJoin", "KerasHvdNoteChange")
    if native.ops_info(tf.__version__)["xla"] and of_programs:
        expected |= {"XLA_CPU_JIT": set(), "XLA_GPU_JIT": set()}
    assert found == expected


def test_every_listed_op_has_kernels():
    assert IN_HOST_MEMORY.keys() <= OPS
