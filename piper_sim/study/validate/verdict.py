"""A plan predicted from a profile, beside measured: errors by iteration, ops and peak bytes, and what the gates say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cost_models.profile.profile import Profile, lookup
from ir.core.grid import quantised
from ir.core.order import FloatArray
from ir.job.run_options import JobRunOptions
from ir.job.schema import JobGate
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind
from ir.plan.text import plan_digest
from piper_sim.compiled.choose import steady
from piper_sim.engine import EngineScenario
from piper_sim.folding import RankClasses
from piper_sim.memory.reserved import bands
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.planned import PlannedJob
from piper_sim.study.predict import simulated
from piper_sim.study.prediction import Prediction
from piper_sim.study.validate.runs import MeasuredSteps
from piper_sim.study.validate.samples import Samples, link_samples, measured, node_samples
from piper_sim.study.validate.times import alone, dispatch

Pair = dict[str, float]


def error(predicted: float, measured: float) -> float:
    """Signed and relative.

    >>> error(1.1, 1.0) > 0, error(0.0, 0.0), error(2.0, 0.0)
    (True, 0.0, 1.0)
    """
    return predicted / measured - 1 if measured else float(predicted > 0)


def seconds(predicted: float, measured: float) -> Pair:
    """Two durations of one thing."""
    return {"predicted_s": predicted, "measured_s": measured, "error": error(predicted, measured)}


def verdict(
    p: Prediction,
    r: MeasuredSteps,
    profile: Profile,
    o: JobRunOptions,
    gate: JobGate,
    *,
    inline: bool,
    peaks: Sequence[int] | None,
) -> dict[str, Any]:
    """What `validate` prints, but for what the profile was measured on. peaks: bytes of each rank, where known."""
    step_s = float(np.median(r.step_s))
    samples = node_samples(r, p.planned.model, o.emulate)
    ops = compared(samples, profile)
    found = r.found["memory"]["peak_allocated_bytes"]
    memory = None if found is None or peaks is None else _memory(peaks, found)
    iteration, bare = seconds(p.iteration_s, step_s), without_communication(p)
    weights = [sum(samples[c]) for c in ops]
    off = {
        "iteration": abs(iteration["error"]),
        "op_median": half([abs(x["error"]) for x in ops.values()], weights),
        "memory": None if memory is None else max(abs(x["error"]) for x in memory.values()),
    }
    gates = {k: _gate(x, getattr(gate, k)) for k, x in off.items()}
    return {
        "schema_version": 1,
        "schedule": p.prepared.schedule,
        "microbatches": p.prepared.mbs,
        "ranks": p.prepared.ranks,
        "steps": len(r.step_s),
        "emulate_s": o.emulate,
        "iteration": iteration,
        "without_communication": {"predicted_s": bare, "error": error(bare, step_s)},
        "replay": seconds(*replayed(p, r, inline=inline)) if len(r.step_s) > 1 else None,
        "ops": ops,
        "links": compared(link_samples(r, p.planned.model), profile),
        "memory": memory,
        "allocator": allocator(p, r.found),
        "gates": gates,
        "passed": all(g["passed"] is not False for g in gates.values()),
        "cost_source": p.planned.sources.word,
        "plan_digest": plan_digest(p.plan),
    }


def compared(samples: Samples, profile: Profile) -> dict[str, Pair]:
    """By class: the profile's seconds, and the median of a run's. Classes that take no time are left out."""
    out = {}
    for name, values in sorted(samples.items()):
        found, took = lookup(profile, name), measured(values).median_s
        if found is not None and found.seconds + took > 0:
            out[name] = seconds(found.seconds, took)
    return out


def half(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """The value that half of the weight does not exceed.

    >>> half([0.1, 0.2, 0.9], [1.0, 3.0, 1.0]), half([], [])
    (0.2, None)
    """
    if not values:
        return None
    by = np.argsort(values)
    total = np.cumsum(np.array(weights)[by])
    return float(np.array(values)[by][np.searchsorted(total, total[-1] / 2)])


def _memory(predicted: Sequence[int], found: Mapping[str, int]) -> dict[str, dict[str, float]]:
    pairs = {r: (predicted[int(r)], size) for r, size in found.items()}
    return {r: {"predicted_bytes": a, "measured_bytes": b, "error": error(a, b)} for r, (a, b) in pairs.items()}


def allocator(p: Prediction, found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]] | None:
    """By rank, what torch's allocator has counted on its GPU beside what is predicted; None where it counts nothing.

    found: the object of `piper-sim run`.
    """
    if (counted := found["memory"]["allocator"]) is None:
        return None
    places, m = RankPlacement.of(p.plan), p.planned.memory
    said = {"allocated": m.peak.tolist(), "reserved": [band.middle for band in bands(p.planned.reserved)]}
    return {
        kind: _memory([peaks[places.program(r)] for r in range(places.ranks)], {r: c[kind] for r, c in counted.items()})
        for kind, peaks in said.items()
    }


def _gate(off: float | None, limit: float) -> dict[str, Any]:
    return {"limit": limit, "error": off, "passed": None if off is None else off <= limit}


def predicted(p: PlannedJob, profile: Profile, *, inline: bool) -> Prediction:
    """The planned job at measured seconds. inline: the host computes itself, else it is what the job says.

    Nothing is slowed down beyond what was measured while the other ranks ran, and nothing takes what the job says.
    """
    job = p.prepared.job
    host = "inline" if inline else job.costs.host_model
    costs = replace(job.costs, interference="none", host_model=host, stage_times=None)
    prepared = replace(p.prepared, job=replace(job, costs=costs))
    return simulated(replace(p, prepared=prepared, model=CostModel(prepared, p.hardware, profile)))


def without_communication(p: Prediction) -> float:
    """Seconds of a step in which messages take no time and the host neither: what knows only compute would say."""
    scenario = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    if scenario.host is not None:
        scenario = replace(scenario, host=replace(scenario.host, launch=np.zeros_like(scenario.host.launch)))
    compute = scenario.plan.kind == OpKind.COMPUTE
    return _period(scenario, np.where(compute, p.costs.duration, 0.0), p.prepared.policy.clip)


def replayed(p: Prediction, r: MeasuredSteps, *, inline: bool) -> tuple[float, float]:
    """(simulated, measured) seconds of a step, means over a run's steps: every op takes what it took in each.

    What an op waited for is not in what it took: so this tests order, waits and messages, and predicts nothing.
    """
    each = RankClasses.each(len(p.planned.classes.of))
    scenario = scenario_of(p.planned.model, p.plan, each, p.costs.duration)
    took, host = alone(r.whole, r.times), dispatch(r.whole, r.times)
    found = []
    for step in range(1, len(took)):
        if inline and scenario.host is not None:
            scenario = replace(scenario, host=replace(scenario.host, launch=quantised(host[step])))
        found.append(_period(scenario, quantised(took[step]), p.prepared.policy.clip))
    return float(np.mean(found)), float(np.mean(r.step_s[1:]))


def _period(scenario: EngineScenario, duration: FloatArray, clip: bool) -> float:
    run, _ = steady(scenario, duration, clip)
    return float(run.end[-1].max() - run.end[-2].max())
