"""Experts spread over ranks: the numbers of one process, the bytes and messages promised, and what must go red."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.launch import run as cli
from executor.launch.watch.verdict import RankFailed
from executor.modules.decoder import DecoderModel
from ir.core.work import MessageKind
from ir.job.build import PreparedJob
from ir.job.routing.forced import ForcedExperts
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan
from ir.workload import load_config
from ir.workload.work import ConfigModelWork
from tests.executor.faults import at_op
from tests.executor.launch.test_run_faults import _inject
from tests.executor.parallel import expert_faults as faults
from tests.executor.parallel.expert_cases import ONE, ROUNDING, STEPS, Case, covering, drawn
from tests.executor.runs import alone, error, far, judged, merged, run
from tests.executor.runtime.test_run_families import sets as family_sets

VISIBLE, FEW = 1e-3, 2
TP = ("parallel.tp=2", "parallel.sequence_parallel=true")
FOUR = (*ONE, "parallel.dp=4", "schedule.microbatches=2")  # two ranks hold the same experts
PIPED = (*ONE, "parallel.pp=2", "model.num_hidden_layers=4")
DUAL = (*PIPED, "schedule.name=dualpipe", "parallel.zero=1")


@pytest.mark.parametrize("case", covering(), ids=lambda c: c.name)
def test_every_two_choices_train_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=FEW) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn(), ids=lambda c: c.name)
def test_every_crossing_trains_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=STEPS) <= ROUNDING


FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2 limited", "deepseek_v3")


def _family(name: str) -> tuple[str, ...]:
    return (*family_sets(name), "model.num_hidden_layers=3")


MORE = {
    **{f: (*ONE, *_family(f)) for f in FAMILIES[:3]},
    # Shared experts, groups of experts, a multi-token prediction layer with experts of its own.
    "deepseek_v3": (
        *PIPED,
        *_family("deepseek_v3"),
        "parallel.layers=[1,2]",
        "schedule.name=dualpipe",
        "parallel.zero=1",
    ),
    "recompute beside shared experts": (*ONE, *_family("deepseek_v3"), "schedule.recompute=mlp", "parallel.zero=3"),
    "nothing beside all-to-alls": (*ONE, *_family("deepseek_v3"), "schedule.expert_all_to_all=serial"),
    "one expert per token": (*ONE, "model.num_experts_per_tok=1"),
    "all of them": (*ONE, "model.num_experts_per_tok=8"),
    "ties": (*PIPED, "model.tie_word_embeddings=true", "parallel.zero=2"),
    "several sequences": (*ONE, "schedule.microbatch_size=3", "model.seq_len=5"),
    "columns and tensor parallel": (*ONE, *_family("deepseek_v3"), *TP, "parallel.etp=2", "parallel.zero=2"),
    "columns of one tensor parallel pair": (*ONE, *TP, "parallel.ep=1", "parallel.etp=2", "parallel.zero=3"),
    "columns across replicas": (*ONE, *TP, "parallel.dp=4", "parallel.ep=1", "parallel.etp=4", "parallel.zero=1"),
    "columns, context, all again": (*ONE, "parallel.cp=2", "parallel.etp=2", "schedule.recompute=full"),
    "columns behind experts": (*FOUR, "parallel.etp=2", "parallel.order=ep cp tp dp pp"),
}


USUAL = ("deepseek_v3", "nothing beside all-to-alls", "recompute beside shared experts", "columns and tensor parallel")
slow = pytest.mark.slow


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=slow) for n in MORE])
def test_every_kind_of_mixture_trains_as_one_process_does(name: str) -> None:
    assert far(*MORE[name], steps=FEW) <= ROUNDING


LAID = (*PIPED, *_family("deepseek_v3"), "schedule.name=interleaved-1f1b-overlap", "schedule.merge=template")
MERGED = [
    (*LAID, "schedule.layout=E|t|t|tmL", "schedule.microbatches=3"),
    (*PIPED, "schedule.name=1f1b-overlap", "schedule.merge=template"),
    (*PIPED, "schedule.name=interleaved-1f1b-overlap", "schedule.merge=profile", "schedule.microbatches=3"),
    (*PIPED, "schedule.name=interleaved-1f1b-overlap", "schedule.merge=template", "schedule.delay_wgrad=true"),
    (*DUAL, "schedule.merge=template", "schedule.recompute=full"),
    (*ONE, "schedule.name=1f1b-overlap", "schedule.microbatches=3", "schedule.delay_wgrad=true", "parallel.zero=3"),
]


@pytest.mark.parametrize("sets", MERGED, ids=lambda s: " ".join(x.partition("=")[2] for x in s if "schedule" in x))
def test_a_forward_inside_a_backward_trains_as_one_process_does(sets: tuple[str, ...]) -> None:
    assert error(run(*sets), alone(*sets)) <= ROUNDING


IDLE = "routing.kind=hot", "routing.strength=1e6", "routing.forced=true"


@pytest.mark.parametrize("etp", [1, 2])  # of 2: no rank that has columns of the others' experts gets a row
def test_experts_and_ranks_without_a_token_train_too(etp: int, tmp_path: Path) -> None:
    spread = (f"parallel.ep={4 // etp}", f"parallel.etp={etp}")
    sets = (*FOUR, *spread, "model.num_experts_per_tok=1", *IDLE, "model.seq_len=4")
    prepared, plan = judged(tmp_path, *sets)
    counts = ForcedExperts.of(prepared, plan.graph).counts
    assert all((counts.tokens(layer).sum(0) > 0).sum() == 1 for layer in counts.layers)
    ran = run(*sets)
    assert error(ran, alone(*sets)) <= ROUNDING
    gradients = merged(ran.grads)["model.layers.0.mlp.experts.down_proj"]
    assert [bool(g.any()) for g in gradients].count(True) == 1


def test_threads_exchange_as_processes_do_and_a_repeated_run_is_the_same() -> None:
    runs = [run(*ONE), run(*ONE), run(*ONE, backend="local")]
    assert len({json.dumps(r.object["losses"]) for r in runs}) == 1
    for other in runs[1:]:
        mine, theirs = merged(runs[0].params), merged(other.params)
        assert all(np.array_equal(mine[n], theirs[n]) for n in mine)


@slow
@pytest.mark.parametrize("formats", [("fp32", 1e-4), ("bf16", 3e-2)], ids=lambda f: f[0])
def test_narrower_formats_are_as_near_as_they_can_be(formats: tuple[str, float]) -> None:
    name, near = formats
    sets = (*ONE, f"precision.compute={name}", "precision.params=fp32", "optimizer.name=sgd", "optimizer.lr=0.1")
    sets = (*sets, "routing.forced=true")  # a rounding may choose another expert
    assert error(run(*sets), alone(*sets)) <= near


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "dense", "experts"),
    [
        pytest.param(0, (1, 1, 1), (2, 2, 2), marks=slow),
        (1, (1, 1, 4), (2, 2, 4)),
        pytest.param(2, (1, 4, 4), (2, 4, 4), marks=slow),
        (3, (4, 4, 4), (4, 4, 4)),
    ],
)
def test_a_rank_holds_its_share_of_experts_and_of_the_rest(
    zero: int, dense: tuple[int, ...], experts: tuple[int, ...]
) -> None:
    sets = (*FOUR, f"parallel.zero={zero}")
    ran = run(*sets, steps=1)
    shapes = DecoderModel(load_config("tiny-moe", {"num_hidden_layers": 2})).shapes
    sizes = [8 * sum(math.prod(s) for n, s in shapes.items() if (".experts." in n) is mine) for mine in (False, True)]
    held = ran.object["memory"]["persistent_bytes"]
    for rank in map(str, range(4)):
        for kind, d, e, of in zip(("parameters", "gradients", "optimizer"), dense, experts, (1, 1, 2), strict=True):
            promised = of * (sizes[0] / d + sizes[1] / e)
            assert 0 <= held[rank][kind] - promised < 64 * len(shapes) * of, (rank, kind)
    for part in ran.params:  # what is not held is NaN
        mine = sum(int((~np.isnan(x)).sum()) for n, x in part.items() if ".experts." in n)
        assert abs(8 * mine - sizes[1] / experts[0]) <= 8 * 64


# -- messages ---------------------------------------------------------------------------------------------------------


def _told(monkeypatch: pytest.MonkeyPatch, *sets: str) -> tuple[PreparedJob, Plan, list[Any]]:
    """What each rank exchanged in one step of two."""
    with tempfile.TemporaryDirectory() as name:
        _inject(monkeypatch, faults.told, {"folder": name})
        ran = run(*sets)
        files = [Path(name) / f"exchanged-{r}.json" for r in range(ran.object["ranks"])]
        rows = [json.loads(f.read_text()) for f in files]
        prepared, _ = judged(Path(name), *sets)
    return prepared, ran.plan, [r[: len(r) // 2] for r in rows]


@pytest.mark.parametrize("kind", [pytest.param("balanced", marks=slow), "zipf"])
def test_a_step_exchanges_what_the_plan_and_the_routing_say(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = (*FOUR, f"routing.kind={kind}", "routing.forced=true", "schedule.recompute=full")
    prepared, plan, rows = _told(monkeypatch, *sets)
    places, counts, source = RankPlacement.of(plan), ForcedExperts.of(prepared, plan.graph).counts, prepared.base.source
    assert isinstance(source, ConfigModelWork)
    entry = next(e for e in plan.graph.entries if e.part.name == "experts")
    dispatch = source.messages(entry).dispatch
    copies = 8 * 2
    for rank, found in enumerate(rows):
        group = places.group(rank, ("ep",), (0,))
        mine = group.index(rank)
        assert {g for g, *_ in found} == {f"ep:{group[0]},{group[1]}"}
        expected = Counter[str]()
        for layer in counts.layers:
            sent = counts.tokens(layer)[[places.position(r) for r in group]].reshape(2, 2, -1).sum(2)
            there, here = sent[mine].tolist(), sent[:, mine].tolist()
            rows_of = [[there, here], [there, here], [here, there], [here, there]]
            # Counts; rows with weights, once more for the recomputed pass; rows back; and the gradients of all.
            expected[json.dumps([64, [4, 4], [4, 4]])] += 2
            for size, ways in ((512, (0, 0, 2, 0, 2)), (8, (0, 0, 2))):
                for k in ways:
                    to, into = rows_of[k]
                    expected[json.dumps([size * sum(to), to, into])] += 2
            if kind == "balanced":
                assert 512 * sum(there) == dispatch.bytes == 512 * copies
        assert Counter(json.dumps(x) for _, *x in found) == expected


def test_the_host_reads_counts_before_it_dispatches_rows() -> None:
    ran = run(*ONE, steps=1)
    rows = {(r, t): k for k, (r, t) in enumerate(zip(ran.trace.rank.tolist(), ran.trace.op, strict=True))}
    forward = [(r, t) for r, t in rows if t.endswith("dispatch") and "F" in t]
    assert forward
    for rank, text in forward:
        counts = rows[rank, text.replace("dispatch", "counts")]
        assert ran.trace.post_s[rows[rank, text]] >= ran.trace.end_s[counts] - 1e-9
    streams = {s for s, t in zip(ran.trace.stream, ran.trace.op, strict=True) if t.endswith(("dispatch", "combine"))}
    assert streams == {"ep"}


@pytest.mark.parametrize("kind", [pytest.param("balanced", marks=slow), "hot"])
def test_ops_of_a_given_time_exchange_rows_as_planned(kind: str) -> None:
    ran = run(*PIPED, f"routing.kind={kind}", emulate=0.002)
    assert ran.object["losses"] is None and len(ran.trace) == 2 * 2 * len(ran.plan)
    assert {m.kind for n in ran.plan.graph.nodes if (m := n.message) and n.stream == "ep"} == {MessageKind.ALL_TO_ALL}


# -- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "sets"),
    [
        (faults.equal_splits, ONE),
        (faults.divided_again, ONE),
        (faults.swapped_sources, (*ONE, "routing.forced=true")),
        (faults.ungathered, (*FOUR, "parallel.zero=2")),
        pytest.param(faults.ungathered, (*FOUR, "parallel.zero=1"), marks=slow),
        (faults.unsummed_columns, (*FOUR, "parallel.etp=2")),
        (faults.equal_columns, (*FOUR, "parallel.etp=2")),
        (faults.alone_in_edp, (*FOUR, "parallel.zero=0")),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_one_thing_wrong_with_experts_is_seen(
    fault: Callable[..., Any], sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = (*sets, "optimizer.clip_norm=0")
    monkeypatch.setattr(cli, "RANK", fault)
    try:
        assert error(run(*sets), alone(*sets)) > VISIBLE
    except AssertionError as differ:
        assert "copies of" in str(differ)


@slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_columns_of_experts_go_with_compiled_layers() -> None:
    sets = (*ONE, "parallel.ep=1", "parallel.etp=2")
    ran = run(*sets, "run.compile=true")
    assert error(ran, alone(*sets)) <= ROUNDING and all(ran.object["compiled"]["units"].values())


@pytest.mark.parametrize("part", [pytest.param("counts", marks=slow), "dispatch", pytest.param("combine", marks=slow)])
def test_who_fails_at_an_exchange_is_named_and_who_waits_there(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, plan = judged(tmp_path, *ONE)
    index = next(i for i, text in enumerate(plan.texts) if text == f"0F1/l1.{part}")
    _inject(monkeypatch, at_op, {"rank": 1, "index": index, "kind": "raise"})
    with pytest.raises(RankFailed, match="bad luck") as info:
        run(*ONE)
    assert (info.value.rank, info.value.op) == (1, plan.text(index)) and set(info.value.waiting) == {0}
