"""The reference dense decoder (llama, mistral, qwen2, qwen3), from the model graph's config: Hugging Face names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.modules.base import Built, TokenLoss, initial
from ir.errors import ErrorKind, PiperError
from ir.model.config import ModelConfig

RUNNABLE = ("llama", "mistral", "qwen2", "qwen3")


class Params:
    """Makes each parameter once per stage, by its global name; a second request for a name is a tie.

    dtype None: only names and shapes are wanted, nothing is allocated.
    """

    def __init__(self, seed: int, std: float, dtype: torch.dtype | None) -> None:
        self.seed, self.std, self.dtype = seed, std, dtype
        self.made: dict[str, nn.Parameter] = {}

    def __call__(self, name: str, *shape: int) -> nn.Parameter:
        """The parameter of this name."""
        if name not in self.made:
            if self.dtype is None:
                value = torch.empty(shape, device="meta")
            else:
                value = initial(name, shape, self.seed, self.std, self.dtype)
            self.made[name] = nn.Parameter(value)
        return self.made[name]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in the dtype of x, whatever the parameters are stored in."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face's: statistics in at least float32. Written out, as the weight is then read by one function only."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


@lru_cache(maxsize=8)
def rotary(length: int, dim: int, theta: float, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, (length, dim) each."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rates = theta ** -(torch.arange(0, dim, 2, dtype=wide, device=device) / dim)
    angles = torch.outer(torch.arange(length, dtype=wide, device=device), rates)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, length, dim)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Embed(nn.Module):
    """Chunk `embed`: token ids → hidden states."""

    def __init__(self, c: ModelConfig, make: Params, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.weight = make("model.embed_tokens.weight", c.vocab, c.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up."""
        return F.embedding(ids, self.weight).to(self.compute)


class Attention(nn.Module):
    """The first half of a decoder layer: x + attention(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, layer: int) -> None:
        super().__init__()
        self.c = c
        at = f"model.layers.{layer}"
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.norm = make(f"{at}.input_layernorm.weight", c.hidden)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            setattr(self, name, make(f"{at}.self_attn.{name}.weight", rows, c.hidden))
            setattr(self, f"{name}_bias", make(f"{at}.self_attn.{name}.bias", rows) if c.qkv_bias else None)
        self.o_proj = make(f"{at}.self_attn.o_proj.weight", c.hidden, q)
        self.o_proj_bias = make(f"{at}.self_attn.o_proj.bias", c.hidden) if c.out_bias else None
        for name in ("q_norm", "k_norm"):
            setattr(self, name, make(f"{at}.self_attn.{name}.weight", c.head_dim) if c.qk_norm else None)

    def forward(self, x: Tensor) -> Tensor:
        """Grouped-query attention, causal."""
        c, (batch, length, _) = self.c, x.shape
        h = rms_norm(x, self.norm, c.norm_eps)
        q, k, v = (
            linear(h, getattr(self, n), getattr(self, f"{n}_bias")).view(batch, length, -1, c.head_dim)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        if c.qk_norm:
            q, k = rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if c.rope:
            cos, sin = rotary(length, c.head_dim, c.rope_theta, x.dtype, str(x.device))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = _window(length, c.window, str(x.device)) if 0 < c.window < length else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=c.kv_heads != c.heads
        )
        out = out.transpose(1, 2).reshape(batch, length, -1)
        return x + linear(out, self.o_proj, self.o_proj_bias)


class Mlp(nn.Module):
    """The second half of a decoder layer: x + SwiGLU(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, layer: int) -> None:
        super().__init__()
        self.eps = c.norm_eps
        at = f"model.layers.{layer}"
        self.norm = make(f"{at}.post_attention_layernorm.weight", c.hidden)
        for name, rows, cols in (
            ("gate_proj", c.ffn, c.hidden),
            ("up_proj", c.ffn, c.hidden),
            ("down_proj", c.hidden, c.ffn),
        ):
            setattr(self, name, make(f"{at}.mlp.{name}.weight", rows, cols))
            setattr(self, f"{name}_bias", make(f"{at}.mlp.{name}.bias", rows) if c.mlp_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        h = rms_norm(x, self.norm, self.eps)
        gate, up = linear(h, self.gate_proj, self.gate_proj_bias), linear(h, self.up_proj, self.up_proj_bias)
        return x + linear(F.silu(gate) * up, self.down_proj, self.down_proj_bias)


class Head(nn.Module):
    """Chunk `head`: final norm and logits."""

    def __init__(self, c: ModelConfig, make: Params) -> None:
        super().__init__()
        self.eps = c.norm_eps
        self.norm = make("model.norm.weight", c.hidden)
        self.weight = make("model.embed_tokens.weight" if c.tied else "lm_head.weight", c.vocab, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return linear(rms_norm(x, self.norm, self.eps), self.weight)


@lru_cache(maxsize=4)
def _window(length: int, window: int, device: str) -> Tensor:
    i = torch.arange(length, device=device)
    gap = i[:, None] - i[None, :]
    return (gap >= 0) & (gap < window)


@dataclass(frozen=True)
class Llama:
    """A dense decoder of a config, any part of which any rank can build.

    dtype: of the parameters; compute: of the activations. parts: units are halves of layers ("l0.attn", "l0.mlp")
    instead of whole ones.

    >>> from ir.model.config import load_config
    >>> model = Llama(load_config("tiny-llama", {"num_hidden_layers": 2}))
    >>> model.chunks, list(model.build(["l1", "head"]).units)
    (('embed', 'l0', 'l1', 'head'), ['l1', 'head'])
    """

    config: ModelConfig
    seed: int = 0
    dtype: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    parts: bool = False

    def __post_init__(self) -> None:
        c = self.config
        if c.model_type not in RUNNABLE or c.moe or c.mla or c.mtp:
            raise PiperError(
                ErrorKind.MODEL,
                f"no reference module for model type {c.model_type!r} yet",
                file=c.source,
                key="model.config",
                allowed=RUNNABLE,
                suggestion="tiny-llama, or [model] module = \"my_model.py:build\"",
            )
        if c.attn_dropout or c.hidden_dropout or c.embed_dropout:
            raise PiperError(
                ErrorKind.MODEL,
                "dropout cannot be compared between plans, so `run` has none",
                file=c.source,
                suggestion="set model.attention_dropout=0",
            )

    @property
    def chunks(self) -> tuple[str, ...]:
        """Embedding, decoder layers, head."""
        return ("embed", *(f"l{i}" for i in range(self.config.layers)), "head")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters in the model's own order, which is the canonical one."""
        built = self._build(self.chunks, None)
        return {n: tuple(p.shape) for n, p in built.params.items()}

    def build(self, chunks: Sequence[str]) -> Built:
        """Build some chunks with their first values."""
        return self._build(chunks, self.dtype)

    def _build(self, chunks: Sequence[str], dtype: torch.dtype | None) -> Built:
        c, make = self.config, Params(self.seed, self.config.init_std, dtype)
        units: dict[str, nn.Module] = {}
        for name in chunks:
            if name == "embed":
                units[name] = Embed(c, make, self.compute or self.dtype)
            elif name == "head":
                units[name] = TokenLoss(Head(c, make))
            else:
                layer = int(name.removeprefix("l"))
                halves = {f"{name}.attn": Attention(c, make, layer), f"{name}.mlp": Mlp(c, make, layer)}
                units.update(halves if self.parts else {name: nn.Sequential(*halves.values())})
        return Built(units, make.made, {"head": ("labels", "scale")} if "head" in units else {})
