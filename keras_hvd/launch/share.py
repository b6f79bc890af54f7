"""Which ranks of a job this `khvdrun` starts, and what they are told."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping

from keras_hvd.launch.command_line import Options
from keras_hvd.rendezvous import nodes, secret
from keras_hvd.rendezvous.nodes import Others, Share
from keras_hvd.runtime import settings, tls

_PREFIX = "KERAS_HVD_"

# Not for ranks of a job on one host, though khvdrun's own environment may have them.
_OF_SEVERAL_HOSTS = {_PREFIX + "RENDEZVOUS", secret.VARIABLE, secret.FILE_VARIABLE}

# These follow when the ranks meet.
_OF_ONE_HOST = {_PREFIX + "CROSS_RANK", _PREFIX + "CROSS_SIZE"}


def of_this_host(options: Options) -> tuple[Share, Others | None]:
    """Shares out the ranks with the other hosts, if there are any.

    Raises NotMetError if the hosts do not find each other, RendezvousError if there is
    no secret, LibraryError if there is no TLS here although it is wanted, or ValueError
    if a variable is malformed.
    """
    if options.node is None:
        job = f"khvdrun-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        return Share(0, options.ranks, job), None
    variables = {**os.environ, **options.variables}
    timeout = settings.init_timeout(variables)
    known = secret.read(variables)
    return nodes.meet(options.node, known, timeout, tls.chosen(variables), _say)


def _say(text: str) -> None:
    print(f"khvdrun: {text}", file=sys.stderr, flush=True)


def environment_of(
    number: int, share: Share, options: Options, given: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the rank that this host starts as its `number`th, from 0.

    `given` are those that all ranks get.

    Example:

    >>> options = Options(check_build=False, ranks=2)
    >>> given = {"KERAS_HVD_SECRET": "not for a job on one host"}
    >>> environment_of(1, Share(0, 2, "khvdrun-7"), options, given)["KERAS_HVD_RANK"]
    '1'
    >>> "KERAS_HVD_SECRET" in environment_of(1, Share(0, 2, "job"), options, given)
    False
    """
    place = {
        "RANK": share.first_rank + number,
        "SIZE": share.size,
        "LOCAL_RANK": number,
        "LOCAL_SIZE": options.ranks,
        "JOB": share.job,
    }
    if options.node is None:
        place |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
        left_out = _OF_SEVERAL_HOSTS
    else:
        place |= {"RENDEZVOUS": options.node.rendezvous}
        left_out = _OF_ONE_HOST
    kept = {name: value for name, value in given.items() if name not in left_out}
    return {**kept, **{_PREFIX + name: str(value) for name, value in place.items()}}
