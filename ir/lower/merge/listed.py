"""List scheduling of a forward and a backward on given seconds: what can start first goes first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ir.core.ops import Pass
from ir.graph.graph import COMPUTE, Graph, illegal
from ir.lower.merge.alternate import Item


@dataclass
class _Clock:
    """Ops dispatched so far: when each ends and each stream is free. Communication follows the compute before it."""

    needs: Mapping[int, Sequence[int]]
    seconds: Mapping[int, float]
    streams: Mapping[int, str]
    free: dict[str, float] = field(default_factory=dict)
    end: dict[Item, float] = field(default_factory=dict)

    def ready(self, item: Item) -> float:
        """When all it reads is there."""
        return max((self.end.get((n, item[1]), 0.0) for n in self.needs[item[0]]), default=0.0)

    def start(self, item: Item) -> float:
        """When an op would start were it dispatched now."""
        stream = self.streams[item[0]]
        return max(self.ready(item), self.free.get(stream, 0.0), self.free.get(COMPUTE, 0.0))

    def take(self, item: Item) -> None:
        """Dispatch an op."""
        self.end[item] = self.free[self.streams[item[0]]] = self.start(item) + self.seconds[item[0]]


def listed(
    graph: Graph, seconds: Sequence[tuple[str, float]], members: Sequence[Sequence[int]], others: Sequence[list[Item]]
) -> list[Item]:
    """The quickest, by these seconds, of a list schedule and the orders in `others`.

    List schedule: of each member's next compute, its next communication and the oldest W, what can start first (or, of
    communication, queue first); of several, what has most behind it. A W has nothing behind it: it fills idle time.
    Raises PiperError (illegal_plan): no seconds for a node.
    """
    table = dict(seconds)
    texts = {n: graph.nodes[n].text() for m in members for n in m}
    if missing := next((t for t in texts.values() if t not in table), None):
        raise illegal(f"merge = profile knows no seconds of {missing}", "merge = template, which needs none")
    here = set(texts)
    needs: dict[int, list[int]] = {n: [] for n in here}
    for e in graph.edges:
        forward = graph.nodes[e.src].kind is Pass.F  # of another microbatch than the backward's
        if e.src in here and e.dst in here and forward == (graph.nodes[e.dst].kind is Pass.F):
            needs[e.dst].append(e.src)
    cost = {n: table[t] for n, t in texts.items()}
    streams = {n: graph.nodes[n].stream for n in here}

    def span(order: Sequence[Item]) -> float:
        clock = _Clock(needs, cost, streams)
        for item in order:
            clock.take(item)
        return max(clock.end.values(), default=0.0)

    made = _greedy(graph, _Clock(needs, cost, streams), members)
    return min((*others, made), key=span)


def _greedy(graph: Graph, clock: _Clock, members: Sequence[Sequence[int]]) -> list[Item]:
    nodes = graph.nodes
    queues: list[list[Item]] = []
    behind: dict[Item, float] = {}
    for m, chain in enumerate(members):
        rest = 0.0
        for n in reversed(chain):
            rest += 0.0 if nodes[n].kind is Pass.W else clock.seconds[n]
            behind[n, m] = 0.0 if nodes[n].kind is Pass.W else rest
        late = [n for n in chain if nodes[n].kind is Pass.W]
        for stream in sorted({nodes[n].stream for n in chain}):
            queues.append([(n, m) for n in chain if nodes[n].stream == stream and nodes[n].kind is not Pass.W])
        queues.append([(n, m) for n in late])
    out: list[Item] = []
    at = [0] * len(queues)
    while len(out) < sum(map(len, members)):
        heads = [(q, queue[at[q]]) for q, queue in enumerate(queues) if at[q] < len(queue)]
        ready = [(q, i) for q, i in heads if all((n, i[1]) in clock.end for n in clock.needs[i[0]])]
        wires = {i for _, i in ready if nodes[i[0]].stream != COMPUTE}
        when = {i: clock.ready(i) if i in wires else clock.start(i) for _, i in ready}
        q, item = min(ready, key=lambda x: (when[x[1]], x[1] not in wires, -behind[x[1]], x[0]))
        clock.take(item)
        out.append(item)
        at[q] += 1
    return out
