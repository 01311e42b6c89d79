"""Bytes of one rank, storage by storage: how many there are now, and the most there were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Storage:
    """Some bytes, and how many hold them."""

    bytes: int
    holds: int


Storages = list[Storage | None]


@dataclass(slots=True)
class Account:
    """Bytes now, and the most at one time.

    >>> account = Account(); held = account.born(8); account.briefly(4); account.drop(held)
    >>> account.now, account.peak
    (0, 12)
    """

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """Bytes appear."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def take(self, size: int) -> None:
        """Bytes are gone."""
        self.now -= size

    def briefly(self, size: int) -> None:
        """Bytes come and go."""
        self.add(size)
        self.take(size)

    def born(self, size: int, holds: int = 1) -> Storage:
        """A storage appears."""
        self.add(size)
        return Storage(size, holds)

    def drop(self, storage: Storage | None) -> None:
        """One that held it holds it no longer; with the last, it dies."""
        if storage is not None:
            storage.holds -= 1
            if not storage.holds:
                self.take(storage.bytes)

    def drop_all(self, storages: Iterable[Storage | None]) -> None:
        """Several."""
        for storage in storages:
            self.drop(storage)
