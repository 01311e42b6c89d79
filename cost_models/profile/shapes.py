"""Classes of nodes that differ in size alone, so that a size that was not measured is read off those that were.

A family is all classes of one pass of one part of one model, in its formats; what is left are the sizes: sequence
length, sequences of a microbatch, tensor-parallel ranks; of an update, its elements. A time between two measured sizes
lies on the power law through both, size by size.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ir.graph.classes import recomputed
from ir.graph.graph import Graph, GraphNode, PerStepOp
from ir.workload.config.spec import LLAMA_FORM, NEWER, NOT_KERNELS
from ir.workload.work import ConfigModelWork

Sizes = Mapping[str, int]
DIVIDED = "sequence_parallel"  # whether tp divides norms too: 0 or 1, nothing to read between


@dataclass(frozen=True)
class KernelShape:
    """family: what it shares with other sizes. at: its sizes."""

    family: str
    at: Sizes


@dataclass(frozen=True)
class CostBySize:
    """Seconds at some sizes, and their spread."""

    at: Sizes
    seconds: float
    spread_s: float


@dataclass(frozen=True)
class InterpolatedCost:
    """What was read off. inside: between measured sizes, not beyond."""

    seconds: float
    spread_s: float
    inside: bool


def op_shapes(graph: Graph) -> tuple[KernelShape | None, ...]:
    """The family and sizes of every node; None of messages, and of what comes from no config."""
    source = graph.source
    if not isinstance(source, ConfigModelWork):
        return (None,) * len(graph.nodes)
    c = source.config
    usual = {"form": LLAMA_FORM, "mixer": None, **NEWER}
    named = (
        n for f in fields(c) if (n := f.name) not in NOT_KERNELS and not (n in usual and getattr(c, n) == usual[n])
    )
    config = [(n, c.mixer.anywhere if n == "mixer" and c.mixer else getattr(c, n)) for n in named]
    model = repr((config, source.precision, source.attention))
    again = recomputed(graph)
    layouts = {(e.stage, e.name): e.layout for e in graph.entries}
    layers = {(e.stage, e.name): e.chunk.tags.get("L", 0) for e in graph.entries}

    def shape(n: GraphNode) -> KernelShape | None:
        if n.kind is PerStepOp.UPDATE:
            return KernelShape(f"UPDATE ~{_digest(model)}", {"numel": n.numel})
        if n.once or n.message is not None:
            return None
        layout = layouts[n.stage, n.part]
        kernels = tuple((str(k.kind), str(k.dtype), k.label) for k in n.work)
        windows = source.config.windows
        own = (windows[layers[n.stage, n.part]],) if windows else ()
        context = (layout.cp, "heads") if layout.cp_heads else layout.cp
        fixed = (context, layout.ep, layout.etp, kernels, (n.stage, n.part) in again, model, *own)
        chunk, _, part = n.part.rpartition(".")
        name = f"{n.kind}/{chunk.rstrip('0123456789')}.{part}"
        at = {"seq_len": source.shape.seq_len, "sequences": source.shape.microbatch_size, "tp": layout.tp}
        return KernelShape(f"{name} ~{_digest(repr(fixed))}", at | {DIVIDED: int(layout.sequence_parallel)})

    return tuple(shape(n) for n in graph.nodes)


def between(known: Sequence[CostBySize], at: Sizes) -> InterpolatedCost | None:
    """Seconds at sizes that were not measured; None where no measured sizes lie on a line with them.

    From the measured sizes that differ least, along each size that differs: on the power law through the neighbours
    measured there with all else equal. The spread is the largest of theirs, and how far a straight line through them
    would differ from the power law.

    >>> known = [CostBySize({"seq_len": n}, n / 1000, 0.0) for n in (1000, 4000)]
    >>> found = between(known, {"seq_len": 2000}); round(found.seconds, 9), round(found.spread_s, 9), found.inside
    (2.0, 0.0, True)
    >>> between(known, {"seq_len": 8000}).inside, between(known[:1], {"seq_len": 8000})
    (False, None)
    """
    fitting = [k for k in known if k.at.keys() == at.keys() and _divided_alike(k.at, at)]
    if any(v < 1 for name, v in at.items() if name != DIVIDED):
        return None
    best: InterpolatedCost | None = None
    for base in sorted(fitting, key=lambda k: _distance(k.at, at)):
        found = _from(base, fitting, at)
        if found is not None and (best is None or (found.inside and not best.inside)):
            best = found
        if best is not None and best.inside:
            break
    return best


def _from(base: CostBySize, known: Sequence[CostBySize], at: Sizes) -> InterpolatedCost | None:
    if base.seconds <= 0:
        return None
    seconds, noise, bent, inside = base.seconds, base.spread_s / base.seconds, 0.0, True
    for name in _differing(base.at, at):
        line = sorted((k for k in known if set(_differing(k.at, base.at)) <= {name}), key=lambda k: k.at[name])
        if len(line) < 2 or min(k.seconds for k in line) <= 0:
            return None
        low, high = _bracket(line, name, at[name])
        law, straight = _read(low, high, name, at[name])
        seconds *= law / base.seconds
        noise = max(noise, *(k.spread_s / k.seconds for k in (low, high)))
        bent += abs(straight / law - 1)
        inside = inside and low.at[name] <= at[name] <= high.at[name]
    return InterpolatedCost(seconds, (noise + bent) * seconds, inside)


def _bracket(line: Sequence[CostBySize], name: str, value: int) -> tuple[CostBySize, CostBySize]:
    """The neighbours on both sides; beyond the last one, the last two."""
    above = next((i for i, k in enumerate(line) if k.at[name] >= value), len(line) - 1)
    return line[max(above, 1) - 1], line[max(above, 1)]


def _read(low: CostBySize, high: CostBySize, name: str, value: int) -> tuple[float, float]:
    """(on the power law, on the straight line) through two points; a straight line that falls below 0 ends there.

    Beyond them the law starts from the nearer one, and is none that no kernel follows, whatever two times may say.
    """
    a, b = low.at[name], high.at[name]
    power = math.log(high.seconds / low.seconds) / math.log(b / a)
    slope = (high.seconds - low.seconds) / (b - a)
    straight = max(0.0, low.seconds + slope * (value - a))
    if a <= value <= b:
        return low.seconds * (value / a) ** power, straight
    end = low if value < a else high
    least, most = _POWERS.get(name, (0.0, 2.0))
    return end.seconds * (value / end.at[name]) ** min(max(power, least), most), straight


_POWERS = {"tp": (-1.0, 0.0)}  # of time over size: ranks divide it at best; attention grows with the square of length


def _differing(a: Sizes, b: Sizes) -> list[str]:
    return [name for name in a if name != DIVIDED and a[name] != b[name]]


def _distance(a: Sizes, b: Sizes) -> tuple[int, float]:
    names = _differing(a, b)
    return len(names), sum(abs(math.log(a[n] / b[n])) for n in names)


def _divided_alike(a: Sizes, b: Sizes) -> bool:
    """On one rank there is nothing to divide, so it goes with both."""
    return a.get(DIVIDED) == b.get(DIVIDED) or 1 in (a.get("tp"), b.get("tp"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
