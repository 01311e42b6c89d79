"""Whoever looks at a rank's record sees a whole one, wherever its writer has been put to sleep."""

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.device import clock, progress
from executor.device.progress import RankProgress, RankState, create, read
from executor.launch.watch.verdict import stuck
from tests.executor.device.races import raced

Seen = set[tuple[RankState, str, tuple[int, ...]]]


class _ByteByByte:
    """A map into which every byte is stored by itself, and looked at after it."""

    def __init__(self, real: mmap.mmap, path: Path) -> None:
        self.real, self.path, self.seen = real, path, Seen()

    def __setitem__(self, at: slice, data: bytes) -> None:
        for k, byte in enumerate(data):
            self.real[at.start + k] = byte
            (r,) = read(self.path, 1)
            self.seen.add((r.state, r.op, r.peers))


def _seen(path: Path) -> Seen:
    """What others may see of a rank while it goes from one op to the next and waits there."""
    create(path, 1)
    pen = RankProgress(path, 0)
    pen.op(1, "1F0")
    pen._map = slow = _ByteByByte(pen._map, path)  # type: ignore[assignment]
    pen.op(2, "1B0/long")
    pen.wait([0, 3])
    return slow.seen


WHOLE = {(RankState.RUN, "1F0", ()), (RankState.RUN, "1B0/long", ()), (RankState.WAIT, "1B0/long", (0, 3))}


def test_a_record_is_never_seen_half_written(tmp_path: Path) -> None:
    assert _seen(tmp_path / "progress") == WHOLE


def test_one_that_is_written_in_its_place_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_head_at", lambda n: progress._HEADS_AT)
    assert _seen(tmp_path / "progress") > WHOLE - {(RankState.RUN, "1F0", ())}


def test_a_beat_leaves_the_record_as_it_is(tmp_path: Path) -> None:
    create(tmp_path / "progress", 2)
    pen: Any = RankProgress(tmp_path / "progress", 1)
    pen.op(7, "1F7")
    pen.posting(8, "1S8")
    nobody, me = read(tmp_path / "progress", 2)
    assert (nobody.state, nobody.op, nobody.changed_s) == (RankState.STARTING, "", 0.0)
    assert (me.index, me.op, me.posting) == (7, "1F7", "1S8")


def test_whoever_looks_finds_no_file_or_the_whole_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing has two moments: the file is there, and it is filled."""
    path, seen = tmp_path / "progress", []
    write = Path.write_bytes

    def slow(self: Path, data: bytes) -> int:
        self.touch()
        seen.append(path.exists())
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", slow)
    create(path, 3)
    assert seen == [False] and len(read(path, 3)) == 3 and [p.name for p in tmp_path.iterdir()] == ["progress"]


def test_a_gpu_s_first_step_is_given_the_time_of_a_start(tmp_path: Path) -> None:
    create(tmp_path / "progress", 2)
    pens = [RankProgress(tmp_path / "progress", rank) for rank in range(2)]
    for pen in pens:
        pen.cold(True)
    pens[0].op(0, "0F0")
    pens[1].wait([0], "1F0")

    def found(seconds: float) -> int | None:
        live = [replace(r, beat_s=clock.now() + seconds) for r in read(tmp_path / "progress", 2)]
        said = stuck(live, clock.now() + seconds, 0.0, watchdog_s=15.0, startup_s=120.0)
        return None if said is None else said[0]

    assert (found(60.0), found(130.0)) == (None, 0)
    pens[0].cold(False)
    pens[0].op(0, "0F0")
    assert found(60.0) == 0


def test_the_first_step_of_a_device_that_runs_ahead_is_such_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`raced` trains one step, and follows memory in a second."""
    written, real = list[bool](), RankProgress._write

    def write(self: RankProgress, state: RankState) -> None:
        if state is RankState.RUN:
            written.append(self._cold)
        real(self, state)

    monkeypatch.setattr(RankProgress, "_write", write)
    assert raced(tmp_path, "parallel.pp=1") == []
    half = len(written) // 2
    assert written[0] and not written[-1] and written == sorted(written, reverse=True) and sum(written) == half
