"""Interleave groups as one static order, by a named policy: alternate, template, profile. Every policy is a shuffle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ir.core.ops import OpToken, Pass
from ir.graph.graph import COMPUTE, COUNTS, Graph, illegal
from ir.lower.policy import PassMerge, PlanPolicy

Item = tuple[int, int]  # (node, member)

# A layer's parts of F and B. DeepSeek's profiled chunk (github.com/deepseek-ai/profile-data, train) has attention(F)
# beside combine(B), mlp(B) and mlp(W) beside dispatch(F), mlp(F) beside dispatch(B), attention(B) beside combine(F),
# attention(W) beside the next layer's combine(B). Megatron core's fine-grained 1F1B has the same cycle (main of 2026,
# TransformerLayerSchedulePlan.run); its weight gradients come with their I but for delay_wgrad_compute.
# B.w: weight gradients whose I are done.
CYCLE = "B.post B.combine B.w F.attn F.dispatch B.mlp B.dispatch B.w F.mlp F.combine B.attn"
_MIXTURE = {"router": "attn", "experts": "mlp", "shared": "mlp", "combine": "combine", "dispatch": "dispatch"}
_MIXTURE |= {COUNTS: "dispatch", "attn": "attn", "mixer": "attn", "embed": "attn", "proj": "attn"}
_FORWARD = ("attn", "dispatch", "mlp", "combine", "post")
_BACKWARD = ("again", "post", "combine", "mlp", "dispatch", "attn")
_Run = tuple[str, list[int]]  # a part of a layer and its nodes


def merged(graph: Graph, policy: PlanPolicy, tokens: Sequence[OpToken], members: Sequence[Sequence[int]]) -> list[Item]:
    """One order of a group's members, each the nodes of one action.

    A group that is not one forward and one backward has no template: its members take turns.
    Raises PiperError (illegal_plan): `profile` without seconds.
    """

    def turns(late: bool) -> list[Item]:
        chains = [delayed(m, comm, weight) if late else m for m in members]
        return alternate(chains, comm, weight)

    def comm(n: int) -> bool:
        return graph.nodes[n].stream != COMPUTE

    def weight(n: int) -> bool:
        return graph.nodes[n].kind is Pass.W

    pair = sorted(t is not OpToken.F for t in tokens) == [False, True] and OpToken.W not in tokens
    if policy.merge is PassMerge.ALTERNATE or not pair:
        return turns(policy.delay_wgrad)
    forward = list(tokens).index(OpToken.F)
    if policy.merge is PassMerge.TEMPLATE:
        return cycled(graph, members, forward, CYCLE, policy.delay_wgrad)
    made = [turns(late) for late in (False, True)]
    made += [cycled(graph, members, forward, CYCLE, late) for late in (False, True)]
    return listed(graph, policy.seconds, members, made)


def alternate(
    members: Sequence[Sequence[int]], is_comm: Callable[[int], bool], is_weight: Callable[[int], bool]
) -> list[Item]:
    """Take turns: compute changes member at each communication, so that one's wire is beside the other's compute.

    Chains keep their order; leading communication goes first; the first turn is the member's whose first op is
    compute. A W that follows the communication its I feeds belongs to the same turn: it needs nothing from the wire.

    >>> comm, w = {1, 4}.__contains__, set().__contains__
    >>> alternate([(0, 1, 2), (3, 4, 5)], comm, w)
    [(0, 0), (1, 0), (3, 1), (4, 1), (2, 0), (5, 1)]
    """
    at = [0] * len(members)
    out: list[Item] = []

    def take(m: int) -> int:
        node = members[m][at[m]]
        at[m] += 1
        out.append((node, m))
        return node

    leading = [bool(seq) and is_comm(seq[0]) for seq in members]
    for m, seq in enumerate(members):
        while at[m] < len(seq) and is_comm(seq[at[m]]):
            take(m)
    turn = leading.index(False) if False in leading else 0
    while any(at[m] < len(seq) for m, seq in enumerate(members)):
        seq = members[turn]
        while at[turn] < len(seq):
            if is_comm(take(turn)):
                while at[turn] < len(seq) and (is_comm(seq[at[turn]]) or is_weight(seq[at[turn]])):
                    take(turn)
                break
        turn = (turn + 1) % len(members)
    return out


def delayed(chain: Sequence[int], is_comm: Callable[[int], bool], is_weight: Callable[[int], bool]) -> list[int]:
    """Every W behind the next communication of its chain, so that the wire is busy before what nobody waits for.

    >>> delayed([0, 1, 2, 3, 4], is_comm={2}.__contains__, is_weight={1, 4}.__contains__)
    [0, 2, 1, 3, 4]
    """
    out: list[int] = []
    late: list[int] = []
    for node in chain:
        if is_weight(node):
            late.append(node)
            continue
        if late and out and is_comm(out[-1]) and not is_comm(node):
            out += late
            late.clear()
        out.append(node)
    return out + late


def cycled(graph: Graph, members: Sequence[Sequence[int]], forward: int, cycle: str, delay: bool) -> list[Item]:
    """Turns of a cycle, round after round until both members are through; a turn that is not a member's next is passed.

    forward: which member is the forward. delay: weight gradients wait for the turns `B.w`, else they follow their I.
    Whatever the cycle, parts of a layer come in their order: any cycle is legal, not any is quick.
    """
    role = {"F": forward, "B": 1 - forward}
    nodes = graph.nodes
    late = [n for n in members[1 - forward] if delay and nodes[n].kind is Pass.W]
    backward = [n for n in members[1 - forward] if n not in set(late)]
    left = {"F": _runs(graph, members[forward], _FORWARD), "B": _runs(graph, backward, _BACKWARD)}
    feeds = {e.dst: e.src for e in graph.edges if nodes[e.src].kind is Pass.I}
    out: list[Item] = []
    while any(left.values()):
        for who, part in (turn.split(".") for turn in cycle.split()):
            if part == "w":
                done = {n for n, _ in out}
                out += [(n, role["B"]) for n in late if feeds[n] in done]
                late = [n for n in late if feeds[n] not in done]
            # An add waits for its combine: it comes with the next attention. What is recomputed comes before all else.
            for wanted in {"F.attn": ("post", "attn"), "B.post": ("again", "post")}.get(f"{who}.{part}", (part,)):
                if left[who] and left[who][0][0] == wanted:
                    out += [(n, role[who]) for n in left[who].pop(0)[1]]
    return out + [(n, role["B"]) for n in late]


def _runs(graph: Graph, chain: Sequence[int], parts: Sequence[str]) -> list[_Run]:
    """A chain cut into layers, each into its parts, in their order.

    What has no communication belongs to the layer beside it: to its first part ahead of all layers, else to its last.
    """
    nodes = graph.nodes
    names = {n: nodes[n].part.rpartition(".")[::2] for n in chain}  # chunk, part
    mixed = {names[n][0] for n in chain if names[n][1] in ("dispatch", "combine")}
    real = mixed or {names[n][0] for n in chain if {"L", "MTP"} & nodes[n].tags.keys()}
    ahead = next(p for p in parts if p != "again")
    layers: list[dict[str, list[int]]] = []
    waiting: list[int] = []
    last = None
    for n in chain:
        chunk, part = names[n]
        if chunk in real and chunk != last:
            layers.append({ahead: waiting})
            waiting, last = [], chunk
        if chunk in real:
            where = _MIXTURE.get(part, "post") if chunk in mixed else {"mlp": "mlp"}.get(part, "attn")
            layers[-1].setdefault("again" if nodes[n].kind is Pass.R else where, []).append(n)
        elif layers:
            layers[-1].setdefault(parts[-1], []).append(n)
        else:
            waiting.append(n)
    return [(p, found[p]) for found in layers or [{ahead: waiting}] for p in parts if found.get(p)]


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
