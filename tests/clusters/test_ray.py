"""keras_hvd.ray on a Ray cluster of two hosts, with two CPUs each."""

import re
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_hvd.exceptions import KerasHvdError
from keras_hvd.launch.places import Node
from keras_hvd.ray import places
from keras_hvd.version import __version__

EPOCHS, ROWS = 4, 48
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.fixture(scope="module")
def plain() -> list[np.ndarray]:
    """The weights that plain Keras gets, with all rows in one process."""
    floats = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).random((ROWS, 3))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(
        *(x, x.sum(axis=1, keepdims=True)),
        batch_size=ROWS,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    keras.config.set_floatx(floats)
    return model.get_weights()


def require_weights(ranks: list[dict], expected: list[np.ndarray]) -> None:
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
    for found, wanted in zip(ranks[0]["weights"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_four_workers_on_two_hosts_train_as_one_process(cluster, tmp_path, plain):
    found = cluster.run("trains", tmp_path, 4)
    ranks = found["ranks"]
    require_weights(ranks, plain)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert [rank["local"] for rank in ranks] == [[0, 2], [1, 2]] * 2
    assert [rank["cross"] for rank in ranks] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert len({rank["host"] for rank in ranks[:2]}) == 1
    assert len({rank["host"] for rank in ranks}) == 2
    assert {rank["threads"] for rank in ranks} == {"1"}
    assert found["metrics"]["epoch"] == EPOCHS


def test_one_worker_trains(cluster, tmp_path, plain):
    require_weights(cluster.run("trains", tmp_path, 1)["ranks"], plain)


def test_an_error_is_of_the_rank_that_raised_it(cluster, tmp_path):
    assert cluster.run("fails", tmp_path, "raises", 0) == {
        "1": "ValueError('on purpose')"
    }


def test_a_killed_rank_changes_no_weight(cluster, tmp_path, plain):
    undisturbed = cluster.run("trains", tmp_path / "undisturbed", 2)
    ranks = cluster.run("fails", tmp_path, "is killed", 1)["ranks"]
    assert ranks[0]["first"] > 0
    assert ranks[0]["weights"] == undisturbed["ranks"][0]["weights"]
    require_weights(ranks, plain)


def test_rows_of_ray_data_are_read_once(cluster, tmp_path):
    first, second = cluster.run("reads_ray_data", tmp_path)["ranks"]
    together = sorted(first["y"] + second["y"])
    assert len(together) == len({*together}) >= 46
    assert len(first["y"]) == len(second["y"])
    assert first["weights"] == second["weights"]
    assert "get_dataset_shard has given this rank its part already" in first["said"]


def test_a_tuner_trains_two_trials(cluster, tmp_path):
    found = cluster.run("tunes", tmp_path)
    assert found["0.1"] < found["0.001"]


def test_two_executors_at_once(cluster):
    found = cluster.run("two_executors")
    for number, ranks in enumerate(found["places"]):
        assert ranks == [[0, 2, 0, 3.0, str(number)], [1, 2, 0, 3.0, str(number)]]
    assert (found["kept"], found["single"]) == ([12, 12], 14)


def test_errors_of_an_executor(cluster):
    found = cluster.run("errors_of_an_executor")
    raised, exited, unpicklable, died, ended = found["said"]
    assert raised.startswith("KeyError: 'of rank 1' from on rank 1:\nTraceback")
    assert exited.startswith("RuntimeError: the function exited: SystemExit")
    assert "pickle" in unpicklable
    assert died.startswith("RankFailedError: the actor of rank 1 ended before")
    assert "was killed by SIGKILL" in died
    assert ended == "KerasHvdError: RayExecutor: call start() first"
    places = [[0, 2, 0, 3.0, ""], [1, 2, 1, 3.0, ""]]
    assert found["again"] == found["final"] == places


def test_bad_input_is_refused(cluster):
    many, hosts, elastic, none, gpus, old, outside, every = cluster.run("refused")
    assert "9 workers take 9 CPU, and the cluster had 4 CPU free after 2 s" in many
    assert "3 workers take 3 CPU on 3 nodes" in hosts
    assert "KerasTrainer's, with ray.train.ScalingConfig(num_workers=(min" in elastic
    assert "give either num_workers or num_hosts" in none
    assert "with use_gpu=True" in gpus
    assert "KerasTrainer" in old
    assert "cannot be used outside of a Ray Train training function" in outside
    assert "'epoch' or a number of batches" in every


def test_the_page(cluster):
    assert cluster.run("runs_the_page") == [10, True, [11, 11, 11, 11]]


def test_the_example(cluster):
    with cluster.program(EXAMPLE) as program:
        printed, _ = program.communicate(timeout=600)
    assert program.returncode == 0, printed
    assert "'epoch': 10" in printed


def test_a_lost_node_leaves_two_workers(cluster, tmp_path, eventually, plain):
    with cluster.driver("loses_a_node", tmp_path) as driver:
        eventually(lambda: (tmp_path / "waits").exists())
        cluster.lose(1)
        ranks = cluster.returned(driver)["ranks"]
    cluster.start(1)
    assert [rank["size"] for rank in ranks] == [2, 2]
    require_weights(ranks, plain)


# Last: Ray keeps the workers' resources for a while.
def test_all_nodes_need_the_same_version():
    nodes = [Node("0", "10.0.0.1", __version__), Node("1", "10.0.0.2", "0.0.9")]
    nodes += [Node("2", "10.0.0.3", "")]
    said = (
        f"{__version__}, as here, and 10.0.0.2 has keras_hvd 0.0.9, 10.0.0.3 has none"
    )
    with pytest.raises(KerasHvdError, match=re.escape(said)):
        places.seat(nodes, lambda *_: pytest.fail("asked"), {}, [], timeout=1)


def test_nothing_is_left_of_a_killed_driver(cluster, tmp_path, eventually):
    with cluster.driver("loses_a_node", tmp_path) as driver:
        eventually(lambda: (tmp_path / "waits").exists())
        assert len(cluster.workers()) >= 2
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    eventually(lambda: cluster.workers() == [])
