"""Seconds of ops: stage times are hit exactly, stragglers slow, and messages know where their ends are."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from cost_models import LinkFabric, message_seconds
from ir.core.errors import ErrorKind
from ir.core.grid import quantise
from ir.core.work import Message, MessageKind
from ir.graph.graph import PerStepOp
from ir.job import Job
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from piper_sim.memory.timeline import state
from piper_sim.pricing.costs import CostModel, OpCosts
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.structure import CostShare
from piper_sim.study.predict import predict
from tests.refusals import refusal


def job(name: str = "1f1b", config: str = "tiny-moe", **sections: Any) -> Job:
    """A small job; sections: further keys of the job file."""
    table: dict[str, Any] = {
        "model": {"config": config, "seq_len": 512},
        "cluster": {"gpu": "h800-sxm"},
        "parallel": {"pp": 4, "dp": 4, "ep": 2 if config == "tiny-moe" else 1, "layers": "even"},
        "schedule": {"name": name, "microbatches": 8},
    }
    for section, keys in sections.items():
        table.setdefault(section, {}).update(keys)
    return job_from(table)


def priced(wanted: Job) -> tuple[Plan, OpCosts, CostModel]:
    hardware = hardware_of(wanted)
    made = prepare_priced(wanted, hardware)
    plan, model = made.plan(), CostModel(made, hardware)
    return plan, model.price(plan), model


def stage_seconds(plan: Plan, costs: OpCosts) -> dict[tuple[int, str], float]:
    """Seconds of each stage in each of F, R or I, W, and of its messages, over the whole step: read off op by op."""
    nodes = plan.graph.nodes
    out: dict[tuple[int, str], float] = defaultdict(float)
    for i in range(len(plan)):
        covers = [nodes[n] for n, _ in plan.shapes[plan.shape[i]].covers]
        if covers and not covers[0].once:
            out[covers[0].stage, "F" if covers[0].kind == "F" else "B"] += float(costs.duration[i])
    return out


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv", "dualpipe", "interleaved-1f1b"])
@pytest.mark.parametrize("config", ["tiny-llama", "tiny-moe"])
@pytest.mark.parametrize("recompute", ["none", "full", ("norm",)])
def test_stage_times_are_hit_exactly_all_to_alls_included(name: str, config: str, recompute: Any) -> None:
    more: dict[str, Any] = {"schedule": {"recompute": recompute}, "model": {"num_hidden_layers": 8}}
    for times in ({"F": 0.0147, "I": 0.0150, "W": 0.0093}, {"F": 0.0147, "B": 0.0243}, {"F": 1, "B": 3, "W": 1.25}):
        plan, costs, _ = priced(job(name, config, costs={"stage_times": times}, **more))
        f, b = times["F"], times.get("B", times.get("I", 0.0) + times["W"] if "W" in times else 0.0)
        found = stage_seconds(plan, costs)
        assert {s for s, _ in found} == set(range(plan.graph.stages))
        for (_, way), seconds in found.items():
            assert seconds == pytest.approx(8 * (f if way == "F" else b), abs=8 * 3 * 2.0**-41)
    stages = plan.graph.stages
    lists = {k: [k_ + s / 8 for s in range(stages)] for k, k_ in (("F", 1.0), ("I", 2.0), ("W", 0.5))}
    plan, costs, _ = priced(job(name, config, costs={"stage_times": lists}, **more))
    for (s, way), seconds in stage_seconds(plan, costs).items():
        assert seconds == 8 * (1 + s / 8 if way == "F" else 2.5 + s / 4)


def test_stage_times_leave_what_they_do_not_name_and_p2p_is_every_transfer_s() -> None:
    base, free, _ = priced(job())
    plan, costs, _ = priced(job(costs={"stage_times": {"F": 1.0, "p2p": 0.25}}))
    transfer = plan.partner >= 0
    assert transfer.any() and (costs.duration[transfer] == 0.25).all()
    before, after = stage_seconds(base, free), stage_seconds(plan, costs)
    assert all(after[key] == (8.0 if key[1] == "F" else seconds) for key, seconds in before.items())
    zero, none, _ = priced(job(costs={"stage_times": {"F": 0, "I": 0, "W": 0, "p2p": 0}}))
    nodes = [plan.graph.nodes[s.covers[0][0]] if s.covers else None for s in zero.shapes]
    per_microbatch = np.array([n is None or not n.once for n in nodes])[zero.shape]
    assert not none.duration[per_microbatch].any()


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"X": 1}, "unknown key 'X'"),
        ({"F": -1}, "F = -1"),
        ({"F": [1, 2]}, "F = "),
        ({"F": float("nan")}, "F = nan"),
        ({"p2p": "fast"}, "p2p = 'fast'"),
        ({"B": 1, "W": 2}, "B is not I [+] W"),
        ({"B": 3, "I": 1, "W": 1}, "B is not I [+] W"),
    ],
)
def test_stage_times_that_make_no_sense_are_refused(times: dict[str, Any], words: str) -> None:
    caught = refusal(priced, job(costs={"stage_times": times}), match=words)
    assert caught.kind is ErrorKind.JOB and caught.key == "costs.stage_times"


def test_a_straggler_slows_its_own_program_by_its_factor_and_the_step_with_it() -> None:
    plan, base, _ = priced(job())
    _, slow, _ = priced(job(cluster={"speed": {"5": 0.5}}))
    compute = plan.kind == OpKind.COMPUTE
    assert (slow.duration[compute & (plan.program == 1)] == 2 * base.duration[compute & (plan.program == 1)]).all()
    other = ~compute | (plan.program != 1)
    assert (slow.duration[other] == base.duration[other]).all()
    assert predict(job(cluster={"speed": {"5": 0.5}})).iteration_s > predict(job()).iteration_s


def test_a_program_is_as_fast_as_its_slowest_replica() -> None:
    plan, base, _ = priced(job())
    one = plan.program == 1
    compute = one & (plan.kind == OpKind.COMPUTE)
    for speed, factor in (
        ({"4": 2.0}, 1.0),
        ({"4": 2.0, "5": 0.5}, 0.5),
        ({"4": 2.0, "5": 2.0, "6": 4.0, "7": 2.0}, 2.0),
        ({"4": 0.5, "5": 0.25}, 0.25),
    ):
        _, found, _ = priced(job(cluster={"speed": speed}))
        assert found.duration[compute].sum() == pytest.approx(base.duration[compute].sum() / factor, abs=1e-9), speed
        assert found.shares.sum(axis=1)[compute].tolist() == found.duration[compute].tolist()


def test_shares_sum_to_the_duration_of_every_compute_op() -> None:
    plan, costs, _ = priced(job("dualpipe", "tiny-llama", parallel={"tp": 2, "dp": 2}, schedule={"recompute": "full"}))
    compute = plan.kind == OpKind.COMPUTE
    assert (costs.shares[compute].sum(axis=1) == costs.duration[compute]).all()
    assert (
        costs.shares[compute].sum(axis=0)[[CostShare.COMPUTE, CostShare.RECOMPUTE, CostShare.TP, CostShare.OPTIMIZER]]
        > 0
    ).all()
    assert not costs.shares[~compute].any()


def test_a_transfer_inside_a_node_is_faster_than_one_between_nodes() -> None:
    """8 GPUs a node, 4 replicas: programs 0 and 1 share nodes, 1 and 2 do not."""
    wanted = job(config="tiny-llama", parallel={"pp": 4, "dp": 4})
    plan, costs, model = priced(wanted)
    fabric = LinkFabric.of(hardware_of(wanted), 8)
    seen: dict[tuple[int, int], set[float]] = defaultdict(set)
    for i in np.flatnonzero(plan.partner >= 0).tolist():
        a, b = int(plan.program[i]), int(plan.program[plan.partner[i]])
        shape = plan.shapes[plan.shape[i]]
        assert shape.slot is not None
        size = plan.graph.nodes[shape.slot[0]].writes[shape.slot[1]].bytes
        near = 2 if {a, b} in ({0, 1}, {2, 3}) else 1
        expected = quantise(message_seconds(Message(MessageKind.P2P, size, ("pp",)), 2, near, fabric))
        assert costs.duration[i] == expected
        seen[a, b].add(expected)
    assert max(seen[0, 1]) < min(seen[1, 2]) and set(seen) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert model.message(Message(MessageKind.P2P, 1, ())) == 0.0, "one rank talks to nobody"


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_a_reduction_joins_the_replicas_of_all_owners(schedule: str) -> None:
    """DualPipe's pairs reduce over both programs: twice the ranks, on twice the nodes."""
    wanted = job(schedule, "tiny-llama", parallel={"pp": 4, "dp": 4})
    plan, costs, _ = priced(wanted)
    fabric = LinkFabric.of(hardware_of(wanted), 8)
    checked = 0
    for i in np.flatnonzero(plan.kind == OpKind.COLLECTIVE).tolist():
        node = plan.graph.nodes[plan.shapes[plan.shape[i]].covers[0][0]]
        if node.kind not in (PerStepOp.REDUCE, PerStepOp.GATHER):
            continue
        programs = node.groups
        assert len(programs) == (2 if schedule == "dualpipe" else 1)
        ranks = [4 * p + d for p in programs for d in range(4)]
        here = sum(r // 8 == ranks[0] // 8 for r in ranks)
        assert node.message is not None
        assert costs.duration[i] == quantise(message_seconds(node.message, len(ranks), here, fabric))
        checked += 1
    assert checked == (16 if schedule == "dualpipe" else 8)


def test_members_of_one_meeting_agree_on_its_seconds() -> None:
    for schedule in ("1f1b", "dualpipe"):
        plan, costs, _ = priced(job(schedule, model={"tie_word_embeddings": True}))
        transfer = np.flatnonzero(plan.partner >= 0)
        assert (costs.duration[transfer] == costs.duration[plan.partner[transfer]]).all()
        for c in range(int(plan.collective.max()) + 1):
            assert len(set(costs.duration[plan.collective == c].tolist())) == 1


def test_a_host_of_which_nothing_is_known_updates_nothing() -> None:
    def job(offload: float, **cluster: object) -> Job:
        sections = {"cluster": {"gpu": "cpu", **cluster}, "optimizer": {"offload": offload}}
        return job_from({"model": {"config": "tiny-llama"}, **sections})

    e = refusal(predict, job(1.0))
    assert (e.key, e.suggestion) == ("optimizer.offload", "cluster.host_GBps = 40")
    assert predict(job(1.0, host_GBps=0.01)).iteration_s > predict(job(0.0)).iteration_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_every_gradient_that_a_rank_keeps_is_cleared_once_a_step(zero: int, name: str) -> None:
    plan, _, model = priced(job(name, parallel={"zero": zero}))
    for n in plan.graph.nodes:
        if n.kind is PerStepOp.UPDATE:
            cleared = sum(k.bytes for k in model._update(n) if k.label == "zero_grads")
            assert cleared == state(plan, model.recipe)[n.groups[0]].gradients
