"""Ranks that are threads export a forward once, and nobody is given the graph of another module."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.frontend.capture import capture
from executor.modules.user import exported
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.exported import export_cut
from executor.modules.user.exports import torch_export
from executor.modules.user.exports.shared_exports import RankExports, exports_shared
from executor.modules.user.model import UserModel
from executor.modules.user.purity import outputs
from executor.parallel.inline import RankAxis, RankRegion
from ir.core.work import DType
from tests.executor.frontend import class_runs
from tests.executor.frontend.class_runs import run_class
from tests.executor.modules.hub import quiet

TAGS = {"PP": "layers.*"}


class Net(nn.Module):
    """Two layers and a head, which may be the table of words; forward reads a number and a tensor that it has made."""

    def __init__(self, width: int = 4, tied: bool = False, layer: type[nn.Module] = nn.ReLU, bias: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, width), nn.Linear(width, 8, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=bias), layer()) for _ in range(2))
        self.register_buffer("shift", torch.arange(width) * 0.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids) + self.shift + torch.tensor([0.25])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The class of each module that torch exports from here on."""
    found, plain = list[str](), torch_export._exported

    def noted(module: nn.Module, *batch: int) -> Any:
        found.append(type(module).__name__)
        return plain(module, *batch)

    monkeypatch.setattr(torch_export, "_exported", noted)
    return found


def logits(made: Mapping[str, nn.Module], ids: Tensor) -> Tensor:
    x = ids
    for chunk in made.values():
        x = chunk(x)
    return x


def chunks(net: nn.Module, size: int = 2, length: int = 3) -> Mapping[str, nn.Module]:
    return export_cut(net, TAGS, size, length).chunks


def test_ranks_of_one_launch_export_once(exports: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit what they make where each exports by itself."""
    given = "gpt2", "parallel.pp=3", "schedule.name=zb1p", "schedule.microbatches=4"
    class_runs.prepared_class(*given)
    monkeypatch.setattr(class_runs, "_exports", lambda *_: RankExports())
    counts, runs = [], []
    for take in (RankExports.take, lambda *_: None):
        exports.clear()
        with monkeypatch.context() as patch, quiet():
            patch.setattr(RankExports, "take", take)
            runs.append(run_class(*given))
        counts.append(len(exports))
    assert counts == [1, 3] and runs[0][0]["losses"] == runs[1][0]["losses"]
    for a, b in zip(runs[0][1:], runs[1][1:], strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("tied", [False, True])
def test_a_graph_is_given_tensors_of_the_rank_s_own(tied: bool, exports: list[str]) -> None:
    first, second = Net(tied=tied), Net(tied=tied)
    ids = torch.arange(6).view(2, 3) % 8
    with exports_shared(RankExports()):
        made = [chunks(net) for net in (first, second)]
    assert len(exports) == 1
    for net, found in zip((first, second), made, strict=True):
        assert torch.equal(logits(found, ids), net(ids))
        held = {id(p) for chunk in found.values() for p in chunk.parameters()}
        assert held == {id(p) for p in net.parameters()}
    second.shift.data.fill_(3.0)
    assert torch.equal(logits(made[1], ids), second(ids)) and torch.equal(logits(made[0], ids), first(ids))


OTHERS: dict[str, Callable[[], Any]] = {
    "width": lambda: chunks(Net(5)),
    "tied": lambda: chunks(Net(tied=True)),
    "layer": lambda: chunks(Net(layer=nn.GELU)),
    "bias": lambda: chunks(Net(bias=False)),
    "format": lambda: chunks(Net().double()),
    "frozen": lambda: chunks(Net().requires_grad_(False)),
    "evaluated": lambda: chunks(Net().eval()),
    "strides": lambda: chunks(_turned(Net())),
    "a buffer": lambda: chunks(_more(Net())),
    "sequences": lambda: chunks(Net(), size=1),
    "tokens": lambda: chunks(Net(), length=2),
}


def _turned(net: Any) -> nn.Module:
    net.head.weight.data = net.head.weight.data.t().contiguous().t()
    return net


def _more(net: nn.Module) -> nn.Module:
    net.register_buffer("more", torch.zeros(1))
    return net


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_is_exported_anew(what: str, exports: list[str]) -> None:
    with exports_shared(RankExports()):
        chunks(Net())
        chunks(Net())
        assert len(exports) == 1
        OTHERS[what]()
    assert len(exports) == 2


GATHERED, WORDS = {"layers.*.0": "colwise_gather_output"}, {"embed": "embedding_rowwise"}


@pytest.mark.parametrize(
    ("plan", "sequence", "times"),  # the module as it is, and each rank's, of which some is for the tokens between
    [(GATHERED, False, 2), (GATHERED, True, 3), (WORDS, False, 3), (WORDS, True, 5)],
)
def test_ranks_of_tp_take_one_graph_but_for_the_words_they_hold(
    plan: dict[str, str], sequence: bool, times: int, exports: list[str]
) -> None:
    """To the bit what each makes that exports by itself."""
    ids, made = torch.arange(8).view(2, 4), []
    for shared in (RankExports(), None):
        exports.clear()
        for index in range(2):
            torch.manual_seed(index)
            shard = ModelShard(RankRegion(RankAxis(2, index, "tp"), sequence=sequence), plan)
            with exports_shared(shared):
                model = UserModel(Net, tags=TAGS, batch=(2, 4), shard=shard)
            made.append(model._try(2, 4, lambda _, chunk, x: outputs(chunk(*x)), ids)[0])
        assert len(exports) == (times if shared else 4 + 2 * sequence)
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3]) and not torch.equal(made[0], made[1])


def test_only_what_is_called_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is kept, or cut, is no code until it is taken, and then once."""
    net, kept, compiled = Net(), RankExports(), list[str]()
    root, plain = torch_export._exported(net, 2, 3), torch.fx.GraphModule.recompile

    def noted(self: torch.fx.GraphModule) -> Any:
        compiled.append(self._get_name())
        return plain(self)

    monkeypatch.setattr(torch.fx.GraphModule, "recompile", noted)
    kept.put(net, (2, 3), root)
    exported._tidied(net, root, (2, 3))
    assert len(kept.found) == 1 and not compiled
    taken = kept.take(net, (2, 3))
    assert taken is not None and compiled == ["GraphModule"]


def test_nothing_is_taken_outside_of_a_launch(exports: list[str]) -> None:
    with exports_shared(RankExports()):
        chunks(Net())
    with exports_shared(RankExports()):
        chunks(Net())
    chunks(Net())
    chunks(Net())
    assert len(exports) == 4


class Doubled(torch.autograd.Function):
    """Code of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class Own(Net):
    """It calls a function of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return Doubled.apply(super().forward(ids))


class Counts(Net):
    """It notes a number."""

    def forward(self, ids: Tensor) -> Tensor:
        self.calls = ids.shape[1]
        return F.relu(super().forward(ids))


class Unsaid(Net):
    """Nobody can say what it is."""

    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(("kind", "times"), [(Own, 1), (Counts, 2), (Unsaid, 1)])
def test_what_is_more_than_a_graph_is_each_rank_s_own(kind: type[nn.Module], times: int, exports: list[str]) -> None:
    with exports_shared(RankExports()):
        for _ in range(2):
            chunks(kind())
    assert len(exports) == 2 * times


def test_a_capture_of_a_divided_module_exports_the_whole_once(exports: list[str]) -> None:
    """Once with, once without what tp divides: its work as a whole counts FLOPs of the model."""
    with quiet():
        net = class_runs.hub_classes.llama()
        capture(net, batch=(1, 8), dtype=DType.FP32, tags={"PP": "model.layers.*"}, tp=2)
    assert len(exports) == 2
