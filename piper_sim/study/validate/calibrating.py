"""Measuring a profile on a plan of the job that is not the judged one: another schedule, another microbatch count."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cost_models import DeviceHardware
from cost_models.profile.profile import OpEntry, Profile, ProfileMachine, plan_keys
from ir.core.errors import PiperError, job_error
from ir.job import Job
from ir.job.build import PreparedJob
from ir.job.cache import PLANS
from ir.job.run_options import JobRunOptions
from ir.plan.text import plan_digest
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.measured import reclassed
from piper_sim.pricing.prepare import prepare_priced
from piper_sim.study.planned import PlannedJob
from piper_sim.study.validate.runs import MeasuredSteps, PlanExecutor, ran
from piper_sim.study.validate.samples import host_seconds, link_samples, measured, node_samples

OTHERS = ("1f1b", "gpipe", "zbv", "dualpipev")  # the latter two: what lies on a rank decides its update
LEAST_STEPS = 3


@dataclass(frozen=True, eq=False)
class ProfileCalibration:
    """A profile and the run it comes from. inline: whether the host computed itself."""

    profile: Profile
    run: MeasuredSteps
    inline: bool

    def object(self) -> dict[str, object]:
        """`calibrated_on` of validate's object."""
        p = self.run.prepared
        return {
            "schedule": p.schedule,
            "microbatches": p.mbs,
            "stages": p.stages,
            "steps": len(self.run.step_s),
            "plan_digest": plan_digest(self.run.plan),
            "host_s": self.profile.host_s,
            "machine": self.profile.machine.fingerprint,
        }


def calibrate(executor: PlanExecutor, job: Job, judged: PlannedJob, o: JobRunOptions) -> ProfileCalibration:
    """Run another plan of the job and measure; the judged one is not run. Raises PiperError, as a run does."""
    hardware = judged.hardware
    prepared = elsewhere(job, judged.prepared, hardware)
    plan = prepared.plan()
    r = ran(executor, prepared, plan, o, max(o.steps, LEAST_STEPS))
    inline = not o.real or bool(r.parts)
    return ProfileCalibration(profile_from(r, hardware, o, inline), r, inline)


def profile_from(r: MeasuredSteps, hardware: DeviceHardware, o: JobRunOptions, inline: bool) -> Profile:
    """What a run says of its ops and messages."""
    model = CostModel(r.prepared, hardware)
    samples = reclassed(r.plan.graph, model.job, node_samples(r, model, o.emulate))
    ops = {c: OpEntry(measured(x)) for c, x in samples.items()}
    links = {c: measured(x) for c, x in link_samples(r, model).items()}
    return Profile.of(ProfileMachine.here(), ops, links, host_seconds(r) if inline else None)


def elsewhere(job: Job, judged: PreparedJob, hardware: DeviceHardware) -> PreparedJob:
    """Another plan of the job, which has all kinds of ops and messages that the judged one has, if any has them.

    Raises PiperError (job): no other plan can be built.
    """
    wanted = plan_keys(judged.plan()).keys()
    first: PreparedJob | None = None
    failed: PiperError | None = None
    for other in _others(job, judged):
        try:
            prepared = prepare_priced(other, hardware)
            plan = prepared.plan()
            PLANS.check(plan, inline=True)
        except PiperError as error:
            failed = error
            continue
        if wanted <= plan_keys(plan).keys():
            return prepared
        first = first or prepared
    if first is None:
        message = "there is no second plan of this job to calibrate on, and the judged one may not be it"
        fix = "--set schedule.name=1f1b"
        why = "" if failed is None else f" ({failed.message})"
        raise job_error("schedule.name", message + why, fix, file=job.file)
    return first


def _others(job: Job, judged: PreparedJob) -> Iterator[Job]:
    """Jobs with another schedule and another number of microbatches; last the same schedule with another number."""
    s = job.schedule
    mbs = next(m for m in (judged.mesh.sizes["pp"] + k for k in (1, 2)) if m != judged.mbs)
    layers = job.parallel.layers if isinstance(job.parallel.layers, str) else "balanced"
    for name in OTHERS:
        if name != judged.schedule:
            other = replace(
                s, name=name, directives=None, builder=None, csv=None, microbatches=mbs, stages_per_rank=None
            )
            yield replace(job, schedule=other, parallel=replace(job.parallel, layers=layers))
    yield replace(job, schedule=replace(s, microbatches=mbs))
