"""Parts "mlp" (norm, MLP, residual) and "shared" (the shared experts: an MLP on the router's normed output)."""

from ir.core.ops import Pass
from ir.core.work import Kernel, Work
from ir.workload.part import PartWork, SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel, beyond
from ir.workload.parts.region import enter, leave
from ir.workload.parts.residual import branch, stream_normed
from ir.workload.setting import PartSetting


def mlp(s: PartSetting) -> PartWork:
    """A decoder layer's second half where there are no experts.

    Where it reads the stream beside attention, through one norm, that norm and its output are attention's; with tensor
    parallelism it gathers and reduces by itself.
    """
    c, h = s.config, s.config.hidden
    width, own = c.ffn // s.layout.tp, c.form.parallel != 1
    up, down = _linears(s, width)
    inside = PartWork(
        forward=_forward(s, up, down, width),
        input_grad=_backward(s, up, down, width),
        weight_grad=k.weight_grad(s, down, up, biased=c.mlp_bias),
        out_bytes=s.stream * h * s.wide,
        saved=inner_saved(s, s.tokens, width, second_up(s, width), compact=False),
        stash_bytes=k.stash(s, down, up),
        inline=enter(s, h),
        forward_workspace=max(s.tokens * h * s.wide, _before_cast(s, width)),
        model_flops=2 * s.shape.tokens * h * c.ffn * (c.activation.ups + 1),
    )
    grads, ups = inner_grads(s, s.tokens, width), c.activation.ups
    return branch(s, "post_norm", inside, grads, reads=h if own else 0, own=own, linears=ups)


def shared(s: PartSetting) -> PartWork:
    """The shared experts. Their input is the router's normed output, which they keep for their own weights' sake."""
    c, h, moe = s.config, s.config.hidden, s.config.moe
    assert moe is not None
    width = moe.shared_ffn // s.layout.tp
    up, down = _linears(s, width)
    n = s.stream * h * s.wide
    came = s.tokens * h * s.wide if s.sp else s.cached(s.tokens * h) if s.fp8 else 0
    # Where tokens are dispatched in fp8, the router has already quantised them.
    quantise = () if s.precision.dispatch.bytes == 1 else k.cast(s, "normed", s.stream * h)
    gates = (LinearKernel("shared_gate", s.stream, 1, h, dtype=s.precision.activations),) if c.form.shared_gate else ()
    weigh = tuple(k.copies(s, "shared_gate.weigh", s.stream * h) for _ in gates)
    return PartWork(
        forward=(
            *quantise,
            *_forward(s, up, down, width),
            *compacted(s, "store", s.tokens, width),
            *k.forward(s, *gates),
            *weigh,
        ),
        input_grad=(
            *weigh,
            *k.input_grad(s, *gates),
            *compacted(s, "load", s.tokens, width),
            *_backward(s, up, down, width),
        ),
        weight_grad=k.weight_grad(s, down, up, *gates),
        out_bytes=s.stream * h * s.wide,
        saved=(
            *((stream_normed(s, "normed", s.stream * h),) if c.form.parallel != 1 else ()),
            *inner_saved(s, s.tokens, width, second_up(s, width), compact=True),
            *(SavedBuffer("before_gate", n, Pass.I) for _ in gates),
        ),
        stash_bytes=k.stash(s, down, up, *gates),
        inline=(*enter(s, h), *leave(s, h)),
        forward_workspace=max((s.tokens - s.stream) * h * s.wide, _before_cast(s, width)),
        input_grad_workspace=beyond(
            came + max(inner_grads(s, s.tokens, width), s.tokens * h * s.wide), n, k.stash(s, down, up)
        ),
        model_flops=2 * s.shape.tokens * h * (moe.shared_ffn * (c.activation.ups + 1) + len(gates)),
    )


def inner_grads(s: PartSetting, rows: int, width: int) -> int:
    """Bytes of the gradients of an activation's output and input, which stand side by side."""
    return rows * width * (1 + s.config.activation.ups) * s.wide


def _before_cast(s: PartSetting, width: int) -> int:
    """Bytes of the activation's output before its cast to fp8, at a time when the part's output is not there yet."""
    return max(0, s.tokens * width - s.stream * s.config.hidden) * s.wide if s.fp8 else 0


def inner_saved(
    s: PartSetting, rows: int, width: int, again: LinearKernel | None, *, compact: bool
) -> tuple[SavedBuffer, ...]:
    """The activation's input, and its output, which "activation" makes again; of the input, "operators" makes what
    product `again` gives.

    compact: with fp8 the input is cached in fp8 too, as DeepSeek-V3 does inside its experts and only there
    (arXiv:2412.19437, section 3.3.3). Where operations are separate, a gate's own activation stays beside the product.
    """
    ups, made = s.config.activation.ups, again.elements if again else 0
    whole, part = (s.cached(n) if compact else n * s.wide for n in (rows * width * ups, made))
    activate = (activation(s, rows, width), *k.cast(s, "activated", rows * width))
    labels = ("activation", "operators")
    apart = s.style.eager or s.style.op_by_op
    gate = (SavedBuffer("gate", rows * width * s.wide, Pass.I, labels),) if apart and ups > 1 else ()
    inside = (SavedBuffer("polynomial", 3 * rows * width * s.wide, Pass.I, labels),) if _polynomial(s) else ()
    return (
        *gate,
        *inside,
        *((SavedBuffer("pre_activation", whole - part, Pass.I),) if whole > part else ()),
        *((SavedBuffer("second_up", part, Pass.I, ("operators",), (again.forward(s),)),) if again else ()),
        SavedBuffer("activated", s.cached(rows * width), Pass.W, labels, activate),
    )


def second_up(s: PartSetting, width: int) -> LinearKernel | None:
    """Of gate and up the second product, which torchtitan's choice of operators makes again."""
    return LinearKernel("up_proj", s.tokens, width, s.config.hidden) if s.config.activation.ups > 1 else None


def compacted(s: PartSetting, way: str, rows: int, width: int) -> Work:
    """The way of a compact activation's input into and out of fp8."""
    return k.store(s, f"pre_activation.{way}", rows * width * s.config.activation.ups, 1) if s.fp8 else ()


def activation(s: PartSetting, rows: int, width: int) -> Kernel:
    """Read one or two up-projections, write one activation. Operation by operation a gate's product is one more."""
    label = s.config.activation.value
    if s.style.op_by_op:
        gated, (tensors, kernels) = s.config.activation.ups > 1, (18, 8) if _polynomial(s) else (2, 1)
        return k.several(s, label, rows * width * (tensors + 3 * gated) * s.wide, kernels + gated)
    return k.memory(s, label, rows * width * (s.config.activation.ups + 1) * s.wide)


def activation_backward(s: PartSetting, rows: int, width: int) -> Kernel:
    """Read the gradient and the input, write the input's gradient."""
    label = f"{s.config.activation.value}_backward"
    if s.style.op_by_op:
        gated, (tensors, kernels) = s.config.activation.ups > 1, (28, 11) if _polynomial(s) else (3, 1)
        return k.several(s, label, rows * width * (tensors + 6 * gated) * s.wide, kernels + 2 * gated)
    return k.memory(s, label, rows * width * (2 * s.config.activation.ups + 1) * s.wide)


def _polynomial(s: PartSetting) -> bool:
    """Whether a GELU is written as 0.5 x (1 + tanh(c (x + d x³))): power, factors, sums, tanh and product one by one.

    Of these the tanh and both factors of the last product stay, beside x.
    """
    return s.style.op_by_op and s.config.act == "gelu_new"


def _linears(s: PartSetting, width: int) -> tuple[LinearKernel, LinearKernel]:
    h, ups = s.config.hidden, s.config.activation.ups
    name = "gate_up_proj" if ups == 2 else "up_proj"
    return LinearKernel(name, s.tokens, ups * width, h), LinearKernel("down_proj", s.tokens, h, width)


def _forward(s: PartSetting, up: LinearKernel, down: LinearKernel, width: int) -> Work:
    acted = (activation(s, s.tokens, width), *k.cast(s, "activated", s.tokens * width))
    return (up.forward(s), *acted, down.forward(s))


def _backward(s: PartSetting, up: LinearKernel, down: LinearKernel, width: int) -> Work:
    return (*k.input_grad(s, down), activation_backward(s, s.tokens, width), *k.input_grad(s, up))
