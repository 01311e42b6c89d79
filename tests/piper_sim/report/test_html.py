"""The page to mail: self-contained, inert whatever the names are, and exact."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from ir.trace.trace import MemorySamples, Trace
from piper_sim.report.look import lanes_of
from piper_sim.report.marks import HOST, TraceMarks, TraceStretch
from piper_sim.report.page.columns import run_object
from piper_sim.report.page.html import ReportTrace, report_html

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{script}}'\"&"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.inside: list[tuple[dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None], list[str]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(attrs)))
        if tag in ("script", "style"):
            self._open = (tag, dict(attrs), [])

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[2].append(data)

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[0]:
            self.inside.append(({"tag": tag, **self._open[1]}, "".join(self._open[2])))
            self._open = None


def page_of(name: str) -> str:
    rows = [(0, 0, "compute", name, 0.0, 0.0, 1.0), (0, 0, name, "x", 0.0, 0.5, 1.0)]
    trace = Trace.of({"engine": name}, rows, MemorySamples.of([(0, 0.0, 5)]))
    stretch = [TraceStretch(0, 0.0, 1.0, name, 0)]
    ones = np.full(2, -1)
    marks = TraceMarks(ones, ones, np.zeros(2), stretch, stretch, {name: np.array([5])}, {0: 0.5})
    run = ReportTrace(name, trace, {name: name}, cost_source=[name] * 2, marks=marks)
    return report_html([run, run], name, {name: [{name: name, "b": None}]}, [(name, name, name, "good")])


def data_of(page: str) -> dict[str, Any]:
    return next(json.loads(text) for attrs, text in Page(page).inside if attrs.get("id") == "data")


def test_names_cannot_become_markup() -> None:
    evil, plain = Page(page_of(EVIL)), Page(page_of("plain"))
    assert [t for t, _ in evil.tags] == [t for t, _ in plain.tags]
    assert [a for t, a in evil.tags if t != "meta"] == [a for t, a in plain.tags if t != "meta"]
    code = [[text for attrs, text in p.inside if "id" not in attrs] for p in (evil, plain)]
    assert code[0] == code[1]
    assert data_of(page_of(EVIL))["runs"][0]["name"] == EVIL


def test_only_our_own_code_may_run() -> None:
    page = Page(page_of(EVIL))
    policy = next(
        dict(a)["content"] or ""
        for t, a in page.tags
        if t == "meta" and ("content" in dict(a)) and a[0][0] == "http-equiv"
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        [text] = [text for attrs, text in page.inside if attrs["tag"] == tag and "id" not in attrs]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    attributes = {name for _, attrs in page.tags for name, _ in attrs}
    assert not {a for a in attributes if a.startswith("on")} | (attributes & {"src", "href", "style"})


def test_scripts_never_turn_text_into_markup() -> None:
    code = "".join(text for attrs, text in Page(page_of("x")).inside if attrs["tag"] == "script" and "id" not in attrs)
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "http"):
        assert word not in code


def columns_of(run: dict[str, Any]) -> dict[str, Any]:
    """What report_data.js does, in Python."""
    data = gzip.decompress(base64.b64decode(run["blob"]))
    found: dict[str, Any] = {}
    at = 0
    for name, kind, n in run["columns"]:
        if kind == "json":
            found[name] = json.loads(data[at : at + n])
            at += n
        else:
            assert at % int(kind[1]) == 0, "typed arrays must be aligned"
            found[name] = np.frombuffer(data, "<" + kind, n, at)
            at += n * int(kind[1])
    if run["timing"] == "gaps":
        both = np.cumsum(np.column_stack((found["start"], found["end"])).ravel())
        found["start"], found["end"] = both[0::2], both[1::2]
    assert at == len(data)
    return found


@pytest.mark.parametrize("scale", [1.0, np.pi], ids=["gaps", "times"])
def test_the_page_holds_the_very_times(make_trace, scale: float) -> None:
    trace = make_trace(ranks=3, mbs=4, f=0.1, b=0.2, p2p=0.01, comm=True, parts=3)
    if scale != 1.0:
        times = (trace.post_s * scale, trace.start_s * scale, trace.end_s * scale)
        trace = Trace(trace.header, trace.step, trace.rank, trace.stream, trace.op, *times, trace.memory)
    run = run_object(ReportTrace("x", trace))
    assert run["timing"] == ("gaps" if scale == 1.0 else "times")
    columns = columns_of(run)
    rows = np.concatenate([lane.rows for lane in lanes_of(trace)])
    assert (columns["start"] == trace.start_s[rows]).all()
    assert (columns["end"] == trace.end_s[rows]).all()
    pattern, mb, mb2 = (np.cumsum(columns[k]).tolist() for k in ("op", "mb", "mb2"))
    texts = [columns["op_texts"][i] for i in pattern]
    for again in (mb, mb2):
        texts = [t.replace("*", str(m), 1) if m >= 0 else t for t, m in zip(texts, again, strict=True)]
    assert texts == [trace.op[i] for i in rows.tolist()]
    assert len(columns["op_texts"]) < 50
    assert sum(n for _, _, n in run["lanes"]) == len(trace)


def test_the_same_runs_give_the_same_page(make_trace) -> None:
    assert report_html([ReportTrace("a", make_trace(comm=True))], "t") == report_html(
        [ReportTrace("a", make_trace(comm=True))], "t"
    )


def test_a_reader_without_scripts_gets_text(make_trace) -> None:
    page = report_html([ReportTrace("1f1b", make_trace())], "t", {"Rows": [{"a": 1.5, "fits": False}]})
    assert "0F0 0F1 0F2" in re.sub(r"(?s).*<noscript>(.*)</noscript>.*", r"\1", page)
    assert '<td class="number">1.5</td><td class="number no">✗</td>' in page
    assert "computing %" in page


def test_a_report_may_be_empty() -> None:
    assert "nothing here" in report_html([], "nothing here")
    assert report_html([ReportTrace("x", Trace.of({}, []))], "no rows")


def test_200_000_spans_stay_small(make_trace) -> None:
    trace = make_trace(ranks=16, mbs=128, f=0.01, b=0.0203, p2p=0.001, comm=True, parts=4)
    page = report_html([ReportTrace("x", trace)], "t")
    assert len(page) < 80_000 + len(trace)


def test_marks_come_back_as_the_rows_they_name(make_trace) -> None:
    trace = make_trace(ranks=2, mbs=3, comm=True, p2p=0.5)
    n = len(trace)
    partner = np.roll(np.arange(n), 3)
    after = np.where(np.arange(n) % 3, np.arange(n)[::-1], -1)
    after[4] = HOST
    gaps = [TraceStretch(1, 0.25, 0.5, "warmup", 7), TraceStretch(1, 0.5, 0.75, "link")]
    run = run_object(ReportTrace("x", trace, marks=TraceMarks(partner, after, np.arange(n) * 1.0, gaps)))
    columns = columns_of(run)
    rows = np.concatenate([lane.rows for lane in lanes_of(trace)])
    for name, wanted in (("partner", partner), ("after", after)):
        codes = columns[name].astype(np.int64)
        far = codes < -(2**29)
        found = np.where(far, codes + 2**30, codes + np.arange(n))
        assert [rows[i] if i >= 0 else i for i in found] == wanted[rows].tolist()
    assert rows[columns["gap_row"][0]] == 7 and columns["gap_row"][1] == -1
    assert [run["causes"][i] for i in columns["gap_cause"]] == ["warmup", "link"]
    assert columns["bytes"].tolist() == rows.tolist()
