"""What each rank is doing right now, in shared memory, so that somebody else can tell when it no longer can."""

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class RankState(IntEnum):
    """A rank's life. Before the first op, and in a GPU's first step, it is STARTING; only RUN and WAIT are watched by
    the second.
    """

    STARTING = 0
    RUN = 1
    WAIT = 2
    DONE = 3
    FAILED = 4
    OUTSIDE = 5  # of every step, in a loop of the user's own


# A rank's part of the file: how many records it has written, the last two of them, heartbeat, post. A writer may be put
# to sleep between two bytes, so it never touches the record that its number names.
RECORD_BYTES = 1024
_COUNT = struct.Struct("=q")
_HEAD = struct.Struct("=dqi160s160s")  # time of last progress, op index, state, op text, peers
_BEAT = struct.Struct("=d")
_POST = struct.Struct("=128s")  # the op that is being given to the transport
_HEADS_AT = _COUNT.size
_BEAT_AT = RECORD_BYTES - _BEAT.size
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
        at = [(_head_at(0), _HEAD), (_head_at(1), _HEAD), (0, _COUNT), (_BEAT_AT, _BEAT), (_POST_AT, _POST)]
        parts = (slice(rank * RECORD_BYTES + k, rank * RECORD_BYTES + k + part.size) for k, part in at)
        *self._heads, self._count, self._beats, self._posts = parts
        self._n, self._index, self._text, self._peers = 0, -1, b"", b""
        self._posting: dict[int, bytes] = {}  # by op: streams' threads do so, too
        self._stop = threading.Event()
        self._cold = False
        if beat_every_s:
            threading.Thread(target=self._beat, args=(beat_every_s,), name="heartbeat", daemon=True).start()

    def begin(self, text: str) -> None:
        """Something before the first op begins, which may take as long as a start."""
        self._text = text.encode()
        self._write(RankState.STARTING)

    def op(self, index: int, text: str) -> None:
        self._index, self._text, self._peers = index, text.encode(), b""
        self._write(RankState.RUN)

    def wait(self, peers: Iterable[int] = (), text: str | None = None) -> None:
        """The op now blocks on other ranks (and is shown as `text`, if given)."""
        self._peers = ",".join(map(str, peers)).encode()
        if text is not None:
            self._text = text.encode()
        self._write(RankState.WAIT)

    def go_on(self) -> None:
        self._write(RankState.RUN)

    def cold(self, on: bool) -> None:
        """Whether ops load libraries and kernels, as in a GPU's first step, which is a start, too."""
        self._cold = on

    def outside(self) -> None:
        """What happens now is none of ours, and may take as long as it likes."""
        self._text = b"between steps"
        self._write(RankState.OUTSIDE)

    def posting(self, index: int, text: str) -> None:
        """Op `index` is given to the transport, which ought to take it at once."""
        self._posting[index] = text.encode()
        self._post()

    def posted(self, index: int) -> None:
        self._posting.pop(index, None)
        self._post()

    def _post(self) -> None:
        self._map[self._posts] = _POST.pack(next(iter(list(self._posting.values())), b""))

    def end(self, state: RankState = RankState.DONE) -> None:
        self._write(state)

    def close(self) -> None:
        self._stop.set()
        self._map.close()

    def _write(self, state: RankState) -> None:
        """Each part in one copy: `pack_into` clears first what it writes."""
        self._n += 1
        state = RankState.STARTING if self._cold and state is RankState.RUN else state
        head = _HEAD.pack(time.monotonic(), self._index, state, self._text, self._peers)
        self._map[self._heads[self._n % 2]] = head
        self._map[self._count] = _COUNT.pack(self._n)

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                self._map[self._beats] = _BEAT.pack(time.monotonic())
            except ValueError:  # closed meanwhile
                return


def create(path: Path, world: int) -> None:
    """An empty file of records, before the ranks start; who looks for it finds none, or the whole of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(bytes(RECORD_BYTES * world))
    part.replace(path)


def read(path: Path, world: int) -> list[RankRecord]:
    """Each rank's last whole record; one that was replaced twice meanwhile is read again."""
    with path.open("rb", buffering=0) as file:
        return [record(file.fileno(), rank) for rank in range(world)]


def record(fd: int, rank: int) -> RankRecord:
    """A rank's last whole record, of a file that is open, whatever has become of its name."""
    return _record(rank, _part(fd, rank))


def _part(fd: int, rank: int) -> bytes:
    """A rank's part of the file, in which the record that its count names is whole."""
    while True:
        part, again = (os.pread(fd, size, rank * RECORD_BYTES) for size in (RECORD_BYTES, _COUNT.size))
        if part[: _COUNT.size] == again:
            return part


def _record(rank: int, part: bytes) -> RankRecord:
    (n,) = _COUNT.unpack_from(part)
    changed, index, state, text, peers = _HEAD.unpack_from(part, _head_at(n))
    who = tuple(int(p) for p in peers.rstrip(b"\0").split(b",") if p)
    (beat,), (post,) = _BEAT.unpack_from(part, _BEAT_AT), _POST.unpack_from(part, _POST_AT)
    return RankRecord(rank, RankState(state), index, _said(text), who, changed, beat, _said(post))


def _head_at(n: int) -> int:
    return _HEADS_AT + n % 2 * _HEAD.size


def _said(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
