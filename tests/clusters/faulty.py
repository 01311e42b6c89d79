"""`python -m tests.clusters.faulty JOB …`: `-m executor`, but one rank does one thing wrong, as FAULT says.

It does so when it comes to the op that FAULT names for the second time; the moment goes to a file.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.checkpoint.keeper import RankCheckpoint
from executor.launch import torchrun
from executor.launch.watch.watchdog import RankWatchdog
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from piper_sim.app.doctor.ranks import cut
from tests.executor.faults import at_second_visit, do

FAULT = json.loads(os.environ.get("FAULT", "{}"))


def note(op: str) -> None:
    """Now, and at which op."""
    Path(FAULT["mark"]).write_text(json.dumps([time.monotonic(), op]))


def _hang() -> None:
    """What this op gives to its transport is never taken, on whatever thread."""
    queue: Callable[..., None] = PlanInterpreter._queue

    def never(self: PlanInterpreter, op: Any, row: Any, post: Any, *args: Any) -> None:
        def stay() -> Any:
            note(row.op)
            while True:
                time.sleep(1000)

        queue(self, op, row, stay if op.index == FAULT["index"] else post, *args)

    PlanInterpreter._queue = never  # type: ignore[method-assign]


def _full() -> None:
    def write(self: RankCheckpoint, done: int, *_: Any) -> None:
        note(f"save step-{done:06d}")
        raise OSError(errno.ENOSPC, "No space left on device", "rank.safetensors")

    RankCheckpoint._write = write  # type: ignore[method-assign]


def _slow() -> None:
    compute: Callable[..., None] = PlanInterpreter._compute

    def longer(self: PlanInterpreter, *args: Any) -> None:
        time.sleep(0.05)
        compute(self, *args)

    PlanInterpreter._compute = longer  # type: ignore[method-assign]


def faulty(ctx: RankContext, **spec: Any) -> Any:
    """Train, until it happens."""
    if ctx.rank != FAULT["rank"]:
        return train_rank(ctx, **spec)

    def act(text: str) -> None:
        note(text)
        match FAULT["kind"]:
            case "kill" | "stop" | "raise" as kind:
                do(kind)
            case "hang":
                _hang()
            case "cut":
                cut(int(os.environ["MASTER_PORT"]))
            case "full":
                _full()
            case "slow":
                _slow()

    at_second_visit(ctx, FAULT["index"], act)
    return train_rank(ctx, **spec)


def _dies(_: RankWatchdog) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torchrun.train_rank = faulty
    if FAULT["kind"] == "unwatched" and int(os.environ["RANK"]) == FAULT["rank"]:
        RankWatchdog.start = _dies  # type: ignore[method-assign]  # it has met the others; none watches it yet
    torchrun.end(torchrun.main(sys.argv[1:]))
