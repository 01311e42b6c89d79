"""How long is `piper-sim compare` of six schedules, beside a bare heapq loop over 389,120 ops?

    python -m experiments.command_speed [--rounds 3]

DeepSeek-V3 on 2,048 and on 16,384 H800, the whole command: start, reading, six plans built, checked, priced, simulated
and measured, JSON. Runs take turns; wall time, the least of some rounds; the largest resident set of the command.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from experiments.engine_speed import heapq_loop, loop_of, stage_case
from piper_sim.app.commands.demo import JOB

GPUS = {"2,048 GPUs": [], "16,384 GPUs": ["--set", "cluster.nodes=2048"]}


def command(job: Path, more: list[str]) -> tuple[float, float]:
    """(seconds, GiB) of one run."""
    before = time.perf_counter()
    arguments = ["compare", str(job), *more, "--json"]
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "piper_sim.app.cli", *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)],
    )
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"piper-sim {' '.join(arguments)} ended with {status}")
    return time.perf_counter() - before, usage.ru_maxrss / 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    case = stage_case(64, 1024)
    loop = loop_of(case.plan, case.costs.duration)
    least = dict.fromkeys(["heapq loop", *GPUS], float("inf"))
    most = dict.fromkeys(GPUS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(JOB)
        for _ in range(rounds):
            before = time.perf_counter()
            heapq_loop(*loop)
            least["heapq loop"] = min(least["heapq loop"], time.perf_counter() - before)
            for name, more in GPUS.items():
                seconds, gib = command(job, more)
                least[name], most[name] = min(least[name], seconds), max(most[name], gib)
    unit = least["heapq loop"]
    print(f"heapq loop, 64 x 1,024: {unit:.3f} s")
    for name in GPUS:
        print(f"compare, {name}: {least[name]:.2f} s = {least[name] / unit:.1f} x, {most[name]:.2f} GiB")


if __name__ == "__main__":
    main()
