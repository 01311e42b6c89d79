"""The ops that a graph can have, by stream and text: what a line of a plan's text may say."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ir.core.errors import nearest
from ir.core.ops import Pass
from ir.graph.graph import COMPUTE, Graph, GraphNode
from ir.graph.sync import Bucket, buckets
from ir.graph.zero import per_microbatch
from ir.plan.names import MessageNames, OpLabels, fused_text, gather_shape, node_shape, reduction_shape
from ir.plan.plan import CollectiveRole, OpKind, OpShape

_TRANSFER = re.compile(r"(send>|recv<|p2p[<>])(0|[1-9]\d{0,5})", re.ASCII)
_AGAIN = re.compile(r"(\S+)\+([1-9]\d{0,8})", re.ASCII)  # the text of a gather of what was gathered before
_NUMBER = re.compile(r"/?~([2-9]|[1-9]\d{1,3})$", re.ASCII)  # what tells ops of one label apart
_SLOT = re.compile(r"(\d{1,9}[FIWR])(0|[1-9]\d{0,8})(/\S+)?\.([^\s./:]+)", re.ASCII)


class OpVocabulary:
    """Shapes by (stream cell, text with * for microbatches), and buffers by name.

    >>> from ir.graph.build import stage_graph
    >>> words = OpVocabulary(stage_graph(2), programs=2)
    >>> words.find("compute", "1F*").covers, words.find("send>1", "0SEND_F*").slot, words.find("compute", "7F*")
    (((3, 0),), (0, 0), None)
    """

    def __init__(self, graph: Graph, programs: int) -> None:
        self.graph, self.programs = graph, programs
        self.names, self.labels = MessageNames(graph), OpLabels(graph)
        self.covers: dict[str, int] = {}
        self._of: dict[tuple[str, str], OpShape] = {}
        self._slots: dict[tuple[str, str, str], int] = {}
        base = 0
        for i, n in enumerate(graph.nodes):
            shape = node_shape(graph, i)
            self._of[shape.stream, shape.text] = shape
            if not n.once and n.stream == COMPUTE:
                self.covers[shape.text] = i
            for slot in n.writes:
                self._slots[f"{n.stage}{n.kind}", f"/{n.part}" if n.part else "", slot.slot] = base
                base += 1
        self.buckets = {b.key: b for b in per_microbatch(buckets(graph))}
        self._flat = {s.text: s for b in self.buckets.values() for s in self._shapes(b)}

    def define(self, text: str, words: Sequence[str]) -> str | None:
        """Learn what a coalesced op covers; returns what is wrong with it, if anything is."""
        if (COMPUTE, text) in self._of and len(self._of[COMPUTE, text].covers) > 1:
            return f"shape {text} is said twice"
        covers = []
        for word in words:
            node = self.covers.get(word.replace("&", "*"))
            if node is None:
                return f"shape {text} covers {word}, which the graph does not have"
            covers.append((node, int("&" in word)))
        if len(set(covers)) < len(covers):
            return f"shape {text} covers a node twice"
        runs = [[n for n, m in covers if m == member] for member in (0, 1)]
        runs = [run for run in runs if run]
        stages = [{self.graph.nodes[n].stage for n in run} for run in runs]
        made = [self.labels.of(run) for run in runs]
        plain = _NUMBER.sub("", text)
        if any(len(s) > 1 for s in stages) or plain != (made[0] if len(made) == 1 else fused_text(made)):
            return f"shape {text} does not cover {' '.join(words)}"
        self._of[COMPUTE, text] = OpShape(OpKind.COMPUTE, COMPUTE, text, tuple(covers))
        return None

    def find(self, cell: str, text: str) -> OpShape | None:
        """The shape of an op on a stream, None if there is none."""
        if shape := self._of.get((cell, text)):
            return shape
        if m := _TRANSFER.fullmatch(cell):
            return self._transfer(m[1], int(m[2]), text)
        flat = self._flat.get(text) or self._again(text)
        return flat if flat is not None and flat.stream == cell else None

    def _shapes(self, b: Bucket) -> list[OpShape]:
        """A bucket's reduction, and where its weights are sharded their first gathers, for a microbatch."""
        if self.graph.source is None:
            return []
        reduce, gather = self.graph.source.sync_bytes()
        gathers = [gather_shape(b, p, 0, gather) for p in Pass] if b.replica.zero == 3 else []
        return [reduction_shape(b, reduce), *gathers]

    def _again(self, text: str) -> OpShape | None:
        """The shape of a later gather: `2AG_F*/l7.dense+1`."""
        m = _AGAIN.fullmatch(text)
        first = self._flat.get(m[1]) if m else None
        if m is None or first is None or first.role is not CollectiveRole.GATHER:
            return None
        return replace(first, text=text, again=int(m[2]))

    def _transfer(self, way: str, peer: int, text: str) -> OpShape | None:
        kind = OpKind.SEND if way[-1] == ">" else OpKind.RECV
        slot = self.names.carried(kind, text)
        if slot is None or peer >= self.programs:
            return None
        return OpShape(kind, "p2p" if way[0] == "p" else f"{way}{peer}", text, slot=slot, peer=peer)

    def buffer(self, name: str) -> tuple[int, int] | None:
        """(slot among all nodes' writes, microbatch) of a buffer called after a node, None for other names."""
        m = _SLOT.fullmatch(name)
        if not m or int(m[2]) >= self.graph.mbs:
            return None
        slot = self._slots.get((m[1], m[3] or "", m[4]))
        return None if slot is None else (slot, int(m[2]))

    def nearest(self, cell: str, text: str) -> str | None:
        """The op most like an unknown one."""
        same = [t for c, t in self._of if c == cell]
        if m := _TRANSFER.fullmatch(cell):
            same += self.names.texts(OpKind.SEND if m[1][-1] == ">" else OpKind.RECV)
        elsewhere = [f"{c} {t}" for c, t in self._of if t == text]
        return elsewhere[0] if elsewhere else nearest(text, same or [t for _, t in self._of], coded=False)


def cover_text(node: GraphNode, member: int) -> str:
    """A node as a `shape` line names it.

    >>> from ir.core.ops import Pass
    >>> cover_text(GraphNode(2, Pass.F, "l7.attn"), 0), cover_text(GraphNode(2, Pass.F, ""), 1)
    ('2F*/l7.attn', '2F&')
    """
    mark = "" if node.once else "&" if member else "*"
    return f"{node.stage}{node.kind}{mark}" + (f"/{node.part}" if node.part else "")


def stream_cell(shape: OpShape) -> str:
    """The stream of an op, with the peer where all transfers share one."""
    if shape.stream != "p2p":
        return shape.stream
    return f"p2p{'>' if shape.kind is OpKind.SEND else '<'}{shape.peer}"
