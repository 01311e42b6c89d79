"""Of two ranks that both could say what went wrong, one does: every order of events that had both of them speak."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from executor.device.progress import RankProgress, create
from executor.launch.watch import watchdog
from executor.launch.watch.verdict import RankFailed
from executor.launch.watch.watchdog import RankWatchdog
from executor.transport.base import TransportError


class Left(BaseException):
    """A rank has left, as `os._exit` would have it."""


class Store(dict[str, bytes]):
    """Torchrun's store, which goes with whoever holds it."""

    gone = False

    def clone(self) -> Store:
        return self

    def _there(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._there()
        self[key] = value.encode()

    def get(self, key: str, default: Any = None) -> Any:
        self._there()
        return self[key]

    def add(self, key: str, number: int) -> int:
        self._there()
        self[key] = str(found := int(super().get(key, b"0")) + number).encode()
        return found

    def check(self, keys: Iterable[str]) -> bool:
        self._there()
        return all(key in self for key in keys)

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: Iterable[str], patience: timedelta | None = None) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")


class Ranks:
    """Two ranks of one machine, and what they have said. Rank 0 holds the store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.said, self.killed = Store(), list[str](), list[int]()
        files = [folder / str(rank) / "progress" for rank in range(2)]
        for file in files:
            file.parent.mkdir()
            create(file, 1)
            RankProgress(file, 0).op(7, "0B1")
        self.eyes = [RankWatchdog(self.store, r, 2, files[r], 3.0, self._report) for r in range(2)]
        for eyes in self.eyes:
            eyes.sights.hosts, eyes.pids, eyes.sights.files = ["here", "here"], [1000, 1001], files
        for eyes in self.eyes:
            eyes._publish()
        self.eyes[1].sights.see([0, 1], 0.0)
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(watchdog, "GONE_S", 0.0)
        monkeypatch.setattr(os, "kill", self._kill)
        monkeypatch.setattr(RankWatchdog, "_leave", self._leave)

    def _report(self, error: Exception) -> None:
        self.said.append(str(error))

    def _kill(self, pid: int, sign: int) -> None:
        self.killed.append(pid)
        self.store.gone |= pid == 1000

    def _leave(self) -> NoReturn:
        raise Left

    def rank_0_speaks(self) -> None:
        with pytest.raises(Left):
            self.eyes[0]._accuse(RankFailed("ValueError: bad luck", rank=0, op="0B1", waiting={}))
        assert len(self.said) == 1


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def test_who_has_heard_it_does_not_take_the_store_s_end_for_a_fault(ranks: Ranks) -> None:
    ranks.rank_0_speaks()
    with pytest.raises(Left):
        ranks.eyes[1]._watch()  # ends rank 0, and the store with it
    assert ranks.killed == [1000] and len(ranks.said) == 1


def test_a_thread_that_falls_while_another_leaves_says_nothing(ranks: Ranks) -> None:
    """Rank 0 has left; before rank 1, which has heard why, has too, its main thread loses the connection."""
    ranks.rank_0_speaks()
    fell = list[bool]()

    def leave(self: RankWatchdog) -> NoReturn:
        if not fell:
            fell.append(True)
            ranks.store.gone = True
            self.fall(TransportError("Connection closed by peer", [0]))
        raise Left

    ranks.monkeypatch.setattr(RankWatchdog, "_leave", leave)
    with pytest.raises(Left):
        ranks.eyes[1]._look()
    assert fell and len(ranks.said) == 1


def test_who_has_not_looked_before_the_store_has_gone_finds_that_it_was_said(ranks: Ranks) -> None:
    ranks.rank_0_speaks()
    ranks.store.gone = True
    with pytest.raises(Left):
        ranks.eyes[1]._watch()
    assert len(ranks.said) == 1


def test_nor_does_who_holds_the_store_speak_behind_the_one_who_took_it_for_dead(ranks: Ranks) -> None:
    with pytest.raises(Left):
        ranks.eyes[1]._orphaned()
    ranks.store.gone = False  # it was asleep
    with pytest.raises(Left):
        ranks.eyes[0]._accuse(RankFailed("ValueError: bad luck", rank=1, op="0B1", waiting={}))
    assert len(ranks.said) == 1 and "rank 0 failed at 0B1: it has vanished" in ranks.said[0]


def test_the_store_s_holder_is_not_killed_before_the_others_have_heard(ranks: Ranks) -> None:
    """Of three ranks, rank 2 has heard that rank 0 failed, and rank 1 not yet."""
    eyes, order = ranks.eyes[1], list[str]()
    eyes.rank, eyes.world = 2, 3
    ranks.store.set("reported", "0")
    ranks.monkeypatch.setattr(RankWatchdog, "_seen", lambda self, who, _: order.append(f"seen by {sorted(who)}"))
    ranks.monkeypatch.setattr(RankWatchdog, "_bury", lambda self, who: order.append(f"killed {who}"))
    with pytest.raises(Left):
        eyes._look()
    assert order == ["seen by [1, 2]", "killed 0"]


def test_without_a_word_from_rank_0_rank_1_speaks(ranks: Ranks) -> None:
    ranks.store.gone = True
    with pytest.raises(Left):
        ranks.eyes[1]._watch()
    assert len(ranks.said) == 1 and "rank 0 failed at 0B1: it has vanished" in ranks.said[0]


@pytest.mark.parametrize("over", [False, True])
def test_rank_0_that_dies_as_it_hands_over_is_named_and_behind_that_it_is_not(ranks: Ranks, over: bool) -> None:
    eyes = ranks.eyes[1]
    ranks.monkeypatch.setattr(eyes, "_stop", lambda: setattr(ranks.store, "gone", over))
    ranks.store.gone = not over
    ranks.store["over"] = b""
    if over:
        eyes.part()
        assert ranks.store.gone and not ranks.said
    else:
        with pytest.raises(Left):
            eyes.part()
        assert len(ranks.said) == 1 and "rank 0 failed at 0B1: it has vanished" in ranks.said[0]


def test_a_rank_whose_temporary_files_somebody_removes_still_shows_life(ranks: Ranks) -> None:
    shutil.rmtree(ranks.eyes[1].progress.parent)
    said = ranks.store["at/1"]
    ranks.eyes[1]._publish()
    assert ranks.store["at/1"] != said and b"0B1" in ranks.store["at/1"]


def test_a_rank_that_stops_before_anybody_watches_is_the_culprit(ranks: Ranks) -> None:
    del ranks.store["at/1"]
    ranks.monkeypatch.setattr(watchdog, "STARTUP_S", 0.0)
    with pytest.raises(TransportError, match="it did not come") as error:
        ranks.eyes[0].start()
    assert error.value.peers == (1,)
    ranks.monkeypatch.setattr(watchdog, "GONE_S", 10.0)
    ranks.monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    with pytest.raises(Left):
        ranks.eyes[0].fall(error.value)
    assert len(ranks.said) == 1 and "rank 1 failed" in ranks.said[0] and ranks.killed == [1001]
