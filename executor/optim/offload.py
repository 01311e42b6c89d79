"""An optimizer of which the host may make a share, and then keeps the moments and weights of that."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from executor.device.device import Device, on_host, threads
from executor.device.memory import unfollowed
from executor.optim.muon import MatrixShardGroup
from executor.optim.optimizer import Optimizer, Runs, decay_of
from ir.job.schema import JobOptimizer


class OffloadedOptimizer:
    """`Optimizer`, with the last elements of some tensors updated by the host, in the same arithmetic.

    host: how many of each that is. Gradients come down as the update begins; as soon as a tensor's are here the host
    updates its share, and the weights go up while it is at the next. They are not waited for: what reads the weights
    stands behind them in the device's lane.

    >>> from executor.device.device import HostDevice
    >>> w = torch.ones(3)
    >>> opt = OffloadedOptimizer(JobOptimizer("sgd", lr=0.5), {"w": w}, host={"w": 1}, device=HostDevice())
    >>> opt.step({"w": torch.tensor([1.0, 2.0, 4.0])}); w.tolist()
    [0.5, 0.0, -1.0]
    >>> [(first, slots["weight"].tolist()) for first, slots in opt.kept("w")]
    [(0, [0.5, 0.0]), (2, [-1.0])]
    """

    def __init__(
        self,
        config: JobOptimizer,
        params: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        runs: Mapping[str, Runs] | None = None,
        matrices: Mapping[str, MatrixShardGroup | None] | None = None,
        *,
        host: Mapping[str, int],
        device: Device,
    ) -> None:
        self.device = device
        self.begins = {n: params[n].numel() - count for n, count in host.items() if count}  # of the host's share
        given, runs = {n: p.detach() for n, p in params.items()}, dict(runs or {})
        own = {n: p for n, p in self._device(given).items() if p.numel() or n not in self.begins}
        self.shares = {n: given[n].view(-1)[k:] for n, k in self.begins.items()}
        late = dict[str, Runs]()
        for n, k in self.begins.items():
            whole = runs.get(n, ((slice(None), decay_of(config, n)),))
            runs[n], late[n] = _within(whole, 0, k), _within(whole, k, given[n].numel())
        self.own = Optimizer(config, own, dtype, runs, matrices)
        self.host = dict[str, Optimizer]()
        with on_host(), unfollowed():
            for n, share in self.shares.items():
                wide = share.to("cpu", torch.promote_types(share.dtype, dtype), copy=True)
                self.host[n] = Optimizer(config, {n: wide}, dtype, {n: late[n]})

    def resume(self, steps: int) -> None:
        """Go on as behind so many updates."""
        for optimizer in (self.own, *self.host.values()):
            optimizer.steps = steps

    def ends(self, steps: int) -> None:
        """Tell behind how many steps the run ends."""
        for optimizer in (self.own, *self.host.values()):
            optimizer.ends = steps

    def kept(self, name: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """What the next update starts from, as `Optimizer.kept`: of the device's share and the host's, each with its
        first element in the tensor."""
        if name in self.own.params:
            yield 0, self.own.kept(name)
        if name in self.begins:
            yield self.begins[name], self.host[name].kept(name)

    def tensors(self) -> list[Tensor]:
        """Moments and master weights that the device has."""
        state = [t for slots in self.own.state.values() for t in slots.values()]
        return [*state, *self.own.masters.values()]

    def step(self, grads: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> None:
        """Update all parameters with grads · scale."""
        known = [scale] if isinstance(scale, Tensor) else []
        down = {n: self.device.fetch([grads[n].view(-1)[k:], *known]) for n, k in self.begins.items()}
        self.own.step(self._device(grads), scale)
        for name, copy in down.items():
            grad, *told = copy.read()
            with on_host(), unfollowed(), threads(self.device.host_threads):
                self.host[name].step({name: grad}, told[0] if told else scale)
                share, wide = self.shares[name], self.host[name].params[name]
                weight = wide.to(share.dtype)
                ready = weight.pin_memory() if share.is_cuda else weight
            share.copy_(ready, non_blocking=True)

    def _device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The device's share of each."""
        return {n: t.view(-1)[: self.begins[n]] if n in self.begins else t for n, t in tensors.items()}


def _within(runs: Runs, begin: int, end: int) -> Runs:
    """Stretches of a tensor, as those of its elements from one to another.

    >>> _within(((slice(None, 4), 0.0), (slice(4, None), 0.1)), 3, 6)
    ((slice(0, 1, None), 0.0), (slice(1, 3, None), 0.1))
    >>> _within(((slice(None), 0.1),), 3, 6)
    ((slice(0, 3, None), 0.1),)
    """
    cuts = [(max(s.start or 0, begin), end if s.stop is None else min(s.stop, end), decay) for s, decay in runs]
    return tuple((slice(low - begin, high - begin), decay) for low, high, decay in cuts if low < high)
