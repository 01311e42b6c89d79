"""What persists on a rank of the executor, and what its norm and its update need for a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ir.alloc import BEFORE, AllocList, Birth
from ir.classes import sync_class
from ir.errors import ErrorKind, PiperError
from ir.graph import Once
from ir.job.build import Prepared, precision_of
from ir.model.setting import Precision
from ir.plan import Plan
from ir.sync import Bucket, buckets

SUM_BYTES = 8  # of one parameter's sum of squares


@dataclass(slots=True)
class Account:
    """Bytes now, and the most there were."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """A storage appears."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def take(self, size: int) -> None:
        """One is gone."""
        self.now -= size


class SyncMemory:
    """One rank's parameters, gradients and optimizer state, and the loops over them.

    Parameters of one owner stand alone; a bucket of several is one flat tensor, padded to equal shares, of which ZeRO-1
    updates one. The norm is taken where the plan has an op for it, else with the update (clipping), else at the end.
    """

    def __init__(self, prepared: Prepared, plan: Plan, lists: Mapping[str, AllocList], program: int) -> None:
        job, precision = prepared.job, precision_of(prepared.job)
        self.clip = job.optimizer.clip_norm > 0
        self.taken = False
        numel = {p.name: p.numel for e in plan.graph.entries for p in e.part.params}
        self.sums = SUM_BYTES * len(numel)
        mine = [b for b in buckets(plan.graph) if program in b.owners]
        flat = [b for b in mine if b.ranks > 1]
        self.alone = [numel[n] for b in mine if b.ranks == 1 for n in b.params]
        self.pieces = [_pieces(b, program, numel) for b in flat if b.replica.zero or b.owners[0] == program]
        self.shares = [b.shard if b.replica.zero else b.shard * b.ranks for b in flat]
        self.persistent = _persistent(precision, job.optimizer.name, self.alone, flat, self.shares)
        self.lists = {
            (kind, several): _list(kind, several, precision, job.optimizer.name, self.clip, lists)
            for kind in (Once.NORM, Once.UPDATE)
            for several in (False, True)
        }

    def norm(self, account: Account, *, keep: bool) -> None:
        """Sums of squares. keep: until the step's end."""
        account.add(self.sums)
        self._loop(account, self.alone, Once.NORM, flat=False)
        for pieces in self.pieces:
            account.add(self.sums)
            self._loop(account, pieces, Once.NORM, flat=True)
            account.take(self.sums)
        if not keep:
            account.take(self.sums)
        self.taken = True

    def update(self, account: Account) -> None:
        """Clip and update."""
        if self.clip and not self.taken:
            self.norm(account, keep=False)
        left = self._loop(account, self.alone, Once.UPDATE, flat=False, last=not self.shares)
        self._loop(account, self.shares, Once.UPDATE, flat=True, left=left)

    def end(self, account: Account) -> None:
        """Where nothing clips, the norm is taken behind the step."""
        if not self.taken:
            self.norm(account, keep=False)

    def _loop(
        self,
        account: Account,
        numels: Iterable[int],
        kind: Once,
        *,
        flat: bool,
        left: Iterable[int] = (),
        last: bool = True,
    ) -> list[int]:
        """One tensor after the other. left: bytes that the tensor before left to the first; returned if not `last`."""
        made, before = self.lists[kind, flat], list(left)
        waits = any(e.name == BEFORE for e in made.events if not isinstance(e, Birth))
        for n in numels:
            births: dict[str, int] = {}
            count = 0
            if not waits:
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
        return _release(account, before) if last else before


def _release(account: Account, sizes: Iterable[int]) -> list[int]:
    for size in sizes:
        account.take(size)
    return []


def _persistent(p: Precision, optimizer: str, alone: list[int], flat: list[Bucket], shares: list[int]) -> int:
    """Bytes of parameters, gradient sums, optimizer state and master weights."""
    wide = p.params if p.params.bytes >= p.optimizer.bytes else p.optimizer
    per_state = (2 if optimizer == "adamw" else 0) * wide.bytes + (wide.bytes if wide is not p.params else 0)
    travels = p.reduce.bytes if p.reduce is not p.grads else 0
    whole = sum(b.shard * b.ranks for b in flat)
    held = sum(alone) * (p.params.bytes + p.grads.bytes) + whole * (p.params.bytes + p.grads.bytes + travels)
    return held + (sum(alone) + sum(shares)) * per_state


def _pieces(bucket: Bucket, program: int, numel: Mapping[str, int]) -> list[int]:
    """Elements of each parameter that lie in this rank's share."""
    start, size = 0, bucket.shard * bucket.ranks
    if bucket.replica.zero:
        start, size = bucket.owners.index(program) * bucket.shard, bucket.shard
    out, at = [], 0
    for name in bucket.params:
        low, high = max(at, start), min(at + numel[name], start + size)
        at += numel[name]
        if low < high:
            out.append(high - low)
    return out


def _list(
    kind: Once, flat: bool, precision: Precision, optimizer: str, clip: bool, lists: Mapping[str, AllocList]
) -> AllocList:
    name = sync_class(kind, flat=flat, precision=precision, optimizer=optimizer, clip=clip)
    if name not in lists:
        fix = "take the lists with this optimizer and these formats"
        raise PiperError(ErrorKind.JOB, f"no alloc list for {name}", key="costs.profile", suggestion=fix)
    return lists[name]
