"""The allocator's rules once more, told by what is in use and nothing else. Slow, and shares no code with the kernel.

Free blocks are not kept: they are the gaps between what is in use, as far as memory is mapped there.
"""

from collections.abc import Sequence
from itertools import pairwise

KIB, MIB = 2**10, 2**20
Piece = tuple[str, int, int]


class Refused(Exception):
    """The device is full."""


class Naive:
    """One process's allocator. Addresses are bytes; a segment of the default mode is (pool, address, size)."""

    def __init__(self, limit: int, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.used: dict[tuple[int, int], int] = {}  # (pool, address) -> size
        self.segments: list[tuple[int, int, int]] = []
        self.pages: tuple[set[int], set[int]] = (set(), set())
        self.top = self.given_back = self.most_allocated = self.most_reserved = 0

    @property
    def reserved(self) -> int:
        return sum(s for _, _, s in self.segments) + 2 * MIB * len(self.pages[0]) + 20 * MIB * len(self.pages[1])

    def pieces(self, pool: int) -> list[list[Piece]]:
        """(kind, start, end) in order of address, one list per segment; the same kind twice only if it is in use."""
        mine = sorted((a, a + s) for (p, a), s in self.used.items() if p == pool)
        if not self.expandable:
            return [self.gaps(start, start + size, mine) for p, start, size in self.segments if p == pool]
        out: list[Piece] = []
        for kind, start, end in self.gaps(0, 10**9 * MIB, mine):
            out += [(kind, start, end)] if kind == "used" else self.runs(pool, start, end)
        return [out]

    @staticmethod
    def gaps(start: int, end: int, used: list[tuple[int, int]]) -> list[Piece]:
        out: list[Piece] = []
        for a, b in [x for x in used if start <= x[0] < end]:
            out += [("free", start, a)] * (a > start) + [("used", a, b)]
            start = b
        return out + [("free", start, end)] * (end > start)

    def runs(self, pool: int, start: int, end: int) -> list[Piece]:
        """A gap of an expandable segment, cut where memory begins and ends."""
        page = (2, 20)[pool] * MIB
        cuts = sorted({start, end} | {x * page for i in self.pages[pool] for x in (i, i + 1) if start < x * page < end})
        out: list[Piece] = []
        for a, b in pairwise(cuts):
            kind = "free" if a // page in self.pages[pool] else "unmapped"
            if out and out[-1][0] == kind:
                a = out.pop()[1]
            out.append((kind, a, b))
        return out

    def find(self, pool: int, size: int) -> tuple[int, int] | None:
        """Address and size of the free block to use."""
        found = []
        for row in self.pieces(pool):
            for piece, behind in zip(row, [*row[1:], ("end", 0, 0)], strict=True):
                if piece[0] == "free" and piece[2] - piece[1] >= size:
                    grow = behind[2] - behind[1] if behind[0] == "unmapped" else 0
                    found.append((piece[2] - piece[1], piece[1], grow))
        found.sort()
        i = 0
        while i + 1 < len(found) and found[i + 1][0] + found[i + 1][2] < found[i][0] + found[i][2]:
            i += 1
        return (found[i][1], found[i][0]) if found else None

    def grow(self, pool: int, size: int) -> bool:
        if self.expandable:
            return self.extend(pool, size)
        segment = 2 * MIB if pool == 0 else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + segment > self.limit:
            return False
        self.segments.append((pool, self.top, segment))
        self.top += segment
        return True

    def extend(self, pool: int, size: int) -> bool:
        (row,), page = self.pieces(pool), (2, 20)[pool] * MIB
        for i, (kind, start, _) in enumerate(row):
            if kind != "unmapped":
                continue
            if i and row[i - 1][0] == "free":
                start = row[i - 1][1]
            stop = next((a for k, a, _ in row[i:] if k == "used"), row[-1][2])
            if stop - start >= size:
                break
        for kind, a, b in row:
            if kind == "unmapped" and start <= a < start + size:
                pages = range(a // page, -(-min(b, start + size) // page))
                if self.reserved + len(pages) * page > self.limit:
                    return False
                self.pages[pool].update(pages)
                self.most_reserved = max(self.most_reserved, self.reserved)
        self.extended = start
        return True

    def give_back(self) -> None:
        before = self.reserved
        self.segments = [(p, a, s) for p, a, s in self.segments if any(q == p and a <= x < a + s for q, x in self.used)]
        for pool, page in enumerate((2 * MIB, 20 * MIB)):
            busy = {i for (p, a), s in self.used.items() if p == pool for i in range(a // page, -(-(a + s) // page))}
            self.pages[pool].intersection_update(busy)
        self.given_back += self.reserved < before

    def allocate(self, asked: int) -> tuple[int, int]:
        size = -(-asked // 512) * 512
        pool = int(size > MIB)
        found = self.find(pool, size)
        if found is None:
            if not self.grow(pool, size):
                self.give_back()
                if not self.grow(pool, size):
                    raise Refused
            if self.expandable:
                row = self.pieces(pool)[0]
                found = next((a, b - a) for k, a, b in row if k == "free" and a <= self.extended < b)
            else:
                _, a, s = self.segments[-1]
                found = a, s
        rest = found[1] - size
        whole = rest <= MIB if pool and not self.expandable else rest < 512
        self.used[pool, found[0]] = found[1] if whole else size
        self.most_allocated = max(self.most_allocated, sum(self.used.values()))
        self.most_reserved = max(self.most_reserved, self.reserved)
        return pool, found[0]


Outcome = tuple[int, int, int, int | None]


def naive(
    state: Sequence[int], events: Sequence[int], sizes: Sequence[int], steps: int, limit: int, expandable: bool
) -> Outcome:
    """(peak allocated, peak reserved, times given back, index of the event refused)."""
    heap, at = Naive(limit, expandable), -1
    refused = None
    try:
        for size in state:
            if size:
                heap.allocate(size)
        for _ in range(steps):
            live: dict[int, tuple[int, int]] = {}
            for at, a in enumerate(events):  # noqa: B007
                if a >= 0 and sizes[a]:
                    live[a] = heap.allocate(sizes[a])
                elif a < 0 and sizes[~a]:
                    del heap.used[live.pop(~a)]
            for place in live.values():
                del heap.used[place]
    except Refused:
        refused = at
    return heap.most_allocated, heap.most_reserved, heap.given_back, refused
