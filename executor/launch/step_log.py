"""What a run says while it goes on: each rank leaves a line per step, and who started them puts the lines together."""

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor.launch.forkserver import RankForkServer
from executor.launch.launch import scratch
from executor.optim.optimizer import learning_rate
from ir.job.build import PreparedJob

EVERY_S = 0.2
Losses = Sequence[Sequence[float]]  # (microbatch of the global batch, its share of the loss)
Json = dict[str, Any]


def loss_of(losses: Sequence[Losses]) -> float:
    """All ranks' shares, summed in the order of the global batch, whatever ranks its microbatches ended on.

    >>> loss_of([[(1, 0.5)], [(0, 0.25)], []])
    0.75
    """
    total = 0.0
    for _, loss in sorted((mb, loss) for of_rank in losses for mb, loss in of_rank):
        total += loss
    return total


def norm_of_ranks(norm: float | None, squares: Sequence[Sequence[float]]) -> float:
    """As the plan took it; without clipping the plan takes none, and the ranks' shares are put together here."""
    return float(norm) if norm is not None else math.sqrt(sum(sum(one) for one in zip(*squares, strict=True)))


@dataclass
class StepLog:
    """Reads the ranks' lines; a step is told once all of them have told it. Its seconds are counted as a run's are:
    from the last op of the step before to its own, or, where something else was done in between, from its first op.

    tell: each gets step, loss, grad_norm, lr, tokens (read until then), step_s, tokens_per_s; eval_loss after a test.
    """

    prepared: PreparedJob
    steps: int
    folder: Path
    tell: Sequence[Callable[[Json], None]]
    read: dict[int, int] = field(default_factory=dict)  # rank → bytes
    notes: dict[int, dict[int, Json]] = field(default_factory=dict)  # step → rank → what it has said of it

    def poll(self) -> None:
        for rank in range(self.prepared.ranks):
            file = self.folder / f"steps-{rank}"
            if not file.exists():
                continue
            with file.open("rb") as f:
                f.seek(self.read.get(rank, 0))
                lines = f.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self.read[rank] = self.read.get(rank, 0) + len(whole)
            for line in whole.splitlines():
                note = json.loads(line)
                self.notes.setdefault(note["step"], {})[rank] = note
        for step in sorted(s for s, notes in self.notes.items() if len(notes) == self.prepared.ranks):
            notes = self.notes.pop(step)
            found = self._told(step, [notes[rank] for rank in sorted(notes)])  # sums have the order of the run's object
            for tell in self.tell:
                tell(found)

    def _told(self, step: int, notes: Sequence[Mapping[str, Any]]) -> Json:
        job, mesh = self.prepared.job, self.prepared.mesh
        each = mesh.sizes["dp"] * self.prepared.mbs * job.schedule.microbatch_size * job.model.seq_len
        end = max(n["end"] for n in notes)
        before = [n["before"] for n in notes]
        seconds = end - (min(n["start"] for n in notes) if None in before else max(before))
        found = {
            "step": step,
            "loss": loss_of([n["losses"] for n in notes]),
            "grad_norm": norm_of_ranks(notes[0]["norm"], [n["squares"] for n in notes]),
            "lr": learning_rate(job.optimizer, step, self.steps),
            "tokens": (step + 1) * each,
            "step_s": seconds,
            "tokens_per_s": each / seconds,
        }
        return found | ({"eval_loss": loss_of([n["test"] for n in notes])} if any(n["test"] for n in notes) else {})


@contextmanager
def told_steps(prepared: PreparedJob, steps: int, tell: Sequence[Callable[[Json], None]]) -> Iterator[Path]:
    """A folder for ranks of this machine to note steps in, read on by a thread until the end."""
    with scratch("piper-steps-") as name:
        RankForkServer.get().send(owns=name)
        log, over, failed = StepLog(prepared, steps, Path(name), tell), threading.Event(), list[Exception]()

        def look() -> None:
            if not failed:
                try:
                    log.poll()
                except Exception as error:
                    failed.append(error)
                    print(f"error: {error}\nthe run goes on; no more of its steps are told", file=sys.stderr)

        def follow() -> None:
            while not over.wait(EVERY_S):
                look()

        thread = threading.Thread(target=follow, name="steps", daemon=True)
        thread.start()
        try:
            yield log.folder
        finally:
            over.set()
            thread.join()
            look()
        if failed:  # told when all is done and saved
            raise failed[0]
