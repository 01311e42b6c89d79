"""What masks leave of attention, and scores that are not stored: closed forms of pairs, FLOPs and bytes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import piper_sim
from executor.frontend.capture import capture
from ir.core.work import DType

LENGTH, HEADS, DIM, WINDOW, PICKED = 512, 4, 16, 32, 24
WIDTH = HEADS * DIM
SQUARE = LENGTH * LENGTH
CAUSAL = SQUARE // 2  # as a flag: a kernel's half
IN_WINDOW = WINDOW * (WINDOW + 1) // 2 + (LENGTH - WINDOW) * WINDOW
AMONG_PICKED = PICKED * (PICKED + 1) // 2 + (LENGTH - PICKED) * PICKED


def _past(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2])
    return at[:, None] >= at


def _window(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2])
    return _past(x) & (at[:, None] - at < WINDOW)


def _picks(q: Tensor) -> Tensor:
    """Of the keys at or before a query those of the highest scores: by a product, so by values."""
    with torch.no_grad():
        scores = (q[:, 0] @ q[:, 1].transpose(-1, -2)).masked_fill(~_past(q), float("-inf"))
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(PICKED, -1).indices, True)
        return (picked & _past(q)).unsqueeze(1)


def _fused(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k, attn_mask=mask)


def _filled(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, float("-inf"))


def _chosen(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, scores, float("-inf"))


def _added(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, torch.finfo(scores.dtype).min)


def _written(q: Tensor, k: Tensor, mask: Tensor, hide: Callable[..., Tensor] = _filled) -> Tensor:
    """With a column more that takes part in the sum, as sinks do."""
    scores = hide(q @ k.transpose(-1, -2) / DIM**0.5, mask)
    scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ k


def _read_again(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The probabilities are wanted in order, so they are there."""
    made = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1)
    return made.sort(-1).values @ k


class Layer(nn.Module):
    """Attention alone; `one`: all heads have the same key."""

    def __init__(self, attend: Callable[..., Tensor], mask: Callable[..., Tensor], *, one: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, DIM if one else WIDTH)
        self.attend, self.mask = attend, mask

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.query, self.key))
        k = k.expand(-1, HEADS, -1, -1)
        return x + self.attend(q, k, self.mask(q)).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """One layer."""

    def __init__(self, *given: Any, one: bool) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(64, WIDTH), nn.ModuleList([Layer(*given, one=one)])

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.layers[0](self.words(ids)) @ self.words.weight.T
        return made


def _layer(*given: Any, one: bool = False, **more: Any) -> dict[str, Any]:
    made = capture(Net(*given, one=one), batch=(1, LENGTH), dtype=DType.BF16, tags={"PP": "layers.*"}, **more)
    found: dict[str, Any] = made["parts"]["block"]
    return found


def _attention(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [k for k in part["passes"][name]["kernels"] if k["kind"] == "attention"]


@pytest.mark.parametrize("attend", [_fused, _written, partial(_written, hide=_chosen), partial(_written, hide=_added)])
@pytest.mark.parametrize(("mask", "pairs"), [(_window, IN_WINDOW), (_past, CAUSAL)])
def test_pairs_that_sizes_hide_are_left_out(attend: Any, mask: Any, pairs: int) -> None:
    part = _layer(attend, mask)
    (forward,), (backward,) = _attention(part, "F"), _attention(part, "I")
    assert forward["flops"] == pytest.approx(HEADS * pairs * 4 * DIM, rel=2 / LENGTH)
    assert backward["flops"] == pytest.approx(HEADS * pairs * 10 * DIM, rel=2 / LENGTH)
    assert forward["shape"][1:4] == [HEADS, LENGTH, LENGTH]


def test_pairs_that_values_hide_are_no_model_flops() -> None:
    """As many as are picked of those that may be, whatever the scores; a kernel of keys of each head works on all."""
    left, every = (HEADS * n * 4 * DIM for n in (AMONG_PICKED, SQUARE))
    part = _layer(_fused, _picks)
    (forward,) = _attention(part, "F")
    rest = sum(k["flops"] * k["count"] for k in part["passes"]["F"]["kernels"]) - forward["flops"]
    assert forward["flops"] == every and part["model_flops"] - rest == pytest.approx(left, rel=1e-6)
    (forward,) = _attention(_layer(_written, _picks, one=True), "F")
    assert forward["flops"] == pytest.approx(left, rel=1e-6)


def test_scores_are_no_traffic_of_fused_attention_but_of_what_else_reads_them() -> None:
    scores = 2 * HEADS * SQUARE
    moved = {
        attend: sum(k["bytes"] * k["count"] for k in _layer(attend, _window)["passes"]["F"]["kernels"])
        for attend in (_fused, _written, _read_again)
    }
    assert moved[_written] < 1.2 * moved[_fused] < scores < moved[_read_again]
    assert not _attention(_layer(_read_again, _window), "F")
    eager = _layer(_written, _window, compiled=False)
    assert not _attention(eager, "F") and sum(k["bytes"] for k in eager["passes"]["F"]["kernels"]) > 4 * scores


@pytest.mark.parametrize(("attend", "compiled", "told"), [(_written, True, 1), (_written, False, 0), (_fused, True, 0)])
def test_a_prediction_says_that_no_run_has_such_a_kernel(
    attend: Any, compiled: bool, told: int, tmp_path: Path
) -> None:
    made = capture(
        Net(attend, _past, one=False), batch=(1, LENGTH), dtype=DType.BF16, tags={"PP": "layers.*"}, compiled=compiled
    )
    assert [bool(part.get("written_out")) for name, part in made["parts"].items() if name == "block"] == [bool(told)]
    (tmp_path / "model.json").write_text(json.dumps(made))
    job = {"model": {"graph": str(tmp_path / "model.json"), "seq_len": LENGTH}, "cluster": {"gpu": "h100-sxm"}}
    found = piper_sim.predict(piper_sim.load_job(job)).to_dict()["warnings"]
    assert ["stores no scores" in w and "--eager" in w for w in found] == [True] * told
