"""What ranks leave each other in torch's store: texts of any length, and questions about the time."""

import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from executor.device import clock

PIECE = 4 * 2**20  # bytes
ROUNDS = 8  # of questions about the time


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


def meeting(store: Any, rank: int, world: int, patience_s: float) -> str:
    """A name that these processes alone have, drawn anew whenever they are: all of them are there.

    torchrun keeps its store where nodes come and go, and with it what ranks before these left there under the same
    keys. So each rank leaves a random word, and rank 0 says a name to whoever it has heard, with the word, until all
    have found theirs beside the same name. Raises TimeoutError: somebody is not there.
    """
    word, counted, limit = uuid.uuid4().hex, "", clock.now() + patience_s
    heard: list[bytes] = []
    store.set(f"word/{rank}", word)
    while clock.now() < limit:
        if rank == 0 and (words := store.multi_get([f"word/{r}" for r in range(world)])) != heard:
            heard, name = words, uuid.uuid4().hex
            store.multi_set([f"name/{r}" for r in range(world)], [f"{w.decode()} {name}" for w in words])
        theirs, _, name = store.get(f"name/{rank}").decode().partition(" ")
        if theirs == word and name != counted:
            counted = name
            if store.add(f"count/{name}", 1) == world:
                store.set(f"all/{name}", "")
        if counted:
            with suppress(RuntimeError):  # somebody's word was an old one: rank 0 will hear the new one
                store.wait([f"all/{counted}"], timedelta(seconds=0.5))
                return counted
        else:
            clock.sleep_until(clock.now() + 0.05)
    absent = [str(r) for r in range(world) if not store.check([f"word/{r}"])]
    who = f": no word of rank {', '.join(absent)} in {patience_s:.0f} s" if absent else ""
    raise TimeoutError(f"not all of {world} ranks are there{who}")


def clocks(store: Any, rank: int, hosts: Sequence[str]) -> tuple[float, float]:
    """(seconds by which this rank's clock is ahead of rank 0's, uncertainty): half the quickest question and answer."""
    far = [r for r, name in enumerate(hosts) if name != hosts[0]]
    best = (0.0, 0.0)
    for r in far:
        if rank == 0:
            _answer(store, r)
        elif rank == r:
            best = _ask(store, r)
    return best


def _answer(store: Any, rank: int) -> None:
    for k in range(ROUNDS):
        store.wait([f"ask/{rank}/{k}"])
        store.set(f"answer/{rank}/{k}", repr(clock.now()))


def _ask(store: Any, rank: int) -> tuple[float, float]:
    found = []
    for k in range(ROUNDS):
        before = clock.now()
        store.set(f"ask/{rank}/{k}", "")
        theirs = float(store.get(f"answer/{rank}/{k}"))
        after = clock.now()
        found.append(((after - before) / 2, (before + after) / 2 - theirs))
    uncertain, ahead = min(found)
    return ahead, uncertain
