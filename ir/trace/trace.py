"""What happened, or was predicted to happen: one row per op and step, written alike by both engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ir.core.order import FloatArray, IntArray

Row = tuple[int, int, str, str, float, float, float]


@dataclass(frozen=True, eq=False)
class MemorySamples:
    """Allocated bytes of a rank from `time_s` on, until its next sample. Sorted by (rank, time_s)."""

    rank: IntArray
    time_s: FloatArray
    bytes: IntArray

    @classmethod
    def of(cls, samples: Iterable[tuple[int, float, int]]) -> MemorySamples:
        """From `(rank, time_s, bytes)` in any order; samples of one instant keep theirs.

        >>> MemorySamples.of([(1, 0.0, 5), (0, 2.0, 7), (0, 1.0, 6)]).bytes.tolist()
        [6, 7, 5]
        """
        rows = sorted(samples, key=lambda s: s[:2])
        rank, time_s, size = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(np.array(rank, np.int64), np.array(time_s, np.float64), np.array(size, np.int64))

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows `(step, rank, stream, op, post_s, start_s, end_s)` as columns, sorted by (rank, start_s, stream).

    `rank` is who ran it: a rank of the mesh; where one replica stands for all, a pipeline rank. `stream` and `op` are
    texts. A communication row starts when this rank's stream reaches it. `header` says who wrote it and holds clock
    offsets and their uncertainty; nothing else tells.
    """

    header: Mapping[str, object]
    step: IntArray
    rank: IntArray
    stream: Sequence[str]
    op: Sequence[str]
    post_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    memory: MemorySamples | None = field(default=None)

    @classmethod
    def of(cls, header: Mapping[str, object], rows: Iterable[Row], memory: MemorySamples | None = None) -> Trace:
        """From row tuples in any order.

        >>> t = Trace.of({}, [(0, 1, "compute", "1F0", 1.0, 1.0, 2.0), (0, 0, "compute", "0F0", 0.0, 0.0, 1.0)])
        >>> t.op
        ('0F0', '1F0')
        """
        table = list(rows)
        step, rank, stream, op, post_s, start_s, end_s = zip(*table, strict=True) if table else ((),) * 7
        steps, ranks = np.array(step, np.int64), np.array(rank, np.int64)
        post, start, end = (np.array(c, np.float64) for c in (post_s, start_s, end_s))
        return cls(header, steps, ranks, stream, op, post, start, end, memory).sorted()

    def sorted(self) -> Trace:
        """The same rows by (rank, start_s, stream); equal keys keep their order, which is the stream's own."""
        by = self.sort_index()
        if bool((by[1:] > by[:-1]).all()):
            return self
        index = by.tolist()
        return replace(
            self,
            step=self.step[by],
            rank=self.rank[by],
            stream=tuple(self.stream[i] for i in index),
            op=tuple(self.op[i] for i in index),
            post_s=self.post_s[by],
            start_s=self.start_s[by],
            end_s=self.end_s[by],
        )

    def sort_index(self) -> IntArray:
        """The permutation that sorts the rows; 0, 1, 2, … for a sorted trace."""
        code = {s: i for i, s in enumerate(sorted(set(self.stream)))}
        streams = np.fromiter((code[s] for s in self.stream), np.int64, len(self.stream))
        # lexsort is stable and takes its most significant key last.
        return np.lexsort((streams, self.start_s, self.rank)).astype(np.int64)

    def __len__(self) -> int:
        return len(self.op)
