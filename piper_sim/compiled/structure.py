"""What is built once from a scenario's structure and reused over any durations, launches, tables and links."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from ir.plan.plan import OpLists, Plan
from piper_sim.compiled import net, order
from piper_sim.engine.scenario import EngineScenario, MessageMode

Key = tuple[MessageMode, bytes, bytes]


class CompiledEngine:
    """A scenario's structure: its plan, wire, what is carried over and what hosts wait for.

    net: streams, waits and meetings. path: the order in which everything can be computed; None where streams get stuck,
    whatever the durations.
    """

    _built: ClassVar[WeakKeyDictionary[Plan, WeakKeyDictionary[Plan | OpLists, dict[Key, CompiledEngine]]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, scenario: EngineScenario) -> None:
        self.net = net.build(scenario)
        self.path = order.build(self.net, order.arranged(self.net))

    @classmethod
    def of(cls, scenario: EngineScenario) -> CompiledEngine:
        """The structure of this very plan and `hold`, built on first use and kept as long as both live."""
        plan, anchor = scenario.plan, scenario.host.hold if scenario.host else scenario.plan
        built = cls._built.setdefault(plan, WeakKeyDictionary()).setdefault(anchor, {})
        key = scenario.wire, scenario.late.tobytes(), scenario.before.tobytes()
        if key not in built:
            built[key] = cls(scenario)
        return built[key]
