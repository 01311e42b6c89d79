"""Kernel lists written by hand from papers and profiles, to hold the cost model against. Used by tests only."""

from ir.core.work import DType, Kernel, KernelKind, Work

T, H, HEADS, QK, V = 4096, 7168, 128, 192, 128  # DeepSeek-V3: tokens of the profile, hidden, heads, head dims
Q_RANK, KV_RANK, KV_A, FFN = 1536, 512, 576, 2048


def gemm(m: int, n: int, k: int, dtype: DType, out_bytes: int = 2, count: int = 1) -> Kernel:
    """A plain GEMM; out_bytes 8 for a gradient accumulated in fp32 (read and written)."""
    moved = dtype.bytes * (m * k + n * k) + out_bytes * m * n
    return Kernel(KernelKind.GEMM, 2 * m * n * k, moved, dtype, (m, n, k), count=count)


def grouped(groups: int, m: int, n: int, k: int, dtype: DType, out_bytes: int = 2) -> Kernel:
    """A grouped GEMM of `m` rows per group."""
    moved = groups * (dtype.bytes * (m * k + n * k) + out_bytes * m * n)
    return Kernel(KernelKind.GROUPED_GEMM, groups * 2 * m * n * k, moved, dtype, (groups, m, n, k))


def batched(groups: int, m: int, n: int, k: int, dtype: DType) -> Kernel:
    """A strided batched GEMM, as unfused attention uses."""
    return grouped(groups, m, n, k, dtype)


def moves(*nbytes: float, dtype: DType = DType.BF16, count: int = 1) -> Kernel:
    """One elementwise kernel that moves these tensors through HBM, in bytes."""
    return Kernel(KernelKind.MEMORY, 0, int(sum(nbytes)), dtype, count=count)


def flash(batch: int, heads: int, seq: int, qk: int, v: int, backward: bool = False) -> Kernel:
    """A causal fused attention kernel: half the square; backward does five products to forward's two."""
    square = batch * heads * seq * seq
    flops = square * (3 * qk + 2 * v) if backward else square * (qk + v)
    io = 2 * batch * heads * seq * (2 * qk + 2 * v) * (2 if backward else 1)
    return Kernel(KernelKind.ATTENTION, flops, io, DType.BF16, (batch, heads, seq, seq, qk, v))


def tiny(count: int) -> Kernel:
    """Kernels that last as long as their launch."""
    return moves(0, count=count)


X = 2 * T * H  # bytes of one hidden activation in bf16
Q, KV, O = 2 * T * HEADS * QK, 2 * T * HEADS * (QK + V), 2 * T * HEADS * V
FP8 = DType.FP8


def deepseek_attention_forward() -> Work:
    """attn(F) of the profile: norm, MLA, residual, norm, router; casts to fp8 before each GEMM."""
    return (
        moves(X, X), moves(X, X / 2, count=2), gemm(T, Q_RANK, H, FP8), gemm(T, KV_A, H, FP8),
        moves(2 * T * Q_RANK * 4), gemm(T, HEADS * QK, Q_RANK, FP8), gemm(T, HEADS * 256, KV_RANK, FP8),
        moves(Q * 64 / 192 * 4), moves(KV, KV), flash(1, HEADS, T, QK, V),
        moves(O, O / 2, count=2), gemm(T, H, HEADS * V, FP8), moves(X, X, X), moves(X, X), moves(X, X / 2),
        gemm(T, 256, H, DType.BF16, 4), tiny(50),
    )  # fmt: skip


def deepseek_attention_input_grad() -> Work:
    """attn(B): the same with recomputed projections, FlashAttention's backward and its fp32 query gradients."""
    return (
        gemm(T, H, 256, DType.BF16), moves(X, X, X, count=3), moves(X, X, X, X, count=2),
        moves(O, O / 2), moves(O / 2, O / 2), moves(O, O / 2), gemm(T, HEADS * V, H, FP8), moves(X, X / 2, count=5),
        gemm(T, HEADS * QK, Q_RANK, FP8), gemm(T, HEADS * 256, KV_RANK, FP8), moves(Q * 64 / 192 * 4, count=2),
        moves(KV, KV), flash(1, HEADS, T, QK, V, backward=True), moves(2 * Q, Q), moves(2 * O),
        moves(Q, Q / 2, count=2), moves(KV, KV / 2, count=2), moves(KV, KV), gemm(T, Q_RANK, HEADS * QK, FP8),
        gemm(T, KV_RANK, HEADS * 256, FP8), gemm(T, H, KV_A, FP8), gemm(T, H, Q_RANK, FP8), moves(X, X, count=2),
        tiny(70),
    )  # fmt: skip


def deepseek_attention_weight_grad() -> Work:
    """attn(W): five fp8 GEMMs that accumulate in fp32."""
    sides = ((H, HEADS * V), (HEADS * 256, KV_RANK), (HEADS * QK, Q_RANK), (KV_A, H), (Q_RANK, H))
    return tuple(gemm(m, n, T, FP8, 8) for m, n in sides)


def deepseek_experts_forward(rows: int = 30976) -> Work:
    """mlp(F): the shared expert and four routed ones; `rows` after padding, as the profile's grids say."""
    return (
        gemm(T, 2 * FFN, H, FP8), moves(2 * T * FFN * 3), gemm(T, H, FFN, FP8), moves(X, X / 2),
        moves(rows * H * 2), moves(rows * H * 2 / 3), grouped(4, rows // 4, 2 * FFN, H, FP8),
        moves(rows * FFN * (4 + 1)), moves(rows * FFN * 2), grouped(4, rows // 4, H, FFN, FP8),
        moves(rows * H * 2, rows * H), moves(rows * 2 * FFN * 3), tiny(8),
    )  # fmt: skip


def deepseek_experts_input_grad(rows: int = 32512) -> Work:
    """mlp(B): input gradients of shared and routed experts, with SwiGLU recomputed and everything cast both ways."""
    wide, narrow = rows * H, rows * FFN
    return (
        gemm(T, FFN, H, FP8), gemm(T, H, 2 * FFN, FP8), moves(X, X / 2, count=6), moves(2 * T * FFN * 5, count=3),
        moves(wide * 1.5), moves(wide * 2), grouped(4, rows // 4, FFN, H, FP8), moves(narrow * 12), moves(narrow * 4),
        moves(narrow * 3, count=2), moves(X, X), moves(narrow * 6), grouped(4, rows // 4, H, 2 * FFN, FP8),
        moves(wide * 2, wide), moves(narrow * 6), tiny(8),
    )  # fmt: skip


def deepseek_experts_weight_grad(rows: int = 32512) -> Work:
    """mlp(W), both streams: weight gradients of four routed experts and the shared one."""
    up = tuple(gemm(2 * FFN, H, k, FP8, 8) for k in (rows // 4,) * 4 + (T,))
    down = tuple(gemm(FFN, H, k, FP8, 8) for k in (rows // 4,) * 4 + (T,))
    return (*up, *down, moves(rows * H * 2), moves(rows * H * 2))


def gpt_layer_forward(batch: int, seq: int, hidden: int, heads: int, tp: int, sp: bool) -> Work:
    """One Megatron GPT layer of Korthikanti et al.: unfused attention, GELU, dropout; norms sharded with sp."""
    tokens, local = batch * seq, heads // tp
    half, head, scores = DType.FP16, hidden // heads, 2 * batch * local * seq * seq
    act = 2 * tokens * hidden / (tp if sp else 1)
    return (
        moves(act, act, count=2), gemm(tokens, 3 * hidden // tp, hidden, half),
        batched(batch * local, seq, seq, head, half), moves(scores, scores), moves(scores, scores, scores / 2),
        batched(batch * local, seq, head, seq, half), gemm(tokens, hidden, hidden // tp, half),
        gemm(tokens, 4 * hidden // tp, hidden, half), moves(2 * 2 * tokens * 4 * hidden / tp),
        gemm(tokens, hidden, 4 * hidden // tp, half), moves(act, act, act, act / 2, count=2),
    )  # fmt: skip


def gpt_layer_backward(batch: int, seq: int, hidden: int, heads: int, tp: int, sp: bool) -> Work:
    """Input and weight gradients of the same layer."""
    tokens, local = batch * seq, heads // tp
    half, head, scores = DType.FP16, hidden // heads, 2 * batch * local * seq * seq
    act = 2 * tokens * hidden / (tp if sp else 1)
    shapes = (
        (3 * hidden // tp, hidden),
        (hidden, hidden // tp),
        (4 * hidden // tp, hidden),
        (hidden, 4 * hidden // tp),
    )
    products = tuple(g for n, k in shapes for g in (gemm(tokens, k, n, half), gemm(n, k, tokens, half, 8)))
    return (
        *products, moves(act, act, act, count=2), moves(act, act, act / 2, count=2), moves(act, act, act, count=2),
        moves(3 * 2 * tokens * 4 * hidden / tp),
        batched(batch * local, seq, seq, head, half), batched(batch * local, seq, head, seq, half),
        batched(batch * local, seq, head, seq, half), batched(batch * local, seq, head, seq, half),
        moves(scores, scores, scores / 2), moves(scores, scores, scores),
    )  # fmt: skip


def gpt_weight_grads(tokens: int, hidden: int, layers: int) -> Work:
    """TW of Zero Bubble's Table 6: the four weight gradients of each layer, accumulated in fp16."""
    shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    return tuple(gemm(m, n, tokens, DType.FP16, 4, count=layers) for m, n in shapes)
