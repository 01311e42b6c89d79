"""A GPU's few large kernels compute what a CPU's many small ones do: norms, updates, norms of gradients,
first values. torch has the same kernels on a CPU, where they are held against plain products here.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.modules import base, norms, philox
from executor.modules.base import initial
from executor.modules.norms import layer_norm, rms_norm
from executor.optim import optimizer as updates
from executor.optim.optimizer import Optimizer, square_sums
from executor.parallel.shares import ParamShard, ShardCut
from ir.job.schema import JobOptimizer

CLOSE = 1e-12


class _Kernels:
    """torch's, of which that of an RMS norm's backward is a GPU's alone: here by autograd of the whole norm."""

    _fused_rms_norm = torch.ops.aten._fused_rms_norm
    native_layer_norm = torch.ops.aten.native_layer_norm
    native_layer_norm_backward = torch.ops.aten.native_layer_norm_backward

    @staticmethod
    def _fused_rms_norm_backward(
        dy: Tensor, x: Tensor, shape: torch.Size, rate: Tensor, weight: Tensor, wanted: list[bool]
    ) -> list[Tensor]:
        assert dy.is_contiguous() and weight.dtype == x.dtype == dy.dtype and wanted == [True, True]
        eps = 1 / rate.double() ** 2 - x.double().pow(2).mean(-1, keepdim=True)
        assert rate.dtype == torch.promote_types(x.dtype, torch.float32) and float(eps.mean()) == pytest.approx(
            1e-5, 0.1
        )
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            return list(
                torch.autograd.grad(torch.nn.functional.rms_norm(leaves[0], shape, leaves[1], 1e-5), leaves, dy)
            )


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and what follows is asked of a GPU's kernels."""

    def begin() -> None:
        monkeypatch.setattr(norms, "_KERNELS", _Kernels)
        for module in (norms, updates):
            monkeypatch.setattr(module, "on_gpu", lambda x: True)

    yield begin


def _gap(a: list[Tensor], b: list[Tensor]) -> float:
    pairs = list(zip(a, b, strict=True))
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    return max(float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs)


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rms": lambda x, w, b: rms_norm(x, w, 1e-5),
    "layer": lambda x, w, b: layer_norm(x, w, None, 1e-5),
    "layer with bias": lambda x, w, b: layer_norm(x, w, b, 1e-5),
    "layer plus one": lambda x, w, b: layer_norm(x, w, b, 1e-5, 1.0),
}


def _normed(of: Callable[..., Tensor], dtype: torch.dtype, params: torch.dtype, rows: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(*rows, 24, dtype=torch.float64).to(dtype).requires_grad_()
    w, b = (torch.randn(24, dtype=torch.float64).to(params).requires_grad_() for _ in range(2))
    y = of(x, w, b)
    dy = torch.randn(24, *rows, dtype=torch.float64).movedim(0, -1).to(dtype)  # not laid out as y is
    found = torch.autograd.grad(y, (x, w, b), dy, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@pytest.mark.parametrize("rows", [(5,), (2, 33)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_those_in_plain_products(name: str, rows: tuple[int, ...], as_gpu: Callable[[], None]) -> None:
    formats = [(torch.float64, torch.float64, CLOSE), (torch.float32, torch.float32, 1e-5)]
    formats += [(torch.bfloat16, torch.bfloat16, 0.02), (torch.bfloat16, torch.float32, 0.02)]
    plain = [_normed(NORMS[name], dtype, params, rows) for dtype, params, _ in formats]
    other = _normed(lambda x, w, b: NORMS[name](x, 1.001 * w, b), torch.float64, torch.float64, rows)
    as_gpu()
    for want, (dtype, params, close) in zip(plain, formats, strict=True):
        assert _gap(_normed(NORMS[name], dtype, params, rows), want) <= close
    assert _gap(_normed(NORMS[name], torch.float64, torch.float64, rows), other) > 1e-5


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("formats", ["float64 float64", "float32 float32", "bfloat16 float32"])
def test_updates_are_torchs(formats: str, scale: float, as_gpu: Callable[[], None]) -> None:
    dtype, wide = (getattr(torch, name) for name in formats.split())
    as_gpu()
    torch.manual_seed(0)
    sizes = {
        "a.weight": (7, 3),
        "b.bias": (70,),
        "c.weight": (4, 5),
        "d.weight": (30,),
        "e.weight": (2,),
        "f.bias": (1,),
    }
    mine = {n: torch.randn(size, dtype=dtype) for n, size in sizes.items()}  # several in a list, and in lists of copies
    theirs = {n: p.to(wide, copy=True).requires_grad_() for n, p in mine.items()}
    config = JobOptimizer(lr=0.1, weight_decay=0.1, no_decay=("*bias",), clip_norm=1.0)
    heavy, light = ([p for n, p in theirs.items() if n.endswith(end)] for end in ("weight", "bias"))
    groups = [{"params": heavy}, {"params": light, "weight_decay": 0.0}]
    oracle, opt = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, foreach=False), Optimizer(config, mine, wide)
    for step in range(3):
        given = {n: torch.randn_like(p) for n, p in mine.items()}
        for n, p in theirs.items():
            p.grad = given[n].to(wide) * scale
        opt.step({n: g.clone() for n, g in given.items()}, torch.tensor(scale, dtype=torch.float64) if step else scale)
        oracle.step()
        held = [opt.kept(n)["weight"] for n in mine]
        close = CLOSE if wide is torch.float64 else 1e-6  # scales of other kernels are numbers of float32
        assert _gap(held, [p.detach() for p in theirs.values()]) <= close
        assert all(torch.equal(p, opt.kept(n)["weight"].to(dtype)) for n, p in mine.items())
    assert _gap(held, [p.detach() * 1.001 for p in theirs.values()]) > 1e-4


def test_flat_shards_decay_where_their_parameters_do(as_gpu: Callable[[], None]) -> None:
    runs = {"flat:x": ((slice(0, 3), 0.5), (slice(3, 5), 0.0))}
    start, grads = {"flat:x": torch.ones(5)}, {"flat:x": torch.zeros(5)}
    as_gpu()
    Optimizer(JobOptimizer(lr=0.5), start, torch.float32, runs).step(grads)
    assert start["flat:x"].tolist() == [0.75, 0.75, 0.75, 1.0, 1.0]


def test_square_sums_are_those_row_by_row(as_gpu: Callable[[], None]) -> None:
    torch.manual_seed(0)
    for dtype, close in ((torch.float64, CLOSE), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        grads = {"c": torch.randn(40, 50).to(dtype), "a": torch.randn(7).to(dtype)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(updates, "on_gpu", lambda x: False)
            want = square_sums(grads, ["a", "b", "c"])
        as_gpu()
        found = square_sums(grads, ["a", "b", "c"])
        assert found.dtype is torch.float64 and found[1] == 0 and _gap([found], [want]) <= close
    assert square_sums({}, ["a"]).tolist() == [0.0]


def test_words_of_any_stretches_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    r = np.random.default_rng(0)
    for _ in range(100):
        key, drawn = int.from_bytes(r.bytes(16), "big"), int(r.integers(1, 60))
        gaps, counts = r.integers(0, 30, 6), r.integers(1, 40, 6)
        gaps[0] += 4 * int(r.integers(0, 2**40))
        starts = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(counts)[:-1]])
        monkeypatch.setattr(philox, "DRAWN", drawn)
        found = [x.numpy().view(np.uint64) for x in philox.words(key, starts, counts, torch.device("cpu"))]
        assert np.array_equal(np.concatenate(found), np.concatenate(list(base._words(key, starts, counts))))


def test_first_values_drawn_on_a_gpu_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    share = ParamShard((6, 20), (ShardCut(1, 1, 2, (12, 8)),))
    want = initial("w", share, 3, 0.02, torch.float64)
    drawn: list[torch.device] = []

    def words(key: int, starts: np.ndarray, counts: np.ndarray, device: torch.device) -> Iterator[Tensor]:
        drawn.append(device)
        return real(key, starts, counts, torch.device("cpu"))

    real = philox.words
    monkeypatch.setattr(philox, "words", words)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: torch.zeros(*size, dtype=dtype))
    found = initial("w", share, 3, 0.02, torch.float64, where=torch.device("cuda", 0))
    assert drawn == [torch.device("cuda", 0)] and torch.equal(found, want)
