"""Memory against a walk over every op and cover, and against what can be said in closed form."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import OptimizerMemory, OptimizerPrecision
from ir.core.work import DType
from ir.job.build import PreparedJob
from ir.job.load import job_from
from ir.lower import PlanPolicy
from ir.plan.plan import CATEGORIES, OpKind, Plan
from ir.schedules.registry import NAMES
from ir.workload.params import local_numel
from ir.workload.part import Param
from piper_sim.engine import run
from piper_sim.memory.timeline import gradients_made, memory, samples, samples_by_kind, state
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from tests.ir.plans import moe_plan, stage_plan
from tests.piper_sim.engine.cases import HEAVY

COLUMNS = (*CATEGORIES, "workspace")


@dataclass
class Walk:
    """What a walk over one program's dispatch order saw."""

    peak: int = 0
    at: int = -1
    parts: dict[str, int] = field(default_factory=dict)
    level: list[int] = field(default_factory=list)
    high: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)


def walk(plan: Plan) -> list[Walk]:
    """Op by op, cover by cover: allocate, use the workspace, free. Refuses what is freed and not there."""
    b, nodes = plan.buffers, plan.graph.nodes
    born, dies = defaultdict(list), defaultdict(list)
    for k in range(len(b)):
        assert b.bytes[k] > 0
        born[int(b.alloc[k]), int(b.alloc_cover[k])].append(k)
        if b.free[k] >= 0:
            dies[int(b.free[k]), int(b.free_cover[k])].append(k)
    out = [Walk() for _ in range(plan.programs)]
    now: list[dict[str, int]] = [dict.fromkeys(COLUMNS, 0) for _ in out]
    for i in range(len(plan)):
        w, have = out[int(plan.program[i])], now[int(plan.program[i])]
        s = plan.shapes[int(plan.shape[i])]
        most = 0
        for c in range(-1, max(1, len(s.covers))):
            for k in born.pop((i, c), []):
                assert k not in w.left
                w.left.add(k)
                have[CATEGORIES[int(b.category[k])]] += int(b.bytes[k])
            space = nodes[s.covers[c][0]].workspace if 0 <= c < len(s.covers) and s.kind is OpKind.COMPUTE else 0
            have["workspace"] = space
            if sum(have.values()) > w.peak:
                w.peak, w.at, w.parts = sum(have.values()), i, dict(have)
            most = max(most, sum(have.values())) if c >= 0 else most
            have["workspace"] = 0
            for k in dies.pop((i, c), []):
                w.left.remove(k)
                have[CATEGORIES[int(b.category[k])]] -= int(b.bytes[k])
            assert min(have.values()) >= 0
        w.level.append(sum(have.values()))
        w.high.append(most)
    assert not born and not dies, "a buffer stands where no op is"
    return out


def agrees(plan: Plan) -> None:
    persistent = tuple(OptimizerMemory(10**k, 2 * 10**k, 3 * 10**k) for k in range(plan.programs))
    found, walks = memory(plan, persistent), walk(plan)
    for p, w in enumerate(walks):
        mine = plan.program == p
        assert found.peak[p] == w.peak + persistent[p].total
        assert found.level[mine].tolist() == w.level
        assert found.high[mine].tolist() == w.high
        if w.peak:
            assert found.at[p] == w.at
            assert {k: found.breakdown(p)[k] for k in COLUMNS} == w.parts
        assert sum(found.breakdown(p).values()) == found.peak[p]
        forever = [k for k in w.left if plan.buffers.free[k] >= 0]
        assert not forever and w.level[-1] == sum(int(plan.buffers.bytes[k]) for k in w.left)
    ran = run(plan, np.ones(len(plan)))
    seen = samples(plan, found, ran.start[0], ran.end[0])
    for p in range(plan.programs):
        mine = seen.rank == p
        assert seen.bytes[mine].max() == found.peak[p]
        assert (np.diff(seen.time_s[mine]) >= 0).all()
        last = np.flatnonzero((plan.program == p) & (plan.kind == OpKind.COMPUTE))[-1]
        assert seen.bytes[mine][-1] == found.level[last] + persistent[p].total


@HEAVY
@given(
    name=st.sampled_from(("1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")),
    ranks=st.sampled_from([2, 4]),
    mbs=st.integers(1, 9),
    zero=st.integers(0, 3),
    ep=st.sampled_from([1, 2]),
    recompute=st.sampled_from([(), ("full",), ("norm",), ("attention", "norm")]),
    tied=st.booleans(),
    bucket_MiB=st.sampled_from([None, 0.0005]),
    prefetch=st.integers(0, 3),
)
def test_memory_is_the_walk_over_every_op_and_cover(
    name: str, ranks: int, mbs: int, prefetch: int, zero: int, **how: Any
) -> None:
    agrees(moe_plan(name, ranks, mbs, PlanPolicy(clip=False), zero=zero, prefetch=prefetch if zero == 3 else 1, **how))


@lru_cache(maxsize=64)
def prepared(model: str, schedule: str, zero: int = 1, recompute: Any = "none", **more: Any) -> PreparedJob:
    """A small real model. more: keys of [parallel]; tied: one table for embedding and head."""
    tied = more.pop("tied", False)
    parallel = {"pp": 2, "dp": 4, "zero": zero, "layers": "even", **more}
    table = {
        "model": {"config": model, "seq_len": 64, **({"tie_word_embeddings": True} if tied else {})},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": parallel,
        "schedule": {"name": schedule, "microbatches": 6, "recompute": recompute},
    }
    job = job_from(table)
    return prepare_priced(job, hardware_of(job))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe"])
def test_memory_of_real_models_is_the_walk(model: str, zero: int, schedule: str) -> None:
    ep = 2 if model == "tiny-moe" else 1
    for recompute in ("none", "full", ("norm", "up_projection", "activation"), ("attention",)):
        agrees(prepared(model, schedule, zero, recompute, ep=ep).plan())
    agrees(prepared(model, schedule, zero, ep=ep, bucket_MiB=0.02).plan())


def test_1f1b_holds_as_many_microbatches_as_ranks_behind_it() -> None:
    for ranks in range(1, 9):
        for mbs in (1, 3, 8, 13):
            plan = stage_plan("1f1b", ranks, mbs)
            found = memory(plan, (OptimizerMemory(0, 0, 0),) * ranks)
            assert found.peak.tolist() == [min(mbs, ranks - r) for r in range(ranks)]


@pytest.mark.parametrize("name", NAMES)
def test_all_activations_are_gone_at_the_steps_end(name: str) -> None:
    plan = stage_plan(name, 4, 9)
    found = memory(plan, (OptimizerMemory(0, 0, 0),) * 4)
    assert (found.level[np.append(plan.bounds[1:-1], len(plan)) - 1] == 0).all()
    assert (found.level >= 0).all()


RECIPE = OptimizerPrecision("adamw", DType.BF16, DType.FP32, DType.FP32)


def by_hand(made: PreparedJob, zero: int) -> list[tuple[int, int, int]]:
    """(parameters, gradients, optimizer) by program: every parameter once on each group that runs a part naming it."""
    graph, mesh = made.graph(), made.mesh
    home: dict[str, set[int]] = defaultdict(set)
    first: dict[str, tuple[Param, int]] = {}
    for e in graph.entries:
        where = {s.group for n in graph.nodes if (n.stage, n.part) == (e.stage, e.name) for s in n.spans}
        for p in e.part.params:
            home[p.name] |= where
            assert graph.source is not None
            first.setdefault(p.name, (p, local_numel(p, e.layout)))
    out = [[0, 0, 0] for _ in range(graph.programs)]
    for name, (p, numel) in first.items():
        ranks = mesh.size(("edp",) if p.expert else ("cp", "dp")) * (len(home[name]) if zero == 1 else 1)
        assert numel % ranks == 0, "numbers that need no padding, so that bytes are exact"
        for g in home[name]:
            for k, (size, level) in enumerate(((2, 3), (4, 2), (12, 1))):
                out[g][k] += size * (numel // ranks if zero >= level else numel)
    return [tuple(x) for x in out]  # type: ignore[misc]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_state_is_every_parameter_once_per_owner_divided_by_zero(schedule: str, zero: int) -> None:
    for model, tied in (("tiny-llama", False), ("tiny-llama", True), ("tiny-moe", False), ("tiny-moe", True)):
        for bucket in (0.0, 0.01):
            more: dict[str, float] = {"ep": 2} if model == "tiny-moe" else {}
            more |= {"bucket_MiB": bucket} if bucket else {}
            made = prepared(model, schedule, zero, tied=tied, **more)
            assert CostModel(made, hardware_of(made.job)).recipe == RECIPE
            found = state(made.plan(), RECIPE)
            assert [(s.parameters, s.gradients, s.optimizer) for s in found] == by_hand(made, zero)


def total(made: PreparedJob) -> int:
    return sum(s.parameters for s in state(made.plan(), RECIPE))


def test_megatron_shards_a_tied_table_on_each_stage_by_itself() -> None:
    """Its optimizer's state: half on each replica of both ends, where ours is a quarter on each of the four."""
    held = {}
    for tied in (True, False):
        made = prepared("tiny-llama", "1f1b", 1, tied=tied, dp=2)
        for apart in (False, True):
            held[tied, apart] = [s.optimizer for s in state(made.plan(), OptimizerPrecision(tied_apart=apart))]
    table = made.config.vocab * made.config.hidden
    more = [b - a for a, b in zip(held[True, False], held[True, True], strict=True)]
    assert more == [3 * table, *[0] * (len(more) - 2), 3 * table], "12 bytes for a half instead of for a quarter"
    assert held[False, True] == held[False, False]
    twice = prepared("tiny-llama", "dualpipe", 1, dp=2).plan()
    assert state(twice, OptimizerPrecision(tied_apart=True)) == state(twice, OptimizerPrecision()), "copies are no ties"


def test_dualpipe_holds_two_copies_and_a_tied_table_is_held_by_both_ends() -> None:
    assert total(prepared("tiny-moe", "dualpipe", 0, ep=2)) == 2 * total(prepared("tiny-moe", "1f1b", 0, ep=2))
    assert total(prepared("tiny-moe", "dualpipe", 0, ep=2)) == 2 * total(prepared("tiny-moe", "zbv", 0, ep=2))
    untied, tied = prepared("tiny-llama", "1f1b", 0), prepared("tiny-llama", "1f1b", 0, tied=True)
    assert total(untied) == total(tied), "two tables, or one table twice"
    assert total(prepared("tiny-llama", "zbv", 0)) > total(prepared("tiny-llama", "zbv", 0, tied=True))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "dualpipev"])
def test_gathered_weights_stay_within_the_prefetch_budget(name: str, prefetch: int) -> None:
    """prefetch + 1 buckets, but at least those that one op reads; none is left at the end."""
    for bucket in (None, 0.0005):
        plan = moe_plan(name, 4, 8, zero=3, prefetch=prefetch, bucket_MiB=bucket)
        b = plan.buffers
        text = np.array(plan.texts)
        gathers = [k for k in range(len(b)) if b.node[k] < 0 and "AG_" in text[b.slot[k]]]
        assert gathers
        reads = defaultdict(set)
        for i in plan.waits.rows().tolist():
            on = [int(w) for w in plan.waits.row(i) if "AG_" in text[w]]
            reads[i] |= set(on)
        for p in range(plan.programs):
            mine = [k for k in gathers if plan.program[b.alloc[k]] == p]
            change: dict[tuple[int, int], int] = defaultdict(int)
            for k in mine:
                assert b.free[k] >= 0
                change[int(b.alloc[k]), int(b.alloc_cover[k]) * 2] += 1
                change[int(b.free[k]), int(b.free_cover[k]) * 2 + 1] -= 1
            alive = np.cumsum([change[t] for t in sorted(change)])
            own = [i for i in reads if plan.program[i] == p]
            assert alive.max() <= max(prefetch + 1, max(len(reads[i]) for i in own))
            assert alive[-1] == 0


@pytest.mark.parametrize(
    "model, schedule, zero", [("tiny-llama", "1f1b", 0), ("gpt2", "1f1b", 1), ("tiny-moe", "v-half", 2)]
)
def test_gradients_made_anew_are_there_from_their_pass_to_the_step_s_end(model: str, schedule: str, zero: int) -> None:
    made = prepared(model, schedule, zero)
    plan, recipe = made.plan(), OptimizerPrecision(grads=DType.BF16)
    fresh = replace(recipe, fresh=True)
    lasting, anew = state(plan, recipe), state(plan, fresh)
    bytes_made = gradients_made(plan, fresh)
    assert bytes_made is not None and gradients_made(plan, recipe) is None
    assert [s.gradients for s in anew] == [0] * plan.programs and all(s.gradients for s in lasting)
    one, two = memory(plan, lasting), memory(plan, anew, made=bytes_made)
    # Of each program all gradients, once, up to whole bytes of a part: what backward has come to, no more.
    ends = two.level[plan.bounds[1:] - 2] - one.level[plan.bounds[1:] - 2]
    assert ends.tolist() == pytest.approx([s.gradients for s in lasting], rel=0.01)
    assert (two.level[plan.bounds[1:] - 1] == one.level[plan.bounds[1:] - 1]).all(), "given up behind the update"
    assert (two.level[plan.bounds[:-1]] == one.level[plan.bounds[:-1]]).all(), "none before the first pass has ended"
    assert (two.peak <= one.peak + 64).all()
    kinds = samples_by_kind(plan, two)
    assert sum(kinds.values()).max() == two.peak.max()
