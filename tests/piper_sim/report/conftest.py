"""Realistic traces: 1F1B and DualPipe-like lanes with sends, expert all-to-alls and memory."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from ir.trace.trace import MemorySamples, Row, Trace

MakeTrace = Callable[..., Trace]


def tick(seconds: float) -> float:
    """On the engines' grid, where sums are exact."""
    return round(seconds * 2**40) / 2**40


def one_f_one_b(
    ranks: int = 4, mbs: int = 8, f: float = 1.0, b: float = 2.0, p2p: float = 0.0, parts: int = 1, comm: bool = False
) -> Trace:
    """1F1B by list scheduling; `parts` cuts every pass into layers, `comm` adds streams and memory samples."""
    f, b, p2p = tick(f), tick(b), tick(p2p)
    programs = [_program(r, ranks, mbs) for r in range(ranks)]
    end: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * ranks, [0] * ranks
    rows: list[Row] = []
    samples: list[tuple[int, float, int]] = []
    alive = [0] * ranks
    while any(at[r] < len(programs[r]) for r in range(ranks)):
        for r in range(ranks):
            while at[r] < len(programs[r]):
                kind, mb = programs[r][at[r]]
                peer = r - 1 if kind == "F" else r + 1
                needed = (kind, peer, mb)
                if 0 <= peer < ranks and needed not in end:
                    break
                arrival = end[needed] + p2p if 0 <= peer < ranks else 0.0
                start, took = max(clock[r], arrival), f if kind == "F" else b
                if comm and 0 <= peer < ranks:
                    rows.append((0, r, f"recv<{peer}", f"{r}RECV_{kind}{mb}", end[needed], end[needed], arrival))
                rows += _ops(r, kind, mb, start, took, parts, comm)
                clock[r] = end[kind, r, mb] = start + took
                alive[r] += 1 if kind == "F" else -1
                samples.append((r, start if kind == "F" else start + took, (20 + 5 * alive[r]) * 2**30))
                at[r] += 1
    return Trace.of({"engine": "test"}, rows, MemorySamples.of(samples) if comm else None)


def _program(r: int, ranks: int, mbs: int) -> list[tuple[str, int]]:
    fill = min(ranks - r, mbs)
    order = [("F", i) for i in range(fill)]
    for i in range(mbs - fill):
        order += [("B", i), ("F", fill + i)]
    return order + [("B", i) for i in range(mbs - fill, mbs)]


def _ops(r: int, kind: str, mb: int, start: float, took: float, parts: int, comm: bool) -> list[Row]:
    if parts == 1 and not comm:
        return [(0, r, "compute", f"{r}{kind}{mb}", start, start, start + took)]
    rows: list[Row] = []
    edges = [*(start + i * tick(took / parts) for i in range(parts)), start + took]
    for i, (a, z) in enumerate(pairwise(edges)):
        rows.append((0, r, "compute", f"{r}{kind}{mb}/l{i}.experts", a, a, z))
        if comm:
            rows.append((0, r, "ep", f"{r}{kind}{mb}/l{i}.dispatch", a, a, a + tick(0.4 * (z - a))))
    return rows


@pytest.fixture
def make_trace() -> MakeTrace:
    return one_f_one_b
