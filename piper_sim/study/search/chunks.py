"""What one chunk of each kind costs and keeps on one rank under one division of the model: what bounds are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost_models import DeviceHardware
from ir.core.grid import quantise
from ir.core.mesh import Mesh
from ir.core.ops import OpToken, Pass
from ir.core.order import FloatArray
from ir.core.work import Message, MessageKind
from ir.directives import apply
from ir.graph.build import model_graph
from ir.graph.graph import COMPUTE, COUNTS, Graph, GraphNode, PerStepOp
from ir.graph.recompute import RecomputedLayers
from ir.graph.sync import summed_over
from ir.job import Job
from ir.job.build import PreparedJob, dividing, precision_of
from ir.job.model import JobModel
from ir.job.recompute import recompute_options
from ir.lower import PlanPolicy
from ir.lower.sequence import PassSequences
from ir.schedules.registry import build
from ir.schedules.schedule import ordering, placing
from ir.workload.params import local_numel
from ir.workload.part import Chunk
from ir.workload.setting import MicrobatchShape
from piper_sim.folding import RankSpread
from piper_sim.folding.uses import CollectiveUse
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import style_of, weigh
from piper_sim.pricing.structure import KERNELS
from piper_sim.study.search.walk import compose

NEVER = -1e18
ROUTED = ("experts", "dispatch", "combine", COUNTS)  # what uneven routing changes

Kind = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class ChunkCosts:
    """Of every chunk of a model, the least that it can take and keep on one rank.

    times: [kind, token, 2, 2] (stream free, input there) -> (stream free, output there), in seconds, as max and plus.
    busy: [kind, token] seconds of its kernels. saved: [kind, 3] bytes from F to I, F to W, I to W. numel: [kind, pool]
    elements on one rank before ZeRO. pools: [pool] axes over which ranks hold the same. small: a job of one chunk each.
    """

    kinds: tuple[int, ...]
    weights: tuple[float, ...]
    times: FloatArray
    busy: FloatArray
    saved: FloatArray
    numel: FloatArray
    tied: bool
    pools: tuple[tuple[str, ...], ...]
    p2p_s: float
    small: PreparedJob
    model: CostModel
    _steps: dict[tuple[int, ...], list[FloatArray]] = field(default_factory=dict)
    _updates: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, model: JobModel, mesh: Mesh, hardware: DeviceHardware) -> ChunkCosts:
        """job: resolved, its sizes checked against the model. Its schedule and ZeRO level do not matter.

        Where some layers are recomputed: as quick as if none were, as lean as if all were.
        """
        if (s := job.schedule).recompute_layers is not None:
            ways = (replace(s, recompute=how, recompute_layers=None) for how in ("none", s.recompute))
            quick, lean = (cls.of(replace(job, schedule=way), model, mesh, hardware) for way in ways)
            return replace(quick, saved=np.minimum(quick.saved, lean.saved))
        chunks = model.chunks
        names = [_kind(c) for c in chunks]
        first = {k: i for i, k in reversed(list(enumerate(names)))}
        order = sorted(first.values())
        shown = {chunks[i].name: chunks[first[names[i]]].name for i in range(len(chunks))}
        kept = [replace(c, reads=c.reads and shown[c.reads]) for c in (chunks[i] for i in order)]
        prepared = _small(job, model, mesh, kept, hardware)
        graph, costs = apply(prepared.base, prepared.strategy), CostModel(prepared, hardware)
        ends = len(chunks) - 1 - max((i for i, c in enumerate(chunks) if "L" in c.tags), default=0)
        side = {c.name for c in kept if "L" not in c.tags and c.reads and ends > 1}  # they read the last layer, too
        uneven = job.routing.kind != "balanced"
        found = _Timed(graph, costs, 0.0 if job.costs.stage_times is not None else _fastest(costs), uneven)
        numel, pools, tied = _params(graph)
        source = prepared.base.source
        assert source is not None
        weight, kinds = weigh(job, hardware)(source), tuple(order.index(first[k]) for k in names)
        weights = [weight(chunks[i]) for i in order]
        return cls(
            kinds=kinds,
            weights=tuple(weights[k] for k in kinds),
            times=np.array([[found.steps(s, t, c.name in side) for t in OpToken] for s, c in enumerate(kept)]),
            busy=np.array([[found.busy(s, t) for t in OpToken] for s in range(len(kept))]),
            saved=_saved(graph, len(kept), uneven),
            numel=numel,
            tied=tied,
            pools=pools,
            p2p_s=found.p2p(),
            small=prepared,
            model=costs,
        )

    def update_s(self, numel: int) -> float:
        """Seconds of an update of so many elements."""
        if numel not in self._updates:
            seconds = sum(self.model.node_shares(GraphNode(0, PerStepOp.UPDATE, "", numel=numel)))
            self._updates[numel] = seconds * _fastest(self.model) * (1 - 1e-9)
        return self._updates[numel]

    def steps(self, kinds: tuple[int, ...]) -> list[FloatArray]:
        """[token, 2, 2] of a stage of such chunks."""
        if kinds not in self._steps:
            back = (OpToken.I, OpToken.B)
            rows = {t: kinds[::-1] if t in back else kinds for t in OpToken}
            self._steps[kinds] = [compose([self.times[k, t] for k in rows[t]]) for t in OpToken]
        return self._steps[kinds]


def _kind(c: Chunk) -> Kind:
    """What two chunks have in common that cost the same: all but names."""
    parts = tuple(
        (
            p.name,
            p.inputs,
            p.keeps,
            tuple((q.shape, q.sharded, q.expert, q.by_heads) for q in (*p.params, *p.frozen)),
            len(p.frozen),
        )
        for p in c.parts
    )
    return ("L" in c.tags, "EP" in c.tags, c.reads is None or c.reads, parts)


def _small(job: Job, model: JobModel, mesh: Mesh, kept: Sequence[Chunk], hardware: DeviceHardware) -> PreparedJob:
    """One chunk of each kind, each a stage, all on one rank."""
    shape = MicrobatchShape(job.schedule.microbatch_size, job.model.seq_len, job.model.encoder_seq_len or 0)
    style = style_of(job, hardware)
    source = model.source(shape, precision_of(job), style)
    base = model_graph([(c,) for c in kept], source, RecomputedLayers(recompute_options(job), early=style.stops_early))
    base = replace(base, mesh=mesh, prefetch=job.parallel.ahead)
    n = len(kept)
    made = build("looped-bfs" if n > 1 else "gpipe", 1, 1, n)
    strategy = (*placing(made), *dividing(job, model.config), ordering(made))
    return PreparedJob(job, model.config, mesh, made.name, mesh.ranks, 1, n, base, strategy, PlanPolicy(), style)


def _fastest(costs: CostModel) -> float:
    """What seconds of kernels are multiplied with: ranks may be faster than the hardware file says."""
    fastest = max(1.0, float(costs.ground.speed.max()))
    return 1.0 if fastest == 1.0 else (1 - 1e-9) / fastest


def alike(costs: CostModel, message: Message) -> bool:
    """Whether all ranks' groups lie on nodes as the first's do: a message then takes the same everywhere."""
    fewest, nodes = costs.ground.lie(CollectiveUse.of(message, costs.ground.positions.programs))
    return bool((fewest == fewest.flat[0]).all() and (nodes == nodes.flat[0]).all())


class _Timed:
    """Node sequences of passes run on one compute stream with nothing in the way."""

    def __init__(self, graph: Graph, costs: CostModel, kernels: float, uneven: bool) -> None:
        self.graph, self.costs, self.kernels, self.uneven = graph, costs, kernels, uneven
        self.sequences = PassSequences(graph)
        self.into: list[list[int]] = [[] for _ in graph.nodes]
        self.out: list[list[int]] = [[] for _ in graph.nodes]
        for e in graph.edges:
            self.into[e.dst].append(e.src)
            self.out[e.src].append(e.dst)
        self.seconds = [self._seconds(n) for n in graph.nodes]

    def _seconds(self, n: GraphNode) -> float:
        routed = n.part.rsplit(".", 1)[-1] in ROUTED
        if n.once or self.kernels == 0.0 or (self.uneven and routed):
            return 0.0
        if n.message is not None:
            return quantise(self.costs.node_message(n)) if alike(self.costs, n.message) else 0.0
        shares = self.costs.node_shares(n)
        every = all(alike(self.costs, m) for m in n.inline)
        kernels = sum(quantise(shares[s]) for s in KERNELS)
        rest = sum(quantise(x) for s, x in enumerate(shares) if s not in KERNELS) if every else 0.0
        return kernels * self.kernels + rest

    def busy(self, stage: int, token: OpToken) -> float:
        """Seconds of a pass's kernels."""
        nodes = self.graph.nodes
        return sum(self.seconds[i] for i in self.sequences.of(stage, token) if nodes[i].stream == COMPUTE)

    def steps(self, stage: int, token: OpToken, side: bool) -> list[list[float]]:
        """What a pass adds to (stream free, input there); a side chunk's input is not the chunk before it."""
        a, c = self._run(stage, token, 0.0, NEVER)
        b, d = (NEVER, NEVER) if side or token is OpToken.W else self._run(stage, token, NEVER, 0.0)
        return [[a, b], [c, d]]

    def _run(self, stage: int, token: OpToken, free: float, there: float) -> tuple[float, float]:
        nodes, done, out = self.graph.nodes, dict[int, float](), dict[int, float]()
        for i in self.sequences.of(stage, token):
            n = nodes[i]
            start = max((self._ready(j, n, done, there) for j in self.into[i]), default=NEVER)
            if n.stream == COMPUTE:
                start = free = max(free, start)
            done[i] = max(NEVER, start + self.seconds[i])
            if n.stream == COMPUTE:
                free = done[i]
            for reader in (nodes[j] for j in self.out[i]):
                if reader.stage != stage and reader.kind is n.kind:
                    out[reader.stage] = max(out.get(reader.stage, NEVER), done[i])
        return free, min(out.values(), default=NEVER)

    def _ready(self, j: int, reader: GraphNode, done: dict[int, float], there: float) -> float:
        if j in done:
            return done[j]
        m = self.graph.nodes[j]
        return there if m.stage != reader.stage and m.kind is reader.kind else NEVER

    def p2p(self) -> float:
        """The least that a transfer between two stages takes."""
        if self.kernels == 0.0 or "p2p" in (self.costs.job.costs.stage_times or {}):
            return 0.0
        nodes = self.graph.nodes
        sizes = [
            nodes[e.src].writes[e.slot].bytes
            for e in self.graph.edges
            if nodes[e.src].stage != nodes[e.dst].stage and nodes[e.src].kind is nodes[e.dst].kind is Pass.F
        ]
        if not sizes:
            return 0.0
        message = Message(MessageKind.P2P, min(sizes), ("pp",))
        return min(quantise(self.costs.priced(message, RankSpread(2, k, 3 - k)).seconds) for k in (1, 2))


def _saved(graph: Graph, stages: int, uneven: bool) -> FloatArray:
    """[stage, 3] bytes alive from F to I (or R), from F to W, from I to W; on the stage that reads them."""
    readers: dict[tuple[int, int], list[GraphNode]] = {}
    for e in graph.edges:
        src, dst = graph.nodes[e.src], graph.nodes[e.dst]
        if dst.kind is Pass.W or (src.kind is Pass.F and dst.kind in (Pass.I, Pass.R)):
            readers.setdefault((e.src, e.slot), []).append(dst)
    out = np.zeros((stages, 3))
    for (src_index, slot), reads in readers.items():
        n = graph.nodes[src_index]
        if n.once or (uneven and n.part.rsplit(".", 1)[-1] in ROUTED):
            continue
        stage = n.stage if any(r.stage == n.stage for r in reads) else reads[0].stage
        late = any(r.kind is Pass.W and r.stage == stage for r in reads)
        out[stage, 1 if n.kind is Pass.F and late else 0 if n.kind is Pass.F else 2] += n.writes[slot].bytes
    return out


def _params(graph: Graph) -> tuple[FloatArray, tuple[tuple[str, ...], ...], bool]:
    """([stage, pool] elements on one rank, [pool] axes over which ranks hold the same, whether any are tied)."""
    pools: dict[tuple[bool, tuple[str, ...]], int] = {}
    rows: list[tuple[int, int, int]] = []
    seen: set[str] = set()
    tied = False
    assert graph.source is not None
    for e in graph.entries:
        for p in e.part.params:
            tied |= p.name in seen
            if p.name not in seen:
                pool = pools.setdefault((p.expert, summed_over(p, e.layout)), len(pools))
                rows.append((e.stage, pool, local_numel(p, e.layout)))
            seen.add(p.name)
    out = np.zeros((graph.stages, max(1, len(pools))))
    for stage, pool, n in rows:
        out[stage, pool] += n
    return out, tuple(axes for _, axes in pools) or ((),), tied
