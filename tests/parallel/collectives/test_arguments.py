"""Arguments that are wrong on one rank, or differ between ranks, of every collective.

A wrong argument raises before anything is sent, so that the other ranks only wait until
the rank comes with a right one. An argument that differs raises on all of them.
"""

import inspect
import math

import numpy as np
import pytest
import tensorflow as tf
from every_collective import ARGUMENTS, takes

import keras_hvd
from keras_hvd import Average, Compression, Max, Min, Sum

# Some of XLA's ways to hand on an error lose its type.
AtRunTime = (tf.errors.InvalidArgumentError, tf.errors.InternalError)
Mismatch = tf.errors.FailedPreconditionError


def slices(values, indices=(0,), dtype=tf.int32):
    return tf.IndexedSlices(
        tf.constant(values), tf.constant(indices, dtype), tf.constant([3, 1])
    )


def right_arguments(size):
    """A call of each function that all ranks can make."""
    variables = {"variables": [tf.Variable([1.0]), tf.Variable(2)], "root_rank": 0}
    right = {}
    for function, arguments in ARGUMENTS.items():
        right[function] = arguments([[1.0]])
        if function.startswith("grouped_"):
            right[function] = {"tensors": [[1.0], [2]]}
        if takes(function, "splits"):
            right[function] |= {"tensor": [1.0] * size, "splits": [1] * size}
    return right | {
        "broadcast_": variables,
        "broadcast_variables": variables,
        "broadcast_object": {"obj": "any", "root_rank": 0},
        "allgather_object": {"obj": "any"},
    }


FUNCTIONS = list(right_arguments(1))
OF_OBJECTS = ["broadcast_object", "allgather_object"]

NO_ROOT = (*AtRunTime, keras_hvd.MismatchError)
NO_NUMBER = [
    (None, TypeError, "factor must be a number; got None"),
    ("2", TypeError, "factor must be a number; got '2'"),
    (float("nan"), ValueError, "factor must be a number; got nan"),
    (10**400, ValueError, "factor must be a number of float64; got 1000"),
]
INFINITE = [
    (-math.inf, ValueError, "scale_factor must be finite for int32 tensors; got -inf"),
]
# By argument: values, the errors that they raise, and the errors' text.
WRONG = {
    "tensor": [
        (["text"], TypeError, "got string"),
        ([[1.0], [1.0, 2.0]], ValueError, "non-rectangular|inhomogeneous"),
        (None, ValueError, "convert to a tensor; got NoneType"),
        (tf.ragged.constant([[], [1.0]]), ValueError, "tensor; got RaggedTensor"),
        (tf.sparse.eye(2), ValueError, "convert to a tensor; got SparseTensor"),
    ],
    "tensors": [
        ([[1.0], ["text"]], TypeError, "got string"),
        ([[1.0], None], ValueError, "convert to a tensor; got NoneType"),
        (3, TypeError, "not iterable"),
    ],
    "average": [(1, TypeError, "average must be True or False")],
    "compression": [
        ("fp16", TypeError, "takes a compressor, .* got 'fp16'"),
        (None, TypeError, "takes a compressor, .* got None"),
    ],
    "op": [
        ("Sum", ValueError, "op must be .* got 'Sum'"),
        (17, ValueError, "op must be .* got 17"),
    ],
    "prescale_factor": NO_NUMBER,
    "postscale_factor": NO_NUMBER,
    "name": [
        (7, TypeError, "name must be a string, got 7"),
        ("", ValueError, "name must not be empty"),
    ],
    "process_set": [
        ([0], TypeError, "process_set must be a keras_hvd.ProcessSet, got"),
        (keras_hvd.ProcessSet([0]), ValueError, "is not part of the job"),
    ],
    "root_rank": [
        (0.5, TypeError, "root_rank must be a whole number; got 0.5"),
        ("0", TypeError, "root_rank must be a whole number; got '0'"),
        (-1, NO_ROOT, "root_rank -1"),
        (1000, NO_ROOT, "root_rank 1000"),
        # The lower 32 bits, and 64, are a rank.
        (2**32, keras_hvd.MismatchError, "root_rank 4294967296 is not in 0"),
        (2**64, keras_hvd.MismatchError, "root_rank 18446744073709551616 is not in 0"),
    ],
    "splits": [
        ([1.0], TypeError, "int32 or int64; got float32"),
        (1, ValueError, "a number for each rank"),
        ([1] * 9, AtRunTime, "number for each rank"),
        (np.uint64([1]), TypeError, "int32 or int64; got uint64"),
    ],
    "variables": [
        ([tf.ones([1])], TypeError, "takes variables, which have an assign"),
        ([tf.Variable("text")], TypeError, "got string"),
    ],
    "session": [("s", TypeError, "session must be None")],
}
NO_ROWS = [(1.0, ValueError, "tf.expand_dims"), *WRONG["tensor"]]
NO_SUM = ([True], AtRunTime, "bool")
NO_SLICES = [
    (slices([[1.0]], [0.0], tf.float32), TypeError, "indices .* integers; got float32"),
    (slices([[1.0]], [0, 1]), ValueError, "an index for each row|not compatible"),
    (slices(1.0, [0]), ValueError, "an index for each row|not compatible"),
    (slices([["text"]]), TypeError, "got string"),
]
# Where a function refuses more than others.
WRONG_HERE = {
    ("allreduce", "tensor"): [*WRONG["tensor"], NO_SUM, *NO_SLICES],
    ("allreduce", "op"): [*WRONG["op"], ("Adasum", ValueError, "got 'Adasum'")],
    ("allgather", "tensor"): NO_ROWS,
    ("reducescatter", "tensor"): [*NO_ROWS, NO_SUM],
    ("alltoall", "tensor"): NO_ROWS,
    ("grouped_allreduce", "tensors"): [
        *WRONG["tensors"],
        *[([[1.0], value], *error) for value, *error in NO_SLICES],
    ],
    ("grouped_allgather", "tensors"): [
        *WRONG["tensors"],
        ([[1.0], 1.0], ValueError, "tf.expand_dims"),
    ],
    ("grouped_reducescatter", "tensors"): [
        *WRONG["tensors"],
        ([[1.0], 1.0], ValueError, "tf.expand_dims"),
    ],
    ("grouped_allreduce", "prescale_factor"): [*NO_NUMBER, *INFINITE],
    ("grouped_allreduce", "postscale_factor"): [*NO_NUMBER, *INFINITE],
    ("grouped_reducescatter", "prescale_factor"): [*NO_NUMBER, *INFINITE],
    ("grouped_reducescatter", "postscale_factor"): [*NO_NUMBER, *INFINITE],
    ("reducescatter", "op"): [*WRONG["op"], (Max, ValueError, "Sum or .*Average")],
    ("grouped_reducescatter", "op"): [(Min, ValueError, "Sum or .*Average")],
    # An object that cannot be pickled is an error on all ranks: see test_objects.py.
    ("allgather_object", "obj"): [],
    ("broadcast_object", "obj"): [],
}
WITHOUT_MEANING = {
    "device_dense": "/gpu:7",
    "device_sparse": "/gpu:7",
    "ignore_name_scope": True,
    "inplace": True,
}


def arguments_of(function):
    return list(inspect.signature(getattr(keras_hvd, function)).parameters)


def without_arguments(call, arguments):
    """A call without arguments, of which TensorFlow would make some tensors."""
    return lambda: call(**arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_ones_on_one_rank(function, way, run, rank, size):
    """Each wrong value, one after another; then it calls it as the others do."""
    if function in OF_OBJECTS and way != "eager":
        pytest.skip("Python objects are sent when a function is traced")
    call, right = getattr(keras_hvd, function), right_arguments(size)[function]
    culprit = FUNCTIONS.index(function) % size
    for argument in arguments_of(function) if rank == culprit else ():
        if argument in WITHOUT_MEANING:
            continue
        for value, error, text in WRONG_HERE.get(
            (function, argument), WRONG.get(argument)
        ):
            arguments = right | {argument: value}
            with pytest.raises(error, match=text):
                run(without_arguments(call, arguments))()

    def step():
        return call(**right)

    run(step)()
    assert keras_hvd.allreduce(1, op=Sum) == size


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_has_no_meaning_may_differ(function, rank, size):
    given = {
        argument: value
        for argument, value in WITHOUT_MEANING.items()
        if argument in arguments_of(function)
    }
    right = right_arguments(size)[function]
    getattr(keras_hvd, function)(**right, **(given if rank == 0 else {}))
    assert keras_hvd.allreduce(1, op=Sum) == size


FP16, ROWS = Compression.fp16, [[1.0], [2.0]]
DIFFERENCES = {
    "prescale": ("allreduce", {}, {"prescale_factor": 0.5}, "prescale 0.5"),
    "postscale": ("allreduce", {}, {"postscale_factor": 3}, "postscale 3"),
    "average": ("allreduce", {"average": True}, {"average": False}, "Average.*Sum"),
    "compression": ("allreduce", {}, {"compression": FP16}, "float32.*float16"),
    "slices": ("allreduce", {}, {"tensor": slices([[1.0]])}, "allreduce .*allgather "),
    "types of slices": (
        "allreduce",
        {"tensor": slices([[1.0]])},
        {"tensor": slices([[1.0]], dtype=tf.int64)},
        "int32.*int64",
    ),
    "op of a group": ("grouped_allreduce", {"op": Max}, {"op": Min}, "Max.*Min"),
    "scale of a group": (
        "grouped_allreduce",
        {"prescale_factor": 2},
        {"prescale_factor": 4},
        "prescale 2.*prescale 4",
    ),
    "types of a group": ("grouped_allreduce", {}, {"tensors": [[1], [2]]}, "float32"),
    "slices in a group": (
        "grouped_allreduce",
        {},
        {"tensors": [slices([[1.0]]), [2]]},
        "allreduce Average of 2 tensors .*allreduce Average of int32",
    ),
    "slices alone in a group": (
        "grouped_allreduce",
        {"tensors": [[1.0]]},
        {"tensors": [slices([[1.0]])]},
        "allreduce .*allgather ",
    ),
    "rows": ("allgather", {}, {"tensor": [[1.0, 2.0]]}, r"\[any,1\].*\[any,2\]"),
    "gathered group": ("grouped_allgather", {}, {"tensors": [[1.0], [2.0]]}, "int32"),
    "scattered op": ("reducescatter", {"op": Sum}, {"op": Average}, "Sum.*Average"),
    "scattered scale": (
        "reducescatter",
        {},
        {"postscale_factor": 0.1},
        r"postscale 0\.1",
    ),
    "scattered compression": ("reducescatter", {}, {"compression": FP16}, "float16"),
    "scattered group": ("grouped_reducescatter", {}, {"tensors": [ROWS]}, "2 tensors"),
    "scattered group's scale": (
        "grouped_reducescatter",
        {},
        {"prescale_factor": 9},
        "prescale 9",
    ),
    "exchanged type": ("alltoall", {}, {"tensor": [1] * 4}, "float32.*int32"),
    "root": ("broadcast", {"root_rank": 0}, {"root_rank": 1}, "root 0.*root 1"),
    "root of variables": ("broadcast_", {}, {"root_rank": 1}, "root 0.*root 1"),
}
COMPILED = ["prescale", "slices", "rows", "scattered op", "exchanged type", "root"]


@pytest.mark.parametrize(
    "name, way",
    [(name, way) for way in ("eager", "graph") for name in DIFFERENCES]
    + [pytest.param(name, "xla", marks=pytest.mark.needs_xla) for name in COMPILED],
)
def test_a_difference_is_an_error_on_every_rank(name, run, several_ranks, rank, size):
    function, common, odd, text = DIFFERENCES[name]
    arguments = right_arguments(size)[function] | common
    if rank == size - 1:
        arguments |= odd
        if function == "alltoall":
            arguments["tensor"] = [1] * size

    def step():
        return getattr(keras_hvd, function)(**arguments)

    # The ranks that have come by then are named in their order; the last one differs.
    with pytest.raises(Mismatch, match=f"ranks? .*: .*{text}") as error:
        run(step)()
    assert f"; rank {size - 1}: " in str(error.value)
    assert keras_hvd.allreduce(1, op=Sum) == size
