"""Logits of which each rank keeps its words: the loss and the gradients of one process, and none of their messages."""

from collections.abc import Callable
from copy import copy

import pytest
import torch
from torch import Tensor

from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.parallel.inline import MessageAxis, RankAxis, RankRegion
from ir.core.work import Message, MessageKind
from tests.executor.frontend import class_runs as hub
from tests.executor.frontend.divided.lockstep import Grid, far_apart
from tests.executor.frontend.divided.test_crossings import HIDDEN, IDS, PLAN, WORDS, Net

HEAD = {**PLAN, "head": "colwise_gather_output"}


class Logits(Net):
    """What stands behind the head."""

    def __init__(self, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.behind = behind

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.behind(super().forward(ids))


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "a cap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "a format": lambda x: x.to(torch.float64).mul(2),
}
GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "read twice": lambda x: x + x.amax(-1, keepdim=True),
    "another number for each word": lambda x: x + torch.arange(WORDS),
}


def _model(behind: Callable[[Tensor], Tensor], sequence: bool = False) -> UserModel:
    shard = ModelShard(RankRegion(MessageAxis(2, "tp"), sequence=sequence), HEAD)
    return UserModel(lambda: Logits(behind), tags={"PP": "layers.*"}, batch=(2, 16), shard=shard)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", [*KEPT, *GATHERED])
def test_logits_are_those_of_the_whole_model(name: str, sequence: bool) -> None:
    behind = (KEPT | GATHERED)[name]
    assert _model(behind, sequence)._cut.some_words == (name in KEPT)
    assert far_apart(lambda: Logits(behind), IDS, Grid(2, 1, HEAD, sequence=sequence)) <= 1e-12


def test_the_last_chunk_sends_three_numbers_of_a_token_and_no_logits() -> None:
    """Its largest logit, its label's, and the sum of all; whoever gathers them sends them whole."""

    def sent(behind: Callable[[Tensor], Tensor]) -> list[Message]:
        model = _model(behind)
        (unit,) = model.build(["head"]).units.values()
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        axis = model._region.tp
        assert isinstance(axis, MessageAxis)
        axis.take()
        unit(torch.zeros(2, 16, HIDDEN), tokens, 1.0)
        return list(axis.take())

    assert sent(KEPT["nothing"]) == [Message(MessageKind.ALL_REDUCE, 2 * 16 * 4, ("tp",))] * 3
    assert [m.bytes for m in sent(GATHERED["log_softmax"])] == [2 * 16 * WORDS * 4]


@pytest.mark.slow
def test_labels_looked_up_among_another_rank_s_words_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [*hub.sets_of((1, 1, 0, "1f1b"), "none"), "parallel.tp=2"]
    assert hub.far("llama", *sets) <= 1e-10

    def other(model: UserModel) -> RankAxis:
        axis = copy(model._region.tp)
        axis.index = 1 - axis.index
        return axis

    monkeypatch.setattr(UserModel, "words", property(other))
    assert hub.far("llama", *sets) > 1e-3
