"""Allreduces on GPUs through TensorFlow, which gpu_allreduce.py measures too.

Of each size in a `tf.function`, and ResNet-50's 161 gradients as a group, beside
`tf.identity` of as many tensors; and the steps of a CNN under `fit`, beside those of
copies of one process that exchange nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence

import jobs
import measurement
from contenders.workloads import WORKLOADS, total_bytes
from tables import Check, Table, duration, size_text, spread

# How many GPUs TensorFlow sees; fails where keras_hvd cannot use it.
COUNT_GPUS = (
    "import tensorflow; from keras_hvd.job import native; native.ops(); "
    "print(len(tensorflow.config.list_physical_devices('GPU')))"
)
RESNET = "ResNet-50's 161 gradients"
# Keras compiles by default, where it can.
JIT_COMPILE = {"no": "jit_compile=False", "auto": 'jit_compile="auto"'}
OURS, COPIES = "DistributedOptimizer", "independent copies"
MOST_ABOVE_IDENTITY = 60e-6
MOST_TO_COPIES = 1.05

# bytes, or RESNET: function ("allreduce", "identity"): summary
Functions = dict[int | str, dict[str, dict[str, float]]]
# jit_compile: contender: summary of the seconds of a step
Fit = dict[str, dict[str, dict[str, float]]]


def missing(device: str) -> str:
    """Why TensorFlow cannot be measured on this kind of device; "" if it can."""
    asked = subprocess.run(
        [sys.executable, "-c", COUNT_GPUS],
        capture_output=True,
        text=True,
        env=measurement.environment(),
    )
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines()
        return said[-1] if said else f"it ended with code {asked.returncode}"
    if device == "GPU" and asked.stdout.split()[-1] == "0":
        return "TensorFlow sees no GPU"
    return ""


def measure_functions(
    options: argparse.Namespace, sizes: Sequence[int], variables: dict[str, str]
) -> tuple[Functions, str]:
    """Functions with a collective and without, in turn, in one job; its versions too.

    Args:
        options: of gpu_allreduce.py.
        sizes: in bytes.
        variables: of the environment of ranks.
    """
    job = jobs.keras_hvd(
        "gpu_functions.py",
        options.ranks,
        *("--device", options.tensorflow_device, "--row", options.row),
        variables=variables,
    )

    def measure(tensors: str, size: int) -> dict[str, dict[str, float]]:
        series = [
            measurement.Series(what, job, f"{what}/{tensors}")
            for what in ("allreduce", "identity")
        ]
        # A figure is a row of calls.
        seconds = options.seconds / options.row
        return measurement.interleave(series, size, seconds, options.rounds)

    try:
        found: Functions = {size: measure("one", size) for size in sizes}
        found[RESNET] = measure("group", total_bytes(WORKLOADS["resnet50"]))
        return found, job.version
    finally:
        job.close()


def measure_fit(options: argparse.Namespace, variables: dict[str, str]) -> Fit:
    """The steps of ranks and of copies, in turn, with and without XLA."""
    return {jit: measure_steps(jit, options, variables) for jit in options.jit_compile}


def measure_steps(
    jit: str, options: argparse.Namespace, variables: dict[str, str]
) -> dict[str, dict[str, float]]:
    given = ["--steps", options.steps, "--batch", 64, "--jit-compile", jit]
    contenders: dict[str, measurement.Job] = {}
    seconds: dict[str, list[float]] = {OURS: [], COPIES: []}
    try:
        contenders[OURS] = jobs.keras_hvd(
            "training.py", options.ranks, *given, variables=variables
        )
        contenders[COPIES] = jobs.independent("training.py", options.ranks, *given)
        for job in contenders.values():
            job.ask()  # compiles
        for _ in range(options.rounds):
            for who, job in contenders.items():
                steps = [answer["seconds"][0] for answer in job.ask()]
                seconds[who].append(statistics.mean(steps))
    finally:
        for job in contenders.values():
            job.close()
    return {who: measurement.summary(found) for who, found in seconds.items()}


def function_table(options: argparse.Namespace, measured: Functions) -> Table:
    rows = [
        [size if isinstance(size, str) else size_text(size)]
        + [spread(found[what]) for what in ("allreduce", "identity")]
        + [duration(max(0.0, above_identity(found)))]
        for size, found in measured.items()
    ]
    title = f"In a tf.function, calls in a row, {placed(options)}"
    return Table(
        f"{title}: median (10th-90th percentile)",
        ["tensors", "allreduce", "tf.identity", "above it"],
        rows,
    )


def fit_table(options: argparse.Namespace, measured: Fit, nccl: float) -> Table:
    """Steps under `fit`; `nccl` is NCCL's time for the gradients of one."""
    rows = [
        [JIT_COMPILE[jit], *(spread(found[who]) for who in (OURS, COPIES))]
        + [duration(nccl), f"{to_copies(found, nccl):.2f} x"]
        for jit, found in measured.items()
    ]
    return Table(
        f"A step of a CNN under fit, {placed(options)}: median (10th-90th percentile)",
        ["compiled with", OURS, COPIES, "NCCL's time", "to copies and NCCL"],
        rows,
    )


def requirements(functions: Functions, fit: Fit, nccl: float) -> list[Check]:
    """The requirements on keras_hvd, checked against the figures."""
    smallest = next(iter(functions))
    above = max(0.0, above_identity(functions[smallest]))
    what = f"{size_text(smallest)} in a tf.function: above tf.identity"
    most = 1e6 * MOST_ABOVE_IDENTITY
    return [
        Check(what, 1e6 * above, most, False, "us"),
        *(
            Check(
                f"fit with {JIT_COMPILE[jit]}: a step, to copies and NCCL",
                to_copies(found, nccl),
                MOST_TO_COPIES,
                False,
                "x",
            )
            for jit, found in fit.items()
        ),
    ]


def placed(options: argparse.Namespace) -> str:
    return f"{options.ranks} ranks on the {options.tensorflow_device}"


def above_identity(found: dict[str, dict[str, float]]) -> float:
    return found["allreduce"]["median"] - found["identity"]["median"]


def to_copies(found: dict[str, dict[str, float]], nccl: float) -> float:
    return found[OURS]["median"] / (found[COPIES]["median"] + nccl)
