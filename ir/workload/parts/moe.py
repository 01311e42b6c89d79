"""Parts "router", "experts" and "add" of a mixture of experts, and the messages between them."""

from ir.core.ops import Pass
from ir.core.work import CAST, EXPERTS, Kernel, Message, MessageKind, Work
from ir.workload.config.spec import ExpertConfig, LayerActivation
from ir.workload.part import ExpertMessages, PartLayout, PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel, beyond
from ir.workload.parts.mlp import activation, activation_backward, compacted, inner_grads, inner_saved
from ir.workload.parts.region import expert_tensor
from ir.workload.parts.residual import (
    linears_narrow,
    linears_widen,
    mask,
    residual_backward,
    stats,
    stream_normed,
    written,
)
from ir.workload.parts.streams import StreamMixing
from ir.workload.setting import PartSetting, with_scales

# What transformers' experts launch around their products, operation by operation (integrations/moe.py, grouped_mm),
# forward and backward. Scores are cast, made shares, chosen and divided. Rows are sorted, their tokens and weights
# picked, counted, summed up; they come back weighed, put in order, summed by token. Backward adds what was picked to
# zeros, and sorts first: a dozen kernels each time.
_PICKS = 12
_CHOSEN, _SORTED, _PUT_BACK = (5, 9), (7, 2 * _PICKS), (5, 4 + _PICKS)


def exchange(s: PartSetting) -> ExpertMessages:
    """The messages of a layer under a layout: group ("ep",), top-k copies, DeepSeek's limit of nodes per token.

    Numbers of rows go to all ranks that hold an expert, of which etp hold columns of one.
    """
    moe, h = _moe(s), s.config.expert_hidden
    copies = s.stream * moe.top_k
    there = with_scales(copies * h, s.precision.dispatch)
    back = with_scales(copies * h, s.precision.combine)
    kind, axes, etp = MessageKind.ALL_TO_ALL, ("ep",), s.layout.etp
    return ExpertMessages(
        Message(kind, 8 * moe.experts * etp, ("etp", "ep") if etp > 1 else axes),
        Message(kind, there, axes, moe.top_k, moe.top_groups),
        Message(kind, back, axes, moe.top_k, moe.top_groups),
        there,
        with_scales(s.stream * h, s.precision.combine),
    )


def router(s: PartSetting) -> PartWork:
    """The norm after attention, router logits, top-k. It passes on the normed tokens.

    Where experts read the stream beside attention, through one norm, that norm and its output are attention's.
    """
    moe, h, mix, normed = _moe(s), s.config.hidden, StreamMixing.of(s), s.config.form.parallel != 1
    n, scores = s.stream * h, s.stream * moe.experts
    gate = LinearKernel("gate", s.stream, moe.experts, h, dtype=s.precision.activations)
    ins = (LinearKernel("latent_in", s.stream, moe.latent, h),) if moe.latent else ()
    # Scores in fp32: made, activated, masked by group, sorted out; backward the same way.
    choose, unchoose = _moved(s, "top_k", 8 * scores * 4, _CHOSEN)
    # The loss of each sequence reads them once more, and keeps each expert's share of its tokens.
    even = (k.memory(s, "balance", scores * 4),) if moe.balance else ()
    shares = tuple(SavedBuffer("balance", s.shape.microbatch_size * moe.experts * 4, Pass.I) for _ in even)
    # The gate's input is the tensor that shared experts keep; in fp8 theirs is quantised and the gate's is not.
    own = () if not s.fp8 and (moe.shared_ffn or not normed) else (_wide_normed(s, n),)
    # Scores and indices; where weights are divided by their sum, both of these, too.
    choice = scores * 4 + s.stream * (moe.top_k * 12 + 4 if moe.normalised else moe.top_k * 8)
    return PartWork(
        forward=(
            *mix.before,
            *((k.norm_forward(s, "post_norm", n, stream=True),) if normed else ()),
            *linears_narrow(s, "normed", n, 1),
            gate.forward(s),
            choose,
            *even,
            *k.forward(s, *ins),
            *_pack(s, s.stream * s.config.expert_hidden),
        ),
        input_grad=(
            unchoose,
            *even,
            gate.input_grad(s),
            *k.input_grad(s, *ins),
            k.add(s, "sum_grads", n, 3 if moe.shared_ffn else 2),
            *linears_widen(s, "normed", n, 1),
            *((k.norm_backward(s, "post_norm_backward", n, stream=True),) if normed else ()),
            *(mix.behind or (k.memory(s, "residual_backward", 3 * n * s.stream_wide),)),
        ),
        weight_grad=(*k.weight_grad(s, gate, *ins), *mix.weight_grad),
        out_bytes=(n + s.stream * moe.latent) * s.wide,
        saved=(
            *mix.saved,
            *own,
            *((stats(s), *written(s, n, stream=True)) if normed else ()),
            SavedBuffer("router_scores", choice, Pass.I),
            *shares,
        ),
        stash_bytes=k.stash(s, gate, *ins),
        forward_workspace=2 * scores * 4
        + (with_scales(s.stream * s.config.expert_hidden, s.precision.dispatch) if _narrow(s) else 0),
        input_grad_workspace=2 * scores * 4 + max(n * s.stream_wide, mix.workspace),
        model_flops=2 * s.shape.tokens * h * (moe.experts + moe.latent) + mix.model_flops,
    )


def experts(s: PartSetting) -> PartWork:
    """This device's experts on the rows it received, balanced: permute, grouped products, unpermute.

    Rows go back as they came, to be summed behind combine; where nothing is exchanged, they leave summed by token.
    """
    moe, h = _moe(s), s.config.expert_hidden
    groups, width, ups = moe.experts // s.layout.ep, moe.ffn // s.layout.etp, s.config.activation.ups
    received = s.stream * moe.top_k * s.layout.etp
    total = (rows := -(-received // groups)) * groups
    up = LinearKernel(f"{EXPERTS}gate_up_proj", rows, ups * width, h, groups)
    down = LinearKernel(f"{EXPERTS}down_proj", rows, h, width, groups)
    back = with_scales(s.stream * moe.top_k * h, s.precision.combine)
    arrives_fp8 = _narrow(s) and s.fp8
    moved = total * h * (s.precision.dispatch.bytes + (1 if arrives_fp8 else s.wide))
    permute, permute_backward = _moved(s, "permute", moved, _SORTED)
    unpermute, unpermute_backward = _put_back(s, total * h)
    return PartWork(
        forward=(
            permute,
            *(() if arrives_fp8 else k.cast(s, "rows", total * h)),
            up.forward(s),
            *compacted(s, "store", total, width),
            *(() if s.style.fused_experts else (activation(s, total, width),)),
            *k.cast(s, "activated", total * width),
            down.forward(s),
            *_biases(s, "bias", total * h * 2),
            unpermute,
        ),
        input_grad=(
            permute_backward,
            *_biases(s, "bias_backward", total * (h + ups * width)),
            *k.input_grad(s, down, arrives_fp8=arrives_fp8),
            *compacted(s, "load", total, width),
            activation_backward(s, total, width),
            *k.input_grad(s, up),
            unpermute_backward,
        ),
        weight_grad=k.weight_grad(s, down, up),
        out_bytes=back if spread(s.layout) else s.stream * h * s.wide,
        saved=(
            SavedBuffer("rows", s.cached(total * h)),
            *inner_saved(s, total, width, up, compact=True),  # grouped products are none that torchtitan keeps
            *_weighed(s, total * width),
            SavedBuffer("row_weights", total * 8, Pass.I),
        ),
        stash_bytes=k.stash(s, down, up),
        inline=expert_tensor(s, received),
        forward_workspace=total * h * s.wide,
        input_grad_workspace=beyond(
            total * h * (1 if arrives_fp8 else s.wide)
            + (s.cached(total * h) if s.fp8 and not arrives_fp8 else 0)
            + inner_grads(s, total, width),
            back if spread(s.layout) else s.stream * h * s.wide,
            k.stash(s, down, up),
        ),
        model_flops=2 * s.shape.tokens * moe.top_k * h * moe.ffn * (ups + 1),
        # One row per token comes, of which combine's mirror makes copies; rows go, which dispatch's mirror sums.
        out_grad_bytes=with_scales(s.stream * h, s.precision.dispatch) if spread(s.layout) else None,
        handed=back if spread(s.layout) else None,
    )


def _moved(s: PartSetting, label: str, moved: int, launches: tuple[int, int]) -> tuple[Kernel, Kernel]:
    """What moves so many bytes forward, and as many backward; operation by operation in so many kernels, and twice as
    many backward, where they are added to zeros.
    """
    if s.style.op_by_op:
        return k.several(s, label, moved, launches[0]), k.several(s, label, 2 * moved, launches[1])
    return k.memory(s, label, moved), k.memory(s, label, moved)


def _put_back(s: PartSetting, elements: int) -> tuple[Kernel, Kernel]:
    if s.style.op_by_op:
        return _moved(s, "unpermute", 5 * elements * s.wide, _PUT_BACK)
    return k.copies(s, "unpermute", elements), k.copies(s, "unpermute_backward", elements)


def spread(layout: PartLayout) -> bool:
    """Whether experts are divided over devices, so that all-to-alls stand around them."""
    return layout.ep * layout.etp > 1


def add(s: PartSetting) -> PartWork:
    """Routed and shared experts' outputs onto the residual stream. Router weights are applied inside the experts."""
    moe, n, mix = _moe(s), s.stream * s.config.hidden, StreamMixing.of(s)
    terms = 3 if moe.shared_ffn else 2
    sums = (k.add(s, "sum", n),) if mix.mixed and moe.shared_ffn else ()
    drop = n if s.config.hidden_dropout else 0
    outs = (LinearKernel("latent_out", s.stream, s.config.hidden, moe.latent),) if moe.latent else ()
    came = tuple(SavedBuffer("latent", s.cached(x.rows * x.into)) for x in outs)
    return PartWork(
        forward=(
            *k.forward(s, *outs),
            *sums,
            *(mix.mixed or (k.memory(s, "residual", n * ((terms - 1) * s.wide + 2 * s.stream_wide) + drop),)),
        ),
        # The gradient passes through to all; to the experts it travels in dispatch's format.
        input_grad=(
            *(mix.unmixed or residual_backward(s)),
            *k.input_grad(s, *outs),
            *_pack(s, s.stream * s.config.expert_hidden),
        ),
        weight_grad=k.weight_grad(s, *outs),
        out_bytes=n * s.stream_wide * s.streams,
        saved=(*mask(s), *came),
        stash_bytes=k.stash(s, *outs),
        model_flops=2 * s.shape.tokens * s.config.hidden * moe.latent,
    )


def _wide_normed(s: PartSetting, elements: int) -> SavedBuffer:
    if not s.fp8:
        return stream_normed(s, "normed", elements)
    again = (k.norm_forward(s, "gate_input.again", elements, stream=True),)
    return SavedBuffer("gate_input", elements * s.wide, Pass.W, ("norm", "operators"), again)


def _biases(s: PartSetting, label: str, elements: int) -> Work:
    """A row's bias is its expert's, times its weight: added behind the products of all, by a kernel that reads and
    writes; the activation adds its own. Backward reads the gradients of both for their sums by expert.
    """
    return (k.memory(s, f"{EXPERTS}{label}", elements * s.wide),) if s.config.form.expert_bias else ()


def _weighed(s: PartSetting, elements: int) -> tuple[SavedBuffer, ...]:
    """An activation before its token's weight comes on it. Megatron-LM's experts, the only ones with a plain GELU, have
    no kernel for both; gated ones have, squared ReLU has where asked for (core/transformer/moe/experts.py).
    """
    plain = s.config.activation is LayerActivation.GELU
    return (SavedBuffer("unweighed", elements * s.wide, Pass.I, ("activation", "operators")),) if plain else ()


def _pack(s: PartSetting, elements: int) -> Work:
    """The cast to a narrower dispatch format."""
    moved = elements * (s.wide + s.precision.dispatch.bytes)
    return (k.memory(s, f"pack{CAST}", moved),) if _narrow(s) else ()


def _narrow(s: PartSetting) -> bool:
    """Whether tokens travel in a narrower format than the residual stream's."""
    return s.precision.dispatch.bytes < s.wide


def _moe(s: PartSetting) -> ExpertConfig:
    moe = s.config.moe
    assert moe is not None, f"{s.config.source} has no experts"
    return moe
