"""`ExpertRouting`: what uneven counts make of a plan's expert kernels, all-to-alls and buffers, position by
position; and an experts part as a function of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cost_models import DeviceHardware, LinkFabric
from cost_models import work_seconds as uniform_seconds
from ir.core.ops import Pass
from ir.core.order import FloatArray, IntArray
from ir.core.waits import grouped
from ir.core.work import WEIGHTS_CAST, Work
from ir.graph.build import PartPasses
from ir.graph.graph import Graph, GraphNode
from ir.graph.recompute import RecomputedLayers
from ir.job.build import PreparedJob
from ir.job.routing.counts import ExpertCounts, ExpertLayer, distinct, moe_layers
from ir.job.routing.described import check_routing, counts_of
from ir.plan.plan import Plan
from ir.workload.part import PartLayout
from ir.workload.parts.moe import spread
from ir.workload.setting import MicrobatchShape
from ir.workload.work import ConfigModelWork
from piper_sim.folding.ground import DevicePlacement
from piper_sim.pricing.routing.division import ExpertDivision, divisions
from piper_sim.pricing.routing.grouped import work_seconds
from piper_sim.pricing.routing.traffic import balanced_seconds, exchange_seconds


def routing_of(prepared: PreparedJob, graph: Graph, hardware: DeviceHardware) -> ExpertRouting | None:
    """The routing of a job whose directives made `graph` (a plan's); None where it is balanced.

    Raises PiperError: keys of `[routing]` that do not go together, a file that does not fit the job.
    """
    job, source = prepared.job, prepared.base.source
    check_routing(job, prepared.config)
    if job.routing.kind == "balanced":
        return None
    assert isinstance(source, ConfigModelWork)
    layers = moe_layers(graph, source)
    per_node = job.cluster.gpus_per_node or hardware.gpus_per_node
    ground = DevicePlacement(prepared.mesh, per_node)
    counts = counts_of(job, prepared.config, layers, len(ground.positions), prepared.mbs)
    return ExpertRouting(counts, layers, source, hardware, ground, LinkFabric.of(hardware, per_node), graph.recompute)


@dataclass(frozen=True, eq=False)
class ExpertSizes:
    """One position's bytes. buffers: as `plan.buffers.bytes`. workspace: [node, microbatch] bytes while a node runs."""

    buffers: IntArray
    workspace: IntArray


@dataclass(frozen=True, eq=False)
class ExpertRouting:
    """Counts on the ranks of a job. Positions are those of `piper_sim.folding`.

    Microbatches with equal counts are one *case*; `counts.case` says which.
    """

    counts: ExpertCounts
    layers: tuple[ExpertLayer, ...]
    source: ConfigModelWork
    hardware: DeviceHardware
    ground: DevicePlacement
    fabric: LinkFabric
    recompute: RecomputedLayers
    _templates: dict[tuple[object, ...], tuple[BufferLine, ...]] = field(default_factory=dict)
    _known: dict[tuple[int, object], FloatArray] = field(default_factory=dict)

    @cached_property
    def divisions(self) -> tuple[ExpertDivision, ...]:
        """Layers by how their experts are divided."""
        return divisions(self.layers, self.counts, self.ground)

    @cached_property
    def division_of(self) -> dict[int, tuple[ExpertDivision, int]]:
        """Layer index -> its division and its index there."""
        return {int(i): (d, k) for d in self.divisions for k, i in enumerate(d.layers)}

    @cached_property
    def _layer_of(self) -> dict[tuple[int, str], int]:
        return {(x.entry.stage, x.entry.chunk.name): i for i, x in enumerate(self.layers)}

    def layer(self, node: GraphNode) -> int:
        """Index of the layer whose experts a node is, or exchanges tokens with; -1: none."""
        chunk, _, part = node.part.rpartition(".")
        here = isinstance(node.kind, Pass) and part in ("experts", "dispatch", "combine")
        return self._layer_of.get((node.stage, chunk), -1) if here else -1

    @cached_property
    def received(self) -> IntArray:
        """[layer, case, position] rows that its experts receive from its expert group."""
        out = np.empty((len(self.layers), self.counts.cases, len(self.ground.positions)), dtype=np.int64)
        for d in self.divisions:
            out[d.layers] = d.received
        return out

    @cached_property
    def worked(self) -> IntArray:
        """[layer, case, position] rows that its experts work on."""
        out = np.empty_like(self.received)
        for d in self.divisions:
            out[d.layers] = d.worked
        return out

    def colours(self) -> IntArray:
        """[position] numbers, equal where own rows and exchanges are equal in every layer and microbatch.

        For `folding.classes(plan, ground, routing.colours()[None])`.
        """
        columns = []
        for d in self.divisions:
            both = np.stack([self._exchange_factors(d, there) for there in (True, False)], axis=1)
            alike = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
            columns += [d.load, d.received, alike[d.exchange[:, :, d.group_of]]]
        table = np.concatenate([c.reshape(-1, c.shape[2]) for c in columns])
        return distinct(table.T)[1]

    def work_factor(self, node: GraphNode, case: IntArray, position: IntArray) -> FloatArray:
        """[position, case] kernel seconds of an experts node over what the balanced node takes."""
        d, k = self.division_of[self.layer(node)]
        return np.asarray(self._work_factors(d, node)[d.load[k][case[None], position[:, None]]])

    def inline_factor(self, node: GraphNode, case: IntArray, position: IntArray) -> FloatArray:
        """[position, case] rows over the balanced ones: what etp's messages inside an experts node scale by."""
        d, k = self.division_of[self.layer(node)]
        usual = balanced_rows(d.first, self.source) * d.layout.etp
        return np.asarray(d.worked[k][case[None], position[:, None]] / usual)

    def exchange_factor(self, node: GraphNode, case: IntArray, position: IntArray) -> FloatArray:
        """[position, case] seconds of an all-to-all over those of balanced counts; members of a group agree."""
        d, k = self.division_of[self.layer(node)]
        exchange = d.exchange[k][case[None], d.group_of[position][:, None]]
        return np.asarray(self._exchange_factors(d, towards(node))[exchange])

    def _work_factors(self, d: ExpertDivision, node: GraphNode) -> FloatArray:
        """[load] of nodes of this kind: they are alike in all layers of a division."""
        key = (int(d.layers[0]), node.kind)
        if key not in self._known:
            t = self.template(node)
            usual = uniform_seconds(node.work, self.hardware)
            casts = uniform_seconds(tuple(k for k in node.work if k.label == WEIGHTS_CAST), self.hardware)
            seconds = casts + work_seconds(t.once, t.twice, t.rows, d.loads, self.hardware)
            self._known[key] = seconds / usual if usual > 0 else np.ones(len(d.loads))
        return self._known[key]

    def _exchange_factors(self, d: ExpertDivision, there: bool) -> FloatArray:
        """[exchange] of a division; there: towards the experts, as dispatches in forward and combines in backward."""
        key = (int(d.layers[0]), there)
        if key not in self._known:
            m = self.source.messages(d.first.entry)
            message = m.dispatch if there else m.combine
            copy = message.bytes / balanced_rows(d.first, self.source)
            seconds = exchange_seconds(d, self.counts, message, copy, self.fabric)
            usual = balanced_seconds(d, message, self.ground, self.fabric)
            self._known[key] = np.where(usual > 0, seconds / np.where(usual > 0, usual, 1.0), 1.0)
        return self._known[key]

    def template(self, node: GraphNode) -> ExpertTemplate:
        """An experts node as a function of its rows."""
        return template(node, self.layers[self.layer(node)], self.source, self.recompute)

    def sizes(self, plan: Plan) -> Callable[[int], ExpertSizes]:
        """Bytes of a position's buffers and workspaces: those that hold rows of experts follow its rows."""
        nodes, b, mbs = plan.graph.nodes, plan.buffers, np.arange(plan.graph.mbs)
        case = np.broadcast_to(self.counts.case(mbs), mbs.shape)
        workspace = np.repeat(np.array([n.workspace for n in nodes], dtype=np.int64), len(case))
        rows, held = grouped(b.node, len(nodes)), list[tuple[IntArray, ...]]()
        for i, n in enumerate(nodes):
            lines = self._lines(n) if self.layer(n) >= 0 else None
            if lines is None:
                continue
            layer = self.layer(n) + (0 if n.message is None else len(self.layers))
            mine = [rows[i][b.slot[rows[i]] == slot] for slot in range(len(lines) - 1)]
            places = [*((at, b.mb[at]) for at in mine), (len(b) + i * len(mbs) + mbs, mbs)]
            for (at, mb), x in zip(places, lines, strict=True):
                same = (np.full(len(at), v) for v in (x.fixed, x.per, x.of))
                held.append((at, layer * self.counts.cases + case[mb], *same))
        usual, got = np.concatenate([b.bytes, workspace]), np.concatenate([self.worked, self.received])
        at, source, fixed, per, of = (np.concatenate(x) for x in zip(*held, strict=True))

        def own(position: int) -> ExpertSizes:
            out = usual.copy()
            out[at] = fixed - (-per * got[:, :, position].reshape(-1)[source]) // of
            return ExpertSizes(out[: len(b)], out[len(b) :].reshape(len(nodes), -1))

        return own

    def _lines(self, node: GraphNode) -> tuple[BufferLine, ...] | None:
        """Of each buffer and of the workspace; None where none holds rows of experts."""
        if node.message is None:
            alike = (int(self.division_of[self.layer(node)][0].layers[0]), node.kind, *(w.bytes for w in node.writes))
            if alike not in self._templates:
                found = self.template(node)
                self._templates[alike] = (*found.writes, found.workspace)
            return self._templates[alike]
        if not towards(node):
            return None
        usual = balanced_rows(self.division_of[self.layer(node)][0].first, self.source)
        return (*(BufferLine(0, w.bytes, usual) for w in node.writes), BufferLine(0, 0, 1))


def towards(node: GraphNode) -> bool:
    """Whether an all-to-all carries tokens to experts: a dispatch in forward, in backward a combine's mirror."""
    return node.part.endswith(".dispatch") == (node.kind is not Pass.I)


ROWS = 128  # a whole number of fp8's blocks, so that bytes of scales are exact


@dataclass(frozen=True, slots=True)
class BufferLine:
    """Bytes that grow with rows: `per` for every `of` rows, rounded up, and `fixed` ones."""

    fixed: int
    per: int
    of: int


@dataclass(frozen=True, slots=True)
class ExpertTemplate:
    """A node of an experts part: kernels for one expert with `rows` rows and with twice as many, bytes of buffers."""

    rows: int
    once: Work
    twice: Work
    writes: tuple[BufferLine, ...]
    workspace: BufferLine


def template(
    node: GraphNode, layer: ExpertLayer, source: ConfigModelWork, recompute: RecomputedLayers
) -> ExpertTemplate:
    """The node rebuilt by the part's own builder for one expert.

    Bytes are exact where a row is a whole number of fp8's blocks of 128, else up to one scale per tensor too large.
    The gradient that I hands back follows the rows too; the graph knows it for balanced ones. Experts that exchange
    nothing give one row per token, however many rows they have.
    """
    rows = ROWS * layer.entry.layout.etp
    a, b = (_rebuilt(node, layer, source, recompute, n) for n in (ROWS, 2 * ROWS))
    writes = [_line(x.bytes, y.bytes, rows) for x, y in zip(a.writes, b.writes, strict=True)]
    if node.kind in (Pass.F, Pass.R) and not spread(layer.entry.layout):
        writes[0] = BufferLine(node.writes[0].bytes, 0, 1)
    if node.kind is Pass.I:
        usual = balanced_rows(layer, source) * layer.entry.layout.etp
        writes[:-1] = [BufferLine(0, w.bytes, usual) for w in node.writes[:-1]]
    return ExpertTemplate(rows, a.work, b.work, tuple(writes), _line(a.workspace, b.workspace, rows))


def balanced_rows(layer: ExpertLayer, source: ConfigModelWork) -> int:
    """Rows that a rank's experts receive from its group where all are equal."""
    assert source.config.moe is not None
    return layer.tokens * source.config.moe.top_k


def _line(once: int, twice: int, rows: int) -> BufferLine:
    return BufferLine(2 * once - twice, twice - once, rows)


def _rebuilt(
    node: GraphNode, layer: ExpertLayer, source: ConfigModelWork, recompute: RecomputedLayers, rows: int
) -> GraphNode:
    """The node for a device with one expert that receives `rows` rows, before etp gathers them."""
    e, moe = layer.entry, source.config.moe
    assert moe is not None
    config = replace(source.config, moe=replace(moe, experts=e.layout.ep, top_k=1))
    alone = replace(e, layout=PartLayout(ep=e.layout.ep, etp=e.layout.etp))
    work = replace(source, config=config, shape=MicrobatchShape(1, rows)).work(alone)
    grads = [w.bytes for w in node.writes[:-1]] if node.kind is Pass.I else []
    return PartPasses(recompute).fill(node, alone, work, tuple(grads))
