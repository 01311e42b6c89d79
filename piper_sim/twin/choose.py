"""The faster kernel that is still exact."""

from __future__ import annotations

from ir.order import FloatArray
from ir.plan import Plan
from piper_sim.engine.contention import Interference
from piper_sim.engine.loop import Run, Wire
from piper_sim.twin.events import event_loop
from piper_sim.twin.path import longest_path


def choose(
    plan: Plan,
    duration: FloatArray,
    interference: Interference | None = None,
    wire: Wire = Wire.RENDEZVOUS,
    steps: int = 1,
) -> Run:
    """Longest path where nothing slows anything, else the event loop."""
    if interference is None or not any(x.any() for x in (interference.held, interference.moving, interference.wire)):
        return longest_path(plan, duration, wire, steps)
    if wire is not Wire.RENDEZVOUS:
        raise ValueError("a buffered message holds nothing, so there is nothing to share")
    return event_loop(plan, duration, interference, steps)
