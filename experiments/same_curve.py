"""Is it one loss curve, whatever the plan, and however often the run is killed? A small GPT-2 on real text.

    python -m experiments.same_curve [--steps 500] [--kills 10] [--width 384] [--seed 0] [--sums fp64] [--out DIR]

transformers' GPT-2, as it is, learns the pages that Python ships for `help()`, a byte a token, on two CPU ranks: under
1F1B, DualPipe and ZeRO-3, each without a stop, then once more with `--kills` deaths. Each time one rank, or the whole
run, gets SIGKILL at a step drawn by the seed, and the next of the three plans goes on from what is saved. Compute is
fp32; sums, moments and messages are fp64, so that the order of sums, in which plans differ, does not grow (with
`--sums fp32` it does). It exits 1 where two curves are more than `APART` apart, or end above `LEARNT` of their
start. Two cores take about a second a step.
"""

import argparse
import json
import os
import pydoc_data.topics
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

APART, LEARNT = 1e-6, 0.7
EVERY = 20  # steps between two checkpoints
PLANS = {
    "1f1b": ("parallel.pp=2", "schedule.name=1f1b", "schedule.microbatches=4"),
    "dualpipe": ("parallel.pp=2", "schedule.name=dualpipe", "schedule.microbatches=4"),
    "zero3": ("parallel.dp=2", "parallel.zero=3", "schedule.name=1f1b", "schedule.microbatches=2"),
}
MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

def build():
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd={width}, n_layer=6, n_head=6, **off))
"""
JOB = (Path(__file__).parent / "jobs" / "same_curve.toml").read_text(encoding="utf-8")
Curve = dict[int, float]  # step → loss


def started(folder: Path, plan: str, steps: int, out: str, *more: str) -> subprocess.Popen[bytes]:
    """A run of the job under a plan, in a session of its own."""
    sets = [word for key in PLANS[plan] for word in ("--set", key)]
    flags = ["-n", "2", "--steps", str(steps), "--out", out, *sets, *more]
    command = [sys.executable, "-m", "piper_sim.app.cli", "run", "job.toml", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{out}.log").open("wb") as said:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said, start_new_session=True)


def logged(log: Path) -> Curve:
    """Losses so far, by step. A line that is being written is left for the next look."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def ended(run: subprocess.Popen[bytes], log: Path) -> Curve:
    """Raises RuntimeError: it failed."""
    if code := run.wait():
        raise RuntimeError(f"{log.parent}: exit {code}, see {log.parent}.log")
    return logged(log)


def killed(run: subprocess.Popen[bytes], log: Path, at: int, draw: random.Random) -> Curve:
    """Losses of a run that dies when it has logged step `at`: one of its ranks does, or all of it at once."""
    while at not in logged(log) and run.poll() is None:
        time.sleep(0.2)
    if run.poll() is not None:
        raise RuntimeError(f"{log.parent}: exit {run.returncode} before step {at}, see {log.parent}.log")
    if draw.random() < 0.5:
        os.killpg(run.pid, signal.SIGKILL)
    else:
        ranks = json.loads(log.with_name("ranks.json").read_text())["ranks"]
        os.kill(ranks[draw.choice(sorted(ranks))]["pid"], signal.SIGKILL)
    run.wait()
    return logged(log)


def killed_often(folder: Path, steps: int, kills: int, draw: random.Random) -> Curve:
    """The curve of a run that died `kills` times and went on under another plan; steps done twice must agree."""
    curve: Curve = {}
    lives = [*sorted(draw.sample(range(EVERY, steps - 1), kills)), None]
    for life, end in enumerate(lives):
        plan, log = [*PLANS][life % len(PLANS)], folder / f"life{life}" / "log.jsonl"
        run = started(
            folder, plan, steps, log.parent.name, "--save", "saved", "--every", str(EVERY), "--resume", "if-present"
        )
        losses = ended(run, log) if end is None else killed(run, log, end, draw)
        again = [abs(curve[k] - loss) for k, loss in losses.items() if k in curve]
        print(f"life {life} under {plan}: steps {min(losses)} to {max(losses)}", end=", ")
        print(f"{len(again)} done before, apart by {max(again, default=0.0):.1e}", flush=True)
        curve |= losses
    return curve


def prepared(folder: Path, steps: int, width: int, sums: str) -> None:
    """The model, its text and its job."""
    (folder / "model.py").write_text(MODEL.format(width=width))
    (folder / "text.txt").write_text("\n".join(pydoc_data.topics.topics.values()))
    (folder / "job.toml").write_text(JOB.format(warm=steps // 10, decay=steps - steps // 10, sums=sums))


def judged(curves: dict[str, Curve], steps: int) -> bool:
    """Prints a line for each curve; whether all are whole, one, and have learnt."""
    (_, first), good = next(iter(curves.items())), True
    for name, curve in curves.items():
        whole = sorted(curve) == list(range(steps))
        apart = max(abs(curve[k] - first[k]) for k in curve)
        left = curve[steps - 1] / curve[0]
        print(f"{name}: {len(curve)} steps, loss {curve[0]:.4f} to {curve[steps - 1]:.4f}, apart by {apart:.1e}")
        good &= whole and apart <= APART and left <= LEARNT
    return good


def main() -> None:
    """Run all four, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, usual in (("steps", 500), ("kills", 10), ("width", 384), ("seed", 0)):
        parser.add_argument(f"--{key}", type=int, default=usual)
    parser.add_argument("--sums", choices=("fp32", "fp64"), default="fp64")
    parser.add_argument("--out", type=Path, help="keep logs and checkpoints here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        prepared(folder, args.steps, args.width, args.sums)
        curves = {plan: ended(started(folder, plan, args.steps, plan), folder / plan / "log.jsonl") for plan in PLANS}
        curves["killed"] = killed_often(folder, args.steps, args.kills, random.Random(args.seed))
        raise SystemExit(not judged(curves, args.steps))


if __name__ == "__main__":
    main()
