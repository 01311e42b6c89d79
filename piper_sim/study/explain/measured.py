"""A measured trace explained: what every op waited for, as far as rows of ops and their times can tell."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.core.errors import ErrorKind, PiperError, usage_error
from ir.core.order import IntArray
from ir.plan.plan import OpKind, Plan
from ir.trace.trace import Trace
from piper_sim.study.explain.blame import OpBlame, phases
from piper_sim.study.explain.chain import OpChain, ticks
from piper_sim.study.explain.excess import REMOVED, OpExcess
from piper_sim.study.explain.explanation import RankSeat, StepExplanation, told

UNNAMED = "kernels"  # of these nobody knows whether ranks do the same
SLOW = 0.05  # slower than the median of those that run the same ops: a straggler; below it is noise
_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)(.*)")
_FORWARD, _BACKWARD = re.compile(r"(^|[(;])\d+F\d"), re.compile(r"(^|[(;])\d+[BIWR]\d")
Key = tuple[int, str, str]  # rank, stream, op


def explain_traces(traces: Sequence[Trace]) -> StepExplanation:
    """Why the step of median length took so long, in the traces of one run, each of some of its ranks.

    A rank's idle time is what its compute stream does not fill between the last end of the step before, anywhere, and
    that of the step. A slow rank is told from a bad split where others run the same ops.

    Raises PiperError (io): a rank in two traces, or one that computes nothing.

    >>> rows = [(0, 0, "compute", "0F0", 0.0, 0.0, 1.0), (0, 0, "send>1", "0SEND_F0", 1.0, 1.0, 1.5)]
    >>> rows += [(0, 1, "recv<0", "1RECV_F0", 0.0, 0.0, 1.5), (0, 1, "compute", "1F0", 1.5, 1.5, 2.5)]
    >>> found = explain_traces([Trace.of({}, rows)])
    >>> found.iteration_s, found.idle["1"], [x["op"] for x in found.critical_path]
    (2.5, {'link': 0.5, 'dependency': 1.0}, ['0F0', '0SEND_F0', '1F0'])
    """
    step = _Step(traces)
    return told(step.blame(), step.seats, lambda op: step.keys[op % len(step.keys)][2])


def refuse_others(traces: Sequence[Trace], plan: Plan) -> None:
    """Raises PiperError (usage): a rank computed other ops than each program of the plan; Kineto names them coarser."""
    planned, ran = defaultdict[int, set[str]](set), defaultdict[int, set[str]](set)
    for program, kind, op in zip(plan.program.tolist(), plan.kind.tolist(), plan.texts, strict=True):
        if kind == OpKind.COMPUTE:
            planned[program].add(op)
    for t in traces:
        for rank, stream, op in zip(t.rank.tolist(), t.stream, t.op, strict=True):
            if stream == "compute" and t.header.get("writer") != "kineto":
                ran[rank].add(op)
    for rank, ops in ran.items():
        nearest = max(planned.values(), key=lambda x: len(x & ops))
        if ops != nearest:
            op = min(ops ^ nearest)
            message = f"of another plan than the job's: rank {rank} {'computed' if op in ops else 'lacks'} {op}"
            raise usage_error("--trace", message, "the job that was run; or --trace without a job")


@dataclass(frozen=True)
class _Rows:
    """The rows of one step, by key."""

    start: dict[Key, int]
    end: dict[Key, int]

    def put_in_line(self) -> None:
        """What a rank computes side by side counts once: an op begins where those that began before it have ended."""
        latest: dict[int, int] = {}
        for key in sorted((k for k in self.start if k[1] == "compute"), key=lambda k: (self.start[k], self.end[k])):
            self.start[key] = max(self.start[key], latest.get(key[0], self.start[key]))
            latest[key[0]] = self.end[key] = max(self.start[key], self.end[key])


class _Step:
    """One step of a run, and the one before it where both have the same ops."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        by_step = _by_step(traces)
        self.begin, self.until, kept = _median(by_step)
        for rows in kept:
            rows.put_in_line()
        last = kept[-1]
        self.keys = sorted(last.start, key=lambda k: (k[0], last.start[k], last.end[k]))
        if len(kept) > 1 and kept[0].start.keys() != last.start.keys():
            kept = kept[-1:]
        self.start = np.array([[rows.start[k] for k in self.keys] for rows in kept])
        self.end = np.array([[rows.end[k] for k in self.keys] for rows in kept])
        self.ranks = sorted({k[0] for k in self.keys})
        at = {r: i for i, r in enumerate(self.ranks)}
        self.program = np.array([at[k[0]] for k in self.keys])
        self.kind = np.array([_kind(k) for k in self.keys])
        self.rows = self._alike()
        self.seats = [RankSeat(row, 1, r) for r, row in zip(self.ranks, self.rows, strict=True)]

    def _alike(self) -> list[int]:
        """[program] the pipeline rank it is of: ranks that run the same ops are replicas of one."""
        ops: dict[int, set[str]] = defaultdict(set)
        for rank, stream, op in self.keys:
            if stream == "compute":
                ops[rank].add(f"rank {rank}" if op.startswith(UNNAMED) else op)
        known = list(dict.fromkeys(frozenset(ops[r]) for r in self.ranks))
        return [known.index(frozenset(ops[r])) for r in self.ranks]

    def blame(self) -> OpBlame:
        """The chain of the step, and what its ops take too long. Raises PiperError (io): a rank without compute."""
        n, compute = len(self.keys), self.kind == OpKind.COMPUTE
        start, end = self.start.copy(), self.end
        within = np.minimum(self.begin, end[-1])  # what began before the step counts from its begin
        start[-1] = np.where(compute, np.maximum(start[-1], within), start[-1])
        partner = self._partners()
        lead = np.concatenate([self._lead(start[s], end[s], partner) + s * n for s in range(len(start))])
        bind = np.concatenate([self._ended(start, end, s) for s in range(len(start))])
        nodes = len(lead)
        flat_start, flat_end = start.ravel(), end.ravel()
        lo = np.minimum(flat_start[lead], flat_end)
        late = np.where(bind >= 0, flat_end[bind], flat_start)
        hosted = flat_start > late  # what went on between them is the host's
        inside = compute & (end[-1] > self.begin)
        queue = tuple(np.flatnonzero(inside & (self.program == p)) for p in range(len(self.ranks)))
        early = {int(p) for p in self.program[compute & ~inside]}
        idle = [r for r, q in zip(self.ranks, queue, strict=True) if not len(q)]
        if off := [r for r in idle if self.ranks.index(r) in early]:
            what = f"rank {off[0]} is done with its step before those of others begin: its clock is another"
            raise _bad(what, "traces on one clock, as `run --out DIR` writes them")
        if idle:
            raise _bad(f"rank {idle[0]} computes nothing in the step", "a trace with rows of the stream `compute`")
        main = np.where(self.kind == OpKind.RECV, np.where(partner >= 0, partner, np.arange(n)), np.arange(n))
        chain = OpChain(
            n, flat_start, np.append(lo, np.minimum(late, flat_start)), np.append(flat_end, flat_start), lead, main,
            np.append(np.where(hosted, nodes + np.arange(nodes), bind), bind), self.program, self.kind, queue,
            np.full(len(self.ranks), self.begin), self.until - self.begin,
        )  # fmt: skip
        own = np.where(compute, np.maximum(flat_end[-n:] - flat_start[-n:], 0), 0)
        forward, backward = (np.array([bool(p.search(k[2])) for k in self.keys]) for p in (_FORWARD, _BACKWARD))
        closing = nodes - n + int(np.argmax(end[-1]))
        return OpBlame(chain, self._excess(own), own, own, *phases(chain, forward, backward), closing)

    def _partners(self) -> IntArray:
        """[op] the other end of a transfer, -1 for others: by stage, microbatch and place among the replicas."""
        place: dict[int, int] = {}
        count: dict[int, int] = defaultdict(int)
        for r, row in zip(self.ranks, self.rows, strict=True):
            place[r] = count[row]
            count[row] += 1
        ends: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i, (rank, _, op) in enumerate(self.keys):
            if m := _TRANSFER.fullmatch(op):
                stage = int(m[1]) + (0 if m[2] == "SEND" else -1 if m[3] == "F" else 1)
                ends[stage, m[3], m[4], m[5], place[rank]].append(i)
        out = np.full(len(self.keys), -1)
        for pair in ends.values():
            if len(pair) == 2:
                out[pair] = pair[::-1]
        return out

    def _lead(self, start: IntArray, end: IntArray, partner: IntArray) -> IntArray:
        """[op] the member of its meeting that came last, of those that came before it ended: a send may not wait."""
        later = (partner >= 0) & (start[partner] > start) & (start[partner] <= end)
        out = np.where(later, partner, np.arange(len(start)))
        groups: dict[str, list[int]] = defaultdict(list)
        for i in np.flatnonzero(self.kind == OpKind.COLLECTIVE).tolist():
            groups[self.keys[i][2]].append(i)
        for members in groups.values():
            group = np.array(members)
            for i in members:
                there = group[start[group] <= end[i]]
                out[i] = there[np.argmax(start[there])] if start[there].max() > start[i] else i
        return out

    def _ended(self, start: IntArray, end: IntArray, step: int) -> IntArray:
        """[node] what ended last on its rank before it started, in its own step or the one before.

        Ops of no length that end together wait for each other in their order, behind what else ends there.
        """
        n, out = len(self.keys), np.full(len(self.keys), -1)
        for p in range(len(self.ranks)):
            mine = np.flatnonzero(self.program == p)
            nodes = np.concatenate([mine + s * n for s in range(step + 1)])
            ends, empty = end.ravel()[nodes], (end <= start).ravel()[nodes]
            order = np.lexsort((np.where(empty, nodes, -nodes), empty, ends))
            place = np.argsort(order)[step * len(mine) :]
            at = np.minimum(np.searchsorted(ends[order], start[step][mine], side="right"), place) - 1
            out[mine] = np.where(at < 0, -1, nodes[order][np.maximum(at, 0)])
        return out

    def _excess(self, own: IntArray) -> OpExcess:
        """Ranks slower than the median of those that run the same ops; what is left is how much a rank has to do."""
        n = len(self.keys)
        load = np.bincount(self.program, weights=own, minlength=len(self.ranks))
        rows = np.array(self.rows)
        usual = np.array([np.sort(load[rows == row])[(self.rows.count(row) - 1) // 2] for row in self.rows])
        slow = np.where(load > (1 + SLOW) * usual, 1 - usual / np.maximum(load, 1), 0.0)
        over = {c: np.zeros(n, dtype=np.int64) for c in REMOVED}
        over["straggler"] = np.floor(own * slow[self.program]).astype(np.int64)
        zero = {c: np.zeros(n, dtype=np.int64) for c in REMOVED}
        even = own - over["straggler"]
        none = np.zeros(n, dtype=np.int64)
        work, unit, fair = np.zeros(2 * n, dtype=np.int64), np.tile(usual[self.program], 2), usual[None].astype(float)
        return OpExcess(over, zero, none, np.append(even, none), work, unit, fair, np.zeros(n))


def _by_step(traces: Sequence[Trace]) -> dict[int, _Rows]:
    """The rows of every step that has rows of every rank, but for those that lack ops of another: a run that was killed
    ends in the middle of one, and a profiler may have begun later on one rank than on others.

    Raises PiperError (io): a rank in two traces, an op twice, no such step.
    """
    out: dict[int, _Rows] = {}
    seen: dict[int, int] = {}
    for k, t in enumerate(traces):
        for r in {int(x) for x in t.rank}:
            if seen.setdefault(r, k) != k:
                raise _bad(f"rank {r} is in two traces", "each rank once: one file of all ranks, or one per rank")
        times = ticks(t.start_s).tolist(), ticks(t.end_s).tolist()
        for s, rank, stream, op, start, end in zip(
            t.step.tolist(), t.rank.tolist(), t.stream, t.op, *times, strict=True
        ):
            rows = out.setdefault(s, _Rows({}, {}))
            if (rank, stream, op) in rows.start:
                raise _bad(f"{op} of rank {rank} stands twice in step {s}", "a trace that nobody put together")
            rows.start[rank, stream, op], rows.end[rank, stream, op] = start, max(start, end)
    if not out:
        raise _bad("no rows in it", "the trace.tsv that `run --out DIR` leaves in DIR")
    ranks = {s: {key[0] for key in rows.start} for s, rows in out.items()}
    if lacks := {s: min(seen.keys() - there) for s, there in ranks.items() if seen.keys() > there}:
        out = {s: rows for s, rows in out.items() if s not in lacks}
    if not out:
        s, rank = next(iter(lacks.items()))
        raise _bad(f"no step has all ranks: step {s} lacks rank {rank}", "traces of the same steps of one run")
    if any(t.header.get("writer") == "kineto" for t in traces):  # which names kernels by their number: steps differ
        return out
    most = max(out.values(), key=lambda rows: len(rows.start)).start.keys()
    return {s: rows for s, rows in out.items() if not rows.start.keys() < most}


def _bad(message: str, fix: str) -> PiperError:
    may = "steps in which each rank computes, each rank in one file"
    return PiperError(ErrorKind.IO, message, key="--trace", allowed=may, suggestion=fix)


def _median(by_step: dict[int, _Rows]) -> tuple[int, int, list[_Rows]]:
    """(begin, end, rows of the step before and of it) of the step of median length; the first counts if it is alone."""
    steps = sorted(by_step)
    ends = [max(by_step[s].end.values()) for s in steps]
    begins = [min(by_step[s].start.values()) for s in steps]
    for k in range(1, len(steps)):  # between steps that follow each other ranks are idle, too
        begins[k] = ends[k - 1] if steps[k] == steps[k - 1] + 1 else max(begins[k], ends[k - 1])
    order = sorted(range(1 if len(steps) > 1 else 0, len(steps)), key=lambda k: ends[k] - begins[k])
    k = order[(len(order) - 1) // 2]
    return begins[k], ends[k], [by_step[s] for s in steps[max(0, k - 1) : k + 1]]


def _kind(key: Key) -> OpKind:
    if key[1] == "compute":
        return OpKind.COMPUTE
    m = _TRANSFER.fullmatch(key[2])
    return OpKind.COLLECTIVE if m is None else OpKind.SEND if m[2] == "SEND" else OpKind.RECV
