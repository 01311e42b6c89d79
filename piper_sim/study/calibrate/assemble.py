"""A job in the sizes to be measured; samples to a profile: medians, kernels summed up to ops, one laid over another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cost_models import DeviceHardware
from cost_models.profile.profile import MeasuredCost, OpEntry, Profile, ProfileMachine
from cost_models.profile.shapes import KernelShape
from ir.core.errors import PiperError, job_error
from ir.job import Job, load_job
from ir.job.build import PreparedJob
from ir.plan.plan import Plan
from piper_sim.pricing.measured import classes_of, reclassed
from piper_sim.pricing.prepare import prepare_priced
from piper_sim.study.validate.samples import measured

Size = tuple[PreparedJob, Plan]
FLAGS = {"seq_len": "--seq-len", "sequences": "--microbatch-size", "tp": "--tp"}


def without_profile(job: Job) -> Job:
    """The job without the profile that is about to be made, or a given one that would hide what is measured."""
    return replace(job, costs=replace(job.costs, profile=None))


def sizes_of(
    job: Job, sets: Sequence[str], base: PreparedJob, hardware: DeviceHardware, others: Mapping[str, Sequence[int]]
) -> list[Size]:
    """The job as it is, then once for each other size asked for. Raises PiperError, which names the flag."""
    mine = {"seq_len": job.model.seq_len, "sequences": job.schedule.microbatch_size, "tp": base.mesh.sizes["tp"]}
    out: list[Size] = [(base, base.plan())]
    for name, values in others.items():
        for value in sorted(set(values) - {mine[name]}):
            changed = (*sets, *_sets(name, value, base))
            try:
                prepared = prepare_priced(without_profile(load_job(job.file, changed)), hardware)
            except PiperError as e:
                raise PiperError(e.kind, e.message, key=f"{FLAGS[name]} {value}", allowed=e.allowed) from None
            out.append((prepared, prepared.plan()))
    return out


def _sets(name: str, value: int, base: PreparedJob) -> list[str]:
    """The overrides that change one size. Ranks are then all on one node: only what each computes is looked at."""
    match name:
        case "seq_len":
            return [f"model.seq_len={value}"]
        case "sequences":
            return [f"schedule.microbatch_size={value}"]
        case _:
            p = base.job.parallel
            ranks = value * p.cp * p.pp * (p.dp or 1)
            return [f"parallel.tp={value}", f"parallel.dp={p.dp}", "cluster.nodes=1", f"cluster.gpus_per_node={ranks}"]


class ProfileSamplesLike(Protocol):
    """`executor.measure.calibrate.Measurement`."""

    ops: tuple[dict[str, list[float]], ...]
    pieces: tuple[dict[int, list[float]], ...]
    recipes: tuple[dict[str, list[tuple[int, int]]], ...]
    links: dict[str, list[float]]
    gpu: str
    gpus: int
    threads: int


def shapes_of(sizes: Sequence[Size]) -> dict[str, KernelShape]:
    """By class: the family and sizes of every node that has them, over all sizes of a job."""
    out: dict[str, KernelShape] = {}
    for prepared, plan in sizes:
        named = classes_of(plan.graph, prepared.job)
        out |= {name: shape for _, name, shape in named if shape is not None}
    return out


def profile_of(timed: ProfileSamplesLike, sizes: Sequence[Size], host_s: float | None, by: str) -> Profile:
    """What was measured here."""
    shapes = shapes_of(sizes)
    times = {name: measured(x) for one in timed.ops for name, x in one.items()}
    for pieces, recipes in zip(timed.pieces, timed.recipes, strict=True):
        times |= summed(pieces, recipes)
    for prepared, plan in sizes:
        times = reclassed(plan.graph, prepared.job, times)
    ops = {name: OpEntry(time, shape=shapes.get(name), alone=True) for name, time in times.items()}
    machine = ProfileMachine.here(timed.gpu, timed.gpus, timed.threads)
    links = {key: measured(x) for key, x in timed.links.items()}
    what = f"{len(ops)} op classes timed here by {by}, {len(sizes)} size{'s' if len(sizes) > 1 else ''} of the job"
    origins = [what, *([f"{len(links)} messages timed here"] if links else [])]
    return Profile.of(machine, ops, links, host_s, origins=tuple(origins))


def summed(
    pieces: Mapping[int, Sequence[float]], recipes: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[str, MeasuredCost]:
    """Ops as the sums of their kernels; an op of which a kernel is missing is left out, as is one without any.

    >>> summed({0: [1.0, 1.0], 1: [0.5]}, {"F/mlp 1": [(0, 2), (1, 1)], "W/mlp 1": [(2, 1)]})
    {'F/mlp 1': MeasuredCost(median_s=2.5, spread_s=0.0, count=1)}
    """
    known = {k: measured(x) for k, x in pieces.items()}
    out = {}
    for name, recipe in recipes.items():
        if recipe and all(k in known for k, _ in recipe):
            out[name] = total([(known[k], times) for k, times in recipe])
    return out


def total(parts: Sequence[tuple[MeasuredCost, int]]) -> MeasuredCost:
    """The sum of some costs, each so many times; it is as well known as the least known of them."""
    seconds, spread = (sum(getattr(m, key) * n for m, n in parts) for key in ("median_s", "spread_s"))
    return MeasuredCost(seconds, spread, min(m.count for m, _ in parts))


def machine_of(seen: Sequence[tuple[str, int]], key: str) -> ProfileMachine:
    """Of what files say: (GPU, how many), "" where one does not. Raises PiperError (job): of several kinds."""
    gpus = sorted({gpu for gpu, _ in seen if gpu})
    if len(gpus) > 1:
        raise job_error(key, f"files of {' and of '.join(gpus)}", "a profile for each", "one kind of GPU")
    return ProfileMachine.elsewhere("".join(gpus), max(n for _, n in seen) if gpus else 0)


def laid_over(new: Profile, base: Profile, key: str, file: str | None = None) -> Profile:
    """A profile with what a new one has in place of its own; its machine is the one that more is known of.

    key, file: what named them. Raises PiperError (job): they are of different devices, whose seconds do not mix.
    """
    a, b = base.machine, new.machine
    if (a.device and b.device) and a.device != b.device:
        message, fix = f"of {a.device}, and what is laid over it of {b.device}", f"a profile of {b.device}, or none"
        raise job_error(key, message, fix, "one kind of device", file=file)
    made = Profile.of(
        b if b.cpu or not a.device else a,
        {**base.ops, **new.ops},
        {**base.links, **new.links},
        base.host_s if new.host_s is None else new.host_s,
        {**base.pairs, **new.pairs},
        (*base.origins, *new.origins),
    )
    return replace(made, sealed=base.sealed and new.sealed)
