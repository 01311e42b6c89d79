"""What one rank knows of the others: by what each says at the store, and what lies in the files of this machine."""

import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from executor.device import clock
from executor.device.progress import RankRecord, RankState, read, record
from executor.launch.watch.verdict import RankFailed, RankFindings, failed, stuck, verdict

EVERY_S = 0.2  # a rank says where it is


def host() -> str:
    """Names this machine since it was started, and the processes that see one another: containers share a machine."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text('utf-8').strip()} {os.readlink('/proc/self/ns/pid')}"


@dataclass
class _Sight:
    """What was last seen of a rank. beat_s: when it last said something new, on this rank's clock."""

    text: bytes = b""
    record: RankRecord | None = None
    beat_s: float = 0.0


class RankSights:
    """One rank's eyes. store: its own client of it, as a call may block. progress: this rank's file.

    hosts, files: every rank's machine, and its progress, which can be read on this machine; none before they have met.
    """

    def __init__(self, store: Any, rank: int, world: int, progress: Path) -> None:
        self.store, self.rank, self.world, self.progress = store, rank, world, progress
        self.hosts: list[str] = []
        self.files: list[Path] = []
        self._sights = [_Sight() for _ in range(world)]
        self._count = 0

    def beside(self, rank: int) -> bool:
        """Whether that rank is on this machine, as far as is known."""
        return bool(self.hosts) and self.hosts[rank] == self.hosts[self.rank]

    def beat_s(self, rank: int) -> float:
        """When that rank last said something new, on this rank's clock."""
        return self._sights[rank].beat_s

    @cached_property
    def _pages(self) -> int:
        """This rank's own progress: open as long as the process lives, as somebody may remove its name."""
        return os.open(self.progress, os.O_RDONLY | os.O_CLOEXEC)

    def op(self) -> str:
        """Which op this rank is at; none before its first."""
        return record(self._pages, 0).op

    def publish(self, *, others: bool) -> None:
        """Say where this rank is; of others on this machine, too, as who is gone can say no more where it was."""
        self._count += 1
        self.store.set(f"at/{self.rank}", self._said(record(self._pages, 0)))
        for rank in range(self.world) if others else ():
            if rank != self.rank and (near := self._here(rank)) is not None:
                self.store.set(f"near/{rank}", self._said(near))

    def _said(self, r: RankRecord) -> str:
        idle_s = clock.now() - r.changed_s
        return json.dumps([self._count, int(r.state), r.index, r.op, list(r.peers), idle_s, r.posting])

    def _here(self, rank: int) -> RankRecord | None:
        """What another rank of this machine has written down last, alive or not."""
        if self.beside(rank):
            with suppress(OSError, struct.error):
                return replace(read(self.files[rank], 1)[0], rank=rank)
        return None

    def last_of(self, rank: int) -> RankRecord | None:
        """Where that rank was last, asked of no store."""
        return self._here(rank) or self._sights[rank].record

    def see(self, ranks: Sequence[int], now: float) -> None:
        """Read what these ranks have said, once all of them have said something."""
        texts = self.store.multi_get([f"at/{r}" for r in ranks]) if self.store.check([f"at/{r}" for r in ranks]) else []
        for rank, text in zip(ranks, texts, strict=False):
            sight = self._sights[rank]
            if text != sight.text:
                self._sights[rank] = _Sight(text, _record(rank, text, now), now)
            elif sight.record is not None:
                sight.record = replace(sight.record, beat_s=sight.beat_s)

    def stuck(self, now: float, began_s: float, watchdog_s: float, startup_s: float) -> RankFailed | None:
        """Who hangs, where somebody does and nobody has failed."""
        live = [s.record for s in self._sights if s.record is not None]
        if found := stuck(live, now, began_s, watchdog_s, startup_s):
            return failed(self._findings(now), found[0], f"no progress for {found[1]:.0f} s")
        return None

    def _findings(self, now: float) -> RankFindings:
        said = {}
        for r in range(self.world):
            if self.store.check([f"failure/{r}"]):
                said[r] = json.loads(self.store.get(f"failure/{r}"))
        empty = RankRecord(0, RankState.STARTING, -1, "", (), 0.0, 0.0)
        records = [self._last(r, now) or replace(empty, rank=r) for r in range(self.world)]
        return RankFindings(records, said, {}, now)

    def _last(self, rank: int, now: float) -> RankRecord | None:
        """Where a rank was last: by itself, or by those beside it."""
        seen, near = self._sights[rank].record, self._here(rank)
        if near is None and self.store.check([f"near/{rank}"]):
            near = _record(rank, self.store.get(f"near/{rank}"), now)
        if near is None or seen is None:
            return near or seen
        return replace(near, beat_s=seen.beat_s)

    def judge(self, now: float) -> RankFailed:
        """After a failure, or an order to end: by what ranks said, else the one that shows no life."""
        f = self._findings(now)
        if any(not s["witness"] for s in f.said.values()):
            return verdict(f)
        accused = {p for s in f.said.values() for p in s["peers"]}  # before those whom nobody had watched yet
        if silent := sorted(self.silent(now), key=lambda r: r not in accused):
            return failed(f, silent[0], "it has vanished")
        if f.said:
            return verdict(f)
        return failed(f, self.rank, "ended from outside")

    def silent(self, now: float) -> list[int]:
        """The other ranks that show no life, those that have not for longest first."""
        beats = {r: s.beat_s for r, s in enumerate(self._sights) if r != self.rank}
        return sorted((r for r, beat in beats.items() if now - beat > 2 * EVERY_S + 0.3), key=beats.__getitem__)


def _record(rank: int, text: bytes, now: float) -> RankRecord:
    _, state, index, op, peers, idle_s, posting = json.loads(text)
    return RankRecord(rank, RankState(state), index, op, tuple(peers), now - idle_s, now, posting)
