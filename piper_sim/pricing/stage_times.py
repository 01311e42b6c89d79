"""Seconds that a job gives by stage (`costs.stage_times`), instead of modelled ones."""

from collections.abc import Mapping
from typing import Any

from ir.core.errors import job_error, nearest
from ir.core.grid import quantised
from ir.core.ops import Pass
from ir.core.order import FloatArray
from ir.graph.graph import Graph
from piper_sim.pricing.structure import CostShare


def scaled_to_stage_times(
    graph: Graph, node: FloatArray, wire: FloatArray, times: Mapping[str, object]
) -> tuple[FloatArray, FloatArray]:
    """Node and message seconds scaled so that each stage's F, I (with recomputation) and W take the given times.

    A stage's time is what it takes by itself, its all-to-alls included: they are scaled along.
    """
    stages = graph.stages
    node, wire = node.copy(), wire.copy()
    for key, seconds in given_times(times, stages).items():
        for s in range(stages):
            rows = [i for i, n in enumerate(graph.nodes) if n.stage == s and n.kind in _PASSES[key]]
            total = float(node[rows].sum() + wire[rows].sum())
            if total > 0:
                node[rows] *= seconds[s] / total
                wire[rows] *= seconds[s] / total
            compute = [i for i in rows if graph.nodes[i].message is None]
            if compute:  # the largest takes what rounding leaves over, or all where the model has nothing to do
                most = max(compute, key=lambda i: node[i, : CostShare.TP].sum())
                share = (
                    CostShare.COMPUTE
                    if node[most, CostShare.COMPUTE] >= node[most, CostShare.RECOMPUTE]
                    else CostShare.RECOMPUTE
                )
                rest = seconds[s] - float(quantised(node[rows]).sum() + quantised(wire[rows]).sum())
                node[most, share] = max(0.0, float(quantised(node[most, share])) + rest)
    return node, wire


_PASSES = {"F": (Pass.F,), "I": (Pass.I, Pass.R), "W": (Pass.W,)}


def given_times(times: Mapping[str, object], stages: int) -> dict[str, list[float]]:
    """Seconds by pass and stage. B alone is half I, half W; beside one of them it says the other.

    Raises PiperError (job): `costs.stage_times` that are not times, or do not add up.
    """
    known = ("F", "B", "I", "W", "p2p")
    for key in times:
        if key not in known:
            raise job_error("costs.stage_times", f"unknown key {key!r}", nearest(key, known), ", ".join(known))
    out = {k: given_numbers(k, v, stages) for k, v in times.items() if k != "p2p"}
    whole = out.pop("B", None)
    if whole is not None:
        i = out.get("I") or [b - w for b, w in zip(whole, out.get("W", [b / 2 for b in whole]), strict=True)]
        w = out.get("W") or [b - x for b, x in zip(whole, i, strict=True)]
        if min(i + w) < 0 or any(abs(x + y - b) > 1e-9 * b for x, y, b in zip(i, w, whole, strict=True)):
            raise job_error("costs.stage_times", "B is not I + W", "drop B, or let I + W = B")
        out |= {"I": i, "W": w}
    return out


def given_numbers(key: str, value: Any, count: int) -> list[float]:
    """As many seconds as asked for, of one or a list. Raises PiperError (job): they are none."""
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    good = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < float("inf") for v in values)
    if not good or len(values) != count:
        raise job_error("costs.stage_times", f"{key} = {value!r}", allowed=f"seconds, or a list of {count} of them")
    return [float(v) for v in values]
