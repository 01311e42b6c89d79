"""What the lowering gets wrong is refused: rules find out by themselves who holds what, and what must wait for what."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as anew

from ir.core.errors import ErrorKind
from ir.core.filters import parse_filter
from ir.core.ops import Pass
from ir.core.work import Message
from ir.directives import ReplicateDirective
from ir.graph import per_step, sync
from ir.graph.graph import Graph, GraphNode, PerStepOp
from ir.graph.matrices import packed
from ir.graph.sync import Bucket
from ir.job.build import prepare
from ir.job.load import job_from
from ir.lower import MessageQueue, PlanPolicy, lower
from ir.lower import zero as lower_zero
from ir.plan.plan import Plan
from ir.verify import check_plan
from tests.ir.plans import moe_graph
from tests.ir.verify.edits import rearranged
from tests.refusals import refusal

LOWERING = importlib.import_module("ir.lower.lower")  # the package calls its function by the same name
MIXED = tuple(ReplicateDirective(parse_filter({"L": n}), n, None, "zero") for n in range(4))


def made(name: str = "1f1b", zero: int = 0, policy: PlanPolicy = PlanPolicy(), **more: Any) -> Plan:
    """A plan whose graph nothing has kept."""
    return lower(replace(moe_graph(name, 2, 4, zero=zero, layers=4, **more)), policy)


def refused(plan: Plan, match: str) -> None:
    assert refusal(check_plan, plan, match=match).kind is ErrorKind.ILLEGAL_PLAN


def test_buckets_of_one_stage_at_two_levels_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent fault: labels without what `replicate` said."""
    check_plan(made(zero=0, then=MIXED))
    monkeypatch.setattr(sync, "_labels", lambda cuts: {pool: pool.label for pool in cuts})
    refused(made(zero=0, then=MIXED), "3 buckets are called 0/dense")


def test_parts_that_nothing_keeps_in_step() -> None:
    graph = replace(moe_graph("1f1b", 2, 4, zero=1, layers=4))
    refused(lower(replace(graph, replicas={k: r for k, r in graph.replicas.items() if k})), "in step by nothing")


def _edited(change: Callable[[GraphNode], GraphNode | None]) -> Callable[..., Graph]:
    """`with_sync` with its once-nodes changed; None: not there, nor what it joins."""

    def wrong(graph: Graph, clip: bool, found: tuple[Bucket, ...]) -> Graph:
        full = per_step.with_sync(graph, clip, found)
        nodes = [n if not n.once else change(n) for n in full.nodes]
        new = {i: k for k, i in enumerate(i for i, n in enumerate(nodes) if n is not None)}
        edges = [anew(e, src=new[e.src], dst=new[e.dst]) for e in full.edges if e.src in new and e.dst in new]
        return replace(full, nodes=tuple(n for n in nodes if n is not None), edges=tuple(edges))

    return wrong


def _message(node: GraphNode, **changed: Any) -> GraphNode:
    m = node.message
    assert m is not None
    return anew(node, message=Message(m.kind, changed.get("bytes", m.bytes), changed.get("axes", m.axes)))


def only(
    *kinds: PerStepOp,
) -> Callable[[Callable[[GraphNode], GraphNode | None]], Callable[[GraphNode], GraphNode | None]]:
    return lambda change: lambda n: change(n) if n.kind in kinds else n


FAULTS: dict[str, tuple[Callable[[GraphNode], GraphNode | None], int, str]] = {
    "no sum": (only(PerStepOp.ALL_REDUCE)(lambda n: None), 0, "nothing sums 0/"),
    "no sum between copies": (only(PerStepOp.ALL_REDUCE)(lambda n: None), 3, "nothing sums 0/"),
    "a sum over one copy": (
        only(PerStepOp.REDUCE)(lambda n: anew(n, spans=n.spans[:1])),
        1,
        "is over groups",
    ),
    "a sum over the wrong axes": (
        only(PerStepOp.REDUCE)(lambda n: _message(n, axes=("tp",))),
        1,
        "is no reduce_scatter",
    ),
    "a sum of half": (
        only(PerStepOp.ALL_REDUCE)(lambda n: _message(n, bytes=8)),
        0,
        "is no all_reduce",
    ),
    "a sum of another bucket": (
        only(PerStepOp.REDUCE)(lambda n: anew(n, bucket="7/dense")),
        1,
        "which there is not",
    ),
    "no gather": (only(PerStepOp.GATHER)(lambda n: None), 1, "is gathered by groups"),
    "no gather inside groups": (only(PerStepOp.GATHER)(lambda n: None), 2, "is gathered by groups"),
    "no update": (only(PerStepOp.UPDATE)(lambda n: None), 1, "never updates"),
    "an update of no matrix that orthogonalises": (
        only(PerStepOp.UPDATE)(lambda n: anew(n, matrices=8)),
        1,
        "orthogonalises 8 elements, not 0",
    ),
    "an update beside sums that nobody has": (
        only(PerStepOp.UPDATE)(lambda n: anew(n, others=n.others + 8)),
        1,
        "elements to others, not",
    ),
    "half a norm": (only(PerStepOp.NORM)(lambda n: anew(n, spans=n.spans[:1])), 1, "NORM is not one sum"),
}


COPIES: dict[str, tuple[Callable[[GraphNode], GraphNode | None], int, str]] = {
    "shares that nobody sums further": (only(PerStepOp.ALL_REDUCE)(lambda n: None), 1, "nothing sums 0/.*dp_replicate"),
    "sums of microbatches that nobody sums further": (
        only(PerStepOp.ALL_REDUCE)(lambda n: None),
        3,
        "nothing sums 0/.*dp_replicate",
    ),
    "copies summed, and nothing before": (only(PerStepOp.REDUCE)(lambda n: None), 1, "zero = 1 takes a RS"),
    "shares summed over those that hold others": (
        only(PerStepOp.ALL_REDUCE)(lambda n: _message(n, axes=("dp_shard",))),
        1,
        "is no all_reduce",
    ),
    "all of it summed over copies": (
        only(PerStepOp.ALL_REDUCE)(lambda n: _message(n, bytes=2 * (n.message.bytes if n.message else 0))),
        2,
        "is no all_reduce",
    ),
    "weights gathered from copies": (
        only(PerStepOp.GATHER)(lambda n: _message(n, axes=("dp",))),
        1,
        "is no all_gather",
    ),
    "reduced over everybody": (only(PerStepOp.REDUCE)(lambda n: _message(n, axes=("dp",))), 1, "is no reduce_scatter"),
}


@pytest.mark.parametrize("fault", COPIES)
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_what_copies_of_shards_take(fault: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, zero, match = COPIES[fault]
    check_plan(made(name, zero, dp_replicate=2))
    monkeypatch.setattr(LOWERING, "with_sync", _edited(change))
    refused(made(name, zero, dp_replicate=2), match)


def test_a_share_that_is_summed_further_before_it_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent fault: two collectives on two streams, and no wait between."""
    plan = made("1f1b", 1, dp_replicate=2)
    later = [i for i, t in enumerate(plan.texts) if t.startswith("0AR/")]
    rows = list(range(len(plan)))
    rows[later[0] - 1], rows[later[0]] = later[0], later[0] - 1
    refused(rearranged(plan, rows), "0AR/")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_exists_once_per_step(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, zero, match = FAULTS[fault]
    check_plan(made("dualpipe", zero))
    monkeypatch.setattr(LOWERING, "with_sync", _edited(change))
    refused(made("dualpipe", zero), match)


@pytest.mark.parametrize(
    ("src", "dst", "match"),
    [
        (Pass.W, PerStepOp.ALL_REDUCE, "AR/.* does not wait for .*B3"),
        (PerStepOp.ALL_REDUCE, PerStepOp.NORM, "NORM does not wait for .*AR/"),
        (PerStepOp.NORM, PerStepOp.UPDATE, "UPDATE/p. does not wait for 0NORM"),
        (PerStepOp.REDUCE, PerStepOp.NORM, "NORM does not wait for .*RS/"),
        (PerStepOp.UPDATE, PerStepOp.GATHER, "AG/.* does not wait for .*UPDATE"),
    ],
)
def test_what_waits_for_what(
    src: Pass | PerStepOp, dst: PerStepOp, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = 1 if PerStepOp.REDUCE in (src, dst) or PerStepOp.GATHER in (src, dst) else 0

    def wrong(graph: Graph, clip: bool, found: tuple[Bucket, ...]) -> Graph:
        full = per_step.with_sync(graph, clip, found)
        kinds = [n.kind for n in full.nodes]
        return replace(full, edges=tuple(e for e in full.edges if (kinds[e.src], kinds[e.dst]) != (src, dst)))

    # Else communication also follows the compute op dispatched before it.
    policy = PlanPolicy(p2p=MessageQueue.USE)
    check_plan(made("1f1b", zero, policy, reduce_stream="zero"))
    monkeypatch.setattr(LOWERING, "with_sync", wrong)
    refused(made("1f1b", zero, policy, reduce_stream="zero"), match)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shares_are_padded_to_one_size(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "shard", property(lambda b: b.numel // b.ranks))
    refused(made(zero=zero, dp=3, ep=1), "bytes over|UPDATE.* elements, not ")


def muon_plan(dp: int, zero: int) -> Plan:
    job = {
        "model": {"config": "tiny-llama", "seq_len": 16},
        "parallel": {"dp": dp, "zero": zero},
        "schedule": {"microbatches": 2},
        "optimizer": {"name": "muon"},
        "cluster": {"gpu": "h100-sxm"},
    }
    return prepare(job_from(job)).lowered()


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("times", [0, 2], ids=["a matrix short", "a matrix owned twice"])
def test_a_share_has_each_of_its_matrices_once(times: int, dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def shard(b: Bucket) -> int:
        sizes = [m.numel for m in b.matrices[:-1] + b.matrices[-1:] * times] or [-(-b.numel // b.ranks)] * b.ranks
        owners = packed(sizes, b.ranks)
        return max(sum(n for n, o in zip(sizes, owners, strict=True) if o == r) for r in range(b.ranks))

    check_plan(muon_plan(dp, 1))
    monkeypatch.setattr(Bucket, "shard", property(shard))
    refused(muon_plan(dp, 1), "0RS/dense.matrices is no reduce_scatter")


def test_all_replicas_sum_all_matrices_where_none_are_shared_out() -> None:
    """Nothing is padded: with more replicas than matrices, that would be most of the message."""
    check_plan(plan := muon_plan(64, 0))
    (b,) = (b for b in sync.buckets(plan.graph) if b.matrices)
    (message,) = (n.message for n in plan.graph.nodes if n.once and n.bucket == b.key)
    assert message is not None and message.bytes == 4 * b.numel and b.numel % 64 == 0 and len(b.matrices) < 64


def test_muon_updates_hidden_matrices_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "hidden_matrix", lambda param, layout: None)
    refused(muon_plan(2, 1), "0/dense is AdamW's, but .*proj.weight is Muon's")


def test_gradients_are_summed_over_the_axes_that_have_parts_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> Plan:
        job = {
            "model": {"config": "tiny-llama", "seq_len": 16},
            "parallel": {"tp": 2, "dp": 2, "sequence_parallel": True},
            "schedule": {"microbatches": 2},
            "cluster": {"gpu": "h100-sxm"},
        }
        return prepare(job_from(job)).lowered()

    check_plan(plan())
    monkeypatch.setattr(sync, "summed_over", lambda param, layout: ("cp", "dp"))
    refused(plan(), r"summed over \['cp', 'dp'\], but .*norm.* over \['cp', 'dp', 'tp'\]")


def test_a_gather_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row early, where it would stand before the last use of what is pushed out for it."""
    early = lower_zero._Gathers._gather

    def gather(self: Any, *args: Any) -> Any:
        kept, self.front = self.front, max(self.front - 1, self.start)
        try:
            return early(self, *args)
        finally:
            self.front = kept

    monkeypatch.setattr(lower_zero._Gathers, "_gather", gather)
    for prefetch in (0, 1, 3):
        refused(made(zero=3, prefetch=prefetch), "before there is room|readings ahead")


def test_an_op_of_one_owner_that_meets_others_is_named() -> None:
    plan = made()
    (first, *_) = (i for i in range(len(plan)) if plan.text(i) == "0UPDATE/p0")
    collective = plan.collective.copy()
    collective[first] = collective.max() + 1
    refused(replace(plan, collective=collective), "program 0: 0UPDATE/p0 meets other programs")
