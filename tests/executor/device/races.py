"""Runs on a device that orders no more than a GPU does. `python -m tests.executor.device.races N` leaves out one
ordering of a run, N times, and counts how often that is seen."""

import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from executor.device.progress import RankProgress, create
from executor.device.race import DeviceRace, RaceDevice
from executor.runtime.given import given_name, given_text
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import LocalRanks, RankContext
from ir.job.run_options import JobRunOptions
from tests.executor.runs import judged

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
    prepared, plan = judged(folder, *sets)
    create(folder / "progress", prepared.ranks)
    (folder / given_name(0)).write_text(given_text(prepared, plan), encoding="utf-8")
    hub, errors = LocalRanks(race=device or RaceDevice()), list[BaseException]()
    told = PlanRun(JobRunOptions(prepared.ranks, 1, backend="local", racecheck=True), note=note).told()

    def life(rank: int) -> None:
        pen = RankProgress(folder / "progress", rank)
        try:
            train_rank(RankContext(rank, prepared.ranks, folder, pen, hub=hub), **told)
        except BaseException as error:
            errors.append(error)
            hub.fail(rank)

    names = range(prepared.ranks)
    threads = [threading.Thread(target=life, args=(r,), name=f"rank-{r}", daemon=True) for r in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert hub.race is not None
    return hub.race.races


class _OneLess(RaceDevice):
    """Forgets one of the marks that lanes are told to follow and that tell them something new."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.left_out, self.count = left_out, 0

    def follow(self, mark: Any) -> None:
        with self.lock:
            mine = self.clocks[self._current()]
            new = any(mine.get(lane, 0) < tick for lane, tick in mark.clock.items())
            self.count += new
            if not (new and self.count == self.left_out):
                super().follow(mark)


def main(count: int) -> None:
    """How many orderings, left out alone, are missed."""
    draw, seen = random.Random(0), 0
    for k in range(count):
        name, sets = draw.choice(list(PLANS.items()))
        with tempfile.TemporaryDirectory() as folder:
            whole = _OneLess(-1)
            raced(Path(folder), *sets, device=whole)
            left_out = draw.randrange(whole.count // 3, whole.count) + 1
            found = raced(Path(folder), *sets, device=_OneLess(left_out))
        seen += bool(found)
        print(
            f"{k}: {name}, follow {left_out} of {whole.count} left out: {found[0] if found else 'not seen'}", flush=True
        )
    print(f"seen: {seen} of {count}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
