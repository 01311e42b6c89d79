"""What a forward does beside its graph is refused: a run would do it once, or never."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.modules.user.exported import export_cut
from ir.core.errors import PiperError


class Layer(nn.Module):
    """A linear, and what else is done."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor | float]) -> None:
        super().__init__()
        self.linear, self.how, self.count, self.longest = nn.Linear(4, 4), how, 0, 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Something is added."""
        found: Tensor = self.linear(x) + self.how(self, x)
        return found


class Net(nn.Module):
    """Two such layers."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor | float]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 4), nn.ModuleList(Layer(how) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Features."""
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def moved(layer: Any, x: Tensor) -> float:
    """A running mean, as most write it."""
    with torch.no_grad():
        layer.mean.lerp_(x.mean((0, 1)), 0.1)
    return 0.0


def assigned(layer: Any, x: Tensor) -> float:
    """The same by a new tensor."""
    with torch.no_grad():
        layer.mean = 0.9 * layer.mean + 0.1 * x.mean((0, 1))
    return 0.0


def counted(layer: Any, x: Tensor) -> float:
    """Less with each call."""
    layer.count += 1
    return 1.0 / float(layer.count)


def counted_aside(layer: Any, x: Tensor) -> float:
    """Nobody reads how often, nor how long the longest was."""
    layer.count += 1
    layer.longest = max(layer.longest, x.shape[1])
    layer.mean = layer.mean.to(x.dtype)
    return float(layer.longest)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (moved, r"writes layers\.0\.mean"),
        (assigned, r"writes layers\.0\.mean"),
        (counted, r"changes layers\.0\.count with each call"),
        (lambda layer, x: float(random.random() < 0.5), "draws random numbers on the host"),
    ],
)
def test_what_one_graph_could_not_repeat_is_refused(how: Callable[[Any, Tensor], float], said: str) -> None:
    with pytest.raises(PiperError, match=said):
        export_cut(Net(how), {"PP": "layers.*"}, 2, 3)


def test_what_each_call_does_alike_is_exported() -> None:
    net, ids = Net(counted_aside), torch.arange(6).view(2, 3)
    x = ids
    for chunk in export_cut(net, {"PP": "layers.*"}, 2, 3).chunks.values():
        x = chunk(x)
    assert torch.equal(x, net(ids))
