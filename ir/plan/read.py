"""Reading a plan's text: strictly, by line number, with nothing expanded before its size is known."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.files import FileErrors, read_text
from ir.graph.graph import Graph
from ir.graph.per_step import with_sync
from ir.graph.sync import buckets
from ir.plan.plan import CollectiveRole, OpShape, Plan
from ir.plan.rebuild import PlanTextBuffers, PlanTextColumns, PlanTextRows, columns_plan
from ir.plan.vocabulary import OpVocabulary, stream_cell

VERSION = 1
COUNTS = ("microbatches", "programs", "ops")
MAX_BYTES = 64 * 2**20
FORM = FileErrors("a plan", ErrorKind.IO, "PLAN", MAX_BYTES, "the plan.txt that `plan --out DIR` leaves in DIR")
MAX_OPS = 1_000_000
MAX_PROGRAMS = 65_536
_PARTS = {"wait": 1, "post": 2, "alloc": 3, "free": 4}
_LINE = "[-] stream op [wait op …] [post] [alloc buffer:bytes …] [free buffer …]"
_OP = re.compile(r"(\d{1,9}[A-Z_]+)(0|[1-9]\d{0,8})?(/\S+)?", re.ASCII)
_MEMBER = r"(\d{1,9}[A-Z_]+)(0|[1-9]\d{0,8})(/[^\s;]+)?"
_FUSED = re.compile(rf"\({_MEMBER};{_MEMBER}\)OVERLAP_F_B", re.ASCII)


def read_plan(path: str | Path, graph: Graph) -> Plan:
    """The plan in a file. Raises PiperError."""
    with FORM.naming(path):
        return parse_plan(read_text(path, FORM), graph, str(path))


def parse_plan(text: str, graph: Graph, file: str | None = None) -> Plan:
    """The plan a text says, over the graph it was lowered from (with or without its once-per-step nodes).

    Raises PiperError: io for what is no plan text; illegal_plan for an op that the graph does not have, that stands
    twice, or that waits for or frees what is not there. Whether the plan may run is `check_plan`'s to say.
    """
    return _Reader(text, graph, file).plan()


@dataclass
class _Program:
    """What was read of one program: its ops by name (-1: several streams have that text), and what to look up later."""

    number: int
    rows: dict[str, int] = field(default_factory=dict)
    waits: list[tuple[int, str]] = field(default_factory=list)
    posts: list[int] = field(default_factory=list)
    frees: list[tuple[int, str]] = field(default_factory=list)
    allocs: list[tuple[int, str]] = field(default_factory=list)


class _Reader:
    """One pass over the lines, then one over the names."""

    def __init__(self, text: str, graph: Graph, file: str | None) -> None:
        self.file, self.at, self.counts = file, 0, dict.fromkeys(COUNTS, -1)
        if len(text) > MAX_BYTES:
            self._no("the plan is too big", f"at most {MAX_BYTES // 2**20} MB")
        self.lines = text.split("\n")
        self.header = self._head()
        if graph.source is not None and not any(n.once for n in graph.nodes):
            graph = with_sync(graph, self.header.get("clip") != "off", buckets(graph))
        if graph.mbs != self.counts["microbatches"]:
            self._wrong(f"a plan of {self.counts['microbatches']} microbatches, for a graph of {graph.mbs}")
        self.graph, self.raw = graph, PlanTextRows(file)
        self.words = OpVocabulary(graph, self.counts["programs"])
        self.shapes: list[OpShape] = []
        self.ids: dict[tuple[str, str], int] = {}
        self.programs: list[_Program] = []

    def _head(self) -> dict[str, str]:
        if self.lines[0].rstrip() != f"piper-plan {VERSION}":
            self._no(f"not a plan of this version: {self.lines[0]:.60}", f"piper-plan {VERSION}")
        header: dict[str, str] = {}
        for number, line in enumerate(self.lines[1:], 1):
            self.at = number
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith(("shape ", "program ")):
                break
            key, eq, value = line.partition(" = ")
            if not eq or key in header:
                self._no(f"not a header line: {line:.60}", "key = value, each key once; then shapes and programs")
            header[key] = value.strip()
        for name, limit in zip(COUNTS, (MAX_OPS, MAX_PROGRAMS, MAX_OPS), strict=True):
            word = header.pop(name, "")
            if not re.fullmatch(r"0|[1-9]\d{0,8}", word, re.ASCII) or int(word) > limit:
                self._no(f"{name} = {word!r}", f"{name} = a number up to {limit}")
            self.counts[name] = int(word)
        return header

    def plan(self) -> Plan:
        """All lines, then all names."""
        for number in range(self.at, len(self.lines)):
            self.at = number
            words = self.lines[number].split()
            if not words or words[0].startswith("#"):
                continue
            if words[0] == "program":
                self._program(words)
            elif words[0] == "shape":
                self._shape(words)
            elif self.programs:
                self._op(words, self.programs[-1])
            else:
                self._no(f"an op outside a program: {self.lines[self.at]:.60}", "program 0")
        for name, found in (("programs", len(self.programs)), ("ops", len(self.raw.shape))):
            if found != self.counts[name]:
                self._no(f"the text has {found} {name}, its header says {self.counts[name]}", fix=f"{name} = {found}")
        for p in self.programs:
            self._resolve(p)
        columns = PlanTextColumns(self.raw, self.graph, tuple(self.shapes))
        buffers = PlanTextBuffers(self.raw, columns, self.words, self._text).buffers()
        return Plan(buffers=buffers, **columns_plan(self.raw, columns, self.header))  # type: ignore[arg-type]

    def _text(self, row: int) -> str:
        return self.shapes[self.raw.shape[row]].stamp(self.raw.mb[row], self.raw.mb2[row])

    def _program(self, words: list[str]) -> None:
        number = len(self.programs)
        if words[1:] != [str(number)] or number == self.counts["programs"]:
            self._no(f"{' '.join(words):.40} of {self.counts['programs']}", f"program {number}")
        self.programs.append(_Program(number))

    def _shape(self, words: list[str]) -> None:
        if self.programs or len(words) < 4 or words[2] != "=":
            self._no(f"not a shape: {' '.join(words):.60}", "shape 0B* = 0I* 0W*, before the first program")
        if why := self.words.define(words[1], words[3:]):
            self._wrong(why, fix=nearest(words[3], self.words.covers))

    def _op(self, words: list[str], program: _Program) -> None:
        raw, row = self.raw, len(self.raw.shape)
        begins = words[0] == "-"
        if begins:
            del words[0]
        if len(words) < 2:
            self._no(f"not an op: {' '.join(words):.60}", _LINE)
        if row == self.counts["ops"]:
            self._no(f"more ops than the header's {row}", "ops = the number of op lines")
        raw.shape.append(self._shape_of(words[0], words[1]))
        raw.program.append(program.number)
        raw.begins.append(begins)
        raw.line.append(self.at)
        self._name(program, words[0], words[1], row)
        if len(words) > 2:
            self._rest(words, program, row)

    def _rest(self, words: list[str], program: _Program, row: int) -> None:
        part = 0
        into = {1: program.waits, 3: program.allocs, 4: program.frees}
        for word in words[2:]:
            if word in _PARTS:
                if _PARTS[word] <= part:
                    self._no(f"{word} out of place in the line of {words[1]}", _LINE)
                part = _PARTS[word]
                if part == 2:
                    program.posts.append(row)
            elif part in into:
                into[part].append((row, word))
            else:
                self._no(f"{word!r:.60} out of place in the line of {words[1]}", _LINE)

    def _name(self, program: _Program, cell: str, text: str, row: int) -> None:
        """Remember an op by its text, or by stream and text where several streams have it."""
        twin = program.rows.setdefault(text, row)
        if twin == row:
            return
        full = f"{cell}:{text}"
        if twin >= 0 and self.raw.shape[twin] != self.raw.shape[row]:
            program.rows[f"{stream_cell(self.shapes[self.raw.shape[twin]])}:{text}"] = twin
            program.rows[text] = -1
        elif twin >= 0 or full in program.rows:
            self._wrong(f"{text} stands twice in program {program.number}", fix="keep one of them")
        program.rows[full] = row

    def _shape_of(self, cell: str, text: str) -> int:
        """The shape of an op; its microbatches go into their columns."""
        mb2 = -1
        if m := _OP.fullmatch(text):
            mb = int(m[2]) if m[2] else -1
            pattern = f"{m[1]}{'*' if m[2] else ''}{m[3] or ''}"
        elif m := _FUSED.fullmatch(text):
            mb, mb2 = int(m[2]), int(m[5])
            pattern = f"({m[1]}*{m[3] or ''};{m[4]}*{m[6] or ''})OVERLAP_F_B"
        else:
            allowed = "2F0, 2F0/l7.attn, 2SEND_F0, (0F7;7B3)OVERLAP_F_B, 2RS/dense"
            self._wrong(f"not an op: {text:.60}", allowed, self._near(cell, text))
        if mb >= self.graph.mbs or mb2 >= self.graph.mbs:
            self._wrong(f"{text} names a microbatch that does not exist", f"0..{self.graph.mbs - 1}")
        self.raw.mb.append(mb)
        self.raw.mb2.append(mb2)
        found = self.ids.get((cell, pattern))
        if found is None:
            shape = self.words.find(cell, pattern)
            if shape is None:
                self._wrong(f"the graph has no op {text:.60} on stream {cell:.40}", fix=self._near(cell, text))
            found = self.ids[cell, pattern] = len(self.shapes)
            self.shapes.append(shape)
        return found

    def _near(self, cell: str, text: str) -> str | None:
        """The op most like a wrong one, with its microbatches."""
        mbs = re.findall(r"(?<=[A-Za-z_])\d+", text)
        fix = self.words.nearest(cell, re.sub(r"(?<=[A-Za-z_])\d+", "*", text))
        for mb in mbs:
            fix = fix and fix.replace("*", mb, 1)
        return fix

    def _resolve(self, p: _Program) -> None:
        raw = self.raw
        waits = [(row, self._find(p, row, name, "waits for")) for row, name in p.waits]
        raw.waits += waits
        awaited, posts = {on for _, on in waits}, set(p.posts)
        if awaited != posts:
            row = min(awaited ^ posts)
            why = "is waited for, but does not post" if row in awaited else "posts, but nobody waits for it"
            raise raw.wrong(row, f"{self._text(row)} {why}", "post stands where an op is waited for")
        for row, name in p.frees:
            if found := self.words.buffer(name):
                raw.frees.append((row, *found))
            else:
                raw.named_frees.append((row, self._find(p, row, name, "frees")))
        for row, word in p.allocs:
            name, _, size = word.rpartition(":")
            on = self._find(p, row, name, "allocates")
            if (
                not re.fullmatch(r"[1-9]\d{0,17}", size, re.ASCII)
                or self.shapes[raw.shape[on]].role is not CollectiveRole.REDUCE
            ):
                raise raw.wrong(row, f"{word:.60} is no gradient bucket and its bytes", "alloc 2RS3/dense:4096")
            raw.allocs.append((row, on, int(size)))
        twice = [row for row, on in Counter(on for _, on, _ in raw.allocs).items() if on > 1]
        if twice:
            raise raw.wrong(twice[0], f"the bucket of {self._text(twice[0])} is allocated twice")

    def _find(self, p: _Program, row: int, name: str, does: str) -> int:
        on = p.rows.get(name, -2)
        if on == -2 and ":" in name:  # said with its stream where the text alone would do
            cell, _, text = name.partition(":")
            on = p.rows.get(text, -2)
            on = on if on >= 0 and stream_cell(self.shapes[self.raw.shape[on]]) == cell else -2
        if on >= 0:
            return on
        why = "which is not in its program" if on == -2 else "which stands there on several streams"
        near = nearest(name, [k for k, v in p.rows.items() if v >= 0 and abs(v - row) < 2000], coded=False)
        raise self.raw.wrong(row, f"{self._text(row)} {does} {name:.60}, {why}", near)

    def _no(self, what: str, allowed: str = "", fix: str | None = None, kind: ErrorKind = ErrorKind.IO) -> NoReturn:
        key = f"line {self.at + 1}"
        raise PiperError(kind, what, file=self.file, key=key, allowed=allowed or None, suggestion=fix)

    def _wrong(self, what: str, allowed: str = "", fix: str | None = None) -> NoReturn:
        self._no(what, allowed, fix, ErrorKind.ILLEGAL_PLAN)
