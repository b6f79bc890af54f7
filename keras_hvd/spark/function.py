"""Runs a function on every rank of a new job, each a child of a Spark task."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession

from keras_hvd.exceptions import KerasHvdError, RankFailedError
from keras_hvd.launch import call, function, places
from keras_hvd.launch.call import Outcome
from keras_hvd.launch.places import Node
from keras_hvd.spark import task
from keras_hvd.spark.collecting import JobError, await_slots, collect, is_remote
from keras_hvd.spark.task import Ended
from keras_hvd.version import __version__

_DYNAMIC = "spark.dynamicAllocation.enabled"
_SECRET_BYTES = 32


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    df: DataFrame | None = None,
) -> list[Any]:
    """Calls a function on every rank of a new job on Spark's executors.

    Spark starts all ranks at once, one in each of `num_proc` tasks, and takes the next
    job when they have ended. The function joins the job itself, with `keras_hvd.init`.
    It may be defined in a notebook; objects that it uses from there are sent along. The
    ranks' output is in the executors' stderr.

    Args:
        fn: the function to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; by default `spark.default.parallelism`.
        start_timeout: seconds to wait for slots of Spark, and for the ranks to meet; by
            default HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: without effect; there is one engine.
        use_gloo: without effect; there is one engine.
        extra_mpi_args: without effect.
        env: more environment variables of the ranks.
        stdout: refused: the output stays with the executors.
        stderr: refused.
        verbose: 0: nothing; 1: what Spark is waited for; 2: each start and end in the
            executors' stderr, too.
        nics: network interfaces to use.
        prefix_output_with_timestamp: whether lines of output start with the time.
        executable: the Python of the ranks; by default that of the tasks.
        df: data, of which `keras_hvd.spark.rows` gives each rank its part:
            `df.repartition(num_proc)`.

    Returns:
        The function's result on each rank, in the order of ranks.

    Raises:
        Exception: the function's error, from the rank that failed first. Its cause has
            the rank and its traceback.
        RankFailedError: a rank, or its task, ended before the function had returned.
        KerasHvdError: there is no Spark session; Spark has too few slots; or a node has
            no keras_hvd, or another version.
        TypeError: `fn` is not a function; or it, an object that it uses, or an argument
            cannot be pickled.
        ValueError: an argument is wrong; a rank would have no rows; or Spark allocates
            executors dynamically, with which it starts no such jobs.
        KeyboardInterrupt: this process was interrupted; the ranks have been ended.

    Example::

        def train():
            keras_hvd.init()
            ...
            return model.get_weights()

        weights = keras_hvd.spark.run(train, num_proc=4)[0]
    """
    if not callable(fn):
        raise TypeError(f"run: fn must be a function to call, got {fn!r}")
    if stdout is not None or stderr is not None:
        raise ValueError(
            "run: stdout and stderr: the output is in the executors' stderr"
        )
    session = _session() if df is None else df.sparkSession
    if session.conf.get(_DYNAMIC, "false") == "true":
        raise ValueError(
            f"run: Spark starts no ranks with {_DYNAMIC}=true, since it must start all "
            "at once: start the session with it set to false"
        )
    ranks = _default_ranks(session) if num_proc is None else num_proc
    if ranks < 1:
        raise ValueError(f"run: num_proc must be 1 or more, got {num_proc}")
    limit = start_timeout
    if limit is None:
        limit = float(os.environ.get("HOROVOD_SPARK_START_TIMEOUT", "600"))
    made = io.BytesIO()
    call.dump_function(made, fn, args, kwargs or {})
    variables = {
        "KERAS_HVD_INIT_TIMEOUT_SECONDS": f"{limit:g}",
        "KERAS_HVD_SECRET": secrets.token_hex(_SECRET_BYTES),
        **({"KERAS_HVD_NETWORK_INTERFACES": ",".join(nics)} if nics else {}),
        **(env or {}),
    }
    token = secrets.token_hex(_SECRET_BYTES)
    given = {
        "token": token,
        "call": made.getvalue(),
        "variables": variables,
        "interfaces": list(nics or ()),
        "has_data": df is not None,
        "executable": executable,
        "timestamps": prefix_output_with_timestamp,
        "verbose": verbose >= 2,
    }
    start = session.range(0, ranks, 1, ranks) if df is None else df.repartition(ranks)
    frame = start.mapInArrow(_task(given), task.SCHEMA, barrier=True)
    try:
        await_slots(session, ranks, limit, _tell if verbose else lambda text: None)
        return _results(collect(session, frame, limit), ranks)
    except JobError as failed:
        _explain(failed.error, token)
        raise failed.error from None


def run_elastic(*args: Any, **kwargs: Any) -> None:
    """Horovod's function for jobs that lose and gain ranks: it is refused.

    Raises:
        NotImplementedError: always; it names what to use instead.
    """
    raise NotImplementedError(
        "run_elastic: Spark starts all ranks of a job at once: call keras_hvd.spark.run"
        ", again after a failure, and with another num_proc if need be"
    )


def _session() -> SparkSession:
    found = SparkSession.getActiveSession()
    # Clients of Spark Connect have no such class.
    context = getattr(pyspark, "SparkContext", None)
    if found is None and context is not None and context._active_spark_context:
        # Each thread has an active session of its own.
        found = SparkSession.builder.getOrCreate()
    if found is None:
        raise KerasHvdError(
            "run: there is no Spark session: create one first, with "
            "SparkSession.builder.getOrCreate()"
        )
    return found


def _default_ranks(session: SparkSession) -> int:
    if is_remote(session):
        raise ValueError("run: under Spark Connect, give num_proc")
    return session.sparkContext.defaultParallelism


def _task(given: Mapping[str, Any]) -> Callable[[Iterator], Iterator]:
    """The function of a task, all of which travels: its node may lack keras_hvd."""
    version = __version__

    def of_spark(batches: Iterator) -> Iterator:
        import json

        import pyarrow
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = context.partitionId()
        host = context.getTaskInfos()[number].address.rpartition(":")[0]
        try:
            from keras_hvd.version import __version__ as found
        except ImportError:
            found = ""
        if found == version:
            from keras_hvd.spark import task

            ends = task.run(context, host, batches, given)
        else:
            own = {"host": host, "version": found}
            nodes = [json.loads(each) for each in context.allGather(json.dumps(own))]
            ends = iter([("nodes", 0.0, json.dumps(nodes).encode())])
        for kind, clock, chunk in ends:
            row = {"rank": number, "host": host, "kind": kind}
            row |= {"clock": clock, "chunk": chunk}
            yield pyarrow.RecordBatch.from_pylist([row])

    return of_spark


def _results(rows: Sequence[Any], ranks: int) -> list[Any]:
    """The results of the ranks, from the rows of their tasks; or the first error."""
    for row in rows:
        if row.kind == task.NODES:
            _refuse(json.loads(row.chunk))
    chunks: dict[int, list[Any]] = {}
    for row in rows:
        chunks.setdefault(row.rank, []).append(row)
    if len(chunks) < ranks:
        # Spark knows without a task that df is empty.
        raise ValueError(f"run: df has no rows for {ranks} ranks")
    return _values(
        [
            Ended(rank, own[0].host, own[0].clock, b"".join(row.chunk for row in own))
            for rank, own in sorted(chunks.items())
        ]
    )


def _refuse(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises the reason why tasks with these nodes have not started their ranks."""
    places.require_one_version(
        [Node(node["host"], node["host"], node["version"]) for node in nodes],
        "install it there, into the Python of Spark's workers (PYSPARK_PYTHON)",
    )
    counts = [node["rows"] for node in nodes]
    raise ValueError(
        f"run: df has {sum(counts)} rows for {len(nodes)} ranks, and "
        f"{counts.count(0)} of them would have none"
    )


def _values(ends: Sequence[Ended]) -> list[Any]:
    """What ranks have returned; raises the error of the one that failed first."""
    outcomes: dict[int, Outcome] = {}
    for end in ends:
        try:
            outcome = pickle.loads(end.outcome)
        except Exception as error:
            raise KerasHvdError(
                f"what rank {end.rank} returned cannot be unpickled here: {error}"
            ) from error
        # By a clock that all hosts share.
        when = outcome.when + end.clock
        outcomes[end.rank] = dataclasses.replace(outcome, when=when)
    function.raise_first_error(outcomes, {end.rank: end.host for end in ends})
    return [outcome.value for outcome in outcomes.values()]


def _explain(error: Exception, token: str) -> None:
    """Raises what a failure of Spark's job means, if it was that of a rank."""
    text = str(error)
    ended = task.of_failed(text, token)
    if ended is not None:
        _values([ended])
    if "barrier" in text:
        raise RankFailedError(
            "a task of Spark ended, and its rank with it, before the function had "
            f"returned: {text}"
        ) from error


def _tell(text: str) -> None:
    print(f"keras_hvd.spark.run: {text}", file=sys.stderr, flush=True)
