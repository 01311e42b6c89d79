"""Ahead of the first layer that trains there is no backward: none is planned, run, sent or kept for."""

import random
from itertools import product

import pytest

import piper_sim
from ir.core.ops import Pass
from ir.core.work import Kernel, KernelKind
from ir.job import Job, load_job
from ir.job.build import prepare
from ir.plan.plan import OpKind
from ir.verify import check_plan
from ir.workload.part import Chunk, Param, Part, before_training
from piper_sim.study import simulate
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.class_runs import LENGTH, MBS, SIZE, ClassPlan, _graph, far, run_class, sets_of
from tests.executor.frontend.models import ahead_classes

PLANS: list[ClassPlan] = [
    *((pp, 1, 0, s) for pp in (2, 3) for s in ("1f1b", "gpipe", "zb1p", "interleaved-1f1b") if (pp, s[0]) != (3, "i")),
    *((2, 1, 0, s) for s in ("zbv", "dualpipe", "dualpipev")),
    *((pp, 2, zero, "1f1b") for pp in (1, 2) for zero in (1, 2, 3)),
]
MORE: list[tuple[str, ...]] = [(), (), (), ("parallel.tp=2",), ("parallel.cp=2",), ("schedule.merge=template",)]


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_classes", ahead_classes)


def drawn(count: int) -> list[tuple[str, ClassPlan, str, tuple[str, ...]]]:
    rng, out = random.Random(3), list[tuple[str, ClassPlan, str, tuple[str, ...]]]()
    for k in range(count):
        name, plan = [*ahead_classes.LAYERS][k % len(ahead_classes.LAYERS)], rng.choice(PLANS)
        more = rng.choice(MORE) if name.startswith(("llama", "qwen")) and plan[1] == 1 else ()
        out.append((name, plan, rng.choice(["none", "full"]), more))
    return out


# Every class, schedule, level of ZeRO and way to divide; the others are slow.
MORE_OF_THE_SAME = (0, 7, 9, 11, 13)


@pytest.mark.parametrize(
    ("name", "plan", "recompute", "more"),
    [pytest.param(*c, marks=pytest.mark.slow) if k in MORE_OF_THE_SAME else c for k, c in enumerate(drawn(16))],
    ids=str,
)
def test_layers_behind_frozen_ones_train_as_by_plain_torch(
    name: str, plan: ClassPlan, recompute: str, more: tuple[str, ...]
) -> None:
    assert 0.0 <= far(name, *sets_of(plan, recompute), *more) <= 1e-10


def job(graph: str, pp: int = 2, **schedule: object) -> Job:
    four = schedule.get("name") in ("interleaved-1f1b", "looped-bfs", "zbv", "v-min", "dualpipev")
    return load_job(
        {
            "model": {"graph": _graph(graph), "seq_len": LENGTH},
            "cluster": {"gpu": "h100-sxm"},
            "precision": {"compute": "fp64"},
            "parallel": {"pp": pp, "layers": [0, 1, 1, 1] if four else "balanced"},
            "schedule": {"microbatches": 4, **schedule},
        }
    )


SCHEDULES = "1f1b", "gpipe", "zb1p", "zb2p", "interleaved-1f1b", "looped-bfs", "zbv", "v-min", "dualpipe", "dualpipev"
HOW: list[dict[str, object]] = [
    {},
    {"recompute": "full"},
    {"p2p": "ordered"},
    {"merge": "template"},
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_have_no_backward_ahead_of_what_trains(schedule: str) -> None:
    """Nor anything for it: what forward keeps, recomputation, messages back."""
    blocking: list[dict[str, object]] = [{"p2p": "blocking"}] if schedule in ("1f1b", "gpipe", "zb1p", "zb2p") else []
    for (name, count), how in product((("llama_1", 1), ("llama_2", 2), ("llama_3", 3)), HOW + blocking):
        plan = prepare(job(name, name=schedule, **how)).plan()
        check_plan(plan)
        graph = plan.graph
        still = {"embed", *(f"l{k}" for k in range(count))}
        of = {i: n.part.partition(".")[0] for i, n in enumerate(graph.nodes) if not n.once}
        assert all(graph.nodes[i].kind is Pass.F for i, chunk in of.items() if chunk in still)
        assert {c for i, c in of.items() if graph.nodes[i].kind is Pass.I} == set(of.values()) - still
        kept = [w for i, c in of.items() if c in still for w in graph.nodes[i].writes if w.slot != "out" and w.bytes]
        assert not kept
        behind = {n.stage for n in graph.nodes if not n.once and n.kind is Pass.I}
        sends = [s for s in plan.shapes if s.kind is OpKind.SEND and s.slot is not None]
        back = [graph.nodes[s.slot[0]].stage for s in sends if s.slot and graph.nodes[s.slot[0]].kind is Pass.I]
        assert set(back) <= behind - {min(behind)}


def test_chunks_of_which_all_is_trained_or_the_last_alone_is_frozen_keep_their_backward() -> None:
    parts = [Part("block", frozen=(Param("a", (1,)),)), Part("block", params=(Param("b", (1,)),)), Part("block")]
    still, trained, bare = (Chunk(n, (p,)) for n, p in zip(("still", "trained", "bare"), parts, strict=True))
    assert before_training([bare, still, bare, trained, still]) == {"bare", "still"}
    assert not before_training([trained, still]) and not before_training([bare, trained, still])


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dualpipe"])
def test_what_is_sent_ahead_of_a_backward_that_is_not_there_is_let_go_of(schedule: str) -> None:
    """As early as by that backward: microbatches add nothing to what a stage holds."""
    few, many = (
        piper_sim.predict(job("llama_2", name=schedule, microbatches=n)).to_dict()["memory"]["breakdown_bytes"]
        for n in (4, 16)
    )
    assert {r: x["activations"] for r, x in few.items()} == {r: x["activations"] for r, x in many.items()}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_without_a_backward_is_measured_to_hold_what_is_predicted(recompute: str) -> None:
    for name in ("llama_2", "llama_3"):
        found, _, _ = run_class(name, *sets_of((2, 1, 0, "1f1b"), recompute))
        told = piper_sim.predict(job(name, name="1f1b", recompute=recompute)).to_dict()["memory"]["breakdown_bytes"][
            "0"
        ]
        wanted = sum(size for kind, size in told.items() if kind != "context")
        assert found["memory"]["peak_allocated_bytes"]["0"] == wanted
        assert told["gradients"] == told["optimizer"] == 0


def test_time_and_flops_of_a_frozen_layer_are_those_of_its_forward() -> None:
    """MFU counts them so, too: 2 FLOPs for each element and token, not 6."""
    tokens = LENGTH * SIZE * MBS
    layer = sum(p.numel() for n, p in ahead_classes.llama_1().named_parameters() if "layers.0" in n and p.dim() > 1)
    flops = [simulate._model_flops(prepare(job(f"llama_{k}"))) for k in (0, 1, 2)]
    attention = sum(k.flops * k.count for k in _attention("llama_1"))
    assert flops[0] - flops[1] == flops[1] - flops[2] == 4 * tokens * layer + 2 * MBS * attention
    rows = [piper_sim.predict(job(f"llama_{k}", pp=1)).to_dict()["iteration_s"] for k in (0, 1, 2, 3)]
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[1] > rows[2] > rows[3]


def _attention(name: str) -> list[Kernel]:
    """Products of no weights, in one layer's forward."""
    base = prepare(job(name)).base
    assert base.source is not None
    entry = next(e for e in base.entries if e.chunk.name == "l0")
    return [k for k in base.source.work(entry).forward if k.kind is KernelKind.ATTENTION]
