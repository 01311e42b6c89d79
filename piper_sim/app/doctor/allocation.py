"""The ranks of an allocation, asked together: they meet, connect, and train what one process trains."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from executor.launch.torchrun import main as rank_main
from ir.job.build import prepare
from ir.job.load import load_job
from piper_sim.app.doctor import machine
from piper_sim.app.doctor.checks import Question
from piper_sim.app.doctor.runs import TOLERANCE, apart, curve, wrong

STEPS = 2
JOB = Path(__file__).with_name("job.toml")
ALONE = ("parallel.pp=1", "parallel.dp=1", "parallel.ep=1", "parallel.zero=0", "schedule.name=1f1b")


def asked() -> list[tuple[str, Question]]:
    """What every rank of the allocation is asked. Rank 0 gets the figures; the others only take part."""
    return [("versions", machine.versions), ("files", machine.files), ("devices", machine.devices), ("together", run)]


def job_text(world: int, node: int) -> str:
    """A job for so many ranks, of which `node` share a machine.

    >>> [line for line in job_text(6, 6).splitlines() if line[:3] in ("pp ", "dp ", "ep ")]
    ['pp = 2', 'dp = 3', 'ep = 1']
    """
    pp = 1 if world % 2 else 2
    dp = world // pp
    ep = next(n for n in (4, 2, 1) if dp % n == 0)
    return JOB.read_text(encoding="utf-8").format(node=node, pp=pp, dp=dp, ep=ep, schedule="zb1p" if pp > 1 else "1f1b")


def run() -> Mapping[str, object]:
    """Train together; rank 0 also by itself. Raises PiperError: they differ, or a rank failed."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    told: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="piper-doctor-") as folder:
        file = Path(folder) / "job.toml"
        file.write_text(job_text(world, node))
        code = rank_main([str(file), "--steps", str(STEPS), "--backend", backend], told.append)
        if rank or code:
            raise SystemExit(code)
        (found,) = told
        whole = prepare(load_job(str(file)))
        batch = f"schedule.microbatches={whole.mbs * whole.mesh.sizes['dp']}"
        one = curve(prepare(load_job(str(file), [*ALONE, "cluster.gpus_per_node=1", batch])), "local", STEPS)
    off = apart(one, [*found["losses"], *found["grad_norms"]])
    if not off <= TOLERANCE["fp64"]:
        raise wrong(f"{world} ranks on {backend} are {off:.1e} from one process", f"at most {TOLERANCE['fp64']}")
    return {"ranks": world, "backend": backend, "off": off} | {k: found[k] for k in ("connect_s", "iteration_s")}
