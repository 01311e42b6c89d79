"""Runs one program of a plan, op by op in dispatch order: one function per op kind, and no strategy's name anywhere.

Compute runs in the loop (on a CPU) or is launched by it (CUDA); communication is queued on its stream where the plan
dispatches it, behind the compute launched before it, and waited for where the plan waits: by the host, and by the
device's compute lane. What a free names is let go there; nothing is freed by polling. Buffers inside a stage are
autograd's and go when the pass that reads them last has run, which the plan's frees foresee.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from executor.parallel.collective import Collective
from executor.parallel.expert_all_to_all import ExpertTransfer
from executor.runtime.batch import PendingMicrobatch, unit_extras
from executor.runtime.kernels import Kernels, RankStage
from executor.runtime.program import PassStretch, ProgramOp, RankPlan, Value
from executor.transport.base import DelayedTransport, JoinedTransport, LandingTransport, Transport, TransportHandle
from executor.transport.streams import PendingTraceRow, Stream, StreamOp
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.plan.plan import AT_START, OpKind

RESULTS = "results"  # what a device is told of where the last op has been dispatched
Act = Callable[[], object]
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
        self._calls = [self._call(op) for op in self.ops]
        self._losses: dict[int, Tensor | float] = {}
        self._step = 0
        self._cold = device.ahead

    def step(self, number: int, batches: Mapping[int, PendingMicrobatch]) -> StepResult:
        """Run every op once. batches: of the microbatches that `RankPlan.batches` lists. Raises TransportError."""
        self._batches, self._step = batches, number
        self._losses.clear()
        if self.device.ahead:
            self.progress.cold(self._cold)
            self._cold = False
        show, at, pending, now = self.progress.op, self.device.at, self._pending, clock.now
        with self._lane():
            self.sync.begin()
            for op, call in zip(self.ops, self._calls, strict=True):
                show(op.index, op.text)
                at(op.text)
                row = PendingTraceRow(op.stream, op.text, now())
                pending.append(row)
                call(row)
            self.device.at(RESULTS)
            for i in sorted(self._under):
                self._wait(i, None)
            self._settle()
            found = self._results()
            self.device.at("")
            return found

    def _call(self, op: ProgramOp) -> Callable[[PendingTraceRow], None]:
        """What an op does, given its row of the trace: all that is the same in every step is looked up here."""
        p, i = self.program, op.index
        match op.kind:
            case OpKind.COMPUTE:
                return partial(self._compute, op, list(self._acts(op)))
            case OpKind.SEND:
                return partial(self._send, op, p.value(i), p.peer(i))
            case OpKind.RECV:
                return partial(self._recv, op, p.value(i), p.peer(i))
            case OpKind.COLLECTIVE:
                return partial(self._collective, op, p.meetings[i])

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _settle(self) -> None:
        """Wait until the device has caught up, op by op, so that a device that hangs is seen to hang at one."""
        for op, row in zip(self.ops, self._pending, strict=True):
            if not row.last.done():
                if row.queued is None:
                    self.progress.op(op.index, op.text)
                else:  # it blocks on others: whoever waits is not who hangs
                    self.progress.wait(self.program.others(op.index), op.text)
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

    def _send(self, op: ProgramOp, value: Value, peer: int, row: PendingTraceRow) -> None:
        self._queue(op, row, partial(self.transport.send, peer, self._take(value, op)), self.delay_s)

    def _recv(self, op: ProgramOp, value: Value, peer: int, row: PendingTraceRow) -> None:
        into = self._values[value] = self.boundary()
        self._queue(op, row, partial(self.transport.recv, peer, into), self.delay_s)

    def _collective(self, op: ProgramOp, meeting: Collective, row: PendingTraceRow) -> None:
        if meeting.exchange:
            post, land = self._exchange(op, row, meeting.group)
        elif meeting.bucket:
            post, land = self.sync.start(meeting, self.transport)
        else:  # the norm: its operand is computed here, from what the collectives before it left
            for w in [w for w, under in self._under.items() if w in op.waits or under.stream == row.stream]:
                self._wait(w, op)
            post, land = self.sync.start(meeting, self.transport)
        before = self._latest.get(row.stream)
        self._queue(op, row, post, 0.0 if meeting.once else self.delay_s, () if before is None else (before,), land)

    def _exchange(self, op: ProgramOp, row: PendingTraceRow, group: str) -> Start:
        """What is to travel between units on different ranks. How many rows do is waited for, and read, before."""
        if (counts := self.program.counted.get(op.index)) is not None:
            self._wait(counts, op)
        ((_, node, mb),) = self.program.covers(op.index)
        trade = self._trades[op.index] = self.stages[node.stage].exchange(Pass(str(node.kind)), mb, node.part)
        row.post_s = clock.now()
        land = None if trade.counts is None else partial(trade.counts.fetch, self.device)
        return lambda: JoinedTransport(trade.post(partial(self.transport.all_to_all, group))), land

    def _queue(
        self,
        op: ProgramOp,
        row: PendingTraceRow,
        post: Callable[[], TransportHandle],
        delay_s: float,
        before: Sequence[StreamOp] = (),
        land: Callable[[], None] | None = None,
    ) -> None:
        """Put an op on its stream. before: what must be over first, beside what the plan waits for; land: what its
        stream does at its end."""
        needs = *before, *(q for w in op.waits if w in self._under and (q := self._under[w].queued) is not None)
        given = partial(self._given, op, post)
        late = (lambda: DelayedTransport(given(), delay_s)) if delay_s else given
        ends = late if land is None else (lambda: LandingTransport(late(), land))
        row.queued = StreamOp(ends, needs, self.device.mark())
        self._under[op.index] = row
        if row.stream not in self._streams:
            self._streams[row.stream] = Stream(row.stream, self.device)
        self._streams[row.stream].put(row.queued)
        self._latest[row.stream] = row.queued

    def _given(self, op: ProgramOp, post: Callable[[], TransportHandle]) -> TransportHandle:
        self.progress.posting(op.index, op.text)
        try:
            return post()
        finally:
            self.progress.posted(op.index)

    def _wait(self, on: int, op: ProgramOp | None) -> None:
        """Go on behind a communication op. op: the one that waits."""
        if (under := self._under.pop(on, None)) is None:
            return
        queued = under.queued
        assert queued is not None
        if not queued.done():
            self.progress.wait(self.program.others(on), under.op)
            queued.wait()
            if op is not None:
                self.progress.op(op.index, op.text)
        queued.wait()
        assert queued.end is not None
        self.device.follow(queued.end)
        if (trade := self._trades.pop(on, None)) is not None:
            trade.end()

    # -- compute ------------------------------------------------------------------------------------------------------

    def _compute(self, op: ProgramOp, acts: Sequence[Act], row: PendingTraceRow) -> None:
        for w in op.waits:
            self._wait(w, op)
        row.start, since_s = self.device.mark(), clock.now()
        for act in acts:
            act()
        self.kernels.hold(self._step, op.index, since_s, self.progress.go_on)
        row.end = self.device.mark()

    def _acts(self, op: ProgramOp) -> Iterator[Act]:
        """What a compute op does, one after the other."""
        p, i, ends = self.program, op.index, list[float]()
        yield from self._frees(i, AT_START)
        if self.by_node:
            yield lambda: ends.append(clock.now())
        for stretch in op.stretches:
            for exchange in p.brought.get(stretch.first, ()):  # where an earlier op's wait implies it
                yield partial(self._wait, p.exchanged[exchange, stretch.mb], op)
            for bucket, of in p.opens.get((i, stretch.cover), ()):
                yield partial(self.sync.open, bucket, of)
            if stretch.first in p.gathered:
                yield partial(self.sync.reads, p.gathered[stretch.first], op.text)
            yield from self._passes(op, stretch) if stretch.passes else [self.sync.update]
            yield from self._frees(i, stretch.end)
            if self.by_node:
                yield lambda: ends.append(clock.now())
        if self.by_node:
            yield partial(self._note_nodes, i, ends)

    def _note_nodes(self, i: int, ends: list[float]) -> None:
        self.parts.append((self._step, i, [b - a for a, b in pairwise(ends)]))
        ends.clear()

    def _frees(self, i: int, cover: int) -> Iterator[Act]:
        for value in self.program.frees.get((i, cover), ()):
            yield partial(self._values.pop, value, None)
        for meeting in self.program.closes.get((i, cover), ()):
            yield partial(self.sync.close, meeting)

    def _passes(self, op: ProgramOp, at: PassStretch) -> Iterator[Act]:
        """What a stage does, and what it is given and gives where it begins and where it ends."""
        (pass_, part), stage, mb, units = at.passes[0], self.stages[at.stage], at.mb, self._units[at.stage]
        outer, slot = self.program.outer.get(at.first), self.program.crosses.get(at.first)
        reads = None if outer is None else (*outer, mb)
        makes = None if slot is None else (at.first, slot, mb)
        if pass_ is Pass.F and part == units[0]:
            yield partial(self._feed, stage, mb, reads, op)
        if pass_ is Pass.F and (wants := self.kernels.extras.get(part)) is not None:
            yield partial(self._feed_extras, stage, mb, part, wants)
        if pass_ is Pass.I and part == units[-1] and reads is not None:
            yield partial(self._feed_grad, stage, mb, reads, op)
        yield partial(stage.work, mb, at.passes)
        if pass_ is Pass.F and part == units[-1]:
            yield partial(self._take_output, stage, mb, makes)
        if pass_ is Pass.I and part == units[0]:
            yield partial(self._take_input_grad, stage, mb, makes)

    def _feed(self, stage: RankStage, mb: int, reads: Value | None, op: ProgramOp) -> None:
        stage.feed(mb, self._batches[mb].ids if reads is None else self._take(reads, op))

    def _feed_extras(self, stage: RankStage, mb: int, unit: str, wants: tuple[str, ...]) -> None:
        """What a unit reads of the batch; numbers are known where no batch is, between the ends of the model."""
        known = (self._step, self.program.number_of(mb), not self.sync.frozen)
        stage.feed_extra(mb, unit, *unit_extras(wants, known, self._batches.get(mb), self.device.torch))

    def _feed_grad(self, stage: RankStage, mb: int, reads: Value, op: ProgramOp) -> None:
        stage.feed_grad(mb, self._take(reads, op))

    def _take_output(self, stage: RankStage, mb: int, makes: Value | None) -> None:
        (out,) = stage.take_output(mb)
        if makes is None:
            self._losses[mb] = out if self.device.ahead else out.item()
        else:
            self._values[makes] = out

    def _take_input_grad(self, stage: RankStage, mb: int, makes: Value | None) -> None:
        (grad,) = stage.take_input_grad(mb)
        if makes is not None:
            assert grad is not None
            self._values[makes] = grad

    # -- values that cross stages -------------------------------------------------------------------------------------

    def _take(self, value: Value, op: ProgramOp) -> Tensor:
        """A value that another stage made, here or elsewhere, and that an op reads."""
        if (brought := self.program.received.get(value)) is not None:
            self._wait(brought, op)  # where the plan leaves the wait out, because an earlier op's wait implies it
        if value not in self._values:
            node = self.program.plan.graph.nodes[value[0]].text(value[2])
            message = f"{op.text} reads what {node} made, which was freed already or never came"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message)
        return self._values[value]
