"""Buckets that several ranks hold, as flat tensors, of which each rank keeps what its ZeRO level says.

Weights are views of one flat tensor as long as the step runs. Where they are sharded, its storage is empty until a
gather fills it, and again from where the plan frees it: what autograd keeps of a weight is a view of the same storage,
so that backward reads what the next gather brings. `places_in` says where each parameter lies.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from executor.optim.optimizer import ParamGradients
from ir.core.errors import ErrorKind, PiperError
from ir.graph.matrices import packed
from ir.graph.sync import Bucket


class FlatBucket:
    """One bucket on one rank. members: the ranks between which it is sharded or kept in step, this one is the
    index-th. first: whether this is the first of the ranks that hold the same. reduce: dtype gradients travel in;
    gather: weights that are gathered where they are read, and are read in (their own, if left out).

    own: which elements this rank updates. weights: their parameters; sums: what gradients are summed in, over
    microbatches; reduced: the sums over ranks of `own`. counts: whether the global norm takes them from this rank.
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[int],
        index: int,
        params: Mapping[str, Tensor],
        grads: ParamGradients,
        *,
        reduce: torch.dtype,
        gather: torch.dtype | None = None,
        first: bool,
    ) -> None:
        zero = bucket.replica.zero if len(members) > 1 else 0
        self.name, self.grads, self.reduce = bucket.key, grads, reduce
        self.counts = first and (zero > 0 or index == 0)
        param, summed = params[bucket.params[0]], grads.sums[bucket.params[0]].dtype
        self.gathers, read = zero == 3, gather if gather and zero == 3 else param.dtype
        self.shapes = {n: params[n].shape for n in bucket.params}
        numels = {n: s.numel() for n, s in self.shapes.items()}
        narrowest = min(param.element_size(), summed.itemsize, read.itemsize)
        self.matrices = bool(bucket.matrices)
        if self.matrices and zero:
            owners = packed([m.numel for m in bucket.matrices], len(members))
            self.places, shard = places_whole(numels, narrowest, owners)
        else:
            self.places, end = places_in(numels, narrowest)
            shard = -(-end // len(members))
        size = shard * len(members)
        self.own = slice(index * shard, (index + 1) * shard) if zero else slice(0, size)
        self.whole = torch.zeros(size, dtype=param.dtype, device=param.device)
        for n, place in self.places.items():
            self.whole[place].copy_(params[n].detach().flatten())
        self.weights = self.whole[self.own]
        if self.gathers:
            self.weights, self.whole = self.weights.clone(), self.whole.to(read)
        for n, place in self.places.items():
            params[n].data = self.whole[place].view(self.shapes[n])
        if self.gathers:
            self._resize(0)
        self.passing: dict[int, Tensor] = {}
        self.sums = torch.zeros(shard if zero > 1 else size, dtype=summed, device=param.device)
        for n, place in self.places.items():
            del grads.sums[n]
            if zero < 2:
                grads.sums[n] = self.sums[place].view(self.shapes[n])
        self.summing = tuple(self.places) if zero < 2 else ()
        meets = zero < 2 or bucket.copies > 1
        self.travels = torch.zeros_like(self.sums, dtype=reduce) if meets and reduce != summed else self.sums
        self.reduced = self.travels if zero > 1 else self.travels[self.own]
        self.scattered = zero == 1

    def begin(self) -> None:
        if self.summing:
            self.grads.begin(self.summing)
        else:
            self.sums.zero_()

    def filled(self) -> Tensor:
        """The sums as they travel once per step."""
        self.grads.settle(self.summing)
        return self.travels if self.travels is self.sums else self.travels.copy_(self.sums)

    def summed(self) -> Tensor:
        """What is summed over the ranks that hold the same: of ZeRO-1, what its ranks have summed of this share."""
        return self.reduced if self.scattered else self.filled()

    # -- gradients of one microbatch ----------------------------------------------------------------------------------

    def open(self, mb: int) -> None:
        """Room for a microbatch's gradients, to be reduced by themselves."""
        flat = self.passing[mb] = torch.zeros(self.whole.numel(), dtype=self.reduce, device=self.whole.device)
        for n, place in self.places.items():
            self.grads.passing[n, mb] = flat[place].view(self.shapes[n])

    def land(self, mb: int) -> None:
        """They have been reduced, in place: add this rank's part."""
        self.sums.add_(self.passing[mb][self.own])

    def close(self, mb: int) -> None:
        del self.passing[mb]
        for n in self.places:
            del self.grads.passing[n, mb]

    # -- weights for some ops -----------------------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """Whether the weights may be read, or are on their way."""
        return self.whole.untyped_storage().nbytes() > 0

    def fetch(self) -> None:
        """Room for the weights. Raises PiperError where they have it already."""
        if self.here:
            message = f"{self.name} is gathered again before it was freed"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message, suggestion="free it behind the last op that reads it")
        self._resize(self.whole.numel())

    def given(self) -> Tensor:
        """What this rank gives to a gather: its weights, in the format of the whole."""
        if self.weights.dtype is self.whole.dtype:
            return self.weights
        return self.whole[self.own].copy_(self.weights)

    def drop(self) -> None:
        self._resize(0)

    def _resize(self, numel: int) -> None:
        self.whole.untyped_storage().resize_(numel * self.whole.element_size())
        self.whole[:0]  # an op, so that who follows storages sees it; a longer view of a fake one takes room again

    # -- what this rank has -------------------------------------------------------------------------------------------

    def pieces(self, flat: Tensor, at: int = 0) -> dict[str, tuple[int, Tensor]]:
        """`weights` or `reduced`, or what of them begins at an element, by parameter: first element, and the flat piece
        from there on."""
        out, begin = {}, self.own.start + at
        for n, place in self.places.items():
            low, high = max(place.start, begin), min(place.stop, begin + len(flat))
            if low < high:
                out[n] = low - place.start, flat[low - begin : high - begin]
        return out

    def units(self, flat: Tensor) -> dict[str, Tensor]:
        """`weights` or `reduced` as the optimizer takes them: matrices in their shapes, all else as one."""
        if not self.matrices:
            return {f"flat:{self.name}": flat}
        return {n: piece.view(self.shapes[n]) for n, (_, piece) in self.pieces(flat).items()}

    def tensors(self) -> list[Tensor]:
        return [self.weights, self.whole, self.sums, self.travels]


ALIGN_BYTES = 64  # the same kernel takes other paths, to other last bits, where a weight starts elsewhere


def places_in(numels: Mapping[str, int], narrowest: int) -> tuple[dict[str, slice], int]:
    """Where each parameter lies, each on a multiple of 64 bytes, and where the last one ends; all in elements.

    narrowest: bytes of an element in the narrowest format that such a tensor is kept in.

    >>> places_in({"a": 3, "b": 8}, 8)
    ({'a': slice(0, 3, None), 'b': slice(8, 16, None)}, 16)
    """
    step, out, end = ALIGN_BYTES // narrowest, {}, 0
    for name, numel in numels.items():
        start = -(-end // step) * step
        end = start + numel
        out[name] = slice(start, end)
    return out, end


def places_whole(numels: Mapping[str, int], narrowest: int, owners: Sequence[int]) -> tuple[dict[str, slice], int]:
    """`places_in` of equal shares, each of which has some parameters whole, and the elements of one share.

    >>> places_whole({"a": 3, "b": 8, "c": 2}, 8, (0, 1, 0))
    ({'a': slice(0, 3, None), 'c': slice(8, 10, None), 'b': slice(10, 18, None)}, 10)
    """
    shares = [{n: numels[n] for n, o in zip(numels, owners, strict=True) if o == r} for r in range(max(owners) + 1)]
    inside = [places_in(share, narrowest) for share in shares]
    size = max(end for _, end in inside)
    moved = ((n, p, r * size) for r, (places, _) in enumerate(inside) for n, p in places.items())
    return {n: slice(p.start + by, p.stop + by) for n, p, by in moved}, size
