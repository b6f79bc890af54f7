"""The table of ranks: malformed or contradictory fields are refused by name."""

import dataclasses
import json

import pytest

from keras_hvd.world.rendezvous import rank_table
from keras_hvd.world.rendezvous.address import Address
from keras_hvd.world.rendezvous.rank_table import RankInfo, RankTable, TableError

FIRST = RankInfo(
    *(0, 2, 0, 1, "a", "kernel", 1000, "node0", 7),
    addresses=(Address("10.0.0.1", 40000), Address("fd00::1", 40001)),
)
SECOND = dataclasses.replace(FIRST, rank=1, host_key="b", host_name="node1")
TABLE = RankTable("job", "5eed", (FIRST, SECOND))


def travelled(message: dict) -> dict:
    return json.loads(json.dumps(message))


def test_a_table_arrives_as_it_was():
    assert rank_table.decode(travelled(rank_table.encode(TABLE)), 2) == TABLE


@pytest.mark.parametrize("value", [None, -1, 2**31, 1.0, True, "1", [], {}])
@pytest.mark.parametrize("name", ["rank", "size", "local_rank", "local_size", "pid"])
def test_names_a_number_that_is_none(name, value):
    message = {**travelled(rank_table.encode_rank(FIRST)), name: value}
    with pytest.raises(TableError, match=f"'{name}' is"):
        rank_table.decode_rank(message)


@pytest.mark.parametrize("value", [None, 1, [], "x" * 513])
@pytest.mark.parametrize("name", ["host_key", "kernel", "host_name"])
def test_names_a_text_that_is_none(name, value):
    message = {**travelled(rank_table.encode_rank(FIRST)), name: value}
    with pytest.raises(TableError, match=f"'{name}' is not a text"):
        rank_table.decode_rank(message)


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], "10.0.0.1", [["10.0.0.1"]], [["10.0.0.1", 0]], [["node0", 80]]),
        *([["10.0.0.1", 65536]], [[1, 80]], [["10.0.0.1", 80]] * 17, [None]),
    ],
)
def test_refuses_addresses_that_are_none(value):
    message = {**travelled(rank_table.encode_rank(FIRST)), "addresses": value}
    with pytest.raises(TableError, match="address|'host'|'port'"):
        rank_table.decode_rank(message)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ranks": None}, "'ranks' is not a list of 2"),
        ({"ranks": [1, 2]}, "a rank is not a JSON object"),
        ({"ranks": []}, "'ranks' is not a list of 2"),
        ({"job": 7}, "'job' is not a text"),
        ({"meeting": None}, "'meeting' is not a text"),
        ({"data_connections": 0}, "'data_connections' is not a number in 1..16"),
        ({"data_connections": 17}, "'data_connections' is not a number in 1..16"),
        ({"mpi": 1}, "'mpi' is not true or false"),
    ],
)
def test_names_what_is_wrong_with_a_table(change, expected):
    with pytest.raises(TableError, match=expected):
        rank_table.decode({**rank_table.encode(TABLE), **change}, 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank": 0}, "it came as rank 1, and says that it is 0"),
        ({"size": 3}, "it was started as one of 3 ranks, and rank 0 as one of 2"),
        ({"host_key": "a", "kernel": "k2"}, r"rank 0 \(.* on node0\) and rank 1 .*KEY"),
        ({"host_key": "a", "user": 1001}, "have the same KERAS_HVD_HOST_KEY, but not"),
        (
            {"kernel": "k2", "addresses": (Address("127.0.1.1", 80),)},
            r"rank 1 \(process 7 on node1\) listens at 127.0.1.1, which other hosts",
        ),
    ],
    ids=["rank", "size", "kernel", "user", "loopback"],
)
def test_ranks_that_contradict_each_other_are_named(changes, expected):
    other = dataclasses.replace(SECOND, **changes)
    with pytest.raises(TableError, match=expected):
        rank_table.check(RankTable("job", "", (FIRST, other)))


@pytest.mark.parametrize(
    ("keys", "hosts"), [("aa", [0, 0]), ("ba", [0, 1]), ("cabca", [0, 1, 2, 0, 1])]
)
def test_hosts_are_numbered_by_their_lowest_ranks(keys, hosts):
    infos = tuple(dataclasses.replace(FIRST, host_key=key) for key in keys)
    assert RankTable("job", "", infos).hosts() == hosts


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        pytest.param(["a0", "a1", "b0", "b1"], ["0/2"] * 2 + ["1/2"] * 2, id="even"),
        pytest.param(["a0", "b0", "b1"], ["0/2", "1/2", "0/1"], id="uneven"),
        pytest.param(["a1", "b0", "c1", "c0"], ["0/2", "0/2", "1/2", "1/2"], id="any"),
    ],
)
def test_cross_ranks_number_the_hosts_that_have_a_local_rank(places, expected):
    infos = tuple(
        dataclasses.replace(FIRST, host_key=key, local_rank=int(local))
        for key, local in places
    )
    table = RankTable("job", "", infos)
    found = [table.cross(rank) for rank in range(len(places))]
    assert [f"{rank}/{size}" for rank, size in found] == expected


def test_a_key_is_not_taken_for_the_absence_of_one():
    without = rank_table.identity(None)["host_key"]
    assert rank_table.identity(without)["host_key"] != without
    assert rank_table.identity("a") == rank_table.identity("a")
    assert rank_table.identity("a")["host_key"] != rank_table.identity("b")["host_key"]
