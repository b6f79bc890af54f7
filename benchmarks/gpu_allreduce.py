"""Allreduces on GPUs, beside bare NCCL: `python benchmarks/gpu_allreduce.py`.

Sums float32 tensors of 4 B to 256 MiB, and ResNet-50's 161 gradients as one request and
as one group of NCCL's; and reduces those gradients in parts while the GPU is busy with
something else, as it is in backprop. The engine and bare NCCL are asked in turn, in the
same processes, on the same memory. Where TensorFlow sees a GPU, the same through it
(gpu_tensorflow.py). Needs NumPy and a C compiler, and neither TensorFlow nor an
installed keras_hvd. Several ranks on one GPU need NVIDIA's Multi-Process Service: see
docs/gpus.md. Prints tables, writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import gpu_tensorflow
import jobs
import measurement
import plots
import tables
from contenders import workloads
from tables import Check, Table, duration, size_text, spread

from keras_hvd.job import gpu_libraries, native, settings
from keras_hvd.version import __version__

SIZES = [4 << (2 * i) for i in range(14)]
MIB = 1 << 20
WHO = {"engine": "engine", "nccl": "bare NCCL"}
RESNET = "ResNet-50's 161 gradients (102 MB)"
# Several ranks may be on one GPU from this version on, with this variable.
SHARING_NCCL = 23000
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
WITHOUT_MPS = (
    "Ranks share a GPU without NVIDIA's Multi-Process Service (nvidia-cuda-mps-control "
    "-d): they take turns of 2 ms, and these times mean nothing."
)

# contender: figure ("one", "row", "host"): summary
Measured = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    measurement.end_on_sigterm()
    options = arguments()
    sizes = [size for size in SIZES if size <= options.most]
    elements = {
        name: [math.prod(shape) for shape in shapes]
        for name, shapes in (
            ("resnet50", workloads.WORKLOADS["resnet50"]),
            ("cnn", workloads.cnn()),
        )
    }
    job = start(options)
    try:
        unique_id = job.ask(variant="new_id")[0]["id"]
        job.ask(variant="connect", unique_id=unique_id)
        by_size = {size: measure(job, [size // 4], options) for size in sizes}
        grouped = {name: measure(job, each, options) for name, each in elements.items()}
        overlap = {
            who: median_run(job, who, options) for who in ("nothing", "engine", "nccl")
        }
    finally:
        job.close()
    result = {
        "benchmark": "gpu_allreduce",
        "machine": options.machine,
        "versions": {"keras_hvd": job.version},
        "notes": [] if alone_or_served(options) else [WITHOUT_MPS],
        "settings": {
            "ranks": options.ranks,
            "devices": options.devices,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "row": options.row,
        },
        "measured": {"by_size": by_size, **grouped, "overlap": overlap},
        "checks": requirements(by_size, grouped["resnet50"]),
        "tables": [
            size_table(options, by_size),
            resnet_table(options, grouped["resnet50"]),
            overlap_table(options, overlap),
            trace_table(overlap),
        ],
    }
    add_tensorflow(result, options, sizes, grouped["cnn"])
    if options.ranks == 1:
        result["checks"] = []  # NCCL has nothing to do
    else:
        result["tables"].append(tables.check_table(result["checks"]))
    tables.publish(options.output, result)
    lines = {
        f"{name}, {what}": {size: row[who][what] for size, row in by_size.items()}
        for who, name in WHO.items()
        for what in ("one", "row")
    }
    title = "Allreduce of float32 on GPUs, Sum"
    plots.by_size(options.output / "gpu_allreduce.svg", title, {options.ranks: lines})


def add_tensorflow(
    result: dict, options: argparse.Namespace, sizes: list[int], cnn: Measured
) -> None:
    """Adds TensorFlow's figures, or the reason why there are none."""
    variables = variables_of(options)
    why = gpu_tensorflow.missing(options.tensorflow_device)
    if not why:
        try:
            functions, version = gpu_tensorflow.measure_functions(
                options, sizes, variables
            )
            fit = gpu_tensorflow.measure_fit(options, variables)
        except measurement.ContenderError as error:
            why = str(error)  # keeps the figures from before
    if why:
        result["notes"].append(f"Without a tf.function and fit: {why}.")
        return
    nccl = cnn["nccl"]["one"]["median"]
    result["versions"]["tensorflow"] = version
    result["measured"] |= {"functions": functions, "fit": fit}
    result["checks"] += gpu_tensorflow.requirements(functions, fit, nccl)
    result["tables"] += [
        gpu_tensorflow.function_table(options, functions),
        gpu_tensorflow.fit_table(options, fit, nccl),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurement.add_arguments(parser, seconds=1, rounds=5)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="default: one for each GPU; 2 on one where NCCL is 2.30 or later",
    )
    parser.add_argument(
        "--most", type=int, default=SIZES[-1], metavar="BYTES", help="largest tensor"
    )
    parser.add_argument(
        "--row",
        type=int,
        default=20,
        metavar="CALLS",
        help="calls that are enqueued one behind the other (default: 20)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=8,
        metavar="N",
        help="parts of what the GPU is busy with meanwhile (default: 8)",
    )
    parser.add_argument(
        "--chunk-bytes",
        type=int,
        default=64 * MIB,
        metavar="BYTES",
        help="that each of these sets (default: 64 MiB)",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="of a turn under fit (default: 100)"
    )
    parser.add_argument(
        "--jit-compile",
        nargs="+",
        choices=list(gpu_tensorflow.JIT_COMPILE),
        default=list(gpu_tensorflow.JIT_COMPILE),
        help="under fit (default: all of them)",
    )
    parser.add_argument(
        "--tensorflow-device",
        choices=["GPU", "CPU"],
        default="GPU",
        help="CPU: tries out the functions and fit where there is no GPU",
    )
    jobs.add_engine_argument(parser)
    options = parser.parse_args()
    found = find_gpus(options)
    text = found.text.decode().replace("\n", "; ")
    if options.ranks is None:
        shared = 2 if found.nccl_version >= SHARING_NCCL else 1
        options.ranks = found.devices if found.devices > 1 else shared
    options.devices = [rank % found.devices for rank in range(options.ranks)]
    if options.ranks > found.devices and found.nccl_version < SHARING_NCCL:
        sys.exit(f"Several ranks on a GPU need NCCL 2.30: {text}")
    options.version = f"keras_hvd {__version__}, {text}"
    options.machine = measurement.machine()
    return options


def find_gpus(options: argparse.Namespace) -> native.GpuSupport:
    """The GPUs and the libraries; ends this process where there are none."""
    read = settings.read()
    options.cuda = os.fsdecode(read.cuda_library)
    nccl = read.nccl_library or gpu_libraries.packaged_nccl()
    options.nccl = os.fsdecode(nccl)
    found = native.gpu_support(
        native.open_engine(options.engine), read.cuda_library, nccl
    )
    cuda, _, nccl = found.text.decode().partition("\n")
    if found.devices == 0:
        sys.exit(f"No GPU: {cuda}")
    if found.nccl_version == 0:
        sys.exit(f"No NCCL: {nccl}")
    return found


def start(options: argparse.Namespace) -> measurement.Job:
    return jobs.gpu(
        "gpu_allreduce.py",
        options.engine,
        options.cuda,
        options.nccl,
        options.devices,
        *("--most", options.most, "--version", options.version),
        *("--chunk-bytes", options.chunk_bytes),
        variables=variables_of(options),
    )


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """The environment variables that NCCL needs."""
    return SHARING if shares_a_gpu(options) else {}


def shares_a_gpu(options: argparse.Namespace) -> bool:
    return options.ranks > len({*options.devices})


def alone_or_served(options: argparse.Namespace) -> bool:
    """Whether ranks need not take turns on their GPUs."""
    return not shares_a_gpu(options) or mps_runs(os.environ)


def mps_runs(variables: Mapping[str, str]) -> bool:
    """Whether there is a Multi-Process Service, by the pipe that takes its commands."""
    folder = variables.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return (Path(folder) / "control").exists()


def measure(
    job: measurement.Job, elements: list[int], options: argparse.Namespace
) -> Measured:
    """Both contenders in turn, one call at a time and in a row."""
    seconds = {who: {"one": [], "row": [], "host": []} for who in WHO}
    repeats = {}
    for who in WHO:
        ask(job, who, elements, 1, 1)  # makes the buffers for a size
        for what, calls in (("one", 1), ("row", options.row)):
            _, (once,) = ask(job, who, elements, 1, calls)
            share = options.seconds / options.rounds / max(once, 1e-6)
            repeats[who, what] = max(2, min(1000, math.ceil(share)))
    for _ in range(options.rounds):
        for who in WHO:
            host, whole = ask(job, who, elements, repeats[who, "one"], 1)
            seconds[who]["one"] += whole
            seconds[who]["host"] += host
            _, whole = ask(job, who, elements, repeats[who, "row"], options.row)
            seconds[who]["row"] += [each / options.row for each in whole]
    return {
        who: {what: measurement.summary(values) for what, values in found.items()}
        for who, found in seconds.items()
    }


def ask(
    job: measurement.Job, who: str, elements: list[int], repeats: int, in_a_row: int
) -> tuple[list[float], list[float]]:
    """Rank 0's seconds until all was enqueued, and until it had ended."""
    answer = job.ask(
        variant="reduce",
        who=who,
        elements=elements,
        repeats=repeats,
        in_a_row=in_a_row,
        warm_up=min(10, repeats // 5),
    )[0]
    return answer["host"], answer["whole"]


def median_run(
    job: measurement.Job, who: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """The run of median length, on rank 0, of several under a busy stream."""
    runs = [
        job.ask(
            variant="backprop",
            who=who,
            chunks=options.chunks,
            chunk_bytes=options.chunk_bytes,
        )[0]
        for _ in range(max(3, options.rounds))
    ]
    # The first run also sets up events and buffers.
    return sorted(runs[1:], key=end_of)[(len(runs) - 1) // 2]


def end_of(run: dict[str, list[float]]) -> float:
    return max(run["computed"] + run["reduced"])


def size_table(options: argparse.Namespace, measured: dict[int, Measured]) -> Table:
    header = ["size"]
    header += [f"{name}, one" for name in WHO.values()]
    header += [f"{name}, in a row" for name in WHO.values()]
    header += ["engine's bandwidth", "engine's speed to NCCL's"]
    rows = []
    for size, found in measured.items():
        row = found["engine"]["row"]["median"]
        speed = f"{speed_to_nccl(found):.2f} x" if options.ranks > 1 else "-"
        rows.append(
            [size_text(size)]
            + [spread(found[who]["one"]) for who in WHO]
            + [spread(found[who]["row"]) for who in WHO]
            + [f"{size / row / 1e9:.3g} GB/s", speed]
        )
    return Table(
        f"Allreduce, {placed(options)}: median (10th-90th percentile)", header, rows
    )


def resnet_table(options: argparse.Namespace, measured: Measured) -> Table:
    header = ["contender", "host, until enqueued", "one, until done", "in a row, each"]
    rows = [
        [name, *(spread(measured[who][what]) for what in ("host", "one", "row"))]
        for who, name in WHO.items()
    ]
    title = f"{RESNET}, one request or group, {placed(options)}"
    return Table(f"{title}: median (10th-90th percentile)", header, rows)


def overlap_table(
    options: argparse.Namespace, overlap: dict[str, dict[str, list[float]]]
) -> Table:
    alone = max(overlap["nothing"]["computed"])
    header = ["reduced by", "GPU busy until", "all reduced at", "reduced before that"]
    rows = [["nothing", duration(alone), "-", "-"]]
    for who, name in WHO.items():
        run = overlap[who]
        busy = max(run["computed"])
        early = sum(at < busy for at in run["reduced"])
        share = f"{early} of {len(run['reduced'])} parts"
        rows.append([name, duration(busy), duration(max(run["reduced"])), share])
    return Table(f"{RESNET} in parts under a busy GPU, {placed(options)}", header, rows)


def trace_table(overlap: dict[str, dict[str, list[float]]]) -> Table:
    """When each part of the work had ended, and when each part was reduced."""
    parts = range(len(overlap["engine"]["computed"]))
    return Table(
        "The same, part by part",
        ["part", "engine: computed", "reduced", "NCCL: computed", "reduced"],
        [
            [str(part)]
            + [
                duration(overlap[who][what][part])
                for who in WHO
                for what in ("computed", "reduced")
            ]
            for part in parts
        ],
    )


def placed(options: argparse.Namespace) -> str:
    ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
    gpus = len({*options.devices})
    return f"{ranks} on {'1 GPU' if gpus == 1 else f'{gpus} GPUs'}"


def requirements(by_size: dict[int, Measured], resnet: Measured) -> list[Check]:
    """The requirements on keras_hvd at the C API, checked against the figures."""
    smallest = next(iter(by_size))
    what = f"{size_text(smallest)}: one call, above bare NCCL"
    checks = [Check(what, above_nccl(by_size[smallest], "one"), 15, False, "us")]
    for size, found in by_size.items():
        if size >= MIB:
            what = f"{size_text(size)}: in a row, speed to bare NCCL's"
            checks.append(Check(what, speed_to_nccl(found), 0.95, True, "x"))
    what = f"{RESNET}: host above bare NCCL"
    return [*checks, Check(what, above_nccl(resnet, "host"), 15, False, "us")]


def speed_to_nccl(found: Measured) -> float:
    return found["nccl"]["row"]["median"] / found["engine"]["row"]["median"]


def above_nccl(found: Measured, what: str) -> float:
    """The microseconds that the engine takes longer than NCCL."""
    over = found["engine"][what]["median"] - found["nccl"][what]["median"]
    return max(0.0, 1e6 * over)


if __name__ == "__main__":
    main()
