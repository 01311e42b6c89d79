"""Whose fault a wait is: every idle tick of every rank traced back to a cause, a rank and an op."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ir.core.order import BoolArray, IntArray
from ir.plan.plan import OpKind
from piper_sim.study.explain.chain import OpChain
from piper_sim.study.explain.excess import REMOVED, OpExcess

CAUSES = (*REMOVED, "host", "split", "warmup", "drain", "dependency", "memory", "collective")
COMPUTE, COLLECTIVE = int(OpKind.COMPUTE), int(OpKind.COLLECTIVE)


@dataclass(frozen=True, eq=False)
class OpBlame:
    """What is asked about waits: a chain, what its ops take too long, and what phase its programs are in.

    longest: [op] ticks of the longest that it meets; own: [op] its own. filled: [program] the last op that still waits
    for the pipeline to fill; drained: the first that does so because it empties. closing: the node that ends the step
    for all, -1 where steps repeat and each program's own last op does.
    """

    chain: OpChain
    excess: OpExcess
    own: IntArray
    longest: IntArray
    filled: IntArray
    drained: IntArray
    closing: int = -1

    @cached_property
    def walked(self) -> "OpChainLists":
        c = self.chain
        computes = np.where(c.kind == COMPUTE, c.program, -1)
        over = np.logical_or.reduce([self.excess.over[x] != 0 for x in REMOVED])
        over = np.append(over, np.zeros_like(over))
        return OpChainLists(*(x.tolist() for x in (c.before, c.lo, c.hi, c.main, c.kind, computes, over)))


@dataclass(frozen=True, eq=False)
class OpChainLists:
    """Columns of a chain that are walked node by node, as lists: an array makes an object of each number it gives.

    before, lo, hi: [node]. main, kind: [op]; computes: the program that an op computes for, -1 for a message. over:
    [item] whether it takes too long for one of `REMOVED`: most do not, and need not be asked each by itself.
    """

    before: list[int]
    lo: list[int]
    hi: list[int]
    main: list[int]
    kind: list[int]
    computes: list[int]
    over: list[bool]


@dataclass(eq=False)
class StepIdle:
    """Idle ticks by cause and blamed op, of one program. gaps: (from, to, greatest cause, its op) of every wait."""

    found: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    gaps: list[tuple[int, int, str, int]] = field(default_factory=list)

    def share(self, among: dict[tuple[str, int], int], total: int) -> None:
        """Add `total` ticks over some causes in proportion to their weights, whole ticks, the greatest weight last."""
        weight, left = sum(among.values()), total
        order = sorted(among.items(), key=lambda x: x[1])
        for key, part in order[:-1]:
            given = part * total // weight
            self.found[key] += given
            left -= given
        self.found[order[-1][0]] += left


class RankWaits:
    """The waits of one program: who is to blame for each.

    An op takes too long by what `OpExcess` says, and by what its rank has more to do than this one (`split`). A wait is
    traced back from its end, also past its begin, until this rank's own computing is met: up to there everything that
    took too long explains it, each tick once. What is left is given to what went on meanwhile: messages, hosts, and
    computing that the pipeline's fill, its drain, or the order of its ops makes a rank wait for.
    """

    def __init__(self, asked: OpBlame, program: int) -> None:
        self.asked, self.chain, self.program = asked, asked.chain, program
        self.walked, self.starts = asked.walked, len(asked.chain.start)
        e = asked.excess
        # [item] ticks that its rank has more to do than this one; of this one's own, than ranks in the mean.
        more = np.where(np.tile(self.chain.program, 2) == program, e.uneven, e.more(program)) * e.even
        self.more = more.astype(np.int64).tolist()
        self.idle = StepIdle()
        self.left: dict[int, list[tuple[str, int]]] = {}  # item -> what is still to be explained by it, last first
        self.skip: dict[int, int] = {}  # node that explains nothing -> the next that may

    def explain(self, lo: int, hi: int, node: int, phase: str) -> None:
        """A wait from lo to hi, which ended when `node` did."""
        among, mine = self.meanwhile(lo, hi, node, phase), StepIdle()
        left = hi - lo
        for key, given in self._too_long(node, left):
            mine.found[key] += given
            left -= given
        if left:
            mine.share(among, left)
        for key, given in mine.found.items():
            self.idle.found[key] += given
        self.idle.gaps.append((lo, hi, *max(mine.found, key=mine.found.__getitem__)))

    def meanwhile(self, lo: int, hi: int, node: int, phase: str) -> dict[tuple[str, int], int]:
        """What went on from lo to hi on the way to `node`, back to back."""
        c, e, out, now = self.walked, self.asked.excess, defaultdict[tuple[str, int], int](int), hi
        while now > lo and node >= 0:
            until = max(lo, min(now, c.hi[node]))
            if until < now:  # not kept: an earlier step than those
                break
            begin = max(lo, c.lo[node])
            if begin < now:
                cause, op = self._doing(node, phase)
                again = round((now - begin) * float(e.recomputed[op])) if cause == phase else 0
                out[cause, op] += now - begin - again
                if again:
                    out["memory", op] += again
            now, node = min(now, begin), c.before[node]
        if now > lo:
            out[phase, int(self.chain.queue[self.program][-1])] += now - lo
        return out

    def _doing(self, node: int, phase: str) -> tuple[str, int]:
        ops = self.chain.ops
        if node >= self.starts:
            return "host", node % ops
        op = self.walked.main[node % ops]
        kind = self.walked.kind[op]
        return (phase if kind == COMPUTE else "collective" if kind == COLLECTIVE else "link"), op

    def _too_long(self, node: int, wanted: int) -> Iterator[tuple[tuple[str, int], int]]:
        """((cause, op), ticks) of what took too long on the way to `node`, not more than wanted, each tick once."""
        node = self._stop(node)
        while wanted > 0 and node >= 0:
            item = self._item(node)
            left = self.left[item]
            while wanted > 0 and left:
                cause, ticks = left.pop()
                given = min(wanted, ticks)
                if given < ticks:
                    left.append((cause, ticks - given))
                wanted -= given
                yield (cause, item % self.chain.ops), given
            node = self._stop(node)

    def _stop(self, node: int) -> int:
        """The next node from this one on that still has ticks to explain; -1 where this rank computes before that."""
        c, ops, passed = self.walked, self.chain.ops, list[int]()
        while node >= 0:
            if (further := self.skip.get(node)) is not None:
                node = further
                continue
            if node < self.starts and c.computes[node % ops] == self.program:
                node = -1
                break
            item = self._item(node)
            if (self.more[item] or c.over[item]) and self._left(item):
                break
            passed.append(node)
            node = c.before[node]
        self.skip.update(dict.fromkeys(passed, node))
        return node

    def _item(self, node: int) -> int:
        ops = self.chain.ops
        return self.walked.main[node % ops] if node < self.starts else ops + node % ops

    def _left(self, item: int) -> list[tuple[str, int]]:
        if (found := self.left.get(item)) is None:
            found = self.left[item] = [("split", self.more[item])] if self.more[item] else []
            if self.walked.over[item]:
                over = self.asked.excess.over
                found += [(x, int(over[x][item])) for x in reversed(REMOVED) if over[x][item]]
        return found


def idle_ticks(asked: OpBlame, program: int) -> StepIdle:
    """All waits of one program in the last step, between its compute ops and inside them."""
    c, e, rank = asked.chain, asked.excess, RankWaits(asked, program)
    before = int(c.opened[program])
    for op in c.queue[program].tolist():
        node = c.now + op
        phase = "warmup" if op <= asked.filled[program] else "drain" if op >= asked.drained[program] else "dependency"
        start, met, end = int(c.start[node]), int(c.lo[node]), int(c.hi[node])
        if start > before:
            rank.explain(before, start, int(c.bind[node]), phase)
        if met > start:
            rank.explain(start, met, int(c.before[node]), phase)
        inside = {**{(x, int(c.main[op])): int(e.inner[x][op]) for x in REMOVED}, ("collective", op): int(e.rest[op])}
        for key, given in inside.items():
            if given:
                rank.idle.found[key] += given
        if more := int(asked.longest[op] - asked.own[op]):
            main = int(c.main[op])
            among = {(x, main): int(e.over[x][main]) for x in REMOVED} | {("collective", main): 0}
            rank.idle.share(among if any(among.values()) else {("collective", main): 1}, more)
        before = end
    late = c.period - (before - int(c.opened[program]))
    if late and asked.closing >= 0:
        rank.explain(before, before + late, asked.closing, "drain")
    elif late:
        rank.idle.found["host" if len(c.hi) > len(c.start) else "dependency", int(c.queue[program][-1])] += late
    return rank.idle


def phases(chain: OpChain, forward: BoolArray, backward: BoolArray) -> tuple[IntArray, IntArray]:
    """(filled, drained) by program: its first op with a backward, and what comes behind its last with a forward.

    forward, backward: [op] whether it does such work.
    """
    filled, drained = [], []
    for queue in chain.queue:
        back, ahead = queue[backward[queue]], queue[forward[queue]]
        filled.append(int(back[0]) if len(back) else int(queue[0]) - 1)
        drained.append(int(ahead[-1]) + 1 if len(ahead) else int(queue[-1]) + 1)
    return np.array(filled), np.array(drained)


def busy_ticks(asked: OpBlame, program: int) -> dict[str, int]:
    """What a program's computing takes, by cause where it takes too long, else `compute`; beside others' messages
    (`collective`), by which it is slowed."""
    c, e = asked.chain, asked.excess
    ops = c.queue[program]
    own = asked.own[ops] - e.rest[ops] - np.add.reduce([e.inner[x][ops] for x in REMOVED])
    out, left = {}, own
    for x in REMOVED:
        part = np.clip(e.over[x][ops] - e.inner[x][ops], 0, left)
        out[x], left = int(part.sum()), left - part
    again = np.minimum(np.rint(asked.own[ops] * e.recomputed[ops]).astype(np.int64), left)
    slowed = (c.hi - c.lo[: len(c.hi)])[c.now + ops] - asked.longest[ops]
    return {**out, "memory": int(again.sum()), "collective": int(slowed.sum()), "compute": int((left - again).sum())}
