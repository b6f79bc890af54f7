"""The record of a job, as a report shows it."""

import dataclasses

import numpy as np

from keras_hvd.recording.epochs import Epoch
from keras_hvd.recording.phases import CALLBACKS, SAVING, STEPS, TRACING, VALIDATION

WAITING = (
    "A rank waits while it has submitted a tensor that another rank has not. It may "
    "compute meanwhile."
)
"""Waiting, as the progress bar and all of a report mean it."""


@dataclasses.dataclass
class Intervals:
    """Times and counts of consecutive stretches of a job, each of whole steps.

    A step ends where the first tensor of the next one is submitted. All arrays have one
    entry, or row, for each stretch; times are in seconds.
    """

    begin: np.ndarray
    """Its start, from the beginning of the recording."""
    end: np.ndarray
    steps: np.ndarray
    """The number of steps in it."""
    bytes: np.ndarray
    """Bytes of the tensors that rank 0 reduced, gathered and so on."""
    moving: np.ndarray
    """Time in which rank 0 copied, reduced or exchanged bytes."""
    waiting: np.ndarray
    """Time in which rank 0 did not, though a tensor of its own was waiting."""
    exposed_moving: np.ndarray
    """The part of `moving` after rank 0's last tensor of the step was submitted: no
    computation runs beside it."""
    exposed_waiting: np.ndarray
    """The same part of `waiting`."""
    waits: np.ndarray
    """[stretches, ranks]: time in which the rank had submitted a tensor that another
    rank had not."""
    waited_for: np.ndarray
    """[stretches, ranks]: time in which all ranks but that one had submitted a
    tensor."""
    samples: np.ndarray
    """Samples of all ranks; NaN where unknown."""
    loss: np.ndarray
    """Rank 0's loss, its mean over the stretch; NaN where unknown."""
    outside: np.ndarray
    """Time in which rank 0 did something else than steps, such as a validation."""

    @property
    def inside(self) -> np.ndarray:
        """The time of rank 0's steps."""
        return np.maximum(self.end - self.begin - self.outside, 0)

    @property
    def share(self) -> np.ndarray:
        """The share of the steps in each stretch."""
        return self.inside / np.maximum(self.end - self.begin, 1e-9)

    def in_steps(self, of_ranks: np.ndarray) -> np.ndarray:
        """For each rank, the part of `waits` or `waited_for` that is in steps."""
        return (of_ranks * self.share[:, None]).sum(axis=0)

    def parts(self) -> dict[str, np.ndarray]:
        """What rank 0 did in the time of its steps.

        `WAITING` says what waiting is. The figures of a stretch count by the share of
        its steps.
        """
        waiting = np.minimum(self.waits[:, 0] * self.share, self.inside)
        # Whatever else keeps rank 0 from computing, it is the exchange.
        exposed = (self.exposed_waiting + self.exposed_moving) * self.share
        moving = np.maximum(exposed - waiting, self.exposed_moving * self.share)
        moving = np.minimum(moving, self.inside - waiting)
        computing = self.inside - waiting - moving
        return {"computing": computing, "waiting": waiting, "moving bytes": moving}


@dataclasses.dataclass
class Tensor:
    """The times of a tensor, or of a group in one call; totals, in seconds."""

    name: str
    times: int
    bytes: int
    negotiating: float
    """From its first submission to its last."""
    queued: float
    """From there until rank 0 began it."""
    running: float
    """From there until its result was ready on rank 0."""

    @property
    def phases(self) -> tuple[float, float, float]:
        """The phases, in their order."""
        return self.negotiating, self.queued, self.running


@dataclasses.dataclass
class Event:
    """A warning, a stall, or an end."""

    time: float
    """Seconds from the beginning of the recording."""
    kind: str
    """"warning", "stall", "change" (ranks that go or come) or "end"."""
    text: str


@dataclasses.dataclass
class Member:
    """A rank, and its place."""

    rank: int
    host: str | None
    cores: int | None = None
    gpu: str | None = None
    process: int | None = None


@dataclasses.dataclass
class Rates:
    """Bytes of tensors in a second."""

    possible: float | None
    """With nothing beside them, as `JobRecord.capacity`."""
    moving: float
    """While rank 0 moved bytes."""
    overall: float
    """In all of the time."""

    @property
    def used(self) -> float | None:
        """The share of the possible rate that was reached while bytes moved."""
        return None if not self.possible else self.moving / self.possible


@dataclasses.dataclass
class JobRecord:
    """The record of a job. Unknown values are None, NaN or empty."""

    size: int
    begin: float
    """Seconds since the epoch at time 0."""
    seconds: float
    """The length of the recording in seconds."""
    intervals: Intervals
    tensors: list[Tensor]
    events: list[Event]
    members: list[Member]
    settings: dict[str, str]
    """Versions and settings, by the names that the page shows."""
    command: str
    ended: str
    """How it ended, or that this is not known, as a clause after "The job"."""
    left_out: int = 0
    """Requests that were not recorded."""
    capacity: float | None = None
    """Bytes of a tensor that passed in a second before the job's own work began, with
    nothing beside; of tensors in host memory, so None if the ranks use GPUs."""
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """Rank 0's seconds in each of `recording.phases.PHASES`; empty if unknown."""
    epochs: list[Epoch] = dataclasses.field(default_factory=list)
    """Those of all `fit`s, with rank 0's logs."""
    generation: str = ""
    """Which one it is of the jobs in which ranks went on; "" for the only one."""
    not_known: str = ""
    """Other things that are unknown, as sentences."""

    @property
    def hosts(self) -> int:
        """The number of hosts of the ranks."""
        return len({member.host for member in self.members})

    @property
    def medium(self) -> str:
        """The medium that the bytes passed through."""
        return "the memory" if self.hosts == 1 else "the links between the hosts"

    def shares(self) -> dict[str, float]:
        """Rank 0's seconds in all that it did, which add up; empty if unknown."""
        if not self.phases:
            return {}
        parts = self.intervals.parts()
        steps = {name: float(part.sum()) for name, part in parts.items()}
        steps["computing"] = 0.0
        steps["computing"] = max(self.phases[STEPS] - sum(steps.values()), 0.0)
        shares = {f"steps: {name}": seconds for name, seconds in steps.items()} | {
            "tracing: the first step of each fit, which compiles": self.phases[TRACING],
            "validation": self.phases[VALIDATION],
            "saving": self.phases[SAVING],
            "callbacks between epochs": self.phases[CALLBACKS],
        }
        rest = max(self.seconds - sum(shares.values()), 0.0)
        return shares | {"the rest: before, between and after fits": rest}

    def rates(self) -> Rates | None:
        """The rates of tensors; None if no tensor of known size was seen to pass."""
        times = self.intervals
        moving = float(times.moving.sum())
        overall = float((times.end - times.begin).sum())
        passed = float(times.bytes.sum())
        # The size of an allgather's result is not known.
        if min(moving, overall, passed) <= 0:
            return None
        return Rates(self.capacity, passed / moving, passed / overall)
