"""The ends of the model: embedding, final norm, head with its loss, and how an MTP module joins its two inputs."""

from dataclasses import dataclass, replace

from ir.core.ops import Pass
from ir.core.work import LOSS, Kernel, MessageKind, Work
from ir.workload.part import PartCollective, PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel
from ir.workload.parts.region import all_reduce, enter, gather, inline
from ir.workload.parts.residual import linears_narrow, linears_widen, narrowed, stats, stream_normed, written
from ir.workload.parts.streams import StreamMixing
from ir.workload.setting import PartSetting, TokenLossKind

ID_BYTES = 8  # of a token's number
_FUSED = frozenset({TokenLossKind.FUSED, TokenLossKind.RETURNED})


def embed(s: PartSetting) -> PartWork:
    """Word (and learned position) embeddings. Vocabulary-parallel: each device looks up its own words, then they sum.

    Its weight gradient is first made whole, in the parameters' format, then added to the accumulated one: a transient
    as large as the table (seen in SimuMax's snapshots). Positions are the same in every sequence: their gradient is the
    output's summed over sequences, a tensor beside it. Words are looked up and summed in the residual stream's
    format, unless that is wider than the table's and the products': as Megatron's are.
    """
    c, h = s.config, s.config.hidden
    n, table = s.stream * h, c.vocab // s.layout.tp * h
    grads = s.precision.grads.bytes
    dense = table * s.precision.params.bytes
    masked, scaled, again = bool(c.embed_dropout), c.form.multiplied("embedding"), c.form.embed_norm
    wide, looked = s.stream_wide, min(s.stream_wide, max(s.wide, s.precision.params.bytes))
    one, m = 2 * n * wide, s.streams  # reads the stream, and writes it
    spread = (k.memory(s, "streams.spread", (m + 1) * n * wide),) if c.streams else ()
    scale = (k.memory(s, "embedding_scale", one),) if scaled else ()
    widen = (k.memory(s, "embedding.widen", n * (looked + wide)),) if looked < wide else ()
    norm, back = k.memory(s, "embedding_norm", one), k.memory(s, "embedding_norm_backward", one + n * wide)
    positions = n // s.shape.microbatch_size if c.positions else 0
    return PartWork(
        forward=(
            k.memory(s, "lookup", 2 * s.tokens * h * looked),
            *widen,
            *((k.memory(s, "positions", one + n * wide),) if c.positions else ()),
            *((k.memory(s, "token_types", one + n * wide),) if c.form.token_types else ()),
            *scale,
            *((norm,) if again else ()),
            *spread,
        ),
        input_grad=(),
        weight_grad=(
            *spread,
            *((back,) if again else ()),
            *scale,
            *widen,
            k.memory(s, "scatter_grads", 2 * s.tokens * h * looked + 2 * dense + 2 * table * grads),
        ),
        out_bytes=n * wide * m,
        saved=(
            SavedBuffer("ids", ID_BYTES * s.tokens),
            *((SavedBuffer("embedding_mask", n),) if masked else ()),
            *((SavedBuffer("embedding", n * wide), stats(s)) if again else ()),
        ),
        stash_bytes=(n + positions) * wide,
        inline=_sum_words(s, s.tokens * h * looked),
        forward_workspace=s.tokens * h * looked if s.layout.tp > 1 or widen else 0,
        weight_grad_workspace=dense,
    )


def _sum_words(s: PartSetting, size: int) -> tuple[PartCollective, ...]:
    if s.sp:
        scatter = inline(Pass.F, MessageKind.REDUCE_SCATTER, size, "tp")
        return scatter, inline(Pass.W, MessageKind.ALL_GATHER, size, "tp")
    return (all_reduce(Pass.F, size),) if s.layout.tp > 1 else ()


def final_norm(s: PartSetting) -> PartWork:
    """The norm before the head."""
    n, mix = s.stream * s.config.hidden, StreamMixing.of(s, ends=True)
    return PartWork(
        forward=(*mix.before, k.norm_forward(s, "final_norm", n, stream=True), *linears_narrow(s, "final", n, 1)),
        input_grad=(
            *linears_widen(s, "final", n, 1),
            k.norm_backward(s, "final_norm_backward", n, stream=True),
            *mix.behind,
        ),
        weight_grad=mix.weight_grad,
        out_bytes=n * s.wide,
        saved=(*mix.saved, stats(s), *written(s, n, behind=True, stream=True)),
        forward_workspace=n * s.stream_wide if s.autocast else 0,
        input_grad_workspace=mix.workspace,
        model_flops=mix.model_flops,
    )


def transform(s: PartSetting) -> PartWork:
    """Between an encoder's stream and its logits: a dense layer, its activation, a norm; and where sentences are told
    apart, the first token's dense layer and two logits. Whole on every device.
    """
    h, b = s.config.hidden, s.shape.microbatch_size
    n, dense = s.stream * h, LinearKernel("transform", s.stream, h, h)
    pooled = (LinearKernel("pooler", b, h, h), LinearKernel("sentences", b, 2, h)) if s.config.form.pooled else ()
    return PartWork(
        forward=(
            *narrowed(s, "input", n),
            dense.forward(s),
            k.copies(s, "transform_activation", n),
            k.norm_forward(s, "transform_norm", n),
            *k.forward(s, *pooled),
        ),
        input_grad=(
            *k.input_grad(s, *pooled),
            k.norm_backward(s, "transform_norm_backward", n),
            k.memory(s, "transform_activation_backward", 3 * n * s.wide),
            *k.input_grad(s, dense),
            *narrowed(s, "input.grad", n),
        ),
        weight_grad=k.weight_grad(s, dense, *pooled),
        out_bytes=n * s.wide,
        saved=(
            *((SavedBuffer("input", n * s.wide),) if s.stream_wide > s.wide else ()),
            SavedBuffer("transform", n * s.wide, Pass.I),
            SavedBuffer("activated", n * s.wide, Pass.I),
            stats(s),
        ),
        stash_bytes=k.stash(s, dense, *pooled),
        input_grad_workspace=n * s.wide,
        model_flops=2 * s.shape.tokens * h * h + sum(x.flops for x in pooled),
    )


def skip(s: PartSetting) -> PartWork:
    """A stage without layers: what comes in goes on, and its gradient back."""
    size = s.stream * s.config.hidden * s.stream_wide * s.streams
    return PartWork(forward=(), input_grad=(), weight_grad=(), out_bytes=size)


def head(s: PartSetting) -> PartWork:
    """Logits and cross entropy. In fp8 only where asked for; the loss in fp32. Three small all-reduces per token where
    it is divided.

    Whole logits come from one gather, rank by rank, and are copied to lie token by token; of their gradient a rank
    goes on with its own columns.
    """
    c, h = s.config, s.config.hidden
    own = s.precision.activations if s.precision.head is None else None
    out = LinearKernel("lm_head", s.tokens, c.vocab // s.layout.tp, h, dtype=own)
    cast = k.cast(s, "final", s.stream * h) if own is None else ()
    divided = s.layout.tp > 1 and not s.style.whole_logits
    read = s.tokens * (out.out if divided else c.vocab)
    loss, exact = _cross_entropy(s, read), max(4, s.wide)
    sums = tuple(all_reduce(Pass.F, s.tokens * exact) for _ in range(3)) if divided else ()
    whole = read * s.wide if s.layout.tp > 1 and not divided else 0
    joined = (_loss(s, "joined", 2 * whole),) if whole else ()
    gathered = s.tokens * h * s.wide if s.sp else 0
    turned = s.style.loss is TokenLossKind.PARALLEL and exact == s.wide and not whole
    cap, size = bool(c.form.logit_cap), read * s.wide
    between = cap or c.form.multiplied("logits")  # a tanh, or a number that multiplies them
    moved = [_loss(s, "logits", n * size) for n in ((2, 3) if cap else (2, 2))] if between else []
    kept = SavedBuffer("capped", size if cap and s.style.loss not in _FUSED else 0, Pass.I)
    return PartWork(
        forward=(*cast, out.forward(s), *joined, *moved[:1], *loss.forward, *_vectors(s, s.tokens * exact)),
        input_grad=(*loss.backward, *moved[1:], *k.input_grad(s, out)),
        weight_grad=k.weight_grad(s, out),
        out_bytes=s.tokens * exact,
        # In the logits' own format the softmax becomes their gradient where it lies, and stays until W.
        saved=(
            SavedBuffer("softmax", loss.kept, Pass.W if turned else Pass.I),
            SavedBuffer("labels", ID_BYTES * s.tokens, Pass.I),
            *((kept,) if kept.bytes else ()),
        ),
        stash_bytes=0 if turned else k.stash(s, out),
        inline=(*enter(s, h), *sums, *(gather(whole) if whole else ())),
        forward_workspace=max(loss.beside, 2 * whole) + gathered,
        input_grad_workspace=gathered + loss.beside_back + whole,
        weight_grad_workspace=gathered,
        model_flops=2 * s.shape.tokens * h * c.vocab,
    )


@dataclass(frozen=True, slots=True)
class _CrossEntropy:
    """kept: bytes from forward to backward. beside: more of them while forward runs; beside_back: while backward does,
    beside the logits' gradient.
    """

    forward: Work
    backward: Work
    kept: int
    beside: int
    beside_back: int = 0


def _cross_entropy(s: PartSetting, logits: int) -> _CrossEntropy:
    """The loss behind the logits, and back to their gradient, which has their format.

    parallel: logits are copied to fp32, where the softmax is taken in place, kept, and turned into the gradient.
    plain: what is shifted by the maximum, exponentiated and normalised is a tensor beside the fp32 copy (Nanotron's
    _ShardedCrossEntropy). torch: softmax reads for its maximum, for its sum and to write; backward writes zeros and the
    labels' places, and reads that twice beside the softmax to write the copy's gradient. fused: one kernel reads
    logits, another reads them again and writes the gradient beside them (flash_attn.losses.cross_entropy, not in
    place). returned: that one reads zeros, too, which another kernel has written.
    """
    wide, exact = s.wide, max(4, s.wide)
    copy = _loss(s, "to_fp32", logits * (wide + exact))
    forward: Work
    backward: Work
    match s.style.loss:
        case TokenLossKind.FUSED:
            forward = (_loss(s, "cross_entropy", logits * wide),)
            backward = (_loss(s, "backward", 2 * logits * wide),)
            return _CrossEntropy(forward, backward, logits * wide, 0)
        case TokenLossKind.RETURNED:
            forward = (_loss(s, "cross_entropy", logits * wide),)
            backward = (_loss(s, "zeros", logits * wide), _loss(s, "backward", 3 * logits * wide))
            return _CrossEntropy(forward, backward, logits * wide, 0, logits * wide)
        case TokenLossKind.PLAIN:
            # The maximum reads; shift, exp and normalisation read and write; the sum reads.
            forward = (copy, *(_loss(s, f"softmax.{i}", logits * n * exact) for i, n in enumerate((1, 2, 2, 1, 2))))
            backward = (_loss(s, "backward", 2 * logits * exact), _loss(s, "from_fp32", copy.bytes))
            return _CrossEntropy(forward, backward, logits * exact, logits * (wide + exact))
        case TokenLossKind.TORCH:
            forward = (copy, _loss(s, "log_softmax", 4 * logits * exact))
            zeros, turned = _loss(s, "zeros", logits * exact), _loss(s, "backward", 4 * logits * exact)
            backward = (zeros, turned, _loss(s, "from_fp32", copy.bytes))
            beside = logits * (wide + exact), logits * (2 * exact - wide)
            return _CrossEntropy(forward, backward, logits * exact, *beside)
        case TokenLossKind.PARALLEL:
            # Read for the maximum; read and written for exp and sum; read and written to normalise.
            forward = (copy, _loss(s, "softmax", logits * 5 * exact))
            backward = (_loss(s, "backward", logits * (3 * exact + wide)),)
            return _CrossEntropy(forward, backward, logits * exact, logits * wide)


def _loss(s: PartSetting, label: str, moved: int) -> Kernel:
    """A kernel as the framework has it: no other traffic is to be put on top."""
    return k.memory(s, f"{LOSS}{label}", moved)


def _vectors(s: PartSetting, nbytes: int) -> Work:
    """Masks, gathers, sums and means around the loss, each reading and writing a number per token."""
    one = _loss(s, "vectors", 2 * nbytes)
    return (replace(one, count=s.style.loss_vectors),) if s.style.loss_vectors else ()


def join(s: PartSetting) -> PartWork:
    """An MTP module's entrance: norm the hidden state and the next token's embedding, project both together to h."""
    h = s.config.hidden
    n = s.stream * h
    proj = LinearKernel("eh_proj", s.stream, h, 2 * h)
    return PartWork(
        forward=(
            k.norm_forward(s, "enorm_hnorm", 2 * n, stream=True),
            *linears_narrow(s, "joined", 2 * n, 1),
            *k.cast(s, "joined", 2 * n),
            proj.forward(s),
            *narrowed(s, "proj", n),
        ),
        input_grad=(
            *narrowed(s, "proj.grad", n),
            *k.input_grad(s, proj),
            *linears_widen(s, "joined", 2 * n, 1),
            k.norm_backward(s, "enorm_hnorm_backward", 2 * n, stream=True),
        ),
        weight_grad=k.weight_grad(s, proj),
        out_bytes=n * s.stream_wide,
        saved=(stream_normed(s, "joined", 2 * n), stats(s, norms=2)),
        stash_bytes=k.stash(s, proj),
        # The norms' outputs stand beside the joined one while the projection's is not yet; so do their gradients.
        forward_workspace=n * s.wide,
        input_grad_workspace=n * s.wide,
        model_flops=2 * s.shape.tokens * 2 * h * h,
    )
