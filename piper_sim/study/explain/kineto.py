"""Traces to explain, ours or torch.profiler's (Kineto), one file for each rank: kernels as rows of ops."""

import re
from collections import defaultdict
from collections.abc import Sequence

from ir.core.errors import ErrorKind, job_error
from ir.core.files import FileErrors, check_regular, read_json
from ir.core.limits import RANKS
from ir.trace.text import read_trace
from ir.trace.trace import Row, Trace
from piper_sim.study.calibrate.trace_events import US, Json, args_of, attribute, is_nccl, sorted_out
from piper_sim.study.explain.measured import UNNAMED

HEAD = b'{"piper_trace"'
_FIX = "the trace.tsv that `run --out DIR` leaves in DIR, or what torch.profiler exports, one file for each rank"
FORM = FileErrors("a trace", ErrorKind.JOB, "--trace", 2 * 10**9, _FIX, packed=True, largest=1e20)
CLOSE_US = 20.0  # kernels of one range that follow each other so closely are one op
_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
_OP = re.compile(r"\(?\d+[FBIWR]\d+[^\s]*|\d*UPDATE\S*|Optimizer\.\S+")
Span = tuple[float, float, str]  # microseconds, and the name of what went on


def read_traces(paths: Sequence[str]) -> list[Trace]:
    """The traces in some files. Raises PiperError (io, job): one that is broken, or a rank twice."""
    out, kineto = [], []
    for path in paths:
        if check_regular(path, FORM, len(HEAD)) == HEAD:  # ours
            out.append(read_trace(path))
        else:
            with FORM.naming(path):
                kineto.append((path, read_json(path, FORM)))
    return out + _traces(kineto)


def _traces(tables: Sequence[tuple[str, object]]) -> list[Trace]:
    """On one clock, from the first thing that happened anywhere."""
    bases = [_base(table) for _, table in tables]  # nanoseconds since 1970: a float has no microseconds beside so many
    read = [
        _rows(path, table, number, (base - min(bases)) / 1000)
        for number, ((path, table), base) in enumerate(zip(tables, bases, strict=True))
    ]
    zero = min((row[4] for rows in read for row in rows), default=0.0)
    return [
        Trace.of(
            {"writer": "kineto"},
            [(s, r, lane, op, US * (a - zero), US * (b - zero), US * (c - zero)) for s, r, lane, op, a, b, c in rows],
        )
        for rows in read
    ]


def _base(table: object) -> float:
    found = table.get("baseTimeNanoseconds") if isinstance(table, dict) else None
    return found if isinstance(found, int | float) else 0


def _rows(path: str, table: object, number: int, ahead: float) -> list[Row]:
    """Rows in microseconds: a rank's named ranges by their kernels, other kernels, and NCCL's, step by step.

    ahead: microseconds that this file's times begin later than another's.

    Raises PiperError (job): what is no such trace, or has no kernel in any of its steps.
    """
    top: Json = table if isinstance(table, dict) else {}
    events = top.get("traceEvents", table)
    if not isinstance(events, list):
        raise job_error("--trace", "no traceEvents in it", _FIX, file=path)
    who = top.get("distributedInfo")
    rank = who.get("rank") if isinstance(who, dict) else None
    rank = rank if isinstance(rank, int) and 0 <= rank < RANKS else number
    ranges, launches, kernels = sorted_out(events, path, lambda n: bool(_OP.fullmatch(n) or _STEP.fullmatch(n)))
    steps = [(r.begin, r.end, int(m[1])) for r in ranges if (m := _STEP.fullmatch(r.name))]
    named = [r for r in ranges if not _STEP.fullmatch(r.name)]
    attribute(named, launches, kernels)
    name = {span: r.name for r in named for span in r.busy}
    compute: dict[int, list[Span]] = defaultdict(list)
    rows, count = list[Row](), defaultdict[tuple[int, str], int](int)
    for k in sorted(kernels, key=lambda k: float(k["ts"])):
        begin, end, args = float(k["ts"]), float(k["ts"]) + float(k["dur"]), args_of(k)
        call = args.get("correlation")
        launched = launches[call][0] if isinstance(call, int) and call in launches else begin
        step = next((s for a, b, s in steps if a <= launched < b), -1)
        if step < 0 and steps:  # before the first step, or behind the last
            continue
        if is_nccl(k):
            op = _met(args, rank)
            count[step, op] += 1
            rows.append(
                (max(step, 0), rank, "nccl", f"{op} #{count[step, op]}", begin + ahead, begin + ahead, end + ahead)
            )
        else:
            compute[max(step, 0)].append((begin + ahead, end + ahead, name.get((begin, end), UNNAMED)))
    if not rows and not compute:
        message = f"no GPU kernel in it{', in any of its steps' if steps else ''}"
        raise job_error("--trace", message, "profile with ProfilerActivity.CUDA", "kernels of a GPU", file=path)
    for step, spans in compute.items():
        seen: dict[str, int] = defaultdict(int)
        for begin, end, op in _joined(spans):
            seen[op] += 1
            rows.append((step, rank, "compute", op if seen[op] == 1 else f"{op} #{seen[op]}", begin, begin, end))
    return rows


def _met(args: Json, rank: int) -> str:
    """What an NCCL kernel is called: alike at both ends of a transfer, and on all members of a process group.

    >>> _met({"Collective name": "recv", "Src Rank": 0, "Dst Rank": 1, "Process Group Name": "7"}, 1)
    'p2p 0>1 7'
    """
    ends, name = (args.get("Src Rank"), args.get("Dst Rank")), str(args.get("Collective name", "nccl"))
    if name in ("send", "recv") and any(isinstance(x, int) and x != rank for x in ends):
        a, b = (x if isinstance(x, int) else rank for x in ends)
        name = f"p2p {a}>{b}"
    return f"{name} {args.get('Process Group Name', '')}".strip()


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Kernels of one name that follow each other closely as one; what runs beside them is inside them.

    >>> _joined([(0.0, 5.0, "0F0"), (6.0, 9.0, "0F0"), (7.0, 8.0, "0F1"), (50.0, 60.0, "0F1")])
    [(0.0, 9.0, '0F0'), (50.0, 60.0, '0F1')]
    """
    out = list[Span]()
    for begin, end, op in spans:
        if out and (end <= out[-1][1] or (op == out[-1][2] and begin - out[-1][1] <= CLOSE_US)):
            out[-1] = out[-1][0], max(out[-1][1], end), out[-1][2]
        else:
            out.append((max(begin, out[-1][1]) if out else begin, end, op))
    return out
