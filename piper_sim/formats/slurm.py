"""A job as a batch script for SLURM: told before the limit it saves, goes back to the queue, and is taken up again."""

import re
import shlex
from collections.abc import Sequence
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
TASKS=${{TASKS:-node}} # node: a torchrun on each; gpu: a task for each GPU, started by srun itself
RESTARTS=${{RESTARTS:-3}} # behind failures before the first checkpoint

export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
export PYTORCH_ALLOC_CONF=expandable_segments:True

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{MASTER_ADDR:-$(head -n 1 <<< "$nodes")}}
export MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}

newest() {{ compgen -G "$RUNS/step-*/manifest.json" | grep -v tmp- | sort | tail -n 1; }}
holder() {{ cat "$RUNS/lock" 2> /dev/null; }}
mkdir -p "$RUNS"
rm -f "$RUNS/stop"
before=$(newest) began=$(holder)
args=("$JOB"{sets} --steps "$STEPS" --backend "$BACKEND" --save "$RUNS" --every "$EVERY")
if [ -n "$before" ]; then args+=(--resume "$RUNS"); fi

# Back to the queue, unless somebody has cancelled the job.
requeue() {{
    if [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then scontrol requeue "$SLURM_JOB_ID"; fi
}}

# Five minutes before the limit, or when the node is taken: save behind this step, and on from there.
save() {{
    trap '' USR1 TERM
    touch "$RUNS/stop"
    wait "$step"
    requeue
    exit 0
}}
trap save USR1 TERM

case $TASKS in
    node) srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \\
        torchrun --nnodes {nodes} --nproc-per-node {gpus} --max-restarts 0 \\
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" \\
        --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" -m executor "${{args[@]}}" & ;;
    gpu) srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={gpus} --kill-on-bad-exit=1 --cpu-bind=none \\
        --overcommit \\
        bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={gpus} \\
        exec python -m executor "$@"' - "${{args[@]}}" & ;;
    *) echo "TASKS=$TASKS: node or gpu" >&2; exit 2 ;;
esac
step=$!
wait "$step"
code=$?
# A run that had begun is begun again: a node may be gone. One that gets nowhere is not, but a few times.
if [ $code != 0 ] && [ "$(holder)" != "$began" ]; then
    if [ "$(newest)" != "$before" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt "$RESTARTS" ]; then requeue; fi
fi
exit $code
"""


def sbatch(prepared: PreparedJob, job: str, sets: Sequence[str] = ()) -> str:
    """The script. job: the path that the job was read from. sets: the overrides that it was read with.

    Checkpoints lie in $RUNS; the steps, how often one is saved, the transport and who starts ranks are variables that
    may be exported.
    """
    nodes, mesh = prepared.job.cluster.nodes or 1, prepared.mesh.sizes
    name = re.sub(r"[^\w.-]+", "-", Path(job).stem, flags=re.ASCII) or "job"
    axes = " ".join(f"{k}={v}" for k, v in mesh.items() if v > 1)
    title = re.sub(r"[^\w .=-]+", " ", f"{prepared.job.model.name} {prepared.schedule} {axes}", flags=re.ASCII)
    return _SCRIPT.format(
        name=name,
        nodes=nodes,
        gpus=-(-prepared.ranks // nodes),
        ranks=prepared.ranks,
        job=shlex.quote(job),
        sets="".join(f" --set {shlex.quote(s)}" for s in sets),
        title=title,
    )
