"""What a mask leaves of attention: the calls that made it, made again with values, as far as sizes decide them.

What comes of products (the scores that keys are picked by) is drawn: how many are picked, and of which, is the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from executor.frontend.aten import of_a_shape

PICKS = (torch.ops.aten.topk, torch.ops.aten.sort)
MOST_ELEMENTS = 2**29  # of a tensor that is made with values


Left = Callable[[int], float]


def whole(_: int) -> float:
    """What no mask hides: all pairs of a query and a key."""
    return 1.0


@dataclass(frozen=True, slots=True)
class _Name:
    """A tensor of a call, and its storage."""

    number: int
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Made:
    """A call: names in place of tensors. drawn: what it gives is not made again."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    outs: tuple[_Name, ...]
    drawn: bool

    def names(self) -> list[_Name]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, _Name)]


_SHARES: dict[str, float] = {}


class KernelMasks:
    """The calls of a forward pass, in their order."""

    def __init__(self) -> None:
        self.made: list[_Made] = []
        self.names: Any = WeakIdKeyDictionary()
        self.numbers = count()

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any, storage: Any) -> None:
        """A call. storage: gives the number of a tensor's."""

        def named(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if (number := self.names.get(x)) is None:
                number = self.names[x] = next(self.numbers)
            return _Name(number, storage(x), tuple(x.shape), x.dtype)

        given, known, outs = tree_map(named, (args, dict(kwargs), tree_leaves(out)))
        most = max((t.numel() for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)), default=0)
        drawn = func.overloadpacket in flop_registry or most > MOST_ELEMENTS
        self.made.append(_Made(func, given, known, tuple(x for x in outs if isinstance(x, _Name)), drawn))

    def number(self, tensor: Tensor) -> int:
        """A tensor's; -1 where nobody saw it made."""
        return int(self.names.get(tensor, -1))

    def share(self, number: int) -> float:
        """Of all pairs those that the mask of a number leaves; all, where it is not known."""
        if not any(x.number == number and prod(x.shape) <= MOST_ELEMENTS for call in self.made for x in call.outs):
            return 1.0
        steps, order = self._steps(number), dict[int, int]()

        def plain(x: Any) -> Any:
            return (order.setdefault(x.number, len(order)), x.shape, x.dtype) if isinstance(x, _Name) else x

        key = repr([tree_map(plain, (s.func, s.args, s.kwargs, s.outs, s.drawn)) for s in steps])
        if key not in _SHARES:
            _SHARES[key] = 1.0
            with _disable_current_modes(), torch.no_grad(), suppress(RuntimeError, IndexError, NotImplementedError):
                _SHARES[key] = _left(_again(steps)[number])  # not of ops that take no drawn values
        return _SHARES[key]

    def picked(self, number: int) -> bool:
        """Whether values decide which pairs the mask of a number leaves."""
        return any(s.func.overloadpacket in PICKS for s in self._steps(number))

    def _steps(self, number: int) -> list[_Made]:
        """The calls that a tensor's values come of."""
        found, wanted, storages = list[_Made](), {number}, set[int]()
        for call in reversed(self.made):
            into = call.args[0] if call.func.overloadpacket.__name__.endswith("_") and call.args else None
            changes = isinstance(into, _Name) and into.storage in storages
            mine = [x for x in call.outs if x.number in wanted]
            if not mine and not changes:
                continue
            found.append(call)
            if not call.drawn and not of_a_shape(call.func.overloadpacket.__name__):
                wanted |= {x.number for x in call.names()}
                storages |= {x.storage for x in (*call.names(), *mine)}
        return found[::-1]


def _again(steps: Sequence[_Made]) -> dict[int, Tensor]:
    """What calls give, by number; what is given from elsewhere is drawn, too."""
    values, dice = dict[int, Tensor](), torch.Generator().manual_seed(0)

    def drawn(x: _Name) -> Tensor:
        floating = x.dtype.is_floating_point
        return torch.rand(x.shape, dtype=x.dtype, generator=dice) if floating else torch.zeros(x.shape, dtype=x.dtype)

    def value(x: Any) -> Any:
        if not isinstance(x, _Name):
            return x
        if x.number not in values:
            values[x.number] = drawn(x)
        return values[x.number]

    for call in steps:
        if call.drawn:
            values |= {x.number: drawn(x) for x in call.outs}
            continue
        out = call.func(*tree_map(value, call.args), **tree_map(value, call.kwargs))
        found: Iterator[Tensor] = (t for t in tree_leaves(out) if isinstance(t, Tensor))
        values |= {x.number: t for x, t in zip(call.outs, found, strict=True)}
    return values


def _left(mask: Tensor) -> float:
    """Of a mask's elements those that hide nothing."""
    if not (mask.dtype is torch.bool or mask.is_floating_point()):
        return 1.0
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return float(seen.float().mean())
