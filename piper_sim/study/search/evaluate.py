"""One configuration simulated, event by event: its step, its memory, or why it has none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cost_models import DeviceHardware
from ir.core.errors import PiperError
from ir.job import Job
from ir.job.build import PreparedJob, blaming
from piper_sim.report.units import GIB
from piper_sim.study.planned import PlannedJob, fits
from piper_sim.study.predict import planned, predict, step_of
from piper_sim.study.search.space import NO_LIMITS, Changes
from piper_sim.study.simulate import Object, reason


class JobRefusal(StrEnum):
    """Why a configuration is not among those that were timed."""

    ILLEGAL = "illegal"
    MEMORY = "memory"
    BOUNDED = "bounded"


@dataclass(frozen=True)
class RejectedJob:
    """A configuration that does not count, and why."""

    changes: Changes
    kind: JobRefusal
    reason: str

    def to_dict(self) -> Object:
        return {"changes": dict(self.changes), "kind": str(self.kind), "reason": self.reason}


@dataclass(order=True, frozen=True)
class BoundedJob:
    """A configuration that waits: by its bound, among equals as drawn, then in the space's order.

    seconds, device_bytes: what it takes at least. walked: as the walk of its schedule says, not only the mean of ranks.
    """

    seconds: float
    drawn: float
    number: int
    device_bytes: float = field(compare=False)
    changes: Changes = field(compare=False)
    job: Job = field(compare=False)
    walked: bool = field(compare=False, default=False)


@dataclass(frozen=True)
class EvaluatedJob:
    """A configuration simulated. kind, reason: why it does not count, if it does not.

    iteration_s: None where it cannot be planned, or plainly does not fit. least_bytes: of its fullest rank, before any
    allocator: None where it cannot be planned. device_bytes: None also where no allocator was asked.
    """

    iteration_s: float | None
    least_bytes: int | None
    device_bytes: int | None
    kind: JobRefusal | None = None
    reason: str = ""


JobCheck = Callable[[PreparedJob], object]


@dataclass(frozen=True)
class JobLimits:
    """What a search may propose. ranges: of keys, instead of the default ones. check: raises PiperError for others.

    launch: whose it is to be, by name.
    """

    ranges: Mapping[str, tuple[object, ...]]
    check: JobCheck | None
    launch: str = ""


ANY = JobLimits(NO_LIMITS, None)


Front = Sequence[tuple[float, float, int]]  # (seconds, bytes, number) of what fits and nothing beats in both


def beaten(seconds: float, nbytes: float, front: Front) -> tuple[float, float, int] | None:
    """What is faster and no larger; None: nothing is."""
    return next((x for x in front if x[0] < seconds and x[1] <= nbytes), None)


def evaluate(
    job: Job, hardware: DeviceHardware, limit_GiB: float | None, front: Front = (), check: JobCheck | None = None
) -> EvaluatedJob:
    """Plan a configuration, walk its memory, time it, and ask its allocators, the dearest, where that can matter yet.

    limit_GiB: of device bytes on any rank. front: what is known to fit; what it beats is not asked for its allocators.
    check: raises PiperError for what is legal and not wanted; asked last.
    """
    try:
        with blaming(job):
            p = planned(job, hardware)
            least = int(p.memory.peak.max()) + p.context_bytes
            seconds = step_of(p) if least - p.context_bytes <= p.room_bytes else None
            if seconds is not None and beaten(seconds, least, front):
                return EvaluatedJob(seconds, least, None)
            peak = device_bytes(p)
            if not fits(p):
                return EvaluatedJob(seconds, least, peak, JobRefusal.MEMORY, reason(p))
            if limit_GiB is not None and peak > limit_GiB * GIB:
                return EvaluatedJob(seconds, least, peak, JobRefusal.MEMORY, over(peak, limit_GiB))
            if check is not None:
                check(p.prepared)
            return EvaluatedJob(seconds, least, peak)
    except PiperError as e:
        return EvaluatedJob(None, None, None, JobRefusal.ILLEGAL, refused(e))


def device_bytes(p: PlannedJob) -> int:
    """Reserved bytes and context of the fullest rank."""
    return max(r.reserved for r in p.reserved) + p.context_bytes


def over(peak: float, limit_GiB: float) -> str:
    """What exceeds `search.memory_limit_GiB`."""
    return f"a rank needs {peak / GIB:.1f} GiB, search.memory_limit_GiB is {limit_GiB:g}"


def refused(e: PiperError) -> str:
    """An error as a reason: key, message, fix."""
    where = f"{e.key}: " if e.key else ""
    return f"{where}{e.message}" + (f" ({e.suggestion})" if e.suggestion else "")


def full(changes: Changes, job: Job) -> Object:
    """`simulate`'s object of a configuration, and what it changes."""
    with blaming(job):
        return predict(job).to_dict() | {"changes": dict(changes)}
