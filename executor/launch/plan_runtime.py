"""A plan as a library: in a user's own loop, on torchrun's processes, each of which calls it for every step."""

from __future__ import annotations

import atexit
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from executor.checkpoint.settings import settled
from executor.launch.step_log import loss_of, norm_of_ranks
from executor.launch.torchrun import TorchrunRank, joined, rank_context
from executor.modules.base import TokenLoss
from executor.runtime.batch import Microbatch, PendingMicrobatch
from executor.runtime.interpreter import StepResult
from executor.runtime.rank import RankRun, of_the_batch
from executor.runtime.spec import PlanRun
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import MessageKind
from ir.job.build import PreparedJob
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.plan.plan import Plan
from ir.plan.text import plan_digest

ALL = "all"  # the group of every rank
ENDLESS = sys.maxsize  # steps, where nobody says when the loop ends
Tokens = Tensor | np.ndarray
Batch = Tokens | tuple[Tokens, Tokens]


class PlanRuntime:
    """What `piper_sim.runtime` gives: a job's model, placed, its optimizer, and its plan, on this rank of several.

    steps: done so far, those of a checkpoint among them. grad_norm: of the last step, before clipping. sequences: of a
    global batch. prepared, plan: what is run.

    Between calls the loop's own code may take its time; whose process shows no life for long has failed.
    """

    def __init__(
        self,
        judge: Callable[[int], tuple[PreparedJob, Plan]],
        options: Callable[[int], JobRunOptions],
        wanted: CheckpointOptions,
    ) -> None:
        """judge: what is to be run, asked of rank 0, for so many ranks. Raises PiperError."""
        place = TorchrunRank.here()
        torch.set_num_threads(1)
        o = options(place.world)
        o.check()
        judged = judge(place.world) if place.rank == 0 else None
        self._scratch = tempfile.TemporaryDirectory(prefix="piper-rank-", ignore_cleanup_errors=True)
        store, self._lookout = joined(place, Path(self._scratch.name), o, judged)
        context = rank_context(store, place, Path(self._scratch.name))
        try:
            self.prepared, self.plan = context.given()
            saving = settled(wanted, self.prepared, o.steps, real=True)
            self._lookout.meet(f"{plan_digest(self.plan)} from step {saving.first}")
            self._lookout.start()
            everybody = ALL, tuple(range(place.world)), frozenset({MessageKind.ALL_GATHER})
            self._rank = RankRun.of(context, PlanRun(o, saving), [everybody])
        except BaseException as error:
            self._lookout.fall(error)  # does not return
        self._context = context
        self.steps, self.grad_norm = saving.first, float("nan")
        job = self.prepared.job
        self.sequences = self.prepared.mesh.sizes["dp"] * self.prepared.mbs * job.schedule.microbatch_size
        context.progress.outside()
        atexit.register(self._left)

    def __enter__(self) -> PlanRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Of an error in the loop's own code the other ranks are told, and end, too."""
        if error is None:
            self.close()
        else:
            traceback.print_exception(error)
            self._lookout.fall(error)  # does not return

    def step(self, batch: Batch) -> float:
        """Train on one global batch, the same on every rank; returns its loss, the mean over its valid labels.

        batch: token ids (sequences, seq_len + 1), or ids and labels (sequences, seq_len) each, −100 where none counts.

        Raises PiperError (usage): it has another shape.
        """
        batches = self._batches(batch, self.steps)
        result = self._rank.run.step(self.steps, batches)
        self._after()
        self.steps += 1
        loss, self.grad_norm = self._loss(result.losses), self._norm(result)
        self._context.progress.outside()
        return loss

    def evaluate(self, batch: Batch) -> float:
        """The loss of a global batch, without an update and without dropout; it costs a step."""
        found = self._loss(self._rank.evaluate(self._batches(batch, 0)))
        self._context.progress.outside()
        return found

    def save(self) -> str:
        """Write a checkpoint to the folder that `runtime(save=…)` named, all ranks together; returns where it is.

        Raises PiperError (usage): none was named; (io): it cannot be written.
        """
        keeper = self._rank.keeper
        if keeper is None or keeper.saving.save is None:
            message, fix = "no folder to save to", 'piper_sim.runtime(job, save="checkpoints")'
            raise PiperError(ErrorKind.USAGE, message, key="save", suggestion=fix)
        keeper.after(self.steps, self.steps, self._rank.transport)
        keeper.settle(self._rank.transport)
        self._context.progress.outside()
        return str(keeper.saved)

    def _left(self) -> None:
        """The process ends without a close: by an error of the loop's own, perhaps, of which the others are told."""
        if (error := getattr(sys, "last_value", None)) is not None:  # what Python has printed a traceback of
            self._lookout.fall(error)  # does not return

    def close(self) -> None:
        """End, all ranks together."""
        atexit.unregister(self._left)
        self._rank.close()
        self._context.progress.end()
        self._lookout.part()
        self._scratch.cleanup()

    def _batches(self, batch: Batch, step: int) -> dict[int, PendingMicrobatch]:
        ids, labels = self._tokens(batch)
        program, size = self._rank.program, self.prepared.job.schedule.microbatch_size
        scale, out = 1.0 / max(1, int((labels != TokenLoss.IGNORE).sum())), {}
        for mb in program.batches():
            number = program.number_of(mb)
            at = slice(number * size, (number + 1) * size)
            one = Microbatch(ids[at].contiguous(), labels[at].contiguous(), scale, number, step)
            out[mb] = PendingMicrobatch(one, self._rank.device.torch)
        return out

    def _tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Ids and labels. Raises PiperError (usage): they do not fit the job."""
        length = self.prepared.job.model.seq_len
        both = batch if isinstance(batch, tuple) else (batch,)
        given = [x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu") for x in both]
        want = (self.sequences, length + (len(given) == 1))
        if any(tuple(x.shape) != want or x.is_floating_point() for x in given) or len(given) > 2:
            message = f"a batch of {', '.join(f'{x.dtype} {list(x.shape)}' for x in given)}"
            allowed = f"token ids [{self.sequences}, {length + 1}], or ids and labels [{self.sequences}, {length}] each"
            raise PiperError(ErrorKind.USAGE, message, key="batch", allowed=allowed)
        ids, labels = given if len(given) == 2 else (given[0][:, :-1], given[0][:, 1:])
        return ids.long(), labels.long()

    def _loss(self, losses: dict[int, float]) -> float:
        mine = of_the_batch(self.prepared, self._rank.program, losses)
        row = torch.zeros(self.prepared.mesh.sizes["dp"] * self.prepared.mbs, dtype=torch.float64, device="cpu")
        for number, loss in mine:
            row[number] = loss
        found = self._gathered(row).sum(0)  # each has one summand
        return loss_of([list(enumerate(found.tolist()))])

    def _norm(self, result: StepResult) -> float:
        if result.grad_norm is not None:
            return result.grad_norm
        squares = torch.tensor(result.squares, dtype=torch.float64, device="cpu")
        return norm_of_ranks(None, self._gathered(squares).tolist())

    def _gathered(self, row: Tensor) -> Tensor:
        row = row.to(self._rank.device.torch)
        into = row.new_empty(self._context.world * row.numel())
        self._context.progress.wait(text="loss")
        self._rank.transport.all_gather(ALL, into, row).wait()
        return into.view(self._context.world, -1).cpu()

    def _after(self) -> None:
        """What a run would keep for its trace, a loop without an end may not."""
        assert self._rank.local is not None
        self._rank.local.guide.take()
        self._rank.run.rows.clear()
