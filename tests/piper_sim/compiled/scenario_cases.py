"""Random plans and all that a scenario holds, drawn as small values that print in one line."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import FloatArray
from ir.lower import MessageQueue
from ir.plan.plan import OpKind, OpLists, Plan
from piper_sim.engine import EngineRun, EngineScenario, HostModel, KernelInterference, Links, MessageMode
from tests.ir.plans import FIXED
from tests.piper_sim.engine.cases import POLICIES, layers, stages

STAGES = st.tuples(st.sampled_from(FIXED), st.integers(1, 8), st.integers(1, 12), st.sampled_from(sorted(POLICIES)))
LAYERS = st.tuples(
    st.sampled_from(("1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")),
    st.sampled_from([2, 4]),
    st.sampled_from([3, 6]),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([MessageQueue.CHANNELS, MessageQueue.SINGLE]),
)
SEEDS = st.integers(0, 2**32)
SCALES = ("ties", "ulps", "seconds", "minutes", "mixed")


def plan_of(case: tuple[Any, ...]) -> Plan:
    """A plan from either strategy."""
    return stages(*case) if len(case) == 4 else layers(*case)


def durations(plan: Plan, seed: int, scale: str) -> FloatArray:
    """Multiples of 2**-40, zeros among them. Ends of a transfer and members of a collective need not agree."""
    rng = np.random.default_rng(seed)
    n = len(plan)
    small = rng.integers(0, 6, n)
    match scale:
        case "ties":
            out = small.astype(float)
        case "ulps":
            out = small * 2.0**-40
        case "seconds":
            out = np.rint(rng.random(n) * 2.0**40) / 2.0**40
        case "minutes":  # so long that the last bit of a rate shows
            out = np.rint(rng.random(n) * 2.0**46) / 2.0**40
        case _:
            out = small * np.exp2(rng.integers(-40, 1, n))
    out[rng.random(n) < rng.choice([0.0, 0.2, 0.8])] = 0.0
    return out


def interference(plan: Plan, seed: int) -> KernelInterference:
    """Any tables and any classes: the members of a meeting may differ."""
    rng = np.random.default_rng(seed)
    computes, comms = (int(x) for x in rng.integers(1, 5, 2))
    kind = np.where(
        plan.kind == OpKind.COMPUTE, rng.integers(0, computes, len(plan)), rng.integers(0, comms, len(plan))
    )

    def table(*shape: int) -> FloatArray:
        some = rng.choice([0.0, 0.5, 1.0]) if rng.random() < 0.3 else rng.random(shape)
        return np.where(rng.random(shape) < 0.3, 0.0, some)

    return KernelInterference(kind, table(computes, comms), table(computes, comms), table(comms, computes))


def links(plan: Plan, seed: int) -> Links:
    """Any rows, the same link twice or none at all among them; some ops load nothing, seldom a compute op does."""
    rng = np.random.default_rng(seed)
    n, count, rows = len(plan), int(rng.integers(1, 8)), int(rng.integers(1, 8))
    many = rng.integers(0, 4, rows)
    at = np.append(0, np.cumsum(many))
    load = rng.choice([0.25, 0.5, 1.0, 1.5], at[-1]) if rng.random() < 0.5 else 0.01 + 2 * rng.random(at[-1])
    row = np.where(rng.random(n) < 0.2, -1, rng.integers(0, rows, n))
    row = np.where((plan.kind == OpKind.COMPUTE) & (rng.random(n) < 0.95), -1, row)
    return Links(row, at, rng.integers(0, count, at[-1]), load, count)


def inline(plan: Plan) -> HostModel:
    """A host that executes compute itself: each op is held by the compute op before, of this step or the last."""
    n, compute = len(plan), plan.kind == OpKind.COMPUTE
    row: list[int] = []
    on: list[int] = []
    for a, b in pairwise(plan.bounds.tolist()):
        mine = np.flatnonzero(compute[a:b]) + a
        last = n + int(mine[-1]) if len(mine) else -1
        for i in range(a, b):
            if last >= 0:
                row.append(i)
                on.append(last)
            last = i if compute[i] else last
    return HostModel(np.zeros(n), OpLists.of(n, np.array(row, dtype=np.int64), np.array(on, dtype=np.int64)))


def ahead(plan: Plan, seed: int, scale: str) -> HostModel:
    """A host with costs and a window of at most a step, and some ops whose results it reads before it goes on."""
    rng = np.random.default_rng(seed)
    n, compute = len(plan), plan.kind == OpKind.COMPUTE
    launch = durations(plan, seed + 1, scale) * rng.choice([0.0, 0.25, 1.0])
    launch = np.rint(launch * 2.0**40) / 2.0**40
    pairs: list[tuple[int, int]] = []
    only = rng.random() < 0.7  # a window of compute ops only: one of all ops often gets stuck
    for a, b in pairwise(plan.bounds.tolist()):
        window = int(rng.integers(1, b - a + 1))
        for i in range(a, b):
            j = i - window
            j, over = (j, 0) if j >= a else (j + b - a, n)
            if compute[j] or not only:
                pairs.append((i, over + j))
            if rng.random() < 0.05:
                j = int(rng.integers(a, b))
                pairs.append((i, j if j < i else n + j))
    some = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return HostModel(launch, OpLists.of(n, some[:, 0], some[:, 1]))


HOSTS = ("none", "inline", "ahead")


def host(plan: Plan, kind: str, seed: int, scale: str) -> HostModel | None:
    """None, or either model of a host."""
    return None if kind == "none" else inline(plan) if kind == "inline" else ahead(plan, seed, scale)


def scenarios(
    plan: Plan, seed: int, scale: str, wire: MessageMode, kind: str, linked: bool
) -> tuple[EngineScenario, EngineScenario]:
    """(one where nothing is shared, one with interference and perhaps links)."""
    bare = EngineScenario.of(plan, wire, host(plan, kind, seed, scale) if wire is MessageMode.RENDEZVOUS else None)
    slow, over = interference(plan, seed), links(plan, seed) if linked else None
    return bare, replace(bare, wire=MessageMode.RENDEZVOUS, slow=slow, links=over, host=host(plan, kind, seed, scale))


Outcome = EngineRun | str
Play = Callable[[EngineScenario, FloatArray, int], EngineRun]


def outcome(play: Play, scenario: EngineScenario, duration: FloatArray, steps: int) -> Outcome:
    """A run, or the story of its deadlock."""
    try:
        return play(scenario, duration, steps)
    except PiperError as e:
        assert e.kind is ErrorKind.DEADLOCK
        return str(e)


def same(a: Outcome, b: Outcome) -> bool:
    """Bitwise, or word for word."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    posts = [b"" if x.post is None else x.post.tobytes() for x in (a, b)]
    return a.start.tobytes() == b.start.tobytes() and a.end.tobytes() == b.end.tobytes() and posts[0] == posts[1]
