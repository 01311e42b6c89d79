"""Once per step: reductions over owners, the global norm, the update, gathers; each bucket a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from executor.chunk import Gradients
from executor.optimizer import Optimizer, OptimizerConfig, clip_scale, norm_of, square_sums
from executor.transport.base import Handle, Transport
from ir.graph import Node, Once
from ir.sync import Bucket


def group_name(node: Node) -> str:
    """The group a collective runs in: one per stream and set of members.

    >>> group_name(Node(0, Once.NORM, "", "dp"))
    'dp:'
    """
    return f"{node.stream}:{','.join(map(str, node.groups))}"


class _Flat:
    """A bucket whose parameters several ranks hold, as flat tensors: parameters and gradient sums become views of them.

    own: the part that this rank updates; all of it under ZeRO-0, where the copies' equal norms count once. dtype: that
    gradients are reduced in.
    """

    def __init__(
        self, bucket: Bucket, rank: int, params: Mapping[str, Tensor], grads: Gradients, dtype: torch.dtype
    ) -> None:
        self.sharded = bucket.replica.zero == 1
        index, size = bucket.owners.index(rank), bucket.shard * bucket.ranks
        self.counts = self.sharded or index == 0
        self.own = slice(index * bucket.shard, (index + 1) * bucket.shard) if self.sharded else slice(0, size)
        self.places: dict[str, slice] = {}
        at = 0
        for n in bucket.params:
            self.places[n] = slice(at, at + params[n].numel())
            at += params[n].numel()
        first, summed = params[bucket.params[0]], grads.sums[bucket.params[0]].dtype
        self.whole, self.summed = torch.zeros(size, dtype=first.dtype), torch.zeros(size, dtype=summed)
        for n, place in self.places.items():
            p = params[n]
            self.whole[place].copy_(p.detach().flatten())
            p.data = self.whole[place].view_as(p)
            grads.sums[n] = self.summed[place].view_as(p)
        self.travels = self.summed if dtype == summed else torch.zeros(size, dtype=dtype)
        self.weights, self.reduced = self.whole[self.own], self.travels[self.own]

    def filled(self) -> Tensor:
        """The gradients as they travel."""
        return self.travels if self.travels is self.summed else self.travels.copy_(self.summed)

    def pieces(self) -> dict[str, tuple[int, Tensor]]:
        """The reduced gradients of this rank's part, by parameter: first element, and the flat piece from there on."""
        out = {}
        for n, place in self.places.items():
            low, high = max(place.start, self.own.start), min(place.stop, self.own.stop)
            if low < high:
                out[n] = low - place.start, self.reduced[low - self.own.start : high - self.own.start]
        return out


class Sync:
    """Everything of a step that happens once. order: all parameters of the model, canonically.

    norm: of the step's whole gradient, if it is to be clipped. reduce: dtype that gradients
    are reduced in; moments: of optimizer state.
    """

    def __init__(
        self,
        rank: int,
        found: Sequence[Bucket],
        params: Mapping[str, Tensor],
        grads: Gradients,
        order: Sequence[str],
        config: OptimizerConfig,
        *,
        reduce: torch.dtype,
        moments: torch.dtype,
    ) -> None:
        self.grads, self.order, self.config = grads, list(order), config
        mine = [b for b in found if rank in b.owners]
        self.alone = [n for b in mine if b.ranks == 1 for n in b.params]
        self.flat = {b.key: _Flat(b, rank, params, grads, reduce) for b in mine if b.ranks > 1}
        shares = {f"flat:{k}": f.weights for k, f in self.flat.items()}
        self.optimizer = Optimizer(config, {**{n: params[n] for n in self.alone}, **shares}, moments)
        self.norm: float | None = None
        self._sums: Tensor | None = None

    def begin(self) -> None:
        """A new step."""
        self.grads.zero()
        self.norm, self._sums = None, None

    def start(self, node: Node, transport: Transport) -> Callable[[], Handle]:
        """How to post a collective once its stream comes to it."""
        group = group_name(node)
        if node.kind is Once.NORM:
            sums = self._partial_norm()  # here and now, on the host: a stream's thread only communicates
            return lambda: transport.all_reduce(group, sums)
        flat = self.flat[f"{node.stage}/{node.part}"]
        match node.kind:
            case Once.REDUCE:
                return lambda: transport.reduce_scatter(group, flat.reduced, flat.filled())
            case Once.ALL_REDUCE:
                return lambda: transport.all_reduce(group, flat.filled())
            case Once.GATHER:
                return lambda: transport.all_gather(group, flat.whole, flat.weights)
            case _:
                raise AssertionError(f"{node.text()} is no collective")

    def update(self) -> None:
        """Clip, and update this rank's part; what it did not update comes by the gathers."""
        if self.config.clip_norm:  # a job of one rank has no collective for it
            self.norm = norm_of(self.squares() if self._sums is None else self._sums)
        grads: dict[str, Tensor] = {n: self.grads[n] for n in self.alone}
        grads |= {f"flat:{k}": f.reduced for k, f in self.flat.items()}
        self.optimizer.step(grads, 1.0 if self.norm is None else clip_scale(self.norm, self.config.clip_norm))

    def squares(self) -> Tensor:
        """Σ g² of each parameter over this rank's share, in canonical order."""
        sums = square_sums({n: self.grads[n] for n in self.alone}, self.order)
        for f in self.flat.values():
            if f.counts:
                sums += square_sums({n: piece for n, (_, piece) in f.pieces().items()}, self.order)
        return sums

    def tensors(self) -> list[Tensor]:
        """Flat buffers and optimizer state: they persist."""
        flat = [t for f in self.flat.values() for t in (f.whole, f.summed, f.travels)]
        state = [t for slots in self.optimizer.state.values() for t in slots.values()]
        return [*flat, *state, *self.optimizer.masters.values()]

    def reduced(self) -> dict[str, tuple[int, Tensor]]:
        """Each parameter's gradient after the reductions, as far as this rank has it: (first element, flat piece)."""
        out = {n: (0, self.grads[n].flatten()) for n in self.alone}
        for f in self.flat.values():
            out |= f.pieces()
        return out

    def _partial_norm(self) -> Tensor:
        self._sums = self.squares()
        return self._sums
