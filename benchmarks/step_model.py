"""A model of a training step on many GPUs: docs/scaling_model.md.

Nothing here is measured on several GPUs. The model takes figures of one GPU, and
figures that others have published, and computes the step of ResNet-50 on 8, 64 and 512
GPUs. Then it computes steps whose times are published, to show how far off it is.
Prints the page's tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import step_figures as given
from contenders.workloads import resnet50, resnet101, total_bytes, vgg16
from step_figures import Figure
from tables import Table

from keras_hvd.backends.buckets import by_size

MICRO, MILLI, GIGA = 1e-6, 1e-3, 1e9


# --- the model ----------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds of a step.

    Args:
        compute: one GPU's time alone.
        reduced: the time of all allreduces together.
        total: the step.
    """

    compute: float
    reduced: float
    total: float

    @property
    def exposed(self) -> float:
        """The time that the exchange adds to the step."""
        return self.total - self.compute

    @property
    def efficiency(self) -> float:
        """How much of the GPUs' time is left for computing."""
        return self.compute / self.total


def allreduce(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of an allreduce of `size` bytes at a bus bandwidth in bytes a second."""
    return latency + 2 * (ranks - 1) / ranks * size / bandwidth if ranks > 1 else 0.0


def fused(sizes: Sequence[float], most: float) -> list[list[float]]:
    """Horovod's: tensors from last to first, together up to `most` bytes, or alone."""
    found: list[list[float]] = []
    for size in reversed(sizes):
        if not found or sum(found[-1]) + size > most:
            found.append([])
        found[-1].append(size)
    return found


def step(
    compute: float,
    parts: Sequence[Sequence[float]],
    host: Callable[[int], float],
    reduce: Callable[[float], float],
    overlap: bool = True,
) -> Step:
    """A step: forward, and backward with an allreduce for each bucket beside it.

    Args:
        compute: seconds of both passes.
        parts: the buckets, each with its tensors' bytes.
        host: seconds from a bucket of so many tensors to the start of its allreduce.
        reduce: seconds of an allreduce of so many bytes.
        overlap: whether buckets start during backprop, or all after it.
    """
    count = sum(map(len, parts))
    done = 0
    host_free = network_free = 0.0
    for part in parts:
        done += len(part)
        share = given.FORWARD.value + (1 - given.FORWARD.value) * done / count
        ready = compute * share if overlap else compute
        host_free = max(host_free, ready) + host(len(part))
        network_free = max(network_free, host_free) + reduce(sum(part))
    reduced = sum(reduce(sum(part)) for part in parts)
    return Step(compute, reduced, network_free)


def tree_latency(ranks: int, per_host: int) -> float:
    """Seconds that NCCL's tuner gives an allreduce over a tree, at any size."""
    inside = (min(ranks, per_host) - 1) * given.TREE_INSIDE.value
    between = math.log2(max(1, ranks / per_host)) * given.TREE_BETWEEN.value
    return (given.TREE_BASE.value + 2 * (inside + between)) * MICRO


def ring_latency(ranks: int, per_host: int) -> float:
    """The same over a ring, of large tensors, before A100."""
    between = 2 * (ranks // per_host - 1)
    inside = 2 * (ranks - 1) - between
    steps = inside * given.RING_INSIDE.value + between * given.RING_BETWEEN.value
    return (given.RING_BASE.value + steps) * given.RING_PLATEAU.value * MICRO


# --- keras_hvd on 8 GPUs a host -----------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A GPU: images a second, and bus bandwidths within and between hosts."""

    name: str
    speed: float
    batch: int
    inside: Figure
    between: Figure


@dataclass(frozen=True)
class Host:
    """The CPU's part of an allreduce: microseconds for a bucket and for each tensor."""

    name: str
    bucket: float
    tensor: float
    coordinates: bool


def linear(name: str, call: float, group: float) -> Host:
    """A host that takes `call` for one tensor, and `group` for 161."""
    return Host(name, call, (group - call) / len(resnet50()), True)


BARE = Host("NCCL alone", 0, given.NCCL_GROUP.value / len(resnet50()), False)
ENGINE = linear(
    "C API", given.ENGINE_CALL.value - given.NCCL_CALL.value, given.ENGINE_GROUP.value
)
TENSORFLOW = linear(
    "`tf.function`",
    given.TF_CALL.value - given.TF_EMPTY.value,
    given.TF_GROUP.value - given.TF_EMPTY.value - given.NCCL_DONE.value,
)
CARDS = [
    Card(
        "A100, TF32", given.A100_TF32.value, 256, given.A100_INSIDE, given.A100_BETWEEN
    ),
    Card(
        "A100, mixed",
        given.A100_MIXED.value,
        256,
        given.A100_INSIDE,
        given.A100_BETWEEN,
    ),
    Card(
        "A100, mixed",
        given.A100_MIXED.value * given.SMALL_BATCH.value,
        32,
        given.A100_INSIDE,
        given.A100_BETWEEN,
    ),
    Card(
        "H100, mixed",
        given.A100_MIXED.value * given.H100_RATIO.value,
        256,
        given.H100_INSIDE,
        given.H100_BETWEEN,
    ),
]
RANKS, PER_HOST = (8, 64, 512), 8


@dataclass(frozen=True)
class Scale:
    """Factors for the model's figures."""

    bandwidth: float = 1
    latency: float = 1
    coordination: float = 1
    host: float = 1


def coordination(ranks: int, tensors: int) -> float:
    """Seconds until all ranks may start a bucket: hops, and its share of the work."""
    hops, all_of_it = given.HOPS[ranks].value, given.COORDINATION[ranks].value
    return (hops + (all_of_it - hops) * tensors / len(resnet50())) * MICRO


def resnet50_step(
    card: Card,
    ranks: int,
    host: Host,
    scale: Scale = Scale(),
    overlap: bool = True,
) -> Step:
    """A step of ResNet-50, 8 GPUs to a host."""
    sizes = [total_bytes([shape]) for shape in resnet50()]
    between = card.inside if ranks <= PER_HOST else card.between
    bandwidth = between.value * given.TREE_SHARE.value * GIGA * scale.bandwidth
    latency = tree_latency(ranks, PER_HOST) * scale.latency

    def start(tensors: int) -> float:
        if ranks == 1:
            return 0.0
        seconds = (host.bucket + host.tensor * tensors) * scale.host * MICRO
        if host.coordinates:
            seconds += coordination(ranks, tensors) * scale.coordination
        return seconds

    return step(
        card.batch / card.speed,
        [[sizes[i] for i in bucket] for bucket in by_size(sizes)],
        start,
        lambda size: allreduce(size, ranks, latency, bandwidth),
        overlap,
    )


# --- steps that others have measured ------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A measured efficiency; a step with overlap, and one without."""

    what: str
    ranks: int
    efficiency: float
    beside: Step
    after: Step


def horovod_step(
    sizes: Sequence[float], speed: float, ranks: int, overlap: bool
) -> Step:
    """A step on Horovod's cluster: 4 GPUs a host, 25 Gbit/s between hosts."""
    bandwidth = 25e9 / 8 * given.ROCE_SHARE.value
    latency = ring_latency(ranks, 4)
    return step(
        64 / speed,
        fused(sizes, given.FUSION.value * (1 << 20)),
        lambda _: given.CYCLE.value / 2 * MILLI,
        lambda size: allreduce(size, ranks, latency, bandwidth),
        overlap,
    )


def published() -> list[Published]:
    """The efficiencies that Horovod's authors, and NVIDIA with Horovod, measured."""
    models: dict[str, tuple[Figure, list[float]]] = {
        "Inception V3": (
            given.INCEPTION,
            [given.INCEPTION_SIZE.value * 4e6 / 189] * 189,
        ),
        "ResNet-101": (given.RESNET, [total_bytes([shape]) for shape in resnet101()]),
        "VGG-16": (given.VGG, [total_bytes([shape]) for shape in vgg16()]),
    }
    found = []
    for name, (speed, sizes) in models.items():
        for ranks, measured in zip((16, 128, 512), given.MEASURED[name]):
            steps = [
                horovod_step(sizes, speed.value, ranks, on) for on in (True, False)
            ]
            what = f"{name}, Horovod's cluster"
            found.append(Published(what, ranks, measured.value, *steps))
    for card, measured in zip(CARDS, (given.DGX_TF32, given.DGX_MIXED)):
        steps = [resnet50_step(card, 8, BARE, overlap=on) for on in (True, False)]
        what = f"ResNet-50, {card.name}, DGX A100"
        found.append(Published(what, 8, measured.value, *steps))
    return found


# --- the page's tables --------------------------------------------------------------


def main() -> None:
    print("\n\n".join(page_tables()))


def page_tables() -> list[str]:
    """The tables in the order of the page."""
    return [
        steps_table().markdown(),
        changes_table().markdown(),
        published_table().markdown(),
        assumptions_table(),
        figures_table(given.FIGURES),
        figures_table(given.HOROVODS_FIGURES),
    ]


def steps_table() -> Table:
    """ResNet-50's step for each card, number of GPUs, and host."""
    hosts = [BARE, ENGINE, TENSORFLOW]
    rows = []
    for card in CARDS:
        for ranks in RANKS:
            steps = [resnet50_step(card, ranks, host) for host in hosts]
            rows.append(
                [card.name, str(card.batch), str(ranks)]
                + [f"{steps[0].compute / MILLI:.1f}", f"{steps[0].reduced / MILLI:.1f}"]
                + [f"{each.exposed / MILLI:.2f}" for each in steps]
                + [percent(each.efficiency) for each in steps]
            )
    header = ["GPU", "images", "GPUs", "compute (ms)", "allreduces (ms)"]
    header += [f"adds (ms): {host.name}" for host in hosts]
    header += [f"efficiency: {host.name}" for host in hosts]
    return Table("A step of ResNet-50, computed", header, rows)


def changes_table() -> Table:
    """The efficiency on 512 GPUs if a figure is different."""
    cases: list[tuple[str, dict]] = [
        ("as above", {}),
        ("an eighth of the bus bandwidth", {"scale": Scale(bandwidth=1 / 8)}),
        ("four times NCCL's latency", {"scale": Scale(latency=4)}),
        ("four times the host's part", {"scale": Scale(host=4)}),
        ("ten times the coordination", {"scale": Scale(coordination=10)}),
        ("no overlap with backprop", {"overlap": False}),
    ]
    cards = [CARDS[1], CARDS[2], CARDS[3]]
    rows = [
        [what]
        + [
            percent(resnet50_step(each, 512, ENGINE, **how).efficiency)
            for each in cards
        ]
        for what, how in cases
    ]
    header = ["512 GPUs, C API", *(f"{each.name}, {each.batch}" for each in cards)]
    return Table("What the efficiency depends on, computed", header, rows)


def published_table() -> Table:
    """Efficiencies that others measured, beside the model's."""
    rows = [
        [each.what, str(each.ranks), percent(each.efficiency)]
        + [percent(each.beside.efficiency), percent(each.after.efficiency)]
        + [f"{100 * (each.beside.efficiency - each.efficiency):+.0f}"]
        for each in published()
    ]
    header = ["training", "GPUs", "measured", "computed", "without overlap"]
    return Table("Published efficiencies", [*header, "computed - measured"], rows)


def figures_table(figures: list[Figure]) -> str:
    """The figures that the model takes, and their sources."""
    rows = ["| figure | value | source |", "| --- | ---: | --- |"]
    for each in figures:
        value = f"{each.value:.4g} {each.unit}".strip()
        rows.append(f"| {each.what} | {value} | {each.source} |")
    return "\n".join(rows)


def assumptions_table() -> str:
    """The model's assumptions beside its figures."""
    rows = [f"| {what} | {why} |" for what, why in given.ASSUMPTIONS]
    return "\n".join(["| assumption | what speaks for it |", "| --- | --- |", *rows])


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
