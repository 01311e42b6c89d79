"""What a long run at the power limit takes off a short burst, of products and of attention."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from experiments.one_gpu.timer import Deadline, gpu, measured_table

REST_S, LONG_S, BURST = 2.0, 3.0, 8
PRODUCTS = ((8192, 8192, 8192), (8192, 28672, 4096), (4096, 4096, 4096), (8192, 1792, 8192), (16384, 6144, 1536))
ATTENTION = (1, 32, 8192, 8192, 128, 128)


def measure(out: Path, until: Deadline) -> None:
    """Random values, since zeros draw less power."""
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    columns = "op gpu dtype shape burst_TFLOPs sustained_TFLOPs"
    with measured_table(out / "sustained.csv", columns.split()) as table:

        def row(op: str, shape: tuple[int, ...], flops: float, call: Callable[[], object]) -> None:
            if not until.near(REST_S + LONG_S + 3.0):
                rates = (flops / s / 1e12 for s in _seconds(call))
                table(op, gpu(), "bf16", "x".join(map(str, shape)), *rates)

        for m, n, k in PRODUCTS:
            a, b = torch.randn(m, k, **made), torch.randn(k, n, **made)
            row("gemm", (m, n, k), 2.0 * m * n * k, partial(torch.matmul, a, b))
        batch, heads, q, kv, qk, v = ATTENTION
        query, key, value = (torch.randn(batch, heads, kv, qk, requires_grad=True, **made) for _ in range(3))

        def attend() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        flops, out_of = batch * heads * q * kv * (qk + v), attend()
        with torch.no_grad():
            row("sdpa_forward", ATTENTION, flops, attend)
        grad, inputs = torch.randn_like(out_of), (query, key, value)
        back = partial(torch.autograd.grad, out_of, inputs, grad, retain_graph=True)
        row("sdpa_backward", ATTENTION, 2.5 * flops, back)


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Of one call: of a few after a rest, and of many in the second half of some seconds without one."""
    call()
    torch.cuda.synchronize()
    time.sleep(REST_S)
    burst = _each(call, BURST)
    found: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < LONG_S:
        found.append(_each(call, max(BURST, int(0.5 / burst))))
    late = sorted(found[len(found) // 2 :])
    return burst, late[len(late) // 2]


def _each(call: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls
