"""What each rank is doing right now, in shared memory, so that somebody else can tell when it no longer can."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class RankState(IntEnum):
    """A rank's life. Before the first op it is STARTING; only RUN and WAIT are watched by the second."""

    STARTING = 0
    RUN = 1
    WAIT = 2
    DONE = 3
    FAILED = 4
    OUTSIDE = 5  # of every step, in a loop of the user's own


_SIZE = 512
_HEAD = struct.Struct("=Qdqi160s160s")  # writes so far, time of last progress, op index, state, op text, peers
_BEAT = struct.Struct("=d")
_BEAT_AT = _SIZE - _BEAT.size
_POST = struct.Struct("=128s")  # the op that is being given to the transport
_POST_AT = _BEAT_AT - _POST.size


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's record. changed_s, beat_s: on this machine's monotonic clock; beat_s is the heartbeat thread's.

    posting: the op, if any, that some thread is giving to the transport: a rank may wait for what it never gave.
    """

    rank: int
    state: RankState
    index: int
    op: str
    peers: tuple[int, ...]
    changed_s: float
    beat_s: float
    posting: str = ""


class RankProgress:
    """A rank's own pen.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     create(Path(d) / "progress", 2)
    ...     pen = RankProgress(Path(d) / "progress", 1)
    ...     pen.op(3, "1F0"); pen.wait([0])
    ...     r = read(Path(d) / "progress", 2)[1]
    ...     pen.close()
    >>> r.op, r.state.name, r.peers
    ('1F0', 'WAIT', (0,))
    """

    def __init__(self, path: Path, rank: int, *, beat_every_s: float = 0.0) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._at = rank * _SIZE
        self._n, self._index, self._text, self._peers = 0, -1, b"", b""
        self._posting: dict[int, bytes] = {}  # by op: streams' threads do so, too
        self._stop = threading.Event()
        if beat_every_s:
            threading.Thread(target=self._beat, args=(beat_every_s,), name="heartbeat", daemon=True).start()

    def begin(self, text: str) -> None:
        """Something before the first op begins, which may take as long as a start."""
        self._text = text.encode()[:160]
        self._write(RankState.STARTING)

    def op(self, index: int, text: str) -> None:
        self._index, self._text, self._peers = index, text.encode()[:160], b""
        self._write(RankState.RUN)

    def wait(self, peers: Iterable[int] = (), text: str | None = None) -> None:
        """The op now blocks on other ranks (and is shown as `text`, if given)."""
        self._peers = ",".join(map(str, peers)).encode()[:160]
        if text is not None:
            self._text = text.encode()[:160]
        self._write(RankState.WAIT)

    def go_on(self) -> None:
        self._write(RankState.RUN)

    def outside(self) -> None:
        """What happens now is none of ours, and may take as long as it likes."""
        self._text = b"between steps"
        self._write(RankState.OUTSIDE)

    def posting(self, index: int, text: str) -> None:
        """Op `index` is given to the transport, which ought to take it at once."""
        self._posting[index] = text.encode()[: _POST.size]
        self._post()

    def posted(self, index: int) -> None:
        self._posting.pop(index, None)
        self._post()

    def _post(self) -> None:
        _POST.pack_into(self._map, self._at + _POST_AT, next(iter(list(self._posting.values())), b""))

    def end(self, state: RankState = RankState.DONE) -> None:
        self._write(state)

    def close(self) -> None:
        self._stop.set()
        self._map.close()

    def _write(self, state: RankState) -> None:
        self._n += 1
        _HEAD.pack_into(self._map, self._at, self._n, time.monotonic(), self._index, state, self._text, self._peers)

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                _BEAT.pack_into(self._map, self._at + _BEAT_AT, time.monotonic())
            except ValueError:  # closed meanwhile
                return


def create(path: Path, world: int) -> None:
    """An empty file of records, before the ranks start."""
    path.write_bytes(bytes(_SIZE * world))


def read(path: Path, world: int) -> list[RankRecord]:
    """All records as they stand; a record caught while it is written is read again."""
    out = []
    for rank in range(world):
        raw = b""
        for _ in range(100):
            with path.open("rb") as file:
                file.seek(rank * _SIZE)
                again = file.read(_SIZE)
            if again[:_BEAT_AT] == raw[:_BEAT_AT]:
                break
            raw = again
        _, changed, index, state, text, peers = _HEAD.unpack_from(raw)
        who = tuple(int(p) for p in peers.rstrip(b"\0").split(b",") if p)
        op = text.rstrip(b"\0").decode(errors="replace")
        (beat,) = _BEAT.unpack_from(raw, _BEAT_AT)
        posting = _POST.unpack_from(raw, _POST_AT)[0].rstrip(b"\0").decode(errors="replace")
        out.append(RankRecord(rank, RankState(state), index, op, who, changed, beat, posting))
    return out
