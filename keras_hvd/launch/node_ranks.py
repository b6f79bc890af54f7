"""The ranks of a job that this `khvdrun` starts, and their variables."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping

from keras_hvd.job import settings
from keras_hvd.launch.options import Options
from keras_hvd.world import tls
from keras_hvd.world.rendezvous import nodes, secret
from keras_hvd.world.rendezvous.nodes import NodeRanks, OtherNodes

_PREFIX = "KERAS_HVD_"

# Not for ranks of a job on one host, though khvdrun's own environment may have them.
_OF_SEVERAL_HOSTS = {_PREFIX + "RENDEZVOUS", secret.VARIABLE, secret.FILE_VARIABLE}

# These variables follow when the ranks meet.
_OF_ONE_HOST = {_PREFIX + "CROSS_RANK", _PREFIX + "CROSS_SIZE"}


def of_this_host(options: Options) -> tuple[NodeRanks, OtherNodes | None]:
    """Shares out the ranks with the other hosts, if there are any.

    Raises NotMetError if the hosts do not find each other, RendezvousError if there is
    no secret, LibraryError if there is no TLS here although it is wanted, or ValueError
    if a variable is malformed.
    """
    if options.node is None:
        job = f"khvdrun-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        return NodeRanks(0, options.ranks, job), None
    variables = {**os.environ, **options.variables}
    timeout = settings.init_timeout(variables)
    known = secret.read(variables)
    return nodes.meet(options.node, known, timeout, tls.chosen(variables), _say)


def _say(text: str) -> None:
    print(f"khvdrun: {text}", file=sys.stderr, flush=True)


def environment_of(
    number: int, ranks: NodeRanks, options: Options, given: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the rank that this host starts as its `number`th, from 0.

    `given` are the variables that all ranks get.

    Example:

    >>> options = Options(check_build=False, ranks=2)
    >>> given = {"KERAS_HVD_SECRET": "not for a job on one host"}
    >>> variables = environment_of(1, NodeRanks(0, 2, "khvdrun-7"), options, given)
    >>> variables["KERAS_HVD_RANK"]
    '1'
    >>> "KERAS_HVD_SECRET" in variables
    False
    """
    place = {
        "RANK": ranks.first_rank + number,
        "SIZE": ranks.size,
        "LOCAL_RANK": number,
        "LOCAL_SIZE": options.ranks,
    }
    cross = _cross(number, ranks, options)
    own = {**place, "JOB": ranks.job, "REQUIRE_SIZE": ranks.size}
    if options.node is None:
        own |= cross
        left_out = _OF_SEVERAL_HOSTS
    else:
        own |= {"RENDEZVOUS": options.node.rendezvous}
        left_out = _OF_ONE_HOST
    kept = {name: value for name, value in given.items() if name not in left_out}
    kept |= {_PREFIX + name: str(value) for name, value in own.items()}
    return {**kept, **of_horovod({**place, **cross})}


def of_horovod(place: Mapping[str, int]) -> dict[str, str]:
    """Horovod's variables for a rank's place, which scripts read without Horovod.

    Example:

    >>> of_horovod({"RANK": 3, "LOCAL_SIZE": 2})
    {'HOROVOD_RANK': '3', 'HOROVOD_LOCAL_SIZE': '2'}
    """
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()}


def _cross(number: int, ranks: NodeRanks, options: Options) -> dict[str, int]:
    """This host's number among the hosts that have a rank of this local rank."""
    if options.node is None:
        return {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    have_it = [count > number for count in ranks.counts]
    return {
        "CROSS_RANK": sum(have_it[: options.node.number]),
        "CROSS_SIZE": sum(have_it),
    }


def check_size(size: int, environment: Mapping[str, str]) -> None:
    """Checks a job's size against the one that the user requires.

    Raises ValueError. The variable of a rank in whose script `khvdrun` runs is for that
    rank's own job only.

    Example:

    >>> check_size(2, {"KERAS_HVD_REQUIRE_SIZE": "4"})
    Traceback (most recent call last):
    ValueError: KERAS_HVD_REQUIRE_SIZE=4, and this job would have 2 ranks
    >>> check_size(2, {"KERAS_HVD_REQUIRE_SIZE": "4", "KERAS_HVD_RANK": "0"})
    """
    if _PREFIX + "RANK" in environment:
        return
    required = settings.required_size(environment)
    if required not in (0, size):
        raise ValueError(
            f"{_PREFIX}REQUIRE_SIZE={required}, and this job would have {size} ranks"
        )
