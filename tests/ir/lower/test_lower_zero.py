"""ZeRO: what is gathered is there when it is used and gone when others need the room; gradients are reduced once."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.ops import Pass
from ir.core.work import MessageKind
from ir.graph.graph import PerStepOp
from ir.graph.sync import buckets
from ir.graph.zero import gathered, per_microbatch
from ir.job.build import prepare
from ir.job.load import job_from
from ir.lower import MessageQueue, PlanPolicy
from ir.plan.plan import OpKind, Plan
from ir.verify import check_plan
from tests.ir.plans import FIXED, fewer, moe_plan


def gathers(plan: Plan) -> dict[int, list[tuple[str, int, int]]]:
    """program -> (bucket, gather op, last user) of every gathered copy."""
    out = defaultdict(list)
    b = plan.buffers
    for k in np.flatnonzero(b.node < 0).tolist():
        i = int(b.slot[k])
        message = plan.shapes[int(plan.shape[i])].message
        if message and message.kind is MessageKind.ALL_GATHER:
            stage, _, rest = plan.text(i).partition("AG_")
            name = rest.partition("/")[2].partition("+")[0]
            out[int(plan.program[i])].append((f"{stage}/{name}", i, int(b.free[k])))
    return out


def users(plan: Plan) -> dict[int, list[tuple[int, set[str]]]]:
    """program -> (op, buckets it reads)."""
    of = gathered(plan.graph, buckets(plan.graph))
    wanted = [{b.key for n, _ in s.covers for b in of.get(n, ())} for s in plan.shapes]
    out = defaultdict(list)
    for i, shape in enumerate(plan.shape.tolist()):
        if wanted[shape]:
            out[int(plan.program[i])].append((i, wanted[shape]))
    return out


def stands_before_its_use(plan: Plan, gather: int, used: list[tuple[int, set[str]]]) -> bool:
    """Whether a gather is dispatched behind all compute before its use, and ahead of reductions that stand there."""
    use = next(op for op, _ in used if op > gather)
    kinds = [plan.shapes[k].kind for k in plan.shape[gather:use].tolist()]
    ahead = gather - 1
    reduces = plan.texts[ahead : ahead + 1] if ahead >= 0 and plan.program[ahead] == plan.program[gather] else []
    return OpKind.COMPUTE not in kinds and not any("RS" in text for text in reduces)


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 4),
    mbs=st.integers(1, 5),
    prefetch=st.integers(0, 4),
    recompute=st.sampled_from([(), ("full",), ("norm",)]),
    bucket=st.sampled_from([None, 0.0005]),
    late=st.booleans(),
)
def test_gathered_weights_are_there_for_every_use_and_within_the_budget(
    name: str, ranks: int, mbs: int, prefetch: int, recompute: tuple[str, ...], bucket: float | None, late: bool
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    options = dict(zero=3, prefetch=prefetch, recompute=recompute, bucket_MiB=bucket, layers=max(4, 2 * ranks))
    plan = moe_plan(name, ranks, mbs, PlanPolicy(gather_on_demand=late), **options)
    check_plan(plan)
    copies, mine = gathers(plan), users(plan)
    for p in range(plan.programs):
        if late:
            prefetch = 0
            assert all(stands_before_its_use(plan, at, mine[p]) for _, at, _ in copies[p])
        for op, keys in mine[p]:
            for key in keys:
                assert sum(k == key and at < op <= last for k, at, last in copies[p]) == 1
        budget = max(prefetch + 1, *(len(keys) for _, keys in mine[p]))
        alive = [sum(at <= op <= last for _, at, last in copies[p]) for op, _ in mine[p]]
        assert max(alive) <= budget
        used = {op for op, _ in mine[p]}
        assert {last for _, _, last in copies[p]} <= used
        assert len(copies[p]) <= sum(len(keys) for _, keys in mine[p])


def test_weights_gathered_ahead_do_not_stand_before_their_use() -> None:
    plan = moe_plan("1f1b", 2, 4, zero=3, layers=4)
    assert not all(stands_before_its_use(plan, at, users(plan)[p]) for p in (0, 1) for _, at, _ in gathers(plan)[p])


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zbv"])
def test_more_room_means_fewer_gathers(name: str) -> None:
    counts = [
        sum(map(len, gathers(moe_plan(name, 2, 6, zero=3, layers=4, prefetch=n)).values())) for n in (1, 2, 3, 5, 9)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_interleaved_microbatches_gather_more_often() -> None:
    """A fused pair goes through two stages at once, so that one bucket of room is not enough for both."""
    counts = {
        name: sum(map(len, gathers(moe_plan(name, 2, 8, zero=3, layers=4)).values())) for name in ("1f1b", "dualpipe")
    }
    assert counts["dualpipe"] > counts["1f1b"]


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 4),
    mbs=st.integers(1, 5),
    zero=st.sampled_from([2, 3]),
    tied=st.booleans(),
    single=st.booleans(),
)
def test_gradients_are_reduced_once_per_microbatch_and_owner(
    name: str, ranks: int, mbs: int, zero: int, tied: bool, single: bool
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    policy = PlanPolicy(p2p=MessageQueue.SINGLE if single else MessageQueue.CHANNELS)
    plan = moe_plan(name, ranks, mbs, policy, zero=zero, tied=tied, layers=max(4, 2 * ranks))
    check_plan(plan, serial=single)
    texts = Counter((int(plan.program[i]), plan.text(i)) for i in range(len(plan)))
    assert max(texts.values()) == 1
    g = plan.graph
    for b in per_microbatch(buckets(g)):
        for p in b.owners:
            here = {
                mb
                for n in g.nodes
                if n.kind == "F"
                and any((g.entries[k].stage, g.entries[k].name) == (n.stage, n.part) for k in b.members)
                for s in n.spans
                if s.group == p and s.mbs is not None
                for mb in s.mbs
            }
            assert {mb for mb in range(mbs) if (p, f"{b.stage}RS{mb}/{b.name}") in texts} == here


def test_one_whole_gradient_is_alive_at_a_time() -> None:
    for name in FIXED:
        plan = moe_plan(name, 2, 5, zero=2, layers=4)
        b = plan.buffers
        spans = defaultdict(list)
        for k in np.flatnonzero((b.node < 0) & (b.alloc != b.slot)).tolist():
            i = int(b.slot[k])
            wide = 1 + max(len(s.covers) for s in plan.shapes)
            times = int(b.alloc[k]) * wide + int(b.alloc_cover[k]), int(b.free[k]) * wide + int(b.free_cover[k])
            spans[int(plan.program[i]), plan.shapes[int(plan.shape[i])].text].append(times)
        for mine in spans.values():
            mine.sort()
            assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(mine))


@pytest.mark.parametrize("zero", [2, 3])
def test_dualpipe_s_copies_meet_once_at_the_end_of_the_step(zero: int) -> None:
    plan = moe_plan("dualpipe", 4, 8, zero=zero, layers=4)
    meetings = defaultdict(list)
    for i in np.flatnonzero(plan.collective >= 0).tolist():
        meetings[plan.text(i)].append(int(plan.program[i]))
    sums = {text: programs for text, programs in meetings.items() if "AR/" in text}
    assert {tuple(sorted(p)) for p in sums.values()} == {(0, 3), (1, 2)}
    node = next(n for n in plan.graph.nodes if n.kind is PerStepOp.ALL_REDUCE)
    assert node.message is not None and node.message.axes == ()
    alone = [plan.text(i) for i in range(len(plan)) if "AG/" in plan.text(i)]
    assert bool(alone) == (zero == 2) and len(alone) == len(set(alone))  # each owner gathers its own shards


def test_zero_1_shards_over_both_copies() -> None:
    plan = moe_plan("dualpipe", 4, 8, zero=1, layers=4)
    both = {tuple(sorted(plan.program[plan.collective == c].tolist())) for c in range(int(plan.collective.max()) + 1)}
    assert both == {(0, 3), (1, 2), (0, 1, 2, 3)}  # pairs, and the norm over all
    assert {plan.text(i).split("/")[0] for i in np.flatnonzero(plan.collective >= 0).tolist()} >= {
        "0RS",
        "0AG",
        "0NORM",
    }


def test_without_data_parallelism_nothing_is_sharded() -> None:
    plan = moe_plan("1f1b", 2, 3, zero=3, dp=1, ep=1, layers=2)
    check_plan(plan)
    assert not [t for t in plan.texts if "RS" in t or "AG" in t]
    dual = moe_plan("dualpipe", 2, 4, zero=3, dp=1, ep=1, layers=2)
    check_plan(dual)
    assert {t.split("/")[0] for t in dual.texts if "RS" in t or "A" in t.split("/")[0]} >= {"0AR", "1AR"}


@fewer
@given(
    name=st.sampled_from([n for n in FIXED if n != "dualpipe"]),  # whose sums are met by another rank
    ranks=st.integers(1, 4),
    mbs=st.integers(1, 5),
    zero=st.sampled_from([0, 1]),
)
def test_a_sum_of_one_owner_is_dispatched_behind_the_pass_that_ends_its_gradient(
    name: str, ranks: int, mbs: int, zero: int
) -> None:
    plan = moe_plan(name, ranks, mbs, zero=zero, layers=max(4, 2 * ranks))
    g, compute = plan.graph, np.flatnonzero(plan.kind == OpKind.COMPUTE)
    parts = {b.key: {(g.entries[k].stage, g.entries[k].name) for k in b.members} for b in buckets(g)}
    seen = 0
    for i, shape in enumerate(plan.shapes[s] for s in plan.shape.tolist()):
        node = g.nodes[shape.covers[0][0]] if shape.covers else None
        if node is None or node.kind not in (PerStepOp.REDUCE, PerStepOp.ALL_REDUCE):
            continue
        before = compute[(compute < i) & (compute >= plan.bounds[plan.program[i]])].tolist()
        covers = {k: [g.nodes[n] for n, _ in plan.shapes[plan.shape[k]].covers] for k in before}
        gives = [
            k for k in before if any(n.kind is Pass.W and (n.stage, n.part) in parts[node.bucket] for n in covers[k])
        ]
        passes = {(covers[k][0].stage, int(plan.mb[k])) for k in before if k >= gives[-1]}
        assert len(passes) == 1, (plan.text(i), passes)
        seen += 1
    assert seen == len(parts)


def test_programs_update_after_all_their_reductions() -> None:
    plan = moe_plan("dualpipev", 2, 4, zero=2, layers=4)
    for p in range(plan.programs):
        rows = range(int(plan.bounds[p]), int(plan.bounds[p + 1]))
        update = next(i for i in rows if "UPDATE" in plan.text(i))
        reductions = [i for i in rows if plan.kind[i] == OpKind.COLLECTIVE and "RS" in plan.text(i)]
        assert reductions and max(reductions) < update


def test_parameters_beside_a_tied_one_are_gathered_and_reduced_by_their_owners_alone() -> None:
    job = {
        "model": {"config": "gpt2", "num_hidden_layers": 2, "seq_len": 8},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": {"pp": 2, "dp": 2, "zero": 3},
        "schedule": {"microbatches": 2},
    }
    plan = prepare(job_from(job)).plan()
    check_plan(plan)
    owners = {b.key: b.owners for b in buckets(plan.graph)}
    assert owners["0/embed.dense"] == (0,) and owners["0/embed.dense.tied"] == (0, 1)  # positions, table
    found = {(key, p) for p, made in gathers(plan).items() for key, _, _ in made}
    assert found == {(key, p) for key, programs in owners.items() for p in programs}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_is_gathered_before_the_one_ahead_of_it_computes(tp: int) -> None:
    """Also where tp makes two buckets of a layer: its norms, which every rank has whole, are one of their own."""
    job = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 5, "seq_len": 8},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": {"tp": tp, "dp": 2, "zero": 3},
        "schedule": {"microbatches": 1},
    }
    plan = prepare(job_from(job)).plan()
    check_plan(plan)
    made, read = gathers(plan)[0], users(plan)[0]
    assert sum(key.startswith("0/l3.dense") for key, _, _ in made) == 2 * tp  # forward and backward
    for (before, _), (op, keys) in itertools.pairwise(read):
        assert not [key for key, at, _ in made if key in keys and before < at < op]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_zero_2_holds_the_gradients_of_few_layers_at_a_time(ahead: int) -> None:
    """Not those of its stage: they leave layer by layer. What is held is counted by walking the plan's ops."""
    job = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 6, "seq_len": 8},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": {"dp": 2, "zero": 2, "prefetch": ahead},
        "schedule": {"microbatches": 3},
    }
    plan = prepare(job_from(job)).plan()
    check_plan(plan)
    b, found = plan.buffers, per_microbatch(buckets(plan.graph))
    whole = np.flatnonzero((b.node < 0) & (b.alloc != b.slot))
    assert len(found) == 8 and len(whole) == 3 * len(found)  # embedding, layers, head; for each microbatch
    most = max(b.bytes[whole[(b.alloc[whole] <= i) & (b.free[whole] > i)]].sum() for i in range(len(plan)))
    size = sorted(int(b.bytes[k]) for k in whole)
    assert most <= sum(size[-ahead - 1 :]) < sum(size) / 3
