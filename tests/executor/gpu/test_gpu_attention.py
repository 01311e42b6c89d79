"""What attention gives to torch on a GPU: the same results as with scores stored, and nothing that stores them there.

`torch.backends.cuda.can_use_flash_attention` and its like answer False on a CPU whatever they are asked, so what the
kernels take is written down here as torch's documentation and `sdp_utils.cpp` have it.
"""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.modules.attention import attend as module
from executor.modules.attention.attend import AttentionMask, attend, beside_scores
from tests.executor.modules.hub import gap
from tests.executor.modules.hub_campaign import CLOSE
from tests.executor.modules.test_modules_huggingface import CASES

FORMATS = torch.bfloat16, torch.float16, torch.float32
Drawn = tuple[Tensor, Tensor, Tensor, AttentionMask, float]


def _drawn(seed: int, dtype: torch.dtype) -> Drawn:
    """Heads, shared or not; keys of any width, values of any not above; windows, and ranks that share a sequence."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    kv, groups, qk = r.choice((1, 2)), r.choice((1, 2, 3)), r.choice((4, 6, 8, 16, 24, 192, 256))
    v, ranks = r.choice((qk, qk, max(1, qk // 2), max(1, qk - 2))), r.choice((1, 1, 2))
    length = 4 * r.randint(1, 5)
    sight = AttentionMask(r.choice((0, 0, 1, 3)), ranks, r.randrange(ranks))
    q, k, values = (
        torch.randn(2, h, n, d, dtype=torch.float64).to(dtype).requires_grad_()
        for h, n, d in ((kv * groups, length, qk), (kv, ranks * length, qk), (kv, ranks * length, v))
    )
    return q, k, values, sight, r.choice((1.0, 0.7))


def _all(y: Tensor, *of: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return [y.detach(), *torch.autograd.grad(y, of, torch.randn(y.shape, dtype=y.dtype))]


@pytest.mark.parametrize("seed", range(40))
def test_results_and_gradients_are_those_with_scores_stored(seed: int) -> None:
    q, k, v, sight, scaled = _drawn(seed, torch.float64)
    stored = _all(attend(q, k, v, fused=False, sight=sight, scaled=scaled), q, k, v)
    scale = q.shape[-1] ** -0.5 * scaled
    found = _all(beside_scores(q, k, v, sight, scale), q, k, v)
    assert all(a.shape == b.shape and (a - b).abs().max() <= 1e-10 for a, b in zip(stored, found, strict=True))
    more = _all(beside_scores(q, k, v, sight, 1.1 * scale), q, k, v)
    assert sight.window == 1 or any((a - b).abs().max() > 1e-6 for a, b in zip(stored, more, strict=True))


def _takers(q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> set[str]:
    """The fused kernels of an H100 that take this."""
    mask, shared, width = given["attn_mask"], k.shape[1] != q.shape[1], q.shape[-1]
    alike = k.shape[-1] == v.shape[-1] == width and all(t.stride(-1) == 1 for t in (q, k, v))
    assert not shared or given["enable_gqa"]
    half = q.dtype in (torch.bfloat16, torch.float16)
    flash = alike and half and mask is None and width <= 256 and (not given["is_causal"] or q.shape[2] == k.shape[2])
    aligned = width % (8 if half else 4) == 0
    efficient = alike and aligned and not shared and (half or q.dtype is torch.float32)
    return {name for name, takes in (("flash", flash), ("efficient", efficient)) if takes}


def _given(monkeypatch: pytest.MonkeyPatch, gpu: bool, drawn: Drawn) -> list[set[str]]:
    """Who takes what attention hands to torch, each time it does."""
    found, real = list[set[str]](), torch.nn.functional.scaled_dot_product_attention

    def call(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        found.append(_takers(q, k, v, given))
        return real(q, k, v, **given)

    q, k, v, sight, scaled = drawn
    with monkeypatch.context() as patch:
        patch.setattr(module.F, "scaled_dot_product_attention", call)
        patch.setattr(module, "on_gpu", lambda q: gpu)
        attend(q, k, v, fused=True, sight=sight, scaled=scaled)
    return found


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_some_fused_kernel_takes_it(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    (takers,) = _given(monkeypatch, True, _drawn(seed, dtype))
    assert takers


def test_what_a_cpu_is_given_no_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked with shared heads; values narrower than keys are not even handed over."""
    found = [_given(monkeypatch, False, _drawn(seed, torch.bfloat16)) for seed in range(40)]
    assert any(takers == [set()] for takers in found) and any(takers == [] for takers in found)


def test_a_format_without_fused_kernels_keeps_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        drawn = _drawn(seed, torch.float64)
        assert _given(monkeypatch, True, drawn) == []
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            attend(*drawn[:3], fused=True, sight=drawn[3])
        assert max(kept) <= max(t.numel() for t in drawn[:3]) + drawn[0].shape[:3].numel() * drawn[2].shape[-1]


LATENT_AND_WINDOWS = ("deepseek-v2-lite", "deepseek-v3", "DeepSeek-V3's own file", "windows by layer", "mistral-7b")


@pytest.mark.parametrize("case", [c for c in LATENT_AND_WINDOWS if c in CASES])
def test_as_on_a_gpu_we_train_what_transformers_trains(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def call(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, scale: float) -> Tensor:
        called.append(1)
        return beside_scores(q, k, v, sight, scale)

    monkeypatch.setattr(module, "apply", lambda _, *given: call(*given))  # in float64 too
    monkeypatch.setattr(module, "on_gpu", lambda q: True)
    found = gap(CASES[case])
    assert called and found.largest <= CLOSE, found
