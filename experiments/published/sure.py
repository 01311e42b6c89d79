"""What the scores say of how sure a prediction is: the table of residuals, and whether its intervals hold."""

from collections.abc import Sequence
from statistics import median

import msgspec

from experiments.published.report import Found
from experiments.published.rows import fitted
from experiments.published.score import Score
from piper_sim.study.sure import PublishedPrediction, quantile, weighted


def residual(table: str, s: Score) -> PublishedPrediction | None:
    """A row's; None where nothing was predicted."""
    if s.traits is None:
        return None
    memory = max(s.memory.values(), key=abs) if s.memory else None
    ratios = [None if e is None else 1 / (1 + e) for e in (s.time, memory)]
    return PublishedPrediction(table, s.row.publisher or table, s.traits, *ratios)


def residual_file(found: Found) -> str:
    """All rows as text, one a line."""
    rows = [r for s, scores in found.items() for r in (residual(s.name, x) for x in scores) if r is not None]
    lines = [msgspec.json.encode(_rounded(r)).decode() for r in rows]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _rounded(r: PublishedPrediction) -> PublishedPrediction:
    time, memory = (None if x is None else round(x, 4) for x in (r.time, r.memory))
    return PublishedPrediction(r.table, r.publisher, r.traits, time, memory)


def coverage(found: Found) -> list[str]:
    """Lines of a table: shares of rows that 80 % intervals hold."""
    rows = [x for s, scores in found.items() for x in _halves(s.name, scores)]
    out = [
        "| of | rows | half of each table, by the other halves | rows of a table, by the other tables "
        "| of a publisher, by the others |",
        "|---|--:|---|---|---|",
    ]
    for of in ("time", "memory"):
        asked = [(half, r) for half, r in rows if getattr(r, of) is not None]
        half = [middle(r, [o for kept, o in asked if kept], of) for kept, r in asked if not kept]
        table = [middle(r, [o for _, o in asked if o.table != r.table], of) for _, r in asked]
        publisher = [middle(r, [o for _, o in asked if o.publisher != r.publisher], of) for _, r in asked]
        out.append(f"| {of} | {len(asked)} | {_share(half)} | {_share(table)} | {_share(publisher)} |")
    return out


def _halves(table: str, scores: Sequence[Score]) -> list[tuple[bool, PublishedPrediction]]:
    """Whether a row is of the half that the other is judged by, and its residual."""
    kept = fitted(s.row for s in scores)
    return [(s.row.name in kept, r) for s in scores if (r := residual(table, s)) is not None]


def middle(r: PublishedPrediction, known: Sequence[PublishedPrediction], of: str) -> tuple[bool, float]:
    """Whether the 80 % interval by `known` holds a row, and how wide it is."""
    found = weighted(r.traits, known, of)
    low, high = quantile(found, 0.1), quantile(found, 0.9)
    return low <= getattr(r, of) <= high, high - low


def _share(found: Sequence[tuple[bool, float]]) -> str:
    if not found:
        return ""
    held, wide = sum(x for x, _ in found), median(w for _, w in found)
    return f"{held} of {len(found)} ({held / len(found):.0%}), {wide:.0%} wide"
