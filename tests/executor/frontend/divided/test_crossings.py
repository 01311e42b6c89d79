"""What crosses between own tokens, all tokens, and what tp divides: equal to the whole, or refused by name."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.parallel.inline import MessageAxis, RankRegion
from ir.core.errors import PiperError
from tests.executor.frontend.divided.lockstep import Grid, far_apart

HIDDEN, WORDS = 8, 16
IDS = torch.arange(32).view(2, 16) * 7 % 16
PLAN = {"layers.*.wide": "colwise", "layers.*.back": "rowwise"}
Between = Callable[[Tensor], Tensor]
Inside = Callable[[Tensor, Tensor], Tensor]  # (what tp divides, what entered) → what it divides


class Layer(nn.Module):
    """What is divided, and what stands behind it."""

    def __init__(self, between: Between, inside: Inside) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.between, self.inside = between, inside

    def forward(self, x: Tensor) -> Tensor:
        """Residuals around both."""
        y = self.norm(x)
        x = x + self.back(self.inside(self.wide(y), y))
        return x + self.between(torch.tanh(x))


class Net(nn.Module):
    """A layer between words. begin: what it adds to words, of a module of its own."""

    def __init__(
        self,
        between: Between = torch.tanh,
        inside: Inside = lambda z, y: torch.tanh(z),
        **parts: nn.Module,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.layers = nn.ModuleList([Layer(between, inside)])
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        if hasattr(self, "begin"):
            x = x + self.begin(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def _far(build: Callable[[], nn.Module], sequence: bool = True, ids: Tensor = IDS, **more: str) -> float:
    return far_apart(build, ids, Grid(2, 1, PLAN | more, sequence=sequence))


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


COMPLEX: Mapping[str, Between] = {
    "running sum": lambda x: torch.view_as_real(_pairs(x).cumsum(1)).flatten(-2),
    "of other tokens": lambda x: torch.view_as_real(_pairs(x) * _pairs(x).conj().roll(1, 1)).flatten(-2),
    "of all, and a rank's": lambda x: (
        (torch.fft.fft(x.cumsum(1)) * torch.view_as_complex(torch.stack([x, -x], -1))).real
    ),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_have_gradients_too(name: str) -> None:
    assert _far(lambda: Net(COMPLEX[name])) <= 1e-12


@pytest.mark.parametrize("sequence", [False, True])
def test_complex_numbers_enter(sequence: bool) -> None:
    def turned(z: Tensor, y: Tensor) -> Tensor:
        return (z * _pairs(y)[..., :1] + _pairs(y).sum().conj()).imag

    assert _far(lambda: Net(inside=turned), sequence) <= 1e-12


@pytest.mark.parametrize("shape", [(2, 6), (3, 4), (4, 4)], ids=str)
def test_stretches_that_do_not_divide_are_not_left_so(shape: tuple[int, int]) -> None:
    """Rows of all sequences, put in their order by an index: nothing says that tokens lie in one stretch behind it."""

    def placed(z: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(z).flatten(0, 1)[torch.arange(z.shape[:2].numel()).view(z.shape[:2])]

    assert _far(lambda: Net(inside=placed), ids=torch.arange(shape[0] * shape[1]).view(shape) % WORDS) <= 1e-12


def _written_behind(x: Tensor) -> Tensor:
    y = x * 2
    part = y[..., :4]
    before = part.cumsum(1)
    y.mul_(2)
    return torch.cat([before, part.cumsum(1)], -1)


def _viewed_before(x: Tensor) -> Tensor:
    y = x * 2
    others = y[:, 1:]
    y.mul_(2)
    return nn.functional.pad(others, (0, 0, 1, 0))


def _entered_twice(z: Tensor, y: Tensor) -> Tensor:
    t = y * 1.5
    part = t[..., :1]
    z = z + part
    t.mul_(2)
    return torch.tanh(z + part)


def _expanded_before(z: Tensor, y: Tensor) -> Tensor:
    t = y * 1.5
    part = t[..., :1].expand_as(z)
    t.mul_(2)
    return torch.tanh(z + part)


def _filled(z: Tensor, y: Tensor) -> Tensor:
    t = y.new_zeros(z.shape)
    t[:, 1:] = torch.tanh(z[:, :-1])
    return t


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_written_between_two_readers_crosses_again(sequence: bool) -> None:
    assert _far(lambda: Net(_written_behind, _entered_twice), sequence) <= 1e-12


UNSEEN = [
    (True, {"between": _viewed_before}),
    (True, {"inside": _expanded_before}),
    (False, {"inside": _expanded_before}),
    (True, {"inside": _filled}),
    (False, {"inside": _filled}),
]


@pytest.mark.parametrize(("sequence", "parts"), UNSEEN)
def test_writes_that_another_kind_of_value_would_not_show_are_refused(sequence: bool, parts: dict[str, Inside]) -> None:
    with pytest.raises(PiperError, match=r"is written where ranks have other|writes in place what is read behind it"):
        _far(lambda: Net(**parts), sequence)


class Places(nn.Module):
    """Of each position, by two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, at: Tensor) -> Tensor:
        """(tokens,) → (tokens, features)."""
        y: Tensor = self.down(torch.tanh(self.up(at.unsqueeze(-1).to(self.up.weight.dtype))))
        return y


OF_NO_TOKENS: list[tuple[Callable[[], nn.Module], dict[str, str]]] = [
    (lambda: nn.Embedding(64, HIDDEN), {"begin": "embedding_rowwise"}),
    (Places, {"begin.up": "colwise", "begin.down": "rowwise"}),
    (Places, {"begin.down": "colwise_gather_output"}),
]


@pytest.mark.parametrize(("begin", "plan"), OF_NO_TOKENS)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_made_of_parameters_alone_is_not_divided(
    begin: Callable[[], nn.Module], plan: dict[str, str], sequence: bool
) -> None:
    with pytest.raises(PiperError, match="is made of parameters alone: of no tokens") as refused:
        _far(lambda: Net(begin=begin()), sequence, **plan)
    assert (refused.value.key, refused.value.suggestion) == ("model.tp_plan", "leave it out")
    assert _far(lambda: Net(begin=begin()), sequence) <= 1e-12


class Counted(Net):
    """Words whose gradients go by how often they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN, scale_grad_by_freq=True)


def test_gradients_by_the_number_of_words_are_of_all_tokens() -> None:
    ids = IDS.clone()
    ids[:, :9] = 1
    assert _far(Counted, ids=ids) <= 1e-12
    with pytest.raises(
        PiperError, match=r"embed is a Embedding that counts words .*, which embedding_rowwise does not divide"
    ):
        _far(Counted, embed="embedding_rowwise")
    assert far_apart(Counted, ids, Grid(1, 2)) <= 1e-12  # all ranks look up all words


class Experts(nn.Module):
    """Each a product with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """All of them of all rows."""
        chosen = [(weights * (index == k)).sum(-1, keepdim=True) * (x @ w) for k, w in enumerate(self.weight)]
        return torch.stack(chosen).sum(0)

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Of rows sorted by expert."""
        return torch.cat([x @ w for x, w in zip(rows.split(counts), self.weight, strict=True)])


class Routed(Layer):
    """Experts of each token, which the mean over all tokens helps to choose."""

    def __init__(self) -> None:
        super().__init__(torch.tanh, lambda z, y: torch.tanh(z))
        self.router, self.experts = nn.Linear(HIDDEN, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Residuals around all three."""
        x = super().forward(x)
        rows = x.view(-1, HIDDEN)
        scores = self.router(rows)
        weights, index = (scores - scores.mean(0)).softmax(-1).topk(2, -1)
        y: Tensor = self.experts(rows, index, weights).view(x.shape)
        return x + y


def test_experts_that_all_tokens_choose_are_sent_a_rank_s_own() -> None:
    def build() -> nn.Module:
        net = Net()
        net.layers = nn.ModuleList([Routed()])
        return net

    shard = ModelShard(RankRegion(MessageAxis(2, "tp"), sequence=True), PLAN, ep=2)
    model = UserModel(build, tags={"PP": "layers.*", "EP": "layers.*.experts"}, batch=(2, 16), shard=shard)
    found = model.routed["l0"].router.graph.find_nodes(op="output")[0].args[0]
    assert [tuple(n.meta["val"].shape) for n in found[:3]] == [(16, HIDDEN), (16, 2), (16, 2)]


class Twice(Net):
    """Its layer has another name, too, by which it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.layers

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        y: Tensor = self.head(self.same[0](self.layers[0](self.embed(ids))))
        return y


@pytest.mark.parametrize("sequence", [False, True])
def test_a_divided_module_may_have_two_names(sequence: bool) -> None:
    assert _far(Twice, sequence) <= 1e-12
