"""Masks made of sizes: those that only hide the future become a flag, all others stay as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from executor.modules.user.rewrites.attention import ATTENTION, flag_causal, widen_values

Mask = Callable[[Tensor], Tensor | None]
LENGTH = 6


def _after(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return at[:, None] >= at


def _hidden(mask: Tensor, low: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, low)


class Net(nn.Module):
    """Attention of x to itself, (sequences, tokens, features) as one head."""

    def __init__(self, mask: Mask, flag: bool = False) -> None:
        super().__init__()
        self.mask, self.flag = mask, flag

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        q = x.unsqueeze(1)
        made = self.mask(x)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=made, is_causal=self.flag).squeeze(1)


CAUSAL: dict[str, Mask] = {
    "bool": _after,
    "each sequence": lambda x: _after(x).expand(x.shape[0], 1, LENGTH, LENGTH),
    "each sequence's own": lambda x: _after(x).repeat(x.shape[0], 1, 1, 1),
    "endless": lambda x: _hidden(_after(x), -torch.inf),
    "the least number": lambda x: _hidden(_after(x), torch.finfo(torch.float64).min),
    "a window as long": lambda x: _after(x) & (torch.arange(LENGTH)[:, None] < torch.arange(LENGTH) + LENGTH),
}


def _written_to(x: Tensor) -> Tensor:
    """Nothing is hidden, until a view of it is written."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[:, LENGTH - 1].logical_not_()
    return mask


def _causal_by_writing(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[:].tril_()
    return mask


CAUSAL["written"] = _causal_by_writing
OTHER: dict[str, Mask] = {
    "written": _written_to,
    "a window": lambda x: _after(x) & (torch.arange(LENGTH)[:, None] < torch.arange(LENGTH) + 3),
    "the past": lambda x: _after(x).T,
    "itself, too": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1),
    "a bias": lambda x: _hidden(_after(x), -torch.inf) + torch.arange(LENGTH) / 8,
    "a small penalty": lambda x: _hidden(_after(x), -1e4),
    "one sequence": lambda x: _after(x) | (torch.arange(x.shape[0]) == 1)[:, None, None, None],
    "the input": lambda x: _after(x) & (x[:, None, :, :1] > -99),
}


def _flagged(mask: Mask) -> tuple[int, list[object], Tensor, Tensor]:
    """What it says, the masks left, and what it computes before and after."""
    x = torch.randn(2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    root = torch.export.export(Net(mask), (x,)).module()
    before = root(x)
    count = flag_causal(root)
    root.recompile()
    nodes = [n for n in root.graph.nodes if n.target is ATTENTION]
    return count, [n.kwargs.get("attn_mask", (*n.args, None, None)[3]) for n in nodes], before, root(x)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_that_hides_the_future_is_a_flag(name: str) -> None:
    count, left, before, after = _flagged(CAUSAL[name])
    assert count == 1 and left == [None]
    assert torch.equal(before, after) and not torch.equal(before, _flagged(lambda x: None)[3])


@pytest.mark.parametrize("name", OTHER)
def test_any_other_mask_stays(name: str) -> None:
    count, left, before, after = _flagged(OTHER[name])
    assert count == 0 and left[0] is not None
    assert torch.equal(before, after)


def test_a_mask_that_hides_nothing_goes() -> None:
    count, left, before, after = _flagged(lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    assert (count, left) == (1, [None]) and torch.allclose(before, after, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [1, 3])
def test_values_narrower_than_keys_are_widened_and_cut(width: int) -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """x (sequences, heads, tokens, 4)."""
            return nn.functional.scaled_dot_product_attention(x, x, x[..., :width], is_causal=True)

    x = torch.randn(2, 1, LENGTH, 4, dtype=torch.float64)
    root = torch.export.export(Narrow(), (x,)).module()
    before = root(x)
    assert widen_values(root) == 1 and widen_values(root) == 0
    root.recompile()
    assert root(x).shape == before.shape == (2, 1, LENGTH, width)
    assert torch.allclose(root(x), before, rtol=0, atol=1e-14)


def test_a_mask_is_looked_at_where_there_are_values() -> None:
    """On the CPU, whatever the device is that tensors are made on."""
    with torch.device("meta"):
        root = torch.export.export(Net(_after), (torch.ones(1, LENGTH, 4),)).module()
        assert flag_causal(root) == 1
