"""A torch.profiler (Kineto) Chrome trace: its ranges on the host, the kernels that they launch, NCCL's kernels.

A kernel belongs to the innermost range that its launch falls into, found by correlation id; where the launching thread
has none (autograd's own), to the range begun last on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ir.core.errors import ErrorKind, PiperError, job_error, printable
from ir.core.files import FileErrors, read_json
from ir.core.limits import RANKS

FLAG = "--from-kineto"
_FIX = "a trace that was written whole: prof.export_chrome_trace(...)"
FORM = FileErrors("a trace", ErrorKind.JOB, FLAG, 2 * 10**9, _FIX, packed=True, largest=1e20)
RANGES = ("user_annotation",)
LAUNCHES = ("cuda_runtime", "cuda_driver")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
NCCL = ("nccl", "rccl")
US = 1e-6
Json = Mapping[str, Any]


@dataclass(eq=False)
class TraceRange:
    """An annotated range. busy: (begin, end) of the kernels launched in it and in none inside it. inner: ranges in it.

    All in microseconds of the trace.
    """

    name: str
    begin: float
    end: float
    thread: tuple[str, str]
    busy: list[tuple[float, float]] = field(default_factory=list)
    inner: list[TraceRange] = field(default_factory=list)

    def seconds(self, whole: Sequence[TraceRange] = (), *, kernels: bool) -> float:
        """By its kernels, gaps and overlaps aside; without any in the trace, by the host, ranges inside left out.

        whole: ranges inside it that count as its own.
        """
        if kernels:
            return US * _union([span for r in (self, *whole) for span in r.busy])
        return US * (self.end - self.begin - (0 if whole else _union([(r.begin, r.end) for r in self.inner])))


@dataclass(frozen=True)
class TraceFile:
    """A trace read. rank: of the process, where it says so. world: how many there were. kernels: whether it has any.

    collectives: NCCL's kernels as (microseconds, args). gpu: its name.
    """

    file: str
    rank: int | None
    world: int
    gpu: str
    kernels: bool
    ranges: list[TraceRange]
    collectives: list[tuple[float, Json]]


def read_trace_file(path: str, wanted: Callable[[str], object]) -> TraceFile:
    """Read a trace; `wanted(name)` tells which ranges count. Raises PiperError, with file and line or event."""
    with FORM.naming(path):
        return _trace_file(path, read_json(path, FORM), wanted)


def _trace_file(path: str, table: object, wanted: Callable[[str], object]) -> TraceFile:
    events = table.get("traceEvents") if isinstance(table, dict) else table
    if not isinstance(events, list):
        raise job_error(FLAG, "no traceEvents in it", "the trace.json that torch.profiler exports", file=f"{path}:1")
    top: Json = table if isinstance(table, dict) else {}
    ranges, launches, kernels = sorted_out(events, path, wanted)
    attribute(ranges, launches, kernels)
    collectives = [(float(k["dur"]), args_of(k)) for k in kernels if is_nccl(k)]
    who = top.get("distributedInfo")
    who = who if isinstance(who, dict) else {}
    devices = top.get("deviceProperties")
    named = [d.get("name", "") for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
    rank, world = who.get("rank"), who.get("world_size")
    return TraceFile(
        path,
        rank if isinstance(rank, int) else None,
        world if isinstance(world, int) and 0 < world <= RANKS else 1,
        printable(str(next(iter(named), ""))[:100]),
        bool(kernels),
        ranges,
        collectives,
    )


def sorted_out(
    events: Sequence[object], path: str, wanted: Callable[[str], object]
) -> tuple[list[TraceRange], dict[int, tuple[float, tuple[str, str]]], list[Json]]:
    """(ranges that count, launches by correlation id, kernels). Raises PiperError (job): an event without its times."""
    ranges: list[TraceRange] = []
    launches: dict[int, tuple[float, tuple[str, str]]] = {}
    kernels: list[Json] = []
    for i, e in enumerate(events):
        if not isinstance(e, dict):
            raise _broken(path, i, "is no object")
        cat = e.get("cat")
        if e.get("ph") != "X" or cat not in (*RANGES, *LAUNCHES, *KERNELS):
            continue
        if not all(isinstance(e.get(k), int | float) and not isinstance(e.get(k), bool) for k in ("ts", "dur")):
            raise _broken(path, i, f"({e.get('name')!r:.60}) has no ts and dur in microseconds")
        if e["dur"] < 0:
            raise _broken(path, i, f"({e.get('name')!r:.60}) lasts {e['dur']} us")
        thread = (str(e.get("pid")), str(e.get("tid")))
        correlation = args_of(e).get("correlation")
        if cat in RANGES:
            begin, end = float(e["ts"]), float(e["ts"]) + float(e["dur"])
            if wanted(str(e.get("name"))) and begin < end:  # by more than a float of that size can tell
                ranges.append(TraceRange(str(e.get("name")), begin, end, thread))
        elif cat in KERNELS:
            kernels.append(e)
        elif isinstance(correlation, int):
            launches[correlation] = float(e["ts"]), thread
    return ranges, launches, kernels


def attribute(
    ranges: list[TraceRange], launches: Mapping[int, tuple[float, tuple[str, str]]], kernels: list[Json]
) -> None:
    """Give every range the kernels launched in it, and the ranges inside it; one pass over time."""
    moments: list[tuple[float, int, float, Any]] = []
    for r in ranges:  # one ends before the next begins; of two that begin together, the longer is the outer one
        moments.append((r.end, 0, 0.0, r))
        moments.append((r.begin, 1, -r.end, r))
    for k in kernels:
        call = args_of(k).get("correlation")
        launch = launches.get(call) if isinstance(call, int) else None
        if launch is not None and not is_nccl(k):
            moments.append((launch[0], 2, 0.0, (launch[1], k)))
    open_: list[TraceRange] = []
    for _, what, _, thing in sorted(moments, key=lambda m: m[:3]):
        if what == 0:
            open_.remove(thing)
        elif what == 1:
            if (outer := _innermost(open_, thing.thread, elsewhere=False)) is not None:
                outer.inner.append(thing)
            open_.append(thing)
        else:
            thread, k = thing
            if (mine := _innermost(open_, thread, elsewhere=True)) is not None:
                mine.busy.append((float(k["ts"]), float(k["ts"]) + float(k["dur"])))


def _innermost(open_: list[TraceRange], thread: tuple[str, str], *, elsewhere: bool) -> TraceRange | None:
    own = [r for r in open_ if r.thread == thread]
    if not own and elsewhere:
        own = [r for r in open_ if r.thread[0] == thread[0]]
    return own[-1] if own else None


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Time that some spans cover together.

    >>> _union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def is_nccl(k: Json) -> bool:
    """Whether a kernel is NCCL's or RCCL's."""
    return k.get("cat") == "kernel" and str(k.get("name", "")).lower().startswith(NCCL)


def args_of(e: Json) -> Json:
    """An event's args; none where they are no table."""
    found = e.get("args")
    return found if isinstance(found, dict) else {}


def _broken(path: str, index: int, what: str) -> PiperError:
    return job_error(f"traceEvents[{index}]", f"event {what}", "the trace as torch.profiler exports it", file=path)
