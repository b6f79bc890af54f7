"""The clusters of these tests, each where its engine is installed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import network
import pytest
from ray_cluster import RayCluster
from spark_cluster import Session, SparkCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Each is several jobs of TensorFlow, on cores that other tests use too.
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    Path("/tmp/ray").mkdir(exist_ok=True)
    with network.connected(2) as hosts, contextlib.ExitStack() as ends:
        made = RayCluster.__new__(RayCluster)
        ends.callback(lambda: [made.lose(number) for number in [*made.nodes]])
        made.__init__(hosts)
        yield made


@pytest.fixture(scope="session")
def spark(tmp_path_factory) -> Iterator[SparkCluster]:
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    with network.connected(3) as hosts, contextlib.ExitStack() as ends:
        yield SparkCluster(hosts, tmp_path_factory.mktemp("spark"), ends)


@pytest.fixture(scope="module", params=["classic", "connect"])
def session(request, spark) -> Iterator[Session]:
    """A session of Spark, or of Spark Connect, which takes the whole cluster."""
    with spark.session(request.param) as made:
        yield made


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds."""

    def wait(condition: Callable[[], bool], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    return wait
