"""Dropout: the same under every plan, as by plain torch with masks made in numpy, and as random as it should be."""

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from executor.modules.user.divided import tokens
from executor.modules.user.exported import export_cut
from executor.modules.user.rewrites import dropout
from executor.modules.user.rewrites.dropout import drop, fallen
from executor.parallel.inline import RankRegion
from executor.runtime.batch import MicrobatchLoader
from executor.runtime.program import RankPlan
from ir.core.errors import PiperError
from tests.executor.frontend import class_runs
from tests.executor.frontend.class_runs import LENGTH, MBS, PLANS, SIZE, STEPS, ClassPlan, run_class, sets_of
from tests.executor.frontend.models import drop_classes, hub_classes
from tests.executor.modules.hub import quiet
from tests.executor.runs import distance

NAME = "gpt2_drops"
_MASK = 2**64 - 1


def _word(z: int) -> int:
    """SplitMix64's output function, as its paper has it."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _mask(step: int, sequence: int, key: int, p: float, each: int) -> np.ndarray:
    golden = 0x9E3779B97F4A7C15
    seed = _word((_word((key + step * golden) & _MASK) + (sequence + 1) * golden) & _MASK)
    words = [_word((seed + n * golden) & _MASK) for n in range(1, each + 1)]
    return np.array([w % 2**53 >= int(p * 2**53) for w in words])


def test_masks_are_those_of_the_paper_s_generator() -> None:
    draws = torch.tensor([7, 3, 1])
    for size in (1, 2):
        got = ~fallen(draws, -(2**63) + 5, 0.3, size, (size, 40)).numpy()
        want = [_mask(7, 3 * size + k, 2**63 + 5, 0.3, 40) for k in range(size)]
        assert np.array_equal(got, np.array(want))
    assert not fallen(torch.tensor([7, 3, 0]), 5, 0.9, 1, (1, 99)).any()  # one evaluates


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_random(p: float) -> None:
    count = 100_000
    ways = {"step": ([1, 0, 1], 9), "microbatch": ([0, 1, 1], 9), "place": ([0, 0, 1], 10), "first": ([0, 0, 1], 9)}
    masks = {k: (~fallen(torch.tensor(d), key, p, 2, (2, count))).double() for k, (d, key) in ways.items()}
    first, spread = masks.pop("first"), 5 / (2 * count) ** 0.5  # five standard errors
    rows = {"sequence": (first[0], first[1]), "token": (first[:, 1:], first[:, :-1])}
    for x, y in [*((first, other) for other in masks.values()), *rows.values()]:
        assert abs(x.mean() - (1 - p)) <= spread * (p * (1 - p)) ** 0.5 * 2
        assert abs(np.corrcoef(x.flatten(), y.flatten())[0, 1]) <= spread * 2
    x, draws = torch.ones(2, count), torch.tensor([0, 0, 1])
    dropped = drop(x, draws, fallen(draws, 9, p, 2, (2, count)), p)
    assert abs(dropped.mean() - 1) <= 2 * spread * (p / (1 - p)) ** 0.5
    assert not drop(x, draws, fallen(draws, 9, 1.0, 2, (2, count)), 1.0).any()


class _Masked(TorchFunctionMode):
    """Dropout of torch's own functions by numpy's masks. path: of the module that calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.seen: Counter[str] = Counter()
        self.step = self.sequence = 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, x, name=name: self.paths.append(name))
            module.register_forward_hook(self._left)

    def _left(self, *_: object) -> None:
        self.paths.pop()

    def _drop(self, x: Tensor, p: float) -> Tensor:
        self.seen[self.paths[-1]] += 1
        text = f"0:{self.paths[-1]}:{self.seen[self.paths[-1]]}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        mask = _mask(self.step, self.sequence, key, p, x.numel()).reshape(x.shape)
        return x * torch.from_numpy(mask / (1 - p))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return self._drop(args[0], kwargs["p"] if "p" in kwargs else args[1])
        if func is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            hidden = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
            return self._drop(scores.softmax(-1), kwargs["dropout_p"]) @ v
        return func(*args, **(kwargs or {}))


@lru_cache
def _alone(name: str = NAME) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and parameters of plain torch."""
    data = MicrobatchLoader("synthetic", vocab=hub_classes.VOCAB, length=LENGTH, microbatches=MBS, size=SIZE)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(hub_classes if name == NAME else drop_classes, name)().to(torch.float64)
    options = {"use_cache": False} if hasattr(model, "config") else {}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        masked = _Masked(model)
        for mb in range(MBS):
            batch = data.batch(step, 0, mb)
            masked.step, masked.sequence = step, mb
            masked.seen.clear()
            with masked:
                found = model(batch.ids, **options)
            logits = found.logits if options else found
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") * batch.scale
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, {n: p.detach().numpy() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("plan", "recompute"), [((2, 1, 0, "dualpipe"), "full"), ((2, 2, 3, "1f1b"), "none"), (PLANS[1], "none")], ids=str
)
def test_dropout_is_the_same_under_every_plan_and_by_plain_torch(plan: ClassPlan, recompute: str) -> None:
    found, _, params = run_class(NAME, *sets_of(plan, recompute))
    losses, wanted = _alone()
    assert np.abs(np.array(found["losses"]) / losses - 1).max() <= 1e-12 and distance(params, wanted) <= 1e-10
    plain, _, _ = run_class("gpt2", *sets_of(plan, recompute))
    assert abs(plain["losses"][0] / losses[0] - 1) > 1e-4


def test_masks_by_a_rank_s_own_microbatches_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankPlan, "number_of", lambda self, mb: mb)
    found, _, _ = run_class(NAME, *sets_of((1, 2, 1, "1f1b"), "none"))
    assert np.abs(np.array(found["losses"]) / _alone()[0] - 1).max() > 1e-6


SHARED: list[tuple[str, ClassPlan, tuple[str, ...]]] = [
    ("drops", (2, 1, 0, "1f1b"), ("tp=2",)),
    ("drops", (1, 2, 3, "1f1b"), ("tp=2", "sequence_parallel=true")),
    ("drops", (2, 1, 0, "dualpipe"), ("cp=2",)),
    ("drops", (1, 1, 0, "gpipe"), ("tp=2", "cp=2")),
    ("llama_drops", (2, 1, 0, "zbv"), ("tp=2",)),
    ("llama_drops", (1, 2, 1, "1f1b"), ("cp=2", "cp_comm=all_to_all")),
    ("routed_drops", (2, 2, 1, "1f1b"), ("ep=2",)),
    ("routed_drops", (1, 2, 3, "1f1b"), ("ep=2", "tp=2", "sequence_parallel=true")),
    ("routed_drops", (2, 2, 0, "1f1b"), ("ep=2", "cp=2")),
]


@pytest.mark.parametrize(("name", "plan", "more"), SHARED, ids=str)
def test_ranks_that_share_a_tensor_drop_what_one_rank_would(
    name: str, plan: ClassPlan, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_runs, "hub_classes", drop_classes)
    found, _, params = run_class(name, *sets_of(plan, "none"), *(f"parallel.{x}" for x in more))
    losses, wanted = _alone(name)
    assert np.abs(np.array(found["losses"]) / losses - 1).max() <= 1e-12 and distance(params, wanted) <= 1e-10


def _as_if_alone(draws: Tensor, key: int, p: float, size: int, whole: tuple[int, ...], *more: Any) -> Tensor:
    """A rank's part dropped as if it were the whole."""
    if more[1] is not None:
        dim, _, ranks, _ = more[1]
        whole = (*whole[:dim], whole[dim] // ranks, *whole[dim + 1 :])
    return fallen(draws, key, p, size, whole)


def _first_tokens(dim: int, region: RankRegion) -> Callable[[Tensor], Tensor]:
    """Those of the sequence's beginning, whoever asks."""
    return lambda x: x.narrow(dim, 0, x.shape[dim] // region.cp.size)


@pytest.mark.parametrize(
    ("more", "where", "name", "wrong"),
    [("tp=2", dropout, "fallen", _as_if_alone), ("cp=2", tokens, "_stretched", _first_tokens)],
    ids=["tp", "cp"],
)
def test_ranks_that_each_draw_as_if_alone_would_be_seen(
    more: str, where: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_runs, "hub_classes", drop_classes)
    sets = *sets_of((1, 1, 0, "1f1b"), "none"), f"parallel.{more}"
    class_runs.prepared_class("drops", *sets)  # what is captured is kept for others, so it is before anything is wrong
    monkeypatch.setattr(where, name, wrong)
    found, _, _ = run_class("drops", *sets)
    assert np.abs(np.array(found["losses"]) / _alone("drops")[0] - 1).max() > 1e-6


class Sideways(nn.Module):
    """It drops out of tokens, sequences inside; or of features, outside of both."""

    def __init__(self, axes: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.axes = axes

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = F.dropout(self.embed(ids).transpose(*self.axes), 0.5).transpose(*self.axes)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_sequence_drops_alike_beside_others_where_tokens_are_outermost() -> None:
    net, ids = Sideways(), torch.arange(8).view(2, 4)
    both, one = (next(iter(export_cut(net, {"PP": "layers.*"}, k, 4).chunks.values())) for k in (2, 1))
    y = both(ids, torch.tensor([0, 0, 1]))
    alone = [one(ids[k : k + 1], torch.tensor([0, k, 1])) for k in (0, 1)]
    assert torch.equal(y, torch.cat(alone)) and 0 < y.eq(0).double().mean() < 1


def test_what_is_not_dropped_by_sequence_is_refused() -> None:
    with pytest.raises(PiperError, match="sequences are not outermost"):
        export_cut(Sideways((0, 2)), {"PP": "layers.*"}, 2, 3)
