"""What happened, or was predicted to happen: one row per op and step, written alike by both engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ir.order import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class MemorySamples:
    """Allocated bytes of a rank from `time_s` on, until its next sample."""

    rank: IntArray
    time_s: FloatArray
    bytes: IntArray


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows `(step, rank, stream, op, post_s, start_s, end_s)` as columns, sorted by (rank, start_s, stream).

    `rank` is the pipeline rank (the program). `stream` and `op` are texts. A communication row starts when this rank's
    stream reaches it. `header` says who wrote it and holds clock offsets and their uncertainty; nothing else tells.
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

    def __len__(self) -> int:
        return len(self.op)
