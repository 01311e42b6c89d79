"""A job in other sizes, one size changed at a time, so that a profile can be read between them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cost_models import DeviceHardware
from ir.core.errors import PiperError
from ir.job import Job, load_job
from ir.job.build import PreparedJob
from ir.plan.plan import Plan
from piper_sim.pricing.prepare import prepare_priced

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
