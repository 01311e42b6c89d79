"""DeepSeek's published kernel trace of one overlapped forward and backward, played through the template's plan.

    python -m experiments.joint trace

Four MoE layers of DeepSeek-V3 on H800 (EP 64, sequence 4,096; github.com/deepseek-ai/profile-data, train.json). The
plan is `1f1b-overlap` of one rank and two microbatches; of it, the pair is timed. A node's seconds are the kernel sums
of its phase and layer in the trace, measured while overlapped: interference is off. Nothing is fitted. Stream 23 holds
shared experts' weight gradients: as one, they follow on the compute stream, whose sums are played back to back; as two,
they share its SMs: while kernels of both run, both take longer, so that time counts once, and each kernel is followed
by the trace's usual gap. All modelled: no seconds from the trace, but how much all-to-alls are slowed and wait for
peers is fitted to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.published.rows import lines
from ir.graph.graph import COMPUTE
from ir.job.build import prepare
from ir.job.load import job_from
from ir.lower import PassMerge, PlanPolicy, lower
from ir.plan.plan import Plan
from ir.verify import check_plan
from piper_sim.engine import run
from piper_sim.study.predict import predict

LAYERS = 4
GAP_MS = 2e-3  # between two kernels of a stream, the median of 898
PUBLISHED_MS = 129.012 / LAYERS  # last end of the chunk, a layer's share
BUSY_MS = {"7 and 23": 124.258 / LAYERS, "27": 114.521 / LAYERS}  # union of the kernels' times
# What this trace gives when its all-to-alls are scaled: the dearer stream, or all kernels one by one.
WANTED_MS = {"x 0": 32.4, "x 1": PUBLISHED_MS, "x 1.5": 43.0, "x 2": 57.3, "serial": 61.0}
_PHASE = {("F", "attn"): "attn(F)", ("F", "experts"): "mlp(F)", ("I", "experts"): "mlp(B)", ("I", "attn"): "attn(B)"}
_PHASE |= {("W", "experts"): "mlp(W)", ("W", "attn"): "attn(W)", ("W", "shared"): "mlp(W) 23"}
_PHASE |= {(k, p): f"{p}({'F' if k == 'F' else 'B'})" for k in "FI" for p in ("dispatch", "combine")}
_UNIFORM = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
_JOB: dict[str, Any] = {
    "model": {"config": "deepseek-v3", "num_hidden_layers": LAYERS, "seq_len": 4096, **_UNIFORM},
    "cluster": {"gpu": "h800-sxm", "gpus_per_node": 8},
    "parallel": {"dp": 64, "ep": 64},
    "schedule": {"name": "1f1b-overlap", "microbatches": 2},
    "precision": {"compute": "fp8"},
}


@dataclass(frozen=True)
class TracedChunk:
    """The pair as played: a layer's share of its span, and of what each stream was busy, in milliseconds."""

    span: float
    compute: float
    wire: float


def table() -> list[dict[str, str]]:
    """The trace's phases; beside_us: for how long a kernel of the compute stream runs, too."""
    return lines(Path(__file__).parent / "data" / "deepseek_phases.csv")


def phases(two: bool = False) -> dict[tuple[str, int], float]:
    """(phase, layer in the chunk) -> milliseconds of its kernels; two: what they add where streams share the SMs."""
    out = {}
    for r in table():
        name = r["phase"] + (" 23" if "(23)" in r["stream"] else "")
        took = (int(r["kernel_time_us"]) - (int(r["beside_us"]) if two else 0)) / 1e3
        gaps = int(r["kernels"]) * GAP_MS if two and "comm" not in r["stream"] else 0.0
        out[name, int(r["layer_in_chunk"])] = took + gaps
    return out


def pair_plan(policy: PlanPolicy) -> Plan:
    """The plan whose second unit is the pair, checked for deadlock."""
    plan = lower(prepare(job_from(_JOB)).graph(), replace(policy, clip=False))
    check_plan(plan)
    return plan


def seconds(plan: Plan, scale: float, two: bool) -> Callable[[int], float]:
    """Milliseconds of each node, from the trace."""
    known = phases(two)

    def of(node: int) -> float:
        n = plan.graph.nodes[node]
        chunk, _, part = n.part.rpartition(".")
        phase = _PHASE.get((str(n.kind), part))
        if phase is None or not chunk.startswith("l"):
            return 0.0
        layer = int(chunk[1:])
        took = known[phase, layer if n.kind == "F" else LAYERS - 1 - layer]
        return took * (scale if n.stream != COMPUTE else 1.0)

    return of


def play(policy: PlanPolicy, scale: float = 1.0, two: bool = False) -> TracedChunk:
    """Simulate the plan and cut the pair out of it."""
    plan = pair_plan(policy)
    of = seconds(plan, scale, two)
    shape = np.array([sum(of(n) for n, _ in s.covers) for s in plan.shapes])
    found = run(plan, shape[plan.shape])
    mine = plan.unit == 1
    start, end = found.start[0][mine], found.end[0][mine]
    compute = np.array([s.stream == COMPUTE for s in plan.shapes])[plan.shape][mine]
    took = shape[plan.shape][mine]
    span = float(end.max() - start[took > 0].min())
    return TracedChunk(span / LAYERS, float(took[compute].sum()) / LAYERS, float(took[~compute].sum()) / LAYERS)


def modelled(**cluster: object) -> float:
    """Milliseconds of a layer of the pair, all modelled: what eight more pairs take. cluster: other keys of it."""
    recompute = ["norm", "up_projection", "activation"]
    schedule = {"name": "1f1b-overlap", "merge": "template", "delay_wgrad": True, "recompute": recompute}
    table = _JOB | {"model": _JOB["model"] | {"vocab_size": 256}, "cluster": _JOB["cluster"] | cluster}
    table |= {"precision": {"compute": "fp8", "dispatch": "fp8", "combine": "bf16"}}
    few, many = (predict(job_from(table | {"schedule": schedule | {"microbatches": m}})).iteration_s for m in (4, 12))
    return 1e3 * (many - few) / 8 / LAYERS


def rows() -> list[tuple[str, float, float]]:
    """(what, published or wanted, ours), a layer's share in milliseconds, then shares of the span."""
    template = PlanPolicy(PassMerge.TEMPLATE, delay_wgrad=True)
    one, two = play(template), play(template, two=True)
    free = play(template, 0.0)
    out = [("chunk, streams 7 and 23 as one", PUBLISHED_MS, one.span), ("chunk, as two", PUBLISHED_MS, two.span)]
    out += [("chunk, all modelled", PUBLISHED_MS, modelled())]
    out += [("all-to-all x 0", WANTED_MS["x 0"], free.span)]
    out += [(f"all-to-all {k}", WANTED_MS[k], play(template, float(k[2:])).span) for k in ("x 1.5", "x 2")]
    out += [("serial: one stream", WANTED_MS["serial"], one.compute + one.wire)]
    gaps = sum(int(r["kernels"]) for r in table() if "comm" not in r["stream"]) * GAP_MS / LAYERS
    idle = [("7 and 23", two.compute - gaps), ("27", two.wire)]
    return out + [(f"idle of {k}, %", 100 * (1 - BUSY_MS[k] / PUBLISHED_MS), 100 * (1 - v / two.span)) for k, v in idle]
