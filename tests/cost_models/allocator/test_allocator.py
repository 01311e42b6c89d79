"""The allocator's replay against hand-worked cases and against a naive allocator, and that neither is blind."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.allocator import UNLIMITED, MemoryPeaks, MemoryRequests, replay
from cost_models.allocator.bands import segment_bytes
from tests.cost_models.allocator.naive_allocator import KIB, MIB, Outcome, naive

Trace = tuple[list[int], list[int], list[int]]


def trace(text: str, state: tuple[float, ...] = ()) -> MemoryRequests:
    """`a30 b9 -a c11`: name and MiB of an allocation, or a name to free; 512 bytes are 0.00048828125 MiB."""
    events, sizes, names = [], [], {}
    for word in text.split():
        if word[0] == "-":
            events.append(~names.pop(word[1]))
        else:
            names[word[0]] = len(sizes)
            events.append(len(sizes))
            sizes.append(int(float(word[1:]) * MIB))
    asked = [int(s * MIB) for s in state]
    return MemoryRequests(asked, np.array(events, dtype=np.int64), np.array(sizes, dtype=np.int64))


# What is asked for; MiB allocated and reserved by the default allocator; MiB reserved with expandable segments.
BY_HAND = {
    "up to 1 MiB in segments of 2": ("a0.6 b0.6 c0.6", 1.8, 2, 2),
    "no fourth fits there": ("a0.6 b0.6 c0.6 d0.6", 2.4, 4, 4),
    "under 10 MiB two share a segment of 20": ("a9 b9", 18, 20, 20),
    "and a third that fits behind them": ("a9 b9 c1.5", 20, 20, 20),  # 0.5 MiB is no rest: c gets 2
    "a third that does not opens another": ("a9 b9 c3", 21, 40, 40),
    "from 10 MiB whole 2 MiB, no rest of 1 MiB": ("a11", 12, 12, 20),
    "a rest of more than 1 MiB is cut off": ("a10.5 b1.25", 12, 12, 20),  # 12 - 10.5 is 1.5: b takes it whole
    "30 serve 29.5 whole": ("a30 -a b29.5 c1.25", 31.25, 50, 40),
    "30 serve 28.5, and 1.25 in the rest": ("a30 -a b28.5 c1.25", 30, 30, 40),
    "30 freed serve no 31": ("a30 -a b31", 32, 62, 40),
    "holes of 6 and 8 serve 7": ("a6 b6 c6 -a -c d7", 18, 20, 20),
    "but no 9": ("a6 b6 c6 -a -c d9", 18, 40, 40),
    "neighbours join": ("a6 b6 c6 -a -c -b d19", 20, 20, 20),  # 19 of 20: no rest
    "the best hole, not the first": ("a40 b20 -a -b c18 d38", 60, 60, 60),  # 18 + 38: both rests are cut
    "the lowest of equals": ("a4 b2 c4 d2 e4 f2 -a -c g4 -d h6", 18, 20, 20),  # g where a was: c and d join for h
    "pools are apart": ("a1 b1.5", 2.5, 22, 22),
    "segments do not join, pages do": ("a11 b11 -a -b c38", 38, 62, 40),
    "nothing is nothing": ("a0 b0 -a", 0, 0, 0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_cases_worked_by_hand(case: str) -> None:
    text, allocated, reserved, expandable = BY_HAND[case]
    found = replay(trace(text), steps=1)
    assert abs(found.allocated / MIB - allocated) < 0.01
    assert found.reserved == reserved * MIB
    assert replay(trace(text), steps=1, expandable=True).reserved == expandable * MIB


@pytest.mark.parametrize("asked", [1, 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1])
def test_one_request_takes_one_segment(asked: int) -> None:
    one = MemoryRequests((), np.array([0]), np.array([asked]))
    whole = -(-asked // 512) * 512  # as the allocator rounds before it looks at thresholds
    assert replay(one).reserved == segment_bytes(whole)


def test_cached_segments_go_back_before_the_device_is_full() -> None:
    asked = trace("a30 -a b40 -b")
    assert replay(asked) == MemoryPeaks(40 * MIB, 70 * MIB, 0, None)
    assert replay(asked, limit=70 * MIB).given_back == 0
    assert replay(asked, limit=69 * MIB, steps=1) == MemoryPeaks(40 * MIB, 40 * MIB, 1, None)
    assert replay(asked, limit=40 * MIB, steps=1).refused is None
    assert replay(asked, limit=39 * MIB, steps=1) == MemoryPeaks(30 * MIB, 30 * MIB, 1, 2)


def test_a_segment_with_a_block_in_use_stays() -> None:
    """8 MiB hold 20; with 22 more the device is full, though 30 are asked for in all."""
    asked = trace("x8 a8 -x b22 -b")
    assert replay(asked, limit=42 * MIB).refused is None
    assert replay(asked, limit=41 * MIB).refused == 3


def test_pages_with_a_block_in_use_stay() -> None:
    """x lies in the second page of two: the first goes back, and c, which begins behind x, needs two more."""
    asked = trace("a15 b15 x8 -a -b c38")
    assert replay(asked, limit=80 * MIB, expandable=True, steps=1) == MemoryPeaks(46 * MIB, 80 * MIB, 0, None)
    assert replay(asked, limit=79 * MIB, expandable=True, steps=1) == MemoryPeaks(46 * MIB, 60 * MIB, 1, None)
    assert replay(asked, limit=60 * MIB, expandable=True, steps=1).refused is None
    assert replay(asked, limit=59 * MIB, expandable=True, steps=1).refused == 5
    assert replay(asked, limit=58 * MIB, steps=1) == MemoryPeaks(46 * MIB, 58 * MIB, 1, None)
    assert replay(asked, limit=57 * MIB, steps=1).refused == 5


def test_state_stays_and_comes_first() -> None:
    asked = trace("a30 -a", state=(100, 0.5))
    assert replay(asked) == MemoryPeaks(int(130.5 * MIB), 132 * MIB, 0, None)
    assert replay(asked, limit=131 * MIB).refused == 0
    assert replay(asked, limit=101 * MIB).refused == -1


def test_what_a_step_leaves_is_freed_at_its_end() -> None:
    asked = trace("a30 b9 c0.1")
    assert replay(asked, steps=1).reserved == replay(asked, steps=5).reserved == 52 * MIB


def test_the_second_step_starts_from_the_firsts_cache() -> None:
    """b takes part of the 24 MiB in the first step, and of the 14 in the second; then c takes the 24, and d nothing."""
    asked = trace("a24 -a b12 c14 d12")
    assert [replay(asked, steps=n).reserved // MIB for n in (1, 2, 3, 9)] == [38, 50, 50, 50]
    asked = trace("a40 -a b20 c20 d20 -b -c -d")
    assert [replay(asked, steps=n).reserved // MIB for n in (1, 2, 3, 9)] == [60, 60, 60, 60]


# Sizes where rules change, and between; few, so that holes are used again.
EDGES = (0, 1, 512, 513, 700 * KIB, MIB - 512, MIB, MIB + 1, 5 * MIB, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB)
SIZES = (*EDGES, 3 * MIB, 7 * MIB, 9 * MIB, 11 * MIB, 19 * MIB, int(19.5 * MIB), 21 * MIB, 30 * MIB, 39 * MIB, 41 * MIB)


def build(draws: list[tuple[int, int]], state: list[int]) -> Trace:
    """From (what, which): a size to allocate, or 0 to free one that lives."""
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for size, which in draws:
        if size >= 0:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(size)
        elif live:
            events.append(~live.pop(which % len(live)))
    return state, events, sizes


ANY_SIZE = st.one_of(st.sampled_from(SIZES), st.integers(0, 2 * MIB), st.integers(0, 50 * MIB))
DRAWS = st.lists(st.tuples(st.one_of(st.just(-1), ANY_SIZE), st.integers(0, 99)), max_size=60)
LIMITS = st.one_of(st.just(UNLIMITED), st.integers(0, 400 * MIB))


def outcome(module: Any, drawn: Trace, steps: int, limit: int, expandable: bool) -> Outcome:
    state, events, sizes = drawn
    asked = module.MemoryRequests(state, np.array(events, dtype=np.int64), np.array(sizes, dtype=np.int64))
    found = module.replay(asked, limit=limit, expandable=expandable, steps=steps)
    return found.allocated, found.reserved, found.given_back, found.refused


COMPILED = import_module("cost_models.allocator")


@settings(max_examples=max(200, settings().max_examples))
@given(DRAWS, st.lists(ANY_SIZE, max_size=3), st.integers(1, 3), LIMITS, st.booleans())
def test_equal_to_the_naive_allocator(
    draws: list[tuple[int, int]], state: list[int], steps: int, limit: int, expandable: bool
) -> None:
    drawn = build(draws, state)
    assert outcome(COMPILED, drawn, steps, limit, expandable) == naive(*drawn, steps, limit, expandable)


def random_cases(count: int, seed: int = 7) -> Iterator[tuple[Trace, int, int, bool]]:
    """Long traces that breathe; two thirds under a limit between what they have in use and what they would cache."""
    rng = random.Random(seed)
    for _ in range(count):
        some, swing = rng.sample(SIZES, 6), rng.randrange(5, 30)
        draws = []
        for i in range(rng.randrange(20, 150)):
            more = rng.random() < (0.75 if i // swing % 2 == 0 else 0.25)
            draws.append((rng.choice(some) if more else -1, rng.randrange(100)))
        drawn, steps, expandable = build(draws, [rng.choice(SIZES)]), rng.randrange(1, 4), rng.random() < 0.5
        used, cached, _, _ = outcome(COMPILED, drawn, steps, UNLIMITED, expandable)
        limit = rng.randint(int(0.95 * used), cached) if rng.random() < 0.67 else UNLIMITED
        yield drawn, steps, limit, expandable


TRACES = max(500, int(os.environ.get("PIPER_EXAMPLES", "0")))


def test_equal_to_the_naive_allocator_on_long_traces() -> None:
    ends = set()
    for drawn, steps, limit, expandable in random_cases(TRACES):
        found = outcome(COMPILED, drawn, steps, limit, expandable)
        assert found == naive(*drawn, steps, limit, expandable)
        ends.add((expandable, found[3] is None, found[2] > 0))
    assert len(ends) == 8, "both modes served and refused, with and without memory given back"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The allocator as it is where numba cannot be imported."""
    names = [n for n in sys.modules if n.startswith("cost_models.allocator") or n == "cost_models.jit"]
    for n in names:
        monkeypatch.delitem(sys.modules, n)
    monkeypatch.setitem(sys.modules, "numba", None)
    module = import_module("cost_models.allocator")
    assert module is not COMPILED
    yield module
    for n in [n for n in sys.modules if n.startswith("cost_models.allocator") or n == "cost_models.jit"]:
        del sys.modules[n]


def test_without_numba_the_numbers_are_the_same(plain: ModuleType) -> None:
    for drawn, steps, limit, expandable in random_cases(150, seed=8):
        assert outcome(plain, drawn, steps, limit, expandable) == outcome(COMPILED, drawn, steps, limit, expandable)
    assert import_module("cost_models.jit").numba is None


def differs(module: ModuleType, count: int = 400) -> bool:
    """Whether a comparison with the naive allocator tells this one from it."""
    return any(
        outcome(module, drawn, steps, limit, expandable) != naive(*drawn, steps, limit, expandable)
        for drawn, steps, limit, expandable in random_cases(count)
    )


def test_the_plain_allocator_differs_nowhere(plain: ModuleType) -> None:
    assert not differs(plain, 60)


def first_fit(pools: Any) -> None:
    def best(h: Any, pool: int, size: int, expandable: bool) -> int:
        half = pool * (len(h.free) // 2)
        found = [i for i in range(half, half + h.tally[pool]) if h.size[h.free[i]] >= size]
        lowest = min(found, key=lambda i: h.address[h.free[i]], default=-1)
        return -1 if lowest < 0 else int(pools.withdraw(h, pool, lowest))

    pools._best = best


def never_joins(pools: Any) -> None:
    def free(h: Any, pool: int, b: int) -> int:
        pools.offer(h, pool, b)
        return b

    pools.free = free


def highest_of_equals(pools: Any) -> None:
    honest = pools.rank

    def rank(h: Any, pool: int, size: int, address: int) -> int:
        at = honest(h, pool, size, address)
        end = pool * (len(h.free) // 2) + h.tally[pool]
        while address < 0 and at + 1 < end and h.size[h.free[at + 1]] == h.size[h.free[at]]:
            at += 1
        return int(at)

    pools.rank = rank


def small_stays(pools: Any) -> None:
    honest = pools._return_segments
    pools._return_segments = lambda h, pool: honest(h, pool) if pool else None


def nothing_back(pools: Any) -> None:
    pools._return_segments = pools._unmap = lambda h, pool: None


DEFECTS: dict[str, Any] = {
    "first fit": first_fit,
    "neighbours do not join": never_joins,
    "the highest of equals": highest_of_equals,
    "nothing goes back": nothing_back,
    "the small pool gives nothing back": small_stays,
    "rests of 1 MiB are cut off": lambda pools: setattr(pools, "SMALL", pools.SMALL - 1),
    "10 MiB share segments": lambda pools: setattr(pools, "MIDDLE", pools.MIDDLE + 1),
    "segments of 1 MiB": lambda pools: setattr(pools, "LARGE_GRAIN", pools.LARGE_GRAIN // 2),
    "a block that can grow is no worse": lambda pools: setattr(pools, "_reach", lambda h, b: h.size[b]),
    "pages of 2 MiB": lambda pools: setattr(pools, "_page", lambda pool: 2 * MIB),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_seen(defect: str, plain: ModuleType) -> None:
    pools: Any = import_module("cost_models.allocator.pools")
    DEFECTS[defect](pools)
    try:
        assert differs(plain)
    except (IndexError, StopIteration):
        assert defect == "neighbours do not join", "it runs out of blocks"


def test_numba_is_imported_only_when_a_replay_runs() -> None:
    code = "import sys, cost_models.allocator, piper_sim.memory.reserved; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
