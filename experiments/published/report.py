"""The error table as text and as JSON."""

from collections.abc import Mapping, Sequence

from experiments.published.rows import DataSet, Row
from experiments.published.score import PredictionErrors, Score, memories, times

Found = Mapping[DataSet, Sequence[Score]]
_HEAD = "| data set | of | half | n | median | p90 | worst | sign | asked |\n|---|---|---|--:|--:|--:|--:|--:|---|\n"


def halves(of: DataSet, found: Sequence[Score]) -> dict[str, list[Score]]:
    """All rows, the half that constants were fitted to, and the half held out."""
    mine = of.fit(s.row for s in found)
    return {
        "all": list(found),
        "fit": [s for s in found if s.row.name in mine],
        "held out": [s for s in found if s.row.name not in mine],
    }


def summary(found: Found) -> str:
    """One line per data set, quantity and half; the data set whose median is worst leads."""
    out = [_HEAD.rstrip("\n")]
    for s, rows in sorted(found.items(), key=lambda x: -_worst(x[1])):
        for of, errors in (("time", times), ("memory", memories)):
            for half, some in halves(s, rows).items():
                spread = PredictionErrors.of(errors(some))
                if spread is not None:
                    out.append(_line(s, of, half, spread))
    return "\n".join(out)


def _worst(rows: Sequence[Score]) -> float:
    """The larger of the medians of time and memory."""
    return max((x.median for of in (times, memories) if (x := PredictionErrors.of(of(rows)))), default=0.0)


def _line(s: DataSet, of: str, half: str, x: PredictionErrors) -> str:
    asked = next((b.split(": ", 1)[1] for b in s.bars.split("; ") if b.startswith(of)), "") if half == "all" else ""
    return f"| {s.name} | {of} | {half} | {_sizes(x)} | {asked} |"


def alike(found: Found, least: int = 3) -> str:
    """Errors of step times by what was run on what, of at least so many rows; the worst leads."""
    out = ["| GPU | framework | experts | n | median | p90 | worst | sign | of which never fitted |"]
    out.append("|---|---|---|--:|--:|--:|--:|--:|---|")
    by: dict[tuple[str, str, str], list[tuple[bool, float]]] = {}
    for s, rows in found.items():
        for r in rows:
            if r.traits is not None and r.time is not None:
                of = r.traits.gpu, r.traits.software or "none told", "yes" if r.traits.moe else ""
                by.setdefault(of, []).append((s.never_fitted, r.time))
    spreads = {of: PredictionErrors.of([e for _, e in each]) for of, each in by.items() if len(each) >= least}
    for of, x in sorted(((of, x) for of, x in spreads.items() if x), key=lambda pair: -pair[1].median):
        never = PredictionErrors.of([e for apart, e in by[of] if apart])
        told = f"{never.n}: {100 * never.median:.1f} %" if never else ""
        out.append(f"| {' | '.join(of)} | {_sizes(x)} | {told} |")
    return "\n".join(out)


def _sizes(x: PredictionErrors) -> str:
    sizes = " | ".join(f"{100 * v:.1f} %" for v in (x.median, x.p90, x.worst))
    return f"{x.n} | {sizes} | {100 * x.sign:+.1f} %"


def without(found: Found) -> list[str]:
    """Rows that failed, that ran and are said not to fit, and that no job expresses, with the reasons."""
    out = []
    for s, rows in found.items():
        failed = [r for r in rows if r.failure]
        full = [r.row for r in rows if r.fits is False and not r.row.failed]
        told: dict[str, list[Row]] = {}
        for r in rows:
            if r.row.job is None:
                told.setdefault(r.row.why, []).append(r.row)
        out += [f"- {s.name} {r.row.name} failed: {r.failure}" for r in failed]
        if full:
            out.append(f"- {s.name}: {len(full)} of {len(rows)} ran but are said not to fit: {_names(full)}")
        out += [f"- {s.name}: not expressed, {len(x)} rows ({why}): {_names(x)}" for why, x in told.items()]
    return out


def confusion(found: Found) -> str:
    """Runs that ran and runs that failed, by whether they are said to fit."""
    out = ["| data set | runs | said to fit | said not to |", "|---|---|--:|--:|"]
    for s, rows in found.items():
        for word, failed in (("ran", False), ("failed", True)):
            said = [r.fits for r in rows if r.row.failed is failed and r.fits is not None]
            if said:
                out.append(f"| {s.name} | {word} | {sum(said)} | {len(said) - sum(said)} |")
    return "\n".join(out)


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(r.name for r in rows)


def rows_text(found: Found) -> str:
    """Every row: errors, seconds, and the largest shares of the predicted step."""
    out = []
    for s, rows in found.items():
        for r in rows:
            if r.predicted_s is None:
                out += [] if r.fits is None else [f"{s.name:12} {r.row.name:38} {'fits' if r.fits else 'does not fit'}"]
                continue
            time = "" if r.time is None else f"{100 * r.time:+6.1f} %"
            memory = " ".join(f"{k}:{100 * v:+.1f}%" for k, v in (r.memory or {}).items())
            parts = sorted((r.split or {}).items(), key=lambda x: -x[1])[:6]
            split = " ".join(f"{k} {100 * v:.0f}" for k, v in parts if v > 0.005)
            name = f"{s.name:12} {r.row.name:38}"
            out.append(f"{name} {r.row.seconds or 0:9.4f} {r.predicted_s:9.4f} {time:9} {memory:20} {split}")
    return "\n".join(out)


def as_json(found: Found) -> dict[str, object]:
    """Every row and every spread."""
    rows = [
        {
            "set": s.name,
            "row": r.row.name,
            "time": r.time,
            "memory": {str(k): v for k, v in (r.memory or {}).items()},
            "measured_s": r.row.seconds,
            "predicted_s": r.predicted_s,
            "fits": r.fits,
            "failed": r.row.failed,
            "failure": r.failure,
            "why": r.row.why,
            "split": dict(r.split or {}),
            "traits": r.traits,
        }
        for s, some in found.items()
        for r in some
    ]
    return {"schema_version": 1, "rows": rows}
