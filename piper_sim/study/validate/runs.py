"""One run of a plan for `validate`: what the executor is asked for, and what is kept of its answer."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ir.core.order import FloatArray
from ir.job.build import PreparedJob
from ir.job.run_options import JobRunOptions
from ir.plan.plan import Plan
from ir.trace.trace import Trace
from piper_sim.engine import EngineScenario
from piper_sim.folding import RankClasses, carry, unfold
from piper_sim.folding.ground import RankPositions
from piper_sim.study.validate.times import TraceTimes

WARM_UP = 3  # steps of a run that are not counted, at least 1: the second begins where the first has ended
WARM_UP_EMULATED = 1

Parts = Mapping[tuple[int, int], Sequence[float]]  # (step, op) → seconds of each node it covers


class PlanExecutor(Protocol):
    """`executor.launch.run`, which only `piper_sim.app.cli` may reach."""

    def run(self, prepared: PreparedJob, plan: Plan, options: JobRunOptions) -> tuple[dict[str, Any], Trace]:
        """Run a plan."""

    def check(self, prepared: PreparedJob, plan: Plan, options: JobRunOptions) -> object:
        """Refuse what cannot be run; nobody asks for what it returns."""


@dataclass(frozen=True)
class PlanTools:
    """What needs PyTorch. peak_bytes: the most bytes each rank of a run would need, found without running it; None
    where nobody knows before."""

    executor: PlanExecutor
    peak_bytes: Callable[[PreparedJob, Plan], tuple[int, ...] | None]


def warm_up(o: JobRunOptions) -> int:
    """Steps that are not counted."""
    return WARM_UP if o.real else WARM_UP_EMULATED


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """A run's counted steps. step_s: seconds of each. parts: empty where the host computes nothing itself.

    whole: the plan's, with a program for every rank, which times and parts are about. found: `piper-sim run`'s object.
    """

    prepared: PreparedJob
    plan: Plan
    whole: EngineScenario
    found: Mapping[str, Any]
    trace: Trace
    times: TraceTimes
    step_s: FloatArray
    parts: Parts

    def usual(self) -> int:
        """The step nearest the median."""
        return int(np.argmin(np.abs(self.step_s - np.median(self.step_s))))


def ran(executor: PlanExecutor, prepared: PreparedJob, plan: Plan, o: JobRunOptions, steps: int) -> MeasuredSteps:
    """Run a plan, with so many counted steps."""
    before = warm_up(o)
    with tempfile.TemporaryDirectory(prefix="piper-parts-") as name:
        asked = replace(o, ranks=prepared.ranks, steps=before + steps, parts=Path(name))
        found, trace = executor.run(prepared, plan, asked)
        at = RankPositions(prepared.mesh)
        parts = _parts(Path(name), at, len(plan), before)
    each = RankClasses.each(len(at))
    whole = EngineScenario(unfold(plan, each, prepared.mesh), *carry(plan, each))
    ranks = (at.offset[:, None] + np.arange(at.programs) * at.stride).ravel()
    times = TraceTimes.of(whole.plan, trace, ranks)
    return MeasuredSteps(prepared, plan, whole, found, trace, times.behind(before), times.step_s[before - 1 :], parts)


def _parts(folder: Path, at: RankPositions, ops: int, warm_up: int) -> Parts:
    """From the ranks' files, whose ops are the plan's."""
    out = {}
    for file in folder.glob("parts-*.json"):
        first = at.seat(int(file.stem.partition("-")[2])).position * ops
        for step, op, seconds in json.loads(file.read_text(encoding="utf-8")):
            if step >= warm_up:
                out[step - warm_up, first + op] = seconds
    return out
