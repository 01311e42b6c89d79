"""Ranks that share a model's linears and tokens as threads that meet at barriers: no transport of the executor's."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.exports.shared_exports import RankExports, exports_shared
from executor.modules.user.model import UserModel
from executor.parallel.inline import RankAxis, RankRegion, stretches

Build = Callable[[], nn.Module]


class Meeting:
    """Where ranks leave a tensor each, and find all."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.left = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks

    def every(self, index: int, x: Tensor) -> list[Tensor]:
        """Of all ranks, in their order."""
        self.left[index] = x.detach().clone()  # who has left may write it
        self.barrier.wait()
        found = list(self.left)
        self.barrier.wait()
        return found


class LockstepAxis(RankAxis):
    """An axis of one of several threads. Without a meeting it is as one of a rank that is alone."""

    def __init__(self, size: int, index: int, axis: str) -> None:
        super().__init__(size, index, axis)
        self.meeting: Meeting | None = None

    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x) if self.meeting is None else torch.stack(self.meeting.every(self.index, x))

    def scatter(self, x: Tensor) -> Tensor:
        if self.meeting is None:
            return super().scatter(x)
        return torch.stack([y[self.index] for y in self.meeting.every(self.index, x)]).sum(0)

    def exchange(self, x: Tensor) -> Tensor:
        if self.meeting is None:
            return super().exchange(x)
        return torch.stack([y[self.index] for y in self.meeting.every(self.index, x)])

    def sum(self, x: Tensor) -> Tensor:
        if self.meeting is None:
            return super().sum(x)
        return x.copy_(torch.stack(self.meeting.every(self.index, x.clone())).sum(0))


@dataclass(frozen=True)
class Grid:
    """tp · cp ranks. plan: how tp divides linears; sequence: and tokens between them; heads: attention's, by cp."""

    tp: int = 1
    cp: int = 1
    plan: Mapping[str, str] = field(default_factory=dict)
    sequence: bool = False
    heads: bool = False

    def axes(self) -> list[tuple[LockstepAxis, LockstepAxis]]:
        """Those of each rank, tp innermost."""
        every = [(k % self.tp, k // self.tp) for k in range(self.tp * self.cp)]
        return [(LockstepAxis(self.tp, t, "tp"), LockstepAxis(self.cp, c, "cp")) for t, c in every]

    def meet(self, axes: Sequence[tuple[LockstepAxis, LockstepAxis]]) -> list[Meeting]:
        """Let ranks of a group find each other."""
        rows = {c: Meeting(self.tp) for c in range(self.cp)}
        columns = {t: Meeting(self.cp) for t in range(self.tp)}
        for t, c in axes:
            t.meeting, c.meeting = rows[c.index], columns[t.index]
        return [*rows.values(), *columns.values()]


DRAWS = torch.tensor([3, 2, 1])  # step, number of the microbatch, and that it drops


def far_apart(build: Build, ids: Tensor, grid: Grid, drops: bool = False) -> float:
    """How far ranks that share a module are from the module itself, in logits and in gradients of a weighed sum. drops:
    from what one rank makes of it, whose dropout is no other than theirs.

    Raises PiperError: the module is refused.
    """
    torch.manual_seed(0)
    alone = _model(build, ids, RankRegion(), grid) if drops else None
    plain = build().to(torch.float64) if alone is None else alone.module
    wanted: Tensor = plain(ids) if alone is None else _logits(alone, ids)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    (wanted * weights).sum().backward()
    axes = grid.axes()
    with exports_shared(RankExports()):  # as ranks of one launch do
        models = [_model(build, ids, RankRegion(t, c, sequence=grid.sequence, heads=grid.heads), grid) for t, c in axes]
    found, errors = [torch.empty(0)] * len(axes), list[BaseException]()
    meetings = grid.meet(axes)

    def life(k: int) -> None:
        try:
            found[k] = _logits(models[k], ids)
            (found[k] * _of_rank(weights, axes[k], models[k])).sum().backward()
        except BaseException as error:
            errors.append(error)
            for m in meetings:
                m.barrier.abort()

    threads = [threading.Thread(target=life, args=(k,)) for k in range(len(axes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    far = [_far(x, _of_rank(wanted.detach(), *of)) for x, *of in zip(found, axes, models, strict=True)]
    for name, p in plain.named_parameters():
        far.append(_far(_gradient(models, name, grid), p.grad if p.grad is not None else torch.zeros_like(p)))
    return max(far)


def _model(build: Build, ids: Tensor, region: RankRegion, grid: Grid) -> UserModel:
    batch = int(ids.shape[0]), int(ids.shape[1])
    shard = ModelShard(region, grid.plan)
    return UserModel(build, dtype=torch.float64, tags={"PP": "layers.*"}, batch=batch, shard=shard)


def _of_rank(logits: Tensor, axes: tuple[RankAxis, RankAxis], model: UserModel) -> Tensor:
    """Its tokens of (sequences, tokens, words); its words, where its model keeps no others."""
    tp, cp = axes
    words = logits.chunk(tp.size, -1)[tp.index] if model._cut.some_words else logits
    return stretches(words.movedim(1, -1), cp.size, cp.index).movedim(-1, 1)


def _gradient(models: Sequence[UserModel], name: str, grid: Grid) -> Tensor:
    """Of a whole parameter: what ranks have of it side by side, or all of it as the plan adds it up."""
    grads = [_grad(m.module.get_parameter(name)) for m in models]
    rows = [torch.stack(grads[t :: grid.tp]).sum(0) for t in range(grid.tp)]
    if (dim := models[0].dims.get(name)) is not None:
        return torch.cat(rows, dim)
    return torch.stack(rows).sum(0) if grid.sequence or name in models[0].partly else rows[0]


def _grad(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _logits(model: UserModel, ids: Tensor) -> Tensor:
    def called(name: str, chunk: nn.Module, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return _as_tuple(chunk(*x[:-1], DRAWS) if name in model._cut.wants_draws else chunk(*x))

    (found,) = model._try(*model._batch, called, ids)
    return found


def _as_tuple(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def _far(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).detach())
