"""What uneven counts cost: today's costs where counts are equal, hand-computed bytes where they are not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import work_seconds
from cost_models.hardware import load_hardware
from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.core.work import DType
from ir.job.routing import ExpertCounts
from ir.plan.plan import OpKind
from ir.workload import load_config
from ir.workload.part import PartLayout
from ir.workload.setting import AttentionKind, MicrobatchShape, ModelPrecision, PartSetting
from ir.workload.work import BUILDERS
from piper_sim.folding import RankClasses, classes
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.routing import ExpertRouting, price
from piper_sim.pricing.routing.grouped import work_seconds as uneven_seconds
from tests.piper_sim.pricing.routed import HW, job, made, routing

EACH = np.arange
BALANCED: list[dict[str, Any]] = [
    {},
    {"parallel": {"ep": 1}},
    {"parallel": {"ep": 8}, "cluster": {"gpus_per_node": 2}},
    {"parallel": {"ep": 8}, "cluster": {"gpus_per_node": 1}},
    {"parallel": {"tp": 2, "dp": 4, "ep": 4}},
    {"parallel": {"tp": 2, "dp": 4, "ep": 2, "etp": 2}},
    {"schedule": {"name": "dualpipe"}},
    {"parallel": {"order": "pp tp cp ep dp"}, "cluster": {"gpus_per_node": 4}},
    {"config": "mixtral-8x7b", "parallel": {"ep": 8}, "schedule": {"recompute": ["activation", "norm"]}},
    {
        "config": "deepseek-v3",
        "model": {"num_hidden_layers": 5},
        "parallel": {"dp": 64, "ep": 64},
        "precision": {"compute": "fp8", "dispatch": "fp8"},
        "schedule": {"recompute": "full"},
    },
]


@pytest.mark.parametrize("sections", BALANCED)
def test_equal_counts_cost_what_the_balanced_job_costs(sections: dict[str, Any]) -> None:
    prepared, plan = made(job(**sections))
    r = routing(prepared, plan)
    case, everywhere = EACH(1), EACH(len(r.ground.positions))
    seen = set()
    for n in plan.graph.nodes:
        if r.layer(n) >= 0:
            seen.add((n.kind, n.part.rpartition(".")[2]))
            kind = r.work_factor if n.message is None else r.exchange_factor
            assert kind(n, case, everywhere) == pytest.approx(1, rel=1e-9), n.text()
            assert n.message is not None or r.inline_factor(n, case, everywhere) == pytest.approx(1, rel=1e-12)
    assert {(k, "experts") for k in (Pass.F, Pass.I, Pass.W)} <= seen
    assert prepared.job.parallel.ep == 1 or {(Pass.F, "dispatch"), (Pass.I, "combine")} <= seen
    sizes = r.sizes(plan)(len(everywhere) - 1)
    assert (sizes.buffers == plan.buffers.bytes).all()
    assert (sizes.workspace == np.array([[n.workspace] for n in plan.graph.nodes])).all()
    assert len(set(r.colours().tolist())) == 1
    model, found = CostModel(prepared, HW), RankClasses.each(len(everywhere))
    costs = model.price(plan, found)
    again = price(r, plan, model, found)
    assert abs(again.duration - costs.duration).max() <= 2.0**-39


def kernels(config: str, precision: ModelPrecision, rows: int, groups: int, etp: int) -> Any:
    """A balanced experts part with `rows` rows on each of `groups` experts."""
    model = load_config(config)
    assert model.moe is not None
    model = replace(model, moe=replace(model.moe, experts=groups, top_k=1))
    shape = MicrobatchShape(1, rows * groups // etp)
    return BUILDERS["experts"](PartSetting(model, PartLayout(etp=etp), shape, precision, AttentionKind.FLASH))


@pytest.mark.parametrize("gpu", ["h800-sxm", "a100-sxm-80gb", "b200-sxm", "cpu"])
@pytest.mark.parametrize("config", ["deepseek-v3", "mixtral-8x7b", "tiny-moe"])
def test_equal_groups_take_what_the_cost_model_says(gpu: str, config: str) -> None:
    hw = load_hardware(gpu)
    fp8 = [ModelPrecision(DType.FP8, dispatch=DType.FP8)] if "fp8" in hw.peak_TFLOPs else []
    for precision in (ModelPrecision.of(DType.FP32), *fp8):
        once, twice = (kernels(config, precision, n, 1, 1) for n in (128, 256))
        for rows, groups in ((1, 1), (37, 3), (128, 4), (300, 8), (4097, 2)):
            whole = kernels(config, precision, rows, groups, 1)
            for name in ("forward", "input_grad", "weight_grad"):
                found = uneven_seconds(getattr(once, name), getattr(twice, name), 128, np.full((1, groups), rows), hw)
                assert found[0] == pytest.approx(work_seconds(getattr(whole, name), hw), rel=1e-12), (name, rows)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(0, 5))
def test_experts_without_tokens_cost_nothing_and_order_does_not_matter(rows: list[int], more: int) -> None:
    precision = ModelPrecision(DType.FP8, dispatch=DType.FP8)
    once, twice = (kernels("deepseek-v3", precision, n, 1, 1) for n in (128, 256))
    for name in ("forward", "input_grad", "weight_grad"):

        def seconds(groups: list[int], name: str = name) -> float:
            found = uneven_seconds(getattr(once, name), getattr(twice, name), 128, np.array([groups]), HW)
            return float(found[0])

        assert seconds([*rows, *[0] * more]) == pytest.approx(seconds(rows), rel=1e-12)
        assert seconds(sorted(rows)) == pytest.approx(seconds(rows), rel=1e-12)
        assert (seconds(rows) == 0) == (sum(rows) == 0)
        grown = [r + 128 for r in rows]
        assert seconds(grown) >= seconds(rows) * (1 - 1e-12)


def test_uneven_groups_of_one_kernel_by_hand() -> None:
    """Three experts with 100, 0 and 300 rows in 16 x 16 tiles: each for itself, the weights of two."""
    hw, fp32 = load_hardware("cpu"), ModelPrecision.of(DType.FP32)
    once, twice = (kernels("tiny-moe", fp32, n, 1, 1) for n in (128, 256))
    rate = hw.peak_flops(DType.FP32) * hw.gemm.efficiency["fp32"]
    ramp, (up, up2) = hw.gemm.ramp_bytes / 4, (w.forward[1] for w in (once, twice))
    assert hw.gemm.tiles == ((16, 16, 1.0),) and up.shape == (1, 128, 64, 64)  # gate and up of width 32, hidden 64

    def waves(tiles: int, k: int, split: int) -> float:
        return -(-tiles * split // hw.sms) * (-(-k // split) + ramp * (1 if split == 1 else 2))

    def seconds(flops: float, moved: int) -> float:
        memory = (moved + hw.memory_ramp_KiB * 1024) / (hw.hbm_bytes_per_s * hw.memory_efficiency)
        hidden = hw.gemm.unhidden_memory["fp32"] * min(flops / rate, memory)
        return max(flops / rate, memory) + hidden + hw.kernel_launch_us * 1e-6

    rows, best = np.array([[100, 0, 300]]), min(waves((7 + 19) * 4, 64, s) for s in (1, 2, 4, 8))
    wanted = seconds(2 * best * 256 * hw.sms, 4 * (2 * 64 * 64 + 400 * (64 + 64)))
    assert uneven_seconds((up,), (up2,), 128, rows, hw)[0] == pytest.approx(wanted)
    # The weight gradient sums over rows: 16 tiles for each of two experts, of 200 steps in the mean.
    pairs = zip(once.weight_grad, twice.weight_grad, strict=True)
    w, w2 = next((a, b) for a, b in pairs if a.label.startswith(up.label))
    steps = [(200 / s + ramp * (1 if s == 1 else 2), s) for s in (1, 2, 4)]  # 100 and 300 divide by 4
    least = min(max(-(-32 * s // hw.sms) * mean, 300 / s + mean - 200 / s) for mean, s in steps)
    eight = max(-(-32 * 8 // hw.sms) * (25.5 + 2 * ramp), 38 + 2 * ramp)  # 13 and 38
    wanted = seconds(2 * min(least, eight) * 256 * hw.sms, 400 * (64 + 64) * 4 + 2 * 64 * 64 * 2 * 4)
    assert uneven_seconds((w,), (w2,), 128, rows, hw)[0] == pytest.approx(wanted)


def uneven(prepared: Any, plan: Any, change: Callable[[IntArray], IntArray]) -> ExpertRouting:
    """Balanced counts, layer 1's microbatch 2 changed: [source, expert] -> [source, expert]."""
    even = routing(prepared, plan).counts
    same = np.stack([np.stack([even.tokens(x)] * plan.graph.mbs) for x in even.layers])
    same[1, 2] = change(same[1, 2])
    at = np.arange(same[..., 0].size).reshape(same.shape[:3])
    return routing(prepared, plan, ExpertCounts(even.layers, same.reshape(-1, same.shape[3]), at))


def swapped(tokens: IntArray) -> IntArray:
    """All sources of the first group give expert 7's tokens to expert 0."""
    out = tokens.copy()
    out[:4, 0] += out[:4, 7]
    out[:4, 7] = 0
    return out


def test_only_the_changed_layer_microbatch_and_positions_change() -> None:
    prepared, plan = made(job())
    r = uneven(prepared, plan, swapped)
    rest = np.delete(r.received.reshape(16, 8), 1 * 4 + 2, axis=0)
    assert (rest == 1024).all()
    assert r.received[1, 2].tolist() == [1536, 1024, 1024, 512, 1024, 1024, 1024, 1024]
    assert r.colours().tolist() == [0, 1, 1, 2, 3, 3, 3, 3]
    model = CostModel(prepared, HW)
    found = classes(plan, model.ground, r.colours()[None])
    costs = model.price(plan, found)
    new = price(r, plan, model, found)
    change = (new.duration - costs.duration).reshape(found.count, -1)
    compute = plan.kind == OpKind.COMPUTE
    assert (new.shares.sum(axis=1)[np.tile(compute, found.count)] == new.duration[np.tile(compute, found.count)]).all()
    scaled = new.duration * 2.0**40
    assert (scaled == np.round(scaled)).all() and (new.duration >= 0).all()
    for i in np.flatnonzero(change.any(axis=0)).tolist():
        covers = [plan.graph.nodes[n] for n, _ in plan.shapes[plan.shape[i]].covers]
        assert plan.mb[i] == 2 and any(n.part.startswith("l1.") for n in covers), plan.text(i)
    of = found.of
    assert not change[of[4]].any()
    layer = [i for i in range(len(plan)) if plan.mb[i] == 2 and "l1." in plan.text(i) and not compute[i]]
    counts = [i for i in layer if plan.text(i).endswith("counts")]  # as many, however tokens are routed
    assert counts and not change[:, counts].any()
    layer = [i for i in layer if i not in counts]
    assert layer and all(len({float(change[of[p], i]) for p in range(4)}) == 1 for i in layer)
    assert all(change[of[0], i] > 0 for i in layer)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zbv"])
def test_bytes_follow_the_rows(name: str) -> None:
    prepared, plan = made(job(schedule={"name": name}))
    r = uneven(prepared, plan, swapped)
    b, nodes = plan.buffers, plan.graph.nodes
    for position, rows in ((0, 1536), (1, 1024), (3, 512), (5, 1024)):
        sizes = r.sizes(plan)(position)
        for i in np.flatnonzero(sizes.buffers != b.bytes).tolist():
            n = nodes[b.node[i]]
            assert b.mb[i] == 2 and n.part in ("l1.experts", "l1.dispatch", "l1.combine")
            assert sizes.buffers[i] * 1024 == b.bytes[i] * rows
        changed = np.argwhere(sizes.workspace != np.array([[n.workspace] for n in nodes]))
        assert all(nodes[n].part == "l1.experts" and mb == 2 for n, mb in changed.tolist())
        touched = {
            (str(nodes[b.node[i]].kind), nodes[b.node[i]].part) for i in np.flatnonzero(sizes.buffers != b.bytes)
        }
        wanted = {("F", "l1.experts"), ("I", "l1.experts"), ("F", "l1.dispatch"), ("I", "l1.combine")}
        assert touched == (wanted if rows != 1024 else set())


def test_a_device_without_rows_computes_nothing() -> None:
    prepared, plan = made(job("mixtral-8x7b", parallel={"ep": 8}))

    def away(tokens: IntArray) -> IntArray:
        out = tokens.copy()
        out[:, 1] += out[:, 0]
        out[:, 0] = 0
        return out

    r = uneven(prepared, plan, away)
    experts = [n for n in plan.graph.nodes if n.part == "l1.experts"]
    for n in experts:
        assert r.work_factor(n, np.array([2, 1]), np.array([0, 2])).tolist() == [[0, 1], [1, 1]]
    sizes = r.sizes(plan)(0)
    b = plan.buffers
    act = [i for i in range(len(b)) if b.mb[i] == 2 and plan.graph.nodes[b.node[i]].part == "l1.experts"]
    assert act and (sizes.buffers[act] == 0).all()


def test_a_slow_rank_is_slow_with_its_real_rows() -> None:
    speed = {"0": 0.5}
    prepared, plan = made(job(cluster={"speed": speed}))
    r = uneven(prepared, plan, swapped)
    model, found = CostModel(prepared, HW), RankClasses.each(8)
    costs = model.price(plan, found)
    new = price(r, plan, model, found)
    fast_job, fast_plan = made(job())
    fast = CostModel(fast_job, HW)
    base = fast.price(fast_plan, found)
    quick = price(r, fast_plan, fast, found)
    for slow, alone in ((costs, base), (new, quick)):
        there, here = (x.duration.reshape(8, -1)[0] for x in (slow, alone))
        mine = (plan.kind == OpKind.COMPUTE) & (plan.program == 0)
        assert there[mine] == pytest.approx(2 * here[mine], abs=2.0**-38)


def test_tensor_sharded_experts_work_on_the_rows_of_all_that_share_them() -> None:
    prepared, plan = made(job(parallel={"tp": 2, "dp": 4, "ep": 2, "etp": 2}))
    r = uneven(prepared, plan, swapped)
    d = r.divisions[0]
    assert d.layout.etp == 2 and r.layers[0].tokens == 256
    peers = r.ground.positions.members(("etp",))
    assert (d.worked[:, :, peers] == r.received[:, :, peers].sum(axis=3, keepdims=True)).all()
    node = next(n for n in plan.graph.nodes if n.part == "l1.experts" and n.kind is Pass.F)
    assert node.inline
    factor = r.inline_factor(node, np.array([2]), EACH(8))[:, 0]
    assert factor == pytest.approx(d.worked[1, 2] / 1024) and factor.max() > 1


def test_the_same_job_gives_the_same_costs_twice() -> None:
    prepared, plan = made(job("qwen3-30b-a3b", model={"num_hidden_layers": 4}, parallel={"ep": 8}))
    model = CostModel(prepared, HW)

    def once() -> str:
        r = routing(prepared, plan, kind="zipf", strength=0.7, seed=3)
        found = classes(plan, model.ground, r.colours()[None])
        return price(r, plan, model, found).digest

    assert once() == once()
