"""Dense parts of the reference decoder: embedding, attention, MLP, final norm, head, with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.modules.attend import attend, rotary, rotate
from executor.modules.base import initial
from executor.modules.functions import layer_norm, relu2, rms_norm, swiglu
from executor.shares import Share
from ir.model.config import Activation, ModelConfig, Norm


class Params:
    """Makes each parameter once per stage, by its global name; a second request for a name is a tie.

    dtype None: only names and shapes are wanted, nothing is allocated. shares: what is held of those that are cut. All
    are asked for with their global shapes, and drawn whole, so that every layout starts from the same numbers.
    """

    def __init__(
        self, seed: int, std: float, dtype: torch.dtype | None, shares: Mapping[str, Share] | None = None
    ) -> None:
        self.seed, self.std, self.dtype, self.shares = seed, std, dtype, shares or {}
        self.made: dict[str, nn.Parameter] = {}

    def __call__(self, name: str, *shape: int, start: float | None = None) -> nn.Parameter:
        """The parameter of this name. start: its first value everywhere, else drawn."""
        if name not in self.made:
            if self.dtype is None:
                value = torch.empty(shape, device="meta")
            else:
                value = initial(name, shape, self.seed, self.std, self.dtype, start)
                value = self.shares[name].take(value) if name in self.shares else value
            self.made[name] = nn.Parameter(value)
        return self.made[name]


@dataclass(frozen=True)
class Spelling:
    """A family's names, below the layer's prefix. qkv "": three projections, q_proj, k_proj, v_proj."""

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    attn_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: str = ""
    out: str = "self_attn.o_proj"
    mlp: str = "mlp"
    up: str = "up_proj"
    down: str = "down_proj"


_GPT2 = Spelling(
    "transformer.h", "transformer.wte", "transformer.ln_f", "ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp", "c_fc",
    "c_proj",
)  # fmt: skip
_MPT = Spelling(
    "transformer.blocks", "transformer.wte", "transformer.norm_f", "norm_1", "norm_2", "attn.Wqkv", "attn.out_proj",
    "ffn",
)  # fmt: skip


def spelling(c: ModelConfig) -> Spelling:
    """How the config's family spells its parameters."""
    return {"gpt2": _GPT2, "mpt": _MPT}.get(c.model_type, Spelling())


class Linear(nn.Module):
    """A linear layer in the dtype of its input, whatever its parameters are stored in.

    flipped: the weight is stored (into, out), as GPT-2's Conv1D does.
    """

    def __init__(
        self, make: Params, name: str, rows: int, cols: int, *, bias: bool = False, flipped: bool = False
    ) -> None:
        super().__init__()
        self.flipped = flipped
        self.weight = make(f"{name}.weight", *((cols, rows) if flipped else (rows, cols)))
        self.bias = make(f"{name}.bias", rows, start=0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if not self.flipped:
            return F.linear(x, weight, bias)
        flat = x.flatten(0, -2)
        y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return y.view(*x.shape[:-1], -1)


class Normalise(nn.Module):
    """The config's norm over the last dim."""

    def __init__(self, c: ModelConfig, make: Params, name: str, size: int) -> None:
        super().__init__()
        self.eps, self.layer = c.norm_eps, c.norm is Norm.LAYER
        self.plus = 1.0 if c.model_type == "nemotron" else 0.0
        self.weight = make(f"{name}.weight", size, start=1.0 - self.plus)
        self.bias = make(f"{name}.bias", size, start=0.0) if self.layer and c.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Statistics in at least float32."""
        if self.layer:
            return layer_norm(x, self.weight, self.bias, self.eps, self.plus)
        return rms_norm(x, self.weight, self.eps)


class Embed(nn.Module):
    """Part `embed`: token ids → hidden states, with learned positions where the config has them."""

    def __init__(self, c: ModelConfig, make: Params, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.weight = make(f"{spelling(c).embed}.weight", c.vocab, c.hidden)
        self.positions = make("transformer.wpe.weight", c.positions, c.hidden) if c.positions else None

    def forward(self, ids: Tensor) -> Tensor:
        """Look up."""
        x = F.embedding(ids, self.weight).to(self.compute)
        if self.positions is None:
            return x
        at = torch.arange(ids.shape[-1], device=ids.device)
        return x + F.embedding(at, self.positions).to(self.compute)


def _attended(q: Tensor, k: Tensor, v: Tensor, *, fused: bool, window: int) -> Tensor:
    """Tokens before heads on both sides, so that what attention reads and gives needs no copy."""
    return attend(*(t.transpose(1, 2) for t in (q, k, v)), fused=fused, window=window).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Part `attn` with ordinary heads: x + attention(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, fused: bool) -> None:
        super().__init__()
        self.c, self.fused, names = c, fused, spelling(c)
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        linear = partial(Linear, make, flipped=c.model_type == "gpt2")
        self.sizes = (q, kv, kv)
        self.norm = Normalise(c, make, prefix + names.attn_norm, c.hidden)
        if names.qkv:
            self.qkv = nn.ModuleList([linear(prefix + names.qkv, q + 2 * kv, c.hidden, bias=c.qkv_bias)])
        else:
            named = zip("qkv", self.sizes, strict=True)
            at = f"{prefix}self_attn."
            self.qkv = nn.ModuleList(linear(f"{at}{n}_proj", size, c.hidden, bias=c.qkv_bias) for n, size in named)
        self.q_norm = make(f"{prefix}self_attn.q_norm.weight", c.head_dim, start=1.0) if c.qk_norm else None
        self.k_norm = make(f"{prefix}self_attn.k_norm.weight", c.head_dim, start=1.0) if c.qk_norm else None
        self.out = linear(prefix + names.out, c.hidden, q, bias=c.out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Grouped-query attention, causal."""
        c, (batch, length, _) = self.c, x.shape
        h = self.norm(x)
        made = self.qkv[0](h).split(self.sizes, -1) if len(self.qkv) == 1 else [m(h) for m in self.qkv]
        q, k, v = (t.view(batch, length, -1, c.head_dim) for t in made)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)
        if c.rope:
            cos, sin = rotary(length, int(c.head_dim * c.rope_share), c.rope_theta, x)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        added: Tensor = self.out(_attended(q, k, v, fused=self.fused, window=c.window))
        return x + added


class Latent(nn.Module):
    """Part `attn` with DeepSeek's latent attention: x + MLA(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, fused: bool) -> None:
        super().__init__()
        assert c.mla is not None
        self.c, self.mla, self.fused = c, c.mla, fused
        mla, at = c.mla, f"{prefix}self_attn."
        self.norm = Normalise(c, make, f"{prefix}input_layernorm", c.hidden)
        if mla.q_rank:
            self.q_a: nn.Module = Linear(make, f"{at}q_a_proj", mla.q_rank, c.hidden, bias=c.qkv_bias)
            self.q_norm: nn.Module = Normalise(c, make, f"{at}q_a_layernorm", mla.q_rank)
            self.q_b = Linear(make, f"{at}q_b_proj", c.heads * mla.qk_dim, mla.q_rank)
        else:
            self.q_a, self.q_norm = nn.Identity(), nn.Identity()
            self.q_b = Linear(make, f"{at}q_proj", c.heads * mla.qk_dim, c.hidden)
        down = mla.kv_rank + mla.rope_dim
        self.kv_a = Linear(make, f"{at}kv_a_proj_with_mqa", down, c.hidden, bias=c.qkv_bias)
        self.kv_norm = Normalise(c, make, f"{at}kv_a_layernorm", mla.kv_rank)
        self.kv_b = Linear(make, f"{at}kv_b_proj", c.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
        self.out = Linear(make, f"{at}o_proj", c.hidden, c.heads * mla.v_dim, bias=c.out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """One rotary key serves all heads."""
        c, mla, (batch, length, _) = self.c, self.mla, x.shape
        h = self.norm(x)
        q = self.q_b(self.q_norm(self.q_a(h))).view(batch, length, c.heads, -1)
        latent, k_rope = self.kv_a(h).split((mla.kv_rank, mla.rope_dim), -1)
        kv = self.kv_b(self.kv_norm(latent)).view(batch, length, c.heads, -1)
        k_nope, v = kv.split((mla.nope_dim, mla.v_dim), -1)
        q_nope, q_rope = q.split((mla.nope_dim, mla.rope_dim), -1)
        cos, sin = rotary(length, mla.rope_dim, c.rope_theta, x)
        shared = rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, c.heads, -1)
        q, k = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1), torch.cat((k_nope, shared), -1)
        # A view of v would keep the keys' first half alive beside k.
        added: Tensor = self.out(_attended(q, k, v.contiguous(), fused=self.fused, window=c.window))
        return x + added


def activation(c: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The config's activation, where it has one up-projection."""
    if c.activation is Activation.RELU2:
        return relu2
    if c.act == "relu":
        return F.relu
    return partial(F.gelu, approximate="none" if c.act == "gelu" else "tanh")


class FeedForward(nn.Module):
    """down(activation(up(x))), gated where the config's activation is."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, width: int) -> None:
        super().__init__()
        names, flipped = spelling(c), c.model_type == "gpt2"
        self.act = activation(c)
        ups = ["gate_proj", names.up] if c.activation.ups == 2 else [names.up]
        self.ups = nn.ModuleList(
            Linear(make, prefix + n, width, c.hidden, bias=c.mlp_bias, flipped=flipped) for n in ups
        )
        self.down = Linear(make, prefix + names.down, c.hidden, width, bias=c.mlp_bias, flipped=flipped)

    def forward(self, x: Tensor) -> Tensor:
        """As any MLP."""
        up = [m(x) for m in self.ups]
        found: Tensor = self.down(swiglu(*up) if len(up) == 2 else self.act(up[0]))
        return found


class Mlp(nn.Module):
    """Part `mlp`: x + mlp(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str) -> None:
        super().__init__()
        names = spelling(c)
        self.norm = Normalise(c, make, prefix + names.mlp_norm, c.hidden)
        self.inner = FeedForward(c, make, f"{prefix}{names.mlp}.", c.ffn)

    def forward(self, x: Tensor) -> Tensor:
        """A decoder layer's second half."""
        added: Tensor = self.inner(self.norm(x))
        return x + added


class Head(nn.Module):
    """Part `head`: logits."""

    def __init__(self, c: ModelConfig, make: Params) -> None:
        super().__init__()
        self.weight = make(f"{spelling(c).embed if c.tied else 'lm_head'}.weight", c.vocab, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """One linear layer."""
        return F.linear(x, self.weight.to(x.dtype))
