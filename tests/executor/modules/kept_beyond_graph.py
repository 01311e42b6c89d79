"""Where torch's modules and the model graph differ in what they keep: by how much, and why. Nothing else may differ."""

from collections.abc import Callable
from dataclasses import dataclass

from ir.workload.chunks import chunks
from ir.workload.config.spec import ExpertConfig, ModelConfig

WIDE = 2  # bf16


@dataclass(frozen=True)
class Case:
    """One part of one preset. tokens: of the microbatch; size: its sequences."""

    config: ModelConfig
    name: str
    size: int
    length: int

    @property
    def tokens(self) -> int:
        return self.size * self.length


@dataclass(frozen=True)
class Beyond:
    """What the module keeps, gives or computes beyond what the graph has; negative: less. Bytes, FLOPs."""

    reason: str
    applies: Callable[[Case], bool]
    until_i: Callable[[Case], int] = lambda c: 0
    until_w: Callable[[Case], int] = lambda c: 0
    stash: Callable[[Case], int] = lambda c: 0
    out: Callable[[Case], int] = lambda c: 0


def _moe(c: Case) -> ExpertConfig:
    assert c.config.moe is not None
    return c.config.moe


def _norm_weights(c: Case) -> int:
    """Bytes of the norm parameters of a part, from the graph."""
    part = next(p for chunk in chunks(c.config) for p in chunk.parts if f"{chunk.name}.{p.name}" == c.name)
    short = ("norm.weight", "norm.bias", "ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "ln_f.weight")
    names = (*short, "ln_f.bias", "norm_1.weight", "norm_2.weight", "norm_f.weight")
    return WIDE * sum(p.numel for p in part.params if p.name.endswith(names))


def kind(*parts: str) -> Callable[[Case], bool]:
    return lambda c: c.name.split(".")[1] in parts and c.name != "head.norm"


BEYOND = (
    Beyond(
        "a norm's weight gradient is made in I, with the input's, and joins the sum in W",
        lambda c: _norm_weights(c) > 0,
        stash=_norm_weights,
    ),
    Beyond(
        "the normed tokens are one tensor, which the router makes; the graph counts it where it is read last",
        lambda c: kind("router", "shared")(c) and _moe(c).shared_ffn > 0,
        until_w=lambda c: (1 if kind("router")(c) else -1) * c.tokens * c.config.hidden * WIDE,
    ),
    Beyond(
        "weights, indices and tokens leave the router as three outputs; in the graph only tokens count as output",
        kind("router"),
        out=lambda c: c.tokens * _moe(c).top_k * (4 + 8),
    ),
    Beyond(
        "torch gives the loss as one number; the graph has one per token",
        kind("head"),
        out=lambda c: 4 - 4 * c.tokens,
    ),
    Beyond(
        "token ids come with the batch, those that come next, which an MTP module reads, too",
        lambda c: c.name.endswith(".embed"),
        until_w=lambda c: -8 * c.tokens,
    ),
    Beyond(
        "so do labels, of which an MTP module's head makes its own, moved by one",
        lambda c: c.name == "head.head",
        until_i=lambda c: -8 * c.tokens,
    ),
)
