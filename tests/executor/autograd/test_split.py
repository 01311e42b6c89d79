"""I then W equals the whole backward, bit for bit, for many shapes of module; nothing is held afterwards."""

import gc
import weakref
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.autograd.deferred import DeferredLinearPass
from executor.autograd.split import SplitPass
from executor.modules.functions import grouped_linear
from executor.modules.norms import rms_norm

D = 8
aten = torch.ops.aten
torch.set_num_threads(1)


class Fn(nn.Module):
    """A module from a function of (self, x) and some parameters or submodules."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.fn = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


class Square(torch.autograd.Function):
    """A user's own function, which no torch-function mode can see."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w * w, (dy * x * 2 * w).sum((0, 1))


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def _attention(s: Fn, x: Tensor) -> Tensor:
    q, k, v = (m(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for m in (s.q, s.k, s.v))
    return x + s.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


def _write_in_place(s: Fn, x: Tensor) -> Tensor:
    x = x * 2
    x += s.w
    x.mul_(s.v)
    return x


def _autocast(s: Fn, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return s.m(x).to(x.dtype) + x


CASES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "no bias": lambda: nn.Linear(D, D, bias=False),
    "linear, one output": lambda: Fn(lambda s, x: x * s.m(x), m=nn.Linear(D, 1)),
    "linear, one input": lambda: Fn(lambda s, x: x + s.m(x[..., :1].contiguous()), m=nn.Linear(1, D)),
    "linear of columns": lambda: Fn(lambda s, x: s.m(x.transpose(0, 1)).transpose(0, 1), m=nn.Linear(D, D)),
    "linear of a weight": lambda: Fn(
        lambda s, x: x @ F.linear(s.w, s.v) + F.linear(x, s.v, s.b), w=P(D, D), v=P(D, D), b=P(D)
    ),
    "linear of what weights made": lambda: Fn(
        lambda s, x: x @ F.linear(s.w.tanh(), s.v, s.b), w=P(D, D), v=P(D, D), b=P(D)
    ),
    "linear, a fixed weight": lambda: Fn(lambda s, x: F.linear(x, torch.eye(D, dtype=x.dtype), s.b), b=P(D)),
    "linear, exported": lambda: Fn(
        lambda s, x: aten.linear.default(x, s.w, s.b) + aten.linear.default(x, s.v), w=P(D, D), v=P(D, D), b=P(D)
    ),
    "addmm": lambda: Fn(lambda s, x: torch.addmm(s.b, x.view(-1, D), s.w).view_as(x), w=P(D, D), b=P(D)),
    "addmm, exported": lambda: Fn(
        lambda s, x: aten.addmm.default(s.b, x.view(-1, D), s.w).view_as(x) * s.b, w=P(D, D), b=P(D)
    ),
    "addmm, a bias for each row": lambda: Fn(
        lambda s, x: torch.addmm(s.b, x.view(-1, D), s.w).view_as(x), w=P(D, D), b=P(6, D)
    ),
    "addmm, one bias": lambda: Fn(lambda s, x: torch.addmm(s.b, x.view(-1, D), s.w).view_as(x), w=P(D, D), b=P(1)),
    "addmm of columns": lambda: Fn(
        lambda s, x: (
            torch.addmm(s.b, x.view(-1, D), s.w.t()).view_as(x)
            + torch.addmm(s.b, x.transpose(0, 1).reshape(-1, D).t().contiguous().t(), s.w).view_as(x)
        ),
        w=P(D, D),
        b=P(D),
    ),
    "addmm, scaled": lambda: Fn(
        lambda s, x: torch.addmm(s.b, x.view(-1, D), s.w, beta=2.0, alpha=0.5).view_as(x), w=P(D, D), b=P(D)
    ),
    "autocast": lambda: Fn(_autocast, m=nn.Linear(D, D)),
    "linears written to": lambda: nn.Sequential(
        nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D, bias=False), nn.ReLU(inplace=True)
    ),
    "a linear nobody reads": lambda: Fn(lambda s, x: (s.f(x), s.g(x))[1], f=nn.Linear(D, D), g=nn.Linear(D, D)),
    "mlp": lambda: nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D)),
    "layer norm": lambda: nn.LayerNorm(D),
    "attention": lambda: Fn(_attention, **{n: nn.Linear(D, D) for n in "qkvo"}),
    "matmul": lambda: Fn(lambda s, x: x @ s.w, w=P(D, D)),
    "einsum": lambda: Fn(lambda s, x: torch.einsum("btd,de->bte", x, s.w), w=P(D, D)),
    "transposed": lambda: Fn(lambda s, x: x @ s.w.t(), w=P(D, D)),
    "cast": lambda: Fn(lambda s, x: F.linear(x.double(), s.w.double()).float() + x, w=P(D, D)),
    "concatenated": lambda: Fn(lambda s, x: x @ torch.cat([s.w[:3], s.v[3:]]), w=P(D, D), v=P(D, D)),
    "used twice": lambda: Fn(lambda s, x: (x @ s.w).tanh() @ s.w + x @ s.w, w=P(D, D)),
    "twice, once transposed": lambda: Fn(lambda s, x: (x @ s.w).tanh() @ s.w.t(), w=P(D, D)),
    "scale and shift": lambda: Fn(lambda s, x: x * s.w + x + s.v, w=P(D), v=P(D)),
    "in place": lambda: Fn(_write_in_place, w=P(D), v=P(D)),
    "several outputs": lambda: Fn(
        lambda s, x: torch.stack((x + s.w).chunk(2, -1)[::-1]).sum(0).repeat(1, 1, 2), w=P(D)
    ),
    "own function": lambda: Fn(lambda s, x: Square.apply(x, s.w) + x @ s.v, w=P(D), v=P(D, D)),
    "beside a None": lambda: Fn(
        lambda s, x: x + s.m(x, x, x, need_weights=False)[0], m=nn.MultiheadAttention(D, 2, batch_first=True)
    ),
    "own norm": lambda: Fn(lambda s, x: x + rms_norm(x, s.w, 1e-5) @ s.v, w=P(D), v=P(D, D)),
    "experts": lambda: Fn(lambda s, x: x + grouped_linear(x.flatten(0, 1), s.w, [1, 0, 5]).view_as(x), w=P(3, D, D)),
    "weight alone": lambda: Fn(lambda s, x: x + (s.w * 2).sum(), w=P(D)),
    "no weights": lambda: Fn(lambda s, x: x.tanh()),
    "frozen": lambda: Fn(lambda s, x: s.f(s.g(x)), f=nn.Linear(D, D).requires_grad_(False), g=nn.Linear(D, D)),
    "input given back": lambda: Fn(lambda s, x: x),
}


@pytest.mark.parametrize("case", ["linear", "linear, exported", "addmm", "addmm, exported"])
def test_linears_stay_in_torch_s_own_graph(case: str) -> None:
    module = CASES[case]()
    run = SplitPass(dict(module.named_parameters()), lambda name, grad: None)
    run.forward(module, torch.randn(2, 3, D))
    assert {type(job) for job in run.jobs if len(job.weights) > 1} == {DeferredLinearPass}


def _plain(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor | None]]:
    x = x.clone().requires_grad_(x.is_floating_point())
    y = module(x)
    if y.requires_grad:
        y.backward(dy)
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_halves_equal_the_whole_bitwise(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = CASES[case]()
    if case != "cast":
        module.to(dtype)
    x, dy = (torch.randn(2, 3, D, dtype=torch.float32 if case == "cast" else dtype) for _ in range(2))
    y, dx, dws = _plain(module, x, dy)
    got: dict[str, Tensor] = {}
    run = SplitPass(dict(module.named_parameters()), got.__setitem__)
    (mine,) = run.forward(module, x)
    assert torch.equal(mine, y) and not mine.requires_grad
    (mydx,) = run.input_grad(dy)
    assert not got
    run.weight_grad()
    assert dx is not None and mydx is not None and torch.equal(mydx, dx)
    assert got.keys() == {n for n, g in dws.items() if g is not None}
    for name, grad in got.items():
        assert torch.equal(grad, dws[name]), name


@pytest.mark.parametrize("case", ["mlp", "attention", "layer norm", "matmul", "used twice", "scale and shift"])
def test_torchs_private_split_gives_the_same(case: str) -> None:
    backward = import_module("torch.distributed.pipelining._backward")
    torch.manual_seed(1)
    module = CASES[case]()
    x, dy = torch.randn(2, 3, D), torch.randn(2, 3, D)
    leaf = x.clone().requires_grad_()
    y = module(leaf).clone()  # it detaches its output in place, which a view refuses
    (dx,), groups = backward.stage_backward_input([y], [dy], [leaf], module.parameters())
    backward.stage_backward_weight(module.parameters(), groups)
    got: dict[str, Tensor] = {}
    run = SplitPass(dict(module.named_parameters()), got.__setitem__)
    run.forward(module, x)
    (mydx,) = run.input_grad(dy)
    run.weight_grad()
    assert torch.equal(mydx, dx)
    for name, p in module.named_parameters():
        assert torch.equal(got[name], p.grad), name


def test_a_linear_s_input_that_is_written_to_is_refused_as_torch_does() -> None:
    def forward(s: Fn, x: Tensor) -> Tensor:
        h = x * 2
        y: Tensor = s.m(h)
        h.mul_(2)
        return y

    module, x = Fn(forward, m=nn.Linear(D, D)), torch.randn(2, 3, D)
    with pytest.raises(RuntimeError, match="inplace"):
        _plain(module, x, x)
    run = SplitPass(dict(module.named_parameters()), lambda name, grad: None)
    run.forward(module, x)
    run.input_grad(x)
    with pytest.raises(RuntimeError, match="in place"):
        run.weight_grad()


def test_an_embedding_has_no_input_gradient_and_all_its_work_in_w() -> None:
    torch.manual_seed(0)
    module, ids, dy = nn.Embedding(5, D), torch.tensor([[1, 1, 4]]), torch.randn(1, 3, D)
    _, _, dws = _plain(module, ids, dy)
    got: dict[str, Tensor] = {}
    run = SplitPass(dict(module.named_parameters()), got.__setitem__)
    run.forward(module, ids)
    assert run.input_grad(dy) == (None,) and not got
    run.weight_grad()
    assert torch.equal(got["weight"], dws["weight"])


def test_weights_below_an_integer_input_get_theirs_too() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, D), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    ids = torch.tensor([[1, 1, 4]])
    _, _, dws = _plain(module, ids, torch.ones(1, 3, 1))
    got: dict[str, Tensor] = {}
    run = SplitPass(dict(module.named_parameters()), got.__setitem__)
    run.forward(module, ids)
    run.input_grad(torch.ones(1, 3, 1))
    run.weight_grad()
    assert all(torch.equal(got[n], g) for n, g in dws.items() if g is not None) and len(got) == 5


def test_i_frees_what_only_it_needs_and_w_the_rest() -> None:
    """Between I and W only what weight gradients read is alive: here x, and not the saved output of tanh."""
    kept: dict[str, weakref.ref[Tensor]] = {}

    def forward(s: Fn, x: Tensor) -> Tensor:
        h = x @ s.w
        t = h.tanh()
        kept["tanh"] = weakref.ref(t.untyped_storage())
        return t * 2

    module, x = Fn(forward, w=P(D, D)), torch.randn(2, 3, D)
    data = weakref.ref(x.untyped_storage())
    run = SplitPass(dict(module.named_parameters()), lambda name, grad: None)
    y = run.forward(module, x)
    del x, y
    gc.collect()
    assert kept["tanh"]() is not None and data() is not None
    run.input_grad(torch.ones(2, 3, D))
    assert kept["tanh"]() is None and data() is not None
    run.weight_grad()
    assert data() is None


def test_a_module_with_two_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    w = P(D, D)
    a, b, da, db = (torch.randn(2, 3, D) for _ in range(4))

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w + y, y * 2

    ra, rb = a.clone().requires_grad_(), b.clone().requires_grad_()
    torch.autograd.backward(f(ra, rb), (da, db))
    got: dict[str, Tensor] = {}
    run = SplitPass({"w": w}, got.__setitem__)
    run.forward(f, a, b)
    xa, xb = run.input_grad(da, db)
    run.weight_grad()
    assert torch.equal(xa, ra.grad) and torch.equal(xb, rb.grad) and torch.equal(got["w"], w.grad)
