"""What is asked of a machine, in order, up to the first thing that is wrong."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ir.core.errors import PiperError
from ir.job.schema import Job
from piper_sim.app.doctor import machine

NOT_ON_CPU = (
    "nccl: connections, collectives by size, progress beside compute",
    "CUDA streams and events, the caching allocator's reuse, reserved memory",
    "equality with one process on a GPU; kernels' times",
)


class DeviceCheckColour(StrEnum):
    """How a check ended."""

    GREEN = "green"
    RED = "red"


@dataclass(frozen=True)
class DeviceCheck:
    """One question and its answer.

    name: of the question.
    colour: red ends the list.
    seconds: it took.
    found: figures, by name.
    error: what is wrong, what is allowed and what to do, where it is red.
    """

    name: str
    colour: DeviceCheckColour
    seconds: float
    found: Mapping[str, object]
    error: PiperError | None = None

    def object(self) -> dict[str, object]:
        out: dict[str, object] = {"name": self.name, "colour": str(self.colour), "seconds": round(self.seconds, 3)}
        out["found"] = dict(self.found)
        if self.error is not None:
            out["error"] = self.error.to_dict()
        return out


Question = Callable[..., Mapping[str, object]]


def questions(job: Job | None = None) -> Iterable[tuple[str, Question]]:
    """For this machine by itself. Torch is loaded once it is known to be there. job: which names its hardware."""
    yield "versions", machine.versions
    yield "files", machine.files
    yield "clock", machine.clock
    yield "devices", machine.devices
    import torch

    from piper_sim.app.doctor import gpu_rules, runs
    from piper_sim.app.doctor.collectives import collectives
    from piper_sim.app.doctor.forecast import forecast

    at = runs.MachineRanks(backend="nccl" if torch.cuda.device_count() > 1 else "gloo")
    yield "equal to one rank", runs.equality
    yield "nothing races", gpu_rules.races
    yield "the host waits where it is said to", gpu_rules.host_waits
    yield "processes on gloo", lambda: runs.processes("gloo")
    if at.backend == "nccl":
        yield "processes on nccl", lambda: runs.processes("nccl")
    yield "every collective by size", lambda: collectives(at, job)
    yield "every schedule from a cold start", lambda: runs.schedules(at)
    yield "uneven and empty exchanges", lambda: runs.exchanges(at)
    yield "peak memory", runs.memory
    yield "saved and resumed under another plan", runs.restart
    yield "a killed rank is named", lambda: runs.failure(signal.SIGKILL)
    yield "a stopped rank is named", lambda: runs.failure(signal.SIGSTOP)
    yield "predicted as measured", lambda: forecast(runs.MachineRanks())


def examine(asked: Iterable[tuple[str, Question]], show: Callable[[DeviceCheck], None]) -> list[DeviceCheck]:
    """Ask one after the other; each is shown when it is answered. The first red one is the last.

    >>> from ir.core.errors import ErrorKind
    >>> def broken():
    ...     raise PiperError(ErrorKind.IO, "no room")
    >>> [str(c.colour) for c in examine([("a", dict), ("b", broken), ("c", dict)], lambda check: None)]
    ['green', 'red']
    """
    out = []
    for name, ask in asked:
        began = time.monotonic()
        try:
            found, error = ask(), None
        except PiperError as e:
            found, error = {}, e
        colour = DeviceCheckColour.GREEN if error is None else DeviceCheckColour.RED
        out.append(DeviceCheck(name, colour, time.monotonic() - began, found, error))
        show(out[-1])
        if error is not None:
            break
    return out
