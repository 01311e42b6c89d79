"""Is the simulator right? Calibrate on one plan of a job, predict another, run that, compare."""

from dataclasses import dataclass
from typing import Any

from ir.job import Job
from ir.job.run_options import JobRunOptions
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from piper_sim.study.validate.calibrating import ProfileCalibration, calibrate
from piper_sim.study.validate.runs import MeasuredSteps, PlanExecutor, PlanTools, ran
from piper_sim.study.validate.verdict import predicted, verdict

__all__ = ["MeasuredSteps", "PlanExecutor", "PlanTools", "PlanValidation", "ProfileCalibration", "validate"]


@dataclass(frozen=True, eq=False)
class PlanValidation:
    """A judged plan: as it was predicted, and as it ran. found: the object of `piper-sim validate`.

    peaks: predicted bytes of each rank; None where nothing is computed, or nobody knows before.
    """

    found: dict[str, Any]
    calibration: ProfileCalibration
    prediction: Prediction
    run: MeasuredSteps
    peaks: tuple[int, ...] | None


def validate(job: Job, tools: PlanTools, o: JobRunOptions) -> PlanValidation:
    """Calibrate, predict, run, compare. o: as of a run; steps: counted ones, behind those to warm up.

    Raises PiperError: what cannot be predicted or run (exit 2, 3), RankFailed (exit 4).
    """
    planned = predict(job).planned
    o.check()
    tools.executor.check(planned.prepared, planned.plan, o)
    calibration = calibrate(tools.executor, job, planned, o)
    peaks = tools.peak_bytes(planned.prepared, planned.plan) if o.real else None
    prediction = predicted(planned, calibration.profile, inline=calibration.inline)
    run = ran(tools.executor, planned.prepared, planned.plan, o, o.steps)
    found = verdict(prediction, run, calibration.profile, o, job.gate, inline=calibration.inline, peaks=peaks)
    return PlanValidation({**found, "calibrated_on": calibration.object()}, calibration, prediction, run, peaks)
