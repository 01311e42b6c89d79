"""What persists on a rank of the executor, and what its norm and its update need for a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ir.core.alloc import BEFORE, AllocList, Birth
from ir.core.errors import ErrorKind, PiperError
from ir.core.flat import places_in, update_blocks
from ir.graph.classes import sync_class
from ir.graph.graph import Once
from ir.graph.sync import Bucket, buckets, repeated
from ir.job.build import Prepared, precision_of
from ir.plan.places import Places, several, sharers
from ir.plan.plan import Plan
from ir.workload.setting import Precision
from piper_sim.memory.splice_account import Account

SUM_BYTES = 8  # of one parameter's sum of squares
Numels = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Flat:
    """A bucket that several ranks hold, on one of them: one tensor, padded, of which it keeps what ZeRO says.

    persistent: bytes of its weights and gradient sums. whole: bytes of its weights when they have been gathered.
    passing: bytes of one microbatch's gradients. updates: elements that this rank updates. wide: whether its sums are
    in the format of reductions when they are squared and updated. squares: elements of each parameter that this rank
    squares; None where another rank does it.
    """

    persistent: int
    whole: int
    passing: int
    updates: int
    wide: bool
    squares: tuple[int, ...] | None

    @classmethod
    def of(
        cls, bucket: Bucket, places: Places, rank: int, numels: Numels, p: Precision, counted: Iterable[str]
    ) -> Flat:
        """As `executor.optim.flat` lays it out. counted: the parameters that this rank squares, in canonical order."""
        members = sharers(bucket, places, rank)
        index, zero = members.index(rank), bucket.replica.zero if len(members) > 1 else 0
        where, end = places_in({n: numels[n] for n in bucket.params}, min(p.params.bytes, p.grads.bytes))
        shard = -(-end // len(members))
        size = shard * len(members)
        mine = slice(index * shard, (index + 1) * shard) if zero else slice(0, size)
        weights, sums = shard if zero == 3 else size, shard if zero > 1 else size
        wide = zero < 2 or len(bucket.owners) > 1
        travels = sums * p.reduce.bytes if wide and p.reduce is not p.grads else 0
        first = bucket.owners[0] == places.program(rank)
        counts = zero == 1 or (first and (zero > 1 or index == 0))
        return cls(
            persistent=weights * p.params.bytes + sums * p.grads.bytes + travels,
            whole=size * p.params.bytes,
            passing=size * p.reduce.bytes,
            updates=shard if zero else size,
            wide=wide,
            squares=tuple(_within(where, mine, counted)) if counts else None,
        )


def _within(where: Mapping[str, slice], mine: slice, order: Iterable[str]) -> Iterable[int]:
    """Elements of each parameter that lie in a share, in canonical order."""
    for name in order:
        if (place := where.get(name)) is not None:
            size = min(place.stop, mine.stop) - max(place.start, mine.start)
            if size > 0:
                yield size


class SyncMemory:
    """One rank's parameters, gradients and optimizer state, and the loops over them.

    Parameters of one owner stand alone, the others in flat buckets, by key. The norm is taken where the plan has an op
    for it, else with the update (clipping), else at the end.

    persistent: bytes there are all the time. squaring, updating: bytes that the norm and the update need at most.
    """

    def __init__(
        self, prepared: Prepared, plan: Plan, lists: Mapping[str, AllocList], rank: int, places: Places | None = None
    ) -> None:
        places, job, precision = places or Places.of(plan), prepared.job, precision_of(prepared.job)
        source, program = plan.graph.source, places.program(rank)
        assert source is not None
        numels = {p.name: source.local_numel(p, e.layout) for e in plan.graph.entries for p in e.part.params}
        self.clip, self.taken = job.optimizer.clip_norm > 0, False
        self.sums = SUM_BYTES * len(numels)
        found = buckets(plan.graph)
        shared = several(found, program)
        elsewhere = repeated(plan.graph) if places.mesh.coordinates(rank)["tp"] else frozenset[str]()
        counted = [n for n in numels if n not in elsewhere]
        self.flat = {b.key: Flat.of(b, places, rank, numels, precision, counted) for b in shared}
        alone = [n for b in found if program in b.owners and b not in shared for n in b.params]
        self.alone, self.squared = ([numels[n] for n in alone if n not in skip] for skip in ((), elsewhere))
        self.lists = {
            (kind, wide): _list(kind, wide, precision, job.optimizer.name, self.clip, lists)
            for kind in (Once.NORM, Once.UPDATE)
            for wide in (False, True)
        }
        updates = [*((n, False) for n in self.alone), *((f.updates, f.wide) for f in self.flat.values())]
        state = _state(precision, job.optimizer.name) * sum(n for n, _ in updates)
        held = sum(self.alone) * (precision.params.bytes + precision.grads.bytes)
        self.persistent = held + sum(f.persistent for f in self.flat.values()) + state
        self.squaring = self._squaring()
        self.updating = self._most(Once.UPDATE, ((part, wide) for n, wide in updates for part in update_blocks(n)))

    def norm(self, account: Account, *, keep: bool) -> None:
        """Sums of squares. keep: until the step's end."""
        account.briefly(self.squaring)
        if keep:
            account.add(self.sums)
        self.taken = True

    def update(self, account: Account) -> None:
        """Clip and update."""
        if self.clip and not self.taken:
            self.norm(account, keep=False)
        account.briefly(self.updating)

    def end(self, account: Account) -> None:
        """Where nothing clips, the norm is taken behind the step."""
        if not self.taken:
            self.norm(account, keep=False)

    def _squaring(self) -> int:
        """The sums of all parameters; beside them, those of one bucket after the other."""
        most = self._most(Once.NORM, [(n, False) for n in self.squared])
        for f in self.flat.values():
            if f.squares is not None:
                most = max(most, self.sums + self._most(Once.NORM, [(n, f.wide) for n in f.squares]))
        return self.sums + most

    def _most(self, kind: Once, tensors: Iterable[tuple[int, bool]]) -> int:
        """The most bytes at a time of a loop over tensors, given by their elements and whether they are `wide`."""
        account = Account()
        before: list[int] = []
        for n, wide in tensors:
            births: dict[str, int] = {}
            count, made = 0, self.lists[kind, wide]
            if all(isinstance(e, Birth) or e.name != BEFORE for e in made.events):
                before = _release(account, before)
            for event in made.events:
                if isinstance(event, Birth):
                    births[f"T{count}"] = event.bytes * (n if event.each else 1)
                    account.add(births[f"T{count}"])
                    count += 1
                elif event.name == BEFORE:
                    before = _release(account, before)
                else:
                    account.take(births.pop(event.name))
            before = list(births.values())
        return account.peak


def _release(account: Account, sizes: Iterable[int]) -> list[int]:
    for size in sizes:
        account.take(size)
    return []


def _state(p: Precision, optimizer: str) -> int:
    """Bytes of optimizer state and master weights of one element."""
    wide = p.params if p.params.bytes >= p.optimizer.bytes else p.optimizer
    return (2 if optimizer == "adamw" else 0) * wide.bytes + (wide.bytes if wide is not p.params else 0)


def _list(
    kind: Once, wide: bool, precision: Precision, optimizer: str, clip: bool, lists: Mapping[str, AllocList]
) -> AllocList:
    name = sync_class(kind, flat=wide, precision=precision, optimizer=optimizer, clip=clip)
    if name not in lists:
        fix = "take the lists with this optimizer and these formats"
        raise PiperError(ErrorKind.JOB, f"no alloc list for {name}", key="costs.profile", suggestion=fix)
    return lists[name]
