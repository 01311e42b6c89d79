"""A user's attention where ranks have some tokens of each sequence: it sees all of their keys."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.modules.attention.attend import AttentionMask, attend
from executor.modules.attention.attention import to_heads, to_tokens, whole_context
from executor.modules.parallel import across
from executor.parallel.inline import RankAxis, RankRegion, stretches


def attend_across(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, region: RankRegion
) -> Tensor:
    """torch's scaled_dot_product_attention of (batch, heads, this rank's tokens, features), keys and values of as many
    heads or fewer. mask: of whole sequences, (…, tokens, tokens).

    >>> q, cp = torch.ones(1, 2, 4, 8), RankRegion(cp=RankAxis(2, 1))
    >>> attend_across(q, q, q, None, True, None, cp).shape
    torch.Size([1, 2, 4, 8])
    """
    with torch._C.DisableTorchFunction():  # no weights are in here: whoever watches for them is called for nothing
        if region.heads:
            return _by_heads(q, k, v, mask, causal, scale, region.cp)
        with whole_context(k.transpose(1, 2), v.transpose(1, 2), region.cp) as whole:
            k, v = (t.transpose(1, 2) for t in whole)
            if causal:
                given = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
                return attend(
                    q, k, v, fused=True, sight=AttentionMask(0, region.cp.size, region.cp.index), scaled=given
                )
            mask = None if mask is None else _own_rows(mask, region.cp)
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, cp: RankAxis
) -> Tensor:
    """Whole sequences of some heads."""
    there, back = partial(to_heads, cp), partial(to_tokens, cp)
    q, k, v = (across(t.transpose(1, 2), there, back).transpose(1, 2) for t in (q, k, v))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.chunk(cp.size, -3)[cp.index]
    grouped = k.shape[1] != q.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return across(y.transpose(1, 2), back, there).transpose(1, 2)


def _own_rows(mask: Tensor, cp: RankAxis) -> Tensor:
    """This rank's queries of a mask, and keys in the order in which ranks have them.

    >>> _own_rows(torch.arange(16).view(4, 4), RankAxis(2, 1)).tolist()
    [[4, 7, 5, 6], [8, 11, 9, 10]]
    """
    mask = mask if mask.dim() > 1 else mask[None]
    if mask.shape[-1] > 1:
        mask = torch.cat([stretches(mask, cp.size, rank) for rank in range(cp.size)], -1)
    return stretches(mask, cp.size, cp.index, -2) if mask.shape[-2] > 1 else mask
