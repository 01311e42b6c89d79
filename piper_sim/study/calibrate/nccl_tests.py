"""What nccl-tests prints, read as it is: `all_reduce_perf` and the like, of any version, several tests in one file.

Rows are checked against themselves: algbw is size over time, busbw is algbw times a factor that each test has. So a
table whose columns were moved, or one of another test, is refused and not believed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from cost_models.profile.profile import MeasuredCost, Profile
from ir.core.errors import ErrorKind, PiperError, job_error
from ir.core.files import FileErrors, read_text
from ir.core.work import Message, MessageKind
from ir.graph.classes import link_class
from piper_sim.study.calibrate.assemble import machine_of
from piper_sim.study.validate.samples import measured

TESTS = {
    "all_reduce": MessageKind.ALL_REDUCE,
    "all_gather": MessageKind.ALL_GATHER,
    "reduce_scatter": MessageKind.REDUCE_SCATTER,
    "alltoall": MessageKind.ALL_TO_ALL,
    "sendrecv": MessageKind.P2P,
}
OTHERS = ("broadcast", "reduce", "gather", "scatter", "hypercube")
NEEDED = ("size", "time", "algbw", "busbw")
DEFAULT_ITERATIONS = 20
FLAG = "--from-nccl-tests"
FORM = FileErrors(
    "what nccl-tests prints", ErrorKind.JOB, FLAG, 10**8, "what all_reduce_perf prints, whole", packed=True
)
_TAG = re.compile(r"^\s*(\[\d+,\d+\]\s*<std\w+>:|\d+:)\s?")  # mpirun --tag-output, srun --label
_RANK = re.compile(
    r"#\s*Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^]]*]\s*(.*)"
)
_STARTS = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_ITERATIONS = re.compile(r"\biters:\s*(\d{1,9})\s+(?:agg iters|validation)")
_BAD = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,18})")


@dataclass
class CollectiveTest:
    """One test. hosts: by rank of group 0. rows: (line, size, microseconds out of place and in place, where given)."""

    program: str = ""
    iterations: int = DEFAULT_ITERATIONS
    hosts: dict[int, str] = field(default_factory=dict)
    gpu: str = ""
    columns: tuple[str, ...] = ()
    redop: str = ""
    rows: list[CollectiveTestLine] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether its table has come."""
        return bool(self.columns)


@dataclass(frozen=True)
class CollectiveTestLine:
    """One line of a table. halves: (time, algbw, busbw) as printed, out of place and in place."""

    number: int
    size: int
    halves: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class CollectiveTestTimes:
    """One test's times. seconds: by size in bytes, one or two of them; iterations: behind each."""

    kind: MessageKind
    ranks: int
    nodes: int
    gpu: str
    seconds: dict[int, list[float]]
    iterations: int


def read_nccl_tests(paths: Sequence[str]) -> Profile:
    """The links of a profile from nccl-tests' output. Raises PiperError, with file and line."""
    tables: list[CollectiveTestTimes] = []
    for path in paths:
        with FORM.naming(path):
            tables += parse(read_text(path, FORM), path)
    samples: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for t in tables:
        for size, seconds in t.seconds.items():
            key = link_class(Message(t.kind, size, ()), t.ranks, t.nodes)
            samples[key] += seconds
            counts[key] += t.iterations * len(seconds)
    found = {key: measured(x) for key, x in samples.items()}
    links = {key: MeasuredCost(m.median_s, m.spread_s, counts[key]) for key, m in found.items()}
    machine = machine_of([(t.gpu, t.ranks) for t in tables], FLAG)
    origins = [
        f"nccl-tests: {t.kind} of {t.ranks} ranks on {t.nodes} node{'s' * (t.nodes > 1)}, {t.gpu or 'GPU not named'}"
        for t in tables
    ]
    return Profile.of(machine, {}, links, origins=tuple(dict.fromkeys(origins)))


def parse(text: str, file: str) -> list[CollectiveTestTimes]:
    """Every test in a text. Raises PiperError: nothing in it, or something that cannot be right."""
    sections = list(_sections(text, file))
    tables = [_table(s, file) for s in sections if s.rows]
    if not tables:
        fix = "give the whole of what all_reduce_perf and the like print"
        raise job_error(FLAG, "no table of nccl-tests in it", fix, file=file)
    return tables


def _sections(text: str, file: str) -> Iterator[CollectiveTest]:
    now = CollectiveTest()
    for number, raw in enumerate(text.splitlines(), 1):
        line = _TAG.sub("", raw).strip()
        starts = _STARTS.match(line)
        if now.begun and (starts or line.startswith("# nThread")):
            yield now
            now = CollectiveTest()
        if starts:
            now.program = starts[1]
        elif line.startswith("#"):
            _header(now, line, number, file)
        elif now.begun and line and line.split()[0].isdecimal():
            now.rows.append(_line(now, line.split(), number, file))
        # else what NCCL, MPI or the shell say
    yield now


def _header(s: CollectiveTest, line: str, number: int, file: str) -> None:
    if m := _RANK.match(line):
        rank, group = int(m[1]), int(m[2] or 0)
        if rank in s.hosts:
            message = f"rank {rank} is there twice: these are tests side by side, each of one process"
            raise _wrong(file, number, message, fix="build nccl-tests with MPI=1, or give -g the GPUs of one process")
        if group == 0:
            s.hosts[rank] = m[3]
        s.gpu = s.gpu or m[4].strip()
    elif m := _ITERATIONS.search(line):
        s.iterations = int(m[1])
    elif (m := _BAD.match(line)) and int(m[1]):
        raise _wrong(file, number, f"{m[1]} values of this test were wrong", fix="a run without errors")
    else:
        names = tuple("time" if w == "cputime" else w for w in line.removeprefix("#").split())
        if set(NEEDED) <= set(names):
            halves = [names[i : i + 3] for i, name in enumerate(names) if name == "time"]
            if any(half != NEEDED[1:] for half in halves):
                raise _wrong(file, number, f"columns {' '.join(names)[:80]}", allowed=" ".join(NEEDED))
            s.columns = names


def _line(s: CollectiveTest, cells: list[str], number: int, file: str) -> CollectiveTestLine:
    columns = s.columns
    firsts = [i for i, c in enumerate(columns) if c == "time"]
    if len(cells) < len(columns):
        message = f"{len(cells)} columns where the header has {len(columns)}"
        raise _wrong(file, number, message, fix="the table as nccl-tests prints it")
    halves = tuple((cells[i], cells[i + 1], cells[i + 2]) for i in firsts)
    if "redop" in columns:
        s.redop = cells[columns.index("redop")]
    size = cells[columns.index("size")]
    if not (size.isdecimal() and len(size) < 19):
        raise _wrong(file, number, f"size {size!r}", allowed="bytes")
    return CollectiveTestLine(number, int(size), halves)


def _table(s: CollectiveTest, file: str) -> CollectiveTestTimes:
    ranks, nodes = _group(s, file)
    kind = _kind(s, file, ranks)
    seconds: dict[int, list[float]] = {}
    for row in s.rows:
        times = [t for half in row.halves if (t := _half(row, half, factor(kind, ranks), file)) is not None]
        if row.size and times:
            seconds.setdefault(row.size, []).extend(times)
    if not seconds:
        raise _wrong(file, s.rows[0].number, "no message of more than 0 bytes")
    nodes = min(nodes, 2) if kind is MessageKind.P2P else nodes
    return CollectiveTestTimes(kind, ranks, nodes, s.gpu, seconds, s.iterations)


def _group(s: CollectiveTest, file: str) -> tuple[int, int]:
    """(ranks, nodes) of the group that was tested."""
    number = s.rows[0].number
    if not s.hosts:
        message = "no lines `#  Rank  0 ... on HOST device ...` above this table: of how many GPUs, on which nodes?"
        raise _wrong(file, number, message, fix="keep all that nccl-tests prints")
    if sorted(s.hosts) != list(range(len(s.hosts))) or len(s.hosts) < 2:
        raise _wrong(file, number, f"ranks {sorted(s.hosts)}", allowed="0, 1, ... without gaps, two at least")
    return len(s.hosts), len(set(s.hosts.values()))


def factor(kind: MessageKind, ranks: int) -> float:
    """busbw over algbw, as nccl-tests defines it."""
    match kind:
        case MessageKind.ALL_REDUCE:
            return 2 * (ranks - 1) / ranks
        case MessageKind.P2P:
            return 1.0
        case _:
            return (ranks - 1) / ranks


def _kind(s: CollectiveTest, file: str, ranks: int) -> MessageKind:
    """By the test's name, printed or in the file's; else by its factor and whether it reduces."""
    number = s.rows[0].number
    for name in (s.program, Path(file).name):
        if (found := re.search(rf"({'|'.join(TESTS)})(?![a-z])", name)) is not None:
            return TESTS[found[1]]
        if name is s.program and any(name.startswith(o) for o in OTHERS):
            raise _wrong(file, number, f"{name} is no message of a plan", allowed=[f"{t}_perf" for t in TESTS])
    ratios = [float(h[2]) / float(h[1]) for r in s.rows for h in r.halves if _number(h[1]) and float(h[1]) >= 1]
    reduces = s.redop not in ("", "none")
    likely = [
        k
        for k in TESTS.values()
        if ratios
        and abs(median(ratios) / factor(k, ranks) - 1) < 0.02
        and reduces == (k in (MessageKind.ALL_REDUCE, MessageKind.REDUCE_SCATTER))
    ]
    if len(likely) != 1:
        message = "which test this is, the output does not say" if not likely else f"{' or '.join(likely)}"
        fix = "name the file after the test: all_reduce.txt, alltoall.txt"
        raise _wrong(file, number, message, allowed=[f"{t}_perf" for t in TESTS], fix=fix)
    return likely[0]


def _half(row: CollectiveTestLine, half: tuple[str, str, str], factor_: float, file: str) -> float | None:
    """Seconds of one half of a row; None where it was not run."""
    if half[0].upper() == "N/A":
        return None
    if not all(_number(x) for x in half):
        raise _wrong(file, row.number, f"not numbers: {', '.join(half)}", allowed="time, algbw, busbw")
    time, alg, bus = map(float, half)
    if not row.size:
        return None
    if time <= 0:
        raise _wrong(file, row.number, f"{row.size} bytes in {half[0]} us")
    coarse = 0.06 if any("e" in x.lower() for x in half) else 0.01
    given = row.size / time / 1e3
    for name, printed, right in (("algbw", alg, given), ("busbw", bus, alg * factor_)):
        if abs(printed - right) > 0.011 * (1 + factor_) + coarse * max(printed, right):
            message = f"{row.size} bytes in {half[0]} us with {name} {printed:g}: that would be {right:.4g}"
            fix = "the columns as nccl-tests prints them, and the test's own name in the file's"
            raise _wrong(file, row.number, message, allowed="algbw = size / time; busbw = algbw x factor", fix=fix)
    return time * 1e-6


def _number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d*)?([eE][+-]?\d+)?", text) is not None


def _wrong(
    file: str, line: int, message: str, allowed: str | list[str] | None = None, fix: str | None = None
) -> PiperError:
    return job_error(FLAG, message, fix, allowed, file=f"{file}:{line}")
