"""When copies of weights are there, against a walk that notes which microbatches hold which part's."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from cost_models import OptimizerMemory
from ir.core.ops import Pass
from ir.graph.casts import weight_casts
from ir.graph.classes import recomputed
from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from piper_sim import predict
from piper_sim.memory import events
from piper_sim.memory.timeline import memory

SCHEDULES = ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe", "dualpipev")


def plan_of(name: str, recompute: str, mbs: int, **model: Any) -> Plan:
    table = {
        "model": {"config": "tiny-llama", "seq_len": 16, "num_hidden_layers": 8, **model},
        "parallel": {"pp": 1 if name == "gpipe" else 2},
        "schedule": {"name": name, "microbatches": mbs, "recompute": recompute},
        "precision": {"compute": "bf16", "params": "fp32"},
    }
    return prepare(job_from(table)).plan()


def walked(plan: Plan) -> tuple[list[int], dict[int, int]]:
    """[op] bytes of copies behind it; of compute ops of one node, those that are there while it runs."""
    casts, again = weight_casts(plan.graph), recomputed(plan.graph)
    holders: dict[tuple[int, Any], set[int]] = defaultdict(set)
    after, running = list[int](), dict[int, int]()

    def held(program: int) -> int:
        return sum(casts[key].bytes for (p, key), mbs in holders.items() if p == program and mbs)

    for i, (program, s) in enumerate(zip(plan.program.tolist(), plan.shape.tolist(), strict=True)):
        shape = plan.shapes[s]
        for node, member in shape.covers if shape.kind is OpKind.COMPUTE else ():
            n, mb = plan.graph.nodes[node], int((plan.mb, plan.mb2)[member][i])
            key = n.stage, n.part
            if key not in casts or n.once:
                continue
            if n.kind is (Pass.R if key in again else Pass.F):
                holders[program, key].add(mb)
            if len(shape.covers) == 1:
                running[i] = held(program)
            if n.kind is Pass.W:
                holders[program, key].remove(mb)
        after.append(held(program))
    return after, running


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("recompute", "mbs"), [("none", 6), ("full", 5), ("attention", 4)])
def test_copies_are_there_while_a_backward_will_read_them(
    name: str, recompute: str, mbs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(name, recompute, mbs, tie_word_embeddings=True)
    nothing = (OptimizerMemory(0, 0, 0),) * plan.programs
    spans, found = events.cast_spans, memory(plan, nothing)
    monkeypatch.setattr(events, "cast_spans", lambda graph: tuple(x * 0 for x in spans(graph)))
    without = memory(plan, nothing)
    after, running = walked(plan)
    assert (found.level - without.level).tolist() == after and max(after) > 0
    ops = np.array([*running], dtype=np.int64)
    assert (found.high - without.high)[ops].tolist() == [*running.values()]
    assert len(ops) or name in ("gpipe", "zb1p", "zbv"), "whose ops are a stage's pass each"


def test_casts_take_as_long_however_rows_are_routed() -> None:
    """Kernels of experts are made anew for the rows that come; the casts beside them are not."""

    def seconds(params: str, routing: dict[str, Any]) -> Any:
        table: dict[str, Any] = {
            "model": {"config": "tiny-moe", "seq_len": 4096},
            "parallel": {"dp": 4, "ep": 4, "zero": 1},
            "schedule": {"microbatches": 2},
            "precision": {"params": params},
            "cluster": {"gpu": "h100-sxm"},
            "routing": routing,
        }
        trace = predict(job_from(table)).trace.sort_values("op")
        mine = trace[trace["op"].str.match(r"0F\d+/l\d+\.experts")]
        return (mine["end_s"] - mine["start_s"]).to_numpy()

    even, skewed = {"kind": "balanced"}, {"kind": "zipf", "strength": 1.0}
    assert np.ptp(seconds("bf16", skewed)) > 2e-6 > np.ptp(seconds("bf16", even))
    casts = [seconds("fp32", routing) - seconds("bf16", routing) for routing in (even, skewed)]
    assert casts[0].min() > 1e-6 and casts[1] == pytest.approx(casts[0], abs=1e-10)
