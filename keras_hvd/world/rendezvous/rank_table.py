"""The facts that ranks of a job tell each other, and the ranks that share a host."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_hvd.job.settings import MOST_DATA_CONNECTIONS
from keras_hvd.world.rendezvous.address import Address

_LONGEST_TEXT = 512
_MOST_ADDRESSES = 16
_TOO_LARGE = 2**31


class TableError(ValueError):
    """The facts from ranks are malformed or contradictory."""


@dataclass(frozen=True)
class RankInfo:
    """The facts that one rank tells the others of itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host_key: str  # equal for ranks that share a host
    kernel: str  # the running kernel and the network namespace
    user: int
    host_name: str
    pid: int
    addresses: tuple[Address, ...]  # where it listens
    memory: str = ""  # where it hands over memory; see shared_memory.py

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host_name})"


@dataclass(frozen=True)
class RankTable:
    """All ranks of a job, in their order.

    `meeting` is random, so a proof for the links of one start is invalid for another
    start.
    """

    job: str
    meeting: str
    ranks: tuple[RankInfo, ...]
    data_connections: int = 1  # for tensors, between two ranks of different hosts
    mpi: bool = False  # whether MPI carries tensors, in place of these connections
    recorded: bool = False  # whether rank 0 makes a recording of the job

    def hosts(self) -> list[int]:
        """Each rank's host, in the order of their lowest ranks.

        Example:

        >>> info = RankInfo(0, 3, 0, 1, "a", "k", 0, "node0", 7, ())
        >>> other = dataclasses.replace(info, rank=1, host_key="b")
        >>> third = dataclasses.replace(info, rank=2)
        >>> RankTable("job", "", (info, other, third)).hosts()
        [0, 1, 0]
        """
        numbers: dict[str, int] = {}
        return [numbers.setdefault(one.host_key, len(numbers)) for one in self.ranks]

    def places(self) -> list[tuple[str, int]]:
        """Each rank's host, by a name that no other host has, and its process.

        Example:

        >>> info = RankInfo(0, 3, 0, 1, "a", "k", 0, "node0", 7, ())
        >>> other = dataclasses.replace(info, rank=1, host_key="b")
        >>> third = dataclasses.replace(info, rank=2)
        >>> RankTable("job", "", (info, other, third)).places()
        [('node0', 7), ('node0 (2)', 7), ('node0', 7)]
        """
        keys: dict[str, list[str]] = {}
        found = []
        for one in self.ranks:
            same = keys.setdefault(one.host_name, [])
            if one.host_key not in same:
                same.append(one.host_key)
            number = same.index(one.host_key) + 1
            name = one.host_name if number == 1 else f"{one.host_name} ({number})"
            found.append((name, one.pid))
        return found

    def before_on_host(self, rank: int) -> list[RankInfo]:
        """The ranks before this one that have its host key, in their order."""
        key = self.ranks[rank].host_key
        return [one for one in self.ranks[:rank] if one.host_key == key]

    def divided(self, givers: Sequence[int]) -> RankTable:
        """The table, after each rank has named the rank that handed it memory.

        A rank that got none from an earlier rank has named itself, and begins another
        host.

        Example:

        >>> info = RankInfo(0, 3, 0, 3, "a", "k", 0, "node0", 7, ())
        >>> table = RankTable("job", "", tuple(
        ...     dataclasses.replace(info, rank=rank) for rank in range(4)))
        >>> table.hosts(), table.divided([0, 0, 2, 2]).hosts()
        ([0, 0, 0, 0], [0, 0, 1, 1])
        """
        # A giver of memory must have its own memory from no other rank.
        leaders = [
            giver if givers[giver] == giver else rank
            for rank, giver in enumerate(givers)
        ]
        return dataclasses.replace(
            self,
            ranks=tuple(
                dataclasses.replace(one, host_key=f"{one.host_key}, rank {leader}")
                for one, leader in zip(self.ranks, leaders, strict=True)
            ),
        )

    def of_part(self) -> RankTable:
        """The table of a part of the started ranks, with their places within it.

        Example:

        >>> info = RankInfo(0, 3, 0, 1, "a", "k", 0, "node0", 7, ())
        >>> other = dataclasses.replace(info, rank=1, host_key="b")
        >>> third = dataclasses.replace(info, rank=2)
        >>> part = RankTable("job", "", (info, other, third)).of_part()
        >>> [(one.local_rank, one.local_size) for one in part.ranks]
        [(0, 2), (0, 1), (1, 2)]
        """
        hosts, met = self.hosts(), Counter[int]()
        sizes, ranks = Counter(hosts), []
        for host, one in zip(hosts, self.ranks, strict=True):
            ranks.append(
                dataclasses.replace(one, local_rank=met[host], local_size=sizes[host])
            )
            met[host] += 1
        return dataclasses.replace(self, ranks=tuple(ranks))

    def cross(self, rank: int) -> tuple[int, int]:
        """This host's number among the hosts with the local rank, and their number.

        Example:

        >>> info = RankInfo(0, 3, 0, 2, "a", "k", 0, "node0", 7, ())
        >>> second = dataclasses.replace(info, rank=1, local_rank=1)
        >>> third = dataclasses.replace(info, rank=2, local_size=1, host_key="b")
        >>> table = RankTable("job", "", (info, second, third))
        >>> [table.cross(rank) for rank in range(3)]
        [(0, 2), (0, 1), (1, 2)]
        """
        hosts = self.hosts()
        mine = self.ranks[rank].local_rank
        same = {host for host, one in zip(hosts, self.ranks) if one.local_rank == mine}
        return sum(host < hosts[rank] for host in same), len(same)


def identity(host_key: str | None) -> dict[str, Any]:
    """The part of a `RankInfo` that determines with which ranks it may share memory.

    These are ranks of one user whose abstract unix sockets may reach each other, which
    takes the same kernel and network namespace. With a key, they also have the same
    key.

    Example:

    >>> identity("left")["host_key"], identity("left")["user"] == os.geteuid()
    ('key left', True)
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        # Without /proc. Ranks of one name that cannot hand memory over notice it.
        kernel = f"host {socket.gethostname()}"
    user = os.geteuid()
    # With a prefix, so that no key is taken for the absence of one.
    key = f"{kernel}/{user}" if host_key is None else f"key {host_key}"
    return {"host_key": key, "kernel": kernel, "user": user}


def check(table: RankTable) -> None:
    """Raises TableError if the ranks contradict each other.

    Example:

    >>> info = RankInfo(0, 2, 0, 1, "key left", "k", 0, "node0", 7, ())
    >>> other = dataclasses.replace(info, rank=1, kernel="k2", host_name="node1")
    >>> check(RankTable("job", "", (info, other)))
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.rank_table.TableError: rank 0 (process 7 on node0) ...
    """
    by_key: dict[str, RankInfo] = {}
    for number, one in enumerate(table.ranks):
        check_rank(one, number, len(table.ranks))
        same = by_key.setdefault(one.host_key, one)
        if (one.kernel, one.user) != (same.kernel, same.user):
            raise TableError(
                f"{same} and {one} have the same KERAS_HVD_HOST_KEY, but not the same "
                "machine, network namespace and user: give them different keys, or none"
            )
    _check_addresses(table.ranks)


def check_rank(info: RankInfo, number: int, size: int) -> None:
    """Raises TableError unless this is rank `number` in a job of `size` ranks.

    Example:

    >>> check_rank(RankInfo(1, 3, 0, 1, "a", "k", 0, "node0", 7, ()), 1, size=2)
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.rank_table.TableError: it was started as one of 3 ...
    """
    if info.rank != number:
        raise TableError(f"it came as rank {number}, and says that it is {info.rank}")
    if info.size != size:
        raise TableError(
            f"it was started as one of {info.size} ranks, and rank 0 as one of {size}: "
            "start all with the same size"
        )


def check_carrier(table: RankTable, own: RankInfo, mpi: bool) -> None:
    """Raises TableError unless this rank's tensors travel like rank 0's.

    Example:

    >>> info = RankInfo(0, 2, 0, 1, "a", "k", 0, "node0", 7, ())
    >>> check_carrier(RankTable("job", "", (info,), mpi=True), info, mpi=False)
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.rank_table.TableError: rank 0 (process 7 on node0) ...
    """
    if mpi == table.mpi:
        return
    names = {True: "MPI", False: "TCP"}
    raise TableError(
        f"{own} wants {names[mpi]} to carry tensors between hosts, and rank 0 wants "
        f"{names[table.mpi]}: give all ranks the same KERAS_HVD_CPU_OPERATIONS and "
        "KERAS_HVD_TLS"
    )


def _check_addresses(ranks: Sequence[RankInfo]) -> None:
    """Raises TableError if a rank listens where other machines cannot reach it."""
    if len({one.kernel for one in ranks}) == 1:
        return
    for one in ranks:
        if all(address.is_loopback for address in one.addresses):
            raise TableError(
                f"{one} listens at {one.addresses[0].host}, which other hosts cannot "
                "reach: name the interface to them by KERAS_HVD_NETWORK_INTERFACES, or "
                "give the rendezvous an IP address of the network"
            )


def encode(table: RankTable) -> dict[str, Any]:
    """The table as a message.

    Example:

    >>> info = RankInfo(0, 1, 0, 1, "a", "k", 0, "n", 7, (Address("10.0.0.1", 80),))
    >>> table = RankTable("job", "5eed", (info,))
    >>> decode(encode(table), size=1) == table
    True
    """
    return {**vars(table), "ranks": [encode_rank(one) for one in table.ranks]}


def decode(message: dict[str, Any], size: int) -> RankTable:
    """The table of a message. Raises TableError.

    Example:

    >>> decode({"job": "job", "meeting": "", "ranks": []}, size=2)
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.rank_table.TableError: 'ranks' is not a list of 2
    """
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != size:
        raise TableError(f"'ranks' is not a list of {size}")
    table = RankTable(
        _text(message, "job"),
        _text(message, "meeting"),
        tuple(decode_rank(one) for one in ranks),
        _number(message, "data_connections", 1, MOST_DATA_CONNECTIONS + 1),
        _truth(message, "mpi"),
        _truth(message, "recorded"),
    )
    check(table)
    return table


def encode_rank(info: RankInfo) -> dict[str, Any]:
    """A rank as a part of a message.

    Example:

    >>> encode_rank(RankInfo(0, 1, 0, 1, "a", "k", 0, "node0", 7, ()))["host_name"]
    'node0'
    """
    return dataclasses.asdict(info)


def decode_rank(message: Any) -> RankInfo:
    """The rank of a part of a message. Raises TableError.

    Example:

    >>> decode_rank({"rank": "0"})
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.rank_table.TableError: 'rank' is not a number in ...
    """
    if not isinstance(message, dict):
        raise TableError("a rank is not a JSON object")
    info = RankInfo(
        rank=_number(message, "rank"),
        size=_number(message, "size", least=1),
        local_rank=_number(message, "local_rank"),
        local_size=_number(message, "local_size", least=1),
        host_key=_text(message, "host_key"),
        kernel=_text(message, "kernel"),
        user=_number(message, "user", below=2**32),
        host_name=_text(message, "host_name"),
        pid=_number(message, "pid", least=1),
        addresses=_addresses(message),
        memory=_text(message, "memory"),
    )
    for value, limit in (("rank", info.size), ("local_rank", info.local_size)):
        if getattr(info, value) >= limit:
            raise TableError(f"{value!r} is {getattr(info, value)} of {limit}")
    return info


def decode_givers(givers: Any, table: RankTable) -> list[int]:
    """Checks the rank that has handed memory to each rank. Raises TableError.

    Example:

    >>> info = RankInfo(0, 1, 0, 1, "a", "k", 0, "node0", 7, ())
    >>> decode_givers([1], RankTable("job", "", (info,)))
    Traceback (most recent call last):
    keras_hvd.world.rendezvous.rank_table.TableError: rank 0 cannot have memory of 1
    """
    if not isinstance(givers, list) or len(givers) != len(table.ranks):
        raise TableError(f"'givers' is not a list of {len(table.ranks)}")
    for one, giver in zip(table.ranks, givers, strict=True):
        is_rank = type(giver) is int and 0 <= giver <= one.rank
        if not is_rank or table.ranks[giver].host_key != one.host_key:
            raise TableError(f"rank {one.rank} cannot have memory of {giver!r}")
    return givers


def _number(
    message: dict[str, Any], name: str, least: int = 0, below: int = _TOO_LARGE
) -> int:
    value = message.get(name)
    # bool is a kind of int.
    if type(value) is not int or not least <= value < below:
        raise TableError(f"{name!r} is not a number in {least}..{below - 1}")
    return value


def _truth(message: dict[str, Any], name: str) -> bool:
    value = message.get(name)
    if type(value) is not bool:
        raise TableError(f"{name!r} is not true or false")
    return value


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise TableError(
            f"{name!r} is not a text of {_LONGEST_TEXT} characters or less"
        )
    return value


def _addresses(message: dict[str, Any]) -> tuple[Address, ...]:
    value = message.get("addresses")
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _MOST_ADDRESSES:
        raise TableError(f"'addresses' is not a list of 1 to {_MOST_ADDRESSES}")
    return tuple(_address(one) for one in value)


def _address(value: Any) -> Address:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TableError("an address is not a host and a port")
    parts = {"host": value[0], "port": value[1]}
    host, port = _text(parts, "host"), _number(parts, "port", least=1, below=1 << 16)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise TableError(f"{host!r} is not an IP address") from None
    return Address(host, port)
