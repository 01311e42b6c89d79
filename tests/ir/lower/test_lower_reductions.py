"""The last backward of a stage ends where its buckets do, so that what is whole is reduced beside the rest of it."""

import re
from itertools import pairwise

import pytest

from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from ir.verify import check_plan
from piper_sim.study.predict import predict


def table(bucket: float | None, name: str | None = None, **parallel: object) -> dict[str, object]:
    return {
        "model": {"config": "llama3-8b", "num_hidden_layers": 8, "seq_len": 8192},
        "cluster": {"gpu": "h100-sxm", "nodes": 4, "gpus_per_node": 8},
        "parallel": {"pp": 1, "zero": 1, **({"bucket_MiB": bucket} if bucket else {}), **parallel},
        "schedule": {"microbatches": 3, "name": name or "1f1b"},
    }


def plan_of(bucket: float | None, name: str | None = None, **parallel: object) -> Plan:
    plan = prepare(job_from(table(bucket, name, **parallel))).plan()
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
    # The embedding's gradients are in no bucket here: what stands behind the bucket's last one is no piece of its own.
    divided = plan_of(None, "interleaved-1f1b", pp=4, tp=8, sequence_parallel=True)
    assert sum(t.startswith("0RS/") for t in divided.texts) == 1 and backwards(divided, 2) == ["0B2"]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb1p", "zbv", "interleaved-1f1b", "dualpipe"])
@pytest.mark.parametrize("bucket", [None, 160])
def test_reductions_that_do_not_overlap_follow_the_last_pass_of_their_rank(
    zero: int, name: str, bucket: float | None
) -> None:
    plans = {on: plan_of(bucket, name, pp=2, zero=zero, overlap_grad_reduce=on) for on in (True, False)}
    early = dict.fromkeys(plans, 0)
    for on, plan in plans.items():
        for a, b in pairwise(plan.bounds.tolist()):
            texts = plan.texts[a:b]
            last = max(i for i, t in enumerate(texts) if re.match(r"\d+[BIW]\d+", t))
            early[on] += sum("RS/" in t or "AR/" in t for t in texts[:last])
    assert early[False] == 0
    assert early[True] > 0 or bucket is None  # the control
    assert name != "1f1b" or "0B2" in plans[False].texts  # nothing is cut for them


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        *({"pp": 2, "name": name} for name in ("1f1b", "gpipe", "zb1p", "zbv", "interleaved-1f1b")),
        {"pp": 2, "tp": 2},
    ],
)
def test_a_reduction_waits_for_the_op_that_makes_it_whole(zero: int, parallel: dict[str, object]) -> None:
    """By the graph: the last of the weight gradients it adds up, whichever microbatch's; no op more."""
    name = str(parallel.get("name", "1f1b"))
    plan = plan_of(40, name, zero=zero, **{k: v for k, v in parallel.items() if k != "name"})
    ran = {(n, m): row for row, covers, m in covered(plan) for n in covers}
    nodes, mbs = plan.graph.nodes, range(plan.graph.mbs)
    sources: dict[int, list[int]] = {}
    for e in plan.graph.edges:
        if e.join and str(nodes[e.dst].kind) in ("RS", "AR") and not nodes[e.src].once:
            sources.setdefault(e.dst, []).append(e.src)
    computes = {
        p: [r for r in range(len(plan)) if plan.kind[r] == OpKind.COMPUTE and plan.program[r] == p] for p in (0, 1)
    }
    seen = 0
    for row in (r for r in range(len(plan)) if plan.kind[r] == OpKind.COLLECTIVE):
        node = plan.shapes[plan.shape[row]].covers[0][0]
        if node in sources:
            whole = max(ran[n, m] for n in sources[node] for m in mbs)
            later = [r for r in computes[int(plan.program[row])] if whole < r < row]
            assert whole < row and not later, "dispatched behind an op that it does not need"
            seen += 1
    assert seen > 3


def covered(plan: Plan) -> list[tuple[int, list[int], int]]:
    found = ((row, plan.shapes[plan.shape[row]].covers, int(plan.mb[row])) for row in range(len(plan)))
    return [(row, [n for n, _ in covers], mb) for row, covers, mb in found if mb >= 0]


def test_reductions_are_hidden_behind_the_backward_that_makes_them() -> None:
    def exposed(bucket: float) -> float:
        return float(predict(job_from(table(bucket))).to_dict()["time_breakdown"]["0"]["exposed_dp"])

    assert exposed(40) < 0.8 * exposed(1e6)
