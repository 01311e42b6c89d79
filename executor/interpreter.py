"""Runs one program of a plan, op by op in dispatch order: one function per op kind, and no strategy's name anywhere.

Inline host: compute runs in the loop, communication is posted where the plan dispatches it and waited for where the
plan waits. What a free names is let go there; nothing is freed by polling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.chunk import Stage
from executor.data import Batch
from executor.progress import Progress
from executor.sync import Sync
from executor.transport.base import Handle, Transport
from ir.graph import Node
from ir.ops import Pass
from ir.plan import OpKind, Plan

Value = tuple[int, int, int]  # (node, slot, microbatch)
Row = tuple[int, str, str, float, float, float]  # step, stream, op, post_s, start_s, end_s


@dataclass
class _Posted:
    """Communication under way: its handle, what to do once it has ended, its row in the trace."""

    handle: Handle
    row: int
    finish: Callable[[], None] | None = None


@dataclass
class StepResult:
    """What one step leaves on one rank. losses: by microbatch, where the last stage is here."""

    losses: dict[int, float] = field(default_factory=dict)
    grad_norm: float | None = None


class Interpreter:
    """One rank. stages: the parts of the model that live here, by stage. batch: microbatch data of a step."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: dict[int, Stage],
        extras: dict[str, tuple[str, ...]],
        sync: Sync,
        transport: Transport,
        progress: Progress,
        act: Callable[[], Tensor],
    ) -> None:
        self.plan, self.rank, self.stages, self.extras = plan, rank, stages, extras
        self.sync, self.transport, self.progress, self.act = sync, transport, progress, act
        self.first, self.last = int(plan.bounds[rank]), int(plan.bounds[rank + 1])
        self.rows: list[Row] = []
        self._values: dict[Value, Tensor] = {}
        self._posted: dict[int, _Posted] = {}
        self._received = self._receives()
        self._outer = self._outer_inputs()
        self._frees = self._freed_values()
        self._batches: dict[int, Batch] = {}
        self._tail: dict[str, int] = {}

    # -- what the plan says about values that cross stages ------------------------------------------------------------

    def _receives(self) -> dict[Value, int]:
        """The receive op that brings each value here."""
        out = {}
        for i in range(self.first, self.last):
            shape = self.plan.shapes[int(self.plan.shape[i])]
            if shape.kind is OpKind.RECV and shape.slot is not None:
                out[(*shape.slot, int(self.plan.mb[i]))] = i
        return out

    def _outer_inputs(self) -> dict[int, tuple[int, int]]:
        """The (node, slot) of another stage that a node takes as its input or output gradient."""
        nodes = self.plan.graph.nodes
        out: dict[int, tuple[int, int]] = {}
        for e in self.plan.graph.edges:
            src, dst = nodes[e.src], nodes[e.dst]
            if not e.join and not src.once and not dst.once and src.stage != dst.stage and src.kind is dst.kind:
                out[e.dst] = (e.src, e.slot)
        return out

    def _freed_values(self) -> dict[int, list[Value]]:
        """Per op, the cross-stage values whose buffers it frees."""
        b, plan = self.plan.buffers, self.plan
        out: dict[int, list[Value]] = {}
        for k in range(len(b)):
            op = int(b.free[k])
            if not self.first <= op < self.last:
                continue
            if b.node[k] >= 0:
                out.setdefault(op, []).append((int(b.node[k]), int(b.slot[k]), int(b.mb[k])))
            else:
                row = int(b.slot[k])
                slot = plan.shapes[int(plan.shape[row])].slot
                if slot is not None:
                    out.setdefault(op, []).append((*slot, int(plan.mb[row])))
        return out

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, number: int, batch: Callable[[int], Batch]) -> StepResult:
        """Run every op once. Raises TransportError where a peer is gone."""
        result = StepResult()
        self.sync.begin()
        self._batches.clear()
        self._tail.clear()
        for i in range(self.first, self.last):
            text = self.plan.text(i)
            self.progress.op(i, text)
            for w in self.plan.waits.row(i).tolist():
                self._wait(w)
            shape = self.plan.shapes[int(self.plan.shape[i])]
            now = time.monotonic()
            self.rows.append((number, shape.stream, text, now, now, now))
            row = len(self.rows) - 1
            match OpKind(shape.kind):
                case OpKind.COMPUTE:
                    self._compute(i, batch, result)
                    self._ended(row)
                case OpKind.SEND:
                    self._send(i, row)
                case OpKind.RECV:
                    self._recv(i, row)
                case OpKind.COLLECTIVE:
                    self._collective(i, row)
            for value in self._frees.get(i, ()):
                self._values.pop(value, None)
        for i in sorted(self._posted):
            self._wait(i)
        result.grad_norm = self.sync.norm
        assert not any(s.in_flight for s in self.stages.values()), "a microbatch is left over"
        self._values.clear()
        return result

    def _ended(self, row: int) -> None:
        step, stream, op, post, start, _ = self.rows[row]
        self.rows[row] = (step, stream, op, post, start, time.monotonic())

    def _wait(self, op: int) -> None:
        """Block until a posted op has ended. Compute has ended when the loop is past it."""
        posted = self._posted.pop(op, None)
        if posted is None:
            return
        if not posted.handle.done():
            self.progress.wait(self._peers(op), self.plan.text(op))
        posted.handle.wait()
        self.progress.go_on()
        if posted.finish is not None:
            posted.finish()
        self._ended(posted.row)

    def _peers(self, op: int) -> list[int]:
        partner = int(self.plan.partner[op])
        if partner >= 0:
            return [int(self.plan.program[partner])]
        node, _ = self.plan.shapes[int(self.plan.shape[op])].covers[0]
        return [g for g in self.plan.graph.nodes[node].groups if g != self.rank]

    # -- one function per op kind -------------------------------------------------------------------------------------

    def _compute(self, i: int, batch: Callable[[int], Batch], result: StepResult) -> None:
        shape = self.plan.shapes[int(self.plan.shape[i])]
        mbs = (int(self.plan.mb[i]), int(self.plan.mb2[i]))
        for index, member in shape.covers:
            node, mb = self.plan.graph.nodes[index], mbs[member]
            if node.once:
                self.sync.update()
                continue
            if mb not in self._batches:
                self._batches[mb] = batch(mb)
            match Pass(str(node.kind)):
                case Pass.F:
                    self._forward(index, node, mb, result)
                case Pass.I:
                    self._input_grad(index, node, mb)
                case Pass.W | Pass.R:
                    self.stages[node.stage].run(Pass(str(node.kind)), mb, [node.part])

    def _forward(self, index: int, node: Node, mb: int, result: StepResult) -> None:
        stage = self.stages[node.stage]
        names = list(stage.units)
        if node.part == names[0]:
            outer = self._outer.get(index)
            stage.feed(mb, self._batches[mb].ids if outer is None else self._value(outer, mb).requires_grad_())
        if (wants := self.extras.get(node.part)) is not None:
            stage.feed_extra(mb, node.part, *self._batches[mb].extras(wants))
        stage.run(Pass.F, mb, [node.part])
        if node.part == names[-1]:
            (out,) = stage.take_output(mb)
            if node.stage == self.plan.graph.stages - 1:
                result.losses[mb] = out.item()
            else:
                self._values[index, 0, mb] = out.detach()

    def _input_grad(self, index: int, node: Node, mb: int) -> None:
        stage = self.stages[node.stage]
        names = list(stage.units)
        if node.part == names[-1] and (outer := self._outer.get(index)) is not None:
            stage.feed_grad(mb, self._value(outer, mb))
        stage.run(Pass.I, mb, [node.part])
        if node.part == names[0]:
            grads = stage.take_input_grad(mb)
            if grads and grads[0] is not None:
                self._values[index, 0, mb] = grads[0].detach()

    def _value(self, outer: tuple[int, int], mb: int) -> Tensor:
        """A value another stage made, here or elsewhere."""
        value = (*outer, mb)
        if (row := self._received.get(value)) is not None:
            self._wait(row)
        return self._values[value]

    def _send(self, i: int, row: int) -> None:
        slot = self.plan.shapes[int(self.plan.shape[i])].slot
        assert slot is not None
        tensor = self._values[(*slot, int(self.plan.mb[i]))].contiguous()
        peer = int(self.plan.program[int(self.plan.partner[i])])
        self._posted[i] = _Posted(self.transport.send(peer, tensor), row)

    def _recv(self, i: int, row: int) -> None:
        slot = self.plan.shapes[int(self.plan.shape[i])].slot
        assert slot is not None
        into = self.act()
        self._values[(*slot, int(self.plan.mb[i]))] = into
        peer = int(self.plan.program[int(self.plan.partner[i])])
        self._posted[i] = _Posted(self.transport.recv(peer, into), row)

    def _collective(self, i: int, row: int) -> None:
        shape = self.plan.shapes[int(self.plan.shape[i])]
        node, _ = shape.covers[0]
        if (before := self._tail.get(shape.stream)) is not None:
            self._wait(before)  # a stream runs in order; the plan leaves such waits out
        self._tail[shape.stream] = i
        started = self.sync.start(self.plan.graph.nodes[node], self.transport)
        if started is None:
            self._ended(row)
        else:
            handle, finish = started
            self._posted[i] = _Posted(handle, row, finish)


def empty_like_activation(size: int, length: int, hidden: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Makes receive buffers: what crosses a stage boundary is (sequences, tokens, hidden).

    >>> empty_like_activation(1, 4, 8, torch.float32)().shape
    torch.Size([1, 4, 8])
    """
    return lambda: torch.empty(size, length, hidden, dtype=dtype)
