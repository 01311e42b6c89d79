"""What people write in a forward, against plain torch: functions with a backward of their own, layers called twice."""

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor.autograd.compiled import CompiledPart, _traced
from executor.autograd.split import SplitPass
from executor.frontend.capture import capture
from executor.frontend.measure import without_values
from executor.modules.user.annotate import annotate
from executor.modules.user.model import UserModel
from ir.core.errors import PiperError

WIDTH, VOCAB, BATCH = 4, 9, (2, 3)


class Stepped(torch.autograd.Function):
    """Steps, whose gradient is as if there were none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x to quarters."""
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Straight through."""
        return dy


class Bent(torch.autograd.Function):
    """Of a function, whose gradient is a third of what is handed in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """What it makes."""
        return how(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Not its own."""
        return dy / 3, None


class Spread(torch.autograd.Function):
    """A linear with a gradient that is not its own, and results of several kinds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: dict[str, float]) -> Any:
        """The linear, where it is positive, nothing, and the number that it was given."""
        ctx.save_for_backward(x, weight)
        y = x @ weight.T * how["by"]
        ctx.mark_non_differentiable(positive := y > 0)
        return y, [positive, None], how["by"]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: object) -> tuple[Tensor, Tensor, None]:
        """Half of what it should be, and seven tenths."""
        x, weight = ctx.saved_tensors
        return dy @ weight * 0.5, torch.einsum("bto,bti->oi", dy, x) * 0.7, None


def of(function: type[torch.autograd.Function], *args: object) -> Any:
    """What it returns."""
    return function.apply(*args)


class Layer(nn.Module):
    """A linear, and what is done with it."""

    turns: Tensor
    shift: Tensor

    def __init__(self, how: Callable[["Layer", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.scale, self.how = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH)), how
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.rand(WIDTH // 2)))

    def forward(self, x: Tensor) -> Tensor:
        """The scale is read by all."""
        return x + self.how(self, x) * self.scale


class Net(nn.Module):
    """Two such layers, called so many times."""

    def __init__(self, how: Callable[[Layer, Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Layer(how) for _ in range(2))
        self.times = times

    def forward(self, ids: Tensor) -> Tensor:
        """Features."""
        x: Tensor = self.embed(ids)
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return x


def spread(layer: Layer, x: Tensor) -> Tensor:
    """All that the function returns is used."""
    y, (positive, nothing), by = of(Spread, x, layer.linear.weight, {"by": 1.5})
    assert nothing is None
    found: Tensor = torch.tanh(y + layer.linear.bias) * positive * by
    return found


def in_place(layer: Layer, x: Tensor) -> Tensor:
    """Writes of parameters into what the layer has made."""
    y: Tensor = layer.linear(x)
    y.mul_(layer.scale)
    y.add_(layer.linear.bias, alpha=2.0)
    y[:, 0] = layer.scale
    return y


def turned(layer: Layer, x: Tensor) -> Tensor:
    """Rotary embedding, as complex numbers have it."""
    pairs = torch.view_as_complex(layer.linear(x).view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * layer.turns).flatten(-2)


WAYS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "own backward": lambda layer, x: layer.linear(of(Stepped, x)),
    "own backward of a function": lambda layer, x: of(Bent, layer.linear(x), torch.tanh) + of(Bent, x, F.gelu),
    "several results": spread,
    "checkpointed": lambda layer, x: checkpoint(layer.linear, x, use_reentrant=False),
    "checkpointed, reentrant": lambda layer, x: checkpoint(layer.linear, x, use_reentrant=True),
    "in place": in_place,
    "complex buffer": turned,
}


def both(
    build: Callable[[], nn.Module], tags: dict[str, str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a module in chunks, forward and then backward in halves, and those of plain torch; in float64."""
    tags = {"PP": "layers.*"} if tags is None else tags
    model = UserModel(build, dtype=torch.float64, tags=tags, batch=BATCH)
    model.refuse_training()
    built, ids = model.build(model.chunks), torch.arange(6).view(BATCH)
    names, grads = {id(p): n for n, p in built.params.items()}, dict[str, Tensor]()

    def add(name: str, grad: Tensor) -> None:
        grads[name] = grads.get(name, 0) + grad

    runs, x = [], tuple[Tensor, ...]((ids,))
    for chunk in model._cut.chunks.values():
        runs.append(SplitPass({names[id(p)]: p for p in chunk.parameters()}, add))
        x = runs[-1].forward(chunk, *x)
    dys: tuple[Tensor | None, ...] = (torch.cos(x[0]),)
    for run in reversed(runs):
        dys = run.input_grad(*dys)
        run.weight_grad()
    torch.manual_seed(0)
    net = build()
    for t in (*net.parameters(), *net.buffers()):
        t.data = t if t.is_complex() else t.double()
    net(ids).backward(torch.cos(net(ids)).detach())
    return grads, {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_code_as_it_is_written(way: str) -> None:
    ours, theirs = both(lambda: Net(WAYS[way]))
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], 1e-12, 1e-14) for n in theirs)


def test_a_layer_that_is_called_again_behind_another_is_a_layer_each_time() -> None:
    ours, theirs = both(lambda: Net(lambda layer, x: F.gelu(layer.linear(x)), times=2))
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], 1e-12, 1e-14) for n in theirs)
    model = UserModel(lambda: Net(WAYS["own backward"], times=2), tags={"PP": "layers.*"}, batch=BATCH)
    assert model.chunks == ("embed", "l0", "l1", "l2", "l3")


class Late(nn.Module):
    """A layer that begins with a table made of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Positions are added."""
        at = torch.arange(x.shape[1]).unsqueeze(-1)
        return torch.tanh(self.linear(x) + at)


class Beside(nn.Module):
    """Such layers, and a stream beside them that only the end reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Late() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Each layer's result is added outside of it."""
        x = first = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = x * first
        return found


def test_several_tensors_cross_seams_where_layers_begin_with_tables_made_of_sizes() -> None:
    ours, theirs = both(Beside)
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], 1e-12, 1e-14) for n in theirs)
    chunks = UserModel(Beside, tags={"PP": "layers.*"}, batch=BATCH)._cut.chunks
    x, crossing = torch.arange(6).view(BATCH), []
    for chunk in chunks.values():
        x = chunk(x)
        crossing.append(x.shape)
    assert crossing == [(*BATCH, 3 * WIDTH)] * 3 + [(*BATCH, WIDTH)]  # of one width, as messages are


def hooked(layer: Layer, x: Tensor) -> Tensor:
    """A hook of a gradient."""
    y: Tensor = layer.linear(x)
    y.register_hook(torch.neg)
    return y


def packed(layer: Layer, x: Tensor) -> Tensor:
    """What is kept for backward is kept coarsely."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
        return torch.tanh(layer.linear(x))


def with_hook_of_two() -> Net:
    """A net one of whose weights is read twice, and has a hook."""
    net = Net(lambda layer, x: layer.linear(layer.linear(x)))
    net.layers[1].get_parameter("linear.weight").register_hook(lambda grad: grad.clamp(-1, 1))
    return net


def with_module_hook() -> Net:
    """A net one of whose linears has a hook."""
    net = Net(lambda layer, x: layer.linear(x))
    net.layers[1].get_submodule("linear").register_full_backward_hook(lambda *_: None)
    return net


def with_late_hook() -> Net:
    """A net one of whose parameters is to be updated as its gradient is there."""
    net = Net(turned)
    net.embed.weight.register_post_accumulate_grad_hook(lambda p: None)
    return net


def with_complex_parameter() -> Net:
    """A net with one of whose parameters a rotation is learnt."""
    net = Net(turned)
    net.layers[0].turns = nn.Parameter(net.layers[0]._buffers.pop("turns"))  # type: ignore[arg-type]
    return net


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Net(hooked), "registers a hook of a gradient"),
        (lambda: Net(packed), "registers a hook of what is kept for backward"),
        (lambda: Net(lambda layer, x: of(Bent, x, layer.linear)), r"Bent\.apply is given Linear, whose tensors"),
        (
            lambda: Net(lambda layer, x: of(Bent, x, lambda y: y * layer.scale)),
            r"Bent\.apply is given .*lambda>, whose",
        ),
        (with_hook_of_two, r"layers\.1\.linear\.weight is read twice, and has a hook"),
        (with_module_hook, r"layers\.1\.linear has a hook of its gradient"),
        (with_late_hook, r"embed\.weight has a hook behind its sum"),
        (with_complex_parameter, r"layers\.0\.turns is complex"),
    ],
)
def test_what_a_graph_could_not_keep_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(PiperError, match=said):
        both(build)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_layers_that_build_copies_have_no_values_either() -> None:
    with without_values():
        first = nn.Linear(WIDTH, WIDTH)
        assert deepcopy(first)(first(torch.ones(*BATCH, WIDTH))).shape == (*BATCH, WIDTH)


class Viewed(nn.Module):
    """A linear whose weight is made of two others; what it returns is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """All but the first tokens."""
        found: Tensor = torch.tanh(self.linear(x))[:, 1:]
        return found


def test_units_of_views_and_of_weights_made_of_others_are_cut_for_the_compiler_with_their_hooks() -> None:
    unit, x = Viewed().double(), torch.randn(*BATCH, WIDTH, dtype=torch.float64)
    weights, got = dict(unit.named_parameters()), dict[str, Tensor]()
    weights["linear.bias"].register_hook(lambda grad: grad * 0.5)
    plan = _traced(unit, weights, [x], [])
    part = CompiledPart(plan, dict(plan.graphs), weights, (), ()).begin(got.__setitem__)  # the graphs, uncompiled
    (y,) = part.forward(unit, x)
    (dx,) = part.input_grad(torch.cos(y))
    part.weight_grad()
    theirs = x.clone().requires_grad_()
    out = unit(theirs)
    out.backward(torch.cos(out).detach())
    pairs = [(y, out), (dx, theirs.grad), *((got[n], p.grad) for n, p in weights.items())]
    assert all(a is not None and b is not None and torch.allclose(a, b, 1e-12, 1e-14) for a, b in pairs)


def test_a_parameter_s_hook_is_called_for_a_plain_linear_too() -> None:
    layer, got = nn.Linear(WIDTH, 2), dict[str, Tensor]()
    layer.weight.register_hook(torch.neg)
    run = SplitPass({"w": layer.weight, "b": layer.bias}, got.__setitem__)
    (y,) = run.forward(layer, torch.ones(*BATCH, WIDTH))
    run.input_grad(torch.ones_like(y))
    run.weight_grad()
    assert got["w"].eq(-6).all() and got["b"].eq(6).all()


class Annotated(nn.Module):
    """A layer in a scope; what stands outside of it is traced. aside: with a part without gradients."""

    def __init__(self, aside: bool = False) -> None:
        super().__init__()
        self.embed, self.layer, self.aside = nn.Embedding(VOCAB, WIDTH), Layer(written), aside
        self.layer.shift = torch.rand(WIDTH)  # an attribute, no buffer

    def forward(self, ids: Tensor) -> Tensor:
        """Stepped before the layer."""
        x: Tensor = of(Stepped, self.embed(ids))
        if self.aside:
            with torch.no_grad():
                x = x + 1
        with annotate("PP"):
            return self.layer(x)  # type: ignore[no-any-return]


def written(layer: Layer, x: Tensor) -> Tensor:
    """As Python writes it."""
    y: Tensor = layer.linear(x).clone()
    y[:, 0] = layer.scale
    return y + layer.shift


def test_annotated_code_has_its_own_backward_outside_of_scopes_too() -> None:
    ours, theirs = both(Annotated, {})
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], 1e-12, 1e-14) for n in theirs)
    assert [c["name"] for c in capture(Annotated(), batch=BATCH)["chunks"]] == ["embed", "l0"]
    with pytest.raises(PiperError, match="no_grad or autocast outside"):
        both(lambda: Annotated(aside=True), {})


def test_other_threads_apply_and_call_what_they_did_while_one_exports() -> None:
    found: list[Tensor] = []

    def beside() -> None:
        x = torch.ones(1, requires_grad=True)
        of(Stepped, x * 0.3).backward()
        found.extend([x.grad, nn.Linear(1, 1)(x)])  # type: ignore[list-item]

    def slow(layer: Layer, x: Tensor) -> Tensor:
        (other := threading.Thread(target=beside)).start()
        other.join()
        y: Tensor = layer.linear(x)
        return y

    UserModel(lambda: Net(slow), tags={"PP": "layers.*"}, batch=BATCH)
    assert len(found) == 4 and all(torch.equal(x, torch.full((1,), 0.3)) for x in found[::2])
