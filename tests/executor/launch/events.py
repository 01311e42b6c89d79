"""What tests wait for instead of a time: that ranks are at work, as their own progress records say."""

import time
from collections.abc import Callable
from pathlib import Path

from executor.device.progress import RECORD_BYTES, RankRecord, RankState, read
from executor.runtime.worker import RankContext

LIMIT_S = 120.0  # by which all of this has happened, or the test is wrong


def until(happened: Callable[[], bool], every_s: float = 0.005, limit_s: float = LIMIT_S) -> None:
    """Wait for something; fail if it does not come."""
    limit = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < limit, "it has not happened"
        time.sleep(every_s)


def records(scratch: Path) -> list[RankRecord]:
    """The progress of all ranks whose folders lie in `scratch`, which was their TMPDIR."""
    files = [*scratch.glob("piper-run-*/progress"), *scratch.glob("piper-rank-*/progress")]
    return [r for file in files for r in read(file, file.stat().st_size // RECORD_BYTES)]


def stepping(scratch: Path, ranks: int) -> None:
    """Wait until each of so many ranks has begun a step for at least the second time."""
    last, again = dict[int, int](), set[int]()

    def happened() -> bool:
        found = records(scratch)
        for k, record in enumerate(found):
            if 0 <= record.index < last.get(k, -1):
                again.add(k)
            last[k] = record.index
        return len(found) == ranks and len(again) == ranks

    until(happened)


def others_wait(ctx: RankContext) -> None:
    """Wait, on a rank, until every other rank of the launch waits."""
    until(lambda: all(r.state is RankState.WAIT for r in read(ctx.dir / "progress", ctx.world) if r.rank != ctx.rank))
