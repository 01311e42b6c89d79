"""A user's own `autograd.Function`s beside what tp divides and inside of it: as in one process, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from executor.modules.user.divided.own_calls import STRETCHES, own_mismatch
from executor.modules.user.rewrites.own_functions import _named, _OwnCall
from executor.parallel.divided_reads import ShardMismatch, ValueShard
from ir.core.errors import PiperError
from tests.executor.frontend.divided.lockstep import Grid, far_apart
from tests.executor.frontend.divided.test_crossings import IDS, PLAN, Net
from tests.executor.frontend.divided.test_linears import ALONG, BESIDE

Made = Callable[[Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """What is made of x, with twice its gradient. size: any number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Made, size: int = 0) -> Tensor:
        ctx.save_for_backward(x)
        ctx.made = made
        return made(x.detach()).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(ctx.made(x), x, dy)
        return 2 * dx, None, None


class Gated(torch.autograd.Function):
    """silu(gate) · up, by formulas of its own."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate.sigmoid().mul_(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        return dy * up * (s + gate * s * (1 - s)), dy * gate * s


class Scaled(torch.autograd.Function):
    """x · scale, of which there is one for all features that all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return dy * scale, (dy * x).sum(-1, keepdim=True)


def of(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """What it returns."""
    found: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return found


def _far(net: Callable[[], Net], *, sequence: bool = False) -> float:
    return far_apart(net, IDS, Grid(2, 1, PLAN, sequence=sequence))


def _inside(what: Callable[[Tensor, Tensor], Tensor]) -> float:
    return _far(lambda: Net(inside=what))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_function_of_what_all_ranks_have_has_its_own_backward(sequence: bool) -> None:
    norm = ALONG["layer_norm"]
    assert _far(lambda: Net(between=lambda x: of(Doubled, x, norm, 7)), sequence=sequence) <= 1e-12


def test_a_function_of_each_feature_is_divided() -> None:
    assert _inside(lambda z, y: of(Gated, z, z * 2)) <= 1e-12
    assert _inside(lambda z, y: of(Doubled, z, torch.tanh)) <= 1e-12


def test_a_function_of_what_tp_divides_is_as_in_one_process_or_refused() -> None:
    equal = set()
    for name, made in BESIDE.items():
        try:
            assert _inside(lambda z, y, made=made: of(Doubled, z, made)) <= 1e-12, name
            equal.add(name)
        except PiperError as error:
            assert "autograd.Function" in error.message, name
    assert {"mean of tokens", "heads as sequences", "features as batch", "heads counted off the tensor"} <= equal, equal


@pytest.mark.parametrize("name", ALONG)
def test_a_function_that_reads_along_what_tp_divides_is_refused(name: str) -> None:
    with pytest.raises(PiperError, match=r"Doubled, in layers\.0, is an autograd\.Function that reads what tp divides"):
        _inside(lambda z, y: of(Doubled, z, ALONG[name]))


def test_a_gradient_that_adds_up_what_tp_divides_is_refused() -> None:
    with pytest.raises(PiperError, match=r"Scaled, in layers\.0, is an autograd\.Function"):
        _inside(lambda z, y: of(Scaled, z, y[..., :1]))


def test_a_function_of_several_stretches_is_refused() -> None:
    form = tree_flatten(((1,), {}))[1]
    graph, call = fx.Graph(), _OwnCall(Doubled, lambda cls, x: torch.tanh(x), [torch.ones(4, 4)], form)
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(4, 4)
    node = graph.call_function(_named(call), ([x],))
    assert own_mismatch(graph, {x: ValueShard((8, 4), 0, 1)}) is None
    assert own_mismatch(graph, {x: ValueShard((8, 4), 0, 2)}) == ShardMismatch(node, STRETCHES)


def test_a_number_made_of_what_tp_divides_is_refused() -> None:
    with pytest.raises(PiperError, match="is made of a size that tp divides"):
        _inside(lambda z, y: of(Doubled, z, torch.tanh, z.shape[-1]))
