"""Is a step as long as it was predicted to be?"""

from collections.abc import Mapping

from executor.launch import run as executor
from executor.measure.peak_bytes import peak_bytes
from ir.job.run_options import JobRunOptions
from piper_sim.app.doctor.runs import PLANS, job_of, wrong
from piper_sim.study.validate import MeasuredSteps, PlanTools, validate

STEPS, EMULATE_S = 5, 0.02


def forecast() -> Mapping[str, object]:
    """A step of ops that take a given time is as long as predicted from another plan's, within the job's gate.

    Where the steps of a run are further apart than that, nothing is decided. Raises PiperError: it is not as long.
    """
    job = job_of(PLANS["2 ranks, zb1p"], "fp32")
    v = validate(job, PlanTools(executor, peak_bytes), JobRunOptions(2, STEPS, emulate=EMULATE_S))
    iteration, limit = v.found["iteration"], job.gate.iteration
    spread = max(apart_from_median(v.run), apart_from_median(v.calibration.run))
    found = {**iteration, "spread": spread}
    if abs(iteration["error"]) <= limit:
        return found
    if spread > limit:
        return {**found, "undecided": f"steps are up to {spread:.0%} from their median: the machine is busy"}
    raise wrong(f"a step is predicted {iteration['error']:+.1%} from what it takes", f"at most {limit:.0%}")


def apart_from_median(r: MeasuredSteps) -> float:
    """How far the steps of a run are from the usual one, at most, relative to it."""
    usual = r.step_s[r.usual()]
    return float(abs(r.step_s / usual - 1).max())
