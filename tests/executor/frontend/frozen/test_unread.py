"""Parameters that no output of a forward is made of stay as they are: no loss of theirs could train them."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from executor.modules.user.model import UserModel
from ir.core.errors import PiperError
from tests.executor.frontend.class_runs import ClassPlan, _alone, run_class, sets_of


@pytest.mark.parametrize("plan", [(2, 1, 0, "zb1p"), (2, 2, 3, "1f1b")])
def test_a_decoder_without_an_encoder_trains_as_by_plain_torch(plan: ClassPlan) -> None:
    found, grads, params = run_class("bart", *sets_of(plan, "none"))
    losses, norms, their_grads, their_params = _alone("bart")
    left = {n for n in their_grads if "encoder_attn" in n}
    assert grads.keys() == params.keys() == their_params.keys() - left and left
    assert not any(their_grads[n].any() for n in left)
    numbers = np.array([*found["losses"], *found["grad_norms"]]) / np.array([*losses, *norms])
    assert np.abs(numbers - 1).max() <= 1e-10
    assert max(np.abs(params[n] - their_params[n]).max() for n in params) <= 1e-10


class Net(nn.Module):
    """Its pooler's result is dropped, or returned behind the logits."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.returned, self.embed, self.pooler = returned, nn.Embedding(8, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> object:
        """ids (sequences, tokens)."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        pooled = self.pooler(x)
        return {"logits": x, "pooled": pooled} if self.returned else {"logits": x}


def test_what_is_computed_and_dropped_is_not_trained_and_what_is_returned_beside_the_logits_is_refused() -> None:
    given = {"tags": {"PP": "layers.*"}, "batch": (1, 3), "dtype": None}
    model = UserModel(lambda: Net(returned=False), **given)
    assert "embed.weight" in model.shapes and not any("pooler" in n for n in (*model.shapes, *model.frozen))
    with pytest.raises(PiperError, match=r"pooler\.weight and 1 more parameters are read by no chunk"):
        UserModel(lambda: Net(returned=True), **given)
