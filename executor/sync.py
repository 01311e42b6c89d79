"""Once per step: reductions over owners, the global norm, the update, gathers; each bucket a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from executor.chunk import Gradients
from executor.optimizer import Optimizer, OptimizerConfig, clip_scale, norm_of, square_sums
from executor.transport.base import Handle, Transport
from ir.errors import ErrorKind, PiperError
from ir.graph import Node, Once
from ir.sync import Bucket

Started = tuple[Handle, Callable[[], None] | None]


class _Flat:
    """A bucket whose parameters several ranks hold: gradients travel flat, and this rank updates its share of them."""

    def __init__(self, bucket: Bucket, rank: int, params: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.bucket, self.names = bucket, list(bucket.params)
        self.params = {n: params[n] for n in self.names}
        size = bucket.shard * bucket.ranks
        self.grads = torch.zeros(size, dtype=dtype)
        wide = next(iter(self.params.values())).dtype
        self.whole = torch.zeros(size, dtype=wide)
        sharded = bucket.replica.zero == 1
        index = bucket.owners.index(rank)
        self.own = slice(index * bucket.shard, (index + 1) * bucket.shard) if sharded else slice(0, size)
        self.counts = sharded or index == 0  # a share held alike by several ranks enters the norm once
        self.weights = self.whole[self.own]
        self.reduced = self.grads[self.own] if not sharded else torch.zeros(bucket.shard, dtype=dtype)
        self._copy_in(self.whole, self.params)

    def _copy_in(self, flat: Tensor, parts: Mapping[str, Tensor]) -> None:
        at = 0
        for n in self.names:
            flat[at : at + parts[n].numel()].copy_(parts[n].detach().flatten())
            at += parts[n].numel()

    def fill(self, grads: Gradients) -> None:
        """Gradients into the flat buffer."""
        self._copy_in(self.grads, {n: grads[n] for n in self.names})

    def scatter_back(self) -> None:
        """The updated flat weights into the parameters."""
        at = 0
        with torch.no_grad():
            for n, p in self.params.items():
                p.copy_(self.whole[at : at + p.numel()].view_as(p))
                at += p.numel()

    def squares(self, order: Sequence[str]) -> Tensor:
        """Σ g² of this rank's share, parameter by parameter."""
        out = torch.zeros(len(order), dtype=torch.float64)
        at = 0
        for n in self.names:
            size = self.params[n].numel()
            lo, hi = max(at, self.own.start), min(at + size, self.own.stop)
            if lo < hi and self.counts:
                piece = self.reduced[lo - self.own.start : hi - self.own.start]
                out[order.index(n)] += piece.double().square().sum()
            at += size
        return out


class Sync:
    """Everything of a step that happens once. order: all parameters of the model, canonically."""

    def __init__(
        self,
        rank: int,
        found: Sequence[Bucket],
        params: Mapping[str, Tensor],
        grads: Gradients,
        order: Sequence[str],
        config: OptimizerConfig,
        moments: torch.dtype,
    ) -> None:
        mine = [b for b in found if rank in b.owners]
        for b in mine:
            if b.replica.zero > 1:
                message = f"ZeRO-{b.replica.zero} is planned and simulated, but not executed yet"
                raise PiperError(ErrorKind.JOB, message, key="parallel.zero", allowed="0, 1", suggestion="zero = 1")
        self.grads, self.order, self.config = grads, list(order), config
        dtype = next(iter(grads.sums.values())).dtype
        self.flat = {b.key: _Flat(b, rank, params, dtype) for b in mine if b.ranks > 1}
        self.alone = [n for b in mine if b.ranks == 1 for n in b.params]
        shares = {f"flat:{k}": f.weights for k, f in self.flat.items()}
        self.optimizer = Optimizer(config, {**{n: params[n] for n in self.alone}, **shares}, moments)
        self.norm: float | None = None
        self._sums: Tensor | None = None

    def begin(self) -> None:
        """A new step."""
        self.grads.zero()
        self.norm, self._sums = None, None

    def start(self, node: Node, transport: Transport) -> Started | None:
        """Post one collective."""
        group = node.text()
        match node.kind:
            case Once.ALL_REDUCE:
                flat = self._bucket(node)
                flat.fill(self.grads)
                return transport.all_reduce(group, flat.grads), None
            case Once.REDUCE:
                flat = self._bucket(node)
                flat.fill(self.grads)
                return transport.reduce_scatter(group, flat.reduced, flat.grads), None
            case Once.GATHER:
                flat = self._bucket(node)
                return transport.all_gather(group, flat.whole, flat.weights.clone()), flat.scatter_back
            case Once.NORM:
                self._sums = self._squares()
                return transport.all_reduce(group, self._sums), None
            case _:
                raise AssertionError(f"{node.text()} is no collective")

    def update(self) -> None:
        """Clip and update this rank's share; replicated copies take it at once, sharded ones by their gather."""
        sums = self._squares() if self._sums is None else self._sums
        self.norm = norm_of(sums)
        grads: dict[str, Tensor] = {n: self.grads[n] for n in self.alone}
        grads |= {f"flat:{k}": f.reduced for k, f in self.flat.items()}
        self.optimizer.step(grads, clip_scale(self.norm, self.config.clip_norm))
        for f in self.flat.values():
            if f.bucket.replica.zero == 0:
                f.scatter_back()

    def _squares(self) -> Tensor:
        sums = square_sums({n: self.grads[n] for n in self.alone}, self.order)
        for f in self.flat.values():
            sums = sums + f.squares(self.order)
        return sums

    def _bucket(self, node: Node) -> _Flat:
        return self.flat[f"{node.stage}/{node.part}"]
