"""A job as a batch script for SLURM: told before the limit it saves, goes back to the queue, and is taken up again."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ir.job.build import PreparedJob

_SCRIPT = Path(__file__).with_name("job.sbatch")


def sbatch(prepared: PreparedJob, job: str, sets: Sequence[str] = ()) -> str:
    """The script. job: the path that the job was read from. sets: the overrides that it was read with.

    Checkpoints lie in $RUNS; the steps, how often one is saved, the transport and who starts ranks are variables that
    may be exported.
    """
    nodes, mesh = prepared.job.cluster.nodes or 1, prepared.mesh.sizes
    name = re.sub(r"[^\w.-]+", "-", Path(job).stem, flags=re.ASCII) or "job"
    axes = " ".join(f"{k}={v}" for k, v in mesh.items() if v > 1)
    title = re.sub(r"[^\w .=-]+", " ", f"{prepared.job.model.name} {prepared.schedule} {axes}", flags=re.ASCII)
    values = {"name": name, "title": title, "job": shlex.quote(job)}
    values |= {"nodes": str(nodes), "gpus": str(-(-prepared.ranks // nodes)), "ranks": str(prepared.ranks)}
    values |= {"sets": "".join(f" --set {shlex.quote(s)}" for s in sets)}
    return re.sub(r"@(\w+)@", lambda m: values[m[1]], _SCRIPT.read_text(encoding="utf-8"))
