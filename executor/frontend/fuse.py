"""Kernels as torch's compiler would fuse them: what a chain of elementwise calls moves is what enters and leaves it.

Inductor makes one kernel of elementwise calls and sums over rows that follow one another or read the same values;
products, attention and sorts are kernels of libraries, before and behind which a new one begins. What is elementwise in
values that are there anyway is computed again where it is read, in backward, too. Constants of sizes (masks, tables of
positions) are computed once.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from executor.frontend.calls import KernelCall, KernelForm, KernelRead, grouped
from executor.frontend.masks import Left, whole
from executor.frontend.scores import unstored
from ir.core.work import Kernel, Work

LONGEST = 80  # of a label
LONG_ROW = 2**14  # elements: a row that is summed up no longer lies in a cache when its elements are read again


def fused(passes: Sequence[Sequence[KernelCall]], wanted: Sequence[Collection[int]], left: Left = whole) -> list[Work]:
    """The kernels of each pass, of calls in their order. wanted: the values that each hands out. left: what the mask of
    a number leaves.

    >>> from ir.core.work import KernelKind
    >>> def call(name, read, wrote):
    ...     kernel = Kernel(KernelKind.MEMORY, 0, 16, "fp32", (), name)
    ...     return KernelCall(kernel, KernelForm.ELEMENTS, 2, 2, (KernelRead(read, 0, 8, 8),), ((wrote, 8),))
    >>> calls = [call("neg", 0, 1), call("exp", 1, 2)]
    >>> [(k.label, k.bytes) for k in fused([calls], [{2}])[0]], [k.bytes for k in fused([calls], [{1, 2}])[0]]
    ([('neg+exp', 16)], [24])
    """
    found = _Fusion(unstored([grouped(calls) for calls in passes], wanted, left), wanted)
    found.recompute()
    return [tuple(found.kernels(p)) for p in range(len(passes))]


Place = tuple[int, int]  # (pass, index of a call): of a group, its first member's


class _Fusion:
    """Calls in groups. members: of each, in order. reads: by group, what it takes from outside, by value and view.
    again: values that no kernel but their own reads, as others compute them again; kept: what they compute them from.
    """

    def __init__(self, passes: Sequence[Sequence[KernelCall]], wanted: Sequence[Collection[int]]) -> None:
        self.passes, self.wanted = passes, wanted
        self.maker: dict[int, Place] = {}
        self.readers: dict[int, list[Place]] = defaultdict(list)
        for at, call in self._calls():
            self.maker |= {value: at for value, _ in call.writes}
            for read in call.reads:
                self.readers[read.value].append(at)
        self.group = {at: at for at, _ in self._calls()}
        for p in range(len(passes)):
            self._join(p)
        self.members: dict[Place, list[Place]] = defaultdict(list)
        self.reads: dict[Place, dict[int, dict[object, KernelRead]]] = defaultdict(lambda: defaultdict(dict))
        for at, call in self._calls():
            root = self._root(at)
            self.members[root].append(at)
            for read in call.reads:
                if self._group_of(read.value) != root:
                    self.reads[root][read.value][read.view] = read
        self.again: set[int] = set()
        self.kept: set[int] = set()

    def _calls(self) -> Iterator[tuple[Place, KernelCall]]:
        for p, calls in enumerate(self.passes):
            for i, call in enumerate(calls):
                yield (p, i), call

    def _call(self, at: Place) -> KernelCall:
        return self.passes[at[0]][at[1]]

    def _root(self, at: Place) -> Place:
        while (up := self.group[at]) != at:
            self.group[at] = self.group[up]
            at = up
        return at

    def _group_of(self, value: int) -> Place | None:
        return self._root(self.maker[value]) if value in self.maker else None

    def _join(self, p: int) -> None:
        """Groups of one pass. A call's level: how many kernels must have ended before it can run. Calls of one level
        wait for none of one another's kernels, so whatever is joined among them closes no circle."""
        calls, level = self.passes[p], list[int]()
        siblings: dict[tuple[int, int, int], Place] = {}
        for i, call in enumerate(calls):
            mine, joined = 0, list[Place]()
            for read in call.reads:
                if (at := self.maker.get(read.value, (-1, 0)))[0] != p:
                    continue
                made, joins = calls[at[1]], self._joins(calls[at[1]], call, read)
                library = made.form is KernelForm.APART
                mine = max(mine, level[at[1]] + (not joins and not library and read.bytes > 0))
                joined += [at] * joins
            level.append(mine)
            joined = [at for at in joined if level[at[1]] == mine]
            if call.form in (KernelForm.ELEMENTS, KernelForm.ROWS):
                for read in call.reads:
                    if 2 * read.bytes > max(r.bytes for r in call.reads) > 0:  # not for a scale that many share
                        joined.append(siblings.setdefault((mine, call.size, read.value), (p, i)))
            for at in joined:
                first, last = sorted((self._root(at), self._root((p, i))))
                self.group[last] = first

    def _joins(self, made: KernelCall, call: KernelCall, read: KernelRead) -> bool:
        """Whether one kernel can be both, without the value between them."""
        elements = made.form in (KernelForm.ELEMENTS, KernelForm.GATHER)
        if not read.bytes:
            return False
        match call.form:
            case KernelForm.ELEMENTS if made.form is KernelForm.COLUMNS:
                return call.size <= made.made
            case KernelForm.ELEMENTS:
                return elements or (made.form is KernelForm.ROWS and call.size <= made.size)
            case KernelForm.ROWS:
                return elements or (made.form is KernelForm.ROWS and call.size == made.size)
            case KernelForm.COLUMNS:
                return elements and len(self.readers[read.value]) == 1
            case KernelForm.GATHER:
                return made.form is KernelForm.ELEMENTS and call.size <= made.size
            case _:
                return False

    def recompute(self) -> None:
        """Choose what kernels and passes compute again instead of reading it: where that moves fewer bytes."""
        for value, at in self.maker.items():
            root = self._root(at)
            others = {self._root(x) for x in self.readers[value]} - {root}
            leaves = self._leaves(value)
            if not others or leaves is None or any(self._call(x).form is KernelForm.APART for x in others):
                continue
            size = dict(self._call(at).writes)[value]
            more = sum(r.bytes for x in others for r in leaves if r.value not in self.reads[x])
            more += sum(r.bytes for r in leaves if r.value in self.maker and not self._written(r.value))
            if more >= size * (len(others) + (value not in self.wanted[at[0]])):
                continue
            self.again.add(value)
            self.kept |= {r.value for r in leaves}
            for x in others:
                del self.reads[x][value]
                for r in leaves:
                    if self._group_of(r.value) != x:
                        self.reads[x][r.value].setdefault(r.view, r)

    def _leaves(self, value: int) -> list[KernelRead] | None:
        """What is there when the value's pass has ended, and makes it by elements; None: it is not made so."""
        p = self.maker[value][0]
        if self._call(self.maker[value]).form is not KernelForm.ELEMENTS:
            return None
        out, todo, seen = list[KernelRead](), [value], {value}
        while todo:
            for read in self._call(self.maker[todo.pop()]).reads:
                at = self.maker.get(read.value)
                near = at is not None and (at[0] == p or read.value in self.again)
                if at is None or not near or self._call(at).form is not KernelForm.ELEMENTS:
                    out.append(read)
                elif read.value not in seen:
                    seen.add(read.value)
                    todo.append(read.value)
        return out

    def _written(self, value: int) -> bool:
        """Whether a kernel leaves the value: it is handed out, or other kernels read it or what it is part of."""
        p, root = self.maker[value][0], self._group_of(value)
        if value in self.wanted[p] or value in self.kept:
            return True
        return value not in self.again and any(self._root(x) != root for x in self.readers[value])

    def kernels(self, p: int) -> Iterator[Kernel]:
        """One for each group, where its last member stood; none where all it makes is made again elsewhere."""
        for i, call in enumerate(self.passes[p]):
            members = self.members[root := self._root((p, i))]
            if members[-1] != (p, i):
                continue
            if call.form is KernelForm.APART:
                yield call.kernel
                continue
            wrote = [n for at in members for value, n in self._call(at).writes if self._written(value)]
            if wrote:
                yield self._kernel([self._call(at).kernel for at in members], sum(wrote) + self._read(root))

    def _read(self, root: Place) -> int:
        """Bytes that a group reads: each stretch once, and no more of a value than there is; twice where sums of long
        rows come before their elements."""
        views = self.reads[root].values()
        once = sum(min(sum(r.bytes for r in v.values()), max(r.whole for r in v.values())) for v in views if v)
        calls = [self._call(at) for at in self.members[root]]
        long = [c for c in calls if c.form is KernelForm.ROWS and c.size >= LONG_ROW * max(c.made, 1)]
        left = max((c.made for c in calls if any(self._written(v) for v, _ in c.writes)), default=0)
        return once * (1 + any(left >= c.size for c in long))

    @staticmethod
    def _kernel(members: Sequence[Kernel], nbytes: int) -> Kernel:
        label = "+".join(dict.fromkeys(k.label for k in members))
        label = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
        largest = max(members, key=lambda k: k.bytes)
        return replace(largest, flops=sum(k.flops for k in members), bytes=nbytes, label=label)
