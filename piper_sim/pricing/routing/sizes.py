"""An experts part as a function of its rows: kernels for seconds, and bytes of each buffer as lines in rows."""

from dataclasses import dataclass, replace

from ir.core.ops import Pass
from ir.core.work import Work
from ir.graph.build import fill
from ir.graph.graph import GraphNode
from ir.job.routing.counts import ExpertLayer
from ir.workload.part import PartLayout
from ir.workload.parts.moe import spread
from ir.workload.setting import MicrobatchShape
from ir.workload.work import ConfigModelWork

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


def template(node: GraphNode, layer: ExpertLayer, source: ConfigModelWork, recompute: frozenset[str]) -> ExpertTemplate:
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
    node: GraphNode, layer: ExpertLayer, source: ConfigModelWork, recompute: frozenset[str], rows: int
) -> GraphNode:
    """The node for a device with one expert that receives `rows` rows, before etp gathers them."""
    e, moe = layer.entry, source.config.moe
    assert moe is not None
    config = replace(source.config, moe=replace(moe, experts=e.layout.ep, top_k=1))
    alone = replace(e, layout=PartLayout(ep=e.layout.ep, etp=e.layout.etp))
    work = replace(source, config=config, shape=MicrobatchShape(1, rows)).work(alone)
    grads = [w.bytes for w in node.writes[:-1]] if node.kind is Pass.I else []
    return fill(node, alone, work, grads, recompute)
