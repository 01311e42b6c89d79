"""A prediction's last step with what explains it, row by row: what the report draws."""

import numpy as np

from ir.core.grid import GRID
from ir.core.order import IntArray
from ir.plan.plan import OpKind, Plan
from piper_sim.memory.timeline import samples_by_kind
from piper_sim.report.marks import HOST, TraceMarks, TraceStretch
from piper_sim.study.explain.blame import OpBlame, idle_ticks
from piper_sim.study.explain.explanation import blame_of, slowest
from piper_sim.study.explain.inside import inside_of
from piper_sim.study.explain.path import critical_path, last_node
from piper_sim.study.prediction import Prediction


def marks_of(p: Prediction, why: bool = True) -> TraceMarks:
    """Of `p.last_step`. why: also what is behind waits, gaps and the critical path, which takes as long as predicting.

    >>> from piper_sim import load_job, predict
    >>> found = marks_of(predict(load_job({"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}})))
    >>> sorted({g.rank for g in found.gaps}), found.slow
    ([0, 1], {})
    """
    plan, k = p.plan, p.shown
    n, programs = len(plan), plan.programs
    start = p.run.start[-1][k * n : (k + 1) * n]
    zero = float(start.min()) if len(p.run.start) > 1 else 0.0
    order = p.trace_order
    row = np.empty(n, dtype=np.int64)
    row[order] = np.arange(n)
    partner = np.where(plan.partner >= 0, row[plan.partner], -1)[order]
    size = np.array([s.message.bytes if s.message else 0 for s in plan.shapes])[plan.shape][order]
    kinds = samples_by_kind(p.planned.sized, p.planned.memory)
    ground = p.planned.model.ground
    first = int(p.planned.classes.first[k])
    speed = [float(ground.speed[q, slowest(ground)[q, first]]) for q in range(programs)]
    slow = {q: s for q, s in enumerate(speed) if s < 1}
    if not why:
        return TraceMarks(partner, np.full(n, -1), size, (), (), kinds, slow, *inside_of(p))
    asked = blame_of(p)
    here = _Here(asked, plan, k, row, zero)
    gaps = [s for q in range(programs) for s in here.gaps(q)]
    return TraceMarks(partner, here.after()[order], size, gaps, here.path(), kinds, slow, *inside_of(p))


class _Here:
    """Nodes of a chain as rows of the trace of class k; times from `zero`."""

    def __init__(self, asked: OpBlame, plan: Plan, k: int, row: IntArray, zero: float) -> None:
        self.asked, self.plan, self.k, self.row, self.zero = asked, plan, k, row, zero

    def after(self) -> IntArray:
        """[op] the row of what ended when it could start."""
        c, n = self.asked.chain, len(self.plan)
        own = c.now + self.k * n + np.arange(n)
        found = c.bind[own]
        # A message waits for both ends: what its last member waited for.
        found = np.where(self.plan.kind == OpKind.COMPUTE, found, c.before[own])
        return np.where(found >= len(c.start), HOST, self._rows(found))

    def _rows(self, nodes: IntArray) -> IntArray:
        """[node] its row, -1 of another step or another replica."""
        c, n = self.asked.chain, len(self.plan)
        at = nodes - c.now - self.k * n
        mine = (nodes >= 0) & (nodes < len(c.start)) & (at >= 0) & (at < n)
        return np.where(mine, self.row[np.where(mine, at, 0)], -1)

    def _op_row(self, op: int) -> int:
        n = len(self.plan)
        return int(self.row[op % n]) if op // n == self.k else -1

    def gaps(self, program: int) -> list[TraceStretch]:
        """Why a program's compute stream stands still, wait by wait."""
        found = idle_ticks(self.asked, self.k * self.plan.programs + program).gaps
        return [
            TraceStretch(program, lo / GRID - self.zero, hi / GRID - self.zero, cause, self._op_row(op))
            for lo, hi, cause, op in found
        ]

    def path(self) -> list[TraceStretch]:
        """The critical path; what other replicas do on it is drawn at the rank that does the same here."""
        c, programs = self.asked.chain, self.plan.programs
        ahead = (int(c.hi[last_node(self.asked)]) - c.period) / GRID - self.zero
        found = []
        for x in critical_path(self.asked):
            rank, begin, end = int(c.program[x.op]) % programs, x.begin / GRID + ahead, x.end / GRID + ahead
            found.append(TraceStretch(rank, begin, end, x.cause, self._op_row(x.op)))
        return found
