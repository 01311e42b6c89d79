"""Where a step's seconds come from: op by op, message by message, and what is put in for groups not measured."""

from dataclasses import replace

import pytest

from cost_models import LinkFabric, message_seconds
from cost_models.profile.profile import CostSource, MeasuredCost, OpEntry, Profile, ProfileMachine, lookup
from ir.core.work import Message, MessageKind
from ir.graph.classes import link_class
from ir.graph.graph import PerStepOp
from ir.job.build import PreparedJob
from ir.job.load import job_from
from ir.plan.plan import OpKind
from piper_sim.folding import RankSpread
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.measured import MeasuredCosts, classes_of
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.sources import sources

MACHINE = ProfileMachine("x", 1, "", 0, {}, "")
SIZES = (2**10, 2**16, 2**20, 2**24)


def prepared_of(*sets: str) -> PreparedJob:
    table = {
        "model": {"config": "tiny-llama", "seq_len": 64},
        "parallel": {"pp": 2, "dp": 2},
        "schedule": {"name": "1f1b", "microbatches": 4},
    }
    job = job_from(table, sets)
    return prepare_priced(job, hardware_of(job))


def model_of(prepared: PreparedJob, profile: Profile) -> CostModel:
    return CostModel(prepared, hardware_of(prepared.job), profile)


def everything(prepared: PreparedJob, seconds: float, *, alone: bool = False) -> Profile:
    """Every op and message of a plan."""
    plan = prepared.plan()
    named = classes_of(plan.graph, prepared.job)
    ops = {c: OpEntry(MeasuredCost(seconds, 0.1 * seconds, 9), shape=s, alone=alone) for _, c, s in named if s}
    plain = sources(plan, model_of(prepared, Profile(MACHINE, {"none 1": OpEntry(MeasuredCost(1.0, 0.0, 1))})))
    links = {r.name: MeasuredCost(seconds, 0.0, 9) for r in plain.rows if "/" not in r.name and "@" in r.name}
    return Profile.of(MACHINE, ops, links)


def test_all_that_was_measured_is_and_its_spread_is_weighed() -> None:
    prepared = prepared_of()
    profile = everything(prepared, 1e-3)
    found = sources(prepared.plan(), model_of(prepared, profile))
    assert found.word == "measured" and found.shares["measured"] == 1.0 and not found.edited
    assert 0.05 < float(str(found.shares["spread"])) < 0.1, "messages do not spread"
    assert {w for s, w in zip(prepared.plan().shapes, found.shapes, strict=True) if s.kind is OpKind.COMPUTE} == {
        "measured ± 10 %"
    }
    part = replace(profile, ops={k: e for k, e in profile.ops.items() if not k.startswith("W")}, sealed=False)
    found = sources(prepared.plan(), model_of(prepared, part))
    assert found.word == "mixed" and found.edited
    assert any("modelled" in w and "measured" in w for w in found.shapes), "an op of several nodes says both"


def test_every_op_and_message_of_a_step_is_counted_once() -> None:
    prepared = prepared_of()
    plan = prepared.plan()
    model = model_of(prepared, everything(prepared, 1e-3))
    costs = model.price(plan)
    found = sources(plan, model)
    assert sum(r.seconds * r.times for r in found.rows) == pytest.approx(
        float(costs.duration[plan.kind != OpKind.RECV].sum()), rel=1e-6
    )


def test_messages_inside_an_op_come_on_top_where_it_was_measured_alone() -> None:
    prepared = prepared_of("parallel.tp=2")
    plan = prepared.plan()
    node = next(n for n in plan.graph.nodes if n.inline and not n.once)
    alone, within = (model_of(prepared, everything(prepared, 1e-3, alone=a)) for a in (True, False))
    assert sum(within.node_shares(node)) == pytest.approx(1e-3)
    inside = sum(alone.message(m) for m in node.inline)
    assert inside > 0 and sum(alone.node_shares(node)) == pytest.approx(1e-3 + inside)
    rows = {r.name for r in sources(plan, alone).rows}
    assert any(name.startswith(("all_gather 2@1", "all_reduce 2@1")) for name in rows)


@pytest.mark.parametrize("change", ['optimizer.name="sgd"', "optimizer.clip_norm=0.0", "optimizer.offload=0.5"])
def test_an_update_that_does_something_else_was_not_measured(change: str) -> None:
    """Of as many elements: SGD reads no moments, and what the host updates goes over PCIe and back."""
    here, there = prepared_of(), prepared_of(change, "cluster.host_GBps=40")
    update = next(n for n in there.plan().graph.nodes if n.kind is PerStepOp.UPDATE)
    model = model_of(there, everything(here, 1e-3))
    assert model.measured.node(update) is None
    assert sum(model.node_shares(update)) == pytest.approx(sum(CostModel(there, model.hardware).node_shares(update)))
    assert model_of(there, everything(there, 1e-3)).measured.node(update) is not None


@pytest.mark.parametrize(("measured", "asked"), [("adamw", "muon"), ("muon", "adamw")])
def test_an_update_of_matrices_is_not_one_of_as_many_elements(measured: str, asked: str) -> None:
    here, there = (prepared_of(f'optimizer.name="{name}"') for name in (measured, asked))
    found = {c: OpEntry(MeasuredCost(1e-3, 0.0, 9), shape=s) for _, c, s in classes_of(here.plan().graph, here.job)}
    profile = Profile.of(MACHINE, found)
    update = next(n for n in there.plan().graph.nodes if n.kind is PerStepOp.UPDATE)
    assert model_of(there, profile).measured.node(update) is None
    update = next(n for n in here.plan().graph.nodes if n.kind is PerStepOp.UPDATE)
    assert model_of(here, profile).measured.node(update) is not None


# -- messages ---------------------------------------------------------------------------------------------------------


def links(kind: MessageKind, ranks: int, nodes: int, factor: float) -> dict[str, MeasuredCost]:
    """A group that is slower than modelled by a factor."""
    fabric = LinkFabric.of(hardware_of(prepared_of().job))

    def took(size: int) -> float:
        return factor * message_seconds(Message(kind, size, ("dp",)), ranks, ranks // nodes, fabric)

    return {link_class(Message(kind, n, ()), ranks, nodes): MeasuredCost(took(n), 0.0, 9) for n in SIZES}


def test_a_group_on_other_nodes_is_another_one() -> None:
    message = Message(MessageKind.ALL_REDUCE, 2**20, ("dp",))
    profile = Profile.of(MACHINE, {}, {"all_reduce 8@1 1048576": MeasuredCost(1.0, 0.0, 9)})
    m = MeasuredCosts({}, profile)
    assert m.message(message, RankSpread(8, 8, 1), lambda s: 5.0).seconds == 1.0
    assert m.message(message, RankSpread(8, 4, 2), lambda s: 5.0).source is CostSource.MODELLED
    anywhere = Profile.of(MACHINE, {}, {"all_reduce 8 1048576": MeasuredCost(2.0, 0.0, 9)})
    for nodes in (1, 2):
        assert (
            MeasuredCosts({}, anywhere).message(message, RankSpread(8, 8 // nodes, nodes), lambda s: 5.0).seconds == 2.0
        )


def test_a_larger_group_is_corrected_by_what_the_model_was_off_at_the_nearest() -> None:
    fabric = LinkFabric.of(hardware_of(prepared_of().job))
    message = Message(MessageKind.ALL_REDUCE, 2**20, ("dp",))

    def price(s: RankSpread) -> float:
        return message_seconds(message, s.ranks, s.per_node, fabric, nodes=s.nodes)

    measured = {**links(MessageKind.ALL_REDUCE, 16, 2, 1.5), **links(MessageKind.ALL_REDUCE, 8, 1, 3.0)}
    m = MeasuredCosts({}, Profile.of(MACHINE, {}, measured))
    large = RankSpread(64, 8, 8)
    found = m.message(message, large, price)
    assert found.source is CostSource.EXTRAPOLATED and found.seconds == pytest.approx(1.5 * price(large), rel=0.1)
    assert found.spread_s == pytest.approx(found.seconds - price(large)), "as uncertain as the correction is large"
    inside = m.message(message, RankSpread(4, 4, 1), price)
    assert inside.seconds == pytest.approx(3.0 * price(RankSpread(4, 4, 1)), rel=0.1), "one node's goes by one node's"
    other = m.message(Message(MessageKind.ALL_GATHER, 2**20, ("dp",)), large, lambda s: 7.0)
    assert other.source is CostSource.MODELLED and other.seconds == 7.0


def test_a_measured_update_serves_other_lengths_of_sequence() -> None:
    prepared, longer = prepared_of(), prepared_of("model.seq_len=128")
    profile = everything(prepared, 1e-3)
    g = longer.plan().graph
    found = {n.text(): lookup(profile, c, s) for n, c, s in classes_of(g, longer.job) if s is not None}
    updates = [f for text, f in found.items() if "UPDATE" in text]
    assert updates and all(f is not None and f.source is CostSource.MEASURED for f in updates)
    assert all(f is None for text, f in found.items() if "UPDATE" not in text), "one size makes no line"


@pytest.mark.parametrize(
    ("gpu", "dispatcher", "scaled"), [("H100", None, True), ("H100", "nccl", False), ("", None, False)]
)
def test_tokens_sent_once_per_node_are_not_the_copies_that_were_timed(
    gpu: str, dispatcher: str | None, scaled: bool
) -> None:
    """All-to-alls of nccl-tests, half as fast as modelled: so is a dispatch of a token per node. On a CPU, and by NCCL,
    every copy goes.
    """
    table = {"model": {"config": "mixtral-8x7b", "seq_len": 512}, "parallel": {"ep": 8, "dp": 16}}
    job = job_from(table | {"cluster": {"nodes": 2}, "costs": {"dispatcher": dispatcher} if dispatcher else {}})
    prepared = prepare_priced(job, hardware_of(job))
    node = next(n for n in prepared.plan().graph.nodes if n.part.endswith(".dispatch") and n.message is not None)
    assert node.message is not None and node.message.fanout == 2
    at, fabric = RankSpread(8, 4, 2), LinkFabric.of(hardware_of(job))
    plain = Message(MessageKind.ALL_TO_ALL, node.message.bytes, ("ep",))
    took = 2 * message_seconds(plain, 8, 4, fabric)
    links = {link_class(plain, 8, 2): MeasuredCost(took, 0.0, 9)}
    found = model_of(prepared, Profile.of(replace(MACHINE, gpu=gpu), {}, links)).priced(node.message, at)
    alone = CostModel(prepared, hardware_of(job)).priced(node.message, at).seconds
    assert found.seconds == pytest.approx(2 * alone if scaled else took)
    assert found.source is (CostSource.EXTRAPOLATED if scaled else CostSource.MEASURED)
    assert not scaled or found.seconds < 0.9 * took
