"""keras_hvd.spark on a cluster of a master's host, and two that have the ranks."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from cluster import is_alive, kill
from spark_cluster import Session

from keras_hvd.spark import task
from keras_hvd.spark.task import Ended

EPOCHS, ROWS = 4, 48
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_train.py"


@pytest.fixture
def in_float64() -> Iterator[None]:
    floats, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(floats)
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def plain(in_float64) -> list[np.ndarray]:
    """The weights that plain Keras gets, with all rows in one process."""
    x = np.random.default_rng(0).random((ROWS, 3))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.set_weights([np.full((3, 1), 0.25), np.zeros(1)])
    model.fit(
        *(x, x.sum(axis=1, keepdims=True)),
        batch_size=ROWS,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return model.get_weights()


def require_weights(ranks: list[dict], expected: list[np.ndarray]) -> None:
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
    for found, wanted in zip(ranks[0]["weights"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def require_places(four: list[dict]) -> None:
    assert [rank["rank"] for rank in four] == [[n, 4] for n in range(4)]
    assert sorted(rank["local"] for rank in four) == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert sorted(rank["cross"] for rank in four) == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert {rank["threads"] for rank in four} == {"1"}


@pytest.fixture
def classic(session) -> Session:
    """For what is the same under Spark Connect: a rank does not know who asked."""
    if session.kind != "classic":
        pytest.skip("a classic session has shown it")
    return session


def test_jobs_of_four_and_of_two_ranks_train_as_one_process(classic, plain):
    four, two = classic.run("trains", "4,2")
    require_weights(four, plain)
    require_weights(two, plain)
    require_places(four)
    # Each rank of each job has a process of its own.
    assert len({rank["process"] for rank in [*four, *two]}) == 6


def test_one_rank_gets_its_variables(session):
    assert session.run("plain", "keras_hvd.size()") == [1]
    assert session.run("plain", "os.environ['OF_THE_RANK']") == ["yes"]


def test_ranks_train_on_rows_of_uneven_partitions(session, plain):
    ranks = session.run("trains_on_rows", "4", str(ROWS))
    assert sum(rank["rows"] for rank in ranks) == ROWS
    assert len({rank["rows"] for rank in ranks}) > 1
    require_weights(ranks, plain)
    require_places(ranks)


def test_each_row_is_on_one_rank(session):
    parts = session.run("seen", "3", "47")
    assert all(parts)
    assert sorted(sum(parts, [])) == [*range(47)]


def test_a_part_is_not_divided_again(classic):
    kind, text, *_ = classic.run("divides_twice")
    assert kind == "ValueError"
    assert "keras_hvd.spark.run has given this rank its part already" in text


def test_the_error_of_a_rank_is_raised(session, tmp_path):
    kind, text, cause, _ = session.run("failing", "raises", str(tmp_path))
    assert (kind, text) == ("LookupError", "no such thing")
    assert cause.startswith("on rank 1 on 10.")
    assert 'raise LookupError("no such thing")' in cause


def test_the_error_of_a_rank_ends_others_that_compute(session, tmp_path, eventually):
    how = "raises while another computes"
    kind, text, cause, _ = session.run("failing", how, str(tmp_path))
    began = max(each.stat().st_mtime for each in tmp_path.glob("rank-?"))
    assert (kind, text) == ("LookupError", "no such thing")
    assert cause.startswith("on rank 1 on 10.")
    assert time.time() - began < 60
    require_end(ranks_in(tmp_path), eventually)


def test_a_rank_that_dies_is_named(session, tmp_path, eventually):
    kind, text, *_ = session.run("failing", "dies", str(tmp_path))
    assert kind == "RankFailedError"
    assert "rank 1 ended before the function had returned" in text
    assert "signal 9 (SIGKILL)" in text
    require_end(ranks_in(tmp_path), eventually)


def test_nothing_is_left_of_a_task_that_is_killed(session, tmp_path, eventually):
    session.start("failing", "goes on", str(tmp_path))
    eventually(lambda: len([*tmp_path.glob("rank-?")]) == 2)
    ranks = ranks_in(tmp_path)
    launcher, *_ = ranks[1]
    kill(parent_of(parent_of(launcher)))
    kind, text, *_ = session.returned()
    assert kind == "RankFailedError"
    assert "a task of Spark ended" in text
    require_end(ranks, eventually)


def test_nothing_is_left_of_a_job_that_is_interrupted(session, tmp_path, eventually):
    session.start("failing", "goes on", str(tmp_path))
    eventually(lambda: len([*tmp_path.glob("rank-?")]) == 2)
    session.interrupt()
    kind, *_ = session.returned()
    assert kind == "KeyboardInterrupt"
    require_end(ranks_in(tmp_path), eventually)
    assert session.run("plain", "keras_hvd.size()") == [1]


def ranks_in(folder) -> list[list[int]]:
    """For each rank its launcher, itself, and a process that it has started."""
    eventual = sorted(folder.glob("rank-?"))
    return [[*map(int, each.read_text().split())] for each in eventual]


def parent_of(process: int) -> int:
    with open(f"/proc/{process}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def require_end(ranks: list[list[int]], eventually) -> None:
    assert len(ranks) == 2
    eventually(lambda: not any(is_alive(each) for rank in ranks for each in rank))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("an empty part", "ValueError", "df has 1 rows for 2 ranks, and 1 of them"),
        ("no function", "TypeError", "fn must be a function to call"),
        ("cannot be pickled", "TypeError", "cannot be pickled"),
        ("a result that cannot be pickled", "TypeError", "result cannot be pickled"),
        ("exits", "RankFailedError", "before the function had returned: exit code 0"),
        ("no ranks", "ValueError", "num_proc must be 1 or more, got 0"),
        ("output", "ValueError", "the output is in the executors' stderr"),
        ("another version", "KerasHvdError", "all nodes need keras_hvd 9.9.9, as here"),
        ("elastic", "NotImplementedError", "Spark starts all ranks of a job at once"),
        ("no rows", "ValueError", "rows for 2 ranks"),
        ("outside of a rank", "KerasHvdError", "only ranks of keras_hvd.spark.run"),
    ],
)
def test_refuses(session, what, kind, text):
    found, said, *_ = session.run("refused", what)
    assert (found, text in said) == (kind, True), said


def test_too_few_slots_are_told_with_both_numbers(session):
    kind, said, _, seconds = session.run("refused", "too many ranks")
    assert kind == "KerasHvdError"
    assert "9 ranks need 9 slots of Spark at once, and there are 4" in said
    assert "within 15 s (start_timeout)" in said
    assert seconds < 60


def test_without_a_number_there_are_as_many_ranks_as_cores(session):
    kind, said, *_ = session.run("counted")
    if session.kind == "connect":
        assert (kind, said) == ("ValueError", "run: under Spark Connect, give num_proc")
    else:
        assert [kind, said] == [4, 4]


def test_the_page_and_a_model_that_is_saved_and_loaded(session, tmp_path):
    # All ranks of the page once; what else Spark Connect does two ranks show as well.
    ranks = 4 if session.kind == "classic" else 2
    found = session.run("runs_the_page", str(tmp_path), ranks)
    assert len(found["counts"]) == ranks
    assert (found["weights"], sum(found["counts"])) == (2, ROWS)
    assert found["losses"][-1] < found["losses"][0]
    assert found["rows"] == ["y", "y__output"]
    np.testing.assert_allclose(found["predicted"], found["model"], rtol=1e-6)
    assert found["loaded"] == found["predicted"]
    assert {each.name for each in (tmp_path / "model").iterdir()} == {
        "model.keras",
        "arguments.json",
    }


# The last one of the session.
def test_nothing_is_left_of_a_killed_driver(session, tmp_path, eventually):
    if session.kind == "connect":
        pytest.skip("a client's jobs are its server's, and go on")
    session.start("failing", "goes on", str(tmp_path))
    eventually(lambda: len([*tmp_path.glob("rank-?")]) == 2)
    kill(session.process.pid)
    require_end(ranks_in(tmp_path), eventually)


def test_what_data_say_is_no_outcome():
    ended = Ended(1, "node", -0.5, b"pickled")
    told = task.of_failed(f"Error: the value 'mine {ended}'", "mine")
    assert (told.rank, told.clock, told.outcome) == (1, -0.5, b"pickled")
    assert task.of_failed(f"Error: the value 'theirs {ended}'", "mine") is None


@pytest.fixture(scope="module")
def local(spark) -> Iterator[Session]:
    """A session on this machine."""
    with spark.session("classic", CLUSTER="local[2]") as made:
        yield made


def test_slots_of_other_jobs_are_awaited_for_a_limited_time(local):
    kind, said, _, seconds = local.run("busy")
    assert kind == "KerasHvdError"
    assert "no task for 3 s (start_timeout): other jobs use its slots" in said
    assert seconds < 30


def test_dynamic_allocation_is_refused(spark):
    settings = json.dumps({"spark.dynamicAllocation.enabled": "true"})
    with spark.session("classic", CLUSTER="local[2]", SETTINGS=settings) as session:
        kind, said, *_ = session.run("refused", "anything")
    assert kind == "ValueError"
    assert "spark.dynamicAllocation.enabled=true" in said


# The last one of its session.
def test_without_a_session_it_says_what_to_do(local):
    kind, said, *_ = local.run("without_a_session")
    assert kind == "KerasHvdError"
    assert "SparkSession.builder.getOrCreate()" in said


def test_the_example(spark):
    with spark.program(EXAMPLE) as program:
        printed, _ = program.communicate(timeout=600)
    assert program.returncode == 0, printed
    assert float(re.search(r"accuracy: ([\d.]+)", printed)[1]) > 0.8
