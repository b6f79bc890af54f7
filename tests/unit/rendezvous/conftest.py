"""Ranks in threads of this process that meet over the loopback interface."""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from free_port import free_port

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world import tls
from keras_hvd.world.rendezvous import address, ranks
from keras_hvd.world.rendezvous.connection import BeginTls
from keras_hvd.world.rendezvous.links import Link
from keras_hvd.world.rendezvous.proof import Purpose
from keras_hvd.world.rendezvous.ranks import Meeting, MeetingPoint, RankIdentity
from keras_hvd.world.rendezvous.secret import Secret

LATEST = 20


def links_with_other_hosts(rank: int, hosts: Sequence[int]) -> list[Link]:
    """Both kinds of links, with every rank of another host."""
    return [
        Link(peer, purpose)
        for peer, host in enumerate(hosts)
        for purpose in (Purpose.CONTROL, Purpose.DATA)
        if host != hosts[rank]
    ]


@dataclass
class Threads:
    """Calls that run beside the test, and their results or errors."""

    results: dict[object, object] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, name: object, function: Callable, *arguments) -> None:
        def call() -> None:
            try:
                self.results[name] = function(*arguments)
            except RendezvousError as error:
                self.results[name] = error

        thread = threading.Thread(target=call, daemon=True)
        self.threads.append(thread)
        thread.start()

    def end(self) -> dict:
        """Waits for all; by the names under which they were started."""
        for thread in self.threads:
            thread.join(LATEST)
            assert not thread.is_alive()
        return self.results

    def errors(self) -> dict:
        """The texts of the errors that all have raised."""
        ended = self.end()
        assert all(isinstance(one, RendezvousError) for one in ended.values()), ended
        return {name: str(error) for name, error in ended.items()}


@dataclass
class Job:
    """Ranks of one job. The host of each is told by its key."""

    rendezvous: str
    size: int
    timeout: float = LATEST
    secret: Secret = field(default_factory=lambda: Secret(b"only these tests know"))
    tls: BeginTls | None = None
    started: Threads = field(default_factory=Threads)

    @property
    def port(self) -> int:
        return int(self.rendezvous.rpartition(":")[2])

    def start(self, rank: int, key: str | None = None, **changes) -> None:
        """Starts a rank, under its number or the `name` given."""
        name = changes.pop("name", rank)
        secret = changes.pop("secret", self.secret)
        timeout = changes.pop("timeout", self.timeout)
        wanted = changes.pop("wanted_links", links_with_other_hosts)
        tls = changes.pop("tls", self.tls)
        cancel = changes.pop("cancel", None)
        where = [address.parse(changes.pop("rendezvous", self.rendezvous))]
        point = MeetingPoint(where, secret, **changes.pop("point", {}))
        place = {
            "rank": rank,
            "size": self.size,
            "local_rank": 0,
            "local_size": 1,
            "host_key": key,
            **changes,
        }
        met = RankIdentity(**place), point, wanted, timeout, tls, cancel
        self.started.start(name, ranks.meet, *met)

    def end(self) -> list[Meeting]:
        """The meetings of all ranks, when they have met."""
        ended = self.started.end()
        for one in ended.values():
            if isinstance(one, RendezvousError):
                raise one
        return [ended[rank] for rank in range(self.size)]

    def errors(self) -> dict:
        return self.started.errors()

    def await_listening(self) -> None:
        """Waits until rank 0 accepts connections."""
        while True:
            try:
                self.connect().close()
                return
            except ConnectionRefusedError:
                continue

    def connect(self) -> socket.socket:
        """A stranger's connection to rank 0."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=LATEST)


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def begin_tls() -> BeginTls:
    """The function by which ranks with TLS begin it."""
    return tls.chosen({"KERAS_HVD_TLS": "1"})


@pytest.fixture
def new_job() -> Callable[..., Job]:
    """Makes a `Job` of `size` ranks, which meet at a free port."""

    def make(size: int, host: str = "127.0.0.1", **arguments) -> Job:
        name = f"[{host}]" if ":" in host else host
        address = "127.0.0.1" if host == "localhost" else host
        return Job(f"{name}:{free_port(address)}", size, **arguments)

    return make


@pytest.fixture
def rendezvous() -> str:
    """HOST:PORT without a listener."""
    return f"127.0.0.1:{free_port()}"
