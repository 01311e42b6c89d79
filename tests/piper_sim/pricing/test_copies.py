"""Shards over a part of the replicas, predicted: closed forms of messages, links and bytes; searched as enumerated."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_models import LinkFabric, message_seconds
from ir.core.errors import PiperError
from ir.core.mesh import Mesh
from ir.core.work import MessageKind
from ir.graph.graph import PerStepOp
from ir.graph.sync import buckets
from ir.job import Job, load_job
from ir.job.build import directives_json, prepare
from ir.plan.text import plan_digest
from piper_sim import explain, predict
from piper_sim.folding import RankSlot
from piper_sim.folding.uses import CollectiveUse
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.search import search
from piper_sim.study.search.bound import JobBounds
from piper_sim.study.search.space import JobSpace
from tests.refusals import refusal

NODE = 8


def job(copies: int = 2, zero: int = 1, **sections: dict[str, Any]) -> Job:
    """Llama on two nodes."""
    table: dict[str, Any] = {
        "model": {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 4096},
        "cluster": {"gpu": "h100-sxm", "nodes": 2, "gpus_per_node": NODE},
        "parallel": {"zero": zero, "dp_replicate": copies},
        "schedule": {"microbatches": 2},
    }
    for name, keys in sections.items():
        table.setdefault(name, {}).update(keys)
    return load_job(table)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_lie_inside_a_node_and_their_copies_on_as_many(zero: int, tp: int) -> None:
    p = predict(job(zero=zero, parallel={"tp": tp}))
    plan, model, fabric = p.plan, p.planned.model, LinkFabric.of(hardware_of(job()), NODE)
    inside, dp, seen = NODE // tp, 2 * NODE // tp, set()
    of = {b.key: b for b in buckets(plan.graph)}
    for s in plan.shapes:
        message = s.message or (plan.graph.nodes[s.covers[0][0]].message if s.covers else None)
        if not s.bucket or message is None:
            continue
        b, element = of[s.bucket], 2 if message.kind is MessageKind.ALL_GATHER else 4
        spread = model.ground.spread(CollectiveUse.of(message, 1), RankSlot(0, 0))
        width = inside * (tp if "tp" in b.axes else 1)
        share = -(-b.numel // width)
        assert b.ranks * b.copies == width * 2 == dp * (tp if "tp" in b.axes else 1) and b.copies == 2
        if message.kind is MessageKind.ALL_REDUCE:
            assert (spread.ranks, spread.per_node, spread.nodes, message.bytes) == (2, 1, 2, share * element)
        else:
            assert (spread.ranks, spread.per_node, spread.nodes) == (width, width, 1)
            assert message.bytes == width * share * element
        assert model.message(message) == pytest.approx(message_seconds(message, spread.ranks, spread.per_node, fabric))
        seen.add(message.kind)
    assert seen == {MessageKind.ALL_REDUCE, MessageKind.REDUCE_SCATTER, MessageKind.ALL_GATHER}


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_what_persists_is_that_of_a_uniform_job_on_as_many_ranks(copies: int) -> None:
    for zero in (1, 2, 3):
        part, whole = (
            predict(job(copies, zero)),
            predict(job(1, zero, cluster={"nodes": 1, "gpus_per_node": 16 // copies})),
        )
        assert part.planned.memory.state == whole.planned.memory.state
        updates = [[n.numel for n in p.plan.graph.nodes if n.kind is PerStepOp.UPDATE] for p in (part, whole)]
        assert updates[0] == updates[1]


def test_gathers_cross_nodes_no_more_and_a_slow_network_says_so() -> None:
    """What stays inside a node: weights gathered twice a microbatch, and its gradients. Copies meet once a step."""
    slow = {"cluster": {"nic_Gbps": 25}, "schedule": {"microbatches": 8}}
    assert predict(job(2, 3, **slow)).iteration_s < 0.5 * predict(job(1, 3, **slow)).iteration_s


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_rows_sum_to_the_step_and_waits_for_copies_are_exposed(zero: int) -> None:
    p = predict(job(zero=zero, cluster={"nic_Gbps": 25}))
    row = p.to_dict()["time_breakdown"]["0"]
    assert sum(row.values()) == pytest.approx(p.iteration_s)
    # One rank of each stage: it waits for nobody but what is on the wire.
    assert row["dependency"] < 0.02 * row["exposed_dp"]
    found = explain(p.prepared.job).to_dict()
    assert found["iteration_s"] == pytest.approx(p.iteration_s)
    assert any(step["op"].startswith("0AR/") for step in found["critical_path"])


def test_degrees_are_searched_as_enumerated_and_bounds_hold() -> None:
    lists = {"tp": [1, 2], "zero": [0, 1, 3], "dp_replicate": [1, 2, 4], "pp": [1], "microbatch_size": [1]}
    pins = {"pin": ["recompute", "layers", "cp", "ep", "name", "stages_per_rank"]}
    cluster = {"gpu": "h100-sxm", "nodes": 2, "gpus_per_node": 2, "memory_margin_GiB": 0}
    model = {"config": "tiny-llama", "seq_len": 1024}
    table = {"model": model, "cluster": cluster, "schedule": {"global_batch": 16}, "search": lists | pins}
    asked = load_job(table)
    hardware, times = hardware_of(asked), {}
    space, bounds = JobSpace.of(asked, hardware), JobBounds(hardware)
    for changes in space:
        try:
            one = space.job_of(changes)
            p = predict(one)
        except PiperError:
            continue
        bound, peak = bounds.of(one), max(p.to_dict()["memory"]["device_peak_bytes"].values())
        assert bound.seconds <= p.iteration_s and bound.device_bytes <= peak
        times[one.parallel.tp, one.parallel.zero, one.parallel.dp_replicate] = p.iteration_s
    # zero = 0 has no shards to copy, and tp = 2 leaves two replicas
    assert len(times) == 2 + 2 * (3 + 2)
    found = search(asked, budget_s=600.0)
    assert found.proven and found.best is not None and found.best["iteration_s"] == min(times.values())


@pytest.mark.parametrize("order", ["tp cp ep dp pp", "pp tp cp ep dp", "dp ep cp tp pp", "pp ep dp tp cp"])
def test_groups_of_shards_and_of_copies_are_a_grid(order: str) -> None:
    mesh = Mesh.of(tp=2, cp=2, dp=4, pp=2, ep=2, dp_replicate=2, order=order.split())
    for axes in (("cp", "dp"), ("tp", "cp", "dp"), ("edp",)):
        inside, across = mesh.divided(axes)
        rows, columns = mesh.offsets(inside), mesh.offsets(across)
        assert len(columns) == 2 and sorted(a + b for a in rows for b in columns) == mesh.offsets(axes)
        own = mesh.offsets((inside[-1],))
        assert own[-1] < mesh.offsets((across[0],))[1]  # shards lie on those that are closest
    refused = refusal(Mesh.of, tp=1, cp=1, dp=6, pp=1, dp_replicate=4)
    assert refused.key == "parallel.dp_replicate" and refused.suggestion == "dp_replicate = 3"


def test_a_job_without_copies_has_the_plan_that_it_had() -> None:
    plain = job(1)
    assert replace(plain, parallel=replace(plain.parallel, dp_replicate=1)) == plain
    assert {b.inside for b in buckets(predict(plain).plan.graph)} == {("cp", "dp")}


def test_a_strategy_and_its_job_agree_on_copies(tmp_path: Path) -> None:
    said = job(2).parallel
    for name, copies in (("two", 2), ("none", 1)):
        table = directives_json(prepare(job(copies)).strategy)
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    two, none = ({"directives": str(tmp_path / f"{name}.json"), "microbatches": 2} for name in ("two", "none"))
    filled = prepare(job(1, schedule=two))
    assert filled.job.parallel.dp_replicate == said.dp_replicate == 2
    assert plan_digest(filled.plan()) == plan_digest(prepare(job(2, schedule=two)).plan())
    assert refusal(prepare, job(2, schedule=none), match="the strategy copies no shards").key == "parallel.dp_replicate"
    refusal(prepare(job(4, schedule=two)).plan, match="dp_replicate = 2, and the mesh has 4")
    refusal(prepare, job(2, zero=0), match="zero = 0 makes none")
