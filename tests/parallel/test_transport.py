"""The way of the bytes: the network between hosts, and shared memory within one."""

import socket
from pathlib import Path

import tensorflow as tf

import keras_hvd

BYTES = 4 << 20
TIMES = 4


def test_only_what_other_hosts_need_goes_over_the_network():
    given = tf.ones([BYTES // 4])
    keras_hvd.allreduce(given, name="transport/first")
    # The least of several times: other processes may use the network meanwhile.
    sent = min(sent_by_allreduces(given) for _ in range(3))
    hosts = keras_hvd.cross_size()
    if keras_hvd.local_size() == keras_hvd.size():
        # Other traffic on the same network counts as well.
        assert sent < TIMES * BYTES / 2
    else:
        # One rank at least of each host sends a part of the tensor to each other host,
        # and the sum of its own part. The last of it may still be on its way.
        assert sent >= (TIMES - 1) * BYTES
    if hosts > 1 and "cable" in dict(socket.if_nameindex()).values():
        # The host has a network of its own (tests/network.py). It sends each part once
        # to be summed, and the sum of its own part to each other one, however many
        # ranks it has; the end of the first allreduce may come late, and a tenth is
        # for headers and acknowledgements. Any of it by TCP within the host, too, is
        # more than that.
        needed = 2 * (hosts - 1) / hosts * BYTES
        assert sent < 1.1 * (TIMES + 1) * needed


def sent_by_allreduces(given: tf.Tensor) -> int:
    before = sent_bytes()
    for _ in range(TIMES):
        keras_hvd.allreduce(given, name="transport")
    return sent_bytes() - before


def sent_bytes() -> int:
    """The bytes that this host has sent so far, over all interfaces, by the kernel."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)
