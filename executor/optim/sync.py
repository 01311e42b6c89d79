"""What keeps copies and shares in step: reductions over owners, the global norm, the update, gathers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, dtype, float64

from executor.device.device import Device, HostDevice
from executor.optim.flat import FlatBucket
from executor.optim.muon import MatrixShardGroup
from executor.optim.offload import OffloadedOptimizer
from executor.optim.optimizer import (
    WEIGHT,
    ParamGradients,
    Runs,
    clip_scale,
    decay_of,
    global_norm,
    square_sums,
)
from executor.parallel.collective import Collective
from executor.transport.base import Transport, TransportHandle
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import MessageKind
from ir.graph.sync import Bucket
from ir.job.schema import JobOptimizer
from ir.plan.places import RankPlacement, copiers, several, sharers

Start = tuple[
    Callable[[], TransportHandle], Callable[[], None] | None
]  # posts a collective; what is done where it has ended


@dataclass(frozen=True)
class BucketSyncConfig:
    """How gradients become an update."""

    optimizer: JobOptimizer
    reduce: dtype  # of gradients while they are reduced
    moments: dtype  # of optimizer state
    gather: dtype | None = None  # of weights on their way to who reads them; their own, if left out
    elsewhere: frozenset[str] = frozenset()  # what the global norm takes from a tensor-parallel rank before this one
    cuts: Mapping[str, MatrixShardGroup] = field(default_factory=dict)  # of hidden matrices that ranks share, for Muon
    device: Device = field(default_factory=HostDevice)  # if it is ahead, what gradients are multiplied by stays there


class BucketSync:
    """Gradients, update and shares of one rank. order: all parameters of the model, canonically.

    norm: of the step's whole gradient, if it is to be clipped.
    """

    def __init__(
        self,
        rank: int,
        places: RankPlacement,
        found: Sequence[Bucket],
        params: Mapping[str, Tensor],
        grads: ParamGradients,
        order: Sequence[str],
        config: BucketSyncConfig,
    ) -> None:
        self.elsewhere, self.ahead = config.elsewhere, config.device.ahead
        self.grads, self.params, self.order, self.config = grads, params, list(order), config.optimizer
        program = places.program(rank)
        shared = several(found, program)
        self.alone = [n for b in found if program in b.owners and b not in shared for n in b.params]
        self.flat: dict[str, FlatBucket] = {}
        for b in shared:
            members, first = sharers(b, places, rank), copiers(b, places, rank)[0] == rank
            index = members.index(rank)
            self.flat[b.key] = FlatBucket(
                b, members, index, params, grads, reduce=config.reduce, gather=config.gather, first=first
            )
        mine = {n: params[n] for n in self.alone}
        for f in self.flat.values():
            mine |= f.units(f.weights)
        runs = {f"flat:{k}": _runs(f, config.optimizer) for k, f in self.flat.items() if not f.matrices}
        matrices = {n: config.cuts.get(n) for b in found if b.matrices for n in b.params}
        host = {n: int(t.numel() * config.optimizer.offload) for n, t in mine.items() if n not in self.alone}
        for b in (b for b in found if program in b.owners and b not in shared):
            host |= _last(int(b.numel * config.optimizer.offload), {n: params[n].numel() for n in b.params})
        self.optimizer = OffloadedOptimizer(
            config.optimizer, mine, config.moments, runs, matrices, host=host, device=config.device
        )
        # The norm's last bit is the order's in which copies were summed: where sums are wider than weights, it goes, or
        # it would round one weight of a billion otherwise, and curves of two plans would part after some hundred steps.
        sums = [*(grads.sums[n] for n in self.alone), *(f.sums for f in self.flat.values())]
        self._single_clip = {s.dtype for s in sums} == {float64} and float64 not in {w.dtype for w in mine.values()}
        self.norm: float | Tensor | None = None
        self.frozen = False  # the step is one of evaluation, and updates nothing
        self._sums: Tensor | None = None

    def begin(self) -> None:
        self.grads.begin(self.alone)
        for f in self.flat.values():
            f.begin()
        self.norm, self._sums = None, None

    # -- as the plan's ops ask ----------------------------------------------------------------------------------------

    def start(self, meeting: Collective, transport: Transport) -> Start:
        """How to post a collective once its stream comes to it, and what its stream does at its end."""
        group, mb = meeting.group, meeting.mb
        if not meeting.bucket:
            sums = self._partial_norm()  # here and now, on the host: a stream's thread only communicates
            return lambda: transport.all_reduce(group, sums), None
        flat = self.flat[meeting.bucket]
        match meeting.kind:
            case MessageKind.REDUCE_SCATTER if meeting.once:
                return lambda: transport.reduce_scatter(group, flat.reduced, flat.filled()), None
            case MessageKind.REDUCE_SCATTER:
                whole = flat.passing[mb]
                return lambda: transport.reduce_scatter(group, whole[flat.own], whole), partial(flat.land, mb)
            case MessageKind.ALL_REDUCE:
                return lambda: transport.all_reduce(group, flat.summed()), None
            case MessageKind.ALL_GATHER:
                if not meeting.once:
                    flat.fetch()
                return lambda: transport.all_gather(group, flat.whole, flat.given()), None
            case _:
                raise AssertionError(f"{meeting} has no bucket")

    def open(self, bucket: str, mb: int) -> None:
        self.flat[bucket].open(mb)

    def reads(self, buckets: Sequence[str], op: str) -> None:
        """An op is about to read weights that were gathered for it. Raises PiperError where they are not there."""
        for key in buckets:
            if not self.flat[key].here:
                message = f"{op} reads {key}, which was not gathered or freed already"
                raise PiperError(ErrorKind.ILLEGAL_PLAN, message)

    def close(self, meeting: Collective) -> None:
        flat = self.flat[meeting.bucket]
        if meeting.kind is MessageKind.ALL_GATHER:
            flat.drop()
        else:
            flat.close(meeting.mb)

    def update(self) -> None:
        """Clip, and update this rank's part; what it did not update comes by the gathers."""
        if self.frozen:
            return
        self.grads.settle()
        if self.config.clip_norm:  # a job of one rank has no collective for it
            sums = self.squares() if self._sums is None else self._sums
            self.norm = global_norm(sums, ahead=self.ahead)
        grads: dict[str, Tensor] = {n: self.grads[n] for n in self.alone}
        for f in self.flat.values():
            grads |= f.units(f.reduced)
        clip, single = self.config.clip_norm, self._single_clip
        self.optimizer.step(grads, 1.0 if self.norm is None else clip_scale(self.norm, clip, single=single))

    # -- what this rank has -------------------------------------------------------------------------------------------

    def squares(self) -> Tensor:
        """Σ g² of each parameter over this rank's share, in canonical order."""
        self.grads.settle()
        mine = {n: self.grads[n] for n in self.alone}
        for f in self.flat.values():
            mine |= {n: piece for n, (_, piece) in f.pieces(f.reduced).items() if f.counts}
        where = next((p.device for p in self.params.values()), None)
        return square_sums({n: g for n, g in mine.items() if n not in self.elsewhere}, self.order, where)

    def tensors(self) -> list[Tensor]:
        """Flat buffers and the device's optimizer state: they persist."""
        return [*(t for f in self.flat.values() for t in f.tensors()), *self.optimizer.tensors()]

    def state_bytes(self) -> dict[str, int]:
        """What persists on the device, after sharding."""
        whole = [f.weights if f.gathers else f.whole for f in self.flat.values()]
        parts = {
            "parameters": [*(self.params[n] for n in self.alone), *whole],
            "gradients": [*(self.grads[n] for n in self.alone), *(f.sums for f in self.flat.values())],
            "optimizer": self.optimizer.tensors(),
            "buffers": [f.travels for f in self.flat.values() if f.travels is not f.sums],
        }
        return {name: sum(t.nbytes for t in tensors) for name, tensors in parts.items()}

    def reduced(self) -> dict[str, tuple[int, Tensor]]:
        """Each parameter's gradient after the reductions, as far as this rank has it: (first element, flat piece)."""
        out = {n: (0, self.grads[n].flatten()) for n in self.alone}
        for f in self.flat.values():
            out |= f.pieces(f.reduced)
        return out

    def weights(self) -> dict[str, tuple[int, Tensor]]:
        """Each parameter, as far as this rank holds it between steps."""
        out = {n: (0, p.detach().flatten()) for n, p in self.params.items()}
        for f in self.flat.values():
            if f.gathers:
                out = {n: x for n, x in out.items() if n not in f.places} | f.pieces(f.weights)
        return out

    def kept(self) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """What this rank updates: parameter, first element, and the flat pieces of the value and of its moments. Of one
        of which the host updates a part there are two, in their order."""
        whole = [*self.alone, *(n for f in self.flat.values() if f.matrices for n in f.units(f.weights))]
        for n in whole:
            for first, slots in self.optimizer.kept(n):
                yield n, first, {s: t.view(-1) for s, t in slots.items()}
        for key, f in ((k, f) for k, f in self.flat.items() if not f.matrices):
            for at, slots in self.optimizer.kept(f"flat:{key}"):
                cut = {s: f.pieces(flat, at) for s, flat in slots.items()}
                for n, (first, _) in cut[WEIGHT].items():
                    yield n, first, {s: pieces[n][1] for s, pieces in cut.items()}

    def _partial_norm(self) -> Tensor:
        self._sums = self.squares()
        return self._sums


def _last(count: int, numels: Mapping[str, int]) -> dict[str, int]:
    """So many elements, the last of several tensors that lie behind one another, by tensor.

    >>> _last(5, {"a": 4, "b": 2, "c": 2})
    {'c': 2, 'b': 2, 'a': 1}
    """
    out = dict[str, int]()
    for name, numel in reversed([*numels.items()]):
        out[name] = min(count, numel)
        count -= out[name]
    return out


def _runs(flat: FlatBucket, config: JobOptimizer) -> Runs:
    """The stretches of a rank's share that decay alike; what lies between two parameters goes with the first."""
    begins: list[tuple[int, float]] = []
    for name, place in flat.places.items():
        low = max(place.start, flat.own.start)
        if low < min(place.stop, flat.own.stop):
            decay = decay_of(config, name)
            if not begins or decay != begins[-1][1]:
                begins.append((low - flat.own.start if begins else 0, decay))
    ends = [first for first, _ in begins[1:]]
    return tuple((slice(a or None, b), decay) for (a, decay), b in zip(begins, [*ends, None], strict=False))
