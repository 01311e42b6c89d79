"""A plan as text: one line per op, diffable; text → plan → text loses nothing. Costs are not in it.

    piper-plan 1
    schedule = 1f1b
    microbatches = 4
    programs = 2
    ops = 46

    shape 0B* = 0I* 0W*

    program 0
      recv<1   0RECV_B0             post
    - compute  0F0                  post
      send>1   0SEND_F0             wait 0F0

Each line says: the stream, the op, what it waits for (in its own program), whether somebody waits for it (post), the
flat gradients it begins to fill (alloc name:bytes), the buffers of other ops that die with it (free). A dash marks the
first op of each unit of the schedule. A `shape` says what one op runs, in order, where its text does not: * stands for
the microbatch, & for that of the second member of a fused pair. A buffer is called after the op that writes it; one
that nobody reads outside that op dies there, unsaid. `p2p>1` is a send to program 1 in the one queue of all transfers.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256

import numpy as np

from ir.errors import ErrorKind, PiperError
from ir.graph import Node, illegal
from ir.plan import Csr, OpKind, Plan, Shape
from ir.plan_ops import cover_text, stream_cell
from ir.plan_read import COUNTS, VERSION, parse_plan, read_plan

__all__ = ["parse_plan", "plan_digest", "plan_text", "read_plan"]

_KEY = re.compile(r"[a-z][a-z0-9_.]*", re.ASCII)


def plan_text(plan: Plan) -> str:
    """The text of a plan.

    >>> from ir.build import stage_graph
    >>> from ir.directives import Place, Split, apply
    >>> from ir.filters import parse_filter as f
    >>> from ir.lower import lower
    >>> graph = apply(stage_graph(1), [Split(f({}), "MB", 1), Place(f({"PP": 0}), 0)])
    >>> print(plan_text(lower(graph)).partition("ops = ")[2].rstrip())
    2
    <BLANKLINE>
    shape 0B* = 0I* 0W*
    <BLANKLINE>
    program 0
    - compute  0F0
    - compute  0B0                  free 0F0.act
    """
    _check_names(plan)
    counts = dict(zip(COUNTS, (plan.graph.mbs, plan.programs, len(plan)), strict=True))
    lines = [f"piper-plan {VERSION}", *(f"{k} = {v}" for k, v in {**plan.header, **counts}.items())]
    nodes = plan.graph.nodes
    coalesced = [s for s in plan.shapes if not _says_itself(s, nodes)]
    if coalesced:
        lines += [
            "",
            *(f"shape {s.text} = {' '.join(cover_text(nodes[n], m) for n, m in s.covers)}" for s in coalesced),
        ]
    names, ends = _names(plan), _ends(plan)
    at, items = plan.waits.at.tolist(), plan.waits.items.tolist()
    streams = [stream_cell(s) for s in plan.shapes]
    shapes, texts, posts, first = plan.shape.tolist(), plan.texts, plan.posts.tolist(), _unit_begins(plan)
    bounds = plan.bounds.tolist()
    for p in range(plan.programs):
        lines += ["", f"program {p}"]
        for i in range(bounds[p], bounds[p + 1]):
            rest = []
            if at[i] < at[i + 1]:
                rest.append("wait " + " ".join([names[w] for w in items[at[i] : at[i + 1]]]))
            if posts[i]:
                rest.append("post")
            if i in ends:
                rest.append(ends[i])
            mark = "-" if first[i] else " "
            line = f"{mark} {streams[shapes[i]]:<8} {texts[i]}"
            lines.append(f"{line:<31} {' '.join(rest)}" if rest else line)
    return "\n".join(lines) + "\n"


def plan_digest(plan: Plan) -> str:
    """SHA-256 of the plan's text."""
    return sha256(plan_text(plan).encode()).hexdigest()


def _says_itself(shape: Shape, nodes: tuple[Node, ...]) -> bool:
    if len(shape.covers) > 1:
        return False
    return not shape.covers or cover_text(nodes[shape.covers[0][0]], shape.covers[0][1]) == shape.text


def _check_names(plan: Plan) -> None:
    """Refuse what would not read back: a header that is no key and value, a cross-program wait."""
    for key, value in plan.header.items():
        if (
            not _KEY.fullmatch(key)
            or key in (*COUNTS, "shape", "program")
            or value != value.strip()
            or not value.isprintable()
        ):
            raise PiperError(
                ErrorKind.ILLEGAL_PLAN, f"header {key} = {value!r} cannot be written", allowed="a word, printable text"
            )
    for word in {s.text for s in plan.shapes} | {s.stream for s in plan.shapes}:
        if not word.isprintable() or any(c in " :&#=" for c in word):
            raise illegal(f"the name {word!r} cannot be written", "letters, digits, dots and underscores")
    stray = np.flatnonzero(plan.program[plan.waits.rows()] != plan.program[plan.waits.items])
    if len(stray):
        row, on = int(plan.waits.rows()[stray[0]]), int(plan.waits.items[stray[0]])
        raise illegal(f"{plan.text(row)} waits for {plan.text(on)} of program {int(plan.program[on])}", "wait locally")


def _names(plan: Plan) -> list[str]:
    """Each op's name in its program: its text; with the stream where another op of the program reads the same."""
    pairs = np.unique(plan.program * len(plan.shapes) + plan.shape).tolist()
    texts = [s.text for s in plan.shapes]
    count = Counter((k // len(texts), texts[k % len(texts)]) for k in pairs)
    doubtful = {k for k in pairs if count[k // len(texts), texts[k % len(texts)]] > 1}
    if not doubtful:
        return plan.texts
    keys = (plan.program * len(plan.shapes) + plan.shape).tolist()
    cells = [stream_cell(s) for s in plan.shapes]
    named = zip(keys, plan.shape.tolist(), plan.texts, strict=True)
    return [f"{cells[s]}:{text}" if k in doubtful else text for k, s, text in named]


def _ends(plan: Plan) -> dict[int, str]:
    """The alloc and free part of each line that has one."""
    b, names = plan.buffers, _names(plan)
    nodes = plan.graph.nodes
    columns = zip(b.node.tolist(), b.slot.tolist(), b.mb.tolist(), b.bytes.tolist(), strict=True)
    tails = [[f".{w.slot}" for w in n.writes] for n in nodes]
    heads = [f"{n.stage}{n.kind}" for n in nodes]
    parts = [f"/{n.part}" if n.part else "" for n in nodes]
    called = [names[s] if n < 0 else f"{heads[n]}{m}{parts[n]}{tails[n][s]}" for n, s, m, _ in columns]
    out: dict[int, list[str]] = {}
    for k in np.flatnonzero((b.node < 0) & (b.alloc != b.slot)).tolist():
        out.setdefault(int(b.alloc[k]), []).append(f"{called[k]}:{int(b.bytes[k])}")
    begins = {i: "alloc " + " ".join(words) for i, words in out.items()}
    later = np.flatnonzero((b.free >= 0) & (b.free != b.alloc))
    dies = Csr.of(len(plan), b.free[later], later)
    lines = {}
    for i in np.flatnonzero(np.diff(dies.at)).tolist():
        lines[i] = "free " + " ".join([called[k] for k in dies.row(i).tolist()])
    for i, text in begins.items():
        lines[i] = f"{text} {lines[i]}" if i in lines else text
    return lines


def _unit_begins(plan: Plan) -> list[bool]:
    """Whether an op is the first of its unit: transfers and once-per-step ops begin none."""
    base = np.flatnonzero((plan.unit >= 0) & (plan.kind != OpKind.RECV) & (plan.kind != OpKind.SEND))
    key = plan.program[base] * (1 + int(plan.unit.max(initial=0))) + plan.unit[base]
    out = np.zeros(len(plan), dtype=bool)
    out[base] = np.diff(key, prepend=-1) != 0
    flags: list[bool] = out.tolist()
    return flags
