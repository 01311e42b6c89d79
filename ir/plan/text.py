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

import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import IntArray
from ir.graph.graph import GraphNode, illegal
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, OpShape, Plan
from ir.plan.read import COUNTS, VERSION, parse_plan, read_plan
from ir.plan.vocabulary import cover_text, stream_cell

__all__ = ["parse_plan", "plan_digest", "plan_text", "read_plan"]

_KEY = re.compile(r"[a-z][a-z0-9_.]*", re.ASCII)


def plan_text(plan: Plan) -> str:
    """The text of a plan.

    >>> from ir.graph.build import stage_graph
    >>> from ir.directives import PlaceDirective, SplitDirective, apply
    >>> from ir.core.filters import parse_filter as f
    >>> from ir.lower import lower
    >>> graph = apply(stage_graph(1), [SplitDirective(f({}), "MB", 1), PlaceDirective(f({"PP": 0}), 0)])
    >>> print(plan_text(lower(graph)).partition("ops = ")[2].rstrip())
    2
    <BLANKLINE>
    shape 0B* = 0I* 0W*
    <BLANKLINE>
    program 0
    - compute  0F0
    - compute  0B0                  free 0F0.act
    """
    return "".join(_blocks(plan))


@once_per_plan
def plan_digest(plan: Plan) -> str:
    """SHA-256 of the plan's text."""
    digest = sha256()
    for block in _blocks(plan):
        digest.update(block.encode())
    return digest.hexdigest()


def _blocks(plan: Plan) -> Iterator[str]:
    """The text, program by program."""
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
    yield "\n".join(lines) + "\n"
    names, starts, b = _names(plan), _starts(plan), plan.buffers
    filled = np.flatnonzero((b.node < 0) & (b.alloc != b.slot))
    later = np.flatnonzero((b.free >= 0) & (b.free != b.alloc))
    ends = _Ends(plan, "alloc", b.alloc[filled], filled), _Ends(plan, "free", b.free[later], later)
    heads = [(f"  {cell:<8} ", f"- {cell:<8} ") for cell in map(stream_cell, plan.shapes)]
    for p, (a, b) in enumerate(pairwise(plan.bounds.tolist())):
        rest = _waits(plan, a, b, names)
        for i in np.flatnonzero(plan.posts[a:b]).tolist():
            rest[i] += " post"
        for end in ends:
            end.add(rest, a, b, names)
        columns = zip(plan.shape[a:b].tolist(), starts[a:b], plan.texts[a:b], rest, strict=True)
        body = [
            (heads[s][first] + text).ljust(31) + more if more else heads[s][first] + text
            for s, first, text, more in columns
        ]
        yield "\n".join(["", f"program {p}", *body, ""])


def _says_itself(shape: OpShape, nodes: tuple[GraphNode, ...]) -> bool:
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


def _waits(plan: Plan, a: int, b: int, names: list[str]) -> list[str]:
    """What each of a program's ops a … b - 1 waits for, with the blank before it."""
    at = plan.waits.at[a : b + 1]
    waited = [names[w] for w in plan.waits.items[at[0] : at[-1]].tolist()]
    return ["" if i == j else " wait " + " ".join(waited[i:j]) for i, j in pairwise((at - at[0]).tolist())]


class _Ends:
    """Buffers on the lines of the ops where they begin or die, sorted by op.

    called: a number for a slot of all nodes' writes, or -1 - row for the op that a buffer is called after.
    """

    def __init__(self, plan: Plan, word: str, op: IntArray, buffers: IntArray) -> None:
        by = np.argsort(op, kind="stable")
        b, nodes = plan.buffers, plan.graph.nodes
        self.word, self.op, buffers = word, op[by], buffers[by]
        base = np.concatenate([[0], np.cumsum([len(n.writes) for n in nodes])]).astype(np.int64)
        node, slot = b.node[buffers], b.slot[buffers]
        self.called, self.mb = np.where(node < 0, -1 - slot, base[node] + slot), b.mb[buffers]
        self.bytes = b.bytes[buffers] if word == "alloc" else None
        parts = [(f"{n.stage}{n.kind}", f"/{n.part}" if n.part else "", n.writes) for n in nodes]
        self.slots = [(head, f"{part}.{w.slot}") for head, part, writes in parts for w in writes]

    def add(self, rest: list[str], a: int, b: int, names: list[str]) -> None:
        """Add what begins or dies at ops a … b - 1 to their lines."""
        i, j = np.searchsorted(self.op, (a, b)).tolist()
        columns = zip(self.called[i:j].tolist(), self.mb[i:j].tolist(), strict=True)
        slots = self.slots
        words = [names[-1 - k] if k < 0 else f"{(s := slots[k])[0]}{mb}{s[1]}" for k, mb in columns]
        if self.bytes is not None:
            words = [f"{word}:{size}" for word, size in zip(words, self.bytes[i:j].tolist(), strict=True)]
        cuts = np.flatnonzero(np.diff(self.op[i:j], prepend=-1, append=-1))
        rows = (self.op[i:j][cuts[:-1]] - a).tolist()
        for row, (first, end) in zip(rows, pairwise(cuts.tolist()), strict=True):
            rest[row] += f" {self.word} {' '.join(words[first:end])}"


def _starts(plan: Plan) -> list[bool]:
    """Whether an op is the first of its unit: transfers and once-per-step ops begin none."""
    base = np.flatnonzero((plan.unit >= 0) & (plan.kind != OpKind.RECV) & (plan.kind != OpKind.SEND))
    key = plan.program[base] * (1 + int(plan.unit.max(initial=0))) + plan.unit[base]
    out = np.zeros(len(plan), dtype=bool)
    out[base] = np.diff(key, prepend=-1) != 0
    flags: list[bool] = out.tolist()
    return flags
