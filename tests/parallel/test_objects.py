"""broadcast_object and allgather_object."""

import sys
import threading
import types

import numpy as np
import pytest

import keras_hvd
from keras_hvd.job import pickling


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: rank,
        lambda rank: None,
        lambda rank: {"rank": rank, "text": "ü" * (1000 * rank)},
        lambda rank: [1.5] * rank,
        lambda rank: np.full(1_000_003, rank),
    ],
    ids=["number", "none", "dict", "list", "large array"],
)
def test_every_root_and_every_rank(make, rank, size):
    gathered = keras_hvd.allgather_object(make(rank))
    assert len(gathered) == size
    for root in range(size):
        sent = keras_hvd.broadcast_object(make(rank), root)
        np.testing.assert_equal(sent, make(root))
        np.testing.assert_equal(gathered[root], make(root))


def test_functions_and_classes_that_only_one_rank_has(rank, size):
    """Lambdas, and functions and classes that are defined in a function or a script."""
    last = size - 1

    class Local:
        def __init__(self, x):
            self.x = x

        def squared(self):
            return self.x**2

    sent = keras_hvd.broadcast_object((lambda x: x + rank, Local(rank)), last)
    assert sent[0](1) == 1 + last
    assert sent[1].squared() == last**2
    gathered = keras_hvd.allgather_object(lambda: rank)
    assert [each() for each in gathered] == list(range(size))


@pytest.fixture
def script(monkeypatch):
    """The module that runs, with a class of its own."""
    module = types.ModuleType("__main__")
    exec("class Setting:\n    def __init__(self, x):\n        self.x = x", vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_classes_of_the_script(script, rank):
    """A rank that has the class gets objects of its own; another gets the class too."""
    given = script.Setting(rank)
    if rank == 1:
        del script.Setting
    sent = keras_hvd.broadcast_object(given)
    assert sent.x == 0
    assert type(sent).__name__ == "Setting"
    assert (type(sent) is type(given)) == (rank != 1)


def test_large_data_of_the_script_stays_where_it_is(script, rank):
    """A function goes by its name if the data that it uses are large."""
    script.data = np.random.default_rng().random(1_000_000)
    exec("def first():\n    return data[0]", vars(script))
    first = keras_hvd.broadcast_object(script.first)
    assert first is script.first
    assert len(pickling.dumps(script.first)) < 100_000


def test_only_the_root_has_to_be_picklable(rank):
    given = "fine" if rank == 0 else threading.Lock()
    assert keras_hvd.broadcast_object(given) == "fine"


def test_what_cannot_be_pickled_on_one_rank(rank, size):
    """Raises on all of them; on that rank, the error of cloudpickle."""
    last = size - 1
    cannot = threading.Lock() if rank == last else "fine"
    expected, match = keras_hvd.MismatchError, f"what rank {last} gave"
    if rank == last:
        expected, match = TypeError, "cannot pickle '_thread.lock'"
    with pytest.raises(expected, match=match):
        keras_hvd.broadcast_object(cannot, last)
    with pytest.raises(expected, match=match):
        keras_hvd.allgather_object(cannot)
    assert keras_hvd.broadcast_object(rank, last) == last
    assert keras_hvd.allgather_object(rank) == list(range(size))


@pytest.fixture
def small_memory_on_the_last_rank(monkeypatch, rank, size):
    """There, no array of a megabyte or more can be made."""

    def small(shape, *arguments, empty=np.empty):
        if np.prod(shape) >= 1 << 20:
            raise MemoryError("no megabyte on this rank")
        return empty(shape, *arguments)

    if rank == size - 1:
        monkeypatch.setattr(np, "empty", small)


def test_without_memory_for_all_objects_one_rank_raises(
    small_memory_on_the_last_rank, rank, size
):
    last = size - 1
    sent = b"x" * (1 << 20 if rank != last else 10)
    if rank == last and size > 1:
        with pytest.raises(MemoryError, match="no megabyte"):
            keras_hvd.allgather_object(sent)
    else:
        assert len(keras_hvd.allgather_object(sent)[0]) == len(sent)
    assert keras_hvd.allgather_object(rank) == list(range(size))


def test_without_memory_for_the_object_on_one_rank_all_raise(
    small_memory_on_the_last_rank, rank, size
):
    """No rank waits for that one, and the job goes on."""
    if size == 1:
        pytest.skip("the root needs no memory")
    expected, match = keras_hvd.MismatchError, f"rank {size - 1}: .*uint8.0."
    if rank == size - 1:
        expected, match = MemoryError, "no megabyte"
    with pytest.raises(expected, match=match):
        keras_hvd.broadcast_object(b"x" * (1 << 20))
    assert keras_hvd.broadcast_object(rank) == 0


def test_an_interrupt_during_an_allgather_leaves_it_whole(monkeypatch, rank, size):
    """It comes where Python code runs, which may be the engine's callback."""

    def interrupted(shape, *arguments, empty=np.empty):
        if shape == 0:
            return empty(shape, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if rank == size - 1:
            patch.setattr(np, "empty", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keras_hvd.allgather_object(rank)
        else:
            assert keras_hvd.allgather_object(rank) == list(range(size))
    assert keras_hvd.allgather_object(rank) == list(range(size))


def test_names_keep_calls_apart(rank):
    assert keras_hvd.broadcast_object(rank, name="one") == 0
    assert keras_hvd.allgather_object(rank, name="one")[0] == 0


def test_two_threads_without_names_are_an_error(rank):
    errors = []
    may_go_on = threading.Event()

    def other_thread():
        may_go_on.wait()
        try:
            keras_hvd.allgather_object(rank)
        except keras_hvd.MismatchError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other_thread)
    thread.start()
    # There when this thread calls it: on another rank it may be first.
    keras_hvd.allgather_object(rank)
    may_go_on.set()
    thread.join()
    [error] = errors
    assert "'unnamed_allgather_object'" in error and "name" in error
    keras_hvd.allgather_object(rank)


def test_a_root_that_does_not_exist(size):
    with pytest.raises(keras_hvd.MismatchError, match="1000"):
        keras_hvd.broadcast_object("x", root_rank=1000)
    assert keras_hvd.allgather_object(1) == [1] * size


@pytest.mark.usefixtures("several_ranks")
def test_roots_that_differ_are_an_error_on_every_rank(rank, size):
    with pytest.raises(keras_hvd.MismatchError, match="root"):
        keras_hvd.broadcast_object("x", root_rank=min(rank, 1))
    assert keras_hvd.allgather_object(1) == [1] * size


def test_a_function_that_broadcasts(rank):
    from_rank_0 = keras_hvd.broadcast_object_fn(0, name="first")
    assert from_rank_0({"of": rank}) == {"of": 0}


@pytest.mark.usefixtures("several_ranks")
def test_of_a_process_set(rank, size):
    """Roots, and ranks in messages, are counted in the whole job."""
    last = size - 1
    members = keras_hvd.add_process_set(range(1, size))
    if rank > 0:
        ranks = keras_hvd.allgather_object(rank, process_set=members)
        assert ranks == list(range(1, size))
        assert keras_hvd.broadcast_object(rank, last, process_set=members) == last
        from_last = keras_hvd.broadcast_object_fn(last, process_set=members)
        assert from_last({"of": rank}) == {"of": last}
        cannot = threading.Lock() if rank == last else "fine"
        says = "pickle" if rank == last else f"what rank {last} gave"
        with pytest.raises(Exception, match=says):
            keras_hvd.allgather_object(cannot, process_set=members)
    assert keras_hvd.remove_process_set(members)


def test_a_session_is_refused():
    for call in (
        lambda: keras_hvd.broadcast_object(1, session="s"),
        lambda: keras_hvd.allgather_object(1, "s"),
        lambda: keras_hvd.broadcast_object_fn(session="s"),
    ):
        with pytest.raises(TypeError, match="session must be None.*got 's'"):
            call()


def test_what_is_no_process_set_is_refused():
    for call in (
        lambda: keras_hvd.allgather_object(1, process_set=[0]),
        lambda: keras_hvd.broadcast_object(1, process_set=[0]),
        lambda: keras_hvd.allreduce(1, process_set=[0]),
        lambda: keras_hvd.grouped_allreduce([1], process_set=[0]),
        lambda: keras_hvd.allgather([1], process_set=[0]),
        lambda: keras_hvd.broadcast(1, 0, process_set=[0]),
        lambda: keras_hvd.barrier([0]),
        lambda: keras_hvd.broadcast_variables([], 0, process_set=[0]),
    ):
        with pytest.raises(TypeError, match="must be a keras_hvd.ProcessSet, got"):
            call()


def test_a_process_set_of_no_job_is_refused():
    new = keras_hvd.ProcessSet([0])
    assert (new.included(), new.size(), new.rank()) == (None, None, None)
    with pytest.raises(ValueError, match="allreduce: .* is not part of the job"):
        keras_hvd.allreduce(1.0, process_set=new)
