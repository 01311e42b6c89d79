"""The ends of the model: embedding, final norm, head with its loss, and how an MTP module joins its two inputs."""

from __future__ import annotations

from ir.model import kernels as k
from ir.model.kernels import Linear
from ir.model.part import Inline, PartWork, Saved
from ir.model.region import all_reduce, enter
from ir.model.setting import Setting
from ir.model.stream import normed, stats
from ir.ops import Pass
from ir.work import CommKind, Message


def embed(s: Setting) -> PartWork:
    """Word (and learned position) embeddings. Vocabulary-parallel: each device looks up its own words, then they sum.

    Its weight gradient is first made whole, in the parameters' format, then added to the accumulated one: a transient
    as large as the table (seen in SimuMax's snapshots). Positions are the same in every sequence: their gradient is the
    output's summed over sequences, a tensor beside it.
    """
    c, h = s.config, s.config.hidden
    n, table = s.stream * h, c.vocab // s.layout.tp * h
    grads = s.precision.grads.bytes
    dense = table * s.precision.params.bytes
    masked = bool(c.embed_dropout)
    positions = n // s.shape.microbatch_size if c.positions else 0
    return PartWork(
        forward=(k.copies(s, "lookup", s.tokens * h), *((k.add(s, "positions", n),) if c.positions else ())),
        input_grad=(),
        weight_grad=(k.memory(s, "scatter_grads", 2 * s.tokens * h * s.wide + 2 * dense + 2 * table * grads),),
        out_bytes=n * s.wide,
        saved=(Saved("embedding_mask", n),) if masked else (),
        stash_bytes=(n + positions) * s.wide,
        inline=_sum_words(s, s.tokens * h * s.wide),
        forward_workspace=s.tokens * h * s.wide if s.layout.tp > 1 else 0,
        weight_grad_workspace=dense,
    )


def _sum_words(s: Setting, size: int) -> tuple[Inline, ...]:
    if s.sp:
        scatter = Inline(Pass.F, Message(CommKind.REDUCE_SCATTER, size, ("tp",)))
        return (scatter, Inline(Pass.W, Message(CommKind.ALL_GATHER, size, ("tp",))))
    return (all_reduce(Pass.F, size),) if s.layout.tp > 1 else ()


def final_norm(s: Setting) -> PartWork:
    """The norm before the head."""
    n = s.stream * s.config.hidden
    return PartWork(
        forward=(k.norm_forward(s, "final_norm", n),),
        input_grad=(k.norm_backward(s, "final_norm_backward", n),),
        weight_grad=(),
        out_bytes=n * s.wide,
        saved=(stats(s),),
    )


def skip(s: Setting) -> PartWork:
    """A stage without layers: what comes in goes on, and its gradient back."""
    return PartWork(forward=(), input_grad=(), weight_grad=(), out_bytes=s.stream * s.config.hidden * s.wide)


def head(s: Setting) -> PartWork:
    """Logits and cross entropy. Not in fp8; the loss in fp32.

    As Megatron's vocabulary-parallel loss: logits are copied to fp32, where the softmax is taken in place and kept for
    backward; there it becomes the logits' gradient, in the activations' format. Three small all-reduces per token.
    (Plain PyTorch takes the softmax out of place: 4 bytes per logit more, in either pass.)
    """
    c, h = s.config, s.config.hidden
    out = Linear("lm_head", s.tokens, c.vocab // s.layout.tp, h, dtype=s.precision.activations)
    logits, wide = s.tokens * out.out, s.wide
    exact = max(4, wide)
    sums = tuple(all_reduce(Pass.F, s.tokens * exact) for _ in range(3)) if s.layout.tp > 1 else ()
    gathered = s.tokens * h * wide if s.sp else 0
    return PartWork(
        forward=(
            out.forward(s),
            k.memory(s, "logits_to_fp32", logits * (wide + exact)),
            # Read for the maximum; read and written for exp and sum; read and written to normalise.
            k.memory(s, "softmax", logits * 5 * exact),
        ),
        input_grad=(
            k.memory(s, "softmax_backward", logits * (3 * exact + wide)),
            out.input_grad(s),
        ),
        weight_grad=k.weight_grad(s, out),
        out_bytes=s.tokens * exact,
        saved=(Saved("softmax", logits * exact, Pass.I),),
        stash_bytes=k.stash(s, out),
        inline=(*enter(s, h), *sums),
        forward_workspace=logits * wide + gathered,
        input_grad_workspace=gathered,
        weight_grad_workspace=gathered,
        model_flops=2 * s.shape.tokens * h * c.vocab,
    )


def join(s: Setting) -> PartWork:
    """An MTP module's entrance: norm the hidden state and the next token's embedding, project both together to h."""
    h = s.config.hidden
    n = s.stream * h
    proj = Linear("eh_proj", s.stream, h, 2 * h)
    return PartWork(
        forward=(k.norm_forward(s, "enorm_hnorm", 2 * n), *k.cast(s, "joined", 2 * n), proj.forward(s)),
        input_grad=(*k.input_grad(s, proj), k.norm_backward(s, "enorm_hnorm_backward", 2 * n)),
        weight_grad=k.weight_grad(s, proj),
        out_bytes=n * s.wide,
        saved=(normed(s, "joined", 2 * n), stats(s, norms=2)),
        stash_bytes=k.stash(s, proj),
        forward_workspace=2 * n * s.wide,
        input_grad_workspace=2 * n * s.wide,
        model_flops=2 * s.shape.tokens * 2 * h * h,
    )
