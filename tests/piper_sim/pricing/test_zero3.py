"""What a framework's ZeRO-3 makes of the network, and what it copies: gathers on demand, FSDP2's two buffers."""

import json
from pathlib import Path

import msgspec
import pytest

from cost_models.software import load_software
from ir.core.order import FloatArray
from ir.core.work import MessageKind
from ir.job import load_job
from ir.plan.plan import OpKind, Plan
from ir.plan.text import plan_digest
from piper_sim.study.predict import predict

JOB = {
    "model": {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 1024},
    "cluster": {"gpu": "h100-sxm"},
    "parallel": {"dp": 4},
    "schedule": {"name": "1f1b", "microbatches": 2},
    "precision": {"params": "fp32", "gather": "bf16", "reduce": "fp32"},
}
LAYER = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096  # weights of one
ENDS = 128256 * 4096  # of the vocabulary table, and of the head, whose norm is a unit of its own
HBM = 3352e9 * 0.82
RAMP, CASTS = 1 << 20, 0.75


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """torchtitan's file, with nothing copied."""
    said = load_software("torchtitan")
    assert said.copies == 0.9
    file = tmp_path / "none.json"
    constants = {"portable_attention": True, "op_by_op": True, "eager": True, "stops_early": True, "persistent": True}
    file.write_text(json.dumps({**constants, "sources": dict.fromkeys(constants, "-")}))
    return file


def _added(none: Path, *sets: str) -> tuple[Plan, FloatArray, float]:
    """(plan, [op] seconds that copies add, what they add to the step)."""
    runs = [predict(load_job(JOB, [*sets, f"costs.software={s}"])) for s in ("torchtitan", none)]
    assert plan_digest(runs[0].plan) == plan_digest(runs[1].plan)
    durations = [r.costs.duration.reshape(-1, len(runs[0].plan))[0] for r in runs]
    return runs[0].plan, durations[0] - durations[1], runs[0].iteration_s - runs[1].iteration_s


def _moved(nbytes: float, rate: float) -> float:
    return (nbytes + RAMP) / HBM / rate


def test_a_layer_is_copied_out_of_each_gather_and_its_gradients_into_each_reduction(without: Path) -> None:
    plan, added, step_s = _added(without, "parallel.zero=3")
    named = {plan.text(i): float(added[i]) for i in range(len(plan)) if added[i]}
    out, into = _moved(2 * 2 * LAYER, 0.9), _moved((2 + 4) * LAYER, CASTS)
    for mb in range(2):
        assert named[f"0F{mb}/l1.attn..l1.mlp"] == pytest.approx(out, rel=1e-6)
        assert named[f"0B{mb}/l1.mlp..l1.attn"] == pytest.approx(out + into, rel=1e-6)
        assert named[f"0B{mb}/l3.mlp..l3.attn"] == pytest.approx(into, rel=1e-6), "it is gathered still"
    assert (added[plan.kind != OpKind.COMPUTE] == 0).all()
    assert step_s >= 2 * 3 * (2 * out + into) - 2 * out, "nothing hides a kernel"


@pytest.mark.parametrize(("zero", "reductions", "gathers"), [(0, 0, 0), (1, 1, 1), (2, 2, 1)])
def test_each_byte_that_travels_is_copied_once(zero: int, reductions: int, gathers: int, without: Path) -> None:
    """Of weights that stay, once per step; of gradients, once per step or per microbatch."""
    sets = (f"parallel.zero={zero}", "parallel.bucket_MiB=1000000")
    _, added, _ = _added(without, *sets)
    whole = 4 * LAYER + 2 * ENDS + 4096
    into, out = 6 * whole / HBM / CASTS, 4 * whole / HBM / 0.9
    assert added.sum() == pytest.approx(reductions * into + gathers * out, rel=0.01)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name, pp", [("1f1b", 1), ("gpipe", 4), ("interleaved-1f1b", 2), ("zbv", 2), ("zb1p", 4),
                                      ("dualpipe", 4), ("dualpipev", 2)])  # fmt: skip
def test_a_rank_copies_what_it_gathers_and_reduces_and_nobody_elses(
    name: str, pp: int, zero: int, without: Path
) -> None:
    """Counted op by op, rank by rank: as many seconds as its messages' bytes take."""
    job = ("model.num_hidden_layers=8", f"schedule.name={name}", "schedule.microbatches=8", f"parallel.pp={pp}")
    plan, added, _ = _added(without, *job, f"parallel.zero={zero}")
    owed, paid = [0.0] * plan.programs, [0.0] * plan.programs
    for i in range(len(plan)):
        s, program = plan.shapes[int(plan.shape[i])], int(plan.program[i])
        paid[program] += float(added[i])
        if s.bucket and s.message is not None and s.message.kind is MessageKind.ALL_GATHER:
            owed[program] += _moved(2 * s.message.bytes, 0.9)
        elif s.bucket and s.message is not None and s.message.kind is MessageKind.REDUCE_SCATTER:
            owed[program] += _moved(1.5 * s.message.bytes, CASTS)
    assert min(owed) > 0 and paid == pytest.approx(owed, rel=1e-4)


def test_casts_are_told_from_copies(without: Path) -> None:
    _, added, _ = _added(without, "parallel.zero=2", "precision.reduce=bf16", "parallel.bucket_MiB=1000000")
    assert added.sum() == pytest.approx(3 * 4 * (4 * LAYER + 2 * ENDS) / HBM / 0.9, rel=0.01)


def test_a_slow_rank_copies_slowly(without: Path) -> None:
    _, added, _ = _added(without, "parallel.zero=3")
    _, slowly, _ = _added(without, "parallel.zero=3", "cluster.speed={0=0.5,1=0.5,2=0.5,3=0.5}")
    assert slowly == pytest.approx(2 * added, rel=1e-6)


def test_seconds_that_are_given_hold_all(without: Path) -> None:
    times = "costs.stage_times={F=0.01,I=0.01,W=0.01}"
    _, added, step_s = _added(without, "parallel.zero=3", times)
    assert not added.any() and step_s == 0.0


def exposed(tmp_path: Path, nodes: int = 4, zero: int = 3, **constants: object) -> float:
    """Seconds of data parallelism that nothing hides."""
    file = tmp_path / "soft.json"
    file.write_bytes(msgspec.json.encode({"name": "soft", **constants, "sources": dict.fromkeys(constants, "?")}))
    table = {
        "model": {"config": "llama3-8b", "num_hidden_layers": 8, "seq_len": 4096},
        "cluster": {"gpu": "h100-sxm", "nodes": nodes},
        "parallel": {"zero": zero},
        "schedule": {"microbatches": 2, "microbatch_size": 2},
        "costs": {"software": str(file), "interference": "none"},
    }
    return float(predict(load_job(table)).to_dict()["time_breakdown"]["0"]["exposed_dp"])


def test_weights_gathered_on_demand_are_waited_for(tmp_path: Path) -> None:
    ahead, late = exposed(tmp_path), exposed(tmp_path, gather_on_demand=True)
    assert late > ahead + 0.05


@pytest.mark.parametrize(("nodes", "zero", "slower"), [(4, 3, True), (1, 3, False), (4, 1, False)])
def test_a_share_of_the_network_is_what_gathers_between_nodes_get_and_no_other_message(
    tmp_path: Path, nodes: int, zero: int, slower: bool
) -> None:
    whole, part = (exposed(tmp_path, nodes, zero, gather_on_demand=True, zero3_network=x) for x in (1.0, 0.1))
    assert (part > 5 * whole) if slower else part == whole
