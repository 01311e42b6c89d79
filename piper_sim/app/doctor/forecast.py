"""Is a step as long as it was predicted to be?"""

from collections.abc import Mapping

from executor.measure.peak_bytes import peak_bytes
from ir.job.run_options import JobRunOptions
from piper_sim.app.doctor.runs import MachineRanks, wrong
from piper_sim.study.validate import MeasuredSteps, PlanTools, validate

STEPS, EMULATE_S = 5, 0.02


def forecast(at: MachineRanks) -> Mapping[str, object]:
    """A step of ops that take a given time is as long as predicted from another plan's, within the job's gate.

    Where the steps of a run are further apart than that, nothing is decided. Raises PiperError: it is not as long.
    """
    job = at.prepared({"parallel": {"pp": 2, "dp": at.ranks // 2}, "schedule": {"name": "zb1p"}}, "fp32").job
    options = JobRunOptions(at.ranks, STEPS, at.backend, emulate=EMULATE_S)
    v = validate(job, PlanTools(at, peak_bytes), options)
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
