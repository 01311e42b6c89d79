"""Matrix products, experts' too, attention by backend, losses, norms and updates, each by itself."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.one_gpu.timer import Deadline, KernelTimer, gpu, measured_table

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SEED = 20261126
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# batch, heads, heads of keys, tokens, features of a head
ATTENTION = (
    (1, 32, 8, 2048, 128),
    (1, 32, 8, 4096, 128),
    (1, 32, 32, 4096, 128),
    (1, 32, 8, 8192, 128),
    (4, 16, 16, 1024, 64),
    (2, 32, 8, 4096, 64),
    (1, 128, 128, 4096, 192),
    (1, 16, 16, 16384, 128),
    (8, 12, 12, 1024, 64),
    (1, 8, 4, 4096, 256),
)
# outputs and inputs of linears: llama's, with its largest vocabulary both ways, and GPT-2's
WIDTHS: Sequence[tuple[int, int]] = (
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (128256, 2048),
    (2048, 128256),
    (5120, 1536),
    (2304, 768),
    (768, 3072),
)
# experts, tokens of each in the mean, outputs and inputs: Qwen3-30B-A3B's, DeepSeek-V2-Lite's, Mixtral's, small ones
GROUPS: Sequence[tuple[int, int, int, int]] = (
    *((128, tokens, *width) for tokens in (64, 512) for width in ((1536, 2048), (2048, 768))),
    *((64, tokens, *width) for tokens in (192, 768) for width in ((2816, 2048), (2048, 1408))),
    *((8, tokens, *width) for tokens in (512, 1024, 4096) for width in ((8192, 2048), (2048, 4096), (28672, 4096))),
    *((32, tokens, 4096, 7168) for tokens in (128, 1024)),
)
Timed = tuple[str, str, str, Callable[[], object]]  # op, sizes, format, the call


def measure(out: Path, until: Deadline) -> None:
    """All four tables."""
    timer = KernelTimer()
    products(out, until, timer)
    grouped(out, until, timer)
    attention(out, until, timer)
    ops(out, until, timer)


def products(out: Path, until: Deadline, timer: KernelTimer) -> None:
    """x·wᵀ in bf16, and in fp8 with nothing cast."""
    draw, one = random.Random(SEED), torch.ones((), device="cuda")
    shapes = [(m, *width) for m in (2048, 4096, 8192) for width in WIDTHS]
    drawn = ([8 * round(2 ** draw.uniform(4.5, 10.5)) for _ in range(3)] for _ in range(40))
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    with measured_table(out / "gemm_torch.csv", ("gpu", "dtype", "m", "n", "k", "us", "timer_us")) as row:
        for m, n, k in (*shapes, *((a, b, c) for a, b, c in drawn)):
            if until.near():
                return
            x, w = (torch.randn(rows, k, device="cuda", dtype=BF16) for rows in (m, n))
            row(gpu(), "bf16_cold", m, n, k, timer(partial(torch.mm, x, w.t())), timer.nothing)
            if fp8 and m % 16 == n % 16 == k % 16 == 0:
                x8, w8 = x.to(FP8), w.to(FP8)
                call = partial(torch._scaled_mm, x8, w8.t(), one, one, out_dtype=BF16)
                row(gpu(), "fp8_cold", m, n, k, timer(call), timer.nothing)


def grouped(out: Path, until: Deadline, timer: KernelTimer) -> None:
    """Products of stacked experts in bf16, each with its tokens: as many for all, or as a random router deals."""
    columns = ("gpu", "pass", "split", "experts", "tokens", "n", "k", "us", "timer_us")
    if not hasattr(torch, "_grouped_mm"):
        return
    draw = torch.Generator().manual_seed(SEED)
    with measured_table(out / "grouped_torch.csv", columns) as row:
        for experts, tokens, n, k in GROUPS:
            if until.near():
                return
            rows = experts * tokens
            x, y = (torch.randn(rows, width, device="cuda", dtype=BF16) for width in (k, n))
            w = torch.randn(experts, n, k, device="cuda", dtype=BF16)
            chosen = torch.randint(experts, (rows,), generator=draw).bincount(minlength=experts)
            for split, each in (("even", torch.full((experts,), tokens)), ("drawn", chosen)):
                ends = each.cumsum(0).to("cuda", torch.int32)
                forward = partial(torch._grouped_mm, x, w.transpose(1, 2), ends)
                weights = partial(torch._grouped_mm, y.t(), x, ends)
                for which, call in (("forward", forward), ("weights", weights)):
                    try:
                        row(gpu(), which, split, experts, tokens, n, k, timer(call), timer.nothing)
                    except RuntimeError as e:
                        print(f"{which} {split} {experts, tokens, n, k}: {str(e).splitlines()[0]}")


def attention(out: Path, until: Deadline, timer: KernelTimer) -> None:
    """Both passes, causal; a backend that cannot do a shape has no row."""
    columns = "gpu backend pass batch seq_len heads kv_heads qk_dim v_dim ms ms_fixed timer_us"
    with measured_table(out / "sdpa_torch.csv", columns.split()) as row:
        for b, heads, few, s, d in ATTENTION:
            for name, backend in BACKENDS.items():
                if until.near():
                    return
                if name == "efficient" and few != heads:
                    continue
                try:
                    found = _passes(timer, name, backend, [(b, n, s, d) for n in (heads, few, few)])
                except RuntimeError as e:
                    print(f"{name} {b, heads, few, s, d}: {str(e).splitlines()[0]}")
                    continue
                for which, us, fixed in found:
                    cells = (f"{1e-3 * us:.5f}", f"{1e-3 * fixed:.5f}" if fixed else "", timer.nothing)
                    row(gpu(), name, which, b, s, heads, few, d, d, *cells)


def _passes(
    timer: KernelTimer, name: str, backend: SDPBackend, shapes: list[tuple[int, ...]]
) -> list[tuple[str, float, float]]:
    """(pass, microseconds, those with one order of sums)."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for shape in shapes)
    few = shapes[0] != shapes[1]
    with sdpa_kernel(backend):

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=few)

        y = forward()
        g, fixed = torch.randn_like(y), 0.0

        def backward() -> object:
            return torch.autograd.grad(y, (q, k, v), g, retain_graph=True)

        found = timer(forward), timer(backward)
        if name == "flash":
            torch.use_deterministic_algorithms(True)
            try:
                fixed = timer(backward)
            finally:
                torch.use_deterministic_algorithms(False)
    return [("forward", found[0], 0.0), ("backward", found[1], fixed)]


def ops(out: Path, until: Deadline, timer: KernelTimer) -> None:
    """All that is no product and no attention."""
    with measured_table(out / "op_torch.csv", ("gpu", "op", "sizes", "dtype", "us", "timer_us")) as row:
        for name, sizes, dtype, call in (*_elementwise(), *_losses(), *_updates()):
            if until.near():
                return
            row(gpu(), name, sizes, dtype, timer(call), timer.nothing)


def _elementwise() -> Iterator[Timed]:
    n = 2**26
    x, y = (torch.randn(n, device="cuda", dtype=BF16) for _ in range(2))
    z, wide = torch.empty_like(x), x.float()
    whole = torch.empty_like(wide)
    yield "copy", str(n), "bf16", lambda: z.copy_(x)
    yield "add", str(n), "bf16", lambda: torch.add(x, y, out=z)
    yield "copy", str(n), "fp32", lambda: whole.copy_(wide)
    yield "cast", str(n), "fp32>bf16", lambda: z.copy_(wide)
    yield "silu", str(n), "bf16", lambda: F.silu(x)
    yield "gelu", str(n), "bf16", lambda: F.gelu(x)
    yield "sum", str(n), "fp32", lambda: wide.sum()
    for rows, width in ((4096, 4096), (8192, 2048), (16384, 768)):
        t, w = torch.randn(rows, width, device="cuda", dtype=BF16), torch.ones(width, device="cuda", dtype=BF16)
        sizes = f"{rows} {width}"
        yield "rms_norm", sizes, "bf16", partial(F.rms_norm, t, w.shape, w)
        yield "layer_norm", sizes, "bf16", partial(F.layer_norm, t, w.shape, w, w)
        yield "softmax", sizes, "bf16", partial(torch.softmax, t, -1)


def _losses() -> Iterator[Timed]:
    """Of logits in bf16, and cast to fp32 first, as transformers does; the gradient of a table of as many words."""
    for tokens, words in ((4096, 32000), (2048, 128256), (8192, 50304)):
        x = torch.randn(tokens, words, device="cuda", dtype=BF16, requires_grad=True)
        labels = torch.randint(words, (tokens,), device="cuda")
        sizes = f"{tokens} {words}"
        for name, wide in (("cross_entropy", False), ("cross_entropy_fp32", True)):
            forward = partial(_loss, x, labels, wide)
            loss = forward()
            yield name, sizes, "bf16", forward
            yield f"{name}_backward", sizes, "bf16", partial(torch.autograd.grad, loss, x, retain_graph=True)
        table = torch.randn(words, 2048, device="cuda", dtype=BF16, requires_grad=True)
        y = F.embedding(labels, table)
        back = partial(torch.autograd.grad, y, table, torch.randn_like(y), retain_graph=True)
        yield "embedding_backward", f"{sizes} 2048", "bf16", back


def _loss(x: Tensor, labels: Tensor, wide: bool) -> Tensor:
    return F.cross_entropy(x.float() if wide else x, labels)


def _updates() -> Iterator[Timed]:
    sizes = ((8, 4096), (64, 512), (32, 1024))  # matrices, and their sides
    for (many, side), (name, dtype) in product(sizes, (("bf16", BF16), ("fp32", torch.float32))):
        params = [torch.randn(side, side, device="cuda", dtype=dtype, requires_grad=True) for _ in range(many)]
        for p in params:
            p.grad = torch.randn_like(p)
        total = str(sum(p.numel() for p in params))
        for kind in ("fused", "foreach"):
            update = torch.optim.AdamW(params, fused=kind == "fused", foreach=kind == "foreach")
            yield f"adamw_{kind}", total, name, update.step
        yield "clip_grad_norm", total, name, partial(torch.nn.utils.clip_grad_norm_, params, 1.0)
