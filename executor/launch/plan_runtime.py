"""A plan as a library: in a user's own loop, on torchrun's processes, each of which calls it for every step."""

from __future__ import annotations

import atexit
import gc
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from executor.checkpoint.settings import settled
from executor.device.device import made_on, make_default, release
from executor.launch.step_log import loss_of, norm_of_ranks
from executor.launch.torchrun import TorchrunRank, joined, rank_context
from executor.modules.base import TokenLoss
from executor.runtime.batch import Microbatch, PendingMicrobatch
from executor.runtime.given import Judged
from executor.runtime.interpreter import StepResult
from executor.runtime.rank import RankRun, of_the_batch
from executor.runtime.spec import PlanRun
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import MessageKind
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.plan.text import plan_digest

ALL = "all"  # the group of every rank
ENDLESS = sys.maxsize  # steps, where nobody says when the loop ends
Tokens = Tensor | np.ndarray
Batch = Tokens | tuple[Tokens, Tokens] | list[Tokens]
CALLS = ("step", "evaluate", "save", "close")


class PlanRuntime:
    """What `piper_sim.runtime` gives: a job's model, placed, its optimizer, and its plan, on this rank of several.

    steps: done so far, those of a checkpoint among them. grad_norm: of the last step, before clipping. sequences: of a
    global batch. prepared, plan: what is run.

    Between calls the loop's own code may take its time; whose process shows no life for long has failed. Tensors that
    it makes are where its own default has them, and a batch may be on any device.
    """

    def __init__(
        self,
        judge: Callable[[int], Judged],
        options: Callable[[int], JobRunOptions],
        wanted: CheckpointOptions,
    ) -> None:
        """judge: what is to be run, asked of rank 0, for so many ranks. Raises PiperError."""
        place = TorchrunRank.here()
        if dist.is_initialized():
            message, fix = "this process has a default process group of torch.distributed", "close() what has made it"
            allowed = "none: the runtime makes its own, one at a time"
            raise PiperError(ErrorKind.USAGE, message, key="runtime", allowed=allowed, suggestion=fix)
        torch.set_num_threads(1)
        o = options(place.world)
        o.check()
        judged = judge(place.world) if place.rank == 0 else None
        self._scratch = tempfile.TemporaryDirectory(prefix="piper-rank-", ignore_cleanup_errors=True)
        store, self._lookout = joined(place, Path(self._scratch.name), o, judged)
        context, default = rank_context(store, place, Path(self._scratch.name)), torch.get_default_device()
        try:
            self.prepared, self.plan = context.given()
            saving = settled(wanted, self.prepared, o.steps, real=True)
            self._lookout.meet(f"{plan_digest(self.plan)} from step {saving.first}")
            self._lookout.start()
            everybody = ALL, tuple(range(place.world)), frozenset({MessageKind.ALL_GATHER})
            self._rank = RankRun.of(context, PlanRun(o, saving), [everybody])
            make_default(default)  # that of a rank is for its own calls
        except BaseException as error:
            self._lookout.fall(error)  # does not return
        self._context = context
        self.steps, self.grad_norm = saving.first, float("nan")
        job = self.prepared.job
        self.sequences = self.prepared.mesh.sizes["dp"] * self.prepared.mbs * job.schedule.microbatch_size
        self._closed = False
        context.progress.outside()
        atexit.register(self._left)

    def __enter__(self) -> PlanRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Of an error in the loop's own code the other ranks are told, and end, too."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._end(error)

    def step(self, batch: Batch) -> float:
        """Train on one global batch, the same on every rank; returns its loss, the mean over its valid labels.

        batch: token ids (sequences, seq_len + 1), or ids and labels (sequences, seq_len) each, −100 where none counts.

        Raises PiperError (usage): it has another shape, a token outside the vocabulary, or ranks differ in it.
        """
        with self._call("step", batch) as batches:
            result = self._rank.run.step(self.steps, batches)
            self._after()
            self.steps += 1
            loss, self.grad_norm = self._loss(result.losses), self._norm(result)
        return loss

    def evaluate(self, batch: Batch) -> float:
        """The loss of a global batch, without an update and without dropout; it costs a step. Raises as `step` does."""
        with self._call("evaluate", batch) as batches:
            return self._loss(self._rank.evaluate(batches))

    def save(self) -> str:
        """Write a checkpoint to the folder that `runtime(save=…)` named, all ranks together; returns where it is.

        Raises PiperError (usage): none was named; (io): it cannot be written.
        """
        self._refuse_closed("save")
        keeper = self._rank.keeper
        if keeper is None or keeper.saving.save is None:
            message, fix = "no folder to save to", 'piper_sim.runtime(job, save="checkpoints")'
            raise PiperError(ErrorKind.USAGE, message, key="save", suggestion=fix)
        with self._call("save"):
            keeper.after(self.steps, self.steps, self._rank.transport)
            keeper.settle(self._rank.transport)
        return str(keeper.saved)

    def close(self) -> None:
        """End, all ranks together, and let go of the model and its states. A second time does nothing."""
        if self._closed:
            return
        with self._call("close"):
            self._closed = True
            self._rank.close()
        self._context.progress.end()
        self._lookout.part()
        self._scratch.cleanup()
        atexit.unregister(self._left)
        device = self._rank.device.torch
        del self._rank
        gc.collect()  # what refers to one another in it would keep a device's memory till Python has reason to look
        release(device)

    def _left(self) -> None:
        """The process ends, and nobody has closed: well, so close; or of an error, of which Python has told already."""
        told: BaseException | None = getattr(sys, "last_value", None)
        try:
            if told is not None:
                raise told
            self.close()
        except BaseException as error:
            if told is None:
                traceback.print_exception(error)
            self._lookout.fall(error)  # does not return

    @contextmanager
    def _call(self, what: str, *batch: Batch) -> Iterator[dict[int, PendingMicrobatch]]:
        """In a call that all ranks make: what the loop's own code has switched on or off is not the plan's."""
        self._refuse_closed(what)
        local, narrow = self._rank.local, torch.autocast(self._rank.device.torch.type, enabled=False)
        assert local is not None
        with made_on(local.default), torch.inference_mode(False), torch.enable_grad(), narrow:
            both = self._tokens(*batch) if batch else ()
            self._agree(what, both)
            try:
                yield self._batches(*both, step=self.steps if what == "step" else 0) if both else {}
            except Exception as error:
                if batch:  # in the middle of the plan, where others wait for what does not come: nobody can go on
                    self._end(error)
                raise
        self._context.progress.outside()

    def _end(self, error: BaseException) -> NoReturn:
        """Tell of an error here, the others of it, too, and end."""
        traceback.print_exception(error)
        self._lookout.fall(error)

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            message, fix = f"{what} behind close", "another piper_sim.runtime(job)"
            raise PiperError(ErrorKind.USAGE, message, key=what, suggestion=fix)

    def _agree(self, what: str, both: tuple[Tensor, ...]) -> None:
        """Ranks that part here would train on parts of two batches, or wait for one another. Raises PiperError."""
        digest = 0
        for x in both:
            digest = zlib.crc32(x.contiguous().numpy().data, digest)
        row = torch.tensor([CALLS.index(what), self.steps, digest], dtype=torch.float64, device="cpu")
        told = [[int(x) for x in r] for r in self._gathered(row, what).tolist()]
        self._context.progress.outside()
        if (odd := next((r for r, said in enumerate(told) if said != told[0]), None)) is not None:
            (one, first, _), (other, then, _) = told[0], told[odd]
            message, fix = f"rank {odd} has another batch than rank 0", "one seed for what draws or shuffles it"
            if (one, first) != (other, then):
                message = f"rank 0 calls {CALLS[one]} behind {first} steps, rank {odd} {CALLS[other]} behind {then}"
                fix = "decide by what all ranks know: the loss, or the step"
            raise PiperError(ErrorKind.USAGE, message, key=what, allowed="the same on every rank", suggestion=fix)

    def _batches(self, ids: Tensor, labels: Tensor, step: int) -> dict[int, PendingMicrobatch]:
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
        pair = isinstance(batch, tuple) or (isinstance(batch, list) and all(getattr(x, "ndim", 0) == 2 for x in batch))
        given = [_numbers(x) for x in (batch if pair else (batch,))]
        want = (self.sequences, length + (len(given) == 1))
        if any(tuple(x.shape) != want or x.dtype is not torch.int64 for x in given) or len(given) not in (1, 2):
            message = f"a batch of {', '.join(map(_form, given if pair else (batch,))) or 'nothing'}"
            allowed = f"token ids [{self.sequences}, {length + 1}], or ids and labels [{self.sequences}, {length}] each"
            fix = "(ids, labels), where a label is the token that comes next" if isinstance(batch, dict) else None
            raise PiperError(ErrorKind.USAGE, message, key="batch", allowed=allowed, suggestion=fix)
        ids, labels = given if len(given) == 2 else (given[0][:, :-1], given[0][:, 1:])
        self._check_vocabulary("label", labels[labels != TokenLoss.IGNORE], f", or {TokenLoss.IGNORE}")
        if self.prepared.job.model.graph is None:  # what a module of the user's own makes of a number is its own
            self._check_vocabulary("id", ids)
        return ids, labels

    def _check_vocabulary(self, name: str, tokens: Tensor, more: str = "") -> None:
        most = None if self.prepared.job.model.graph is not None else self.prepared.config.vocab - 1
        allowed = ("0 or more" if most is None else f"0 to {most}") + more
        for token in (int(tokens.max()), int(tokens.min())) if tokens.numel() else ():
            if token < 0 or (most is not None and token > most):
                message, fix = f"{name} {token} is outside the vocabulary", None
                if more and token < 0:
                    fix = f"{TokenLoss.IGNORE} where none counts"
                raise PiperError(ErrorKind.USAGE, message, key="batch", allowed=allowed, suggestion=fix)

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

    def _gathered(self, row: Tensor, what: str = "loss") -> Tensor:
        row = row.to(self._rank.device.torch)
        into = row.new_empty(self._context.world * row.numel())
        self._context.progress.wait(text=what)
        self._rank.transport.all_gather(ALL, into, row).wait()
        return into.view(self._context.world, -1).cpu()

    def _after(self) -> None:
        """What a run would keep for its trace, a loop without an end may not."""
        assert self._rank.local is not None
        self._rank.local.guide.take()
        self._rank.run.rows.clear()


def _numbers(given: object) -> Tensor:
    """As int64 on the host, where it is integers: of any width, byte order and layout, on any device."""
    if not isinstance(given, Tensor):
        try:
            array = np.asarray(given)
        except (TypeError, ValueError, RuntimeError):  # ragged; of tensors
            array = np.asarray(None)
        whole = array.dtype.kind in "iu"
        return torch.from_numpy(array.astype(np.int64)) if whole else torch.zeros(array.shape, device="cpu")
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        return given
    here = given.to("cpu", torch.int64)
    return here.clone() if here.is_inference() else here


def _form(given: object) -> str:
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", "")
    return type(given).__name__ if shape is None else f"{dtype} {list(shape)}"
