"""From what a plan's text says to the plan: what the text leaves out follows from the graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import IntArray
from ir.graph.graph import Graph
from ir.plan.plan import OpKind, OpLists, OpShape, first_use


@dataclass
class PlanTextRows:
    """The ops of a text as columns, and what their lines say of others as pairs.

    begins: whether a dash marks the op. line: its line number. waits: (op, awaited op). frees: (op, slot among all
    nodes' writes, microbatch). named_frees: (op, the op the buffer is called after). allocs: the same and bytes.
    """

    file: str | None
    program: list[int] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    mb: list[int] = field(default_factory=list)
    mb2: list[int] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    line: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    frees: list[tuple[int, int, int]] = field(default_factory=list)
    named_frees: list[tuple[int, int]] = field(default_factory=list)
    allocs: list[tuple[int, int, int]] = field(default_factory=list)

    def wrong(self, row: int, what: str, fix: str | None = None) -> PiperError:
        """An error of one op's line."""
        return PiperError(
            ErrorKind.ILLEGAL_PLAN, what, file=self.file, key=f"line {self.line[row] + 1}", suggestion=fix
        )


class PlanTextColumns:
    """The text's columns as arrays, with what each op's shape says."""

    def __init__(self, raw: PlanTextRows, graph: Graph, shapes: tuple[OpShape, ...]) -> None:
        self.graph, self.shapes = graph, shapes
        self.base = np.concatenate([[0], np.cumsum([len(n.writes) for n in graph.nodes])]).astype(np.int64)
        self.program, self.shape, self.mb, self.mb2 = (
            np.array(c, dtype=np.int64) for c in (raw.program, raw.shape, raw.mb, raw.mb2)
        )
        self.kind = self.by_shape([int(s.kind) for s in shapes])
        self.carried = self.by_shape([int(self.base[s.slot[0]]) + s.slot[1] if s.slot else -1 for s in shapes])
        self.peer = self.by_shape([s.peer for s in shapes])
        self.op, self.cover = self._instances()

    def by_shape(self, values: list[int]) -> IntArray:
        """A column from one number per shape."""
        out: IntArray = np.array(values, dtype=np.int64)[self.shape]
        return out

    def _instances(self) -> tuple[IntArray, IntArray]:
        """[node, mb] -> op and cover, -1 where none runs; nodes of once per step have none."""
        op = np.full((len(self.graph.nodes), self.graph.mbs), -1, dtype=np.int64)
        cover = np.zeros_like(op)
        once = [n.once for n in self.graph.nodes]
        for c in range(max((len(s.covers) for s in self.shapes), default=0)):
            pairs = [s.covers[c] if len(s.covers) > c and not once[s.covers[c][0]] else (-1, 0) for s in self.shapes]
            node, member = self.by_shape([n for n, _ in pairs]), self.by_shape([m for _, m in pairs])
            rows = np.flatnonzero(node >= 0)
            mb = np.where(member[rows] == 0, self.mb[rows], self.mb2[rows])
            op[node[rows], mb], cover[node[rows], mb] = rows, c
        return op, cover

    def readers(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(slot, microbatch, reading op, its cover) of every data edge's instances that are there."""
        nodes, mbs = self.graph.nodes, self.graph.mbs
        edges = [e for e in self.graph.edges if not e.join and not nodes[e.src].once and not nodes[e.dst].once]
        src, slot, dst = (np.array([getattr(e, k) for e in edges], dtype=np.int64) for k in ("src", "slot", "dst"))
        op, cover = self.op[dst].ravel(), self.cover[dst].ravel()
        some = op >= 0
        slots, mb = np.repeat(self.base[src] + slot, mbs), np.tile(np.arange(mbs), len(edges))
        return slots[some], mb[some], op[some], cover[some]


def columns_plan(raw: PlanTextRows, c: PlanTextColumns, header: Mapping[str, str]) -> dict[str, object]:
    """All columns of the plan but its buffers. Ops that are missing or doubled stay so: `check_plan` names them."""
    row, on = np.array(raw.waits, dtype=np.int64).reshape(-1, 2).T
    by = np.lexsort((on, row))
    return dict(
        graph=c.graph,
        header=header,
        shapes=c.shapes,
        program=c.program,
        shape=c.shape,
        mb=c.mb,
        mb2=c.mb2,
        waits=OpLists.of(len(c.shape), row[by], on[by]),
        partner=_partner(c),
        collective=_collective(c),
        unit=_unit(raw, c),
    )


def _partner(c: PlanTextColumns) -> IntArray:
    """Sends and receives of one buffer and microbatch that name each other's programs."""
    out = np.full(len(c.shape), -1, dtype=np.int64)
    programs = int(max(c.program.max(initial=0), c.peer.max(initial=0))) + 1
    send, recv = np.flatnonzero(c.kind == OpKind.SEND), np.flatnonzero(c.kind == OpKind.RECV)

    def key(rows: IntArray, source: IntArray, target: IntArray) -> IntArray:
        pair = source[rows] * programs + target[rows]
        return (pair * int(c.base[-1]) + c.carried[rows]) * c.graph.mbs + c.mb[rows]

    sent, got = key(send, c.program, c.peer), key(recv, c.peer, c.program)
    _, a, b = np.intersect1d(sent, got, return_indices=True)
    out[send[a]], out[recv[b]] = recv[b], send[a]
    return out


def _collective(c: PlanTextColumns) -> IntArray:
    nodes = c.graph.nodes
    first = [s.covers[0][0] if s.covers else -1 for s in c.shapes]
    out = c.by_shape([n if n >= 0 and nodes[n].once and len(nodes[n].groups) > 1 else -1 for n in first])
    met = out >= 0
    out[met] = first_use(out[met])[1]
    return out


def _unit(raw: PlanTextRows, c: PlanTextColumns) -> IntArray:
    """Units count at marks; a send belongs to its producer's, a receive to its first consumer's; the rest to none."""
    nodes = c.graph.nodes
    base = c.by_shape([int(bool(s.covers) and not nodes[s.covers[0][0]].once) for s in c.shapes]) == 1
    count = np.cumsum(np.array(raw.begins, dtype=bool) & base)
    first = np.searchsorted(c.program, c.program)
    before = np.where(first > 0, count[np.maximum(first - 1, 0)], 0)
    unit: IntArray = np.where(base, count - before - 1, -1)
    send = np.flatnonzero(c.kind == OpKind.SEND)
    made = c.op[np.searchsorted(c.base, c.carried[send], side="right") - 1, c.mb[send]]
    unit[send] = np.where(made >= 0, unit[made], -1)
    slot, mb, op, _ = c.readers()
    recv = np.flatnonzero(c.kind == OpKind.RECV)
    programs = int(c.program.max(initial=0)) + 1
    wanted = (c.carried[recv] * c.graph.mbs + c.mb[recv]) * programs + c.program[recv]
    have = (slot * c.graph.mbs + mb) * programs + c.program[op]
    by = np.lexsort((op, have))
    at = np.searchsorted(have[by], wanted)
    ok = at < len(by)
    ok[ok] = have[by][at[ok]] == wanted[ok]
    unit[recv[ok]] = unit[op[by][at[ok]]]
    return unit
