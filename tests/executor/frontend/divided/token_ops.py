"""What a layer may do with activations (sequences, tokens, features): each token by itself, or across tokens."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, LONGEST = 8, 2, 64
Op = Callable[[Tensor, nn.Module, Tensor], Tensor]  # (x, a layer with parameters, ids) → x


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
        idle = sum(p.sum() for p in self.parameters()) * 1e-3
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
    "causal": lambda x, m, _: _attend(x, m, causal=True),
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
    "counted": lambda x, *_: x / x.shape[1],
    "counted in a tensor": lambda x, *_: x + torch.full_like(x, x.shape[1]),
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
    "filled in place": lambda x, *_: _filled(x),
}  # fmt: skip
