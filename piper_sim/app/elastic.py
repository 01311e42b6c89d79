"""`torchrun --nnodes MIN:MAX … -m piper_sim.app.elastic JOB`: `-m executor` on however many processes there are.

Where there are not as many as the job has ranks, the simulator chooses another plan of the same global batch. With
--save it goes on from what was saved. Rank 0 chooses; the others are told job and plan as ever.
"""

import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import gcd

from executor.launch.torchrun import end, report
from executor.launch.torchrun import main as rank_main
from ir.core.errors import PiperError, job_error
from piper_sim.app.captured import load_job
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.search import search
from piper_sim.study.search.space import JobSpace

BUDGET_S = 20.0
PINNED = ("recompute", "attention", "microbatch_size", "layers", "etp")  # what the training is made of, or as it was


def main(argv: Sequence[str]) -> int:
    """One rank's life; returns its exit code."""
    args, env = list(argv), os.environ
    sets = [word for flag, word in pairwise(args) if flag == "--set"]
    args += ["--resume", "if-present"] if "--save" in args and "--resume" not in args else []
    if env.get("RANK") == "0" and args:
        try:
            world, here = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
            args += [word for s in chosen(args[0], sets, world, here) for word in ("--set", s)]
        except PiperError as error:
            report(error)
            return error.kind.exit_code
    return rank_main(args)


def chosen(path: str, sets: Sequence[str], world: int, here: int) -> list[str]:
    """Overrides that make the job one of `world` ranks, `here` on each machine: the fastest plan found for them.

    None where it has as many already. The global batch stays, and whatever else the training is made of. Raises
    PiperError (job): no plan for so many processes.
    """
    job = load_job(path, sets)
    own = JobSpace.of(job, hardware_of(job))
    if own.gpus == world:
        return []
    size = own.own.schedule.microbatch_size
    dp = max(n for n in range(1, world + 1) if world % n == 0 and own.sequences % (n * size) == 0)
    base = {"parallel": {"tp": 1, "cp": 1, "ep": 1, "pp": world // dp, "dp": dp, "layers": "balanced"}}
    base["parallel"]["dp_replicate"] = gcd(dp, job.parallel.dp_replicate)
    base |= {"schedule": {"name": "1f1b", "stages_per_rank": 1, "global_batch": own.sequences}}
    base |= {"cluster": {"nodes": world // here, "gpus_per_node": here}}
    new = [f"{section}.{k}={json.dumps(v)}" for section, keys in base.items() for k, v in keys.items()]
    pins = [f"search.pin={json.dumps(PINNED)}"]
    found = search(load_job(path, [*sets, *new, *pins]), BUDGET_S)
    if found.best is None:
        raise job_error("WORLD_SIZE", f"no plan for {world} processes", "--nnodes with as many nodes as the job has")
    return [*new, *(f"{k}={json.dumps(v)}" for k, v in found.best["changes"].items())]


if __name__ == "__main__":
    end(main(sys.argv[1:]))
