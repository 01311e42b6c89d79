"""Alloc lists of experts that get their rows from other ranks: bytes for each row, as nobody knows how many come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from executor.autograd.stage import Stage
from ir.core.alloc import AllocList, Birth
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass

Like = tuple[tuple[int, ...], torch.dtype]
Lists = dict[Pass, AllocList]
Given = Sequence[tuple[Like, ...]]
Take = Callable[[Given, tuple[object, ...]], tuple[Lists, tuple[Like, ...]]]


def sources(stage: Stage, unit: str) -> int:
    """How many ranks a unit gets rows of tokens from, if any."""
    found = [stage.exchanges[r] for r in stage.reads[unit] if r in stage.exchanges]
    return next((x.ranks for x in found if not x.back), 0)


def by_row(take: Take, given: Given, ranks: int, experts: int) -> tuple[Lists, tuple[Like, ...]]:
    """A unit's lists, taken with so many rows and with twice as many; what it gives with so many.

    All rows go to its first expert: who gets them makes no difference to what is alive when they are together again.

    Raises PiperError (model): something that is neither as large with any number of rows nor grows with them.
    """
    rows = given[0][0][0][0]
    (once, outs), (twice, _) = (
        take(_with(given, n), ([[n, *[0] * (experts - 1)], *([[0] * experts] * (ranks - 1))],))
        for n in (rows, 2 * rows)
    )
    return {p: _line(made, twice[p], rows) for p, made in once.items()}, outs


def _with(given: Given, rows: int) -> list[tuple[Like, ...]]:
    return [tuple(((rows, *shape[1:]), dtype) for shape, dtype in likes) for likes in given]


def _line(once: AllocList, twice: AllocList, rows: int) -> AllocList:
    events = []
    for a, b in zip(once.events, twice.events, strict=True):
        if isinstance(a, Birth) and isinstance(b, Birth) and a != b:
            if b.bytes != 2 * a.bytes or a.bytes % rows:
                message = f"{a.bytes} bytes with {rows} rows and {b.bytes} with twice as many are no bytes for each row"
                raise PiperError(ErrorKind.MODEL, message, suggestion="experts whose memory grows with their rows")
            a = Birth(a.bytes // rows, each=True)
        elif a != b:
            raise PiperError(ErrorKind.MODEL, f"with twice the rows, {b.text()} stands for {a.text()}")
        events.append(a)
    return AllocList(tuple(events), once.outputs)
