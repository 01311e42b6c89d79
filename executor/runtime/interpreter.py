"""Runs one program of a plan, op by op in dispatch order: one function per op kind, and no strategy's name anywhere.

Compute runs in the loop (on a CPU) or is launched by it (CUDA); communication is queued on its stream where the plan
dispatches it, behind the compute launched before it, and waited for where the plan waits: by the host, and by the
device's compute lane. What a free names is let go there; nothing is freed by polling. Buffers inside a stage are
autograd's and go when the pass that reads them last has run, which the plan's frees foresee.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from executor.device import clock
from executor.device.device import Device
from executor.device.progress import RankProgress
from executor.optim.sync import Start
from executor.parallel.expert_all_to_all import ExpertTransfer
from executor.runtime.batch import PendingMicrobatch, unit_extras
from executor.runtime.kernels import Kernels
from executor.runtime.program import PassStretch, ProgramOp, RankPlan, Value
from executor.transport.base import DelayedTransport, JoinedTransport, LandingTransport, Transport, TransportHandle
from executor.transport.streams import PendingTraceRow, Stream, StreamOp
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.plan.plan import AT_START, OpKind

CPU = torch.device("cpu")
RESULTS = "results"  # what a device is told of where the last op has been dispatched
Row = tuple[int, str, str, float, float, float]  # step, stream, op, post_s, start_s, end_s


@dataclass
class StepResult:
    """What one step leaves on one rank.

    losses: by microbatch, where the last stage is here; tests: of an evaluation behind it. grad_norm: where the plan
    takes it. squares: else, of this rank's share by parameter; their sum over ranks is the squared norm.
    """

    losses: dict[int, float] = field(default_factory=dict)
    tests: dict[int, float] = field(default_factory=dict)
    grad_norm: float | None = None
    squares: list[float] = field(default_factory=list)


class PlanInterpreter:
    """One rank. boundary: makes an empty tensor of what crosses a stage boundary.

    delay_s: by which the ends of transfers, and of collectives of a microbatch, are put off. by_node: note how long
    each node takes.
    """

    def __init__(
        self,
        program: RankPlan,
        kernels: Kernels,
        transport: Transport,
        progress: RankProgress,
        device: Device,
        boundary: Callable[[], Tensor],
        delay_s: float = 0.0,
        *,
        by_node: bool = False,
    ) -> None:
        self.program, self.kernels, self.stages, self.sync = program, kernels, kernels.stages, kernels.sync
        self.transport, self.progress, self.device, self.boundary = transport, progress, device, boundary
        self.delay_s, self.by_node = delay_s, by_node
        self.rows: list[Row] = []
        self.parts: list[tuple[int, int, list[float]]] = []  # step, compute op, seconds of each node; by_node
        self._lane = device.lane("compute")
        self._pending: list[PendingTraceRow] = []
        self._values: dict[Value, Tensor] = {}
        self._under: dict[int, PendingTraceRow] = {}  # communication ops that the host has not yet seen end
        self._trades: dict[int, ExpertTransfer] = {}  # exchanges among these, which hold what they send until then
        self._streams: dict[str, Stream] = {}
        self._latest: dict[str, StreamOp] = {}
        self._batches: Mapping[int, PendingMicrobatch] = {}
        self._units = {s: tuple(stage.units) for s, stage in self.stages.items()}
        self._alone = {*kernels.extras, *(u for units in self._units.values() for u in (units[0], units[-1]))}
        apart = None if by_node else self._alone
        self.ops = [program.op(i, apart) for i in range(program.first, program.last)]
        self._run: dict[OpKind, Callable[[int, PendingTraceRow], None]] = {
            OpKind.COMPUTE: self._compute,
            OpKind.SEND: self._send,
            OpKind.RECV: self._recv,
            OpKind.COLLECTIVE: self._collective,
        }
        self._losses: dict[int, Tensor | float] = {}
        self._step = 0

    def step(self, number: int, batches: Mapping[int, PendingMicrobatch]) -> StepResult:
        """Run every op once. batches: of the microbatches that `RankPlan.batches` lists. Raises TransportError."""
        p, self._batches, self._step = self.program, batches, number
        self._losses.clear()
        with self._lane():
            self.sync.begin()
            for i, op in enumerate(self.ops, p.first):
                self.progress.op(i, op.text)
                self.device.at(op.text)
                row = PendingTraceRow(op.stream, op.text, clock.now())
                self._pending.append(row)
                self._run[op.kind](i, row)
            self.device.at(RESULTS)
            for i in sorted(self._under):
                self._wait(i, None)
            self._settle()
            found = self._results()
            self.device.at("")
            return found

    def _op(self, i: int) -> ProgramOp:
        return self.ops[i - self.program.first]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _settle(self) -> None:
        """Wait until the device has caught up, op by op, so that a device that hangs is seen to hang at one."""
        for k, row in enumerate(self._pending):
            if not row.last.done():
                if row.queued is None:
                    self.progress.op(self.program.first + k, row.op)
                else:  # it blocks on others: whoever waits is not who hangs
                    self.progress.wait(self.program.others(self.program.first + k), row.op)
                row.last.wait()
            self.rows.append((self._step, row.stream, row.op, row.post_s, *row.span()))
        self._pending.clear()

    def _results(self) -> StepResult:
        assert not any(s.in_flight for s in self.stages.values()), "a microbatch is left over"
        self._values.clear()
        norm = self.sync.norm
        found: list[Any] = list(self._losses.values())
        if found and self.device.ahead:
            found = torch.stack(found).tolist()
        losses = dict(zip(self._losses, found, strict=True))
        if norm is None:
            return StepResult(losses, squares=self.sync.squares().tolist())
        return StepResult(losses, grad_norm=float(norm))

    # -- communication ------------------------------------------------------------------------------------------------

    def _send(self, i: int, row: PendingTraceRow) -> None:
        tensor = self._take(self.program.value(i), i)
        self._queue(i, row, partial(self.transport.send, self.program.peer(i), tensor), self.delay_s)

    def _recv(self, i: int, row: PendingTraceRow) -> None:
        into = self._values[self.program.value(i)] = self.boundary()
        self._queue(i, row, partial(self.transport.recv, self.program.peer(i), into), self.delay_s)

    def _collective(self, i: int, row: PendingTraceRow) -> None:
        meeting = self.program.meetings[i]
        if meeting.exchange:
            post, land = self._exchange(i, row, meeting.group)
        elif meeting.bucket:
            post, land = self.sync.start(meeting, self.transport)
        else:  # the norm: its operand is computed here, from what the collectives before it left
            waits = self._op(i).waits
            for w in [w for w, under in self._under.items() if w in waits or under.stream == row.stream]:
                self._wait(w, i)
            post, land = self.sync.start(meeting, self.transport)
        before = self._latest.get(row.stream)
        self._queue(i, row, post, 0.0 if meeting.once else self.delay_s, [] if before is None else [before], land)

    def _exchange(self, i: int, row: PendingTraceRow, group: str) -> Start:
        """What is to travel between units on different ranks. How many rows do is waited for, and read, before."""
        if (counts := self.program.counted.get(i)) is not None:
            self._wait(counts, i)
        ((_, node, mb),) = self.program.covers(i)
        trade = self._trades[i] = self.stages[node.stage].exchange(Pass(str(node.kind)), mb, node.part)
        row.post_s = clock.now()
        land = None if trade.counts is None else partial(trade.counts.fetch, self.device)
        return lambda: JoinedTransport(trade.post(partial(self.transport.all_to_all, group))), land

    def _queue(
        self,
        i: int,
        row: PendingTraceRow,
        post: Callable[[], TransportHandle],
        delay_s: float,
        before: Sequence[StreamOp] = (),
        land: Callable[[], None] | None = None,
    ) -> None:
        """Put op i on its stream. before: what must be over first, beside what the plan waits for; land: what its
        stream does at its end."""
        waits = [self._under[w].queued for w in self._op(i).waits if w in self._under]
        given = partial(self._given, i, row.op, post)
        late = (lambda: DelayedTransport(given(), delay_s)) if delay_s else given
        ends = late if land is None else (lambda: LandingTransport(late(), land))
        row.queued = StreamOp(ends, [*before, *(q for q in waits if q is not None)], self.device.mark())
        self._under[i] = row
        if row.stream not in self._streams:
            self._streams[row.stream] = Stream(row.stream, self.device)
        self._streams[row.stream].put(row.queued)
        self._latest[row.stream] = row.queued

    def _given(self, i: int, text: str, post: Callable[[], TransportHandle]) -> TransportHandle:
        self.progress.posting(i, text)
        try:
            return post()
        finally:
            self.progress.posted(i)

    def _wait(self, op: int, now: int | None) -> None:
        """Go on behind a communication op; compute runs in order anyway. now: the op that waits."""
        if op not in self._under:
            return
        queued = self._under.pop(op).queued
        assert queued is not None
        if not queued.done():
            self.progress.wait(self.program.others(op), self._op(op).text)
            queued.wait()
            if now is not None:
                self.progress.op(now, self._op(now).text)
        queued.wait()
        assert queued.end is not None
        self.device.follow(queued.end)
        if (trade := self._trades.pop(op, None)) is not None:
            trade.end()

    # -- compute ------------------------------------------------------------------------------------------------------

    def _compute(self, i: int, row: PendingTraceRow) -> None:
        for w in self._op(i).waits:
            self._wait(w, i)
        row.start, since_s = self.device.mark(), clock.now()
        self._work(i)
        self.kernels.hold(self._step, i, since_s, self.progress.go_on)
        row.end = self.device.mark()

    def _work(self, i: int) -> None:
        p = self.program
        self._free(i, AT_START)
        ends = [clock.now()]
        for stretch in self._op(i).stretches:
            for exchange in p.brought.get(stretch.first, ()):
                self._wait(p.exchanged[exchange, stretch.mb], i)  # where an earlier op's wait implies it
            for bucket, of in p.opens.get((i, stretch.cover), ()):
                self.sync.open(bucket, of)
            if stretch.first in p.gathered:
                self.sync.reads(p.gathered[stretch.first], self._op(i).text)
            if stretch.passes:
                self._passes(i, stretch)
            else:
                self.sync.update()
            self._free(i, stretch.end)
            if self.by_node:
                ends.append(clock.now())
        if self.by_node:
            self.parts.append((self._step, i, [b - a for a, b in pairwise(ends)]))

    def _passes(self, i: int, stretch: PassStretch) -> None:
        """What a stage does, and what it is given and gives where it begins and where it ends."""
        pass_, part = stretch.passes[0]
        if part in self._alone and pass_ is Pass.F:
            self._forward(i, stretch, part)
        elif part in self._alone and pass_ is Pass.I:
            self._input_grad(i, stretch, part)
        else:
            self.stages[stretch.stage].work(stretch.mb, stretch.passes)

    def _forward(self, i: int, at: PassStretch, part: str) -> None:
        stage, units, mb = self.stages[at.stage], self._units[at.stage], at.mb
        if part == units[0]:
            outer = self.program.outer.get(at.first)
            stage.feed(mb, self._batches[mb].ids if outer is None else self._take((*outer, mb), i))
        if (wants := self.kernels.extras.get(part)) is not None:
            stage.feed_extra(mb, part, *self._extras(mb, wants))
        stage.work(mb, at.passes)
        if part != units[-1]:
            return
        (out,) = stage.take_output(mb)
        if (slot := self.program.crosses.get(at.first)) is not None:
            self._values[at.first, slot, mb] = out
        else:
            self._losses[mb] = out if self.device.ahead else out.item()

    def _extras(self, mb: int, wants: tuple[str, ...]) -> tuple[object, ...]:
        """What a unit reads of the batch; numbers are known where no batch is, between the ends of the model."""
        known = (self._step, self.program.number_of(mb), not self.sync.frozen)
        return unit_extras(wants, known, self._batches.get(mb), self.device.torch)

    def _input_grad(self, i: int, at: PassStretch, part: str) -> None:
        stage, units, mb = self.stages[at.stage], self._units[at.stage], at.mb
        if part == units[-1] and (outer := self.program.outer.get(at.first)) is not None:
            stage.feed_grad(mb, self._take((*outer, mb), i))
        stage.work(mb, at.passes)
        if part == units[0]:
            (grad,) = stage.take_input_grad(mb)
            if (slot := self.program.crosses.get(at.first)) is not None:
                assert grad is not None
                self._values[at.first, slot, mb] = grad

    # -- values that cross stages -------------------------------------------------------------------------------------

    def _take(self, value: Value, i: int) -> Tensor:
        """A value that another stage made, here or elsewhere, and that op i reads."""
        if (brought := self.program.received.get(value)) is not None:
            self._wait(brought, i)  # where the plan leaves the wait out, because an earlier op's wait implies it
        if value not in self._values:
            node = self.program.plan.graph.nodes[value[0]].text(value[2])
            message = f"{self.program.plan.text(i)} reads what {node} made, which was freed already or never came"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message)
        return self._values[value]

    def _free(self, i: int, cover: int) -> None:
        for value in self.program.frees.get((i, cover), ()):
            self._values.pop(value, None)
        for meeting in self.program.closes.get((i, cover), ()):
            self.sync.close(meeting)


def boundary(
    size: int, length: int, hidden: int, dtype: torch.dtype, device: torch.device = CPU
) -> Callable[[], Tensor]:
    """Makes receive buffers: what crosses a stage boundary is (sequences, tokens, hidden).

    >>> boundary(1, 4, 8, torch.float32)().shape
    torch.Size([1, 4, 8])
    """
    return lambda: torch.empty(size, length, hidden, dtype=dtype, device=device)
