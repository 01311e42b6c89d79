"""A forward and a backward merged: legal under every policy, each turn where DeepSeek's trace has it, none for free."""

from collections.abc import Sequence
from itertools import product

import pytest

from ir.core.ops import OpToken, Pass
from ir.lower import PassMerge, PlanPolicy
from ir.lower.merge import CYCLE, _Clock, cycled, listed
from ir.lower.sequence import PassSequences
from ir.verify import check_plan
from tests.ir.plans import moe_graph, moe_plan
from tests.refusals import refusal

NAMES = ("dualpipe", "dualpipev", "1f1b-overlap", "interleaved-1f1b-overlap")
GRAPH = moe_graph("1f1b-overlap", 1, 2, layers=4)
PAIR = [PassSequences(GRAPH).of(0, t) for t in (OpToken.F, OpToken.B)]


def seconds(wire: float = 1.0) -> tuple[tuple[str, float], ...]:
    """A layer as in the trace: F 4 + 4, I 9 + 5, W 2 + 4; each exchange `wire` times 6 to 8."""
    took = {"F": (4, 4), "I": (9, 5), "W": (2, 4)}
    out = {}
    for n in GRAPH.nodes:
        if n.once:
            continue
        part = n.part.rpartition(".")[2]
        if n.message is not None:
            out[n.text()] = 0.0 if part == "counts" else wire * (6.0 if part == "dispatch" else 8.0)
        else:
            out[n.text()] = float(took[str(n.kind)][part == "experts"]) * (part in ("attn", "experts"))
    return tuple(out.items())


def span(order: Sequence[tuple[int, int]], wire: float = 1.0) -> float:
    clock = clock_of(wire)
    for item in order:
        clock.take(item)
    return max(clock.end.values())


def clock_of(wire: float) -> _Clock:
    needs: dict[int, list[int]] = {n: [] for m in PAIR for n in m}
    for e in GRAPH.edges:
        same = (GRAPH.nodes[e.src].kind is Pass.F) == (GRAPH.nodes[e.dst].kind is Pass.F)
        if same and e.src in needs and e.dst in needs:
            needs[e.dst].append(e.src)
    table = dict(seconds(wire))
    return _Clock(needs, {n: table[GRAPH.nodes[n].text()] for n in needs}, {n: GRAPH.nodes[n].stream for n in needs})


@pytest.mark.parametrize(("name", "again"), list(product(NAMES, [(), ("mlp",), ("full",)])))
def test_every_policy_is_a_legal_plan_that_cannot_get_stuck(name: str, again: tuple[str, ...]) -> None:
    shape = {"layers": 9, "recompute": again}
    kinds = {n.text(): 1e-3 for n in moe_graph(name, 2, 6, **shape).nodes if not n.once}  # type: ignore[arg-type]
    texts = set()
    for merge, late in product((PassMerge.ALTERNATE, PassMerge.TEMPLATE, PassMerge.PROFILE), (False, True)):
        policy = PlanPolicy(merge, delay_wgrad=late, seconds=tuple(sorted(kinds.items())))
        plan = moe_plan(name, 2, 6, policy, **shape)
        check_plan(plan, inline=True)
        texts.add(tuple(plan.texts))
        assert plan.header["merge"].split()[0] == merge and plan.header.get("delay_wgrad") == ("on" if late else None)
    assert len(texts) >= 3


def test_a_plan_names_the_seconds_it_was_listed_by_and_needs_them() -> None:
    one, other = (PlanPolicy(PassMerge.PROFILE, seconds=seconds(w)).header()["merge"] for w in (1.0, 2.0))
    assert one != other and one.startswith("profile ") and len(one.split()[1]) == 16
    refusal(moe_plan, "1f1b-overlap", 1, 2, PlanPolicy(PassMerge.PROFILE), layers=4, match="knows no seconds of 0")


def test_turns_stand_beside_each_other_as_in_deepseek_s_trace() -> None:
    order = [GRAPH.nodes[n] for n, _ in cycled(GRAPH, PAIR, 0, CYCLE, True)]
    wire = [f"{n.part.rpartition('.')[2]}({'F' if n.kind is Pass.F else 'B'})" for n in order if n.message]
    assert [w for w in wire if "counts" not in w] == ["combine(B)", "dispatch(F)", "dispatch(B)", "combine(F)"] * 4
    heavy = [n for n in order if n.part.rpartition(".")[2] in ("attn", "experts")]
    compute = [f"{'attn' if n.part.endswith('attn') else 'mlp'}({n.kind})" for n in heavy]
    layer = ["attn(F)", "mlp(I)", "mlp(W)", "mlp(F)", "attn(I)", "attn(W)"]
    assert compute == layer * 4
    at = {n.text(): k for k, n in enumerate(order)}
    # attention(W) has the next layer's combine(B) beside it; mlp(W) has dispatch(B).
    assert at["0I/l1.combine"] < at["0W/l2.attn"] < at["0F/l2.attn"] and at["0I/l2.dispatch"] < at["0W/l2.experts"]
    plain = [GRAPH.nodes[n].text() for n, _ in cycled(GRAPH, PAIR, 0, CYCLE, False)]  # Megatron without delay_wgrad
    assert plain.index("0W/l2.experts") == plain.index("0I/l2.experts") + 1 < plain.index("0I/l2.dispatch")


@pytest.mark.parametrize("wire", [1.0, 1.5, 2.0])
def test_the_cycle_s_span_is_its_dearer_stream_and_a_rotated_one_loses(wire: float) -> None:
    """Per layer 28 of compute, 28 of wire at once, so that nothing but the ends may be exposed."""
    good = span(cycled(GRAPH, PAIR, 0, CYCLE, True), wire)
    assert good <= 4 * 28 * wire + 12
    f = [t for t in CYCLE.split() if t.startswith("F")]
    for by in (1, 2, 3):
        turns = iter(f[by:] + f[:by])
        rotated = cycled(GRAPH, PAIR, 0, " ".join(next(turns) if t.startswith("F") else t for t in CYCLE.split()), True)
        _strict(rotated)
        assert span(rotated, wire) > 1.04 * good, by
    apart = [(n, m) for m in (0, 1) for n in PAIR[m]]
    assert span(apart, wire) > 1.4 * good


def _strict(order: Sequence[tuple[int, int]]) -> None:
    clock = clock_of(1.0)
    for item in order:
        for n in clock.needs[item[0]]:
            clock.end[n, item[1]]
        clock.take(item)


@pytest.mark.parametrize("wire", [0.0, 0.5, 1.0, 1.5, 2.0, 4.0])
def test_a_profile_s_order_is_no_slower_by_its_own_seconds_than_any_named_one(wire: float) -> None:
    named = [cycled(GRAPH, PAIR, 0, CYCLE, late) for late in (False, True)]
    found = listed(GRAPH, seconds(wire), PAIR, named)
    alone = listed(GRAPH, seconds(wire), PAIR, ())
    _strict(found), _strict(alone)
    assert sorted(found) == sorted(alone) == sorted(named[0]) and span(found, wire) <= min(span(o, wire) for o in named)
    total, comm = 4 * 28, 4 * 28 * wire
    assert max(total, comm) <= span(alone, wire) <= 1.2 * max(total, comm) + 8
