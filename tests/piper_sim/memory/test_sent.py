"""What a stage has sent is given up behind its send, where a framework does so; all else stays as the plan has it."""

from itertools import pairwise

import numpy as np
import pytest

from cost_models import OptimizerMemory
from ir.core.ops import Pass
from ir.plan.plan import AT_START, OpKind
from piper_sim import load_job
from piper_sim.memory.sent import given_up
from piper_sim.memory.timeline import memory
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.predict import planned
from piper_sim.study.search.bound import JobBounds

HIDDEN, TOKENS = 64, 128
MODEL = {"config": "tiny-llama", "seq_len": TOKENS, "hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 16}
MODEL |= {"num_key_value_heads": 4}


def plan_of(name="1f1b", pp=4, layers=4, recompute="full", mbs=8, software="generic", **model):
    job = {"model": MODEL | {"num_hidden_layers": layers} | model, "cluster": {"gpu": "h100-sxm", "nodes": 1}}
    job |= {"parallel": {"pp": pp, "tp": 1, "dp": 8 // pp}, "costs": {"software": software}}
    schedule = {"name": name, "microbatches": mbs} | ({"recompute": recompute} if recompute else {})
    job = load_job(job | {"schedule": schedule})
    return planned(job, hardware_of(job))


@pytest.mark.parametrize(
    "name, most",
    [("gpipe", (8, 7, 7, 0)), ("1f1b", (3, 2, 1, 0)), ("interleaved-1f1b", (10, 8, 6, 4))],
)
def test_what_was_sent_ahead_of_the_first_answer_is_given_up(name, most):
    """All microbatches of GPipe (its middle stages turn at once), 1F1B's warm-up, and Megatron's of more stages on a
    rank, 2 (pp - r - 1) + (v - 1) pp."""
    plan, nothing, sent = plan_of(name, layers=8).plan, (OptimizerMemory(0, 0, 0),) * 4, TOKENS * HIDDEN * 2
    less = (memory(plan, nothing).level - memory(given_up(plan), nothing).level) / sent
    assert tuple(less[a:b].max() for a, b in pairwise(plan.bounds)) == most and less.min() == 0


def test_a_framework_says_whether_it_does():
    plain, freed = (plan_of(software=s) for s in ("generic", "megatron-core"))
    assert plain.sized is plain.plan and np.array_equal(freed.sized.buffers.free, given_up(freed.plan).buffers.free)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb1p", "dualpipe", "dualpipev", "zbv"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_only_outputs_of_forward_that_leave_their_stage_are_free_earlier(name, recompute):
    plan = plan_of(name, recompute=recompute, layers=8).plan
    before, after = plan.buffers, given_up(plan).buffers
    for field in ("node", "slot", "mb", "bytes", "alloc", "alloc_cover", "category"):
        assert np.array_equal(getattr(before, field), getattr(after, field))
    moved = np.flatnonzero((before.free != after.free) | (before.free_cover != after.free_cover))
    sends = {}
    for op in np.flatnonzero(plan.kind == OpKind.SEND).tolist():
        sends[plan.shapes[plan.shape[op]].slot, int(plan.mb[op])] = op
    assert len(moved)
    for k in moved.tolist():
        node = int(before.node[k])
        send = sends[(node, int(before.slot[k])), int(before.mb[k])]
        assert plan.graph.nodes[node].kind is Pass.F
        assert (after.free[k], after.free_cover[k]) == (send + 1, AT_START) and plan.program[send] == plan.program[
            send + 1
        ]
        assert before.alloc[k] <= send < after.free[k] and (before.free[k] < 0 or after.free[k] <= before.free[k])


def test_what_its_own_stage_reads_stays():
    prepared = plan_of("1f1b", pp=2, layers=4, recompute=None)
    plan, graph = prepared.plan, prepared.plan.graph
    stage = [n.stage for n in graph.nodes]
    read = {
        (e.src, e.slot)
        for e, data in zip(graph.edges, graph.data, strict=True)
        if data and stage[e.src] == stage[e.dst]
    }
    after = given_up(plan).buffers
    own = [k for k in range(len(after)) if (int(after.node[k]), int(after.slot[k])) in read]
    assert own and all(after.free[k] == plan.buffers.free[k] for k in own)


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "interleaved-1f1b"])
def test_what_a_later_stage_of_the_same_rank_reads_stays(name):
    """The last layer's output goes to the prediction module and to the head, of which one lies on its own rank."""
    model = {"config": "nemotron-3-nano-30b-a3b", "seq_len": 128, "vocab_size": 256, "hidden_size": 64, "head_dim": 16}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 4, "hybrid_override_pattern": "ME*-", "n_groups": 4}
    model |= {"num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_routed_experts": 8}
    model |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    schedule = {"name": name, "microbatches": 4, "layout": "Et|ttt|m|L"}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 2}, "parallel": {"pp": 2}}
    job = load_job(job | {"schedule": schedule})
    plan = planned(job, hardware_of(job)).plan
    before, after, nodes = plan.buffers, given_up(plan).buffers, plan.graph.nodes
    moved = np.flatnonzero(before.free != after.free)
    assert len(moved)
    for k in moved.tolist():
        at = (int(before.node[k]), int(before.slot[k]))
        readers = (
            e.dst for e, data in zip(plan.graph.edges, plan.graph.data, strict=True) if data and (e.src, e.slot) == at
        )
        assert not any(plan.program[before.alloc[k]] in nodes[n].groups for n in readers), plan.buffer_name(k)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb1p", "dualpipev"])
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_search_s_bound_of_memory_stays_below(name, recompute, pp):
    p = plan_of(name, pp=pp, layers=8, recompute=recompute, software="megatron-core")
    found = JobBounds(p.hardware).of(p.prepared.job).device_bytes
    assert 0 < found <= p.memory.peak.max() + p.context_bytes


def test_one_rank_has_nothing_to_send():
    plan = plan_of(pp=1, recompute=None).plan
    assert given_up(plan) is plan
