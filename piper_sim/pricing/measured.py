"""What a profile says about one job's plan: measured seconds, which go before modelled ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cost_models.profile.file import load_profile
from cost_models.profile.pairs import KernelPair
from cost_models.profile.profile import CostSource, Profile, ProfileCost, lookup
from cost_models.profile.shapes import KernelShape, op_shapes
from ir.core.errors import job_error
from ir.core.files import named_path
from ir.core.work import Message, MessageKind
from ir.graph.classes import link_class, node_classes
from ir.graph.graph import Graph, GraphNode, PerStepOp
from ir.job import Job
from ir.job.build import PreparedJob
from piper_sim.folding import RankSpread

T = TypeVar("T")
NodeClass = tuple[GraphNode, str, KernelShape | None]
_Key = tuple[int, str, str]  # stage, part, pass
_PLAIN = f"{MessageKind.ALL_TO_ALL} "
_CURVE = re.compile(r"([a-z_]+) (\d+)@(\d+)", re.ASCII)
Price = Callable[[RankSpread], float]  # modelled seconds of a message in a group that lies so


def classes_of(graph: Graph, job: Job) -> list[NodeClass]:
    """Every node with the class and the sizes that a profile has it by.

    A graph's updates are AdamW's that clip, or Muon's, whose matrices tell its class; else no plan depends on the
    optimizer. What SGD does, or the host, is a class of its own. Muon's has no sizes: of as many elements, other
    matrices take another time, and AdamW a small part of it.
    """
    o = job.optimizer
    own = [*([o.name] if o.name == "sgd" else []), *(["unclipped"] if o.clip_norm == 0 else [])]
    word = " ".join([*own, *([f"{o.offload} on the host"] if o.offload else [])])
    named = zip(graph.nodes, node_classes(graph), op_shapes(graph), strict=True)
    return [_updated(x, word) if x[0].kind is PerStepOp.UPDATE else x for x in named]


def _updated(found: NodeClass, word: str) -> NodeClass:
    n, name, shape = found
    sized = replace(shape, family=f"{shape.family} {word}".rstrip()) if shape and not n.matrices else None
    return n, f"{name} {word}".rstrip(), sized


def reclassed(graph: Graph, job: Job, found: Mapping[str, T]) -> dict[str, T]:
    """What was found by the classes of a graph, by those of the job's."""
    other = {c: name for c, (_, name, _) in zip(node_classes(graph), classes_of(graph, job), strict=True)}
    return {other.get(name, name): x for name, x in found.items()}


def profile_of(job: Job) -> Profile | None:
    """`[costs] profile`; its path starts at the job's folder. Raises PiperError: it cannot be read, or not be used."""
    if job.costs.profile is None:
        return None
    if job.costs.stage_times is not None:
        fix = "leave one of the two out"
        raise job_error("costs.profile", "stage_times and a profile both say what ops take", fix, file=job.file)
    return load_profile(named_path(job.file, job.costs.profile))


@dataclass(frozen=True, eq=False)
class MeasuredCosts:
    """Seconds by node and by message. host_s: of a host that computes itself, for each op."""

    nodes: Mapping[_Key, ProfileCost] = field(default_factory=dict)
    profile: Profile | None = None
    host_s: float = 0.0

    @classmethod
    def of(cls, prepared: PreparedJob, profile: Profile | None = None) -> MeasuredCosts | None:
        """Of a job's plan, from a profile or else the job's own; None where there is none."""
        profile = profile or profile_of(prepared.job)
        if profile is None:
            return None
        graph = prepared.plan().graph
        found = {_key(n): lookup(profile, c, s) for n, c, s in classes_of(graph, prepared.job) if n.message is None}
        nodes = {key: got for key, got in found.items() if got is not None}
        return cls(nodes, profile, profile.host_s or 0.0)

    @property
    def pairs(self) -> Mapping[str, KernelPair]:
        """Measured slowdowns."""
        return {} if self.profile is None else self.profile.pairs

    def node(self, n: GraphNode) -> ProfileCost | None:
        """Seconds of one instance of a node that computes."""
        return self.nodes.get(_key(n)) if n.message is None else None

    def message(self, message: Message, spread: RankSpread, price: Price) -> ProfileCost:
        """Seconds of a message: as measured on so many ranks and nodes, or wherever they were; else as modelled.

        Where a group of another size was measured, on one node like this one or on several like this one, the model is
        corrected by as much as it was off there: extrapolated, and the correction is its spread.
        """
        modelled = ProfileCost(price(spread), 0.0, CostSource.MODELLED)
        if self.profile is None:
            return modelled
        for nodes in (spread.nodes, 0):
            if (found := lookup(self.profile, link_class(message, spread.ranks, nodes))) is not None:
                return found
        if (near := _nearest(self.profile, message, spread)) is None or not (there := price(near)):
            return modelled
        found = lookup(self.profile, link_class(message, near.ranks, near.nodes))
        assert found is not None
        seconds = modelled.seconds * found.seconds / there
        return ProfileCost(seconds, abs(seconds - modelled.seconds), CostSource.EXTRAPOLATED)

    @property
    def every_copy(self) -> bool:
        """Whether all-to-alls were timed that send every copy of a token, as those of NCCL do."""
        profile = self.profile
        return profile is not None and bool(profile.machine.gpu) and any(k.startswith(_PLAIN) for k in profile.links)

    def dispatched(
        self, message: Message, spread: RankSpread, price: Callable[[Message, RankSpread], float]
    ) -> ProfileCost | None:
        """Seconds of tokens on their way to experts, each sent once per node: what was timed of as many bytes, times
        what the model says of the two. None where nothing was, or it is no such message.
        """
        if message.kind is not MessageKind.ALL_TO_ALL or message.fanout < 2 or not self.every_copy:
            return None
        plain = replace(message, fanout=1, nodes_limit=0)
        found, usual = self.message(plain, spread, lambda s: price(plain, s)), price(plain, spread)
        if found.source is CostSource.MODELLED or not usual:
            return None
        modelled = price(message, spread)
        seconds = modelled * found.seconds / usual
        return ProfileCost(seconds, abs(seconds - modelled), CostSource.EXTRAPOLATED)


MODELLED = MeasuredCosts()


def _nearest(profile: Profile, message: Message, spread: RankSpread) -> RankSpread | None:
    """The measured group most like one: across nodes where it is, then by nodes, then by ranks."""
    if message.kind is MessageKind.P2P or spread.ranks < 2:
        return None
    found = [m for name in profile.curves if (m := _CURVE.fullmatch(name)) and m[1] == str(message.kind)]
    groups = [RankSpread(int(m[2]), max(1, int(m[2]) // int(m[3])), int(m[3])) for m in found]
    alike = [g for g in groups if (g.nodes > 1) == (spread.nodes > 1)]

    def far(g: RankSpread) -> tuple[float, float, int]:
        return abs(math.log(g.nodes / spread.nodes)), abs(math.log(g.ranks / spread.ranks)), g.ranks

    return min(alike, key=far, default=None)


def scaled(shares: list[float], seconds: float) -> list[float]:
    """Shares in the same proportion that sum to so many seconds; all compute where nothing was modelled.

    >>> scaled([1.0, 0.0, 3.0, 0.0, 0.0], 2.0)
    [0.5, 0.0, 1.5, 0.0, 0.0]
    """
    total = sum(shares)
    return [x * seconds / total for x in shares] if total else [seconds, *[0.0] * (len(shares) - 1)]


def _key(n: GraphNode) -> _Key:
    return n.stage, n.part, str(n.kind)
