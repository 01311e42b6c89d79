"""What would make a user's module train differently under each plan is refused before a rank starts."""

import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from executor.device.valueless import ValuelessModel
from executor.frontend.measure import without_values
from executor.modules.user.annotate import annotate
from executor.modules.user.model import UserModel
from ir.core.errors import ErrorKind, PiperError

Twist = Callable[[nn.Module, Tensor], Tensor]


class Twisted(nn.Module):
    """A layer with something done to what it computes."""

    def __init__(self, twist: Twist) -> None:
        super().__init__()
        self.linear, self.twist = nn.Linear(4, 4), twist
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.kept, self.table = 0, None, None

    def forward(self, x: Tensor) -> Tensor:
        return self.twist(self, self.linear(x))


class Net(nn.Module):
    def __init__(self, twist: Twist) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(8, 4), Twisted(twist), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        with annotate("PP"):
            x = self.layer(x)
        return self.head(x)


def _attention(p: float) -> Twist:
    return lambda m, x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)


def _writes(m: nn.Module, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return x - m.mean


def _remembers(m: nn.Module, x: Tensor) -> Tensor:
    before, m.kept = m.kept, x.detach()
    return x if before is None else x + before


def _counts(m: nn.Module, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.calls


def _sometimes(m: nn.Module, x: Tensor) -> Tensor:
    return x if random.random() < 1.0 else torch.zeros_like(x)  # always the same here, and yet drawn


IMPURE: dict[str, tuple[Twist, str]] = {
    "dropout by function": (lambda m, x: nn.functional.dropout(x, 0.1), "draws random numbers"),
    "noise": (lambda m, x: x + torch.randn_like(x), "draws random numbers"),
    "dropout in attention": (_attention(0.1), "draws random numbers"),
    "a buffer": (_writes, "writes layer.mean in forward"),
    "memory": (_remembers, "does not do the same twice|reads what an earlier call computed"),
    "a counter": (_counts, "does not do the same twice"),
    "the clock": (lambda m, x: x * time.perf_counter_ns(), "does not do the same twice"),
    "Python's generator": (_sometimes, "on the host"),
    "numpy's generator": (lambda m, x: x + 0.0 * float(np.random.rand() < 2), "on the host"),
}


def _table(m: nn.Module, x: Tensor) -> Tensor:
    if m.table is None:
        m.table = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1).cos()
    return x * m.table


def _named(m: nn.Module, x: Tensor) -> Tensor:
    with torch.profiler.record_function("twist"):
        return x * 2.0


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1.0 + 0.04 * x * x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_that_optimizes_what_it_has_run_before_does_the_same() -> None:
    gelu = torch.jit.script(_gelu)
    model = UserModel(lambda: Net(lambda m, x: gelu(x)), tags=TAGS, batch=(2, 3))
    model.refuse_impure(2, 3)
    model.refuse_unlike(8, 1)


PURE: dict[str, Twist] = {
    "a stretch with a name for the profiler": _named,
    "nothing": lambda m, x: x,
    "dropout of nothing": lambda m, x: nn.functional.dropout(x, 0.1, training=False),
    "attention": _attention(0.0),
    "a buffer that is read": lambda m, x: x - m.mean,
    "in place, of its own": lambda m, x: x.clone().mul_(2.0),
    "a table made of sizes": _table,
}


@pytest.mark.parametrize(("twist", "said"), IMPURE.values(), ids=IMPURE)
def test_what_depends_on_more_than_parameters_and_inputs_is_refused(twist: Twist, said: str) -> None:
    with pytest.raises(PiperError, match=said) as caught:
        UserModel(lambda: Net(twist)).refuse_impure(2, 3)
    assert caught.value.kind is ErrorKind.MODEL and "l0" in caught.value.message and caught.value.allowed


@pytest.mark.parametrize("twist", PURE.values(), ids=PURE)
def test_what_depends_on_them_alone_is_not(twist: Twist) -> None:
    UserModel(lambda: Net(twist)).refuse_impure(2, 3)


@cache
def _cached(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32).unsqueeze(-1)


def test_a_table_that_the_file_keeps_for_all_calls_is_no_reason_to_fail() -> None:
    """Exported, it is without values, and so is whatever the code makes by itself behind that."""
    _cached.cache_clear()
    model = UserModel(lambda: Net(lambda m, x: x + _cached(x.shape[1])), tags=TAGS, batch=(2, 3))
    model.refuse_impure(2, 3)
    model.refuse_unlike(8, 1)
    with pytest.raises(PiperError) as caught:  # of another export
        UserModel(lambda: Net(lambda m, x: x + _cached(x.shape[1])), tags=TAGS, batch=(2, 3)).refuse_impure(2, 3)
    assert str(caught.value.suggestion).startswith("keep in the module what")
    _cached.cache_clear()


def _lists(m: nn.Module, x: Tensor) -> Tensor:
    vars(m).setdefault("seen", []).append(1)
    return x * len(vars(m)["seen"])


def _hides(m: nn.Module, x: Tensor) -> Tensor:
    m._buffers["mean"] = m.mean * 0.9 + 0.1
    return x - m.mean


def _each(m: nn.Module, x: Tensor) -> Tensor:
    torch._foreach_add_([m.mean], 1.0)
    return x - m.mean


LATER: dict[str, tuple[Twist, str]] = {
    "memory": (_remembers, "reads what an earlier call computed"),
    "a list": (_lists, "does not do the same twice"),
    "the clock": (lambda m, x: x * time.perf_counter_ns(), "does not do the same twice"),
    "a generator without a seed": (lambda m, x: x * float(np.random.default_rng().random()), "not do the same twice"),
    "a buffer, unseen": (_hides, "reads what an earlier call computed"),
    "a list of buffers": (_each, "writes layer.mean in forward"),
}
TAGS = {"PP": "layer"}
ASSIGNED = pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch.export's, which a run shows and goes on


@ASSIGNED
@pytest.mark.parametrize(("twist", "said"), LATER.values(), ids=LATER)
def test_what_a_graph_would_have_of_one_call_for_ever_is_refused(twist: Twist, said: str) -> None:
    with pytest.raises(PiperError, match=said):
        UserModel(lambda: Net(twist), tags=TAGS, batch=(2, 3)).refuse_unlike(8, 1)


def _literal(m: nn.Module, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add_(1, torch.tensor([2, 0, 1]), x)


@ASSIGNED
@pytest.mark.parametrize("twist", [*PURE.values(), _literal], ids=[*PURE, "numbers written in forward"])
def test_what_does_not_is_exported_and_makes_the_same(twist: Twist) -> None:
    model = UserModel(lambda: Net(twist), tags=TAGS, batch=(2, 3))
    model.refuse_impure(2, 3)
    model.refuse_unlike(8, 1)


@pytest.mark.parametrize("asks", [torch.compiler.is_exporting, torch.compiler.is_compiling])
def test_a_forward_that_goes_another_way_where_it_is_exported_is_refused(asks: Callable[[], bool]) -> None:
    model = UserModel(lambda: Net(lambda m, x: x * 3 if asks() else x), tags=TAGS, batch=(2, 3))
    with pytest.raises(PiperError, match="something else than the module's own forward") as info:
        model.refuse_unlike(8, 1)
    assert info.value.kind.exit_code == 2 and info.value.suggestion


def test_values_drawn_on_the_host_at_the_start_are_the_same_on_every_rank() -> None:
    def build() -> Net:
        net = Net(lambda m, x: x)
        with torch.no_grad():
            net.head.weight.fill_(random.random()).add_(float(np.random.rand()))
        return net

    before = random.getstate()
    a, b, c = (UserModel(build, seed=s).module.head.weight for s in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c) and random.getstate() == before


class Later:
    """What is done to a gradient. way: how."""

    def __init__(self, way: str) -> None:
        self.way, self.calls, self.kept = way, 0, torch.zeros(())

    def __call__(self, grad: Tensor) -> Tensor:
        self.calls += 1
        old, self.kept = self.kept, grad
        ways: dict[str, Callable[[], Tensor]] = {
            "counts": lambda: grad * self.calls,
            "remembers": lambda: grad + old,
            "draws": lambda: grad + torch.randn_like(grad),
            "scales": lambda: grad.clamp(-1.0, 1.0) * 0.5,
            "asks": lambda: grad * grad.sum().item(),
        }
        return ways[self.way]()


def _of_hook(later: Later) -> Net:
    net = Net(lambda m, x: x)
    net.head.weight.register_hook(later)
    return net


def _of_function(later: Later) -> Net:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return later(dy)

    function: Any = Kept
    return Net(lambda m, x: function.apply(x))


@pytest.mark.parametrize("build", [_of_hook, _of_function])
def test_a_backward_that_goes_by_more_than_its_inputs_is_refused(build: Callable[[Later], Net]) -> None:
    for way in ("scales", "asks"):
        UserModel(lambda way=way: build(Later(way)), tags=TAGS, batch=(2, 3)).refuse_unlike(8, 1)
    said = {
        "counts": "does not do the same twice",
        "remembers": "earlier call computed",
        "draws": "draws random numbers",
    }
    for way, what in said.items():
        with pytest.raises(PiperError, match=f"backward .*{what}"):
            UserModel(lambda way=way: build(Later(way)), tags=TAGS, batch=(2, 3)).refuse_unlike(8, 1)


def test_a_build_that_ends_the_process_is_named() -> None:
    def build() -> nn.Module:
        raise SystemExit(3)

    with pytest.raises(PiperError, match=r"build\(\) failed: SystemExit: 3"):
        UserModel(build)


def test_a_build_that_asks_for_values_is_refused_where_there_are_none() -> None:
    def build(trivial: bool) -> Net:
        net = Net(lambda m, x: x)
        orthogonal(net.layer.linear, use_trivialization=trivial)
        return net

    with without_values():
        UserModel(lambda: build(False), dtype=None, tags=TAGS, batch=(2, 3))
        with pytest.raises(PiperError, match=r"build\(\) asks for values \(aten.allclose") as info:
            UserModel(lambda: build(True), dtype=None, tags=TAGS, batch=(2, 3))
    assert "use_trivialization=False" in str(info.value.suggestion)


def test_bounds_of_what_is_drawn_ask_for_no_values_where_there_are_none() -> None:
    def build() -> Net:
        net = Net(lambda m, x: x)
        nn.init.trunc_normal_(net.layer.linear.weight, std=0.5, a=-0.25, b=0.25)
        return net

    with without_values():
        UserModel(build, dtype=None, tags=TAGS, batch=(2, 3))
    with ValuelessModel().building() as mode:
        assert mode.without(build().layer.linear.weight)
    drawn = build().layer.linear.weight
    assert 0.0 < drawn.abs().max() <= 0.25 and drawn.std() > 0.05
