"""The numbers that step_model.py takes, each with its source.

Those of the host's part change with the engine: measure them again with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number that the model takes, and its source."""

    what: str
    value: float
    unit: str
    source: str


# To be measured again with each change of the host's part.
HERE = "measured on one H200: two ranks under MPS, NCCL 2.30.7, 2026"
SIMULATED = "[simulated](measurements.md#coordination-of-many-ranks)"
ASSUMED = "assumption"
TUNER = (
    "[NCCL 2.30.7, `src/graph/tuning.cc`]"
    "(https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/graph/tuning.cc), NVIDIA, 2026"
)
A100_SPEED = (
    "[ResNet-50 v1.5 for TensorFlow](https://github.com/NVIDIA/DeepLearningExamples/"
    "tree/master/TensorFlow/Classification/ConvNets/resnet50v1.5), NVIDIA, 2020"
)
HOROVOD_16 = (
    "[README of Horovod](https://github.com/horovod/horovod/pull/44), Uber, "
    "until October 2017"
)
HOROVOD_128 = (
    "[README of Horovod](https://github.com/alsrgv/horovod), Uber, from October 2017"
)
HOROVOD_512 = (
    "[Benchmarks](https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst), "
    "Horovod, since [2018](https://github.com/horovod/horovod/pull/266)"
)


def nccl_issue(number: int, who: str, repository: str = "nccl") -> str:
    """The source of a statement in an issue of NCCL's."""
    address = f"https://github.com/NVIDIA/{repository}/issues/{number}"
    return f"[{repository} issue {number}]({address}), {who}"


# The host's part.
NCCL_CALL = Figure("an allreduce of 4 B: NCCL alone", 18.4, "us", HERE)
ENGINE_CALL = Figure("the same through the engine's C API", 22.1, "us", HERE)
TF_CALL = Figure("the same in a `tf.function`", 286, "us", HERE)
TF_EMPTY = Figure("`x * 1.0` in a `tf.function`", 199, "us", HERE)
NCCL_GROUP = Figure("the host's time for 161 gradients: NCCL alone", 79.1, "us", HERE)
ENGINE_GROUP = Figure("the same through the engine's C API", 101, "us", HERE)
NCCL_DONE = Figure("161 gradients until done: NCCL alone", 1440, "us", HERE)
TF_GROUP = Figure("the same in a `tf.function`", 4230, "us", HERE)

# By the number of ranks: all of it, and the part for messages between hosts.
COORDINATION = {
    ranks: Figure(f"coordination of 161 gradients, {which}", value, "us", SIMULATED)
    for ranks, which, value in (
        (8, "8 ranks", 403),
        (64, "64 ranks", 693),
        (512, "512 ranks: as 1,024", 647),
    )
}
HOPS = {
    ranks: Figure(f"of it between hosts, {which}", value, "us", SIMULATED)
    for ranks, which, value in (
        (8, "8 ranks", 0),
        (64, "64 ranks", 21),
        (512, "512 ranks: as 1,024", 61),
    )
}

A100_TF32 = Figure("A100, TF32 and XLA, batch 256", 909, "images/s", A100_SPEED)
A100_MIXED = Figure("A100, mixed, XLA, batch 256", 2375, "images/s", A100_SPEED)
H100_RATIO = Figure(
    "H100 by A100: 14.4 by 7.8 minutes of MLPerf Training 3.0, 16 GPUs each, Dell",
    14.4 / 7.8,
    "x",
    "[MLPerf results show H100 v A100](https://silvertonconsulting.com/2023/07/12/"
    "mlperf-results-show-h100-v-a100-and-v-habana-gaudi2-gpus/), Silverton "
    "Consulting, 2023; that images/s have this ratio too is an assumption",
)
SMALL_BATCH = Figure("images/s at batch 32, by those at 256", 1, "x", ASSUMED)
FORWARD = Figure("the forward pass' share of a step", 1 / 3, "", ASSUMED)

A100_INSIDE = Figure(
    "bus bandwidth, 8 A100 of a host",
    232.5,
    "GB/s",
    nccl_issue(1048, "a user, 2023"),
)
A100_BETWEEN = Figure(
    "bus bandwidth, DGX A100s with 8 x 200 Gbit/s",
    192,
    "GB/s",
    nccl_issue(1576, "which quotes AddyLaddy (NVIDIA), 2023"),
)
H100_INSIDE = Figure(
    "bus bandwidth, 8 H100 of a host",
    480,
    "GB/s",
    nccl_issue(212, "sjeaugey (NVIDIA), 2024: at the largest sizes", "nccl-tests"),
)
H100_BETWEEN = Figure(
    "bus bandwidth, 8 H100 with 8 x 400 Gbit/s: 8 x 46",
    368,
    "GB/s",
    nccl_issue(290, "AddyLaddy (NVIDIA), 2025: 46 to 48 for each", "nccl-tests"),
)
TREE_SHARE = Figure(
    "a tree's share of that at 4 MiB: 0.92 x 120/128 x 0.8",
    0.92 * 120 / 128 * 0.8,
    "",
    TUNER,
)
TREE_BASE = Figure("a tree's latency: to begin with", 14.0, "us", TUNER)
TREE_INSIDE = Figure("for each further GPU of a host, twice", 1.25, "us", TUNER)
TREE_BETWEEN = Figure("for each doubling of the hosts, twice", 8.5, "us", TUNER)

# Horovod's cluster: rings, of GPUs on PCIe.
RING_BASE = Figure("a ring's latency: to begin with", 8.4, "us", TUNER)
RING_INSIDE = Figure("for each step within a host, over PCIe", 5.7, "us", TUNER)
RING_BETWEEN = Figure("for each step between hosts", 14.0, "us", TUNER)
RING_PLATEAU = Figure("the same of large tensors, before A100", 1.9, "x", TUNER)
ROCE_SHARE = Figure(
    "of a line's 25 Gbit/s, what NCCL reaches: 24 of 25 GB/s at 200 Gbit/s",
    24 / 25,
    "",
    nccl_issue(412, "sjeaugey (NVIDIA), 2023; of RoCE too is an assumption"),
)
INCEPTION = Figure("Inception V3, batch 64, one GPU", 134.4, "images/s", HOROVOD_16)
RESNET = Figure("ResNet-101, batch 64, one GPU", 119.4, "images/s", HOROVOD_16)
VGG = Figure("VGG-16, batch 64, one GPU", 130.9, "images/s", HOROVOD_16)
INCEPTION_SIZE = Figure(
    "Inception V3: millions of parameters, here in 189 equal parts",
    23.9,
    "",
    "[Keras Applications](https://keras.io/api/applications/); equal parts are an "
    "assumption",
)
FUSION = Figure(
    "Horovod's fusion buffer",
    64,
    "MiB",
    "[Tensor Fusion](https://horovod.readthedocs.io/en/stable/tensor_fusion_include"
    ".html), Horovod; that each is as full as it can be is an assumption",
)
CYCLE = Figure(
    "Horovod's cycle, of which a buffer waits for half",
    5,
    "ms",
    "[Changes of Horovod 0.21](https://newreleases.io/project/github/horovod/horovod/"
    "release/v0.21.0): 5 ms before; half is an assumption",
)
# By the model: on 16, 128 and 512 GPUs.
MEASURED = {
    model: [
        Figure(f"efficiency: {model}, 16 GPUs", at_16, "", HOROVOD_16),
        Figure("the same, 128 GPUs", at_128, "", HOROVOD_128),
        Figure("the same, 512 GPUs", at_512, "", HOROVOD_512),
    ]
    for model, at_16, at_128, at_512 in (
        ("Inception V3", 2022.6 / 16 / INCEPTION.value, 0.90, 0.90),
        ("ResNet-101", 1746.2 / 16 / RESNET.value, 0.90, 0.90),
        ("VGG-16", 1787.4 / 16 / VGG.value, 0.79, 0.68),
    )
}
DGX_TF32 = Figure(
    "efficiency: 8 A100, TF32", 7000 / 8 / A100_TF32.value, "", A100_SPEED
)
DGX_MIXED = Figure("the same, mixed", 17400 / 8 / A100_MIXED.value, "", A100_SPEED)
FIGURES = [
    *(NCCL_CALL, ENGINE_CALL, TF_CALL, TF_EMPTY),
    *(NCCL_GROUP, ENGINE_GROUP, NCCL_DONE, TF_GROUP),
    *(*COORDINATION.values(), *HOPS.values()),
    *(A100_TF32, A100_MIXED, H100_RATIO, SMALL_BATCH, FORWARD),
    *(A100_INSIDE, A100_BETWEEN, H100_INSIDE, H100_BETWEEN, TREE_SHARE),
    *(TREE_BASE, TREE_INSIDE, TREE_BETWEEN),
]
HOROVODS_FIGURES = [
    *(RING_BASE, RING_INSIDE, RING_BETWEEN, RING_PLATEAU, ROCE_SHARE),
    *(INCEPTION, RESNET, VGG, INCEPTION_SIZE, FUSION, CYCLE),
    *(figure for model in MEASURED.values() for figure in model),
    *(DGX_TF32, DGX_MIXED),
]
# The assumptions that are no numbers, and the reasons for them.
ASSUMPTIONS = [
    (
        "each gradient takes the same part of backprop",
        "roughly so in ResNets, whose blocks have about equal work; not checked of "
        "VGG-16 and Inception V3",
    ),
    (
        "allreduces take nothing from backprop",
        "none; [on a GPU](architecture.md#on-a-gpu) they have a stream of their own",
    ),
    ("all ranks compute equally fast, and their input is always there", "none"),
    (
        "the host's part on an H200 that two ranks share is that of each of 8 ranks on "
        "other hosts",
        "none",
    ),
    (
        "coordination takes its CPU time, and no time to sleep, wake, or get a core",
        "none; [the simulation](measurements.md#coordination-of-many-ranks) leaves "
        "these out",
    ),
    (
        "a bucket's coordination begins after that of the one before",
        "none; they overlap, so this is the slower case",
    ),
    (
        "allreduces go over trees, even if NCCL would take a ring or NVLink SHARP",
        "none",
    ),
    (
        "gradients are float32 in mixed precision too",
        "Keras keeps variables in float32",
    ),
    (
        "allreduces on Horovod's cluster went over rings",
        "NCCL has had trees [since 2.4](https://github.com/NVIDIA/nccl-tests/issues/"
        "196), of December 2018",
    ),
]
