"""Context parallelism inside attention: every rank has some queries of each sequence, and sees all keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from executor.modules.functions import apply
from executor.modules.parallel import gather_tokens, scatter_tokens
from executor.parallel.inline import RankAxis


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, cp: RankAxis) -> Tensor:
        ctx.cp = cp
        return gather_tokens(cp, mine)

    @staticmethod
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor, None]:
        return scatter_tokens(ctx.cp, whole), None


class _Again:
    """Hooks for saved tensors: what lies in `whole` is not kept for backward, but gathered again from `mine`."""

    def __init__(self, mine: Tensor, whole: Tensor, cp: RankAxis) -> None:
        self.mine, self.whole, self.cp = mine, whole, cp
        self.left = 0

    def pack(self, t: Tensor) -> Any:
        """A tensor, or where in `whole` it lies."""
        if t.untyped_storage()._cdata != self.whole.untyped_storage()._cdata:
            return t
        self.left += 1
        return t.shape, t.stride(), t.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The first one gathers, the last one lets go."""
        if isinstance(packed, Tensor):
            return packed
        if not self.whole.numel():
            self.whole = gather_tokens(self.cp, self.mine)
        found = self.whole.as_strided(*packed)
        self.left -= 1
        if not self.left:
            self.forget()
        return found

    def forget(self) -> None:
        self.whole = self.whole.new_empty(0)


@contextmanager
def whole_context(k: Tensor, v: Tensor, cp: RankAxis) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values (batch, this rank's tokens, heads, features) → all ranks' tokens, one rank's behind another's.

    They travel as one message. What is computed with them inside keeps this rank's own for backward, no more.
    """
    if cp.size == 1:
        yield k, v
        return
    sizes = k.shape[-1], v.shape[-1]
    mine = torch.cat((k, v), -1)
    heads = mine.shape[-2:]
    mine = mine.flatten(-2)
    whole = apply(_Gather, mine, cp)
    again = _Again(mine.detach(), whole.detach(), cp)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        k, v = whole.unflatten(-1, heads).split(sizes, -1)
        del whole
        yield k, v
    again.forget()
