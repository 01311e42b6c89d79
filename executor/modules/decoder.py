"""The reference decoder of a config, dense or with experts: the model graph's parts as modules, chunk by chunk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.device.device import HostDevice
from executor.modules.attention.attention import AttentionPart, LatentAttentionPart
from executor.modules.base import NUMBER, BuiltChunks, TokenLoss, evaluate
from executor.modules.hub_weights import HubCheckpoint
from executor.modules.layers import EmbedPart, FeedForwardLayer, HeadPart, LinearLayer, MlpPart, NormLayer, Params
from executor.modules.moe import (
    ExpertAdd,
    ExpertParallelAdd,
    ExpertParallelExperts,
    ExpertParallelRouter,
    ExpertRouter,
    Experts,
    LocalExperts,
    SharedExperts,
    moe_of,
)
from executor.parallel.expert_all_to_all import ExpertAllToAll, ExpertGroup, exchanges
from executor.parallel.inline import RankRegion
from executor.parallel.router_guide import ExpertRouterGuide
from executor.parallel.shares import ParamShard
from ir.core.errors import ErrorKind, PiperError
from ir.graph import expert_rows
from ir.workload.config.keys import FORMS, ROWS
from ir.workload.config.spec import ModelConfig

WEIGHT = 0.3  # λ of the paper's first 10 T tokens


class NextTokenProjection(nn.Module):
    """Part `proj`: the hidden state and the next token's embedding, each normed, projected together from 2h to h."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str) -> None:
        super().__init__()
        self.embed_norm = NormLayer(c, make, f"{prefix}enorm", c.hidden)
        self.hidden_norm = NormLayer(c, make, f"{prefix}hnorm", c.hidden)
        self.proj = LinearLayer(make, f"{prefix}eh_proj", c.hidden, 2 * c.hidden)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """DeepSeek's order: the embedding first."""
        found: Tensor = self.proj(torch.cat((self.embed_norm(embedded), self.hidden_norm(x)), -1))
        return found.to(x.dtype)


class NextTokenLoss(nn.Module):
    """The head's loss on the tokens after the next: labels moved by one, times `WEIGHT`."""

    def __init__(self, head: nn.Module, region: RankRegion | None = None) -> None:
        super().__init__()
        self.loss = TokenLoss(head, region)

    def forward(self, x: Tensor, labels: Tensor, scale: float) -> Tensor:
        """The last position has nothing to predict."""
        further = F.pad(labels[:, 1:], (0, 1), value=TokenLoss.IGNORE)
        found: Tensor = self.loss(x, further, scale * WEIGHT)
        return found


Reads = dict[str, tuple[str, ...]]
Extras = dict[str, tuple[str, ...]]
LOSS = ("labels", "scale")


class WholeChunk(nn.Module):
    """A chunk's parts as one unit, wired as they are one by one. extras: how many arguments each part takes beside."""

    def __init__(self, parts: Mapping[str, nn.Module], reads: Reads, extras: Mapping[str, int]) -> None:
        super().__init__()
        self.parts, self.reads, self.extras = nn.ModuleDict(parts), reads, extras

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        given: dict[str, tuple[object, ...]] = {}
        for name, count in self.extras.items():
            given[name], rest = rest[:count], rest[count:]
        return evaluate(BuiltChunks(dict(self.parts.items()), {}, {}, self.reads), x, given)


@dataclass(frozen=True)
class DecoderModel:
    """A decoder of a config, any part of which any rank can build with the same values.

    >>> from ir.workload.config.load import load_config
    >>> model = DecoderModel(load_config("tiny-moe", {"num_hidden_layers": 2}), parts=True)
    >>> model.chunks, list(model.build(["l1", "head"]).units)
    (('embed', 'l0', 'l1', 'head'), ['l1.attn', 'l1.router', 'l1.experts', 'l1.add', 'head.norm', 'head.head'])
    """

    config: ModelConfig
    seed: int = 0  # of the first values
    dtype: torch.dtype = torch.float32  # of the parameters
    compute: torch.dtype | None = None  # of the activations; None: as the parameters
    parts: bool = False  # units are the model graph's parts ("l0.attn", "l0.router", "head.norm") instead of chunks
    attention: str = "flash"  # keeps no scores; "unfused" keeps them, "remade" has them made again in backward
    shares: Mapping[str, ParamShard] = field(
        default_factory=dict
    )  # of the parameters that tp or ep cuts, what a rank holds
    region: RankRegion = field(default_factory=RankRegion)  # the ranks that it shares the work of a part with
    spread: Mapping[str, ExpertGroup] = field(default_factory=dict)  # chunk → over which ranks its experts are, if so
    guide: ExpertRouterGuide = field(default_factory=ExpertRouterGuide)  # of its routers
    weights: HubCheckpoint | None = None  # first values, instead of drawn ones
    where: torch.device = HostDevice.torch  # who draws them
    stream: torch.dtype | None = None  # of the residual stream; None: as the activations

    def __post_init__(self) -> None:
        refuse_model(self.config)

    @property
    def chunks(self) -> tuple[str, ...]:
        """Embedding, decoder layers, MTP modules, head."""
        c = self.config
        return ("embed", *(f"l{i}" for i in range(c.layers)), *(f"mtp{k}" for k in range(c.mtp)), "head")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters in the model's own order, which is the canonical one."""
        built = self._build(self.chunks, None)
        return {n: tuple(p.shape) for n, p in built.params.items()}

    def build(self, chunks: Sequence[str]) -> BuiltChunks:
        return self._build(chunks, self.dtype)

    def _build(self, chunks: Sequence[str], dtype: torch.dtype | None) -> BuiltChunks:
        region = RankRegion() if dtype is None else self.region
        drawn = self.seed, self.config.init_std, dtype
        make = Params(*drawn, self.shares, region, self.weights, self.where, self.compute or self.dtype)
        units: dict[str, nn.Module] = {}
        extras: Extras = {}
        reads: Reads = {}
        ports: dict[str, Mapping[str, tuple[int, ...]]] = {}
        between: dict[str, ExpertAllToAll] = {}
        for name in chunks:
            parts, wired, wants = self._chunk(make, name)
            outer = self._before(name)
            if self.parts:
                units.update({f"{name}.{part}": module for part, module in parts.items()})
                extras.update({f"{name}.{part}": want for part, want in wants.items()})
                for part in parts:
                    reads[f"{name}.{part}"] = tuple(f"{name}.{r}" if r else outer for r in wired[part])
                if name in self.spread:
                    ports[f"{name}.router"] = expert_rows.ports(name, shared="shared" in parts)
                    between |= exchanges(name, self.spread[name])
            else:
                units[name] = WholeChunk(parts, wired, {part: len(want) for part, want in wants.items()})
                extras[name] = tuple(w for want in wants.values() for w in want)
                reads[name] = (outer,)
        return BuiltChunks(units, make.made, {n: w for n, w in extras.items() if w}, reads, ports, between)

    def _before(self, chunk: str) -> str:
        """The unit whose output a chunk reads: the last layer's for MTP and head, "" for none."""
        at = self.chunks.index(chunk)
        if chunk.startswith("mtp") or chunk == "head":
            at = self.config.layers + 1
        if at == 0:
            return ""
        name = self.chunks[at - 1]
        return f"{name}.{self._last(name)}" if self.parts else name

    def _last(self, chunk: str) -> str:
        if chunk == "embed":
            return "embed"
        return "add" if self.config.is_moe(int(chunk.removeprefix("l"))) else "mlp"

    def _chunk(self, make: Params, name: str) -> tuple[dict[str, nn.Module], Reads, Extras]:
        """Parts, the parts each reads ("": the chunk's input), and what each takes of the batch."""
        c = self.config
        stream = self.stream or self.compute or self.dtype
        if name == "embed":
            return {"embed": EmbedPart(c, make, stream)}, {"embed": ("",)}, {}
        if name == "head":
            norm = NormLayer(c, make, c.names.norm, c.hidden)
            head = TokenLoss(HeadPart(c, make), make.region)
            return {"norm": norm, "head": head}, {"norm": ("",), "head": ("norm",)}, {"head": LOSS}
        if name.startswith("l"):
            inner, wired = self._layer(make, int(name[1:]), "", name in self.spread)
            return inner, wired, self._routers(inner)
        layer = c.layers + int(name.removeprefix("mtp"))
        prefix = f"{c.names.layers}.{layer}."
        parts: dict[str, nn.Module] = {
            # Of the next tokens, also where their labels are masked (a prompt's): later tokens attend to what is here.
            "embed": EmbedPart(c, make, stream),
            "proj": NextTokenProjection(c, make, prefix),
        }
        inner, wired = self._layer(make, layer, "proj", name in self.spread)
        last = list(inner)[-1]
        parts |= inner
        parts["norm"] = NormLayer(c, make, f"{prefix}shared_head.norm", c.hidden)
        parts["head"] = NextTokenLoss(HeadPart(c, make), make.region)
        wired |= {"embed": (), "proj": ("", "embed"), "norm": (last,), "head": ("norm",)}
        return parts, wired, {"embed": ("following",), **self._routers(inner), "head": LOSS}

    def _routers(self, parts: Mapping[str, nn.Module]) -> Extras:
        return {"router": NUMBER} if self.guide.active and "router" in parts else {}

    def _layer(self, make: Params, layer: int, reads: str, spread: bool) -> tuple[dict[str, nn.Module], Reads]:
        """A decoder layer that reads part `reads`. spread: its experts are on several ranks."""
        c, prefix = self.config, f"{self.config.names.layers}.{layer}."
        attention = LatentAttentionPart if c.mla else AttentionPart
        parts: dict[str, nn.Module] = {"attn": attention(c.at(layer), make, prefix, self.attention)}
        if not c.is_moe(layer):
            return parts | {"mlp": MlpPart(c, make, prefix)}, {"attn": (reads,), "mlp": ("attn",)}
        shared = ("shared",) if c.moe and c.moe.shared_ffn else ()
        if spread:
            parts["router"] = ExpertParallelRouter(c, make, prefix, layer, self.guide)
            parts["experts"] = ExpertParallelExperts(Experts(c, make, prefix), self.region.etp)
            parts |= {
                s: FeedForwardLayer(c, make, f"{prefix}mlp.shared_experts.", moe_of(c).shared_ffn) for s in shared
            }
            parts["add"] = ExpertParallelAdd(c)
        else:
            parts["router"] = ExpertRouter(c, make, prefix, layer, self.guide)
            parts["experts"] = LocalExperts(c, make, prefix, ahead=self.guide.ahead)
            parts |= {s: SharedExperts(c, make, prefix) for s in shared}
            parts["add"] = ExpertAdd()
        wired: Reads = {"attn": (reads,), "router": ("attn",), **dict.fromkeys(("experts", *shared), ("router",))}
        wired["add"] = ("experts", *shared, "attn")
        return parts, {p: expert_rows.reads(p, r) for p, r in wired.items()} if spread else wired


def refuse_model(c: ModelConfig) -> None:
    """Raise PiperError for a model without a reference module."""
    refused = partial(PiperError, ErrorKind.MODEL, file=c.source)
    if c.model_type in FORMS:
        message = f"{c.model_type} is predicted, but has no reference module to run"
        fix, allowed = "model.module, with the class itself", sorted(ROWS.keys() - FORMS)
        raise refused(message, key="model_type", allowed=allowed, suggestion=fix)
    if c.mtp > 1:
        message = f"{c.mtp} prediction modules behind each other are predicted, and not run"
        fix = "model.num_nextn_predict_layers = 1"
        raise refused(message, key="num_nextn_predict_layers", allowed="0, 1", suggestion=fix)
    if not c.rope and not c.positions:
        message = "no reference module without rotary or learned positions: attention biases (ALiBi) are not built"
        raise refused(message, key="attn_config.alibi", allowed="false, with learned_pos_emb = true")
    dropouts = {"attention": c.attn_dropout, "hidden": c.hidden_dropout, "embedding": c.embed_dropout}
    if on := [name for name, p in dropouts.items() if p]:
        keys = {"gpt2": "attn_pdrop = resid_pdrop = embd_pdrop", "mpt": "emb_pdrop = resid_pdrop"}
        message = f"dropout ({', '.join(on)}) cannot be compared between plans, so `run` has none"
        fix = f"model.{keys.get(c.model_type, 'attention_dropout')} = 0"
        raise refused(message, key="model.config", suggestion=fix)
