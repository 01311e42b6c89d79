"""One calibration: what a job needs measured, measured here or imported, put into one profile, and what it covers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from cost_models import DeviceHardware
from cost_models.profile.file import load_profile
from cost_models.profile.profile import CostSource, Profile
from ir.core.errors import PiperError, usage_error
from ir.job import Job
from ir.job.build import PreparedJob, blaming
from ir.job.run_options import JobRunOptions
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.sources import CostSources, sources
from piper_sim.study.calibrate import assemble
from piper_sim.study.calibrate.kineto import read_kineto
from piper_sim.study.calibrate.nccl_tests import read_nccl_tests
from piper_sim.study.calibrate.pairs import read_pairs
from piper_sim.study.validate.calibrating import elsewhere
from piper_sim.study.validate.runs import PlanExecutor, ran
from piper_sim.study.validate.samples import host_seconds

HOST_STEPS = 5


class ProfileMeasurer(Protocol):
    """`executor.measure.calibrate`, which only `piper_sim.app.cli` may reach."""

    def measure(
        self, sizes: Sequence[assemble.Size], *, processes: int, backend: str, repeats: int, by: str, watchdog_s: float
    ) -> assemble.ProfileSamplesLike:
        """Time ops and messages."""

    def devices(self, backend: str) -> int:
        """What there is to compute on."""

    def refuse_processes(self, backend: str, processes: int, ranks: int) -> None:
        """Refuse more processes than ranks or GPUs."""

    def refuse_modules(self, prepared: PreparedJob) -> None:
        """Refuse what is not to be timed as modules."""


@dataclass(frozen=True)
class ProfileOptions:
    """Flags of `calibrate`. others: further sizes of the job, by name. kineto, nccl, pairs: files to read instead of
    measuring. onto: a profile that what is new is laid over.
    """

    processes: int | None = None
    backend: str = "gloo"
    repeats: int = 20
    by: str = "auto"
    watchdog_s: float = 60.0
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)
    kineto: Sequence[str] = ()
    nccl: Sequence[str] = ()
    pairs: str | None = None
    onto: str | None = None

    @property
    def imports(self) -> bool:
        """Whether files are read, and nothing is run."""
        return bool(self.kineto or self.nccl or self.pairs)


@dataclass(frozen=True)
class ProfileResult:
    """A profile, and how much of the job's own plan it covers. by: "modules", "kernels", or "" where nothing ran."""

    profile: Profile
    covers: CostSources
    by: str
    processes: int

    def object(self, path: str | None) -> dict[str, Any]:
        """What `piper-sim calibrate` prints. path: where the profile went."""
        p = self.profile
        return {
            "schema_version": 1,
            "profile": path,
            "ops": len(p.ops),
            "links": len(p.links),
            "fit_error": p.fit_error,
            "fingerprint": p.machine.fingerprint,
            "machine": asdict(p.machine),
            "origins": list(p.origins),
            "by": self.by or None,
            "processes": self.processes or None,
            "host_s": p.host_s,
            "pairs": len(p.pairs),
            "curves": {
                name: {
                    "latency_s": c.latency_s,
                    "bytes_per_s": c.bytes_per_s if c.pieces[-1].beta_s_per_byte else None,
                    "knees_bytes": [piece.last for piece in c.pieces[:-1]],
                    "error": c.error,
                }
                for name, c in sorted(p.curves.items())
            },
            "cost_source": self.covers.word,
            "cost_shares": self.covers.shares,
            "missing": [
                r.name for r in self.covers.rows if r.source is CostSource.MODELLED and r.seconds
            ],  # dearest first
        }


def calibrate(
    job: Job,
    sets: Sequence[str],
    asked: ProfileOptions,
    stopwatch: ProfileMeasurer | None,
    executor: PlanExecutor | None,
) -> ProfileResult:
    """Measure, or read what others measured. The job's own plan is never run.

    Raises PiperError: what cannot be measured or read (exit 2), RankFailed (exit 4).
    """
    job = assemble.without_profile(job)
    hardware = hardware_of(job)
    base = None if asked.onto is None else load_profile(asked.onto, "--onto")
    with blaming(job):
        prepared = prepare_priced(job, hardware)
    by, processes = "", 0
    if asked.imports:
        new = _imported(asked, prepared, hardware)
    else:
        assert stopwatch is not None and executor is not None
        processes = _processes(asked, prepared, stopwatch)
        sizes = assemble.sizes_of(job, sets, prepared, hardware, asked.others)
        by = _by(asked, sizes, stopwatch)
        timed = stopwatch.measure(
            sizes,
            by=by,
            watchdog_s=asked.watchdog_s,
            processes=processes,
            backend=asked.backend,
            repeats=asked.repeats,
        )
        host_s = None
        if processes == prepared.ranks and asked.backend == "gloo":
            host_s = _host_seconds(executor, job, asked.watchdog_s)
        new = assemble.profile_of(timed, sizes, host_s, by)
    profile = new if base is None else assemble.laid_over(new, base, "--onto", asked.onto)
    found = sources(prepared.plan(), CostModel(prepared, hardware, profile))
    return ProfileResult(profile, found, by, processes)


def _imported(asked: ProfileOptions, prepared: PreparedJob, hardware: DeviceHardware) -> Profile:
    """What the files say, the later laid over the earlier."""
    found = [read_kineto(asked.kineto, prepared, hardware)] if asked.kineto else []
    found += [read_nccl_tests(asked.nccl)] if asked.nccl else []
    found += [read_pairs(asked.pairs)] if asked.pairs else []
    out = found[0]
    for more in found[1:]:
        out = assemble.laid_over(more, out, "--from-kineto")  # of pairs nobody knows the device
    return out


def _processes(asked: ProfileOptions, prepared: PreparedJob, stopwatch: ProfileMeasurer) -> int:
    """As asked; else one for each rank, as far as there is something for each to compute on."""
    JobRunOptions(prepared.ranks, watchdog_s=asked.watchdog_s).check()
    most = asked.processes
    if most is None:
        most = max(1, min(prepared.ranks, stopwatch.devices(asked.backend)))
    stopwatch.refuse_processes(asked.backend, most, prepared.ranks)
    if asked.repeats < 1:
        raise usage_error("--repeats", f"{asked.repeats} repetitions", "--repeats 20", "1 or more")
    return most


def _by(asked: ProfileOptions, sizes: Sequence[assemble.Size], stopwatch: ProfileMeasurer) -> str:
    """Modules where all sizes can be run as such; single kernels else."""
    if asked.by != "auto":
        return asked.by
    try:
        for prepared, _ in sizes:
            stopwatch.refuse_modules(prepared)
    except PiperError:
        return "kernels"
    return "modules"


def _host_seconds(executor: PlanExecutor, job: Job, watchdog_s: float) -> float | None:
    """Run another plan of the job, never the job's own, without arithmetic. None: the executor has no such run.

    Without the framework that a prediction may be of: the executor is none.
    """
    job = replace(job, costs=replace(job.costs, software=None))
    hardware = hardware_of(job)
    try:
        other = elsewhere(job, prepare_priced(job, hardware), hardware)
        plan = other.plan()
        options = JobRunOptions(other.ranks, emulate=0.0, watchdog_s=watchdog_s)
        executor.check(other, plan, options)
    except PiperError:
        return None
    return host_seconds(ran(executor, other, plan, options, HOST_STEPS))
