"""A process of its own, whose job may fail and change as a test says."""

from types import SimpleNamespace

import pytest

import keras_hvd
from keras_hvd.elastic import loop, world


@pytest.fixture(scope="module", autouse=True)
def joined():
    keras_hvd.init()


class Job:
    """What the engine and the launcher say of the job of this process."""

    def __init__(self) -> None:
        self.failure = b""
        self.renewals = 0

    def fail(self, error: Exception | None = None) -> None:
        """A rank has died; the next collective raises some error."""
        self.failure = b"rank 1 was killed by signal 9"
        raise error or OSError("words of a framework")

    def renew(self) -> None:
        self.failure = b""
        self.renewals += 1


@pytest.fixture
def job(monkeypatch) -> Job:
    """A job that can change."""
    job = Job()
    engine = SimpleNamespace(khvd_failure=lambda: job.failure)
    monkeypatch.setattr(loop, "native", SimpleNamespace(engine=lambda: engine))
    monkeypatch.setattr(world, "renew", job.renew)
    return job
