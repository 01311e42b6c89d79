"""A plan from the cache is the plan that would be built: what decides a plan is in its key, and nothing else is."""

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from threading import Thread
from typing import Any

import numpy as np
import pytest

import ir.job.build
import ir.job.cache
from ir.core.errors import PiperError
from ir.core.order import Order
from ir.graph.graph import illegal
from ir.job.build import PreparedJob
from ir.job.cache import PlanCache, PlanStructure
from ir.job.load import job_from
from ir.plan.plan import Plan
from ir.plan.text import plan_text
from ir.schedules.registry import build
from ir.schedules.schedule import OpTimes
from ir.schedules.search import searched
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from tests.refusals import refusal

Edit = dict[str, object]

PLAIN = {
    "model": {"config": "tiny-moe", "seq_len": 128},
    "cluster": {"gpu": "h100-sxm", "gpus_per_node": 8},
    "parallel": {"pp": 2, "dp": 2, "ep": 2, "layers": "even"},
    "schedule": {"name": "1f1b", "microbatches": 3},
}
JOBS: list[Edit] = [
    {},
    {"schedule.name": "dualpipe", "parallel.zero": 3, "schedule.microbatches": 4},
    {"schedule.name": "zb2p", "parallel.layers": "balanced", "parallel.zero": 2},
    {"schedule.name": "gpipe", "schedule.microbatches": 1, "parallel.pp": 1, "schedule.recompute": "full"},
]
# What a job may say that no plan depends on, however it is run and whatever it costs.
COSTS: list[Edit] = [
    {"costs.stage_times": {"F": 1e-3, "B": 2e-3}},
    {"costs.interference": "none"},
    {"costs.host_model": "inline"},
    {"cluster.speed": {"1": 0.5}},
    {"cluster.nic_Gbps": 7.0},
    {"cluster.gpu": "a100-sxm-80gb"},
    {"cluster.gpus_per_node": 4},
    {"cluster.memory_margin_GiB": 9.0},
    {"optimizer.lr": 0.5},
    {"optimizer.name": "sgd"},
    {"optimizer.clip_norm": 3.0},
    {"model.seed": 4},
    {"data.seed": 4},
    {"gate.memory": 0.5},
]
OTHERS: list[Edit] = [
    {"model.seq_len": 256},
    {"model.attention": "unfused"},
    {"model.tie_word_embeddings": True},
    {"model.num_hidden_layers": 6},
    {"model.num_experts_per_tok": 1},
    {"parallel.dp": 4},
    {"parallel.dp": 8, "parallel.ep": 4},
    {"parallel.ep": 1},
    {"parallel.ep": 1, "parallel.etp": 2},
    {"parallel.cp": 2},
    {"parallel.tp": 2},
    {"parallel.order": "pp tp cp ep dp"},
    *({"parallel.zero": z} for z in range(4)),
    {"parallel.prefetch": 2},
    {"parallel.prefetch": 0},
    {"parallel.bucket_MiB": 0.01},
    {"parallel.layers": "balanced"},
    {"parallel.layers": [1, 3], "parallel.pp": 2},
    {"schedule.microbatches": 5},
    {"schedule.microbatch_size": 2},
    {"schedule.recompute": "selective"},
    {"schedule.recompute": ["mlp"]},
    {"schedule.recompute": "none"},
    {"schedule.recompute": "full", "schedule.recompute_layers": 1},
    {"schedule.recompute": "full", "schedule.recompute_layers": [0]},
    *({"schedule.name": n} for n in ("1f1b", "gpipe", "zb1p", "zb2p", "interleaved-1f1b", "zbv", "dualpipev", "v-min")),
    {"optimizer.clip_norm": 0.0},
    {"optimizer.name": "muon", "parallel.zero": 1},
    {"optimizer.name": "muon", "optimizer.ns_steps": 3, "parallel.zero": 1},
    {"precision.compute": "fp32"},
    {"precision.dispatch": "fp8"},
    {"precision.reduce": "bf16"},
    {"precision.optimizer": "bf16"},
]


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    """A cache of its own for every test."""
    made = PlanCache()
    monkeypatch.setattr(ir.job.build, "PLANS", made)
    return made


def prepared(*edits: Edit) -> PreparedJob:
    table: dict[str, dict[str, Any]] = {k: dict(v) for k, v in PLAIN.items()}
    for edit in edits:
        for key, value in edit.items():
            section, name = key.split(".")
            table.setdefault(section, {})[name] = value
    job = job_from(table)
    return prepare_priced(job, hardware_of(job))


def facts(plan: Plan) -> tuple[object, ...]:
    """All that a plan holds, as values: text, columns, buffers' bytes, and the graph with its work and messages."""
    g, b = plan.graph, plan.buffers
    columns = [plan.program, plan.shape, plan.mb, plan.mb2, plan.waits.at, plan.waits.items, plan.partner]
    columns += [plan.collective, plan.unit, *(getattr(b, f.name) for f in fields(b))]
    rest = tuple(getattr(g, f.name) for f in fields(g))
    return plan_text(plan), tuple(c.tobytes() for c in columns), dict(plan.header), plan.shapes, rest


def wrong(base: Edit, edits: list[Edit], cache: PlanCache) -> Iterator[str]:
    """Edits after which the cache serves another plan than the one built afresh, or misses though the two are equal."""
    job = prepared(base)
    first, key = job.lowered(), job.structure
    known = facts(first)
    for edit in edits:
        cache.clear()
        cache.plan(key, lambda: first)
        try:
            job = prepared(base, edit)
        except PiperError:  # a schedule or size that does not go with this job
            continue
        given, fresh = job.plan(), facts(job.lowered())
        if (known if given is first else facts(given)) != fresh:
            yield f"{edit}: served the plan of {base}"
        elif (given is first) != (known == fresh):
            yield f"{edit}: built again"


@pytest.mark.parametrize("base", JOBS, ids=str)
def test_what_is_served_is_what_would_be_built_and_nothing_is_built_twice(base: Edit, empty: PlanCache) -> None:
    assert not list(wrong(base, COSTS + OTHERS, empty))


@pytest.mark.parametrize("field", [f.name for f in fields(PlanStructure)])
def test_a_key_left_out_would_be_noticed(field: str, empty: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PreparedJob.structure.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(PreparedJob, "structure", property(lambda p: replace(whole(p), **{field: None})))
    assert any("served" in w for base in reversed(JOBS) for w in wrong(base, OTHERS, empty))


def test_a_key_too_many_would_be_noticed(empty: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PreparedJob.structure.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        PreparedJob, "structure", property(lambda p: replace(whole(p), schedule=str(p.job.cluster.speed)))
    )
    assert any("built again" in w for w in wrong({}, COSTS, empty))


@pytest.mark.parametrize("edit", COSTS, ids=str)
def test_other_costs_get_the_same_plan(edit: Edit) -> None:
    assert prepared(edit).plan() is prepared().plan()


def test_a_table_by_any_name_is_known_by_what_it_says() -> None:
    """Two op times of which the search makes the same order share a plan; the key holds orders, not times."""
    a, b = (prepared({"schedule.name": "zb2p"}, {"cluster.speed": {"0": s}}) for s in (1.0, 0.5))
    assert a.plan() is b.plan()


# --- checked once ---------------------------------------------------------------------------------------------------


def test_a_plan_is_checked_once_under_each_set_of_rules(empty: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(ir.job.cache, "check_plan", lambda plan, serial, inline: seen.append((serial, inline)))
    for _ in range(2):
        plan = prepared().plan()
        empty.check(plan)
        empty.check(plan, inline=True)
    assert seen == [(False, False), (False, True)]
    empty.check(prepared({"parallel.zero": 3}).plan())
    assert len(seen) == 3


def test_a_plan_that_fails_is_forgotten(empty: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Plan, serial: bool, inline: bool) -> None:
        raise illegal("no")

    first, kept = prepared().plan(), prepared({"parallel.zero": 3}).plan()
    monkeypatch.setattr(ir.job.cache, "check_plan", refuse)
    for _ in range(2):  # it fails again, though it was looked at before
        refusal(empty.check, first, match="no")
    assert prepared().plan() is not first
    assert prepared({"parallel.zero": 3}).plan() is kept


# --- bounded --------------------------------------------------------------------------------------------------------


def test_the_plans_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [prepared({"schedule.microbatches": m}) for m in (3, 4, 5)]
    sizes = [len(j.lowered()) for j in jobs]
    small = PlanCache(most=sum(sizes) - 1)
    monkeypatch.setattr(ir.job.build, "PLANS", small)
    a, b, _ = jobs[0].plan(), jobs[1].plan(), jobs[0].plan()  # a was used last
    c = jobs[2].plan()
    assert [j.plan() is p for j, p in zip((jobs[0], jobs[2]), (a, c), strict=True)] == [True, True]
    assert jobs[1].plan() is not b


def test_a_plan_larger_than_the_cache_pushes_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = prepared(), prepared({"schedule.microbatches": 5})
    monkeypatch.setattr(ir.job.build, "PLANS", PlanCache(most=len(large.lowered()) - 1))
    kept = small.plan()
    assert large.plan() is not large.plan()
    assert small.plan() is kept


def test_threads_that_predict_side_by_side_do_not_meet_in_the_cache() -> None:
    """What is kept was counted while another thread put a plan there: now and then a RuntimeError, or a KeyError."""
    ask_for: Any = PlanCache(most=60).plan
    failed = list[Exception]()

    class Sized:
        """Of ten ops, and slow to say so: Python's own threads take turns in it."""

        def __len__(self) -> int:
            return sum(1 for _ in range(10))

    def ask(seed: int) -> None:
        keys = np.random.default_rng(seed).integers(12, size=2000).tolist()
        try:
            for key in keys:
                ask_for(key, Sized)
        except Exception as e:
            failed.append(e)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=ask, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


# --- searched tables ------------------------------------------------------------------------------------------------


def test_a_table_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[OpTimes] = []
    search = searched.ORDERS["zb2p"]

    def spy(ranks: int, mbs: int, times: OpTimes) -> tuple[Order, ...]:
        asked.append(times)
        return search(ranks, mbs, times)

    monkeypatch.setitem(searched.ORDERS, "zb2p", spy)
    one, two = OpTimes(1.0, 1.25, 0.75, 0.0625), OpTimes(1.0, 1.25, 0.75, 0.125)
    first = build("zb2p", 3, 5, None, one)
    assert build("ZB-H2", 3, 5, 1, one).orders is first.orders
    assert asked == [one]
    assert build("zb2p", 3, 5, None, two).orders is not first.orders
    assert build("zb2p", 3, 6, None, one).orders is not first.orders
    assert asked == [one, two, one]


def test_orders_are_values() -> None:
    a, b = (Order.of(["0F0", "(0F1;3B0)OVERLAP_F_B"]) for _ in range(2))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    for column in ("stage", "token", "mb", "unit"):
        other = replace(a, **{column: getattr(a, column) + np.array([0, 0, 1])})
        assert other != a
    assert a != Order.of(["0F0", "0F1"]) and a != "0F0"
