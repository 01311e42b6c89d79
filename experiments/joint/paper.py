"""Piper's own experiments (arXiv:2606.11169) on A100 nodes with EFA, as Piper runs experts and as they are routed.

    python -m experiments.joint paper

Figures: data/piper.csv. Where ranks lay is not published: `across`, a replica is a node, and tokens and gradients cross
the network (what Piper's launcher asks for); `inside`, a stage's replicas share a node. Piper's expert kernel works on
every routed row for each expert it holds: `padded` multiplies the experts' seconds by their number; `routed` is what a
kernel of groups takes. Nothing is fitted to these figures.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.published.rows import lines
from ir.core.grid import quantised
from ir.core.order import FloatArray
from ir.directives import ReplicateDirective
from ir.job.load import job_from
from ir.plan.plan import OpKind
from piper_sim.pricing.costs import OpCosts
from piper_sim.pricing.prepare import hardware_of
from piper_sim.pricing.routing import price
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.planned import PlannedJob, fits
from piper_sim.study.predict import planned, played
from piper_sim.study.prediction import Prediction

ALIKE = {"config": "qwen3-30b-a3b", "seq_len": 512, "head_dim": 64, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, object]] = {
    "1B": ALIKE
    | {"num_hidden_layers": 16, "hidden_size": 1024, "num_attention_heads": 16}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3584},
    "9B": ALIKE
    | {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32}
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7168},
}
NODE_GBPS = 400  # four EFA devices of 100 Gb/s
BATCHES = (4, 8, 12, 16, 24, 32, 40, 48)  # sequences of a microbatch


def job(
    model: str, pp: int, name: str, *, ep: int = 4, zero: int = 0, batch: int = 4, inside: bool = False
) -> dict[str, Any]:
    """An arm as a job: four replicas, of `batch` sequences a microbatch."""
    per_node, order = (8, "tp cp ep dp pp") if inside else (pp, "pp tp cp ep dp")
    return {
        "model": MODELS[model],
        "cluster": {"gpu": "a100-sxm-80gb", "gpus_per_node": per_node, "nic_Gbps": NODE_GBPS / per_node},
        "parallel": {"pp": pp, "dp": 4, "ep": ep, "zero": zero, "layers": "even", "order": order},
        "schedule": {"name": name, "microbatches": 2 * pp, "microbatch_size": batch},
        "costs": {"dispatcher": "nccl"},
    }


def padded_seconds(p: PlannedJob) -> FloatArray:
    """Seconds that each op takes longer where every expert works on all routed rows."""
    assert p.prepared.config.moe is not None
    nodes, count = p.plan.graph.nodes, p.prepared.config.moe.experts
    mine = {i for i, n in enumerate(nodes) if n.part.endswith(".experts") and n.message is None and not n.once}
    seconds = {i: sum(p.model.node_shares(nodes[i])) for i in mine}
    compute = [s.covers if s.kind is OpKind.COMPUTE else () for s in p.plan.shapes]
    more = np.array([sum(seconds.get(n, 0.0) for n, _ in covers) for covers in compute]) * (count - 1)
    return quantised(more)[p.plan.shape]


def timed(p: PlannedJob, *, padded: bool = False, alone: bool = False) -> Prediction:
    """As `piper_sim.study.predict.timed`, with experts as Piper runs them, and with nothing slowed by compute."""
    costs = price(p.routing, p.plan, p.model, p.classes)
    if padded:
        costs = OpCosts(costs.duration + padded_seconds(p), costs.shares)
    scenario = scenario_of(p.model, p.plan, p.classes, costs.duration)
    return played(p, costs, replace(scenario, slow=None) if alone else scenario)


def plan_of(table: dict[str, Any]) -> PlannedJob:
    """A job planned."""
    asked = job_from(table)
    return planned(asked, hardware_of(asked))


def throughput(*, padded: bool, inside: bool) -> dict[str, float]:
    """Ratios and tokens per second of the arms that were published."""

    def took(model: str, pp: int, name: str, ep: int = 4) -> float:
        return timed(plan_of(job(model, pp, name, ep=ep, inside=inside)), padded=padded).iteration_s

    small = {name: took("1B", 8, name) for name in ("1f1b", "interleaved-1f1b", "dualpipev")}
    large = {name: took("9B", 4, name) for name in ("interleaved-1f1b", "dualpipev")}
    return {
        "1B, interleaved-1f1b / 1f1b": small["1f1b"] / small["interleaved-1f1b"],
        "1B, dualpipev / 1f1b": small["1f1b"] / small["dualpipev"],
        "9B, dualpipev / interleaved-1f1b": large["interleaved-1f1b"] / large["dualpipev"],
        "1B, 1f1b, thousand tokens/s": 4 * 16 * 4 * 512 / took("1B", 8, "1f1b", ep=1) / 1e3,
    }


def slowed(stream: str) -> tuple[float, float]:
    """(the slowest all-to-all's seconds over those alone, seconds of the step), reductions on this stream.

    9B under DualPipeV. Links are shared max-min; what compute takes from messages is left out.
    """
    table = job("9B", 4, "dualpipev")
    table["costs"]["interference"] = "maxmin"
    p = plan_of(table)
    theirs = [replace(d, reduce_stream=stream) if isinstance(d, ReplicateDirective) else d for d in p.prepared.strategy]
    made = timed(PlannedJob.of(replace(p.prepared, strategy=tuple(theirs)), p.hardware), alone=True)
    plan, count = made.plan, len(made.plan)
    exchange = {n for n, x in enumerate(plan.graph.nodes) if x.part.endswith((".dispatch", ".combine"))}
    tokens = [s.kind is not OpKind.COMPUTE and any(n in exchange for n, _ in s.covers) for s in plan.shapes]
    mine = np.array(tokens)[plan.shape]
    took = (made.run.end - made.run.start).ravel()[-count:][mine] / made.costs.duration[:count][mine]
    return float(took.max()), made.iteration_s


def largest(zero: int) -> int:
    """Sequences of the largest microbatch of `BATCHES` with which 9B fits: 8 stages of 4 replicas with all experts."""
    return max((b for b in BATCHES if fits(plan_of(job("9B", 8, "1f1b", ep=1, zero=zero, batch=b)))), default=0)


def rows() -> Iterator[tuple[str, float, float]]:
    """(arm, published, ours); nan where nothing was published."""
    found = {row["arm"]: float(row["value"]) for row in lines(Path(__file__).parent / "data" / "piper.csv")}
    for inside in (False, True):
        for padded in (True, False):
            label = f"{'inside' if inside else 'across'}, {'padded' if padded else 'routed'}: "
            yield from ((label + k, found[k], x) for k, x in throughput(padded=padded, inside=inside).items())
    apart, together = slowed("dp"), slowed("ep")
    arm = "all-to-all beside all-reduce / alone"
    yield arm, found[arm], apart[0]
    yield f"{arm}, on one stream", float("nan"), together[0]
    yield "step on one stream / on two", float("nan"), together[1] / apart[1]
    for zero in range(4):
        arm = f"9B, zero {zero}, largest microbatch"
        yield arm, found.get(arm, float("nan")), largest(zero)
