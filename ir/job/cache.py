"""Plans by what decides them: one structure under many costs is built once in a process, and checked once."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

from ir.core.errors import PiperError
from ir.core.limits import check_bytes, check_parameters
from ir.graph.build import model_graph
from ir.graph.graph import Graph
from ir.graph.matrices import MuonOptimizer
from ir.graph.recompute import RecomputedLayers
from ir.lower import PlanPolicy
from ir.plan.plan import Plan
from ir.verify import check_plan
from ir.workload.part import ModelWork
from ir.workload.partition import Stages

MOST_OPS = 2_000_000  # of all plans that are kept; with all that is kept of a plan about 1.3 KB each
MOST_GRAPHS = 64  # a layer's nodes are about 4 KB


@dataclass(frozen=True)
class PlanStructure:
    """All that decides a plan, its graph's work, messages and bytes included; nothing of what they cost.

    schedule: the name in the plan's header. source: model, shape and formats. parts: (stage, part) of the partition.
    strategy: the directives, order tables by their values: a searched one stands for the op times it was made from.
    """

    schedule: str
    source: object
    parts: tuple[tuple[int, str], ...]
    recompute: RecomputedLayers
    mesh: object
    prefetch: int
    muon: MuonOptimizer | None
    strategy: tuple[object, ...]
    policy: PlanPolicy


class PlanCache:
    """The plans used last, of at most `most` ops together."""

    def __init__(self, most: int = MOST_OPS) -> None:
        self.most = most
        self._lock = Lock()  # of what is kept, for threads that predict side by side; they build beside each other
        self._plans: OrderedDict[PlanStructure, Plan] = OrderedDict()
        self._checked: WeakKeyDictionary[Plan, set[tuple[bool, bool]]] = WeakKeyDictionary()

    def plan(self, key: PlanStructure, build: Callable[[], Plan]) -> Plan:
        """The plan of a structure, built where it is not here; checked or not yet."""
        with self._lock:
            if (plan := self._plans.get(key)) is not None:
                self._plans.move_to_end(key)
                return plan
        plan = build()
        with self._lock:
            if len(plan) <= self.most:
                self._plans[key] = plan
            while sum(map(len, self._plans.values())) > self.most:
                self._plans.popitem(last=False)
        return plan

    def check(self, plan: Plan, serial: bool = False, inline: bool = False) -> None:
        """`check_plan`, once per plan and set of rules. A plan that breaks one is forgotten."""
        passed = self._checked.setdefault(plan, set())
        if (serial, inline) in passed:
            return
        try:
            check_plan(plan, serial=serial, inline=inline)
        except PiperError:
            with self._lock:
                self._plans = OrderedDict((k, p) for k, p in self._plans.items() if p is not plan)
            raise
        passed.add((serial, inline))

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()


PLANS = PlanCache()


class GraphCache:
    """The model graphs asked for last, before directives; sizes are checked where one is built."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._graphs: OrderedDict[object, Graph] = OrderedDict()

    def graph(self, stages: Stages, source: ModelWork, recompute: RecomputedLayers) -> Graph:
        """`model_graph` of these. The model's config, in `source`, decides what is in a chunk of a given name.

        Raises PiperError: a buffer, or parameters, beyond all sense.
        """
        key = source, recompute, tuple(tuple(c.name for c in chunks) for chunks in stages)
        with self._lock:
            if (graph := self._graphs.get(key)) is not None:
                self._graphs.move_to_end(key)
                return graph
        graph = model_graph(stages, source, recompute)
        check_bytes(b.bytes for n in graph.nodes for b in n.writes)
        check_parameters(q.numel for e in graph.entries for q in (*e.part.params, *e.part.frozen))
        with self._lock:
            self._graphs[key] = graph
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        return graph


GRAPHS = GraphCache()
