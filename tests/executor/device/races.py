"""Runs on a device that orders no more than a GPU does. `python -m tests.executor.device.races N` leaves out N
orderings of each plan's run, one by one and evenly over the run, and counts how many are seen."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from executor.checkpoint.folder import newest
from executor.checkpoint.manifest import read_manifest
from executor.checkpoint.reader import digests
from executor.checkpoint.settings import settled
from executor.device.progress import RankProgress, create
from executor.device.race import DeviceRace, RaceDevice
from executor.runtime.given import given_name, given_text
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import LocalRanks, RankContext
from ir.job.run_options import CheckpointOptions, JobRunOptions
from tests.executor.device.race_notes import Deletions, RaceNotes
from tests.executor.runs import judged
from tests.executor.threads import together

PLANS = {
    "1f1b": (),
    "zbv, tp": ("schedule.name=zbv", "parallel.tp=2", "parallel.sequence_parallel=true"),
    "dualpipe, ZeRO-1, recompute": (
        "schedule.name=dualpipe",
        "parallel.dp=2",
        "parallel.zero=1",
        "schedule.recompute=full",
    ),
    "experts, ZeRO-3": (
        "model.config=tiny-moe",
        "schedule.name=dualpipev",
        "parallel.dp=2",
        "parallel.ep=2",
        "parallel.zero=3",
    ),
    "cp, ZeRO-2": ("parallel.cp=2", "parallel.dp=1", "parallel.zero=2", "schedule.name=interleaved-1f1b"),
}


def raced(folder: Path, *sets: str, device: RaceDevice | None = None, note: bool = False) -> list[DeviceRace]:
    """Train two steps (memory is followed in the second), all ranks in threads of this process; what nothing orders.
    note: keep what routers choose.

    Raises what a rank raises.
    """
    device = device or RaceDevice()
    spec = PlanRun(JobRunOptions(1, 1, backend="local", racecheck=True), note=note)
    trained(folder, spec, *sets, hub=LocalRanks(race=device))
    return device.races


def trained(
    folder: Path, spec: PlanRun, *sets: str, hub: LocalRanks, first: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """What the ranks of a run tell, all of them threads of this process. first: done in each before."""
    prepared, plan = judged(folder, *sets)
    create(folder / "progress", prepared.ranks)
    (folder / given_name(0)).write_text(given_text(prepared, plan), encoding="utf-8")
    told = replace(spec, options=replace(spec.options, ranks=prepared.ranks)).told()

    def life(rank: int) -> dict[str, Any]:
        first()
        pen = RankProgress(folder / "progress", rank)
        found: dict[str, Any] = train_rank(RankContext(rank, prepared.ranks, folder, pen, hub=hub), **told)
        return found

    return together(life, prepared.ranks, hub.fail)


def resumed(
    folder: Path, *sets: str, first: Callable[[], object] = lambda: None, on: Sequence[RaceDevice | None] = (None, None)
) -> list[Any]:
    """What a run tells that evaluates, saves and dumps, and one that goes on from there; what the files then hold.

    on: the device of each.
    """
    (folder / "text.txt").write_text("0123456789 " * 99)
    sets, out = (*sets, "run.eval_every=1", f"run.eval_source={folder / 'text.txt'}"), list[Any]()
    prepared, _ = judged(folder, *sets)
    both = ({"save": str(folder / "saved")}, 2), ({"resume": str(folder / "saved")}, 3)
    for device, (asked, steps) in zip(on, both, strict=True):
        saving = settled(CheckpointOptions(**asked, every=1 if "save" in asked else None), prepared, steps, real=True)
        options = JobRunOptions(1, steps, backend="local", dump=folder, racecheck=device is not None)
        keys = "losses", "grad_norms", "squares", "peak_bytes", "tests", "state_bytes", "balance"
        told = trained(folder, PlanRun(options, saving), *sets, hub=LocalRanks(race=device), first=first)
        out.append([{k: r[k] for k in keys} for r in told])
    first()
    checkpoint = newest(folder / "saved")
    dumped = {f.name: {n: a.tobytes() for n, a in load_file(f).items()} for f in sorted(folder.glob("rank-*"))}
    return [*out, digests(checkpoint, read_manifest(checkpoint)), dumped]


def noted(*sets: str) -> RaceNotes:
    """What the clocks of such a run were told. It has no races."""
    notes = RaceNotes()
    with tempfile.TemporaryDirectory() as folder:
        assert raced(Path(folder), *sets, device=RaceDevice(notes)) == []
    return notes


def main(count: int) -> None:
    """Of how many orderings, left out alone, nothing is seen."""
    for name, sets in PLANS.items():
        notes = noted(*sets)
        lost = Deletions.of(notes, notes.some(count))
        print(f"{name}: {lost}", *sorted({notes.why[k] for k in lost.kept}), sep="\n  ", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
