"""The buffers of a plan read from text: where each begins follows from the graph, where it ends the text says."""

from collections.abc import Callable

import numpy as np

from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.graph.zero import part_nodes
from ir.plan.plan import AT_START, CATEGORIES, Buffers, CollectiveRole, OpKind, sorted_buffers
from ir.plan.rebuild import PlanTextColumns, PlanTextRows
from ir.plan.vocabulary import OpVocabulary


def read_buffers(raw: PlanTextRows, c: PlanTextColumns, words: OpVocabulary, text: Callable[[int], str]) -> Buffers:
    """All of them. Raises PiperError (illegal_plan) on a free of what is not there, or a second one.

    text: the text of an op, for errors.
    """
    return _Reading(raw, c, words, text).buffers()


class _Reading:
    """Buffers called after nodes come first (numbers 0 … local − 1), then those called after ops."""

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
        cover = np.array([self._first_w(int(r), int(o)) for r, o in zip(naming, op, strict=True)], dtype=np.int64)
        zero = np.zeros(len(recv) + len(gather), dtype=np.int64)
        return (
            np.concatenate([recv, gather, naming]),
            np.concatenate([size[c.carried[recv]], made[gather], given]),
            np.concatenate([recv, gather, op]),
            np.concatenate([zero, cover]),
        )

    def _bucket_covers(self, naming: int, op: int, passes: frozenset[Pass]) -> list[int]:
        """The covers of an op that work on the bucket which another op gathers or reduces."""
        found = self.words.buckets.get(self.c.shapes[int(self.c.shape[naming])].bucket)
        nodes = set(part_nodes(self.c.graph, found, passes)) if found else set()
        return [k for k, (n, _) in enumerate(self.c.shapes[int(self.c.shape[op])].covers) if n in nodes]

    def _first_w(self, naming: int, op: int) -> int:
        return min(self._bucket_covers(naming, op, frozenset({Pass.W})), default=0)

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
        everything = frozenset(Pass)
        memo: dict[tuple[int, int], int] = {}
        for k in np.flatnonzero(free[self.local :] >= 0).tolist():
            naming, at = int(self.columns["slot"][self.local + k]), int(free[self.local + k])
            shape = self.c.shapes[int(self.c.shape[naming])]
            if shape.role is CollectiveRole.GATHER:
                key = int(self.c.shape[naming]), int(self.c.shape[at])
                if key not in memo:
                    memo[key] = max(self._bucket_covers(naming, at, everything), default=AT_START)
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
