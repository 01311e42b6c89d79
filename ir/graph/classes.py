"""Names under which measurements are kept: nodes and messages that cost the same have one, whatever the schedule."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields

from ir.core.ops import Pass
from ir.core.work import Message, MessageKind
from ir.graph.graph import Graph, GraphNode
from ir.workload.captured import CapturedModelWork
from ir.workload.config.spec import NEWER, NOT_KERNELS
from ir.workload.work import ConfigModelWork


def node_classes(graph: Graph) -> tuple[str, ...]:
    """The class of every node of a graph."""
    parts: dict[tuple[int, str], list[object]] = defaultdict(list)
    for n in graph.nodes:
        if not n.once:
            sizes = tuple((b.slot, b.bytes) for b in n.writes)
            parts[n.stage, n.part].append((str(n.kind), n.work, n.inline, n.message, sizes, n.workspace))
    again, model = recomputed(graph), _model(graph)
    digests = {key: _digest((found, key in again, model)) for key, found in parts.items()}
    return tuple(_class(n, digests, model) for n in graph.nodes)


def link_class(message: Message, ranks: int, nodes: int = 0) -> str:
    """What a message is measured as: its kind, the ranks that take part in a collective, its bytes.

    nodes: on how many the ranks are; 0: wherever the job has them.

    >>> link_class(Message(MessageKind.P2P, 262144, ("pp",)), 2)
    'p2p 262144'
    >>> link_class(Message(MessageKind.ALL_REDUCE, 64, ("dp",)), 4)
    'all_reduce 4 64'
    >>> link_class(Message(MessageKind.ALL_REDUCE, 64, ("dp",)), 16, 2)
    'all_reduce 16@2 64'
    """
    name = "p2p" if message.kind is MessageKind.P2P else f"{message.kind} {ranks}"
    return f"{name}@{nodes} {message.bytes}" if nodes else f"{name} {message.bytes}"


def recomputed(graph: Graph) -> frozenset[tuple[int, str]]:
    """(stage, part) of every part whose whole forward runs again: not those whose result nobody would read."""
    run = {(n.stage, n.part) for n in graph.nodes if n.kind is Pass.R}
    layers = [e for e in graph.entries if e.chunk.tags and graph.recompute.whole(e.chunk, e.part.name)]
    return frozenset(run & {(e.stage, e.name) for e in layers})


def _model(graph: Graph) -> str:
    """What `GraphNode.work` does not show and a kernel feels: formats, and how the model computes, layers aside."""
    s = graph.source
    if not isinstance(s, ConfigModelWork | CapturedModelWork):
        return ""
    found = {f.name: getattr(s.config, f.name) for f in fields(s.config) if f.name not in NOT_KERNELS}
    config = [(name, value) for name, value in found.items() if name not in NEWER or value != NEWER[name]]
    return repr((config, s.shape, s.precision, getattr(s, "attention", "")))


def _class(node: GraphNode, digests: Mapping[tuple[int, str], str], model: str) -> str:
    if node.once:
        return f"{node.kind} {_digest((node.numel, node.message, model, *node.work))}"
    chunk, _, part = node.part.rpartition(".")
    chunk = chunk.rstrip("0123456789")
    part = part if chunk in ("", "embed", "l", "head") else f"{chunk}.{part}"
    return f"{node.kind}{'/' if part else ''}{part} {digests[node.stage, node.part]}"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
