"""The order of rows, and how ranks share what is left of it."""

import itertools
from collections import Counter

import numpy as np
import pytest

from keras_hvd.data.rows import Rows

COUNTS, BATCHES, SIZES = (1, 2, 5, 24, 25, 47, 96), (1, 2, 7), (1, 2, 3, 5)


def of_ranks(count, batch, size, shuffle=True):
    return [Rows(count, 0, shuffle, batch, rank, size) for rank in range(size)]


def steps_of(ranks, rest=None):
    """The places that each rank has in each step, by steps."""
    of_each = []
    for rows in ranks:
        places = rows.places(rows.share(rest))
        begins = range(0, len(places), rows.batch)
        of_each.append([places[begin : begin + rows.batch] for begin in begins])
        assert len(begins) == rows.steps(rest)
    return [*zip(*of_each, strict=True)]


def after(ranks, steps, rest=None):
    """The parts of all ranks once they have made the first ones of some steps."""
    parts = [rows.share(rest) for rows in ranks]
    for step in steps:
        for part, places in zip(parts, step):
            part[0, 1] += len(places) * part[0, 2]
    return parts


@pytest.mark.parametrize("count", COUNTS)
def test_each_place_is_in_one_step(count):
    for batch, size in itertools.product(BATCHES, SIZES):
        steps = steps_of(of_ranks(count, batch, size))
        of_steps = [{*np.concatenate(step).tolist()} for step in steps]
        # One process would make the same steps of the same rows.
        assert of_steps == [
            {*range(begin, min(begin + batch * size, count))}
            for begin in range(0, count, batch * size)
        ]
        for step, places in zip(steps, of_steps):
            counts = [len(of_rank) for of_rank in step]
            assert max(counts) - min(counts) <= 1
            assert min(counts) >= 1
            # Nobody shares a row with others, unless there are too few.
            assert sum(counts) == max(len(places), size)


@pytest.mark.parametrize("count", COUNTS)
def test_other_numbers_of_ranks_go_on_with_the_rest(count):
    """Stopped twice, after half of the steps that are left."""
    for batch, sizes in itertools.product(
        BATCHES, itertools.product(SIZES, (1, 2, 4), (3,))
    ):
        seen: Counter[int] = Counter()
        rest = None
        for job, size in enumerate(sizes):
            ranks = of_ranks(count, batch, size)
            steps = steps_of(ranks, rest)
            if job < 2:
                steps = steps[: len(steps) // 2]
            for step in steps:
                seen.update({*np.concatenate(step).tolist()})
            rest = after(ranks, steps, rest)
        assert seen == Counter(range(count))


def test_nothing_is_left_after_the_last_step():
    for count, batch, size in itertools.product(COUNTS, BATCHES, SIZES):
        ranks = of_ranks(count, batch, size)
        rest = after(ranks, steps_of(ranks))
        for others in SIZES:
            assert steps_of(of_ranks(count, batch, others), rest) == []


def test_an_epoch_has_all_rows_in_an_order_of_its_own():
    first, again = (Rows(50, 3, True, 4, rank, 2) for rank in (0, 1))
    orders = [first.order(epoch).tolist() for epoch in range(20)]
    assert [again.order(epoch).tolist() for epoch in range(20)] == orders
    assert all(sorted(each) == [*range(50)] for each in orders)
    assert len({*map(tuple, orders)}) == 20
    assert Rows(50, 4, True, 4, 0, 2).order(0).tolist() not in orders


def test_the_order_is_numpys():
    """It may not change: a job goes on with what another version has begun."""
    order = Rows(7, 1, True, 4, 0, 2).order(2)
    assert order.tolist() == np.random.RandomState([1, 2]).permutation(7).tolist()
    assert Rows(7, 1, False, 4, 0, 2).order(2).tolist() == [*range(7)]
