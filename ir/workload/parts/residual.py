"""The residual stream: norms on it, what they leave behind, residual additions and dropout."""

from dataclasses import replace

from ir.core.ops import Pass
from ir.core.work import Kernel, Work
from ir.workload.config.spec import LayerNormPlace, NormLayerKind
from ir.workload.part import PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import beyond
from ir.workload.parts.region import leave
from ir.workload.parts.streams import StreamMixing
from ir.workload.setting import PartSetting


def normed(s: PartSetting, name: str, elements: int) -> SavedBuffer:
    """A norm's output, kept as the input of the linears behind it; "norm" makes it again from the norm's input."""
    again = (k.norm_forward(s, f"{name}.again", elements), *k.cast(s, name, elements))
    return SavedBuffer(name, s.cached(elements), Pass.W, ("norm", "operators"), again)


def stream_normed(s: PartSetting, name: str, elements: int, linears: int = 1) -> SavedBuffer:
    """The same of a norm of the residual stream. linears: that read it, each of which keeps its own under autocast."""
    copies = linears if s.autocast else 1
    cast = (*linears_narrow(s, name, elements, copies), *k.cast(s, name, elements))
    again = (k.norm_forward(s, f"{name}.again", elements, stream=True), *cast)
    return SavedBuffer(name, s.cached(elements) * copies, Pass.W, ("norm", "operators"), again)


def stats(s: PartSetting, name: str = "norm_stats", norms: int = 1) -> SavedBuffer:
    """Norms' fp32 statistics per token: mean and reciprocal deviation, or the latter alone."""
    return SavedBuffer(name, norms * s.stream * (8 if s.config.norm is NormLayerKind.LAYER else 4), Pass.I)


def written(s: PartSetting, elements: int, *, behind: bool = False, stream: bool = False) -> tuple[SavedBuffer, ...]:
    """What a norm written operation by operation keeps of so many elements beside its input and output: the input in
    fp32 (in place of the input, which the stream keeps), and what is weighed. behind: it is a branch's last, or
    the model's, which nothing makes again; of others this is made again with the output. stream: it reads the stream.
    """
    if not s.written_norms or not elements:
        return ()
    labels, end = ((), "_behind") if behind else (("norm", "operators"), "")
    read, made = k.read_by_norm(s, stream), k.normed_wide(s, stream)
    wide = SavedBuffer(f"norm_fp32{end}", elements * (max(4, read) - read), Pass.I, labels)
    return wide, SavedBuffer(f"norm_scaled{end}", elements * made, Pass.I, labels)


def branch(
    s: PartSetting, norm: str, inside: PartWork, grads: int, *, reads: int, own: bool = True, linears: int = 1
) -> PartWork:
    """A part that adds to the stream what is `inside` of it: with the norms, dropout and the addition at its ends.

    norm: the label of the norm that its linears read; own: False where that is another branch's. reads: features per
    token that sequence parallelism gathers for them. grads: bytes of gradients inside at their most; what `inside` says
    of its workspace in I stands beside them all the while. linears: that read the norm's output.
    """
    n, place, mix = s.stream * s.config.hidden, s.config.form.norms, StreamMixing.of(s)
    before, behind = own and place is not LayerNormPlace.BEHIND, place is not LayerNormPlace.BEFORE
    out = n * s.stream_wide * s.streams
    bare = place is LayerNormPlace.BEHIND  # linears read the stream, not what a norm gives
    return replace(
        inside,
        forward=(
            *mix.before,
            *((k.norm_forward(s, norm, n, stream=True),) if before else ()),
            *(narrowed(s, "normed", n, linears if s.autocast else 1) if bare or s.autocast else ()),
            *(k.cast(s, "normed", n) if own else ()),
            *inside.forward,
            *((k.norm_forward(s, f"{norm}_behind", n),) if behind else ()),
            *added(s),
        ),
        input_grad=(
            *(mix.unmixed or residual_backward(s)),
            *((k.norm_backward(s, f"{norm}_behind_backward", n),) if behind else ()),
            *inside.input_grad,
            *(linears_widen(s, "normed", n, linears) or (narrowed(s, "normed.grad", n) if bare else ())),
            *((k.norm_backward(s, f"{norm}_backward", n, stream=True),) if before else ()),
            *(mix.behind or (k.memory(s, "residual_backward", 3 * n * s.stream_wide),)),
        ),
        weight_grad=(*inside.weight_grad, *mix.weight_grad),
        out_bytes=out,
        saved=(*mix.saved, *_ends_saved(s, reads, linears, before, before + behind), *inside.saved, *mask(s)),
        inline=(*inside.inline, *leave(s, s.config.hidden)),
        input_grad_workspace=beyond(
            _grads(s, grads) + inside.input_grad_workspace + mix.workspace, out, inside.stash_bytes
        ),
        model_flops=inside.model_flops + mix.model_flops,
    )


def added(s: PartSetting) -> Work:
    """What a part gives, onto the residual stream, or into several."""
    return StreamMixing.of(s).mixed or (residual(s),)


def _ends_saved(s: PartSetting, reads: int, linears: int, before: bool, norms: int) -> tuple[SavedBuffer, ...]:
    """What a branch keeps at its ends: its linears' input, what sequence parallelism gathered of it beside this
    device's share, where it is kept, the statistics of its norms; of a norm behind them, what it read.

    Without a norm before them linears read the stream, which the chunk keeps; of a wider one, or in fp8, they keep a
    copy of their own. before: it has a norm there, not another branch.
    """
    n, place = s.stream * s.config.hidden, s.config.form.norms
    more = (s.tokens - s.stream) * reads if s.style.keep_gathered else 0
    if place is LayerNormPlace.BEHIND:
        copies = linears if s.autocast else int(s.fp8 or s.stream_wide > s.wide)
        read = (SavedBuffer("input_fp8" if s.fp8 else "input", s.cached(n) * copies),) if copies else ()
    else:
        read = (stream_normed(s, "normed", n, linears),) if before or s.autocast else ()
    return (
        *read,
        *((SavedBuffer("gathered", s.cached(more), Pass.W, ("norm", "operators")),) if more else ()),
        *((stats(s, norms=norms),) if norms else ()),
        *written(s, before * n, stream=True),
        *written(s, (norms - before) * n, behind=True),
        *((SavedBuffer("branch", n * s.wide, Pass.I),) if place is not LayerNormPlace.BEFORE else ()),
    )


def mask(s: PartSetting) -> tuple[SavedBuffer, ...]:
    """The dropout mask on the way back to the residual stream, one byte per element."""
    if not s.config.hidden_dropout:
        return ()
    return (SavedBuffer("dropout_mask", s.stream * s.config.hidden, Pass.I),)


def residual(s: PartSetting) -> Kernel:
    """Dropout (its mask written on the way) and the residual addition, in one kernel; operation by operation in two."""
    n, both = s.stream * s.config.hidden, 2 * s.stream_wide + s.wide
    if s.style.op_by_op and s.config.hidden_dropout:
        return k.several(s, "residual", n * (2 * s.wide + both + 1), 2)
    return k.memory(s, "residual", both * n + (n if s.config.hidden_dropout else 0))


def _grads(s: PartSetting, inner: int) -> int:
    """Bytes of gradients at their most between a residual branch's two ends. inner: of those inside of it.

    They stand beside the gradient that came, as dropout made it, sequence parallelism gathered it or products read it,
    and its fp8 copy. At the near end: the normed input's gradient, the input's, and its sum with the gradient that goes
    round.
    """
    whole, n = (t * s.config.hidden for t in (s.tokens, s.stream))
    came = whole if s.sp else n if s.config.hidden_dropout or s.stream_wide > s.wide else 0
    copy = s.cached(s.tokens * s.config.hidden) if s.fp8 else 0
    normed_grad = whole * k.normed_wide(s, stream=True)
    return came * s.wide + max(inner + copy, normed_grad + 2 * n * s.stream_wide)


def residual_backward(s: PartSetting) -> Work:
    """Dropout's backward; the addition itself passes gradients through, to the branch in its own format."""
    n = s.stream * s.config.hidden
    if s.config.hidden_dropout and not s.autocast:
        return (k.memory(s, "dropout_backward", n * (s.stream_wide + s.wide + 1)),)
    dropped = (k.memory(s, "dropout_backward", n * (2 * s.wide + 1)),) if s.config.hidden_dropout else ()
    return (*narrowed(s, "residual.grad", n), *dropped)


def narrowed(s: PartSetting, label: str, elements: int, linears: int = 1) -> Work:
    """The residual stream's format to that of products, or back; under autocast once for each linear."""
    one = k.memory(s, f"{label}.narrow", elements * (s.stream_wide + s.wide))
    return (replace(one, count=linears),) if s.stream_wide > s.wide else ()


def linears_narrow(s: PartSetting, label: str, elements: int, linears: int) -> Work:
    """What linears cast of a norm's output under autocast, each for itself."""
    return narrowed(s, label, elements, linears) if s.autocast else ()


def linears_widen(s: PartSetting, label: str, elements: int, linears: int) -> Work:
    """The way back: each linear's gradient cast, and added to the others'."""
    if not s.autocast:
        return ()
    one = k.memory(s, f"{label}.sum", 3 * elements * s.stream_wide)
    sums = (replace(one, count=linears - 1),) if linears > 1 else ()
    return (*narrowed(s, f"{label}.grad", elements, linears), *sums)
