"""Collectives inside of compiled code: to torch's compiler each is one operator, which it looks no further into. It is
noted as a unit is traced; as its code runs, the rank that runs it calls what its eager code would.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import count
from threading import local
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor

IN_PLACE = ("sum", "largest")


Call = Callable[[Any, Tensor], Tensor]
_numbers: Iterator[int] | None = None  # of the trace that runs; one at a time does
_rank = local()


@contextmanager
def collectives_traced() -> Iterator[None]:
    """Inside, a collective of values of a trace is an operator in it. Numbers tell equal ones apart: gathered twice is
    not gathered once and kept. Only one thread at a time may be inside; others may go on with values of their own.
    """
    global _numbers
    _numbers = count()
    try:
        yield
    finally:
        _numbers = None


@contextmanager
def over_axes(axes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the collectives of compiled code that this thread runs go over these: a `RankAxis` by its name."""
    before, _rank.axes = getattr(_rank, "axes", {}), axes
    try:
        yield
    finally:
        _rank.axes = before


def traceable(method: Call) -> Call:
    """A method of an axis, as an operator where it is traced."""

    @wraps(method)
    def called(axis: Any, x: Tensor) -> Tensor:
        if _numbers is None or axis.size == 1 or not isinstance(x, FunctionalTensor):
            return method(axis, x)
        found: Tensor = torch.ops.piper_sim.collective(x, method.__name__, axis.axis, axis.size, next(_numbers))
        return found

    return called


@torch.library.custom_op("piper_sim::collective", mutates_args=())
def collective(x: Tensor, how: str, axis: str, size: int, number: int, after: Tensor | None = None) -> Tensor:
    """`how` is the method of `RankAxis`. after: what the collective before it gave, read for the order alone."""
    mine = x.clone(memory_format=torch.contiguous_format) if how in IN_PLACE else x
    found: Tensor = getattr(_rank.axes[axis], how)(mine)
    return found


@collective.register_fake
def _shape(x: Tensor, how: str, axis: str, size: int, number: int, after: Tensor | None = None) -> Tensor:
    if how == "gather":
        return x.new_empty(size, *x.shape)
    return x.new_empty(x.shape[1:] if how == "scatter" else x.shape)


@contextmanager
def saved_tensors_hooks_traced() -> Iterator[None]:
    """Inside, hooks for what autograd saves are called in a trace, too: torch has none of them called in its own."""
    if _numbers is None:
        yield
        return
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def storage_of(x: Tensor) -> int:
    """Which memory a tensor lies in: a trace wraps each of its tensors in another."""
    inner = x.from_functional() if isinstance(x, FunctionalTensor) else x
    return int(inner.untyped_storage()._cdata)


def in_order(graph: fx.Graph) -> None:
    """Have each collective wait for the one before it: no compiler may reorder what other ranks wait for.

    >>> graph = fx.Graph()
    >>> x, op = graph.placeholder("x"), torch.ops.piper_sim.collective.default
    >>> first, second = (graph.call_function(op, (x, "sum", "tp", 2, k)) for k in range(2))
    >>> in_order(graph)
    >>> first.args[5:], second.args[5:]
    ((), (collective_default,))
    """
    last = None
    for node in collectives_in(graph):
        if last is not None:
            node.args = (*node.args[:5], last)
        last = node


def collectives_in(graph: fx.Graph) -> list[fx.Node]:
    """A graph's collectives, in its order."""
    return [n for n in graph.nodes if n.target is torch.ops.piper_sim.collective.default]
