"""Functions that several ranks compute together, on virtual ranks: what one rank computes, and no message more."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.autograd.split import SplitPass
from executor.modules.attention.attend import AttentionMask, attend
from executor.modules.attention.attention import whole_context
from executor.modules.functions import token_loss
from executor.modules.parallel import columns, enter, leave, words
from executor.parallel.inline import RankAxis, RankRegion, group_name, stretches
from executor.transport.base import TransportTopology
from executor.transport.local import LocalTransport
from tests.executor.threads import run_threads

RANKS, BATCH, LENGTH, INTO, ROWS = 2, 2, 6, 5, 8
Grads = dict[str, Tensor]


def _wire(t: LocalTransport, axis: str, ranks: int) -> RankAxis:
    return RankAxis(ranks, t.rank, axis, tuple(range(ranks)), t)


def together(
    fn: Callable[[RankRegion], Any], *, axis: str = "tp", ranks: int = RANKS, sequence: bool = False
) -> list[Any]:
    """What each virtual rank returns."""
    members = tuple(range(ranks))

    def one(t: LocalTransport) -> Any:
        return fn(RankRegion(**{axis: _wire(t, axis, ranks)}, sequence=sequence))  # type: ignore[arg-type]

    return run_threads(one, TransportTopology.of(ranks, groups={group_name(axis, members): members}))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)


def _part(t: Tensor, dim: int, region: RankRegion) -> Tensor:
    return t.chunk(region.tp.size, dim)[region.tp.index].contiguous()


def _mine(t: Tensor, region: RankRegion) -> Tensor:
    return _part(t, -2, region) if region.sequence else t


class _Counted:
    """Messages of a wire, by pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pass_, self.seen = "", list[tuple[str, str]]()
        meet, counted = RankAxis._meet, self

        def note(self: RankAxis, kind: Any, *rest: Any) -> None:
            if self.index == 0:
                counted.seen.append((counted.pass_, str(kind)))
            meet(self, kind, *rest)

        monkeypatch.setattr(RankAxis, "_meet", note)


@pytest.mark.parametrize("flipped", [True, False], ids=["flipped", "straight"])
@pytest.mark.parametrize("sequence", [True, False], ids=["own tokens", "all tokens"])
def test_linears_cut_by_output_then_by_input_are_whole_ones(
    sequence: bool, flipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dy = draw(BATCH, LENGTH, INTO), draw(BATCH, LENGTH, INTO, seed=1)
    ups = [draw(ROWS, INTO, seed=2), draw(ROWS, INTO, seed=3)]
    bias, down = draw(ROWS, seed=4), draw(INTO, ROWS, seed=5)
    leaves = {n: t.clone().requires_grad_() for n, t in zip("xabcd", (x, *ups, bias, down), strict=True)}
    made = [F.linear(leaves["x"], leaves["a"], leaves["c"]), F.linear(leaves["x"], leaves["b"])]
    y = F.linear(made[0] * made[1].sigmoid(), leaves["d"])
    wanted = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    counted = _Counted(monkeypatch)

    def rank(region: RankRegion) -> tuple[Tensor, Tensor, Grads]:
        turn = (lambda t: t.t().contiguous()) if flipped else (lambda t: t)
        held = {n: turn(_part(t, 0, region)).requires_grad_() for n, t in zip("ab", ups, strict=True)}
        held |= {"c": _part(bias, 0, region).requires_grad_(), "d": _part(down, 1, region).requires_grad_()}
        got: Grads = {}
        run = SplitPass(held, got.__setitem__)

        def module(x: Tensor) -> Tensor:
            a, b = columns(x, [held["a"], held["b"]], [held["c"], None], region, flipped=flipped)
            return leave(F.linear(a * b.sigmoid(), held["d"]), region)

        counted.pass_ = "F"
        (out,) = run.forward(module, _mine(x, region))
        counted.pass_ = "I"
        (dx,) = run.input_grad(_mine(dy, region))
        assert not got
        counted.pass_ = "W"
        run.weight_grad()
        assert dx is not None
        return out, dx, {n: turn(g) if n in "ab" else g for n, g in got.items()}

    found = together(rank, sequence=sequence)
    for index, (out, dx, grads) in enumerate(found):
        region = RankRegion(RankAxis(RANKS, index), sequence=sequence)
        assert close(out, _mine(y.detach(), region)) and close(dx, _mine(wanted["x"], region))
        for name, dim in zip("abcd", (0, 0, 0, 1), strict=True):
            assert close(grads[name], _part(wanted[name], dim, region)), name
    gather, scatter, total = ("all_gather", "reduce_scatter", "all_reduce")
    own = {"F": [gather, scatter], "I": [gather, scatter], "W": [gather]}
    every = {"F": [total], "I": [total], "W": []}
    for pass_ in "FIW":
        assert sorted(k for p, k in counted.seen if p == pass_) == (own if sequence else every)[pass_]


@pytest.mark.parametrize("sequence", [True, False], ids=["own tokens", "all tokens"])
def test_what_every_head_takes_as_it_is_gets_all_their_gradients(sequence: bool) -> None:
    x, dys = draw(BATCH, LENGTH, INTO), [draw(BATCH, LENGTH, INTO, seed=1 + k) for k in range(RANKS)]

    def rank(region: RankRegion) -> tuple[Tensor, Tensor]:
        mine = _mine(x, region).requires_grad_()
        y = enter(mine, region)
        return y.detach(), torch.autograd.grad(y, mine, dys[region.tp.index])[0]

    for index, (y, dx) in enumerate(together(rank, sequence=sequence)):
        region = RankRegion(RankAxis(RANKS, index), sequence=sequence)
        assert close(y, x) and close(dx, _mine(sum(dys, torch.zeros_like(x)), region))


@pytest.mark.parametrize("padding", [None, 0, ROWS - 1])
@pytest.mark.parametrize("sequence", [True, False], ids=["own tokens", "all tokens"])
def test_words_are_looked_up_where_they_are_and_lost_as_everywhere(sequence: bool, padding: int | None) -> None:
    table, ids = draw(ROWS, INTO), torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % ROWS
    labels = ids.flatten().roll(-1).clone()
    labels[3] = -100
    leaf = table.clone().requires_grad_()
    x = F.embedding(ids, leaf, padding)
    dy = draw(BATCH, LENGTH, INTO, seed=1)
    (d_table,) = torch.autograd.grad(x, leaf, dy)
    logits = (3 * draw(BATCH * LENGTH, ROWS, seed=2)).requires_grad_()
    loss = token_loss(logits, labels, 0.25, -100)
    (d_logits,) = torch.autograd.grad(loss, logits)

    def rank(region: RankRegion) -> tuple[Tensor, ...]:
        own = _part(table, 0, region).requires_grad_()
        x = words(ids, own, region, torch.float64, padding=padding)
        mine = _part(logits.detach(), 1, region).requires_grad_()
        loss = token_loss(mine, labels, 0.25, -100, region.tp)
        return (
            x.detach(),
            *torch.autograd.grad(x, own, _mine(dy, region)),
            loss.detach(),
            *torch.autograd.grad(loss, mine),
        )

    for index, (looked, d_own, lost, d_mine) in enumerate(together(rank, sequence=sequence)):
        region = RankRegion(RankAxis(RANKS, index), sequence=sequence)
        assert close(looked, _mine(x.detach(), region)) and close(d_own, _part(d_table, 0, region))
        assert close(lost, loss.detach()) and close(d_mine, _part(d_logits, 1, region))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("fused", "v_dim"), [(True, 4), (True, 2), (False, 4)], ids=["fused", "latent", "stored"])
def test_queries_of_a_rank_see_the_keys_of_all(ranks: int, window: int, fused: bool, v_dim: int) -> None:
    length, heads, kv_heads = 16, 4, 2
    given = [draw(BATCH, length, h, d, seed=h + d) for h, d in ((heads, 4), (kv_heads, 4), (kv_heads, v_dim))]
    dy = draw(BATCH, length, heads, v_dim, seed=9)

    def core(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask) -> Tensor:
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), fused=fused, sight=sight).transpose(1, 2)

    leaves = [t.clone().requires_grad_() for t in given]
    out = core(*leaves, AttentionMask(window))
    wanted = torch.autograd.grad(out, leaves, dy)

    def mine(t: Tensor, index: int) -> Tensor:
        return stretches(t.movedim(1, -1), ranks, index).movedim(-1, 1).contiguous()

    def rank(region: RankRegion) -> tuple[Tensor, ...]:
        cp = region.cp
        q, k, v = (mine(t, cp.index).requires_grad_() for t in given)
        with whole_context(k, v, cp) as (keys, values):
            y = core(q, keys, values, AttentionMask(window, ranks, cp.index))
        return y.detach(), *torch.autograd.grad(y, (q, k, v), mine(dy, cp.index))

    for index, (y, *grads) in enumerate(together(rank, axis="cp", ranks=ranks)):
        assert close(y, mine(out.detach(), index))
        assert all(close(g, mine(w, index)) for g, w in zip(grads, wanted, strict=True))


def test_keys_and_values_of_others_are_not_kept_but_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _Counted(monkeypatch)

    def rank(region: RankRegion) -> bool:
        q, k, v = (draw(1, 8, 2, 4, seed=s).requires_grad_() for s in range(3))
        counted.pass_ = "F"
        with whole_context(k, v, region.cp) as (keys, values):
            gathered = weakref.ref(keys.untyped_storage())
            y = core(q, keys, values, region.cp)
            assert gathered() is not None
        del keys, values
        kept = gathered() is not None
        counted.pass_ = "I"
        y.sum().backward()  # type: ignore[no-untyped-call]
        return kept

    def core(q: Tensor, k: Tensor, v: Tensor, cp: RankAxis) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return attend(*heads_first, fused=True, sight=AttentionMask(0, RANKS, cp.index))

    assert together(rank, axis="cp") == [False, False]
    assert counted.seen == [("F", "all_gather"), ("I", "all_gather"), ("I", "reduce_scatter")]
