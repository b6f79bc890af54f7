"""Process sets: their members, and collectives of some ranks only."""

import functools
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from every_collective import ARGUMENTS, call

import keras_hvd
from keras_hvd import Adasum, Max, Sum

SCRIPT = Path(__file__).parent / "ranks" / "sets_at_init.py"
RUN = pytest.mark.parametrize(
    "run", ["eager", "graph", pytest.param("xla", marks=pytest.mark.needs_xla)]
)


def run_as(run, function):
    if run == "eager":
        return function
    return tf.function(function, jit_compile=run == "xla")


@pytest.fixture
def add(several_ranks):
    """Adds sets, and removes them after the test."""
    added = []

    def add(ranks):
        added.append(keras_hvd.add_process_set(ranks))
        return added[-1]

    yield add
    for each in added:
        if each.process_set_id is not None:
            assert keras_hvd.remove_process_set(each)


@pytest.fixture
def even_and_odd(add, size):
    """The two sets of every other rank."""
    return add(range(0, size, 2)), add(range(1, size, 2))


def test_the_global_set(rank, size):
    whole = keras_hvd.global_process_set
    assert whole.process_set_id == 0
    assert whole.ranks == list(range(size))
    assert (whole.rank(), whole.size(), whole.included()) == (rank, size, True)
    assert not keras_hvd.remove_process_set(whole)
    assert keras_hvd.allreduce(1, op=Sum, process_set=whole) == size


def test_nobody_is_in_a_set_that_was_removed(several_ranks, size):
    pair = keras_hvd.ProcessSet([0, size - 1] if size > 2 else [0])
    assert pair.included() is None
    for _ in range(2):
        keras_hvd.add_process_set(pair)
        assert pair.included() == (keras_hvd.rank() in pair.ranks)
        keras_hvd.remove_process_set(pair)
        assert pair.included() is False


def test_members_and_others(even_and_odd, rank, size):
    for first, each in enumerate(even_and_odd):
        ranks = list(range(first, size, 2))
        assert each.ranks == ranks
        assert each.size() == len(ranks)
        assert each.included() == (rank in ranks)
        assert each.rank() == (ranks.index(rank) if rank in ranks else None)
        assert str(each) == (
            f"ProcessSet(process_set_id={each.process_set_id}, ranks={ranks}, "
            "mpi_comm=None)"
        )
        assert each.mpi_comm is None
    numbers = [each.process_set_id for each in even_and_odd]
    assert keras_hvd.allgather_object(numbers) == [numbers] * size
    assert numbers[1] == numbers[0] + 1


@RUN
def test_every_collective(run, even_and_odd, rank, size):
    own = even_and_odd[rank % 2]
    root = own.ranks[-1]

    def collectives(x):
        return (
            keras_hvd.allreduce(x, op=Sum, process_set=own),
            keras_hvd.allreduce(x, process_set=own),
            *keras_hvd.grouped_allreduce([x, x + 1], op=Max, process_set=own),
            keras_hvd.allgather(x[None], process_set=own),
            keras_hvd.broadcast(x, root, process_set=own),
            keras_hvd.allreduce(x, op=Sum),
        )

    def collectives_and_barrier(x):
        keras_hvd.barrier(own)
        return collectives(x)

    compiled = run_as(run, collectives_and_barrier)
    of_ranks = [np.array([peer, 1.5], np.float32) for peer in range(size)]
    members = [of_ranks[peer] for peer in own.ranks]
    for _ in range(2):
        total, average, most, more, rows, from_root, of_all = compiled(
            tf.constant(of_ranks[rank])
        )
        np.testing.assert_array_equal(total, sum(members))
        np.testing.assert_allclose(average, sum(members) / len(members), rtol=1e-6)
        np.testing.assert_array_equal(most, np.max(members, 0))
        np.testing.assert_array_equal(more, np.max(members, 0) + 1)
        np.testing.assert_array_equal(rows, members)
        np.testing.assert_array_equal(from_root, of_ranks[root])
        np.testing.assert_array_equal(of_all, sum(of_ranks))


@RUN
def test_every_collective_that_splits(run, even_and_odd, rank):
    own = even_and_odd[rank % 2]
    members = own.size()

    def collectives(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            scattered = keras_hvd.reducescatter(x, op=Sum, process_set=own)
            [average] = keras_hvd.grouped_reducescatter([x], process_set=own)
            rows, splits = keras_hvd.alltoall(x, [1] * members, process_set=own)
            [all_rows] = keras_hvd.grouped_allgather([x], process_set=own)
            losses = [scattered, average, rows, all_rows]
            loss = (rank + 1.0) * tf.add_n([tf.reduce_sum(each) for each in losses])
        adasum = keras_hvd.allreduce(x, op=Adasum, process_set=own)
        even = keras_hvd.alltoall(x, process_set=own)
        gradient = tape.gradient(loss, x)
        return scattered, average, rows, splits, all_rows, adasum, even, gradient

    of_ranks = {peer: 10.0 * peer + np.arange(members) for peer in own.ranks}
    x = tf.constant(of_ranks[rank], tf.float32)
    results = run_as(run, collectives)(x)
    scattered, average, rows, splits, all_rows, adasum, even, gradient = results
    place = own.rank()
    total = sum(of_ranks.values())
    np.testing.assert_array_equal(scattered, total[place : place + 1])
    np.testing.assert_allclose(average, total[place : place + 1] / members)
    np.testing.assert_array_equal(rows, [of_ranks[p][place] for p in own.ranks])
    np.testing.assert_array_equal(even, rows)
    np.testing.assert_array_equal(splits, [1] * members)
    np.testing.assert_array_equal(all_rows, np.concatenate([*of_ranks.values()]))
    if members == 1:
        np.testing.assert_array_equal(adasum, x)
    upstream = np.array([peer + 1.0 for peer in own.ranks])
    expected = upstream * (members + 1 + 1) + upstream.mean()
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("run", ["eager", "graph"])
def test_slices_and_rows_of_other_numbers(run, even_and_odd, rank):
    own = even_and_odd[rank % 2]

    def collectives(x):
        slices = tf.IndexedSlices(x, tf.range(tf.shape(x)[0]), tf.constant([9, 1]))
        return (
            keras_hvd.allgather(x, process_set=own),
            keras_hvd.allreduce(slices, process_set=own),
        )

    rows, average = run_as(run, collectives)(tf.fill([rank + 1, 1], float(rank)))
    expected = np.concatenate([np.full([p + 1, 1], float(p)) for p in own.ranks])
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(average.values, expected / own.size(), rtol=1e-6)


def test_objects_variables_and_barriers(even_and_odd, rank):
    own = even_and_odd[rank % 2]
    root = own.ranks[-1]
    assert keras_hvd.allgather_object(rank, process_set=own) == own.ranks
    assert keras_hvd.broadcast_object(rank, root, process_set=own) == root
    assert keras_hvd.broadcast_object_fn(root, process_set=own)(rank) == root
    variables = [tf.Variable([float(rank)] * n) for n in (1, 3)]
    keras_hvd.broadcast_variables(variables, root, process_set=own)
    for variable in variables:
        np.testing.assert_array_equal(variable, [root] * len(variable.numpy()))
    variables[0].assign([float(rank)])
    value = keras_hvd.broadcast_(variables[0], root, process_set=own)
    np.testing.assert_array_equal(value, [root])
    np.testing.assert_array_equal(variables[0], [root])
    keras_hvd.barrier(own)
    keras_hvd.barrier(process_set=own, name="named")


@RUN
def test_gradients_keep_the_set(run, even_and_odd, rank):
    own = even_and_odd[rank % 2]
    root = own.ranks[0]

    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [
                tf.reduce_sum(keras_hvd.allreduce(x, op=Sum, process_set=own)),
                tf.reduce_sum(keras_hvd.allreduce(x, process_set=own)),
                tf.reduce_sum(keras_hvd.allgather(x, process_set=own)),
                tf.reduce_sum(keras_hvd.broadcast(x, root, process_set=own)),
            ]
            losses = [loss * (rank + 1.0) for loss in losses]
        return [tape.gradient(loss, x) for loss in losses]

    of_sum, of_average, of_gather, of_broadcast = run_as(run, gradients)(tf.ones([2]))
    upstream = sum(member + 1.0 for member in own.ranks)
    np.testing.assert_allclose(of_sum, [upstream] * 2)
    average = upstream / own.size()
    np.testing.assert_allclose(of_average, [average] * 2, rtol=1e-6)
    np.testing.assert_allclose(of_gather, [average] * 2, rtol=1e-6)
    np.testing.assert_allclose(of_broadcast, [average * (rank == root)] * 2, rtol=1e-6)


def test_names_of_all_ranks_do_not_depend_on_sets(even_and_odd, rank, size):
    even, _ = even_and_odd

    @tf.function
    def step(x):
        if even.included():
            x += 0 * keras_hvd.allreduce(x, op=Sum, process_set=even)
        return keras_hvd.allreduce(x, op=Sum), keras_hvd.allreduce(2 * x, op=Sum)

    once, twice = step(tf.constant(float(rank)))
    assert once == sum(range(size))
    assert twice == 2 * sum(range(size))


@RUN
def test_a_branch_for_members(run, even_and_odd, rank):
    even, odd = even_and_odd

    def total(x, own):
        if run != "xla":
            return tf.reduce_sum(keras_hvd.allgather(x, process_set=own))
        # The values that the gradient keeps of a branch have the branch's shapes, which
        # XLA then takes for dynamic ones.
        return tf.reduce_sum(keras_hvd.allreduce(x, op=Sum, process_set=own))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.cond(
                keras_hvd.process_set_included_op(even.process_set_id) == 1,
                lambda: total(x, even),
                lambda: total(x, odd),
            )
        return loss, tape.gradient(loss, x)

    loss, gradient = run_as(run, step)(tf.constant([rank + 1.0]))
    own = even_and_odd[rank % 2]
    assert loss == sum(member + 1 for member in own.ranks)
    np.testing.assert_array_equal(gradient, [own.size() if run == "xla" else 1])


def test_a_rank_outside_gets_an_error_at_once(add, rank, size):
    first = add([0])
    calls = [
        functools.partial(call, function, [1.0], process_set=first)
        for function in ARGUMENTS
    ]
    calls += [tf.function(each) for each in calls]
    outside = f"rank {rank} is not in process set {first.process_set_id} \\(rank 0\\)"
    for collective in calls:
        if rank == 0:
            collective()
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match=outside):
            collective()
    if rank > 0:
        with pytest.raises(keras_hvd.MismatchError, match=outside):
            keras_hvd.allgather_object(1, process_set=first)
    assert keras_hvd.allreduce(1, op=Sum) == size


def test_a_root_outside(add, rank, size):
    first = add([0])
    if rank == 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match="root_rank 1 is not"):
            keras_hvd.broadcast(1.0, 1, process_set=first)
        with pytest.raises(keras_hvd.MismatchError, match="root_rank 1 is not in"):
            keras_hvd.broadcast_object(1.0, 1, process_set=first)
    assert keras_hvd.allreduce(1, op=Sum) == size


def test_a_mismatch_inside_of_a_set_stays_there(even_and_odd, rank, size):
    even, odd = even_and_odd
    if rank % 2 == 0 and even.size() > 1:
        differ = r"rank \d: .*float32\[\d\]; rank \d: .*float32\[\d\]"
        with pytest.raises(tf.errors.FailedPreconditionError, match=differ):
            keras_hvd.allreduce(tf.ones([rank + 1]), name="uneven", process_set=even)
    if rank % 2 == 1:
        keras_hvd.allreduce(tf.ones([2]), name="uneven", process_set=odd)
    assert keras_hvd.allreduce(1, op=Sum) == size


def test_sets_come_and_go(several_ranks, rank, size):
    numbers = []
    for _ in range(3):
        first = keras_hvd.ProcessSet([0])
        assert keras_hvd.add_process_set(first) is first
        numbers.append(first.process_set_id)
        if rank == 0:
            assert keras_hvd.allreduce(2, op=Sum, process_set=first) == 2
        assert keras_hvd.remove_process_set(first)
        assert first.process_set_id is None
        assert not keras_hvd.remove_process_set(first)
        with pytest.raises(ValueError, match="is not part of the job"):
            keras_hvd.allreduce(1, process_set=first)
    assert len(set(numbers)) == 3


def test_a_function_of_a_removed_set(several_ranks):
    every = keras_hvd.add_process_set([0])
    number = every.process_set_id

    @tf.function
    def step(x):
        return keras_hvd.allreduce(x, process_set=every), keras_hvd.size_op(number)

    step.get_concrete_function(tf.TensorSpec([]))
    assert keras_hvd.remove_process_set(every)
    with pytest.raises(tf.errors.OpError, match=f"there is no process set {number}"):
        step(tf.ones([]))


def test_what_cannot_be_added(add, rank, size):
    known = add([0])
    with pytest.raises(ValueError, match="is part of the job already"):
        keras_hvd.add_process_set(known)
    with pytest.raises(keras_hvd.MismatchError, match="already has rank 0"):
        keras_hvd.add_process_set([0])
    with pytest.raises(keras_hvd.MismatchError, match="process set 0 already has rank"):
        keras_hvd.add_process_set(range(size))
    with pytest.raises(keras_hvd.MismatchError, match=rf"ranks of 0\.\.{size - 1}"):
        keras_hvd.add_process_set([size])
    with pytest.raises(keras_hvd.MismatchError, match="the ranks. calls differ"):
        keras_hvd.add_process_set([rank])
    with pytest.raises(TypeError, match="takes a keras_hvd.ProcessSet"):
        keras_hvd.remove_process_set([0])
    assert keras_hvd.allreduce(1, op=Sum) == size


def test_what_is_no_set_on_one_rank(several_ranks, rank, size):
    """An error there, while the others wait for it to come with a set."""
    if rank == size - 1:
        for wrong in ([0, 0], "0", 3):
            with pytest.raises((TypeError, ValueError), match="a process set"):
                keras_hvd.add_process_set(wrong)
    first = keras_hvd.add_process_set([0])
    if rank == 0:
        with pytest.raises(TypeError, match="takes a keras_hvd.ProcessSet"):
            keras_hvd.remove_process_set([0])
    assert keras_hvd.remove_process_set(first)


def test_one_rank_adds_what_another_removes(add, rank, size):
    known = add([1])
    with pytest.raises(keras_hvd.MismatchError, match="rank 0: remove_process_set of"):
        if rank == 0:
            keras_hvd.remove_process_set(known)
        else:
            keras_hvd.add_process_set([0])
    assert known.process_set_id is not None
    assert keras_hvd.allreduce(1, op=Sum) == size


@pytest.mark.parametrize("ranks", [[], [1, 1], [-1], [0, 0.5], "01", None, 3])
def test_what_is_no_set(ranks):
    with pytest.raises((TypeError, ValueError), match="a process set (is made|has)"):
        keras_hvd.ProcessSet(ranks)


@RUN
def test_places_as_ops(run, even_and_odd, rank, size):
    even, odd = even_and_odd

    def places():
        return [
            keras_hvd.rank_op(),
            keras_hvd.size_op(),
            keras_hvd.size_op(even.process_set_id),
            keras_hvd.local_rank_op(),
            keras_hvd.local_size_op(name="local"),
            keras_hvd.process_set_included_op(),
            keras_hvd.process_set_included_op(odd.process_set_id),
        ]

    given = run_as(run, places)()
    assert all(value.dtype == tf.int32 and value.shape == [] for value in given)
    assert [int(value) for value in given] == [
        rank,
        size,
        even.size(),
        keras_hvd.local_rank(),
        keras_hvd.local_size(),
        1,
        rank % 2,
    ]


def test_places_of_no_set():
    for value_of in (keras_hvd.size_op, keras_hvd.process_set_included_op):
        with pytest.raises(tf.errors.FailedPreconditionError, match="process set 999"):
            value_of(999)
        for wrong in (keras_hvd.global_process_set, 0.5, "0"):
            with pytest.raises(TypeError, match=f"{value_of.__name__}: process_set_id"):
                value_of(wrong)


def test_overlapping_sets_in_another_order_on_each_rank(add, rank, size):
    sets = [keras_hvd.global_process_set]
    for count in (1, 2):
        for ranks in itertools.combinations(range(size), count):
            if count < size:
                sets.append(add(ranks))
    rounds = range(4)

    @tf.function(autograph=False)
    def step(x):
        own = [
            (place, each, turn)
            for place, each in enumerate(sets)
            for turn in rounds
            if each.included()
        ]
        random.Random(rank).shuffle(own)
        results = {}
        for place, each, turn in own:
            results[f"{place}/{turn}"] = keras_hvd.allreduce(
                x + float(turn), op=Sum, name=f"turn {turn}", process_set=each
            )
        return results

    for start in range(3):
        results = step(tf.constant([float(rank + start)]))
        for place, each in enumerate(sets):
            for turn in rounds:
                if each.included():
                    expected = sum(member + start + turn for member in each.ranks)
                    assert results[f"{place}/{turn}"] == [expected]


def test_sets_given_to_init(several_ranks, in_second_job):
    done = in_second_job(SCRIPT, "alike")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_ranks_that_give_init_other_sets(several_ranks, in_second_job, rank):
    done = in_second_job(SCRIPT, "differ")
    assert done.returncode == 1
    # On a rank that reports, the last actions of all ranks may come after it.
    lines = done.stderr.splitlines()
    last = next(line for line in lines if line.startswith("keras_hvd.exceptions."))
    # Rank 1 differs, and rank 0 decides. One that comes late may find rank 0 gone.
    if rank > 1 and "RankFailedError" in last:
        assert "rank 0" in last and "has left the job" in last, done.stderr
        return
    assert last.startswith("keras_hvd.exceptions.MismatchError: add_process_set() "), (
        done.stderr
    )
    assert "rank 1: add_process_set of rank" in last
