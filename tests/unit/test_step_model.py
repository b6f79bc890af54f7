"""docs/scaling_model.md: its tables are the script's, and the model's limits hold."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "benchmarks" / "step_model.py"
RNG = np.random.default_rng(1)


@pytest.fixture
def model(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("step_model")


def test_the_page_has_the_tables_that_the_script_prints():
    command = [sys.executable, str(SCRIPT)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    page = (CHECKOUT / "docs" / "scaling_model.md").read_text()

    def rows(text: str) -> list[str]:
        return [each for each in text.splitlines() if each.startswith("|")]

    assert len(rows(printed)) > 70
    assert rows(page) == rows(printed)


def test_every_figure_has_a_source_and_is_in_the_tables(model):
    given = importlib.import_module("step_figures")
    figures = [each for each in vars(given).values() if isinstance(each, given.Figure)]
    listed = given.FIGURES + given.HOROVODS_FIGURES
    assert [each for each in figures if each not in listed] == []
    assert all(
        "](" in f.source or f.source in (given.HERE, "assumption") for f in listed
    )


# --- limits -------------------------------------------------------------------------


def test_one_gpu_only_computes(model):
    for card in model.CARDS:
        for host in (model.BARE, model.ENGINE, model.TENSORFLOW):
            alone = model.resnet50_step(card, 1, host)
            assert alone.efficiency == 1
            assert alone.total == pytest.approx(card.batch / card.speed)


def test_a_perfect_network_and_host_cost_nothing(model):
    scale = model.Scale(bandwidth=np.inf, latency=0, coordination=0, host=0)
    for ranks in model.RANKS:
        for overlap in (True, False):
            found = model.resnet50_step(
                model.CARDS[2], ranks, model.ENGINE, scale, overlap
            )
            assert found.total == pytest.approx(found.compute)
            assert found.reduced == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_gets_cheaper_by_more_of_it(model, overlap):
    for _ in range(50):
        sizes = RNG.integers(1, 8 << 20, 40).tolist()
        figures = RNG.uniform(0, 1, 4) * (0.1, 1e-3, 1e-3, 1e10)
        compute, host, latency, bandwidth = figures

        total = functools.partial(total_of, model, sizes, overlap)
        once = total(compute, host, latency, bandwidth)
        assert compute <= once
        assert once <= total(compute, host, latency, bandwidth, size=2)
        assert once <= total(compute, 2 * host, latency, bandwidth)
        assert once <= total(compute, host, 2 * latency, bandwidth)
        assert once >= total(compute, host, latency, 2 * bandwidth)


def total_of(model, sizes, overlap, compute, host, latency, bandwidth, size=1) -> float:
    """Seconds of a step, whose buckets are those of the tensors at `size` 1."""
    found = model.step(
        compute,
        model.fused(sizes, 4 << 20),
        lambda _: host,
        lambda each: model.allreduce(size * each, 64, latency, bandwidth),
        overlap,
    )
    return found.total


def test_overlap_helps_and_more_gpus_do_not(model):
    for card in model.CARDS:
        steps = [model.resnet50_step(card, each, model.ENGINE) for each in model.RANKS]
        totals = [each.total for each in steps]
        assert totals == sorted(totals)
        for ranks, beside in zip(model.RANKS, steps):
            after = model.resnet50_step(card, ranks, model.ENGINE, overlap=False)
            assert beside.total < after.total


# --- against figures by hand --------------------------------------------------------


def test_allreduce_by_hand(model):
    # 2 * 7/8 * 80 MB at 140 GB/s is 1 ms.
    assert model.allreduce(80e6, 8, 5e-5, 140e9) == pytest.approx(1.05e-3)
    assert model.allreduce(80e6, 1, 5e-5, 140e9) == 0


def test_latencies_by_hand(model):
    # 14 + 2 * (7 * 1.25 + 3 * 8.5), and 1.9 * (8.4 + 24 * 5.7 + 6 * 14).
    assert model.tree_latency(64, 8) == pytest.approx(82.5e-6)
    assert model.ring_latency(16, 4) == pytest.approx(435.48e-6)


def test_steps_by_hand(model):
    # Forward takes 2 s, each of four gradients 1 s; a bucket 0.5 s of the host.
    parts = [[1.0], [1.0, 1.0], [1.0]]
    found = model.step(6, parts, lambda _: 0.5, lambda size: 2 * size)
    # Ready at 3, 5 and 6; started at 3.5, 5.5 and 6.5; reduced at 5.5, 9.5, 11.5.
    assert (found.compute, found.reduced, found.total) == (6, 8, 11.5)
    assert found.exposed == 5.5
    # Started at 6.5, 7 and 7.5; reduced at 8.5, 12.5 and 14.5.
    after = model.step(6, parts, lambda _: 0.5, lambda size: 2 * size, overlap=False)
    assert after.total == 14.5


def test_steps_equal_those_of_the_longest_path(model):
    for _ in range(50):
        parts = model.fused(RNG.integers(1, 8 << 20, 30).tolist(), 4 << 20)
        counts, sizes = [len(each) for each in parts], [sum(each) for each in parts]
        host, reduced = RNG.uniform(0, 1e-2, (2, len(parts)))
        compute, at = RNG.uniform(0, 0.5), dict(zip(sizes, reduced))
        start = functools.partial(lambda left, _: next(left), iter(host))
        found = model.step(compute, parts, start, at.__getitem__)
        ready = compute * (1 + 2 * np.cumsum(counts) / 30) / 3
        # A path waits for gradients i, the host until j, and NCCL from there on.
        paths = [
            ready[i] + host[i : j + 1].sum() + reduced[j:].sum()
            for j in range(len(parts))
            for i in range(j + 1)
        ]
        assert found.total == pytest.approx(max(compute, *paths))
