"""From what a plan's text says to the plan: what the text leaves out follows from the graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.graph.graph import Graph
from ir.graph.zero import part_nodes, readers
from ir.plan.plan import (
    AT_START,
    CATEGORIES,
    Buffers,
    CollectiveRole,
    OpKind,
    OpLists,
    OpShape,
    first_use,
    sorted_buffers,
)
from ir.plan.vocabulary import OpVocabulary


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


class PlanTextBuffers:
    """Buffers called after nodes come first (numbers 0 … local − 1), then those called after ops.

    text: the text of an op, for errors. Raises PiperError (illegal_plan): a free of what is not there, or a second one.
    """

    def __init__(self, raw: PlanTextRows, c: PlanTextColumns, words: OpVocabulary, text: Callable[[int], str]) -> None:
        self.raw, self.c, self.words, self.text = raw, c, words, text
        nodes, mbs = c.graph.nodes, c.graph.mbs
        writes = [(i, s, b) for i, n in enumerate(nodes) if not n.once for s, b in enumerate(n.writes) if b.bytes > 0]
        node = np.repeat(np.array([i for i, _, _ in writes], dtype=np.int64), mbs)
        slot = np.repeat(np.array([s for _, s, _ in writes], dtype=np.int64), mbs)
        size = np.repeat(np.array([b.bytes for _, _, b in writes], dtype=np.int64), mbs)
        kind = np.repeat(np.array([CATEGORIES.index(str(b.category)) for _, _, b in writes], dtype=np.int64), mbs)
        mb = np.tile(np.arange(mbs), len(writes))
        runs = c.op[node, mb] >= 0
        node, slot, mb = node[runs], slot[runs], mb[runs]
        self.local = len(node)
        self.of = np.full((int(c.base[-1]), mbs), -1, dtype=np.int64)
        self.of[c.base[node] + slot, mb] = np.arange(self.local)
        rows, size_of, alloc, alloc_cover = self._named()
        self.named = np.full(len(c.shape), -1, dtype=np.int64)
        self.named[rows] = self.local + np.arange(len(rows))
        self.columns = {
            "node": np.concatenate([node, np.full(len(rows), -1)]),
            "slot": np.concatenate([slot, rows]),
            "mb": np.concatenate([mb, c.mb[rows]]),
            "bytes": np.concatenate([size[runs], size_of]),
            "alloc": np.concatenate([c.op[node, mb], alloc]),
            "alloc_cover": np.concatenate([c.cover[node, mb], alloc_cover]),
            "category": np.concatenate([kind[runs], np.full(len(rows), CATEGORIES.index("buffers"))]),
        }

    def _named(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(naming op, bytes, op that begins it, cover) of received, gathered and reduced buffers."""
        c = self.c
        size = np.array([b.bytes for n in c.graph.nodes for b in n.writes], dtype=np.int64)
        recv = np.flatnonzero(c.kind == OpKind.RECV)
        recv = recv[size[c.carried[recv]] > 0]
        ag = [s.message.bytes if s.message and s.role is CollectiveRole.GATHER else 0 for s in c.shapes]
        made = c.by_shape(ag)
        gather = np.flatnonzero(made)
        op, naming, given = np.array(self.raw.allocs, dtype=np.int64).reshape(-1, 3).T
        covers = (self._bucket_covers(int(r), int(o), makes=True) for r, o in zip(naming, op, strict=True))
        cover = np.array([min(c, default=0) for c in covers], dtype=np.int64)  # the first W
        zero = np.zeros(len(recv) + len(gather), dtype=np.int64)
        return (
            np.concatenate([recv, gather, naming]),
            np.concatenate([size[c.carried[recv]], made[gather], given]),
            np.concatenate([recv, gather, op]),
            np.concatenate([zero, cover]),
        )

    def _bucket_covers(self, naming: int, op: int, *, makes: bool) -> list[int]:
        """The covers of an op that read the bucket which another op gathers, or make what another op reduces."""
        found, graph = self.words.buckets.get(self.c.shapes[int(self.c.shape[naming])].bucket), self.c.graph
        if found is None:
            return []
        nodes = part_nodes(graph, found, frozenset({Pass.W})) if makes else readers(graph, found)
        return [k for k, (n, _) in enumerate(self.c.shapes[int(self.c.shape[op])].covers) if n in nodes]

    def buffers(self) -> Buffers:
        """All columns."""
        alloc = self.columns["alloc"]
        free = self._free()
        buffer, op, cover = self._reads()
        inside = np.ones(len(alloc), dtype=bool)
        inside[buffer[op != alloc[buffer]]] = False
        inside[self.local :] = False
        own = inside & (free < 0)
        free[own] = alloc[own]
        end = np.where(free == alloc, self.columns["alloc_cover"], AT_START)
        dies = op == free[buffer]
        np.maximum.at(end, buffer[dies], cover[dies])
        memo: dict[tuple[int, int], int] = {}
        for k in np.flatnonzero(free[self.local :] >= 0).tolist():
            naming, at = int(self.columns["slot"][self.local + k]), int(free[self.local + k])
            shape = self.c.shapes[int(self.c.shape[naming])]
            if shape.role is CollectiveRole.GATHER:
                key = int(self.c.shape[naming]), int(self.c.shape[at])
                if key not in memo:
                    memo[key] = max(self._bucket_covers(naming, at, makes=False), default=AT_START)
                end[self.local + k] = memo[key]
        return sorted_buffers({**self.columns, "free": free, "free_cover": np.where(free >= 0, end, 0)})

    def _free(self) -> IntArray:
        """The op that frees each buffer, as the text says; -1 where it says nothing."""
        op, slot, mb = np.array(self.raw.frees, dtype=np.int64).reshape(-1, 3).T
        row, naming = np.array(self.raw.named_frees, dtype=np.int64).reshape(-1, 2).T
        rows = np.concatenate([op, row])
        buffer = np.concatenate([self.of[slot, mb], self.named[naming]])
        lost = np.flatnonzero(buffer < 0)
        if len(lost):
            k = int(lost[0])
            raise self.raw.wrong(int(rows[k]), f"{self.text(int(rows[k]))} frees a buffer that nothing writes")
        by = np.argsort(buffer, kind="stable")
        again = np.flatnonzero(np.diff(buffer[by]) == 0)
        if len(again):
            first, second = int(rows[by[again[0]]]), int(rows[by[again[0] + 1]])
            raise self.raw.wrong(second, f"{self.text(second)} frees a buffer that {self.text(first)} frees")
        free = np.full(len(self.columns["alloc"]), -1, dtype=np.int64)
        free[buffer] = rows
        return free

    def _reads(self) -> tuple[IntArray, IntArray, IntArray]:
        """(buffer, reading op, its cover); a send or collective reads from outside, at no cover."""
        c = self.c
        slot, mb, op, cover = c.readers()
        held = self.of[slot, mb]
        local = (held >= 0) & (c.program[op] == c.program[np.maximum(self.columns["alloc"][held], 0)])
        recv = np.flatnonzero((c.kind == OpKind.RECV) & (self.named >= 0))
        programs = int(c.program.max(initial=0)) + 1
        have = (c.carried[recv] * c.graph.mbs + c.mb[recv]) * programs + c.program[recv]
        want = (slot * c.graph.mbs + mb) * programs + c.program[op]
        by = np.argsort(have)
        at = np.minimum(np.searchsorted(have[by], want), max(len(have) - 1, 0))
        far = ~local & (have[by[at]] == want if len(have) else np.zeros(len(want), dtype=bool))
        send = np.flatnonzero(c.kind == OpKind.SEND)
        sent = self.of[c.carried[send], c.mb[send]]
        send, sent = send[sent >= 0], sent[sent >= 0]
        cover = np.where(c.kind[op] == OpKind.COMPUTE, cover, AT_START)
        return (
            np.concatenate([held[local], self.named[recv[by[at[far]]]] if len(have) else held[:0], sent]),
            np.concatenate([op[local], op[far], send]),
            np.concatenate([cover[local], cover[far], np.full(len(send), AT_START)]),
        )
