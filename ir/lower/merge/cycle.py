"""A forward and a backward interleaved layer by layer in a fixed cycle of turns: DeepSeek's order, and Megatron's."""

from collections.abc import Sequence

from ir.core.ops import Pass
from ir.graph.graph import COUNTS, Graph
from ir.lower.merge.alternate import Item

# A layer's parts of F and B. DeepSeek's profiled chunk (github.com/deepseek-ai/profile-data, train) has attention(F)
# beside combine(B), mlp(B) and mlp(W) beside dispatch(F), mlp(F) beside dispatch(B), attention(B) beside combine(F),
# attention(W) beside the next layer's combine(B). Megatron core's fine-grained 1F1B has the same cycle (main of 2026,
# TransformerLayerSchedulePlan.run); its weight gradients come with their I but for delay_wgrad_compute.
# B.w: weight gradients whose I are done.
CYCLE = "B.post B.combine B.w F.attn F.dispatch B.mlp B.dispatch B.w F.mlp F.combine B.attn"
_MIXTURE = {"router": "attn", "experts": "mlp", "shared": "mlp", "combine": "combine", "dispatch": "dispatch"}
_MIXTURE |= {COUNTS: "dispatch", "attn": "attn", "embed": "attn", "proj": "attn"}
_FORWARD = ("attn", "dispatch", "mlp", "combine", "post")
_BACKWARD = ("again", "post", "combine", "mlp", "dispatch", "attn")
_Run = tuple[str, list[int]]  # a part of a layer and its nodes


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
