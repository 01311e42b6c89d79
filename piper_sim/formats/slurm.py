"""A job as a batch script for SLURM: one torchrun per node, told before the limit, put back in the queue, resumed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ir.job.build import PreparedJob

_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x.%j.log
# {title}
set -uo pipefail

JOB={job}
STEPS=${{STEPS:-1000}}
EVERY=${{EVERY:-100}}
RUNS=${{RUNS:-runs/{name}}}
BACKEND=${{BACKEND:-nccl}}

export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
export PYTORCH_ALLOC_CONF=expandable_segments:True

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${{MASTER_ADDR:-$(head -n 1 <<< "$nodes")}}
MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}

resume=()
if compgen -G "$RUNS/*" > /dev/null; then resume=(--resume "$RUNS"); fi

# Five minutes before the limit, or when the node is taken: go back to the queue and on from the last checkpoint.
requeue() {{
    trap '' USR1 TERM
    kill -TERM "$step" 2> /dev/null
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}}
trap requeue USR1 TERM

srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 \\
    torchrun --nnodes {nodes} --nproc-per-node {gpus} --max-restarts 0 \\
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \\
    -m executor "$JOB" --steps "$STEPS" --backend "$BACKEND" --save "$RUNS" --every "$EVERY" "${{resume[@]}}" &
step=$!
wait "$step"
"""


def sbatch(prepared: PreparedJob, job: str) -> str:
    """The script. job: the path that the job was read from.

    Checkpoints lie in $RUNS; the steps, how often one is saved and the transport are variables that may be exported.
    """
    nodes, mesh = prepared.job.cluster.nodes or 1, prepared.mesh.sizes
    name = re.sub(r"[^\w.-]+", "-", Path(job).stem, flags=re.ASCII) or "job"
    axes = " ".join(f"{k}={v}" for k, v in mesh.items() if v > 1)
    title = re.sub(r"[^\w .=-]+", " ", f"{prepared.job.model.name} {prepared.schedule} {axes}", flags=re.ASCII)
    return _SCRIPT.format(name=name, nodes=nodes, gpus=-(-prepared.ranks // nodes), job=shlex.quote(job), title=title)
