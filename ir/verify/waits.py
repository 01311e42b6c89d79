"""What a plan's waits prove: every result is there before it is read; communication follows what it may overwrite."""

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.graph.graph import illegal
from ir.plan.plan import OpKind, Plan
from ir.verify.coverage import BufferReads, OpInstances, carried

Pairs = tuple[IntArray, IntArray]  # (writer, reader) ops of one program


class OpWaits:
    """A plan's waits, per pair of streams as one running maximum: how far into the one has the other waited."""

    def __init__(self, plan: Plan) -> None:
        self._stream, self._streams, self._ops = plan.stream, len(plan.streams), len(plan)
        row, on = plan.waits.rows(), plan.waits.items
        before = self._pair(row, on) * self._ops
        by = np.argsort(before + row)
        self._key = (before + row)[by]
        # A later pair's numbers are larger than any of those before it, so that its maximum starts anew.
        self._reach = np.maximum.accumulate((before + on)[by])

    def _pair(self, row: IntArray, on: IntArray) -> IntArray:
        return self._stream[row] * self._streams + self._stream[on]

    def prove(self, row: IntArray, on: IntArray) -> BoolArray:
        """For each pair: do stream order and the waits of `row`'s stream say that op `on` has ended before `row`?"""
        same = self._stream[row] == self._stream[on]
        ok: BoolArray = same & (on < row)
        if not len(self._key):
            return ok
        before = self._pair(row, on) * self._ops
        at = np.searchsorted(self._key, before + row, side="right") - 1
        ok |= ~same & (at >= 0) & (self._reach[at] >= before + on)
        return ok


def check_waits(plan: Plan, found: OpInstances, read: BufferReads, more: IntArray, waits: OpWaits) -> None:
    """Raise on the first op that could start before something it reads is there. more: further (writer, reader)."""
    _check_local(plan)
    _check_inside(plan, read)
    pairs = [_data(plan, found, read), _after_dispatched(plan), (more[:, 0], more[:, 1])]
    writer, reader = (np.concatenate(x) for x in zip(*pairs, strict=True))
    ok = waits.prove(reader, writer)
    bad = np.flatnonzero(~ok)
    if not len(bad):
        _check_behind(plan)
        return
    k = int(bad[np.argmin(reader[bad])])
    r, w = int(reader[k]), int(writer[k])
    if plan.stream[r] == plan.stream[w] and r < w:
        raise illegal(f"{plan.where(r)} stands before {plan.text(w)}, whose result it needs", "swap them")
    raise illegal(f"{plan.where(r)} does not wait for {plan.text(w)}, which it needs", f"wait {plan.text(w)}")


def _check_local(plan: Plan) -> None:
    row, on = plan.waits.rows(), plan.waits.items
    stray = np.flatnonzero(plan.program[row] != plan.program[on])
    if len(stray):
        r, w = int(row[stray[0]]), int(on[stray[0]])
        there = f"{plan.text(w)} of program {int(plan.program[w])}"
        fix = "a wait is local; another program's result comes by a receive"
        raise illegal(f"{plan.where(r)} waits for {there}", fix)


def _check_behind(plan: Plan) -> None:
    """A wait is for an op dispatched before: on a GPU, waiting for an event not yet recorded is no wait at all."""
    row, on = plan.waits.rows(), plan.waits.items
    ahead = np.flatnonzero(on >= row)
    if len(ahead) and plan.header.get("p2p") != "use":
        r, w = int(row[ahead[0]]), int(on[ahead[0]])
        message = f"{plan.where(r)} waits for {plan.text(w)}, which is dispatched behind it"
        raise illegal(message, f"put {plan.text(w)} first")


def _check_inside(plan: Plan, read: BufferReads) -> None:
    """Inside an op, what is read is written before."""
    bad = np.flatnonzero((read.writer == read.reader) & (read.writer_cover >= read.reader_cover))
    if len(bad):
        row = int(read.writer[bad[0]])
        raise illegal(f"{plan.where(row)} reads inside what it has not written yet")


def _data(plan: Plan, found: OpInstances, read: BufferReads) -> Pairs:
    near = np.flatnonzero((read.send < 0) & (read.writer != read.reader))
    far = np.flatnonzero(read.send >= 0)
    # A send needs its buffer even where no edge of the graph asks for the transfer.
    send = np.flatnonzero(plan.kind == OpKind.SEND)
    node = np.searchsorted(read.base, carried(plan, read.base)[send], side="right") - 1
    writer = [read.writer[near], plan.partner[read.send[far]], found.op[node, plan.mb[send]]]
    return np.concatenate(writer), np.concatenate([read.reader[near], read.reader[far], send])


def _after_dispatched(plan: Plan) -> Pairs:
    """A communication op follows the compute op dispatched before it, whose memory it may be given."""
    none = np.zeros(0, dtype=np.int64)
    if plan.header.get("p2p") == "use":
        return none, none
    compute = plan.kind == OpKind.COMPUTE
    last = np.maximum.accumulate(np.where(compute, np.arange(len(plan)), -1))
    comm = np.flatnonzero(~compute & (last >= 0))
    comm = comm[plan.program[last[comm]] == plan.program[comm]]
    return last[comm], comm
