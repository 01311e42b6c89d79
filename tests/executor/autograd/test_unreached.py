"""Parameters that no gradient reaches: known of code as it is written, exported or annotated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.modules.user.annotate import annotate
from executor.modules.user.model import UserModel
from ir.core.errors import PiperError
from tests.executor.autograd.test_user_code import BATCH, VOCAB, WIDTH


class Aside(nn.Module):
    """What is read without a gradient, beside what is read with one, also by a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.still, self.bound, self.moved = (nn.Parameter(torch.ones(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Three ways."""
        with torch.no_grad():
            scale = (x * self.still).mean()
        y = torch.zeros(x.shape, dtype=x.dtype)
        y[..., :WIDTH] = x * self.moved
        return y * scale * (self.bound > 0)


def test_a_parameter_that_no_gradient_reaches_is_known() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Aside()])

        def forward(self, ids: Tensor) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x, x.pow(2).mean()

    model = UserModel(Net, tags={"PP": "layers.*"}, batch=BATCH)
    assert model.idle == ("layers.0.still", "layers.0.bound")  # torch's AdamW would not let them decay
    with pytest.raises(PiperError, match="a loss of its own"):
        model.refuse_training()


@pytest.mark.parametrize("still", ["layer.still", "layer.bound"])
def test_a_parameter_that_no_gradient_reaches_is_known_of_annotated_code(still: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Module()
            self.layer.still, self.layer.bound = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            with annotate("PP"):
                scales = {"layer.still": self.layer.still.detach(), "layer.bound": (self.layer.bound > 0).to(x.dtype)}
                other = self.layer.bound if still == "layer.still" else self.layer.still
                x = x * scales[still] + other
            return self.head(x)

    assert UserModel(Net, batch=BATCH).idle == (still,)


def test_of_a_backward_that_needs_values_nothing_is_said() -> None:
    class Needs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy * dy.sum().item()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            with annotate("PP"):
                return self.head(Needs.apply(x))

    assert UserModel(Net, batch=BATCH).idle == ()
