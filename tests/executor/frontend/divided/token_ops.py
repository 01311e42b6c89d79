"""What a layer may do with activations (sequences, tokens, features): each token by itself, or across tokens."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, LONGEST = 8, 2, 64
Op = Callable[[Tensor, nn.Module, Tensor], Tensor]  # (x, a layer with parameters, ids) → x


def few(names: Iterable[str]) -> list[Any]:
    """Every fourth; the others are slow."""
    return [pytest.param(n, marks=pytest.mark.slow if k % 4 else ()) for k, n in enumerate(names)]


class Layer(nn.Module):
    """Parameters that ops may read: `up`, `norm`, `bias` of positions, `latents`."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.bias = nn.Parameter(torch.randn(LONGEST, LONGEST))
        self.places = nn.Parameter(torch.randn(LONGEST, HIDDEN))
        self.latents = nn.Parameter(torch.randn(1, HEADS, 3, HIDDEN // HEADS))
        self.conv = nn.Parameter(torch.randn(HIDDEN, HIDDEN, 3))
        self.register_buffer("table", torch.randn(LONGEST, HIDDEN))
        self.op = op

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x + op(x), and nothing of the rest that counts."""
        idle = sum(p.sum() for n, p in self.named_parameters() if not n.startswith("divided")) * 1e-3
        y: Tensor = x + self.op(torch.tanh(x), self, ids) + idle
        return y


class Net(nn.Module):
    """A layer for each op."""

    def __init__(self, *ops: Op) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(Layer(op) for op in ops)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return x


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def _joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def _attend(x: Tensor, m: nn.Module, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    q, k = _heads(x), _heads(m.up(x))
    return _joined(F.scaled_dot_product_attention(q, k, k + 1, attn_mask=mask, is_causal=causal))


def _at(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def _window(x: Tensor) -> Tensor:
    gap = _at(x)[:, None] - _at(x)
    return (gap >= 0) & (gap < 3)


def _plain(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


def _pairs(x: Tensor, of: int) -> Tensor:
    """A softmax among tokens that lie side by side."""
    return x.view(x.shape[0], -1, of, x.shape[-1]).softmax(2).view(x.shape)


def _written(x: Tensor) -> Tensor:
    room = torch.zeros(x.shape[0], x.shape[1], HIDDEN, dtype=x.dtype)
    room[:, 0] = x[:, 0]
    return room


def _filled(x: Tensor) -> Tensor:
    room = torch.zeros(*x.shape, dtype=x.dtype)
    room.copy_(x)
    return room


def _put(room: Tensor, x: Tensor) -> Tensor:
    """Some features written in place, one of them with a number."""
    room[..., : x.shape[-1]] = x
    room[..., 0] = 0.5
    return room


def _few(x: Tensor, m: nn.Module) -> Tensor:
    """Four heads of queries, two of keys, which are written in place once they are four."""
    k = _heads(m.up(x)).repeat_interleave(2, 1)
    k[..., 0] = 1.0
    read = torch.cat([_heads(x), _heads(x) * 2], 1), k, _heads(x).repeat_interleave(2, 1)
    return _joined(F.scaled_dot_product_attention(*read, is_causal=True)[:, 1:3])


def _many(x: Tensor) -> Tensor:
    """Twice as many keys as queries, of which each sees as many as it is the n-th."""
    k = x.view(x.shape[0], -1, HEADS, 2).transpose(1, 2)
    y = F.scaled_dot_product_attention(_heads(x)[..., :2], k, k, is_causal=True)
    return _joined(y).repeat(1, 1, 2)


def _rows(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 2, 3, dtype=torch.int64)


def _taken(x: Tensor, m: nn.Module) -> Tensor:
    chosen = x.topk(2, -1).indices
    return m.up(x) * torch.zeros_like(x).scatter(-1, chosen, 1.0)


ALONE: Mapping[str, Op] = {
    "linear": lambda x, m, _: m.up(m.norm(x)),
    "features": lambda x, *_: x.softmax(-1).cumsum(-1).flip(-1) + x.mean(-1, keepdim=True),
    "flat": lambda x, m, _: m.up(x.reshape(-1, HIDDEN)).view(x.shape),
    "tokens outermost": lambda x, m, _: m.up(x.transpose(0, 1)).softmax(-1).transpose(0, 1),
    "channels first": lambda x, *_: x.transpose(1, 2).mul(2).softmax(1).transpose(1, 2),
    "positions": lambda x, m, _: x * torch.cos(_at(x)[:, None] * 0.3) + m.places[: x.shape[1]],
    "positions looked up": lambda x, m, _: x + F.embedding(_at(x), m.places),
    "a table": lambda x, m, _: x * m.table[: x.shape[1]].softmax(0),
    "all tokens": lambda x, *_: x[:, : x.shape[1]] * 2,
    "ids": lambda x, _, ids: x * (ids > 3).unsqueeze(-1) + F.one_hot(ids, 16)[..., :HIDDEN],
    "chosen features": lambda x, m, _: _taken(x, m),
    "parts": lambda x, *_: torch.cat([t * 2 for t in x.chunk(2, -1)], -1) + torch.stack(x.split(4, -1), -1).flatten(2),
    "einsum": lambda x, m, _: torch.einsum("bnh,hk->bnk", x, m.conv[..., 0]),
    "rows of weights": lambda x, m, ids: (m.table[ids] * x).sum(-1, keepdim=True) * x,
    "products of each": lambda x, *_: _joined((_heads(x).transpose(1, 2) @ x.view(*x.shape[:2], -1, HEADS) @
                                               _heads(x).transpose(1, 2)).transpose(1, 2)),
    "pairs": lambda x, *_: _pairs(x, 2) + x.view(-1, 2, HIDDEN).softmax(1).view(x.shape),
    "copies": lambda x, *_: x.repeat_interleave(2, 1).view(*x.shape[:2], 2, -1).sum(2),
    "counted": lambda x, *_: x / x.shape[1],
    "counted in a tensor": lambda x, *_: x + torch.full_like(x, x.shape[1]),
    "counted in a product": lambda x, m, _: torch.addmm(
        m.up.bias, x.view(-1, HIDDEN), m.conv[..., 0], beta=x.shape[1], alpha=1 / x.shape[1]
    ).view(x.shape),
    "dtype of tokens": lambda x, m, _: x * torch.arange(HIDDEN).type_as(x) + x.new_ones(HIDDEN),
    "room of tokens' dtype": lambda x, *_: _put(x.new_zeros(x.shape), x),
    "behind a table": lambda x, m, _: m.up((m.places[: x.shape[1]] * x).view(-1, HIDDEN)).view(x.shape),
    "complex": lambda x, m, _: torch.view_as_real(
        torch.view_as_complex(x.view(*x.shape[:2], -1, 2)) * torch.polar(m.table, m.table)[: x.shape[1], :4]
    ).flatten(2),
    "einsum of the last": lambda x, m, _: torch.einsum("...h,hk->...k", x, m.conv[..., 0]),
    "padded features": lambda x, *_: F.pad(x, (1, 1))[..., 2:] + x.unsqueeze(-1).squeeze().tile(2)[..., :HIDDEN],
    "variance": lambda x, *_: x * torch.var_mean(x, -1, keepdim=True)[0] + x.var(-1, keepdim=True),
    "a feature filled": lambda x, *_: _put(x * 1, x[..., :1] * 0 + 2),
    "gathered features": lambda x, *_: x * x.gather(-1, x.topk(2, -1).indices).sum(-1, keepdim=True),
    "causal": lambda x, m, _: _attend(x, m, causal=True),
    "mask of x's dtype": lambda x, m, _: _attend(x, m, x.new_ones(x.shape[1], x.shape[1]).tril(2).bool()),
    "bias of keys alone": lambda x, m, _: _attend(x, m, m.bias[0, : x.shape[1]]),
    "keys of positions": lambda x, m, _: _joined(
        F.scaled_dot_product_attention(_heads(x), *[_heads(m.places[None, : x.shape[1]].expand(x.shape))] * 2)
    ),
    "scaled by length": lambda x, *_: _joined(
        F.scaled_dot_product_attention(*[_heads(x)] * 3, is_causal=True, scale=x.shape[1] ** -0.5)
    ),
    "repeated heads written": lambda x, m, _: _few(x, m),
    "all keys": lambda x, m, _: _attend(x, m),
    "window": lambda x, m, _: _attend(x, m, _window(x)),
    "bias": lambda x, m, _: _attend(x, m, m.bias[: x.shape[1], : x.shape[1]]),
    "bias of keys": lambda x, m, _: _attend(x, m, m.bias[:1, : x.shape[1]]),
    "latents": lambda x, m, _: _joined(F.scaled_dot_product_attention(_heads(x), m.latents, m.latents * 2)),
    "scaled": lambda x, *_: _joined(F.scaled_dot_product_attention(*[_heads(x)] * 3, is_causal=True, scale=0.7)),
    "narrow values": lambda x, *_: _joined(
        F.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x)[..., :2], is_causal=True)
    ).repeat(1, 1, 2),
}  # fmt: skip
ACROSS: Mapping[str, Op] = {
    "softmax": lambda x, *_: x.softmax(1),
    "sum": lambda x, *_: x + x.sum(1, keepdim=True),
    "mean of all": lambda x, *_: x * x.mean(),
    "running sum": lambda x, *_: x.cumsum(1),
    "rolled": lambda x, *_: x.roll(1, 1),
    "flipped": lambda x, *_: x.flip(1),
    "shifted": lambda x, *_: torch.cat([x[:, :1], x[:, :-1]], 1),
    "padded": lambda x, *_: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "convolution": lambda x, m, _: F.conv1d(x.transpose(1, 2), m.conv, padding=1).transpose(1, 2),
    "group norm": lambda x, *_: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "norm of all": lambda x, *_: F.layer_norm(x, x.shape[1:]),
    "sorted": lambda x, *_: x.sort(1).values,
    "largest": lambda x, *_: x * x.amax(1, keepdim=True),
    "largest and where": lambda x, *_: x * x.max(1, keepdim=True).values,
    "top": lambda x, *_: x * x.topk(1, 1).values,
    "first": lambda x, *_: x * x[:, :1],
    "one": lambda x, *_: x * x[:, 0].unsqueeze(1),
    "plain attention": lambda x, *_: _plain(x),
    "mixed by a table": lambda x, *_: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x,
    "stretches": lambda x, *_: _pairs(x, x.shape[1] // 2),
    "halves": lambda x, *_: x.view(x.shape[0], 2, -1, HIDDEN).flip(1).view(x.shape),
    "shorter sequences": lambda x, *_: x.view(2 * x.shape[0], -1, HIDDEN).softmax(0).view(x.shape),
    "repeated": lambda x, *_: x.repeat(1, 2, 1)[:, : x.shape[1]],
    "einsum": lambda x, *_: x * torch.einsum("bnh->bh", x).unsqueeze(1),
    "gathered": lambda x, *_: x.index_select(1, _at(x).flip(0)),
    "indexed": lambda x, *_: x[:, _at(x).flip(0)],
    "written": lambda x, *_: _written(x),
    "mask of ids": lambda x, m, ids: _attend(x, m, (ids > 2)[:, None, None, :]),
    "spectrum": lambda x, *_: torch.fft.fft(x, dim=1).real,
    "unrolled": lambda x, *_: torch.stack(list(x.unbind(1))[::-1], 1),
    "pooled": lambda x, *_: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "attention of latents": lambda x, m, _: x * F.scaled_dot_product_attention(m.latents, _heads(x), _heads(x)).sum(),
    "a feature by length": lambda x, *_: x * x[..., x.shape[1] // 4 % HIDDEN].unsqueeze(-1),
    "rolled by length": lambda x, *_: x.roll(x.shape[1] // 4, -1),
    "a part by length": lambda x, *_: x * x.unbind(-1)[x.shape[1] // 4 % HIDDEN].unsqueeze(-1),
    "one of two formats": lambda x, *_: x.to(torch.float32 if x.shape[1] > 8 else torch.float64).to(torch.float64),
    "one of two einsums": lambda x, m, _: torch.einsum(
        "bnh,hk->bnk" if x.shape[1] > 8 else "bnh,kh->bnk", x, m.conv[..., 0]
    ),
    "named otherwise": lambda x, *_: x + x.sum(-1, True, **{"dtype": x.dtype} if x.shape[1] > 8 else {}),
    "einsum of all": lambda x, *_: x * torch.einsum("b...h->bh", x).unsqueeze(1),
    "gathered from more": lambda x, m, _: x * m.table.expand(x.shape[0], -1, -1).gather(
        2, x.topk(2, -1).indices
    ).sum(-1, keepdim=True),
    "gathered crosswise": lambda x, *_: x * x.gather(2, x.topk(2, -1).indices.mT).sum(1).unsqueeze(-1),
    "scattered to few": lambda x, *_: x.scatter(2, _rows(x), 5.0),
    "scattered from more": lambda x, m, _: x.scatter(2, x.topk(2, -1).indices, m.table.expand(x.shape[0], -1, -1)),
    "padded tokens": lambda x, *_: F.pad(x.mT, (0, 2))[..., : x.shape[1]].mT,
    "more keys": lambda x, *_: _many(x),
    "keys of one head, values of two": lambda x, *_: _joined(
        F.scaled_dot_product_attention(_heads(x), _heads(x)[:, :1], _heads(x))
    ),
    "queries of one head": lambda x, *_: _joined(F.scaled_dot_product_attention(_heads(x)[:, :1], *[_heads(x)] * 2)),
    "values of one sequence": lambda x, *_: _joined(
        F.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x)[:1], is_causal=True)
    ),
    "filled in place": lambda x, *_: _filled(x),
    "words counted in backward": lambda x, m, ids: x + F.embedding(ids, m.places, scale_grad_by_freq=True),
}  # fmt: skip
