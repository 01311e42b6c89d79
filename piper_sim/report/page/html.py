"""Traces as one page to mail: no network, no server, nothing to install; it opens from the disk in any browser."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

import numpy as np

from ir.trace.trace import Trace
from piper_sim.report.look import COMPUTE, LOOKS, legend_looks, looks_of, span
from piper_sim.report.page.columns import ReportTrace, run_object
from piper_sim.report.timeline import text_timeline
from piper_sim.report.units import percent, seconds, size

__all__ = ["Answer", "ReportTrace", "Tables", "report_html"]

Answer = tuple[str, str, str, str]  # a question, its answer, a note; good, bad or nothing
Tables = Mapping[str, Sequence[Mapping[str, object]]]
_SCRIPTS = tuple(f"report_{x}.js" for x in ("data", "scene", "crowd", "marks", "paint", "words", "page", "hands"))
_NUMBER = re.compile(r"[-+]?[\d ,.]+( ?(s|ms|µs|ns|%|[KMGT]iB|B|\(\d+\)))*|–|✓|✗")


def report_html(
    runs: Sequence[ReportTrace], title: str, tables: Tables | None = None, answers: Sequence[Answer] = ()
) -> str:
    """The page's text, answers first. `tables` maps a heading to rows; every row is a dict from column to cell.

    >>> run = ReportTrace("1f1b", Trace.of({}, [(0, 0, "compute", "0F0", 0.0, 0.0, 1.0)]), {"step": "1 s"})
    >>> page = report_html([run], "A <b> step", {"Summary": [{"schedule": "1f1b", "step s": 1.0}]})
    >>> "<title>A &lt;b&gt; step</title>" in page, "<script src" in page
    (True, False)
    """
    looks = [{"key": k.key, "word": k.word, "colour": k.colour} for k in LOOKS]
    data = {"looks": looks, "compute": COMPUTE, "runs": [run_object(r) for r in runs]}
    style = _asset("report.css") + "".join(f".look-{k.key}{{background:{k.colour}}}\n" for k in LOOKS)
    script = '(() => {\n"use strict";\n' + "".join(map(_asset, _SCRIPTS)) + "})();\n"
    parts = {
        "csp": _policy(script, style),
        "title": html.escape(title),
        "answers": _answers(answers),
        "style": style,
        "script": script,
        "tables": "".join(_section(name, rows) for name, rows in (tables or {}).items()),
        "facts": _facts(runs),
        "legend": _legend(runs),
        "ranks": "".join(_section(f"{r.name}, rank by rank", _rank_rows(r.trace)) for r in runs),
        "text": "".join(_text(r) for r in runs),
        # Inside a script element only "<" could end it; JSON may spell it so.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # One pass: what is put in is never looked at again, whatever it contains.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return files("piper_sim.report.page").joinpath(name).read_text("utf-8")


def _policy(script: str, style: str) -> str:
    """Only the two texts we wrote may act; nothing may be fetched, framed or sent."""
    hashes = [base64.b64encode(hashlib.sha256(t.encode("utf-8")).digest()).decode("ascii") for t in (script, style)]
    rules = ("default-src 'none'", f"script-src 'sha256-{hashes[0]}'", f"style-src 'sha256-{hashes[1]}'")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _section(name: str, rows: Sequence[Mapping[str, object]]) -> str:
    """A heading and a table; columns are all keys of all rows, empty ones left out."""
    keys = list(dict.fromkeys(k for row in rows for k in row))
    keys = [k for k in keys if any(row.get(k) not in (None, "") for row in rows)]
    if not keys:
        return ""
    texts = [[_cell(row.get(k)) for k in keys] for row in rows]
    right = [all(_NUMBER.fullmatch(row[i]) for row in texts if row[i]) for i in range(len(keys))]
    head = "".join(f'<th scope="col"{_side(r)}>{html.escape(k)}</th>' for k, r in zip(keys, right, strict=True))
    body = "".join("<tr>" + "".join(map(_td, row, right)) + "</tr>\n" for row in texts)
    return (
        f'<section><h2>{html.escape(name)}</h2><div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div></section>\n"
    )


def _side(right: bool) -> str:
    return ' class="number"' if right else ""


def _td(text: str, right: bool) -> str:
    mark = {"✓": ' class="number yes"', "✗": ' class="number no"'}.get(text, _side(right))
    return f"<td{mark}>{html.escape(text)}</td>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "✓" if value else "✗"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _facts(runs: Sequence[ReportTrace]) -> str:
    cards = []
    for run in runs:
        items = "".join(f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(_cell(v))}</dd>" for k, v in run.facts.items())
        cards.append(f"<article><h3>{html.escape(run.name)}</h3><dl>{items}</dl></article>" if items else "")
    return f'<section class="facts">{"".join(cards)}</section>' if any(cards) else ""


def _answers(answers: Sequence[Answer]) -> str:
    cards = "".join(
        f'<div class="answer {tone}"><span>{html.escape(asked)}</span><b>{html.escape(said)}</b>'
        f"<small>{html.escape(note)}</small></div>"
        for asked, said, note, tone in answers
    )
    return f'<div class="answers">{cards}</div>' if cards else ""


def _legend(runs: Sequence[ReportTrace]) -> str:
    used = {i for run in runs for i in np.unique(looks_of(run.trace)).tolist()}
    items = (f'<li><i class="look-{k.key}"></i>{k.word}</li>' for k in legend_looks(used))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _rank_rows(trace: Trace) -> list[dict[str, object]]:
    """What a reader without canvas, or with a screen reader, gets of each rank."""
    begin, end = span(trace)
    busy = trace.end_s - trace.start_s
    compute = np.fromiter((s == COMPUTE for s in trace.stream), bool, len(trace))
    rows: list[dict[str, object]] = []
    for rank in np.unique(trace.rank).tolist():
        mine = trace.rank == rank
        row: dict[str, object] = {"rank": rank, "ops": int(mine.sum())}
        work = float(busy[mine & compute].sum())
        row["first start"] = seconds(float(trace.start_s[mine].min()), 6)
        row["last end"] = seconds(float(trace.end_s[mine].max()), 6)
        row["computing"] = seconds(work, 6)
        row["computing %"] = percent(work / (end - begin)) if end > begin else ""
        row["communicating"] = seconds(float(busy[mine & ~compute].sum()), 6)
        if trace.memory is not None and (at := trace.memory.rank == rank).any():
            row["peak memory"] = size(int(trace.memory.bytes[at].max()))
        rows.append(row)
    return rows


def _text(run: ReportTrace) -> str:
    return f"<h3>{html.escape(run.name)}</h3><pre>{html.escape(text_timeline(run.trace))}</pre>"
