"""The reference dense decoder (llama, mistral, qwen2, qwen3) of a config, with Hugging Face's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.modules.base import Built, TokenLoss, initial
from executor.refusals import refuse_model
from ir.model.config import ModelConfig


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


class Linear(nn.Module):
    """A linear layer in the dtype of its input, whatever its parameters are stored in."""

    def __init__(self, make: Params, name: str, rows: int, cols: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = make(f"{name}.weight", rows, cols)
        self.bias = make(f"{name}.bias", rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


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
        at = f"model.layers.{layer}.self_attn"
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.norm = make(f"model.layers.{layer}.input_layernorm.weight", c.hidden)
        self.q_proj = Linear(make, f"{at}.q_proj", q, c.hidden, bias=c.qkv_bias)
        self.k_proj = Linear(make, f"{at}.k_proj", kv, c.hidden, bias=c.qkv_bias)
        self.v_proj = Linear(make, f"{at}.v_proj", kv, c.hidden, bias=c.qkv_bias)
        self.q_norm = make(f"{at}.q_norm.weight", c.head_dim) if c.qk_norm else None
        self.k_norm = make(f"{at}.k_norm.weight", c.head_dim) if c.qk_norm else None
        self.o_proj = Linear(make, f"{at}.o_proj", c.hidden, q, bias=c.out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Grouped-query attention, causal."""
        c, (batch, length, _) = self.c, x.shape
        h = rms_norm(x, self.norm, c.norm_eps)
        q, k, v = (m(h).view(batch, length, -1, c.head_dim) for m in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if c.rope:
            cos, sin = rotary(length, c.head_dim, c.rope_theta, x.dtype, str(x.device))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = _window(length, c.window, str(x.device)) if 0 < c.window < length else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=c.kv_heads != c.heads
        )
        added: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return x + added


class Mlp(nn.Module):
    """The second half of a decoder layer: x + SwiGLU(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, layer: int) -> None:
        super().__init__()
        self.eps = c.norm_eps
        at = f"model.layers.{layer}.mlp"
        self.norm = make(f"model.layers.{layer}.post_attention_layernorm.weight", c.hidden)
        self.gate_proj = Linear(make, f"{at}.gate_proj", c.ffn, c.hidden, bias=c.mlp_bias)
        self.up_proj = Linear(make, f"{at}.up_proj", c.ffn, c.hidden, bias=c.mlp_bias)
        self.down_proj = Linear(make, f"{at}.down_proj", c.hidden, c.ffn, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        h = rms_norm(x, self.norm, self.eps)
        added: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return x + added


class FinalNorm(nn.Module):
    """The first part of chunk `head`."""

    def __init__(self, c: ModelConfig, make: Params) -> None:
        super().__init__()
        self.eps = c.norm_eps
        self.weight = make("model.norm.weight", c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """RMSNorm."""
        return rms_norm(x, self.weight, self.eps)


class Head(nn.Module):
    """The second part of chunk `head`: logits."""

    def __init__(self, c: ModelConfig, make: Params) -> None:
        super().__init__()
        self.weight = make("model.embed_tokens.weight" if c.tied else "lm_head.weight", c.vocab, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """One linear layer."""
        return F.linear(x, self.weight.to(x.dtype))


@lru_cache(maxsize=4)
def _window(length: int, window: int, device: str) -> Tensor:
    i = torch.arange(length, device=device)
    gap = i[:, None] - i[None, :]
    return (gap >= 0) & (gap < window)


@dataclass(frozen=True)
class Llama:
    """A dense decoder of a config, any part of which any rank can build.

    dtype: of the parameters; compute: of the activations. parts: units are the model graph's parts ("l0.attn",
    "l0.mlp", "head.norm") instead of chunks.

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
        refuse_model(self.config)

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
            parts: dict[str, nn.Module]
            if name == "embed":
                parts = {"embed": Embed(c, make, self.compute or self.dtype)}
            elif name == "head":
                parts = {"norm": FinalNorm(c, make), "head": Head(c, make)}
            else:
                layer = int(name.removeprefix("l"))
                parts = {"attn": Attention(c, make, layer), "mlp": Mlp(c, make, layer)}
            if self.parts:
                units.update((f"{name}.{part}", module) for part, module in parts.items())
            else:
                units[name] = nn.Sequential(*parts.values())
        if "head" not in chunks:
            return Built(units, make.made, {})
        last = "head.head" if self.parts else "head"
        units[last] = TokenLoss(units[last])
        return Built(units, make.made, {last: ("labels", "scale")})
