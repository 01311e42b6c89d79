"""What each part of a config's model costs and keeps on one device: the way in to the builders, one per kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType
from ir.workload.config.spec import ModelConfig
from ir.workload.part import Chunk, ExpertMessages, Part, PartLayout, PartWork, PlacedPart
from ir.workload.parts import ends, moe
from ir.workload.parts.attention.attention import attention as attention_work
from ir.workload.parts.attention.cross import cross
from ir.workload.parts.mixer import mixer
from ir.workload.parts.mlp import mlp, shared
from ir.workload.setting import (
    FUSED_STYLE,
    AttentionKind,
    KernelStyle,
    MicrobatchShape,
    ModelPrecision,
    PartSetting,
    attention_of,
)

# A part's name says what it is, in every chunk.
BUILDERS: Mapping[str, Callable[[PartSetting], PartWork]] = {
    "embed": ends.embed,
    "attn": attention_work,
    "cross": cross,
    "mixer": mixer,
    "mlp": mlp,
    "router": moe.router,
    "shared": shared,
    "experts": moe.experts,
    "add": moe.add,
    "proj": ends.join,
    "norm": ends.final_norm,
    "transform": ends.transform,
    "head": ends.head,
    "skip": ends.skip,
}


def part_work(
    config: ModelConfig,
    chunk: Chunk,
    part: Part,
    layout: PartLayout,
    shape: MicrobatchShape,
    precision: ModelPrecision,
    attention: str = AttentionKind.FLASH,
    style: KernelStyle = FUSED_STYLE,
) -> PartWork:
    """The work of one part for one microbatch on one device. Equal parts share one result.

    Raises PiperError (model): a part of no known kind.

    >>> from ir.workload import load_config, model_chunks
    >>> config = load_config("llama3-8b")
    >>> layer = model_chunks(config)[1]
    >>> work = part_work(config, layer, layer.parts[1], PartLayout(tp=2), MicrobatchShape(1, 4096), ModelPrecision())
    >>> [k.label for k in work.forward], work.out_bytes
    (['post_norm', 'gate_up_proj', 'swiglu', 'down_proj', 'residual'], 33554432)
    """
    if part.name not in BUILDERS:
        message = f"no builder for part {part.name!r} of chunk {chunk.name!r}"
        raise PiperError(ErrorKind.MODEL, message, key=f"{chunk.name}.{part.name}", allowed=sorted(BUILDERS))
    layer = chunk.tags.get("L")
    if config.encoder and (chunk.name == "embed" or (layer is not None and config.encodes(layer))):
        shape = shape.encoded()
    own = config.at(layer) if layer is not None else config
    return _build(part.name, PartSetting(own, layout, shape, precision, attention_of(attention), style))


@lru_cache(maxsize=4096)
def _build(name: str, setting: PartSetting) -> PartWork:
    return BUILDERS[name](setting)


@lru_cache(maxsize=4096)
def dispatch_bytes(
    config: ModelConfig, layout: PartLayout, shape: MicrobatchShape, precision: ModelPrecision
) -> ExpertMessages:
    """The messages between a router and its experts, and what they leave on a device.

    >>> from ir.workload import load_config
    >>> from ir.core.work import DType
    >>> fp8 = ModelPrecision(DType.FP8, dispatch=DType.FP8)
    >>> x = dispatch_bytes(load_config("deepseek-v3"), PartLayout(ep=64), MicrobatchShape(1, 4096), fp8)
    >>> x.dispatch.bytes == 4096 * 8 * (7168 + 4 * 56), x.dispatch.fanout, x.dispatch.nodes_limit
    (True, 8, 4)
    """
    return moe.exchange(PartSetting(config, layout, shape, precision))


@dataclass(frozen=True)
class ConfigModelWork:
    """Kernels, messages and bytes of a config's parts, for one microbatch shape and precision."""

    config: ModelConfig
    shape: MicrobatchShape
    precision: ModelPrecision
    attention: str = "flash"
    style: KernelStyle = FUSED_STYLE

    def work(self, entry: PlacedPart) -> PartWork:
        where, how = (self.config, entry.chunk, entry.part, entry.layout), (self.attention, self.style)
        return part_work(*where, self.shape, self.precision, *how)

    def messages(self, experts: PlacedPart) -> ExpertMessages:
        return dispatch_bytes(self.config, experts.layout, self.shape, self.precision)

    def sync_bytes(self, whole: bool = False) -> tuple[int, int]:
        return self.precision.sync_bytes(whole)

    def weight_formats(self, gathered: bool = False) -> tuple[DType, DType]:
        """That of weights, and of products: casts to fp8 are kernels beside each."""
        p = self.precision
        kept = p.gather if gathered else p.params
        return kept, kept if p.compute is DType.FP8 else p.compute
