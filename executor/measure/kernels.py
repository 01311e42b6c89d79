"""Single kernels by their shapes: what a node is made of, timed for layouts that no rank here can run as modules.

So a rank's share of a layer under tensor parallelism over eight GPUs is timed on one. What a framework fuses or adds
between these kernels is not in it, and messages are not: they come on top.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from executor.measure.ops import WARM_UP, DeviceTimer, Note, Samples
from executor.modules.base import TORCH
from executor.optim.optimizer import Optimizer, clip_scale, global_norm, square_sums
from ir.core.files import resolve_types
from ir.core.ops import Pass
from ir.core.work import Kernel, KernelKind
from ir.graph.classes import node_classes
from ir.graph.graph import GraphNode, PerStepOp
from ir.job.build import PreparedJob, precision_of
from ir.plan.plan import Plan

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelSample:
    """A kernel to be timed. adds: its result is added to a sum of gradients; update: of so many elements instead,
    beside `others` whose sums are cleared, too.
    """

    kernel: Kernel | None
    adds: bool = False
    update: int = 0
    others: int = 0


resolve_types(KernelSample)
Recipe = list[tuple[int, int]]  # (index of a piece, how often)


def recipes(plan: Plan) -> tuple[list[KernelSample], dict[str, Recipe]]:
    """(the pieces of a plan's nodes, each once; by class of node, which of them it consists of)."""
    number: dict[KernelSample, int] = {}
    out: dict[str, Recipe] = {}
    for n, name in zip(plan.graph.nodes, node_classes(plan.graph), strict=True):
        if n.message is None and name not in out:
            out[name] = [(number.setdefault(p, len(number)), times) for p, times in _pieces(n)]
    return list(number), out


def _pieces(n: GraphNode) -> list[tuple[KernelSample, int]]:
    first = [(KernelSample(None, update=n.numel, others=n.others), 1)] if n.kind is PerStepOp.UPDATE and n.numel else []
    products = (KernelKind.GEMM, KernelKind.GROUPED_GEMM)
    return first + [  # an update's own: matrices that are orthogonalised
        (KernelSample(replace(k, count=1, label=_label(k)), adds=n.kind is Pass.W and k.kind in products), k.count)
        for k in n.work
        if k.count
    ]


def _label(k: Kernel) -> str:
    """All that decides how it is run: equal kernels of several layers are one."""
    return "backward" if k.kind is KernelKind.ATTENTION and _is_backward(k) else ""


def _is_backward(k: Kernel) -> bool:
    if "bwd" in k.label or "backward" in k.label:
        return True
    return "fwd" not in k.label and "forward" not in k.label and k.flops > 1.1 * _whole(k)


def _whole(k: Kernel) -> int:
    """FLOPs of a forward that is not causal."""
    batch, heads, q, kv, qk_dim, v_dim = k.shape
    return 2 * batch * heads * q * kv * (qk_dim + v_dim)


def piece_samples(
    prepared: PreparedJob,
    pieces: list[tuple[int, KernelSample]],
    device: torch.device,
    watch: DeviceTimer,
    repeats: int,
    note: Note,
) -> Samples:
    """Seconds of each piece, by its index as text; pieces that PyTorch has no kernel for are missing."""
    out: Samples = {}
    for index, piece in pieces:
        note(f"kernel {index}")
        run = _update(prepared, piece, device) if piece.kernel is None else runner(piece, prepared, device)
        if run is not None:
            out[str(index)] = [watch(run) for _ in range(WARM_UP + repeats)][WARM_UP:]
        del run
    return out


def runner(piece: KernelSample, prepared: PreparedJob, device: torch.device) -> Run | None:
    """What runs a kernel once, its operands being there; None where PyTorch cannot."""
    k = piece.kernel
    assert k is not None
    if k.dtype not in TORCH:
        return None  # fp8 products need scales and layouts of their own
    dtype = TORCH[k.dtype]

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_()

    sums = TORCH[precision_of(prepared.job).grads] if piece.adds else None
    match k.kind:
        case KernelKind.GEMM if len(k.shape) == 3:
            m, n, depth = k.shape
            return _product(torch.mm, made(m, depth), made(n, depth).t(), sums)
        case KernelKind.GEMM | KernelKind.GROUPED_GEMM if len(k.shape) == 4:
            groups, m, n, depth = k.shape
            return _product(torch.bmm, made(groups, m, depth), made(groups, n, depth).transpose(1, 2), sums)
        case KernelKind.ATTENTION if len(k.shape) == 6:
            return _attention(k, made)
        case KernelKind.MEMORY:
            source = torch.ones(max(1, k.bytes // 8), dtype=torch.float32, device=device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        case _:
            return None


def _product(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    sums: torch.dtype | None,
) -> Run:
    if sums is None:
        return lambda: multiply(a, b)
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=sums, device=a.device)
    return lambda: total.add_(multiply(a, b))


def _attention(k: Kernel, made: Callable[..., torch.Tensor]) -> Run:
    batch, heads, q, kv, qk_dim, v_dim = k.shape
    backward = k.label == "backward"
    causal = k.flops < 0.75 * _whole(k) * (2.5 if backward else 1.0)
    given = made(batch, heads, q, qk_dim), made(batch, heads, kv, qk_dim), made(batch, heads, kv, v_dim)
    if not backward:
        return lambda: F.scaled_dot_product_attention(*given, is_causal=causal)
    leaves = [t.requires_grad_() for t in given]
    out = F.scaled_dot_product_attention(*given, is_causal=causal)
    grad = made(batch, heads, q, v_dim)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _update(prepared: PreparedJob, piece: KernelSample, device: torch.device) -> Run:
    """One optimizer step on so many elements, gradients cleared and their norm taken, as a rank does it."""
    job, precision, numel = prepared.job, precision_of(prepared.job), piece.update
    weights = torch.zeros(numel, dtype=TORCH[precision.params], device=device)
    sums = torch.zeros(numel + piece.others, dtype=TORCH[precision.grads], device=device)
    grads = {"w": sums[:numel]}
    optimizer = Optimizer(job.optimizer, {"w": weights}, TORCH[precision.optimizer])

    def run() -> None:
        sums.zero_()
        scale: float | torch.Tensor = 1.0
        if job.optimizer.clip_norm:
            norm = global_norm(square_sums(grads, ["w"], device), ahead=device.type != "cpu")
            scale = clip_scale(norm, job.optimizer.clip_norm)
        optimizer.step(grads, scale)

    return run
