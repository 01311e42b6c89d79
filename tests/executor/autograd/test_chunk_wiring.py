"""Stages whose units are no chain: values with two readers, several outputs, losses on the way, each made again."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from executor.autograd.stage import Stage
from executor.modules.base import BuiltChunks, evaluate, wiring
from ir.core.ops import Pass
from tests.executor.reference import forward, input_grad

torch.set_num_threads(1)
D = 4


class Line(nn.Module):
    """One linear layer and a bend."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).tanh()


class Fork(Line):
    """Two outputs with gradients, one without."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = super().forward(x)
        return y, y * y, y.argmax(-1)


class Left(Line):
    """Reads the first of three."""

    def forward(self, a: Tensor, b: Tensor, at: Tensor) -> Tensor:
        return super().forward(a)


class Right(Line):
    """Reads all of them."""

    def forward(self, a: Tensor, b: Tensor, at: Tensor) -> Tensor:
        return super().forward(a + b) * at.unsqueeze(-1)


class Join(nn.Module):
    """No weights, hence no W."""

    def forward(self, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return x + a * b


class Loss(Line):
    """A number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


READS = {
    "l0.left": ("l0.fork",),
    "l0.right": ("l0.fork",),
    "l0.join": ("l0.left", "l0.right", "l0.in"),
    "side": ("l0.join",),
    "head": ("l0.join",),
}


@pytest.fixture
def built() -> Iterator[BuiltChunks]:
    torch.manual_seed(0)
    kinds = {
        "l0.in": Line,
        "l0.fork": Fork,
        "l0.left": Left,
        "l0.right": Right,
        "l0.join": Join,
        "side": Loss,
        "head": Loss,
    }
    units: dict[str, nn.Module] = {name: kind() for name, kind in kinds.items()}
    params = {f"{u}.{n}": p for u, m in units.items() for n, p in m.named_parameters()}
    yield BuiltChunks(units, params, {}, READS)


def _plain(built: BuiltChunks, x: Tensor) -> tuple[float, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    loss = evaluate(built, x, {})
    names = list(built.params)
    dx, *dws = torch.autograd.grad(loss, [x, *built.params.values()])
    return loss.item(), dx, dict(zip(names, dws, strict=True))


AGAIN = [
    (),
    ("l0.in", "l0.fork", "l0.left", "l0.right", "l0.join"),
    ("l0.fork", "l0.right"),
    ("l0.left", "l0.join", "head"),
]


@pytest.mark.parametrize("again", AGAIN, ids=lambda a: f"{len(a)} again")
@pytest.mark.parametrize("ahead", [False, True])
def test_any_wiring_equals_plain_autograd_bitwise(built: BuiltChunks, again: tuple[str, ...], ahead: bool) -> None:
    stage = Stage(built.units, built.params, reads=built.reads, recompute=again)
    x = [torch.randn(3, D, dtype=torch.float64) for _ in range(2)]
    want = [_plain(built, one) for one in x]
    for mb, one in enumerate(x):
        assert forward(stage, mb, one)[0].item() == want[mb][0]
    for mb in (1, 0):
        if ahead:
            stage.run(Pass.R, mb, [u for u in again if u != "l0.join"])
        assert torch.equal(input_grad(stage, mb)[0], want[mb][1])
        stage.run(Pass.W, mb)
    assert stage.in_flight == 0
    for name, grad in want[1][2].items():
        assert torch.equal(stage.grads[name], grad + want[0][2][name]), name


def test_units_run_one_by_one_hold_only_what_is_read_later(built: BuiltChunks) -> None:
    stage = Stage(built.units, built.params, reads=built.reads)
    stage.feed(0, torch.randn(3, D, dtype=torch.float64))
    held = {}
    for unit in built.units:
        stage.run(Pass.F, 0, [unit])
        held[unit] = set(stage._flows[0].acts)
    assert held["l0.fork"] == {"l0.in", "l0.fork"} and held["l0.right"] == {"l0.in", "l0.left", "l0.right"}
    assert held["l0.join"] == {"l0.join"} and held["head"] == {"side", "head"}


def test_a_missing_reader_would_be_seen(built: BuiltChunks) -> None:
    """The negative control: a gradient that is not passed on changes the sum."""
    reads = {**READS, "l0.join": ("l0.left", "l0.right", "l0.left")}
    x = torch.randn(3, D, dtype=torch.float64)
    stage = Stage(built.units, built.params, reads=reads)
    forward(stage, 0, x)
    input_grad(stage, 0)
    stage.run(Pass.W, 0)
    assert not torch.equal(stage.grads["l0.in.w"], _plain(built, x)[2]["l0.in.w"])


def test_what_is_not_here_comes_from_outside() -> None:
    assert wiring(["l1.attn", "l1.mlp"], {"l1.attn": ("l0.mlp",)}) == {"l1.attn": ("",), "l1.mlp": ("l1.attn",)}
    assert wiring(["mtp0.embed"], {"mtp0.embed": ()}) == {"mtp0.embed": ()}


class Narrow(nn.Module):
    """A weight wider than what it meets, cast for two products; where: the casts' addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.where = nn.Parameter(torch.randn(D, D)), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        one, other = (self.w.to(torch.bfloat16) for _ in range(2))
        self.where += [one.data_ptr(), other.data_ptr()]
        return nn.functional.linear(nn.functional.linear(x, one), other)


def test_microbatches_in_flight_share_the_casts_of_wide_weights() -> None:
    torch.manual_seed(0)
    unit, x = Narrow(), torch.randn(3, D, dtype=torch.bfloat16)
    stage = Stage({"l0": unit}, {"w": unit.w})
    for step in range(2):
        for mb in range(3):
            assert torch.equal(forward(stage, mb, x)[0], unit(x))
            (want,) = torch.autograd.grad(unit(x), unit.w, torch.ones_like(x))
        assert len({*unit.where[0::6], *unit.where[1::6]}) == 1, "those of the stage, of every six"
        for mb in range(3):
            stage.feed_grad(mb, torch.ones_like(x))
            stage.run(Pass.I, mb)
            stage.run(Pass.W, mb)
            stage.take_input_grad(mb)
        assert torch.equal(stage.grads["w"], 3 * want), step
        assert not stage._casts, "the next step's weights are others"
        unit.where.clear()
        stage.grads["w"].zero_()
        with torch.no_grad():
            unit.w.mul_(-2)
