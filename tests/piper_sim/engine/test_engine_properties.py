"""What must hold of any run, of either engine: monotone, scaled with its durations, no shorter than its parts."""

from dataclasses import replace
from functools import reduce
from graphlib import TopologicalSorter
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.core.order import FloatArray
from ir.plan.plan import OpKind, OpLists, Plan
from piper_sim import compiled, engine
from piper_sim.engine import EngineRun, EngineScenario, HostModel, Links, MessageMode
from tests.piper_sim.compiled import scenario_cases as cases
from tests.piper_sim.compiled.scenario_cases import (
    HOSTS,
    LAYERS,
    SCALES,
    SEEDS,
    STAGES,
    Outcome,
    durations,
    outcome,
    plan_of,
    same,
    scenarios,
)

some = settings(max_examples=max(60, settings().max_examples // 4))
PLAYS = st.sampled_from([engine.play, compiled.play])
ANY: dict[str, Any] = {
    "play": PLAYS,
    "case": st.one_of(STAGES, LAYERS),
    "seed": SEEDS,
    "scale": st.sampled_from(SCALES),
    "kind": st.sampled_from(HOSTS),
    "steps": st.integers(1, 3),
}


def drawn(
    case: Any, seed: int, scale: str, kind: str, linked: bool = True
) -> tuple[FloatArray, EngineScenario, EngineScenario]:
    """Durations, a scenario where nothing is shared, and one with interference and links."""
    plan = plan_of(case)
    return durations(plan, seed, scale), *scenarios(plan, seed, scale, MessageMode.RENDEZVOUS, kind, linked)


def times(*found: Outcome) -> list[FloatArray]:
    """Starts, ends and dispatches in one array each; nothing where a run got stuck (then all must)."""
    if any(isinstance(r, str) for r in found):
        assert len(set(found)) == 1
        return []
    runs = [r for r in found if isinstance(r, EngineRun)]
    return [np.stack([r.start, r.end] + ([] if r.post is None else [r.post])) for r in runs]


@some
@given(**ANY)
def test_with_nothing_shared_no_time_falls_when_an_op_or_a_launch_takes_longer(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int
) -> None:
    duration, bare, _ = drawn(case, seed, scale, kind)
    rng = np.random.default_rng(seed)
    longer, later = (durations(bare.plan, seed + k, scale) * (rng.random(len(duration)) < 0.1) for k in (2, 3))
    more = replace(bare, host=bare.host and HostModel(bare.host.launch + later, bare.host.hold))
    found = times(outcome(play, bare, duration, steps), outcome(play, more, duration + longer, steps))
    assert all((a <= b).all() for a, b in pairwise(found))


@some
@given(k=st.integers(-20, 20), **ANY)
def test_with_nothing_shared_all_times_scale_exactly_by_a_power_of_two(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int, k: int
) -> None:
    duration, bare, _ = drawn(case, seed, scale, kind)
    scaled = replace(bare, host=bare.host and HostModel(bare.host.launch * 2.0**k, bare.host.hold))
    found = times(outcome(play, bare, duration, steps), outcome(play, scaled, duration * 2.0**k, steps))
    assert all((a * 2.0**k).tobytes() == b.tobytes() for a, b in pairwise(found))


@some
@given(k=st.integers(1, 6), linked=st.booleans(), **ANY)
def test_with_interference_times_scale_up_to_the_grid(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int, k: int, linked: bool
) -> None:
    """Not exactly: each change of a rate rounds to the grid, which does not scale along, and what the smaller times
    lost is made larger. Rounding does not pile up."""
    duration, _, shared = drawn(case, seed, "seconds", kind, linked)
    scaled = replace(shared, host=shared.host and HostModel(shared.host.launch * 2.0**k, shared.host.hold))
    found = times(outcome(play, shared, duration, steps), outcome(play, scaled, duration * 2.0**k, steps))
    assert all(np.abs(a * 2.0**k - b).max() <= 1e-9 * 2.0**k for a, b in pairwise(found))


def meetings(plan: Plan) -> list[list[int]]:
    """The ops that must meet, each meeting once."""
    groups: dict[tuple[str, int], list[int]] = {}
    for i in range(len(plan)):
        together, partner = int(plan.collective[i]), int(plan.partner[i])
        key = ("all", together) if together >= 0 else ("two", min(i, partner) if partner >= 0 else i)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def work(plan: Plan, duration: FloatArray, members: list[int]) -> float:
    """Seconds of a meeting alone: a transfer's are its send's, a collective's its longest member's."""
    return max(float(duration[i]) for i in members if plan.kind[i] != OpKind.RECV)


def longest_chain(plan: Plan, duration: FloatArray) -> float:
    """Seconds of the longest chain of meetings that wait for each other, with streams, hosts and sharing left out."""
    groups = meetings(plan)
    of = {i: g for g, members in enumerate(groups) for i in members}
    before = {g: {of[int(w)] for i in members for w in plan.waits.row(i)} for g, members in enumerate(groups)}
    end: dict[int, float] = {}
    for g in TopologicalSorter(before).static_order():
        end[g] = max((end[b] for b in before[g]), default=0.0) + work(plan, duration, groups[g])
    return max(end.values())


def busiest(plan: Plan, duration: FloatArray, steps: int) -> float:
    """Seconds of work on the stream that has most, added up in its order, as rounding depends on that."""
    of = {i: members for members in meetings(plan) for i in members}
    return max(reduce(add, steps * [work(plan, duration, of[i]) for i in queue], 0.0) for queue in plan.queues)


@some
@given(**ANY)
def test_a_step_is_no_shorter_than_its_longest_chain_its_busiest_stream_and_its_host(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int
) -> None:
    duration, bare, shared = drawn(case, seed, scale, kind)
    least = max(longest_chain(bare.plan, duration), busiest(bare.plan, duration, steps))
    if bare.host is not None:
        every = steps * [*range(len(bare.plan))]
        least = max(least, *np.bincount(bare.plan.program[every], weights=bare.host.launch[every]))
    for scenario in (bare, shared):
        found = outcome(play, scenario, duration, steps)
        # Work is rounded where rates change: half a step of the grid at each change.
        assert isinstance(found, str) or found.end.max() >= least - scenario.shared * len(duration) * steps * 2.0**-37


@some
@given(**ANY)
def test_a_host_that_costs_and_awaits_nothing_is_no_host(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int
) -> None:
    duration, *both = drawn(case, seed, scale, kind)
    none, n = np.zeros(0, dtype=np.int64), len(duration)
    for scenario in both:
        free = outcome(play, replace(scenario, host=HostModel(np.zeros(n), OpLists.of(n, none, none))), duration, steps)
        assert isinstance(free, EngineRun) and free.post is not None and not free.post.any()
        assert same(EngineRun(free.start, free.end), outcome(play, replace(scenario, host=None), duration, steps))


@some
@given(tables=st.booleans(), **ANY)
def test_links_so_wide_that_all_fits_are_no_links(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int, tables: bool
) -> None:
    """Under interference to the bit only for loads that are powers of two: (pace * w) / w need not be pace."""
    duration, _, shared = drawn(case, seed, scale, kind)
    links, n = shared.links, len(duration)
    assert links is not None
    if tables:
        rows = np.arange(len(links.at) - 1)  # one link each
        wide = Links(links.row, np.arange(len(links.at)), rows, np.full(len(rows), 2.0**-20), len(rows))
    else:
        wide, shared = replace(links, load=links.load / (100 * n)), replace(shared, slow=None)
    found = outcome(play, replace(shared, links=wide), duration, steps)
    assert same(found, outcome(play, replace(shared, links=None), duration, steps))


@some
@given(**ANY)
def test_a_host_that_executes_compute_itself_is_never_faster(
    play: Any, case: Any, seed: int, scale: str, kind: str, steps: int
) -> None:
    duration, bare, _ = drawn(case, seed, scale, "none")
    held = replace(bare, host=cases.inline(bare.plan))
    found = times(outcome(play, bare, duration, steps), outcome(play, held, duration, steps))
    assert (found[0] <= found[1][:2]).all()
