"""The khvdruns of several hosts: the ranks that each starts, and errors."""

import re
import socket

import pytest

from keras_hvd.world.rendezvous import nodes
from keras_hvd.world.rendezvous.nodes import Node
from keras_hvd.world.rendezvous.secret import Secret

SECRET = Secret(b"only these tests know")


@pytest.fixture
def start(threads, rendezvous):
    """Starts the khvdrun of a node, with `ranks` ranks."""

    def start(number, count, ranks, timeout=20, secret=SECRET, tls=None):
        node = Node(number, count, ranks, rendezvous)
        name = len(threads.threads)
        threads.start(name, nodes.meet, node, secret, timeout, tls)

    return start


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "tls"])
@pytest.mark.parametrize("ranks", [[2, 2], [1, 3, 2], [4, 1, 1, 2]])
def test_each_starts_the_next_ranks(start, threads, begin_tls, ranks, encrypted):
    for number, count in reversed([*enumerate(ranks)]):
        start(number, len(ranks), count, tls=begin_tls if encrypted else None)
    met = threads.end().values()
    shares = sorted((share for share, _ in met), key=lambda share: share.first_rank)
    assert [share.first_rank for share in shares] == [
        sum(ranks[:number]) for number in range(len(ranks))
    ]
    assert {share.size for share in shares} == {sum(ranks)}
    assert {share.counts for share in shares} == {tuple(ranks)}
    (job,) = {share.job for share in shares}
    assert job.startswith("khvdrun-")


@pytest.mark.parametrize("encrypted", [0, 1])
def test_tls_on_one_node_only_is_an_error_on_all(start, threads, begin_tls, encrypted):
    for number in range(2):
        start(number, 2, 1, timeout=60, tls=begin_tls if number == encrypted else None)
    for error in threads.errors().values():
        assert re.match(
            rf"node {encrypted}.* was started with TLS, and node {1 - encrypted}.* "
            "without: give khvdrun --tls .* on all hosts",
            error,
        )


def test_a_node_that_never_comes_is_named_on_all(start, threads):
    start(0, 3, 1, timeout=1)
    start(2, 3, 1, timeout=20)
    (error,) = set(threads.errors().values())
    assert re.match(r"node 0, at .* waited 1 s, and node 1 of 3 did not come", error)


def test_without_node_0_the_others_say_where_they_looked(start, threads, rendezvous):
    start(1, 2, 1, timeout=0.3)
    (error,) = threads.errors().values()
    assert f"node 1 could not reach node 0 at {rendezvous} within 0.3 s" in error


@pytest.mark.parametrize(
    ("number", "count", "expected"),
    [
        (1, 3, "node 1, on .*: it was started with --nnodes 3, and node 0 with --nno"),
        (2, 3, "node 2 came, on .*, but node 0 knows of 2 nodes: start all with the"),
    ],
)
def test_another_number_of_nodes_is_an_error_on_all(
    start, threads, number, count, expected
):
    start(0, 2, 1)
    start(number, count, 1)
    (error,) = set(threads.errors().values())
    assert re.match(expected, error)


def test_two_nodes_of_one_number_are_an_error_on_all(start, threads):
    for number in (0, 1, 1):
        start(number, 3, 1)
    (error,) = set(threads.errors().values())
    assert re.match("node 1 came twice, on .*: give each node a number of its", error)


def test_too_many_ranks_are_an_error_on_all(start, threads):
    for number in range(2):
        start(number, 2, 2**30)
    (error,) = set(threads.errors().values())
    assert error == f"{2**31} ranks are too many"


def test_a_wrong_secret_is_refused(start, threads):
    start(0, 2, 1, timeout=1)
    start(1, 2, 1, secret=Secret(b"of another job's nodes"))
    first, second = threads.errors().values()
    assert {True} == {"another secret" in text for text in (first, second)}


def test_ranks_are_no_nodes(start, threads, new_job, rendezvous):
    start(0, 2, 1, timeout=1)
    job = new_job(2, timeout=1, secret=SECRET)
    job.start(1, rendezvous=rendezvous)
    assert "node 1 of 2 did not come" in str(threads.errors()[0])
    assert "rank 1 could not reach rank 0" in job.errors()[1]


def test_a_taken_port_is_an_error(start, threads, rendezvous):
    host, _, port = rendezvous.partition(":")
    with socket.create_server((host, int(port))):
        start(0, 2, 1)
        (error,) = threads.errors().values()
    assert f"node 0 cannot listen at {rendezvous}: Address already in use" in error
