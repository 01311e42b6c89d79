"""Helpers of the validate tests: small emulated validations, and what is done to them afterwards."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.profile.profile import MeasuredCost, OpEntry, Profile
from executor.launch import run as cli
from executor.measure.peak_bytes import peak_bytes
from ir.core.order import IntArray
from ir.job import load_job
from ir.job.run_options import JobRunOptions
from ir.plan.plan import OpLists, Plan
from piper_sim.engine import EngineScenario
from piper_sim.study.validate import PlanTools, PlanValidation, validate
from piper_sim.study.validate.runs import MeasuredSteps
from piper_sim.study.validate.times import TraceTimes
from piper_sim.study.validate.verdict import verdict
from tests.executor.runs import job_file

TOOLS = PlanTools(cli, peak_bytes)
F = 0.04
TWO = ("model.num_hidden_layers=2", "schedule.microbatches=2")  # every op and every edge is on the critical path
TRIES = 3


@lru_cache(maxsize=8)
def validation(
    *sets: str, steps: int = 3, emulate: float | None = F, comm: float = 0.0, within: float = 0.05
) -> PlanValidation:
    """Validate the job of the run tests, judged by the quickest step: what other processes do to one is not its own.

    Tried again where they did it to all of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = str(job_file(Path(folder)))
        o = JobRunOptions(2, steps, watchdog_s=30.0, emulate=emulate, emulate_comm=comm)
        for _ in range(TRIES):
            found = validate(load_job(file, sets), TOOLS, o)
            v = replace(found, found={**found.found, **judged_again(found), "replay": found.found["replay"]})
            if abs(v.found["iteration"]["error"]) <= within:
                break
    return v


def quickest(r: MeasuredSteps) -> MeasuredSteps:
    """Only a run's quickest step."""
    k = int(np.argmin(r.step_s))
    t = r.times
    times = TraceTimes(t.post[k : k + 1], t.start[k : k + 1], t.end[k : k + 1])
    parts = {(0, op): seconds for (step, op), seconds in r.parts.items() if step == k}
    return replace(r, times=times, step_s=r.step_s[k : k + 1], parts=parts)


def judged_again(v: PlanValidation, **changed: Any) -> dict[str, Any]:
    """The verdict with another prediction or profile."""
    c = v.calibration
    o = JobRunOptions(2, emulate=v.found["emulate_s"])
    gate = v.prediction.prepared.job.gate
    prediction, profile = changed.get("prediction", v.prediction), changed.get("profile", c.profile)
    peaks = changed.get("peaks", v.peaks)
    return verdict(prediction, quickest(v.run), profile, o, gate, inline=c.inline, peaks=peaks)


def scaled(p: Profile, factor: float) -> Profile:
    """A profile of ops that all take so much longer."""

    def longer(m: MeasuredCost) -> MeasuredCost:
        return replace(m, median_s=m.median_s * factor)

    ops = {k: OpEntry(longer(e.time)) for k, e in p.ops.items()}
    return replace(p, ops=ops, links={k: longer(m) for k, m in p.links.items()})


def without_wait(scenario: EngineScenario, op: str, on: str) -> EngineScenario:
    """The plan's op no longer waits for another."""
    plan = scenario.plan
    rows, items = plan.waits.rows(), plan.waits.items
    keep = np.array([(plan.text(i), plan.text(w)) != (op, on) for i, w in zip(rows, items, strict=True)])
    assert keep.sum() == len(keep) - 1
    return replace(scenario, plan=_rewaited(plan, rows[keep], items[keep]))


def _rewaited(plan: Plan, rows: IntArray, items: IntArray) -> Plan:
    return replace(plan, waits=OpLists.of(len(plan), rows, items))


def classes(found: dict[str, Any], prefixes: Sequence[str]) -> list[float]:
    """Errors of op classes whose names start so."""
    return [x["error"] for k, x in found["ops"].items() if k.startswith(tuple(prefixes))]
