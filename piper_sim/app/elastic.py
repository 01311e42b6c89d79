"""`torchrun --nnodes MIN:MAX … -m piper_sim.app.elastic JOB`: `-m executor` on however many processes there are.

Where there are not as many as the job has ranks, the simulator chooses another plan of the same global batch. With
--save it goes on from what was saved. Rank 0 chooses; the others are told job and plan as ever.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from executor.launch.torchrun import RankParser, TorchrunRank, end, flags, report
from executor.launch.torchrun import main as rank_main
from ir.core.errors import PiperError, job_error
from ir.job import Job
from ir.job.build import resolve
from piper_sim.app.captured import load_job
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.search import search
from piper_sim.study.search.space import JobSpace

BUDGET_S = 20.0
PINNED = ("recompute", "attention", "microbatch_size", "layers", "etp")  # what the training is made of, or as it was


def main(argv: Sequence[str]) -> int:
    """One rank's life; returns its exit code."""
    args = list(argv)
    try:
        asked, place = flags().parse_args(args), TorchrunRank.here()
    except PiperError:
        return rank_main(args)  # which says what is wrong, once
    args += ["--resume", "if-present"] if asked.save is not None and asked.resume is None else []
    if place.rank == 0:
        try:
            args = _settled(args, asked.job, place.world)
        except PiperError as error:
            report(error)
            return error.kind.exit_code
    return rank_main(args)


def _settled(args: Sequence[str], path: str, world: int) -> list[str]:
    """The same, with the overrides that make the job one of so many processes."""
    parser = RankParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--set", action="append", default=[])
    found, rest = parser.parse_known_args(args)
    sets = chosen(path, found.set, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return [*rest, *(word for s in sets for word in ("--set", s))]


def chosen(path: str, sets: Sequence[str], world: int, here: int) -> list[str]:
    """Overrides that make the job one of `world` ranks, `here` on each machine: the fastest plan found for them.

    As they are where it has as many already. The global batch stays, and whatever else the training is made of. Raises
    PiperError (job): no plan for so many processes.
    """
    job = load_job(path, sets)
    now = resolve(job, hardware_of(job).gpus_per_node).parallel
    if now.mesh.ranks == world:
        return list(sets)
    own = JobSpace.of(job, hardware_of(job))
    size, divisors = own.own.schedule.microbatch_size, [n for n in range(1, world + 1) if world % n == 0]
    tp = _blocks(job, world)
    dp = max(n for n in divisors if own.sequences % (n * size) == 0 and world // (tp or 1) % n == 0)
    base = {
        "parallel": {"tp": tp or 1, "cp": 1, "ep": 1, "pp": world // dp // (tp or 1), "dp": dp, "layers": "balanced"}
    }
    base["parallel"] |= {k: gcd(dp, getattr(job.parallel, k)) for k in ("dp_replicate", "etp")}
    base |= {"schedule": {"name": "1f1b", "stages_per_rank": 1, "global_batch": own.sequences}}
    each = gcd(world, here)  # machines may differ
    base |= {"cluster": {"nodes": world // each, "gpus_per_node": each, "speed": {}}}  # ranks are others
    new = [f"{section}.{k}={json.dumps(v)}" for section, keys in base.items() for k, v in keys.items()]
    new = [*(s for s in sets if s.partition("=")[0].strip() != "schedule.microbatches"), *new]  # global_batch says it
    pins = (*PINNED, *(["tp"] if tp else []))
    lists = {"pp": divisors} | {k: v for k, v in job.search.overrides.items() if k not in pins}
    wanted = replace(job.search, pin=pins, overrides=lists)
    found = search(replace(load_job(path, new), search=wanted), BUDGET_S)
    if found.best is None:
        raise job_error("WORLD_SIZE", f"no plan for {world} processes", "--nnodes with as many nodes as the job has")
    return [*new, *(f"{k}={json.dumps(v)}" for k, v in found.best["changes"].items())]


def _blocks(job: Job, world: int) -> int | None:
    """The tp that stays, as Muon's updates are of its blocks; None: they are not.

    Raises PiperError (job): so many processes cannot have it.
    """
    o, p = job.optimizer, job.parallel
    if o.name != "muon" or o.tp_mode != "blockwise":
        return None
    if world % (p.tp * p.etp):
        message = f"Muon's updates are of blocks of tp = {p.tp}, etp = {p.etp}, which {world} processes cannot have"
        raise job_error("WORLD_SIZE", message, 'optimizer.tp_mode = "duplicated", whose updates are the same under any')
    return p.tp


if __name__ == "__main__":
    end(main(sys.argv[1:]))
