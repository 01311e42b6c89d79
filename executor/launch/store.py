"""What ranks leave each other in torch's store: texts of any length, and questions about the time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from executor.device import clock

PIECE = 4 * 2**20  # bytes


def put(store: Any, key: str, text: str) -> None:
    """Leave a text of any length; a value of torch's store has at most 8 MiB. Its length comes last, for `take`."""
    data = zlib.compress(text.encode(), 1)
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def take(store: Any, key: str) -> str:
    """Wait for what `put` has left, or is about to."""
    count = int(store.get(key))
    return zlib.decompress(b"".join(store.get(f"{key}/{number}") for number in range(count))).decode()


def clocks(store: Any, rank: int, hosts: Sequence[str], rounds: int = 8) -> tuple[float, float]:
    """(seconds by which this rank's clock is ahead of rank 0's, uncertainty): half the quickest question and answer."""
    far = [r for r, name in enumerate(hosts) if name != hosts[0]]
    best = (0.0, 0.0)
    for r in far:
        if rank == 0:
            _answer(store, r, rounds)
        elif rank == r:
            best = _ask(store, r, rounds)
    return best


def _answer(store: Any, rank: int, rounds: int) -> None:
    for k in range(rounds):
        store.wait([f"ask/{rank}/{k}"])
        store.set(f"answer/{rank}/{k}", repr(clock.now()))


def _ask(store: Any, rank: int, rounds: int) -> tuple[float, float]:
    found = []
    for k in range(rounds):
        before = clock.now()
        store.set(f"ask/{rank}/{k}", "")
        theirs = float(store.get(f"answer/{rank}/{k}"))
        after = clock.now()
        found.append(((after - before) / 2, (before + after) / 2 - theirs))
    uncertain, ahead = min(found)
    return ahead, uncertain
