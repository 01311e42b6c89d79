"""Is the simulator right? Calibrate on one plan of a job, predict another, run that, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ir.job import Job
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from piper_sim.study.validate.calibrating import Calibration, calibrate
from piper_sim.study.validate.judging import predicted
from piper_sim.study.validate.runs import Executor, Options, Ran, Tools, ran
from piper_sim.study.validate.verdict import verdict

__all__ = ["Calibration", "Executor", "Options", "Ran", "Tools", "Validation", "validate"]


@dataclass(frozen=True, eq=False)
class Validation:
    """A judged plan: as it was predicted, and as it ran. found: the object of `piper-sim validate`."""

    found: dict[str, Any]
    calibration: Calibration
    prediction: Prediction
    run: Ran


def validate(
    job: Job, sets: Sequence[str], tools: Tools, o: Options, known: dict[str, Calibration] | None = None
) -> Validation:
    """Calibrate, predict, run, compare. sets: the overrides that the job was loaded with.

    known: calibrations of the same model and options, by plan digest; it is used and added to.

    Raises PiperError: what cannot be predicted or run (exit 2, 3), RankFailed (exit 4).
    """
    planned = predict(job).planned
    tools.executor.check_numbers(o.steps, o.watchdog_s, o.emulate, o.emulate_comm)
    tools.executor.check(planned.prepared, planned.plan, sets, ranks=o.ranks, backend=o.backend, real=o.real)
    calibration = calibrate(tools, job, planned, sets, o, {} if known is None else known)
    prediction = predicted(planned, calibration.profile, inline=calibration.inline)
    run = ran(tools, planned.prepared, planned.plan, sets, o, o.steps)
    found = verdict(prediction, run, calibration.profile, o, job.gate, inline=calibration.inline)
    return Validation({**found, "calibrated_on": calibration.object()}, calibration, prediction, run)
