"""Which nodes a directive's filter means, and a clear refusal where it means none."""

from ir.core.errors import PiperError, directive_error, nearest
from ir.core.filters import DirectiveFilter
from ir.core.ops import Pass
from ir.graph.graph import Graph


def select(graph: Graph, wanted: DirectiveFilter, who: str) -> list[int]:
    """Indices of the matching per-microbatch nodes. Raises PiperError (directive) where there are none."""
    hits = [i for i, n in enumerate(graph.nodes) if isinstance(n.kind, Pass)]
    if wanted.passes is not None:
        hits = [i for i in hits if graph.nodes[i].kind in wanted.passes]
    for tag, match in wanted.matches:
        if tag == graph.dim:
            continue
        values = [n.tags.get(tag) for n in graph.nodes]
        fits = {v: match.accepts(v) for v in set(values)}
        if fits.keys() <= {None}:
            raise _unknown(graph, tag, who)
        hits = [i for i in hits if fits[values[i]]]
    if not hits or not wanted.microbatches(graph.dim, graph.mbs):
        raise directive_error(f"{who}: the filter selects nothing", _have(graph, wanted))
    return hits


def _unknown(graph: Graph, tag: str, who: str) -> PiperError:
    known = {t for n in graph.nodes for t in n.tags} | ({graph.dim} if graph.dim else set())
    return directive_error(
        f"{who}: no node carries the tag {tag!r}", ", ".join([*sorted(known), "PASS"]), nearest(tag, known)
    )


def _have(graph: Graph, wanted: DirectiveFilter) -> str:
    parts = []
    for tag in wanted.tags:
        if tag == graph.dim:
            parts.append(f"{tag} 0..{graph.mbs - 1}")
        else:
            values = sorted({n.tags[tag] for n in graph.nodes if tag in n.tags})
            parts.append(f"{tag} {values[0]}..{values[-1]}")
    return ", ".join(parts)
