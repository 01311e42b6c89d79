"""What a GPU would not forgive, asked on a CPU that keeps its rules: races, and a host that waits where none says."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from executor.device.race import RaceDevice
from executor.launch.launch import launch
from executor.launch.run import run
from executor.runtime.given import given_text
from executor.runtime.interpreter import RESULTS
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import RankContext
from ir.job.build import prepare
from ir.job.run_options import JobRunOptions
from ir.plan.host import host_reads
from ir.plan.places import RankPlacement
from piper_sim.app.doctor.runs import EXPERTS, job_of, prepared_of, wrong


def races() -> Mapping[str, object]:
    """Nothing races; on a device that follows no mark, tensors do, and memory that is given back.

    Raises PiperError: something races, or nothing is seen to.
    """
    prepared = prepared_of("4 ranks, dualpipe, ZeRO-3", "fp32")
    plan = prepared.plan()
    options = JobRunOptions(prepared.ranks, backend="local", racecheck=True)
    run(prepared, plan, options)  # refuses races
    given = [given_text(prepared, plan)]
    deaf = launch(deaf_rank, prepared.ranks, PlanRun(options).told(), given=given, together=True)[0]["races"]
    freed = sum(race.startswith("free") for race in deaf)
    if not 0 < freed < len(deaf):
        raise wrong(f"without marks {len(deaf)} races, {freed} of freed memory: the detector sees too little", "both")
    return {"races": 0, "without_marks": len(deaf), "of_freed_memory": freed}


def deaf_rank(ctx: RankContext, **spec: object) -> dict[str, Any]:
    """A rank of the control: as `train_rank`, on a device that forgets what it is told to follow."""
    with ctx.hub.lock:
        ctx.hub.race = ctx.hub.race or RaceDevice(deaf=True)
    return train_rank(ctx, **spec)


def host_waits() -> Mapping[str, object]:
    """The host waits where the simulator's model says. Raises PiperError: elsewhere, or the model says nowhere."""
    prepared = prepare(job_of(EXPERTS, "bf16"))
    plan = prepared.plan()
    found, _ = run(prepared, plan, JobRunOptions(prepared.ranks, backend="local", racecheck=True, memory=False))
    places, wanted = RankPlacement.of(plan), Counter[str]()
    for op in host_reads(plan)[0].tolist():
        wanted[plan.text(op)] += len(places.table[plan.program[op]])
    waits = {op: count for op, count in found["host_syncs"].items() if op != RESULTS}
    if not wanted or waits != wanted:
        raise wrong(f"the host waits at {waits}", f"{dict(wanted)}, and somewhere")
    return {"ops": len(waits), "waits": sum(waits.values())}
