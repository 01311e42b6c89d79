"""What the scores say of how sure a prediction is: the table of residuals, and whether its intervals hold."""

from collections.abc import Sequence
from statistics import median

import msgspec

from experiments.published.report import Found
from experiments.published.score import Score
from piper_sim.study.sure import PublishedPrediction, quantile, weighted


def residual(table: str, s: Score) -> PublishedPrediction | None:
    """A row's; None where nothing was predicted."""
    if s.traits is None:
        return None
    memory = max(s.memory.values(), key=abs) if s.memory else None
    ratios = [None if e is None else 1 / (1 + e) for e in (s.time, memory)]
    return PublishedPrediction(table, s.traits, *ratios)


def residual_file(found: Found) -> str:
    """All rows as text, one a line."""
    rows = [r for s, scores in found.items() for r in (residual(s.name, x) for x in scores) if r is not None]
    lines = [msgspec.json.encode(_rounded(r)).decode() for r in rows]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _rounded(r: PublishedPrediction) -> PublishedPrediction:
    time, memory = (None if x is None else round(x, 4) for x in (r.time, r.memory))
    return PublishedPrediction(r.table, r.traits, time, memory)


def coverage(found: Found) -> list[str]:
    """Lines of a table: shares of rows that 80 % intervals hold."""
    rows = []
    for s, scores in found.items():
        mine = s.fit(x.row for x in scores)
        each = ((x.row.name in mine, residual(s.name, x)) for x in scores)
        rows += [(s.name, fit, r) for fit, r in each if r is not None]
    known = [r for _, fit, r in rows if fit]
    out = ["| of | rows | rows held out, by the others | rows of a table, by the other tables |", "|---|--:|---|---|"]
    for of in ("time", "memory"):
        asked = [(t, fit, r) for t, fit, r in rows if getattr(r, of) is not None]
        half = [middle(r, known, of) for _, fit, r in asked if not fit]
        left = [middle(r, [o for _, _, o in rows if o.table != t], of) for t, _, r in asked]
        out.append(f"| {of} | {len(asked)} | {_share(half)} | {_share(left)} |")
    return out


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
