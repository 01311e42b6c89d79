"""What ops are called: compute by what it covers, transfers by the boundary they cross. * stands for a microbatch."""

from collections import defaultdict
from collections.abc import Sequence

from ir.core.ops import Pass
from ir.core.work import Message, MessageKind
from ir.graph.graph import COMPUTE, Graph
from ir.graph.sync import Bucket
from ir.plan.plan import CollectiveRole, OpKind, OpShape

Slot = tuple[int, int]  # (node, slot)
# The passes that a letter stands for: R comes with the I that reads it, B is the whole backward.
_PASSES = {
    "F": (Pass.F,),
    "I": (Pass.R, Pass.I),
    "W": (Pass.W,),
    "R": (Pass.R,),
    "B": (Pass.R, Pass.I, Pass.W),
}


def node_shape(graph: Graph, node: int) -> OpShape:
    """The shape of an op that covers one node alone and is called like it."""
    n = graph.nodes[node]
    kind = OpKind.COMPUTE if n.stream == COMPUTE else OpKind.COLLECTIVE
    text = f"{n.stage}{n.kind}{'' if n.once else '*'}" + (f"/{n.part}" if n.part else "")
    return OpShape(kind, n.stream, text, ((node, 0),), message=n.message, bucket=n.bucket)


def fused_text(texts: Sequence[str]) -> str:
    """Several microbatches' work as one op.

    >>> fused_text(["2F*", "1B*"])
    '(2F*;1B*)OVERLAP_F_B'
    """
    return f"({';'.join(texts)})OVERLAP_F_B"


def numbered(text: str, k: int) -> str:
    """The k-th op whose label is `text`: it covers the same ends, but other nodes or in another order.

    >>> numbered("2B*/l7.shared", 2), numbered("2W*", 3)
    ('2B*/l7.shared~2', '2W*/~3')
    """
    return f"{text}{'' if '/' in text else '/'}~{k}"


class OpLabels:
    """Texts of compute ops: `2F*` where an op covers all of a stage's pass, else its first and last part.

    >>> from ir.graph.build import stage_graph
    >>> OpLabels(stage_graph(2)).of([4, 5])
    '1B*'
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._count: dict[tuple[int, Pass], int] = defaultdict(int)
        for n in graph.nodes:
            if isinstance(n.kind, Pass) and n.stream == COMPUTE:
                self._count[n.stage, n.kind] += 1

    def of(self, run: Sequence[int]) -> str:
        """The text of an op that covers these nodes, all of one stage."""
        first, last = self._nodes[run[0]], self._nodes[run[-1]]
        kinds = {self._nodes[n].kind for n in run}
        letter = str(next(iter(kinds))) if len(kinds) == 1 else "I" if kinds == {Pass.R, Pass.I} else "B"
        if len(run) == sum(self._count[first.stage, p] for p in _PASSES[letter]):
            return f"{first.stage}{letter}*"
        return f"{first.stage}{letter}*/{first.part}" + (f"..{last.part}" if last.part != first.part else "")


class MessageNames:
    """Op texts of sends and receives, with * for the microbatch, and back. Only what can cross a boundary has a name.

    >>> from ir.graph.build import stage_graph
    >>> names = MessageNames(stage_graph(2))
    >>> names.send((0, 0)), names.receive((0, 0), 1), names.carried(OpKind.RECV, "1RECV_F*")
    ('0SEND_F*', '1RECV_F*', (0, 0))
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._out: dict[tuple[int, str], set[Slot]] = defaultdict(set)
        self._into: dict[tuple[int, str], set[Slot]] = defaultdict(set)
        crossing = []
        for e in graph.edges:
            a, b = graph.nodes[e.src], graph.nodes[e.dst]
            if a.stage != b.stage and not a.once and not b.once:
                slot = (e.src, e.slot)
                self._out[a.stage, _way(a.kind)].add(slot)
                self._into[b.stage, _way(a.kind)].add(slot)
                crossing.append((slot, b.stage))
        self._carried: dict[tuple[OpKind, str], Slot] = {}
        for slot, stage in crossing:
            self._carried[OpKind.SEND, self.send(slot)] = slot
            self._carried[OpKind.RECV, self.receive(slot, stage)] = slot

    def send(self, slot: Slot) -> str:
        """Text of the send that carries a buffer."""
        n = self._nodes[slot[0]]
        way = _way(n.kind)
        many = len(self._out[n.stage, way]) > 1
        return f"{n.stage}SEND_{way}*" + (self._part(slot) if many else "")

    def receive(self, slot: Slot, stage: int) -> str:
        """Text of the receive of a buffer whose first reader is on this stage."""
        n = self._nodes[slot[0]]
        way = _way(n.kind)
        many = len(self._out[n.stage, way]) > 1 or len(self._into[stage, way]) > 1
        return f"{stage}RECV_{way}*" + (self._part(slot) if many else "")

    def carried(self, kind: OpKind, text: str) -> Slot | None:
        """The buffer that a send or receive of this text carries, None if there is no such transfer."""
        return self._carried.get((kind, text))

    def texts(self, kind: OpKind) -> list[str]:
        """All texts of sends or of receives."""
        return [text for k, text in self._carried if k is kind]

    def _part(self, slot: Slot) -> str:
        n = self._nodes[slot[0]]
        twins = sum(s[0] == slot[0] for s in self._out[n.stage, _way(n.kind)])
        return f"/{n.part or f'{n.stage}{n.kind}'}" + (f".{n.writes[slot[1]].slot}" if twins > 1 else "")


def _way(kind: object) -> str:
    return "F" if kind is Pass.F else "B"


def reduction_shape(b: Bucket, element: int) -> OpShape:
    """A microbatch's reduction of a bucket: `2RS3/dense`."""
    message = Message(MessageKind.REDUCE_SCATTER, b.shard * b.ranks * element, b.inside)
    text = f"{b.stage}{CollectiveRole.REDUCE}*/{b.name}"
    return OpShape(
        OpKind.COLLECTIVE, b.replica.reduce_stream, text, message=message, bucket=b.key, role=CollectiveRole.REDUCE
    )


def gather_shape(b: Bucket, reads: Pass, again: int, element: int) -> OpShape:
    """A gather of weights for a pass of a microbatch: `2AG_F3/l7.dense`; the next for the same: `2AG_F3/l7.dense+1`."""
    message = Message(MessageKind.ALL_GATHER, b.shard * b.ranks * element, b.inside)
    text = f"{b.stage}{CollectiveRole.GATHER}_{reads}*/{b.name}" + (f"+{again}" if again else "")
    return OpShape(
        OpKind.COLLECTIVE,
        b.replica.gather_stream,
        text,
        message=message,
        bucket=b.key,
        role=CollectiveRole.GATHER,
        reads=reads,
        again=again,
    )
