"""What is built once from a plan and reused over any number of duration vectors."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from ir.plan import Plan
from piper_sim.engine.loop import Wire
from piper_sim.twin import net, order
from piper_sim.twin.stuck import deadlock


class Compiled:
    """A plan's structure. Refuses a plan in which streams get stuck: no duration would free them.

    net: streams, waits and meetings. path: the order in which everything can be computed.
    """

    _built: ClassVar[WeakKeyDictionary[Plan, dict[Wire, Compiled]]] = WeakKeyDictionary()

    def __init__(self, plan: Plan, wire: Wire = Wire.RENDEZVOUS) -> None:
        self.ops, self.wire = len(plan), wire
        self.net = net.build(plan, wire)
        ops, place = order.arranged(self.net)
        ended = order.ended(self.net, place)
        if not ended.all():
            raise deadlock(plan, place >= 0, ended)
        self.path = order.build(self.net, ops, place)

    @classmethod
    def of(cls, plan: Plan | Compiled, wire: Wire = Wire.RENDEZVOUS) -> Compiled:
        """The structure of this very plan, built on first use and kept as long as the plan lives."""
        if isinstance(plan, Compiled):
            return plan
        built = cls._built.setdefault(plan, {})
        if wire not in built:
            built[wire] = cls(plan, wire)
        return built[wire]
