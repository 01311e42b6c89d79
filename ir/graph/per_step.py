"""What exists once per step: gradient reductions over the owners of each parameter, norm, update, parameter gathers."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ir.core.ops import Pass
from ir.core.work import Kernel, Message, MessageKind
from ir.graph.graph import Buffer, Graph, GraphEdge, GraphNode, MicrobatchSpan, PerStepOp
from ir.graph.matrices import heaviest, orthogonalised
from ir.graph.sync import Bucket, keep_buckets

ALL_AXES = ("tp", "cp", "dp", "pp")
FURTHER = "_replicate"  # ends the name of the stream on which copies of shards are summed
_DONE = (Buffer("done", 0),)


def with_sync(graph: Graph, clip: bool, found: tuple[Bucket, ...]) -> Graph:
    """The graph with its once-per-step nodes.

    rewrite, for one program p whose buckets are reduced (RS under ZeRO-1, else AR; copies of shards: AR behind it):
        W -(join)-> RS -> [AR] -> [NORM: all programs] -> UPDATE -> AG
    """
    if graph.source is None or graph.mesh is None:
        return graph
    new = _Once(graph, found)
    new.reduce()
    new.update(clip)
    new.gather()
    full = replace(graph, nodes=tuple(new.nodes), edges=tuple(dict.fromkeys(new.edges)))
    keep_buckets(full, found, graph)
    return full


class _Once:
    """Nodes that exist once per step, in the making. ready: by program, what its next node has to follow."""

    def __init__(self, graph: Graph, found: tuple[Bucket, ...]) -> None:
        assert graph.source is not None and graph.mesh is not None
        self.graph, self.found, self.ranks = graph, found, graph.mesh.ranks
        self.nodes, self.edges = list(graph.nodes), list(graph.edges)
        self.reduce_bytes, self.gather_bytes = graph.source.sync_bytes(whole=True)
        self.ready: dict[int, list[int]] = defaultdict(list)

    def _add(self, stage: int, kind: PerStepOp, part: str, groups: Iterable[int], **more: Any) -> int:
        spans = tuple(MicrobatchSpan(None, g) for g in groups)
        self.nodes.append(GraphNode(stage, kind, part, spans=spans, **more))
        return len(self.nodes) - 1

    def reduce(self) -> None:
        """Sums of gradients over all who hold a copy; what ZeRO-2 and 3 have summed inside groups, between groups.

        Where a set of shards lies over a part of the ranks, its sums are summed over those that hold the same shard.
        """
        w_of = defaultdict(list)
        for i, n in enumerate(self.graph.nodes):
            if n.kind is Pass.W:
                w_of[n.stage, n.part].append(i)
        for b in self.found:
            ws = [i for k in b.members for i in w_of[self.graph.entries[k].stage, self.graph.entries[k].name]]
            ends = dict.fromkeys(b.owners, ws)
            if b.replica.zero < 2 and b.ranks > 1 and ws and b.replicated:
                kind = MessageKind.REDUCE_SCATTER if b.replica.zero == 1 else MessageKind.ALL_REDUCE
                message = Message(kind, b.shard * b.ranks * self.reduce_bytes, b.inside)
                ends = self._sum(b, message, b.replica.reduce_stream, b.owners, ws)
            if b.copies > 1 and ws and b.replicated:
                message = Message(MessageKind.ALL_REDUCE, b.shard * self.reduce_bytes, b.across)
                # Beside other buckets' messages, as FSDP's; one behind the other with ZeRO-1, as Megatron's.
                stream = b.replica.reduce_stream + (FURTHER if b.across and b.replica.zero > 1 else "")
                for owners in [(g,) for g in b.owners] if b.replica.zero == 1 else [b.owners]:
                    ends |= self._sum(b, message, stream, owners, ends[owners[0]])
            for g in b.owners:
                self.ready[g] += ends[g]

    def _sum(
        self, b: Bucket, message: Message, stream: str, owners: tuple[int, ...], behind: list[int]
    ) -> dict[int, list[int]]:
        """One sum of a bucket's gradients over these of its owners: its node, for each of them."""
        kind = PerStepOp.REDUCE if message.kind is MessageKind.REDUCE_SCATTER else PerStepOp.ALL_REDUCE
        keys = dict(stream=stream, message=message, writes=_DONE, bucket=b.key)
        node = self._add(b.stage, kind, b.called(owners), owners, **keys)
        self.edges += [GraphEdge(i, node, 0, join=True) for i in behind]
        return {g: [node] for g in owners}

    def update(self, clip: bool) -> None:
        """The norm of the whole gradient, which all programs wait for, and each program's update."""
        programs = range(self.graph.programs)
        norm = None
        if clip and self.ranks > 1:
            message = Message(MessageKind.ALL_REDUCE, 8, ALL_AXES)
            norm = self._add(0, PerStepOp.NORM, "", programs, stream="dp", message=message, writes=_DONE)
        least: dict[int, int] = {}  # the first stage with work on each program
        for n in self.graph.nodes:
            for s in () if n.once else n.spans:
                least[s.group] = min(n.stage, least.get(s.group, n.stage))
        own = defaultdict[int, list[Bucket]](list)
        for b in self.found:
            for p in b.owners:
                own[p].append(b)
        for p in programs:
            numel = sum(b.shard if b.replica.zero else b.numel for b in own[p])
            others = sum(b.numel - b.shard for b in own[p] if b.replica.zero == 1)
            keys = dict(numel=numel, others=others, writes=_DONE, **self._matrices(own[p]))
            update = self._add(least.get(p, 0), PerStepOp.UPDATE, f"p{p}", (p,), **keys)
            for src in dict.fromkeys(self.ready[p]):
                self.edges.append(GraphEdge(src, update if norm is None else norm, 0, join=True))
            if norm is not None:
                self.edges.append(GraphEdge(norm, update, 0, join=True))
            self.ready[p] = [update]

    def _matrices(self, own: Iterable[Bucket]) -> dict[str, Any]:
        """What orthogonalising takes the rank of a program that has most to do of each bucket."""
        muon, numel, workspace = self.graph.muon, 0, 0
        work, inline = list[Kernel](), list[Message]()
        for b in own:
            if muon is not None and b.matrices:
                numel += b.shard if b.replica.zero else b.numel
                for m in heaviest(b.matrices, b.ranks if b.replica.zero else 1):
                    kernels, messages, room = orthogonalised(m, muon)
                    work, inline, workspace = [*work, *kernels], [*inline, *messages], max(workspace, room)
        return {"work": tuple(work), "inline": tuple(inline), "workspace": workspace, "matrices": numel}

    def gather(self) -> None:
        """Weights that others updated. The shards of ZeRO-1 lie on all owners, those of ZeRO-2 inside each group."""
        for b in self.found:
            if not (b.ranks > 1 and b.replica.zero in (1, 2) and b.replicated):
                continue
            message = Message(MessageKind.ALL_GATHER, b.shard * b.ranks * self.gather_bytes, b.inside)
            for owners in [b.owners] if b.replica.zero == 1 else [(g,) for g in b.owners]:
                keys = dict(stream=b.replica.gather_stream, message=message, bucket=b.key)
                node = self._add(b.stage, PerStepOp.GATHER, b.called(owners), owners, **keys)
                self.edges += [GraphEdge(u, node, 0, join=True) for g in owners for u in self.ready[g]]
