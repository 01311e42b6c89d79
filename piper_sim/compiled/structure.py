"""What is built once from a scenario's structure and reused over any durations, launches, tables and links."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from ir.plan.plan import Csr, Plan
from piper_sim.compiled import net, order
from piper_sim.engine.scenario import Scenario, Wire

Key = tuple[Wire, bytes, bytes]


class Compiled:
    """A scenario's structure: its plan, wire, what is carried over and what hosts wait for.

    net: streams, waits and meetings. path: the order in which everything can be computed; None where streams get stuck,
    whatever the durations.
    """

    _built: ClassVar[WeakKeyDictionary[Plan, WeakKeyDictionary[Plan | Csr, dict[Key, Compiled]]]] = WeakKeyDictionary()

    def __init__(self, scenario: Scenario) -> None:
        self.net = net.build(scenario)
        self.path = order.build(self.net, order.arranged(self.net))

    @classmethod
    def of(cls, scenario: Scenario) -> Compiled:
        """The structure of this very plan and `hold`, built on first use and kept as long as both live."""
        plan, anchor = scenario.plan, scenario.host.hold if scenario.host else scenario.plan
        built = cls._built.setdefault(plan, WeakKeyDictionary()).setdefault(anchor, {})
        key = scenario.wire, scenario.late.tobytes(), scenario.before.tobytes()
        if key not in built:
            built[key] = cls(scenario)
        return built[key]
