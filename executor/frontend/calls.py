"""Calls as they were made, with what each reads and writes; products of an expert each as the one that they are."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ir.core.work import Kernel, KernelKind


class KernelForm(StrEnum):
    """What a compiler's loops can do with a call."""

    ELEMENTS = "elements"  # each element of the result from elements at its place
    ROWS = "rows"  # sums and maxima along the innermost axis, and what is divided by them
    COLUMNS = "columns"  # sums along others
    GATHER = "gather"  # elements of a table where an index says
    APART = "apart"  # a library's kernel


@dataclass(frozen=True, slots=True)
class KernelRead:
    """A value that a call reads. view: which stretch of it; bytes: of that, 0 where it only writes; whole: of all.
    given: it was there before the pass, as parameters are. tensor: its number, -1 where nobody saw it made."""

    value: int
    view: object
    bytes: int
    whole: int
    given: bool = False
    tensor: int = -1


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call as it was made. size: elements that its loops go over; made: elements of its result. writes: (value,
    bytes)."""

    kernel: Kernel
    form: KernelForm
    size: int
    made: int
    reads: tuple[KernelRead, ...]
    writes: tuple[tuple[int, int], ...]


def grouped(calls: Sequence[KernelCall]) -> list[KernelCall]:
    """With products of one stack of weights, one expert's each, as a kernel that leaves their results in a row.

    >>> def call(kind, name, reads, wrote, shape=()):
    ...     kernel = Kernel(kind, 16 if shape else 0, 24, "bf16", shape, name)
    ...     read = tuple(KernelRead(v, view, 8, 16) for v, view in reads)
    ...     return KernelCall(kernel, KernelForm.APART if shape else KernelForm.ELEMENTS, 8, 8, read, ((wrote, 8),))
    >>> two = [call(KernelKind.GEMM, "mm", [(0, e), (1, e)], 2 + e, (2, 2, 2)) for e in range(2)]
    >>> [(c.kernel.shape, c.writes) for c in grouped([*two, call(KernelKind.MEMORY, "cat", [(2, 0), (3, 0)], 4)])]
    [((2, 2, 2, 2), ((4, 8),))]
    """
    out, left = list[KernelCall](), deque(calls)
    while left:
        stack = [left.popleft()]
        while left and _beside(left[0], stack):
            stack.append(left.popleft())
        row = _row(stack, left) if len(stack) > 1 else None
        if row is not None:
            left.remove(row)
        out.append(_one(stack, row) if len(stack) > 1 else stack[0])
    return out


def _beside(call: KernelCall, stack: Sequence[KernelCall]) -> bool:
    """Whether a call is the same product as others, of other stretches of the same two values."""
    first = stack[0]
    if call.kernel != first.kernel or call.kernel.kind is not KernelKind.GEMM or len(call.reads) != 2:
        return False
    same = [r.value for r in call.reads] == [r.value for r in first.reads]
    return same and all(r.view != s.view for c in stack for r, s in zip(call.reads, c.reads, strict=True))


def _row(stack: Sequence[KernelCall], left: Collection[KernelCall]) -> KernelCall | None:
    """The call that puts results behind one another, where nobody else reads them."""
    wrote = {value for c in stack for value, _ in c.writes}
    readers = [c for c in left if any(r.value in wrote for r in c.reads)]
    if len(readers) != 1 or readers[0].kernel.label not in ("cat", "stack"):
        return None
    return readers[0] if {r.value for r in readers[0].reads} == wrote else None


def _one(stack: Sequence[KernelCall], row: KernelCall | None) -> KernelCall:
    k, many = stack[0].kernel, len(stack)
    shape, kind = (many, *k.shape), KernelKind.GROUPED_GEMM
    kernel = replace(k, kind=kind, shape=shape, flops=k.flops * many, bytes=k.bytes * many)
    writes = tuple(w for c in stack for w in c.writes) if row is None else row.writes
    return replace(stack[0], kernel=kernel, reads=tuple(r for c in stack for r in c.reads), writes=writes)
