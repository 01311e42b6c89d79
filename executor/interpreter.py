"""Runs one program of a plan, op by op in dispatch order: one function per op kind, and no strategy's name anywhere.

Inline host: compute runs in the loop; communication is queued on its stream where the plan dispatches it, and waited
for where the plan waits. What a free names is let go there; nothing is freed by polling. Buffers inside a stage are
autograd's and go when the pass that reads them last has run, which the plan's frees foresee.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from executor.chunk import Stage
from executor.data import Batch
from executor.program import Program, Value
from executor.progress import Progress
from executor.streams import Queued, Stream
from executor.sync import Sync
from executor.transport.base import Handle, Transport
from ir.errors import ErrorKind, PiperError
from ir.graph import Node
from ir.ops import Pass
from ir.plan import AT_START, OpKind

Row = tuple[int, str, str, float, float, float]  # step, stream, op, post_s, start_s, end_s


@dataclass
class StepResult:
    """What one step leaves on one rank.

    losses: by microbatch, where the last stage is here. grad_norm: where the plan takes it. squares: else, of this
    rank's share by parameter; their sum over ranks is the squared norm.
    """

    losses: dict[int, float] = field(default_factory=dict)
    grad_norm: float | None = None
    squares: list[float] = field(default_factory=list)


class Interpreter:
    """One rank. stages: the parts of the model that live here, by stage. extras: what a unit reads of the batch.

    boundary: makes an empty tensor of what crosses a stage boundary.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        extras: Mapping[str, tuple[str, ...]],
        sync: Sync,
        transport: Transport,
        progress: Progress,
        boundary: Callable[[], Tensor],
    ) -> None:
        self.program, self.stages, self.extras = program, stages, extras
        self.sync, self.transport, self.progress, self.boundary = sync, transport, progress, boundary
        self.rows: list[Row] = []
        self._values: dict[Value, Tensor] = {}
        self._under: dict[int, tuple[Queued, int]] = {}  # op → as its stream has it, its row in the trace
        self._streams: dict[str, Stream] = {}
        self._latest: dict[str, Queued] = {}
        self._batches: Mapping[int, Batch] = {}
        self._units = {s: tuple(stage.units) for s, stage in stages.items()}
        self._result = StepResult()

    def step(self, number: int, batches: Mapping[int, Batch]) -> StepResult:
        """Run every op once. batches: of the microbatches that `Program.batches` lists. Raises TransportError."""
        p = self.program
        self._result, self._batches = StepResult(), batches
        self.sync.begin()
        for i in range(p.first, p.last):
            shape, text = p.shape(i), p.plan.text(i)
            self.progress.op(i, text)
            now = time.monotonic()
            row = len(self.rows)
            self.rows.append((number, shape.stream, text, now, now, now))
            match OpKind(shape.kind):
                case OpKind.COMPUTE:
                    for w in p.plan.waits.row(i).tolist():
                        self._wait(w, i)
                    start = time.monotonic()
                    self._compute(i)
                    self.rows[row] = (number, shape.stream, text, now, start, time.monotonic())
                case OpKind.SEND:
                    self._send(i, row)
                case OpKind.RECV:
                    self._recv(i, row)
                case OpKind.COLLECTIVE:
                    self._collective(i, row)
        for i in sorted(self._under):
            self._wait(i, None)
        assert not any(s.in_flight for s in self.stages.values()), "a microbatch is left over"
        self._values.clear()
        self._result.grad_norm = self.sync.norm
        if self._result.grad_norm is None:
            self._result.squares = self.sync.squares().tolist()
        return self._result

    def close(self) -> None:
        """After the last step."""
        for stream in self._streams.values():
            stream.close()

    # -- communication ------------------------------------------------------------------------------------------------

    def _send(self, i: int, row: int) -> None:
        tensor = self._take(self.program.value(i), i)
        self._queue(i, row, partial(self.transport.send, self.program.peer(i), tensor))

    def _recv(self, i: int, row: int) -> None:
        into = self._values[self.program.value(i)] = self.boundary()
        self._queue(i, row, partial(self.transport.recv, self.program.peer(i), into))

    def _collective(self, i: int, row: int) -> None:
        post = self.sync.start(self.program.covers(i)[0][1], self.transport)
        before = self._latest.get(self.program.shape(i).stream)
        self._queue(i, row, post, [] if before is None else [before])

    def _queue(self, i: int, row: int, post: Callable[[], Handle], before: Sequence[Queued] = ()) -> None:
        """Put op i on its stream. before: what must have ended first, beside what the plan waits for."""
        waits = [w for w in self.program.plan.waits.row(i).tolist() if w in self._under]
        queued = Queued(post, [*before, *(self._under[w][0] for w in waits)])
        self._under[i] = queued, row
        name = self.program.shape(i).stream
        if name not in self._streams:
            self._streams[name] = Stream(name)
        self._streams[name].put(queued)
        self._latest[name] = queued

    def _wait(self, op: int, now: int | None) -> None:
        """Block until a communication op has ended; compute has, when the loop is past it. now: the op that waits."""
        if op not in self._under:
            return
        queued, row = self._under.pop(op)
        if not queued.done():
            self.progress.wait(self.program.others(op), self.program.plan.text(op))
            queued.wait()
            if now is not None:
                self.progress.op(now, self.program.plan.text(now))
        queued.wait()
        step, stream, text, posted, _, _ = self.rows[row]
        self.rows[row] = (step, stream, text, posted, queued.start_s, queued.end_s)

    # -- compute ------------------------------------------------------------------------------------------------------

    def _compute(self, i: int) -> None:
        self._free(i, AT_START)
        for cover, (index, node, mb) in enumerate(self.program.covers(i)):
            if node.once:
                self.sync.update()
            else:
                stage = self.stages[node.stage]
                match Pass(str(node.kind)):
                    case Pass.F:
                        self._forward(i, index, node, mb)
                    case Pass.I:
                        self._input_grad(i, index, node, mb)
                    case Pass.W | Pass.R:
                        stage.run(Pass(str(node.kind)), mb, [node.part])
            self._free(i, cover)

    def _forward(self, i: int, index: int, node: Node, mb: int) -> None:
        stage, units = self.stages[node.stage], self._units[node.stage]
        if node.part == units[0]:
            outer = self.program.outer.get(index)
            stage.feed(mb, self._batches[mb].ids if outer is None else self._take((*outer, mb), i))
        if (wants := self.extras.get(node.part)) is not None:
            stage.feed_extra(mb, node.part, *self._batches[mb].extras(wants))
        stage.run(Pass.F, mb, [node.part])
        if node.part != units[-1]:
            return
        (out,) = stage.take_output(mb)
        if (slot := self.program.crosses.get(index)) is not None:
            self._values[index, slot, mb] = out
        else:
            self._result.losses[mb] = out.item()

    def _input_grad(self, i: int, index: int, node: Node, mb: int) -> None:
        stage, units = self.stages[node.stage], self._units[node.stage]
        if node.part == units[-1] and (outer := self.program.outer.get(index)) is not None:
            stage.feed_grad(mb, self._take((*outer, mb), i))
        stage.run(Pass.I, mb, [node.part])
        if node.part == units[0]:
            (grad,) = stage.take_input_grad(mb)
            if (slot := self.program.crosses.get(index)) is not None:
                assert grad is not None
                self._values[index, slot, mb] = grad

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


def boundary(size: int, length: int, hidden: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Makes receive buffers: what crosses a stage boundary is (sequences, tokens, hidden).

    >>> boundary(1, 4, 8, torch.float32)().shape
    torch.Size([1, 4, 8])
    """
    return lambda: torch.empty(size, length, hidden, dtype=dtype)
