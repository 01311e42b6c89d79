"""What ranks of a group do together inside a compute op: collectives over tp and cp, and over etp around experts.

Such ranks leave an op together, so one lane stands for all of a group. What a node's kernels and its exposed messages
take is known, and the order of nodes; within a node kernels are drawn first, as the cost model has no more order. All
at full speed: what ranks wait for a slower one of their group is not in it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache

from ir.graph.graph import GraphNode
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind
from piper_sim.folding import RankSlot
from piper_sim.pricing.structure import CostShare
from piper_sim.report.units import size
from piper_sim.study.prediction import Prediction

AXES = ("tp", "cp", "etp")
SHARES = (CostShare.TP, CostShare.CP)


def inside_of(p: Prediction) -> tuple[list[str], dict[int, str]]:
    """([row of `p.last_step`] JSON of [begin, end, words], as shares of the op; who meets, by rank). Empty: nobody.

    >>> from piper_sim import load_job, predict
    >>> job = {"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2, "tp": 2}}
    >>> texts, met = inside_of(predict(load_job(job)))
    >>> met, json.loads(texts[0])[1][2]
    ({0: 'tp 0–1', 1: 'tp 2–3'}, 'all_gather 8.0 KiB, reduce_scatter 8.0 KiB')
    """
    plan, first, model = p.plan, int(p.planned.classes.first[p.shown]), p.planned.model
    nodes, places = plan.graph.nodes, RankPlacement.of(plan)
    axes = [a for a in AXES if places.mesh.sizes[a] > 1 and any(a in m.axes for n in nodes for m in n.inline)]
    if not axes:
        return [], {}

    @cache
    def shares(n: int, program: int) -> list[float]:
        return model.node_shares(nodes[n], RankSlot(program, first))

    @cache
    def text(program: int, shape: int) -> str:
        s, at, found = plan.shapes[shape], 0.0, list[tuple[float, float, str]]()
        for n, _ in s.covers if s.kind is OpKind.COMPUTE else ():
            at += sum(shares(n, program))
            if exposed := sum(shares(n, program)[share] for share in SHARES):
                found.append((at - exposed, at, _words(nodes[n])))
        return json.dumps([(round(a / at, 4), round(b / at, 4), w) for a, b, w in found]) if found else ""

    program, shape = plan.program[p.trace_order].tolist(), plan.shape[p.trace_order].tolist()
    groups = {q: places.group(ranks[first], axes, (q,)) for q, ranks in enumerate(places.table)}
    return list(map(text, program, shape)), {q: f"{'+'.join(axes)} {_span(g)}" for q, g in groups.items()}


def _words(n: GraphNode) -> str:
    each = Counter(f"{m.kind} {size(m.bytes)}" for m in n.inline if not set(AXES).isdisjoint(m.axes))
    return ", ".join(f"{count} × {what}" if count > 1 else what for what, count in each.items())


def _span(ranks: Sequence[int]) -> str:
    """For people.

    >>> _span([4, 5, 6, 7]), _span([0, 8, 16])
    ('4–7', '0, 8 … 16')
    """
    close = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}–{ranks[-1]}" if close else f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
