"""The last backward of a stage ends where its buckets do, so that what is whole is reduced beside the rest of it."""

import pytest

from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from ir.verify import check_plan
from piper_sim.study.predict import predict


def table(bucket: float | None, **parallel: object) -> dict[str, object]:
    return {
        "model": {"config": "llama3-8b", "num_hidden_layers": 6, "seq_len": 8192},
        "cluster": {"gpu": "h100-sxm", "nodes": 4, "gpus_per_node": 8},
        "parallel": {"pp": 1, "zero": 1, **({"bucket_MiB": bucket} if bucket else {}), **parallel},
        "schedule": {"microbatches": 3, **({"name": "1f1b"} if parallel.get("pp", 1) == 1 else {})},
    }


def plan_of(bucket: float | None, **parallel: object) -> Plan:
    plan = prepare(job_from(table(bucket, **parallel))).plan()
    check_plan(plan)
    return plan


def backwards(plan: Plan, mb: int) -> list[str]:
    return [t for t in plan.texts if t.startswith(f"0B{mb}")]


@pytest.mark.parametrize("zero", [0, 1])
def test_only_the_last_microbatch_is_cut_and_only_where_buckets_end(zero: int) -> None:
    plan = plan_of(160, zero=zero)
    assert backwards(plan, 0) == ["0B0"] and backwards(plan, 1) == ["0B1"]
    reduced = [t for t in plan.texts if t.startswith(("0RS/", "0AR/"))]
    pieces = backwards(plan, 2)
    assert 3 < len(pieces) <= len(reduced)
    # Each is behind the piece that makes it whole, the first ones ahead of the last pieces.
    order = [t for t in plan.texts if t in (*pieces, *reduced)]
    assert order[0] == pieces[0] and order[1] in reduced and order.index(pieces[-1]) > order.index(reduced[1])


def test_one_bucket_leaves_the_backward_whole() -> None:
    for plan in (plan_of(None), plan_of(1e6)):
        assert backwards(plan, 2) == ["0B2"]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"pp": 2, "tp": 2}])
def test_a_reduction_waits_for_the_op_that_makes_it_whole(zero: int, parallel: dict[str, int]) -> None:
    """By the graph: the last of the weight gradients it adds up, wherever that runs; no op more."""
    plan = plan_of(40, zero=zero, **parallel)
    ran = {(n, m): row for row, covers, m in covered(plan) for n in covers}
    nodes, last = plan.graph.nodes, plan.graph.mbs - 1
    sources: dict[int, list[int]] = {}
    for e in plan.graph.edges:
        if e.join and nodes[e.dst].once and nodes[e.dst].message is not None and not nodes[e.src].once:
            sources.setdefault(e.dst, []).append(e.src)
    rows = [row for row in range(len(plan)) if plan.kind[row] == OpKind.COLLECTIVE]
    seen = 0
    for row in rows:
        node = plan.shapes[plan.shape[row]].covers[0][0]
        if node not in sources or str(nodes[node].kind) not in ("RS", "AR"):
            continue
        seen += 1
        own = [ran[n, last] for n in sources[node] if plan.program[ran[n, last]] == plan.program[row]]
        assert max(own) < row
        between = [
            r
            for r in range(max(own) + 1, row)
            if plan.kind[r] == OpKind.COMPUTE and plan.program[r] == plan.program[row]
        ]
        assert not between, "dispatched behind an op that it does not need"
    assert seen > 3


def covered(plan: Plan) -> list[tuple[int, list[int], int]]:
    found = ((row, plan.shapes[plan.shape[row]].covers, int(plan.mb[row])) for row in range(len(plan)))
    return [(row, [n for n, _ in covers], mb) for row, covers, mb in found if mb >= 0]


def test_reductions_are_hidden_behind_the_backward_that_makes_them() -> None:
    def exposed(bucket: float) -> float:
        return float(predict(job_from(table(bucket))).to_dict()["time_breakdown"]["0"]["exposed_dp"])

    assert exposed(40) < 0.8 * exposed(1e6)
