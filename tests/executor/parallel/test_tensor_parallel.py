"""Tensor and context parallel ranks, alone and under pipelines, replicas and ZeRO: the numbers of one process."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from executor.launch import run as cli
from executor.launch.watch.verdict import RankFailed
from executor.measure.peak_bytes import peak_bytes
from ir.core.errors import PiperError
from ir.graph import sync
from ir.job.build import directives_json
from ir.job.cache import PLANS
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, Plan
from ir.verify import held
from ir.workload.part import Param, PartLayout
from piper_sim.memory.timeline import state
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of
from tests.executor import faults
from tests.executor.launch.test_run_faults import _inject
from tests.executor.measure.peak_runs import measured, planned
from tests.executor.parallel import inline_faults
from tests.executor.parallel.divided_cases import Case, covering, handful
from tests.executor.runs import Ran, alone, distance, error, far, judged, merged, run
from tests.executor.runtime.test_run_families import sets as family_sets

ROUNDING, VISIBLE = 1e-10, 1e-3
STEPS, FEW = 20, 2
TP, CP = ("parallel.pp=1", "parallel.tp=2"), ("parallel.pp=1", "parallel.cp=2")
WHOLE = (*TP, "parallel.sequence_parallel=false")
HEADS = (*CP, "parallel.cp_comm=all_to_all")


@pytest.mark.parametrize("case", handful(), ids=lambda c: c.name)
def test_divided_parts_train_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=FEW) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("case", dict.fromkeys([*handful(), *covering()]), ids=lambda c: c.name)
def test_every_two_choices_of_divided_parts_train_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=STEPS) <= ROUNDING


# -- messages inside compute ops --------------------------------------------------------------------------------------

Messages = Counter[tuple[str, str, int, str, str, int]]  # pass, unit, microbatch, kind, axis, bytes → how often


def _planned(plan: Plan, rank: int) -> Messages:
    out, program = Messages(), RankPlacement.of(plan).program(rank)
    for i in range(int(plan.bounds[program]), int(plan.bounds[program + 1])):
        for n, member in plan.shapes[int(plan.shape[i])].covers if plan.kind[i] == OpKind.COMPUTE else ():
            node, mb = plan.graph.nodes[n], int((plan.mb, plan.mb2)[member][i])
            out.update((str(node.kind), node.part, mb, str(m.kind), *m.axes, m.bytes) for m in node.inline)
    return out


def _moved(monkeypatch: pytest.MonkeyPatch, *sets: str) -> tuple[Plan, list[Messages], Ran]:
    """One step's messages, rank by rank; and all the run gave."""
    with tempfile.TemporaryDirectory() as name:
        _inject(monkeypatch, inline_faults.noted, {"folder": name})
        ran, out = run(*sets, "schedule.microbatches=2", steps=2), []
        for rank in range(ran.object["ranks"]):
            rows = Counter(tuple(r) for r in json.loads((Path(name) / f"inline-{rank}.json").read_text()))
            assert all(count % 2 == 0 for count in rows.values())  # both steps send the same
            out.append(Messages({row: count // 2 for row, count in rows.items()}))
    return ran.plan, out, ran


@pytest.mark.parametrize(
    "sets",
    [
        family_sets("qwen3", *TP),
        family_sets("gpt2", *WHOLE),
        family_sets("deepseek_v3", *TP, "parallel.cp=2", "schedule.recompute=full"),
        family_sets("mixtral", "parallel.tp=2", "schedule.name=zbv", "schedule.recompute=full"),
        family_sets("qwen3", *HEADS, "model.num_key_value_heads=2"),
    ],
    ids=["heads", "heads, whole tokens", "latent and MTP, context", "experts", "context by heads"],
)
def test_a_compute_op_sends_what_the_plan_says(sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, found, _ = _moved(monkeypatch, *sets)
    for rank, messages in enumerate(found):
        assert messages == _planned(plan, rank)
    kinds = {(pass_, kind, axis) for pass_, _, _, kind, axis, _ in found[0]}
    if "parallel.sequence_parallel=false" in sets:
        assert kinds == {("F", "all_reduce", "tp"), ("I", "all_reduce", "tp")}
    elif "parallel.cp_comm=all_to_all" in sets:
        assert kinds == {("F", "all_to_all", "cp"), ("I", "all_to_all", "cp")}
    else:
        assert {("F", "reduce_scatter", "tp"), ("W", "all_gather", "tp")} <= kinds


COMPILED = [
    (*TP, "parallel.cp=2", "model.num_hidden_layers=1"),
    pytest.param(family_sets("gpt2", *WHOLE, "parallel.zero=3", "parallel.dp=2"), marks=pytest.mark.slow),
    pytest.param(family_sets("deepseek_v3", *TP, "parallel.cp=2", "schedule.recompute=full"), marks=pytest.mark.slow),
    pytest.param(family_sets("mixtral", "parallel.tp=2", "schedule.name=zbv"), marks=pytest.mark.slow),
    pytest.param(family_sets("qwen3", *HEADS, "model.num_key_value_heads=2"), marks=pytest.mark.slow),
    pytest.param(family_sets("qwen3", "parallel.cp=2", "schedule.name=zb1p"), marks=pytest.mark.slow),
]
COMPILED_NAMES = ["tp cp", "whole tokens, ZeRO-3", "latent and MTP", "experts", "context by heads", "context, zb1p"]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("sets", COMPILED, ids=COMPILED_NAMES)
def test_compiled_code_sends_what_the_plan_says_and_trains_as_one_process_does(
    sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, found, ran = _moved(monkeypatch, *sets, "run.compile=true")
    for rank, messages in enumerate(found):
        assert messages == _planned(plan, rank)
    assert sum(found[0].values()) and all(ran.object["compiled"]["units"].values())
    assert error(ran, alone(*sets, "schedule.microbatches=2")) <= ROUNDING


def test_experts_that_are_cut_send_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ("parallel.pp=1", "parallel.dp=4", "parallel.ep=2", "parallel.etp=2", "schedule.recompute=full")
    sets = family_sets("mixtral", *sets, "routing.forced=true", "routing.kind=balanced")
    plan, found, _ = _moved(monkeypatch, *sets)
    hidden = planned(*sets)[0].config.hidden
    # Beside rows on their way to experts, and their gradients' way back, goes one number of each: its weight.
    weighed = {("F", "all_gather"), ("R", "all_gather"), ("I", "reduce_scatter")}
    for rank, messages in enumerate(found):
        rows = _planned(plan, rank)
        weights = {(*row[:5], row[5] // hidden): n for row, n in rows.items() if (row[0], row[3]) in weighed}
        assert rows and messages == rows + Messages(weights)
    kinds = {(pass_, kind) for pass_, _, _, kind, _, _ in found[0]}
    assert kinds == set(product("FRI", ("all_gather", "reduce_scatter")))


# -- memory and formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sets",
    [
        ("parallel.pp=1", "parallel.tp=2", "parallel.cp=2", "schedule.recompute=full"),
        pytest.param(family_sets("deepseek_v3", *TP), marks=pytest.mark.slow),
        pytest.param(("parallel.tp=2", "parallel.cp=2", "schedule.name=zbv"), marks=pytest.mark.slow),
        pytest.param(family_sets("gpt2", *WHOLE, "parallel.dp=2", "model.n_positions=160"), marks=pytest.mark.slow),
        pytest.param(family_sets("mistral", *CP, "parallel.zero=3"), marks=pytest.mark.slow),
        pytest.param(family_sets("mixtral", *TP, "parallel.zero=1", "schedule.recompute=mlp"), marks=pytest.mark.slow),
        family_sets("mistral", *HEADS, "model.attention=unfused", "schedule.recompute=selective"),
        pytest.param(family_sets("deepseek_v3", *HEADS, "schedule.recompute=full"), marks=pytest.mark.slow),
    ],
    ids=["tp cp full", "latent", "tp cp pp", "whole tokens", "window", "experts", "scores of heads", "latent heads"],
)
def test_peak_memory_is_what_was_predicted_to_the_byte(sets: tuple[str, ...]) -> None:
    assert peak_bytes(*planned(*sets)) == measured(*sets)


@pytest.mark.parametrize(
    ("formats", "limit"),
    [
        pytest.param(("precision.compute=fp32",), 1e-4, marks=pytest.mark.slow),
        (("precision.compute=bf16", "precision.params=fp32"), 3e-2),
        (("precision.compute=bf16", "precision.residual=fp32"), 3e-2),
    ],
    ids=["fp32", "bf16 over fp32", "bf16 beside a stream in fp32"],
)
def test_narrower_formats_are_as_near_as_they_can_be(formats: tuple[str, ...], limit: float) -> None:
    sets = (*formats, *TP, "parallel.cp=2", "optimizer.name=sgd", "optimizer.lr=0.1", "schedule.microbatches=2")
    assert error(run(*sets), alone(*sets)) <= limit


def test_threads_train_as_processes_do() -> None:
    sets = (*TP, "parallel.cp=2", "schedule.microbatches=2")
    apart, together = run(*sets), run(*sets, backend="local")
    assert apart.object["losses"] == together.object["losses"]
    assert distance(merged(together.params), merged(apart.params)) <= ROUNDING


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "shards"),
    [
        (WHOLE, (1, 1)),
        pytest.param(TP, (1, 1), marks=pytest.mark.slow),
        ((*TP, "parallel.cp=2", "parallel.zero=3"), (2, 4)),
        pytest.param(
            ("parallel.tp=2", "parallel.dp=2", "parallel.zero=1", "parallel.pp=1"), (1, 1), marks=pytest.mark.slow
        ),
    ],
    ids=["whole tokens", "tp", "tp cp zero3", "tp dp zero1"],
)
def test_a_rank_holds_its_share_of_every_parameter(
    sets: tuple[str, ...], shards: tuple[int, int], tmp_path: Path
) -> None:
    """shards: over how many ranks ZeRO cuts what tp has cut, and what it has not."""
    held = run(*sets, "schedule.microbatches=2", steps=1).object["memory"]["persistent_bytes"]
    prepared, plan = judged(tmp_path, *sets)
    promised = state(plan, CostModel(prepared, hardware_of(prepared.job)).recipe)
    params = {p.name: p for e in plan.graph.entries for p in e.part.params}.values()
    cut, whole = (sum(p.numel for p in params if ("tp" in p.sharded) is is_cut) for is_cut in (True, False))
    wanted = 8 * (cut / 2 / shards[0] + whole / shards[1])
    for mine in held.values():
        assert 0 <= mine["parameters"] - wanted < 64 * len(plan.graph.entries)  # padding to 64 bytes, to equal shares
        for kind in ("parameters", "gradients", "optimizer"):
            assert 0 <= mine[kind] - getattr(promised[0], kind) < 3 * 64 * len(plan.graph.entries)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "key", "fix"),
    [
        (("parallel.tp=4",), "parallel.tp", "tp = 2"),  # two KV heads
        (("parallel.tp=2", "model.vocab_size=255"), "parallel.tp", "tp = 1, or pad it: vocab_size = 256"),
        (("parallel.cp=4", "model.seq_len=12"), "parallel.cp", "cp = 3"),
        (("parallel.cp=4", "parallel.cp_comm=all_to_all"), "parallel.cp_comm", 'parallel.cp_comm "all_gather"'),
        (("parallel.cp=3", "parallel.cp_comm=all_to_all", "model.seq_len=12"), "parallel.cp", "cp = 2"),
        (("parallel.cp_comm=all_to_al",), "parallel.cp_comm", 'parallel.cp_comm = "all_to_all"'),
        (("parallel.tp=2", "model.seq_len=7"), "parallel.tp", "tp = 1"),
    ],
    ids=lambda x: x[-1] if isinstance(x, tuple) else None,
)
def test_what_cannot_be_divided_is_refused_with_a_fix(sets: tuple[str, ...], key: str, fix: str) -> None:
    with pytest.raises(PiperError) as info:
        run("parallel.pp=1", "model.num_key_value_heads=2", *sets)
    assert (info.value.key, info.value.suggestion) == (key, fix)


def test_parts_divided_one_by_one_are_refused(tmp_path: Path) -> None:
    strategy = directives_json(judged(tmp_path, *TP)[0].strategy)
    next(d for d in strategy if d["op"] == "shard")["filter"] = {"L": 1}
    (tmp_path / "strategy.json").write_text(json.dumps(strategy))
    with pytest.raises(PiperError, match="divided over 1·1, 2·1 ranks of tp·cp = 2·1"):
        run(*TP, f"schedule.directives={tmp_path / 'strategy.json'}")


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("kill", marks=pytest.mark.slow), "stop"])
def test_a_rank_lost_inside_an_op_is_named(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, plan = judged(tmp_path, *TP)
    index = next(i for i in range(len(plan)) if plan.text(i).startswith("0F1"))
    _inject(monkeypatch, faults.at_op, {"rank": 1, "index": index, "kind": kind})
    with pytest.raises(RankFailed) as info:
        run(*TP, steps=3, watchdog_s=2.0)
    assert (info.value.rank, info.value.op, info.value.waiting) == (1, plan.text(index), {0: plan.text(index)})


# -- controls ---------------------------------------------------------------------------------------------------------


def _copies_differ(*sets: str) -> float:
    """How far from one process; infinitely, if ranks differ from one another."""
    try:
        return far(*sets, steps=2)
    except AssertionError as differ:
        assert "copies of" in str(differ)
        return math.inf


@pytest.mark.parametrize(
    ("fault", "sets"),
    [
        (inline_faults.unsummed, WHOLE),
        (inline_faults.in_a_row, CP),
        (inline_faults.heads_of_others, HEADS),
        (inline_faults.own_keys, (*CP, "optimizer.name=sgd", "optimizer.lr=0.1")),
    ],
    ids=["leave", "positions", "order of heads", "keys"],
)
def test_a_wrong_message_inside_an_op_is_seen(
    fault: Callable[..., Any], sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "RANK", fault)
    assert _copies_differ(*sets) > VISIBLE


@pytest.mark.parametrize(
    ("fault", "rule", "sets"),
    [
        (inline_faults.all_summed, inline_faults.summed_over_all, (*WHOLE, "optimizer.clip_norm=0")),
        (inline_faults.unlike_heads, inline_faults.heads_forgotten, family_sets("qwen3", *WHOLE)),
    ],
    ids=["whole gradients summed", "norms of heads not summed"],
)
def test_a_wrong_owner_of_a_gradient_is_seen(
    fault: Callable[..., Any],
    rule: Callable[[Param, PartLayout], tuple[str, ...]],
    sets: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync, "summed_over", rule)
    monkeypatch.setattr(cli, "RANK", fault)
    PLANS.clear()
    try:
        with pytest.raises(PiperError, match="is summed over"):  # the plan alone tells
            _copies_differ(*sets)
        monkeypatch.setattr(held, "_parts", lambda param, entry: frozenset(rule(param, entry.layout)))
        PLANS.clear()
        assert _copies_differ(*sets) > VISIBLE  # and so do the numbers, where the rule errs with the lowering
    finally:
        PLANS.clear()
