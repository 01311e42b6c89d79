"""Context-parallel ranks of one model as threads that meet at a barrier: no transport of the executor's."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.parallel.inline import RankAxis, RankRegion, stretches


class Meeting:
    """Where ranks leave a tensor each, and find all."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.left = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks

    def every(self, index: int, x: Tensor) -> list[Tensor]:
        """Of all ranks, in their order."""
        self.left[index] = x
        self.barrier.wait()
        found = list(self.left)
        self.barrier.wait()
        return found


class LockstepAxis(RankAxis):
    """An axis of one of several threads."""

    def __init__(self, size: int, index: int, meeting: Meeting | None = None) -> None:
        super().__init__(size, index, "cp")
        self.meeting = meeting

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


def far_apart(build: Callable[[], nn.Module], ids: Tensor, ranks: int, *, heads: bool = False) -> float:
    """How far ranks that share tokens are from the module itself, in logits and in gradients of a weighed sum.

    Raises PiperError: the module is refused.
    """
    torch.manual_seed(0)
    plain = build().to(torch.float64)
    wanted: Tensor = plain(ids)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    (wanted * weights).sum().backward()
    axes = [LockstepAxis(ranks, k) for k in range(ranks)]
    models = [_model(build, ids, axis, heads) for axis in axes]
    meeting, found, errors = Meeting(ranks), [torch.empty(0)] * ranks, list[BaseException]()

    def life(k: int) -> None:
        try:
            part = weights.movedim(1, -1)
            found[k] = _logits(models[k], ids)
            (found[k] * stretches(part, ranks, k).movedim(-1, 1)).sum().backward()
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    for axis in axes:
        axis.meeting = meeting
    threads = [threading.Thread(target=life, args=(k,)) for k in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    far = [_far(found[k], stretches(wanted.detach().movedim(1, -1), ranks, k).movedim(-1, 1)) for k in range(ranks)]
    for name, p in plain.named_parameters():
        grads = [g for m in models if (g := m.module.get_parameter(name).grad) is not None]
        far.append(_far(torch.stack(grads).sum(0), p.grad if p.grad is not None else torch.zeros_like(p)))
    return max(far)


def _model(build: Callable[[], nn.Module], ids: Tensor, axis: RankAxis, heads: bool) -> UserModel:
    shard = ModelShard(RankRegion(cp=axis, heads=heads))
    batch = int(ids.shape[0]), int(ids.shape[1])
    return UserModel(build, dtype=torch.float64, tags={"PP": "layers.*"}, batch=batch, shard=shard)


def _logits(model: UserModel, ids: Tensor) -> Tensor:
    (found,) = model._try(*model._batch, lambda _, chunk, x: _as_tuple(chunk(*x)), ids)
    return found


def _as_tuple(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def _far(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).detach())
