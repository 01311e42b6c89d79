"""Scores that a framework's kernels do not store: a product larger than what it is made of, as far as the products and
sums that read it (attention written out, what an indexer picks keys by, a recurrence in stretches).

Forward is one kernel with the same products; backward makes the scores again. Factors that were cast to a wider format
are multiplied in their own.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from executor.frontend.calls import KernelCall, KernelForm, KernelRead
from executor.frontend.masks import Left, whole
from ir.core.work import DType, KernelKind

BATCHED = ("bmm", "baddbmm")  # of what a module computes: a stack of weights has other products
ATTENTION = "attention"  # written out, as one kernel: its label
THIN = 16  # rows or columns of a product that is a sum beside others
PRODUCTS = (KernelKind.GEMM, KernelKind.GROUPED_GEMM)

Passes = Sequence[Sequence[KernelCall]]


def unstored(passes: Passes, wanted: Sequence[Collection[int]], left: Left = whole) -> Passes:
    """The calls of each pass, those on scores as one kernel. wanted: the values that each pass hands out. left: what
    the mask of a number leaves.

    >>> from ir.core.work import Kernel
    >>> from executor.frontend.calls import KernelRead
    >>> def call(name, reads, wrote, made, shape=()):
    ...     kind, form = (KernelKind.GROUPED_GEMM, KernelForm.APART) if shape else (KernelKind.MEMORY, KernelForm.ROWS)
    ...     kernel = Kernel(kind, 128 if shape else 0, 80, DType.BF16, shape, name)
    ...     return KernelCall(kernel, form, 64, made, tuple(KernelRead(r, 0, 8, 8) for r in reads), ((wrote, made),))
    >>> calls = [call("bmm", [0, 1], 2, 64, (1, 8, 8, 1)), call("_softmax", [2], 3, 64)]
    >>> calls.append(call("bmm", [3, 4], 5, 8, (1, 8, 1, 8)))
    >>> [(k.label, k.bytes, k.shape) for k in (c.kernel for c in unstored([calls], [{5}])[0])]
    [('attention', 32, (1, 1, 8, 8, 1, 1))]
    >>> unstored([calls], [{3, 5}])[0] == calls
    True
    """
    for region in _regions(passes):
        passes = _Collapse(passes, wanted, region, left).passes()
    return passes


@dataclass
class _Region:
    """Calls on the same scores, by what they make. inner: values as large as these, of `size` elements; values: with
    sums of them."""

    calls: set[int] = field(default_factory=set)
    inner: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    size: int = 0

    def __ior__(self, other: "_Region") -> "_Region":
        self.calls |= other.calls
        self.inner |= other.inner
        self.values |= other.values
        return self


def _regions(passes: Passes) -> list[_Region]:
    """Each begins with a product; what reads its scores, by elements or sums, belongs to it, and what is made as large
    from such sums; products end it."""
    of: dict[int, _Region] = {}
    for call in (c for calls in passes for c in calls):
        product, near = _product(call), [of[r.value] for r in call.reads if r.value in of]
        loop = call.form is not KernelForm.APART or call.kernel.label.startswith("scatter")
        large = loop and any(2 * call.made >= region.size for region in near)
        on_scores = any(r.value in of[r.value].inner for r in call.reads if r.value in of)
        if large or (on_scores and (product or loop)):
            region = near[0]
            for other in near[1:]:
                region |= other
            of |= dict.fromkeys(region.values, region)
        elif _begins(call):
            region, large = _Region(size=call.made), True
        else:
            continue
        made = _writes([call])
        region.calls.add(call.writes[0][0])
        region.inner |= made if large else set()
        if not product or large:
            region.values |= made
            of |= dict.fromkeys(made, region)
    return list({id(r): r for r in of.values()}.values())


def _begins(call: KernelCall) -> bool:
    """Whether a call is a product of what was computed, at least as large as that."""
    factors = call.reads[-2:]
    own = call.kernel.label in BATCHED and not any(r.given for r in factors)
    return own and sum(n for _, n in call.writes) >= sum(r.bytes for r in factors)


class _Collapse:
    """One region as kernels of its own, if nobody else reads its scores."""

    def __init__(self, before: Passes, wanted: Sequence[Collection[int]], region: _Region, left: Left) -> None:
        self.before, self.inner, self.left = before, region.inner, left
        self.mine = [[c for c in calls if c.writes[0][0] in region.calls] for calls in before]
        self.rest = [[c for c in calls if c.writes[0][0] not in region.calls] for calls in before]
        self.read = {v for some in wanted for v in some} | {
            r.value for calls in self.rest for c in calls for r in c.reads
        }
        self.constants = _writes(c for calls in before for c in calls if not c.reads)
        self.copies = {c.writes[0][0]: c for calls in before for c in calls if _widens(c) or _repeats(c)}

    def passes(self) -> Passes:
        """With the region's calls as one; as before where its scores are wanted, or a kernel would wait for itself.

        What W sums of them (a gate's gradient) is summed in I.
        """
        forward, backward, weights = (*self.mine, [], [])[:3]
        late = {value for calls in self.rest[2:] for c in calls for value, _ in c.writes}
        if self.inner & self.read or not forward or any(_product(c) or _reads(c) & late for c in weights):
            return self.before
        own, back = _writes(forward), [*backward, *weights]
        needed = {v for c in back for v in _reads(c)} & own
        made = [self._kernels(forward, (), needed)]
        if back:
            made.append(self._kernels(back, forward if needed & self.inner else (), set()))
        new = [*made, *([] for _ in self.rest[len(made) :])]
        found = [_ordered([*rest, *some]) for rest, some in zip(self.rest, new, strict=True)]
        return self.before if None in found else [calls for calls in found if calls is not None]

    def _kernels(
        self, calls: Sequence[KernelCall], again: Sequence[KernelCall], later: Collection[int]
    ) -> list[KernelCall]:
        """again: forward's calls, whose scores are made again. later: what backward reads of these calls' values."""
        made = _writes([*again, *calls]) | self.constants
        reads = {(r.value, r.view): r for c in (*again, *calls) for r in self._near(c).reads if r.value not in made}
        kept = (self.read | set(later)) - self.inner
        writes = tuple((v, n) for c in calls for v, n in c.writes if v in kept)
        products = [self._near(c).kernel for c in (*self._seeds(again), *calls) if _product(c)]
        moved = sum(r.bytes for r in reads.values()) + sum(n for _, n in writes)
        all_of = replace(calls[-1].kernel, flops=sum(k.flops for k in products), bytes=moved, count=1)
        end = KernelCall(all_of, KernelForm.APART, 0, 0, tuple(reads.values()), writes)
        if (shape := self._attention()) is not None and products:
            label = ATTENTION if calls is self.mine[0] else f"{ATTENTION}_backward"
            flops = int(all_of.flops * self._seen(shape))
            kernel = replace(
                all_of, kind=KernelKind.ATTENTION, flops=flops, shape=shape, label=label, dtype=products[0].dtype
            )
            return [replace(end, kernel=kernel)]
        wide = [k for k in products if min(k.shape[-3:-1]) >= THIN]
        flops, label = all_of.flops - sum(k.flops for k in wide), "+".join(dict.fromkeys(c.kernel.label for c in calls))
        rest = replace(all_of, kind=KernelKind.MEMORY, shape=(), flops=flops, label=label)
        first = KernelCall(all_of, KernelForm.APART, 0, 0, tuple(reads.values()), ())
        names = (-1 - v for c in calls for v, _ in c.writes)
        before = [
            replace(first, kernel=replace(k, bytes=0), writes=((n, 0),)) for k, n in zip(wide, names, strict=False)
        ]
        return [*before, replace(end, kernel=rest)]

    def _seeds(self, calls: Sequence[KernelCall]) -> list[KernelCall]:
        """The products whose results are scores."""
        return [c for c in calls if _product(c) and _writes([c]) <= self.inner]

    def _attention(self) -> tuple[int, ...] | None:
        """Batch, heads, queries, keys and both widths, where forward has two products, of and over the same keys, and
        what is between them adds up rows."""
        products = [c.kernel.shape for c in self.mine[0] if _product(c)]
        sums = any(c.form is KernelForm.ROWS for c in self.mine[0])
        if not sums or len(products) != 2 or any(len(shape) != 4 for shape in products):
            return None
        (groups, m, n, k), (others, rows, v, over) = products
        return (1, groups, m, n, k, v) if (groups, m, n) == (others, rows, over) else None

    def _seen(self, shape: tuple[int, ...]) -> float:
        """Of all pairs of a query and a key those that masks leave."""
        masks = ((c, self.left(r.tensor)) for c in self.mine[0] for r in _masks(c, self.inner, shape[2:4]))
        return min((1.0 - share if _hides(c, self.inner) else share for c, share in masks), default=1.0)

    def _near(self, call: KernelCall) -> KernelCall:
        """A product of cast factors as one of what they were cast from, of repeated ones of what is repeated."""
        if not _product(call):
            return call
        copies = [self.copies.get(r.value) for r in call.reads]
        if all(c is not None and _widens(c) for c in copies):
            call = replace(call, kernel=replace(call.kernel, dtype=DType.BF16))
        else:
            copies = [c if c is not None and not _widens(c) else None for c in copies]
        reads = zip(call.reads, copies, strict=True)
        return replace(call, reads=tuple(r if c is None else c.reads[0] for r, c in reads))


def _product(call: KernelCall) -> bool:
    return call.kernel.kind in PRODUCTS


def _widens(call: KernelCall) -> bool:
    """Whether a call copies elements of 16 bits into 32."""
    return call.kernel.label == "_to_copy" and 2 * call.reads[0].bytes == call.writes[0][1] == 4 * call.made


def _repeats(call: KernelCall) -> bool:
    """Whether a call writes the same elements several times (keys for each head of queries)."""
    return call.kernel.label == "clone" and 2 * call.reads[0].bytes <= call.writes[0][1]


def _masks(call: KernelCall, inner: Collection[int], square: tuple[int, ...]) -> list[KernelRead]:
    """What an elementwise call reads beside scores, of every query and key."""
    beside = [(r, r.view) for r in call.reads if r.value not in inner and call.form is KernelForm.ELEMENTS]
    return [r for r, view in beside if isinstance(view, tuple) and view[1][-2:] == square]


def _hides(call: KernelCall, inner: Collection[int]) -> bool:
    """Whether something else stands in a score's place where a mask is true."""
    label = call.kernel.label
    return label.startswith("masked_fill") or (label == "where" and call.reads[-1].value in inner)


def _reads(call: KernelCall) -> set[int]:
    return {r.value for r in call.reads}


def _writes(calls: Iterable[KernelCall]) -> set[int]:
    return {value for c in calls for value, _ in c.writes}


def _ordered(calls: Sequence[KernelCall]) -> list[KernelCall] | None:
    """Calls behind what they read, else in their order; None where they wait for one another."""
    maker = {value: i for i, c in enumerate(calls) for value, _ in c.writes}
    waits = {i: {maker[r.value] for r in c.reads if r.value in maker} - {i} for i, c in enumerate(calls)}
    sorter, ready, out = TopologicalSorter(waits), list[int](), list[KernelCall]()
    try:
        sorter.prepare()
    except CycleError:
        return None
    while sorter.is_active():
        for i in sorter.get_ready():
            heappush(ready, i)
        out.append(calls[at := heappop(ready)])
        sorter.done(at)
    return out
