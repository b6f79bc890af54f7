"""A task of Spark, which runs a rank in a child process and returns its outcome.

The tasks of a job tell each other their hosts, before and after. Nothing is left when
one of them dies: what the rank gets and returns is in files without a name.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow

from keras_hvd.exceptions import RankFailedError
from keras_hvd.job.settings import DIVIDED
from keras_hvd.launch import call, places, report
from keras_hvd.launch.call import Outcome
from keras_hvd.launch.options import Options
from keras_hvd.spark import rank
from keras_hvd.version import __version__
from keras_hvd.world.rendezvous import network_interfaces
from keras_hvd.world.rendezvous.listener import listen_early, take_early
from keras_hvd.world.rendezvous.rank_table import identity

if TYPE_CHECKING:
    # Clients of Spark Connect have no part of Spark but that.
    from pyspark import BarrierTaskContext

SCHEMA = "rank long, host string, kind string, clock double, chunk binary"
NODES, OUTCOME = "nodes", "outcome"

# Time for the other ranks to end after one has failed. Spark itself asks each second.
_PATIENCE_SECONDS = 10
_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Ended:
    """How a rank has ended, for the driver."""

    rank: int
    host: str
    clock: float  # what is to be added to its clock, for one that all hosts share
    outcome: bytes

    def __str__(self) -> str:
        text = base64.b64encode(self.outcome).decode()
        return f"rank {self.rank} on {self.host} at {self.clock}: {text}"


def run(
    context: BarrierTaskContext,
    host: str,
    batches: Iterable[pyarrow.RecordBatch],
    given: Mapping[str, Any],
) -> Iterator[tuple[str, float, bytes]]:
    """Runs the rank of this task; yields a kind, a clock and a chunk of SCHEMA."""
    number = context.partitionId()
    with contextlib.ExitStack() as files:
        data = files.enter_context(_temporary(number))
        count = _write(batches, data)
        address, listening = "", None
        if number == 0:
            early = listen_early(
                network_interfaces.reached_as([host], given["interfaces"])
            )
            (held,) = take_early(early)
            address, listening = str(early), files.enter_context(held)
        gpus = context.resources().get("gpu")
        own = {
            "host": host,
            "key": identity(None)["host_key"],
            "version": __version__,
            "rendezvous": address,
            "rows": count,
            "gpus": [] if gpus is None else gpus.addresses,
        }
        nodes = [json.loads(each) for each in context.allGather(json.dumps(own))]
        has_rows = not given["has_data"] or all(node["rows"] for node in nodes)
        if {node["version"] for node in nodes} != {__version__} or not has_rows:
            yield NODES, 0.0, json.dumps(nodes).encode()
            return
        place = {**_place(context, nodes), **given["variables"]}
        if given["has_data"]:
            place |= {rank.ROWS: call.path_of(data), DIVIDED: "keras_hvd.spark.run"}
        failed, pickled = _run_child(context, place, given, listening)
        clock = time.time() - time.monotonic()
        if failed is None:
            context.barrier()
        else:
            pickled = pickle.dumps(failed)
            ended = Ended(number, host, clock, pickled)
            _wait_for_others(context, failed, f"{given['token']} {ended}")
        for start in range(0, len(pickled), _CHUNK_BYTES):
            yield OUTCOME, clock, pickled[start : start + _CHUNK_BYTES]


def of_failed(text: str, token: str) -> Ended | None:
    """The end of a rank that others did not follow, from Spark's error.

    Errors quote data, which does not know the job's token.
    """
    found = re.search(rf"{token} rank (\d+) on (\S+) at (\S+): ([\w+/=]*)", text)
    if found is None:
        return None
    pickled = base64.b64decode(found[4])
    return Ended(int(found[1]), found[2], float(found[3]), pickled)


def _temporary(number: int) -> BinaryIO:
    """A file without a name, in one of the folders that Spark has for such files."""
    folders = os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")
    folder = folders[number % len(folders)]
    os.makedirs(folder, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


def _write(batches: Iterable[pyarrow.RecordBatch], file: BinaryIO) -> int:
    """Writes batches as an Arrow stream; returns the number of their rows."""
    count, writer = 0, None
    for batch in batches:
        writer = writer or pyarrow.ipc.new_stream(file, batch.schema)
        writer.write_batch(batch)
        count += batch.num_rows
    if writer is not None:
        writer.close()
    file.flush()
    return count


def _place(
    context: BarrierTaskContext, nodes: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    number = context.partitionId()
    keys = [node["key"] for node in nodes]
    found = {
        **places.variables(keys, number),
        "KERAS_HVD_RENDEZVOUS": nodes[0]["rendezvous"],
        # Spark sets OMP_NUM_THREADS alone.
        "TF_NUM_INTRAOP_THREADS": str(context.cpus()),
    }
    here = [node["gpus"] for node in nodes if node["key"] == keys[number]]
    if all(here):
        # NCCL needs to see the GPUs of the other ranks, and `init` takes that of its
        # local rank.
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[0] for gpus in here)
    return found


def _run_child(
    context: BarrierTaskContext,
    place: Mapping[str, str],
    given: Mapping[str, Any],
    listening: socket.socket | None,
) -> tuple[Outcome | None, bytes]:
    """Runs the rank to its end; returns its failure, if any, and what it has left."""
    with contextlib.ExitStack() as files:
        made, outcome, told = (
            files.enter_context(call.memory_file(name))
            for name in ("call", "outcome", "rank")
        )
        pickle.dump(sys.path, made)
        made.write(given["call"])
        made.flush()
        command = rank.command_of(
            *("serve", call.path_of(made), call.path_of(outcome)),
            python=given["executable"] or sys.executable,
        )
        options = Options(
            ranks=1,
            command=tuple(command),
            executable=command[0],
            timestamps=given["timestamps"],
            verbose=given["verbose"],
        )
        pickle.dump((options, place), told)
        told.flush()
        child = subprocess.Popen(
            rank.command_of("launch", str(os.getpid()), call.path_of(told)),
            stdin=subprocess.DEVNULL if listening is None else listening.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if listening is not None:
            # Else others would connect to it after the rank has ended.
            listening.close()
        said = _relay(child)
        code = child.wait()
        pickled = outcome.read()
    if code == 0 and pickled:
        return None, pickled
    return _failure(context, code, pickled, said), pickled


def _failure(
    context: BarrierTaskContext, code: int, pickled: bytes, said: str
) -> Outcome | None:
    """The failure of a rank that has ended with this exit code."""
    # It may have been killed while it wrote.
    with contextlib.suppress(Exception):
        outcome = pickle.loads(pickled)
        # One that has returned may still crash at its very end.
        return None if outcome.error is None else outcome
    number = context.partitionId()
    how = said or f"exit code {code}"
    text = f"rank {number} ended before the function had returned: {how}"
    error = pickle.dumps(RankFailedError(text))
    return Outcome(None, error, text, said, time.monotonic())


def _relay(child: subprocess.Popen) -> str:
    """Shows a child's output in the executor's log; returns khvdrun's report."""
    said = []
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            os.write(2, line)
            if line.startswith(b"khvdrun: "):
                said.append(line.decode(errors="replace"))
    return "".join(said).rstrip()


def _wait_for_others(context: BarrierTaskContext, failed: Outcome, told: str) -> None:
    """Gives other ranks time after this one's failure; then Spark ends them."""
    waiting = threading.Thread(target=context.barrier, daemon=True)
    waiting.start()
    # The rank that it blames is to tell its own error.
    is_first = not report.blames_a_peer(failed.traceback.splitlines())
    waiting.join(_PATIENCE_SECONDS if is_first else 2 * _PATIENCE_SECONDS)
    if waiting.is_alive():
        raise RuntimeError(told)
