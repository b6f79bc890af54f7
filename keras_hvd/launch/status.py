"""Serves the ranks' progress over HTTP, on this host alone: `khvdrun --status PORT`.

`/status` has it in JSON, `/metrics` in Prometheus' text format. At most `_CONNECTIONS`
threads serve it, none for long, so no client can delay the job or outlive it.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

# Further connections are turned away.
_CONNECTIONS = 8
# For a whole connection, however slow the client is.
_SECONDS = 5.0

_ADDRESS = "127.0.0.1"

# Under other names, a page of the web could make a browser here ask, and read the
# answer.
_NAMES = _ADDRESS, "localhost"


@dataclass
class RankEnd:
    """A rank of this host, as `khvdrun` knows it."""

    rank: int
    state: str
    """`running`, or how it ended."""
    last_error: str
    """The last line of its stderr that tells of an error; "" for none."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else is known of it, by the names in `/status`."""


@dataclass
class JobNow:
    """A job, as `khvdrun` knows it."""

    folder: Path
    """The recording of this host's ranks."""
    size: int
    """The number of all ranks."""
    ends: list[RankEnd]
    """This host's ranks."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else is known of it, by the names in `/status`."""


class Status:
    """The state of a job.

    Args:
        now: returns the job as it is; callable from any thread.
    """

    def __init__(self, now: Callable[[], JobNow]):
        self._now = now

    def read(self) -> dict[str, Any]:
        """The job's state as JSON values, with None for unknown ones."""
        from keras_hvd.recording import files, rank_records
        from keras_hvd.report import recording

        job, now = self._now(), time.time()
        ranks = {
            end.rank: {
                "rank": end.rank,
                "state": end.state,
                "last_error": end.last_error,
                **end.more,
            }
            for end in job.ends
        }
        # A later job of the ranks may have found no room for it.
        with contextlib.suppress(FileNotFoundError):
            for record in rank_records.read(job.folder / files.RANKS):
                ranks.setdefault(record.rank, {"rank": record.rank}).update(
                    host=record.host,
                    process=record.process,
                    step=record.step,
                    epoch=record.epoch,
                    samples=_known(record.samples),
                    samples_per_second=_known(record.samples_per_second),
                    loss=_known(record.loss),
                    last_step_age_seconds=_known(now - record.last_step),
                )
        # Rank 0's host knows the waits of the ranks of all hosts.
        with contextlib.suppress(recording.NotARecordingError):
            waits = recording.waits(job.folder)
            for rank, (waited, waited_for) in enumerate(
                zip(waits.waits, waits.waited_for, strict=True)
            ):
                ranks.setdefault(rank, {"rank": rank}).update(
                    waited_seconds=waited, waited_for_seconds=waited_for
                )
        known = [ranks[rank] for rank in sorted(ranks)]
        return {"size": job.size, **job.more, "ranks": known}


_METRICS = (
    ("step", "steps_total", "counter", "Training steps that the rank has made."),
    ("epoch", "epoch", "gauge", "The epoch of the current fit, from 1."),
    ("samples", "samples_total", "counter", "Samples that the rank has trained on."),
    ("samples_per_second", "samples_per_second", "gauge", "The same in a second."),
    ("loss", "loss", "gauge", "The rank's loss, its mean over the epoch."),
    (
        *("waited_seconds", "waited_seconds_total", "counter"),
        "Time in which the rank waited for others.",
    ),
    (
        *("waited_for_seconds", "waited_for_seconds_total", "counter"),
        "Time in which all others waited for the rank.",
    ),
    (
        *("last_step_age_seconds", "last_step_age_seconds", "gauge"),
        "Time since the rank ended a step.",
    ),
)


def metrics(state: dict[str, Any]) -> str:
    r"""A job's state in Prometheus' text format, version 0.0.4.

    Args:
        state: as `Status.read` returns it.

    Example:

    >>> state = {"size": 2, "ranks": [{"rank": 0, "host": 'a "b"', "loss": 0.5}]}
    >>> print(metrics(state), end="")
    # HELP keras_hvd_size Ranks of the job.
    # TYPE keras_hvd_size gauge
    keras_hvd_size 2
    # HELP keras_hvd_loss The rank's loss, its mean over the epoch.
    # TYPE keras_hvd_loss gauge
    keras_hvd_loss{rank="0",host="a \"b\""} 0.5
    """
    return "".join(f"{line}\n" for line in _metric_lines(state))


def _metric_lines(state: dict[str, Any]) -> Iterator[str]:
    ranks = state["ranks"]
    yield from _head("size", "gauge", "Ranks of the job.")
    yield f"keras_hvd_size {state['size']}"
    if "generation" in state:
        yield from _head("generation", "gauge", "The number of the job, from 1.")
        yield f"keras_hvd_generation {state['generation']}"
    for key, name, kind, text in _METRICS:
        known = [rank for rank in ranks if rank.get(key) is not None]
        if known:
            yield from _head(name, kind, text)
        for rank in known:
            yield f"keras_hvd_{name}{_labels(rank)} {float(rank[key]):.17g}"
    here = [rank for rank in ranks if "state" in rank]
    if here:
        yield from _head("running", "gauge", "Whether the rank's process runs.")
    for rank in here:
        yield f"keras_hvd_running{_labels(rank)} {int(rank['state'] == 'running')}"
    failed = [rank for rank in here if rank["last_error"]]
    if failed:
        yield from _head("last_error_info", "gauge", "The rank's last error, as text.")
    for rank in failed:
        yield f"keras_hvd_last_error_info{_labels(rank, error=rank['last_error'])} 1"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP keras_hvd_{name} {text}"
    yield f"# TYPE keras_hvd_{name} {kind}"


def _labels(rank: dict[str, Any], **more: str) -> str:
    values = {"rank": str(rank["rank"]), "host": rank.get("host", ""), **more}
    return "{" + ",".join(f'{k}="{_escaped(v)}"' for k, v in values.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


class Listener:
    """A port of this host, on which nothing is served yet.

    Args:
        port: its number; 0 for any that is free.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int):
        self._server = _Server((_ADDRESS, port), _Handler)
        self.address = f"http://{_ADDRESS}:{self._server.server_port}"

    def serve(self, status: Status) -> None:
        """Serves it from now on, until the process ends."""
        self._server.status = status
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # A client must be accepted before it is turned away.
    request_queue_size = 128
    status: Status

    def __init__(self, *arguments: Any):
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks a name server.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = _ADDRESS, self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_SECONDS, _end, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: it is the trouble of the client, which may send anything."""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS

    def do_GET(self) -> None:
        if not self._is_for_this_host():
            self.send_error(
                HTTPStatus.MISDIRECTED_REQUEST,
                explain=f"ask for {' or '.join(_NAMES)}, by this name",
            )
            return
        path = self.path.partition("?")[0]
        if path not in ("/status", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, "there are /status and /metrics")
            return
        try:
            state = self.server.status.read()
        except (OSError, ValueError) as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
            return
        text, kind = json.dumps(state, indent=1), "application/json"
        if path == "/metrics":
            text, kind = metrics(state), "text/plain; version=0.0.4; charset=utf-8"
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_for_this_host(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        # Browsers send it; only programs leave it out.
        return all(one.partition(":")[0].strip().lower() in _NAMES for one in hosts)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: the job's own output is not mixed with it."""
