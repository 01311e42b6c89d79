"""Ranks that do one thing wrong, each the target of a launch in place of `executor.runtime.rank.train_rank`."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from executor.autograd.stage import Stage
from executor.measure.peak_bytes import DONE
from executor.optim.optimizer import ParamGradients
from executor.runtime.batch import Microbatch, MicrobatchLoader
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.kernels import TimedKernels
from executor.runtime.program import RankPlan
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from executor.transport.base import TransportHandle
from executor.transport.groups import GlooTransport
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.plan.plan import AT_START, Plan
from tests.executor.launch.events import others_wait, until


def no_reduction(ctx: RankContext, **spec: Any) -> Any:
    """Copies are updated from their own gradients alone."""

    def reduce_scatter(self: GlooTransport, group: str, into: Tensor, tensor: Tensor) -> TransportHandle:
        return DONE

    GlooTransport.reduce_scatter = reduce_scatter  # type: ignore[assignment,method-assign]
    return train_rank(ctx, **spec)


def scaled(factor: float, ctx: RankContext, spec: dict[str, Any]) -> Any:
    """Every gradient is so much larger."""
    add = ParamGradients.add
    ParamGradients.add = lambda self, name, grad, mb=0: add(self, name, factor * grad, mb)  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def doubled_gradients(ctx: RankContext, **spec: Any) -> Any:
    """As if the loss were a sum where it is a mean."""
    return scaled(2.0, ctx, spec)


class _Held:
    """A send that is posted after the one behind it."""

    def __init__(self) -> None:
        self.real: TransportHandle | None = None

    def done(self) -> bool:
        return self.real is not None and self.real.done()

    def wait(self) -> None:
        while self.real is None:
            time.sleep(0.001)
        self.real.wait()


def swapped_sends(ctx: RankContext, **spec: Any) -> Any:
    """Rank 0's first two messages overtake one another."""
    send = GlooTransport.send
    held: list[tuple[_Held, int, Tensor]] = []
    count = 0

    def late(self: GlooTransport, dst: int, tensor: Tensor) -> TransportHandle:
        nonlocal count
        count += 1
        if self.rank == 0 and count == 1:
            held.append((_Held(), dst, tensor))
            return held[0][0]
        real = send(self, dst, tensor)
        if held and held[0][0].real is None:
            held[0][0].real = send(self, *held[0][1:])
        return real

    GlooTransport.send = late  # type: ignore[assignment,method-assign]
    return train_rank(ctx, **spec)


def one_batch(ctx: RankContext, **spec: Any) -> Any:
    """All microbatches are the first one."""
    batch: Callable[[MicrobatchLoader, int, int, int], Microbatch] = MicrobatchLoader.batch
    MicrobatchLoader.batch = lambda self, step, replica, mb: batch(self, step, replica, 0)  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def freed_early(ctx: RankContext, **spec: Any) -> Any:
    """Rank 1 lets go of the activations it received before the forward that reads them."""

    def early(program: RankPlan, plan: Plan) -> None:
        reader = next(i for i in range(program.first, program.last) if plan.text(i) == "1F0")
        program.frees[reader, AT_START] = [v for v in program.received if v[2] == 0]

    return edited(early, ctx, spec)


def edited(edit: Callable[[RankPlan, Plan], None], ctx: RankContext, spec: dict[str, Any]) -> Any:
    """Rank 1 follows another plan than it was given."""
    of = RankPlan.of.__func__  # type: ignore[attr-defined]

    def other(cls: type[RankPlan], plan: Plan, rank: int) -> RankPlan:
        program: RankPlan = of(cls, plan, rank)
        if rank == 1:
            edit(program, plan)
        return program

    RankPlan.of = classmethod(other)  # type: ignore[method-assign,assignment]
    return train_rank(ctx, **spec)


def _at_last_w(kind: str, rank: int, ctx: RankContext, spec: dict[str, Any]) -> Any:
    """It happens in this rank's backward of microbatch 2, while all others wait."""
    work = Stage.work

    def late(self: Stage, at: int, passes: Sequence[tuple[Pass, str]]) -> None:
        if ctx.rank == rank and at == 2 and any(pass_ is Pass.W for pass_, _ in passes):
            others_wait(ctx)
            do(kind)
        work(self, at, passes)

    Stage.work = late  # type: ignore[method-assign,assignment]
    return train_rank(ctx, **spec)


def raising(ctx: RankContext, **spec: Any) -> Any:
    """Rank 1 raises in its backward of microbatch 2."""
    return _at_last_w("raise", 1, ctx, spec)


def refusing(ctx: RankContext, **spec: Any) -> Any:
    """Rank 1 finds its disk full."""
    if ctx.rank == 1:
        raise PiperError(ErrorKind.IO, "cannot save: No space left on device", file="keep", suggestion="make room")
    return train_rank(ctx, **spec)


def killed(ctx: RankContext, **spec: Any) -> Any:
    """Rank 1 is killed there."""
    return _at_last_w("kill", 1, ctx, spec)


def stopped(ctx: RankContext, **spec: Any) -> Any:
    """Rank 0 stops there, as under a debugger."""
    return _at_last_w("stop", 0, ctx, spec)


def lingering(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank 0 still works until there is a file `mark`."""

    def close(self: PlanInterpreter) -> None:
        if ctx.rank == 0:
            ctx.progress.op(0, "more")
            until(Path(fault["mark"]).exists)

    PlanInterpreter.close = close  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def do(kind: str) -> None:
    """It, to this process."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("bad luck")


def at_second_visit(ctx: RankContext, index: int, act: Callable[[str], None]) -> None:
    """Do it, given the op's text, when this rank comes to op `index` for the second time."""
    op, last, visits = ctx.progress.op, -1, 0

    def note(at: int, text: str) -> None:
        nonlocal last, visits
        op(at, text)
        visits += at == index != last
        last = at
        if visits == 2:
            visits += 1
            act(text)

    ctx.progress.op = note  # type: ignore[method-assign]


def at_op(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Something happens on rank `rank` when it comes to op `index` for the second time, and all others wait."""
    if ctx.rank != fault["rank"]:
        return train_rank(ctx, **spec)

    def act(_: str) -> None:
        others_wait(ctx)
        do(fault["kind"])

    at_second_visit(ctx, fault["index"], act)
    return train_rank(ctx, **spec)


def slow(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank `rank` takes `seconds` longer over each compute op."""
    hold = TimedKernels.hold

    def longer(self: TimedKernels, step: int, op: int, since_s: float, tick: Callable[[], None]) -> None:
        hold(self, step, op, since_s + (fault["seconds"] if ctx.rank == fault["rank"] else 0.0), tick)

    TimedKernels.hold = longer  # type: ignore[method-assign]
    return train_rank(ctx, **spec)
