"""Every buffer is written where its node runs, and freed once, on a compute op whose waits prove every reader done."""

import numpy as np

from ir.core.errors import PiperError
from ir.core.order import IntArray
from ir.graph.graph import illegal
from ir.plan.plan import OpKind, Plan
from ir.verify.coverage import BufferReads, OpInstances
from ir.verify.waits import OpWaits

Readers = tuple[IntArray, IntArray, IntArray]  # op, cover, buffer


def check_buffers(plan: Plan, found: OpInstances, read: BufferReads, flat: IntArray, waits: OpWaits) -> None:
    """Raise on a buffer that is missing or twice there, and on a free that comes too early or at a wrong place.

    flat: [op, cover, the op that a gathered or reduced buffer they use is called after].
    """
    b = plan.buffers
    of = _written(plan, found, read.base)
    freed = np.flatnonzero(b.free >= 0)
    at = b.free[freed]
    _refuse(plan, freed[plan.program[at] != plan.program[b.alloc[freed]]], "on another program than holds it")
    comm = (plan.kind[at] != OpKind.COMPUTE) & (at != b.alloc[freed])
    _refuse(plan, freed[comm], "on a communication op; frees stand on compute ops")
    early = (at < b.alloc[freed]) | ((at == b.alloc[freed]) & (b.free_cover[freed] < b.alloc_cover[freed]))
    _refuse(plan, freed[early], "before it is written")
    _check_readers(plan, readers(plan, read, flat, of), waits)


def _check_readers(plan: Plan, found: Readers, waits: OpWaits) -> None:
    """Readers come behind the write, and are done where the buffer dies."""
    b, (op, cover, buffer) = plan.buffers, found
    soon = np.flatnonzero((op < b.alloc[buffer]) | ((op == b.alloc[buffer]) & (cover < b.alloc_cover[buffer])))
    if len(soon):
        row, name = int(op[soon[0]]), plan.buffer_name(int(buffer[soon[0]]))
        raise illegal(f"{plan.where(row)} uses {name} before it is there")
    _inside(plan, op, buffer)
    freeing = b.free[buffer]
    own = op == freeing
    torn = np.flatnonzero(own & (cover > b.free_cover[buffer]))
    if len(torn):
        raise _early(plan, int(buffer[torn[0]]), "before it has read it itself")
    rest = np.flatnonzero((freeing >= 0) & ~own)
    ok = waits.prove(freeing[rest], op[rest])
    if not ok.all():
        bad = rest[~ok]
        after = op[bad] > freeing[bad]  # read after it is freed: nearer to the cause than a free nobody proves
        k = int(bad[np.lexsort((freeing[bad], ~after))[0]])
        raise _early(plan, int(buffer[k]), f"while {plan.text(int(op[k]))} may still read it")


def _written(plan: Plan, found: OpInstances, base: IntArray) -> IntArray:
    """[slot of all nodes' writes, microbatch] -> buffer. Each buffer with a size is there once, where its node runs."""
    g, b = plan.graph, plan.buffers
    of = np.full((int(base[-1]), g.mbs), -1, dtype=np.int64)
    own = np.flatnonzero(b.node >= 0)
    at = base[b.node[own]] + b.slot[own], b.mb[own]
    of[at] = own
    twice = np.flatnonzero(of[at] != own)
    if len(twice):
        raise illegal(f"buffer {plan.buffer_name(int(own[twice[0]]))} is there twice", "write and free it once")
    astray = np.flatnonzero(found.op[b.node[own], b.mb[own]] != b.alloc[own])
    if len(astray):
        k = int(own[astray[0]])
        raise illegal(f"buffer {plan.buffer_name(k)} is written by {plan.text(int(b.alloc[k]))}")
    nodes = [(i, n) for i, n in enumerate(g.nodes) if not n.once]
    sized = np.array([base[i] + s for i, n in nodes for s, w in enumerate(n.writes) if w.bytes > 0], dtype=np.int64)
    lost = np.argwhere(of[sized] < 0)
    if len(lost):
        slot, mb = int(sized[lost[0][0]]), int(lost[0][1])
        node = int(np.searchsorted(base, slot, side="right")) - 1
        n = g.nodes[node]
        raise illegal(f"{n.text(mb)} writes {n.writes[slot - int(base[node])].slot}, but the plan has no such buffer")
    return of


def readers(plan: Plan, read: BufferReads, uses: IntArray, of: IntArray) -> Readers:
    """(op, cover, buffer): who reads which buffer on the program that holds it. A send reads what it carries.

    Raises PiperError (illegal_plan): an op reads or sends what no buffer holds.
    """
    named = np.full(len(plan), -1, dtype=np.int64)
    by_op = np.flatnonzero(plan.buffers.node < 0)
    named[plan.buffers.slot[by_op]] = by_op
    held = of[read.slot, read.mb] if len(of) else np.full(len(read.slot), -1)
    far = read.send >= 0
    arrived = named[plan.partner[np.maximum(read.send, 0)]]
    size = np.array([w.bytes for n in plan.graph.nodes for w in n.writes], dtype=np.int64)
    brings = np.concatenate([plan.partner[read.send[far & (size[read.slot] > 0)]], uses[:, 2]])
    lost = brings[named[brings] < 0]
    if len(lost):
        raise illegal(f"{plan.where(int(lost[0]))} has no buffer")
    ops = [read.reader, read.send[far], uses[:, 0]]
    covers = [read.reader_cover, np.full(np.count_nonzero(far), -1), uses[:, 1]]
    buffers = [np.where(far, arrived, held), held[far], named[uses[:, 2]]]
    op, cover, buffer = (np.concatenate(x) for x in (ops, covers, buffers))
    some = buffer >= 0
    return op[some], cover[some], buffer[some]


def _inside(plan: Plan, op: IntArray, buffer: IntArray) -> None:
    """What nobody reads outside the op that writes it dies with that op."""
    b = plan.buffers
    outside = np.zeros(len(b), dtype=bool)
    outside[buffer[op != b.alloc[buffer]]] = True
    k = np.flatnonzero(~outside & (b.free != b.alloc))
    if len(k):
        name, row = plan.buffer_name(int(k[0])), int(b.alloc[k[0]])
        raise illegal(
            f"program {int(plan.program[row])}: {name} is read by {plan.text(row)} alone, but not freed there"
        )


def _refuse(plan: Plan, buffers: IntArray, why: str) -> None:
    if len(buffers):
        raise _early(plan, int(buffers[0]), why)


def _early(plan: Plan, buffer: int, why: str) -> PiperError:
    row = int(plan.buffers.free[buffer])
    message = f"{plan.where(row)} frees {plan.buffer_name(buffer)} {why}"
    return illegal(message, "free it on a compute op that waits for all its readers")
