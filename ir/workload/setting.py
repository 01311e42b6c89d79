"""What a part's work depends on beside the part: layout, batch shape, number formats; whether they go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from math import gcd

from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.core.limits import divisors
from ir.core.work import DType
from ir.workload.config.spec import AttentionNormKind, ModelConfig, NormLayerKind
from ir.workload.part import PartLayout

_VOCABULARY, _STRETCHES = "vocabulary", "equal stretches of each sequence"


class AttentionKind(StrEnum):
    """How scores are treated: never stored, or stored for backward."""

    FLASH = "flash"
    UNFUSED = "unfused"


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """One microbatch of one data-parallel replica: sequences, and tokens of each. encoder_seq_len: of those that an
    encoder reads, 0 where it reads as many or there is none beside a decoder.
    """

    microbatch_size: int = 1
    seq_len: int = 4096
    encoder_seq_len: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch, over all its devices."""
        return self.microbatch_size * self.seq_len

    def encoded(self) -> MicrobatchShape:
        """What the encoder reads."""
        return MicrobatchShape(self.microbatch_size, self.encoder_seq_len or self.seq_len)


@dataclass(frozen=True, slots=True)
class ModelPrecision:
    """Number formats. compute: of matrix products; dispatch, combine: of tokens on their way to and from experts;
    optimizer: of moments and master weights; gather, reduce: of parameters and gradients between replicas. updated: of
    parameters that replicas keep whole and an update of others' sends them (ZeRO-1 and 2); left out, as gathered. No
    kernel feels it, so that a profile's classes do not name it. residual: of the residual stream, where it is wider
    than the activations. attention, head: of fused attention's products and of the one behind the last norm, where
    they are narrower.
    """

    compute: DType = DType.BF16
    dispatch: DType = DType.BF16
    combine: DType = DType.BF16
    params: DType = DType.BF16
    grads: DType = DType.FP32
    optimizer: DType = DType.FP32
    gather: DType = DType.BF16
    reduce: DType = DType.FP32
    updated: DType | None = field(default=None, repr=False)
    residual: DType | None = None
    attention: DType | None = None
    head: DType | None = None

    def __repr__(self) -> str:
        """What a profile's classes are named by: what is new is there only where a job has it."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        shown = (f"{name}={value!r}" for name, value in told.items() if value is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def of(cls, compute: DType, residual: DType | None = None) -> ModelPrecision:
        """The usual companions of a compute format. residual: of a wider stream.

        >>> ModelPrecision.of(DType.FP32).combine
        <DType.FP32: 'fp32'>
        """
        wide = _activations(compute)
        grads = wide if wide in (DType.FP32, DType.FP64) else DType.FP32
        return cls(compute, wide, wide, wide, grads, grads, wide, grads, residual=residual)

    def sync_bytes(self, whole: bool) -> tuple[int, int]:
        """Bytes per element of reductions and gathers; whole: of parameters that replicas keep so.

        >>> ModelPrecision(params=DType.FP32, updated=DType.FP32).sync_bytes(whole=True)
        (4, 4)
        """
        return self.reduce.bytes, (self.updated if whole and self.updated else self.gather).bytes

    @property
    def activations(self) -> DType:
        """Of norms' output and attention: fp8 is for matrix products and what they read, only."""
        return _activations(self.compute)

    @property
    def stream(self) -> DType:
        """Of the residual stream.

        >>> ModelPrecision().stream, ModelPrecision(residual=DType.FP32).stream
        (<DType.BF16: 'bf16'>, <DType.FP32: 'fp32'>)
        """
        return self.residual or self.activations


def _activations(compute: DType) -> DType:
    return DType.BF16 if compute is DType.FP8 else compute


class TokenLossKind(StrEnum):
    """What cross entropy keeps of the logits.

    parallel: a copy in fp32, whose softmax is taken in place (Megatron's, over a divided vocabulary). plain: the same
    out of place, beside the logits, as PyTorch code does. torch: torch.nn.functional.cross_entropy of such a copy: the
    softmax's logarithm, beside which backward has two tensors more. fused: the logits as they are, and a number per
    token. returned: the same by a compiled graph that gives the logits back, too, for whose own gradient autograd makes
    zeros, which are added.
    """

    PARALLEL = "parallel"
    PLAIN = "plain"
    TORCH = "torch"
    FUSED = "fused"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class KernelStyle:
    """How a framework writes what a model's equations leave open; by default as Megatron with fused kernels.

    eager: rope and activation are separate operations, each of whose results stays for backward. keep_gathered: what
    sequence parallelism gathers stays for backward. loss_vectors: kernels around the loss with a number per token.
    op_by_op: RMSNorm (in fp32), rope, activations and dropout are the operations that transformers' code names, a
    kernel each or several, and what autograd saves of them stays.
    grouped: a device's experts are one product, not one after the other. whole_logits: tensor-parallel ranks gather the
    logits, and each has the loss of all of them. stops_early: a layer that is recomputed is so up to the last value
    that backward reads, without its last product. masked: attention is given its mask as a tensor, keys and values for
    each head of queries: its kernels work on whole squares of scores. awaits_experts: nothing of a microbatch is
    computed beside its own all-to-alls. fused_experts: their first product makes the activation.
    """

    loss: TokenLossKind = TokenLossKind.PARALLEL
    eager: bool = False
    keep_gathered: bool = False
    loss_vectors: int = 0
    op_by_op: bool = False
    grouped: bool = True
    whole_logits: bool = False
    stops_early: bool = False
    masked: bool = False
    awaits_experts: bool = field(default=False, repr=False)
    fused_experts: bool = field(default=False, repr=False)


FUSED_STYLE = KernelStyle()


@dataclass(frozen=True, slots=True)
class PartSetting:
    """All that a part's work depends on, and the sizes every builder asks for. Tokens and bytes are of one device."""

    config: ModelConfig
    layout: PartLayout
    shape: MicrobatchShape
    precision: ModelPrecision
    attention: AttentionKind = AttentionKind.FLASH
    style: KernelStyle = FUSED_STYLE

    @property
    def tokens(self) -> int:
        """Tokens inside a tensor-parallel region: each of its devices sees them all."""
        return self.shape.tokens // self.layout.cp

    @property
    def stream(self) -> int:
        """Tokens outside: of the residual stream, norms, router. Sequence parallelism divides them."""
        return self.tokens // self.layout.tp if self.sp else self.tokens

    @property
    def encoder(self) -> PartSetting:
        """The same on the encoder's tokens."""
        return replace(self, shape=self.shape.encoded())

    @property
    def sp(self) -> bool:
        """Whether sequence parallelism divides anything."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    @property
    def wide(self) -> int:
        """Bytes of an activation outside matrix products, but for the residual stream."""
        return self.precision.activations.bytes

    @property
    def stream_wide(self) -> int:
        """Bytes of an element of the residual stream."""
        return self.precision.stream.bytes

    @property
    def streams(self) -> int:
        """How many of them there are."""
        return max(1, self.config.streams)

    @property
    def autocast(self) -> bool:
        """Whether norms give the residual stream's format, and each linear casts for itself what it reads: what a wider
        stream is where operations are those of transformers' code, under torch.autocast.
        """
        return self.style.op_by_op and self.stream_wide > self.wide

    @property
    def written_norms(self) -> bool:
        """Whether norms are operations of their own; LayerNorm is one kernel in PyTorch, too."""
        return self.style.op_by_op and self.config.norm is NormLayerKind.RMS

    @property
    def fp8(self) -> bool:
        """Whether matrix products run in fp8."""
        return self.precision.compute is DType.FP8

    @property
    def picked(self) -> int:
        """Keys that a query attends to at most, where an indexer picks them and kernels read no others; 0: any."""
        indexer, reads_all = self.config.indexer, self.style.masked or self.attention is AttentionKind.UNFUSED
        return 0 if indexer is None or reads_all else indexer.top_k

    def cached(self, elements: int) -> int:
        """Bytes of a linear's input (or output gradient) as its weight gradient reads it.

        In fp8 with one fp32 scale per 128 elements, as DeepSeek-V3 stores them (arXiv:2412.19437, section 3.3.2).
        """
        return with_scales(elements, DType.FP8) if self.fp8 else elements * self.wide


def with_scales(elements: int, dtype: DType) -> int:
    """Bytes of a tensor with its quantisation scales: fp8 carries an fp32 scale per 128 elements.

    >>> with_scales(128, DType.FP8), with_scales(128, DType.BF16)
    (132, 256)
    """
    return elements * dtype.bytes + (4 * -(-elements // 128) if dtype is DType.FP8 else 0)


@cache
def attention_of(name: str) -> AttentionKind:
    """The attention a job names.

    Raises PiperError (model) for an unknown one.
    """
    known = list(AttentionKind)
    if name not in known:
        message, near = f"unknown attention {name!r}", nearest(name, known)
        raise PiperError(ErrorKind.MODEL, message, key="model.attention", allowed=known, suggestion=near)
    return AttentionKind(name)


def shares_kv_heads(c: ModelConfig, tp: int) -> bool:
    """Whether several of tp ranks have one KV head. Each makes an equal share of all queries', keys' and values'
    features then, and gathers the others', as Megatron-Core does (transformer/attention.py).

    >>> from ir.workload import load_config
    >>> [shares_kv_heads(load_config("llama3-8b"), tp) for tp in (8, 12, 16, 24)]
    [False, False, True, False]
    """
    if c.mla or c.compressed or c.heads % tp:  # what has no heads, a captured module or a recurrent one, shares none
        return False
    return tp > c.kv_heads and tp % c.kv_heads == 0


def check_setting(config: ModelConfig, layout: PartLayout, shape: MicrobatchShape, ranks: int = 0) -> None:
    """Refuse sizes that do not divide, naming the job's key and the nearest size that does.

    ranks: tp·cp·dp, where the number of GPUs is given: a size that is named divides them, too.

    >>> from ir.workload import load_config
    >>> check_setting(load_config("llama3-8b"), PartLayout(tp=64), MicrobatchShape())
    Traceback (most recent call last):
    ir.core.errors.PiperError: parallel.tp: tp = 64 does not divide llama3-8b's attention heads = 32
    allowed: divisors of 32
    fix: tp = 32
    """
    for axis, by, what, size in _divided(config, layout, shape):
        if size % by:
            raise uneven(axis, by, what, size, _nearest(config, layout, shape, axis, size, ranks))
    _check_kinds(config, layout, shape)
    _check_encoder(config, layout, shape)


def _divided(c: ModelConfig, layout: PartLayout, shape: MicrobatchShape) -> Iterator[tuple[str, int, str, int]]:
    """(axis, what divides, words, what is divided), in the order of their refusals."""
    moe, m, tp, cp = c.moe, c.mixer, layout.tp, layout.cp
    attends = m is None or any(c.attends(i) for i in range(c.layers))
    mine = f"{c.source}'s"
    yield "tp", tp, f"{mine} attention heads", c.heads if attends else 0
    kv = c.heads if c.mla or c.compressed else c.kv_heads
    few = shares_kv_heads(c, tp) and c.form.qk_over is not AttentionNormKind.HEADS and not c.encoder
    yield "tp", tp, f"{mine} KV heads", (tp if few else kv) if attends else 0
    yield "tp", tp, f"features of {mine} KV heads", kv * gcd(c.qk_dim, c.v_dim) if few and attends else 0
    yield "tp", tp, f"{mine} groups of heads in the output projection", c.compressed.out_groups if c.compressed else 0
    yield "tp", tp, f"{mine} {_VOCABULARY}", c.vocab
    yield "tp", tp, f"{mine} MLP width", c.ffn if any(c.has_mlp(i) for i in range(c.layers)) else 0
    groups, each = "groups of recurrent heads", "recurrent heads"
    if m is not None and not m.state:
        groups = each = "convolved features"
    yield "tp", tp, f"{mine} {groups}", m.groups if m else 0
    yield "tp", tp, f"{mine} shared experts' width", moe.shared_ffn if moe else 0
    yield "ep", layout.ep, f"{mine} experts", moe.experts if moe else 0
    yield "etp", layout.etp, f"{mine} expert width", moe.ffn if moe else 0
    if m is not None:
        yield "cp", cp, f"{mine} {each} of a tensor-parallel rank", m.heads // tp
    if layout.cp_heads and attends:
        heads, kv = c.heads // tp, (c.heads if c.mla else c.kv_heads) // tp
        repeated = kv < cp and cp % max(kv, 1) == 0  # each goes to several ranks, as DeepSpeed-Ulysses' users have it
        yield "cp", cp, f"{mine} {'' if repeated else 'KV '}heads of a tensor-parallel rank", heads if repeated else kv
    if cp > 1:  # the causal mask's work is even where each has two: the i-th, the i-th to last
        yield "cp", 2 * cp, _STRETCHES, shape.seq_len
    if layout.sequence_parallel:
        yield "tp", tp, "the tokens that sequence_parallel shares out", shape.seq_len // cp
    if layout.sequence_parallel and c.encoder:
        yield "tp", tp, "the encoder's tokens that sequence_parallel shares out", shape.encoded().seq_len


def _nearest(c: ModelConfig, layout: PartLayout, shape: MicrobatchShape, axis: str, size: int, ranks: int) -> int:
    """The largest number of ranks below an axis' own that divides `size`, all else that it has to, and the GPUs."""
    own = {a: getattr(layout, a) for a in ("tp", "cp", "ep", "etp")}
    beside = own[{"tp": "cp", "cp": "tp", "ep": "etp", "etp": "ep"}[axis]]
    for n in reversed(divisors(size)):
        if n >= own[axis] or ranks % (n * beside):
            continue
        tp, cp, ep, etp = (own | {axis: n}).values()
        other = replace(layout, tp=tp, cp=cp, ep=ep, etp=etp)
        if all(whole % by == 0 for a, by, _, whole in _divided(c, other, shape) if a == axis):
            return n
    return 1


def _check_encoder(config: ModelConfig, layout: PartLayout, shape: MicrobatchShape) -> None:
    if shape.encoder_seq_len and not config.encoder:
        message = f"{config.source} has no encoder beside a decoder"
        raise PiperError(ErrorKind.MODEL, message, key="model.encoder_seq_len", suggestion="leave it out")
    if config.encoder and layout.cp > 1:
        raise job_error("parallel.cp", "context parallelism of two towers is not built", "cp = 1", "1")


def _check_kinds(config: ModelConfig, layout: PartLayout, shape: MicrobatchShape) -> None:
    if config.moe is None and layout.ep * layout.etp > 1:
        raise job_error("parallel.ep", f"no layer of {config.source} has experts", "ep = 1, etp = 1", "1")
    if config.moe and layout.tp > 1 and not layout.sequence_parallel:
        # Without it every tp rank holds the same tokens and would send each of them; Megatron refuses it too.
        message = "experts with tp > 1 need sequence parallelism"
        raise job_error("parallel.sequence_parallel", message, "true", "true")
    if (config.indexer or config.compressed) and layout.cp_heads:
        message = "keys are picked for a query, not for a head: ranks cannot divide heads of whole sequences"
        raise job_error("parallel.cp_comm", message, "all_gather", "all_gather")
    for key in ("seq_len", "encoder_seq_len"):
        if config.positions and (given := getattr(shape, key)) > config.max_positions:
            message = f"{given} tokens, but {config.source} has learned positions for {config.max_positions}"
            known = {"mpt": "max_seq_len", "gpt2": "n_positions", "gpt_bigcode": "n_positions"}
            more = known.get(config.model_type, "max_position_embeddings")
            fix = f"{key} = {config.max_positions}, or more positions ({more})"
            raise PiperError(ErrorKind.MODEL, message, key=f"model.{key}", suggestion=fix)


def uneven(axis: str, by: int, what: str, size: int, near: int | None = None) -> PiperError:
    """The refusal of a size that ranks do not divide. near: the number of them to name, else the largest that does."""
    near = max((d for d in divisors(size) if d <= by), default=1) if near is None else near
    message, fix, allowed = f"{axis} = {by} does not divide {what} = {size}", f"{axis} = {near}", f"divisors of {size}"
    if _VOCABULARY in what:
        fix += f", or pad it: vocab_size = {-(-size // by) * by}"
    if what == _STRETCHES:
        message, allowed = f"cp = {by // 2} needs {by} {what}, and seq_len = {size}", f"a seq_len divisible by {by}"
    return job_error(f"parallel.{axis}", message, fix, allowed)
