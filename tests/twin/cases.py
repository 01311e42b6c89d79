"""Random plans, durations and interference for both engines, drawn as small values that print in one line."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ir.lower import P2P, Merge, Policy
from ir.order import FloatArray
from ir.plan import OpKind, Plan
from piper_sim.engine.contention import Interference
from piper_sim.engine.loop import Run
from tests.ir.plans import FIXED, WHOLE, moe_plan, stage_plan

POLICIES = {
    "whole": WHOLE,
    "cut": Policy(merge=Merge.ALTERNATE, clip=False),
    "use": Policy(merge=Merge.FUSED, whole_backward=True, p2p=P2P.USE, clip=False),
    "single": Policy(merge=Merge.ALTERNATE, p2p=P2P.SINGLE, clip=False),
}
STAGES = st.tuples(st.sampled_from(FIXED), st.integers(1, 8), st.integers(1, 12), st.sampled_from(sorted(POLICIES)))
LAYERS = st.tuples(
    st.sampled_from(("1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")),
    st.sampled_from([2, 4]),
    st.sampled_from([3, 6]),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([P2P.CHANNELS, P2P.SINGLE]),
)
SCALES = ("ties", "ulps", "seconds", "mixed")


@lru_cache(maxsize=4096)
def stages(name: str, ranks: int, mbs: int, policy: str) -> Plan:
    """Any schedule on bare stages."""
    return stage_plan(name, ranks + ranks % 2 * (name == "dualpipe"), mbs, None, POLICIES[policy])


@lru_cache(maxsize=4096)
def layers(name: str, ranks: int, mbs: int, zero: int, tied: bool, clip: bool, p2p: P2P) -> Plan:
    """Layer-level mixture of experts: all-to-alls, ZeRO, clipping, collectives that span programs."""
    return moe_plan(name, ranks, mbs, Policy(p2p=p2p, clip=clip), zero=zero, tied=tied)


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
        case _:
            out = small * np.exp2(rng.integers(-40, 1, n))
    out[rng.random(n) < rng.choice([0.0, 0.2, 0.8])] = 0.0
    return out


def interference(plan: Plan, seed: int) -> Interference:
    """Any tables and any classes: the members of a meeting may differ."""
    rng = np.random.default_rng(seed)
    computes, comms = (int(x) for x in rng.integers(1, 5, 2))
    kind = np.where(
        plan.kind == OpKind.COMPUTE, rng.integers(0, computes, len(plan)), rng.integers(0, comms, len(plan))
    )

    def table(*shape: int) -> FloatArray:
        some = rng.choice([0.0, 0.5, 1.0]) if rng.random() < 0.3 else rng.random(shape)
        return np.where(rng.random(shape) < 0.3, 0.0, some)

    return Interference(kind, table(computes, comms), table(computes, comms), table(comms, computes))


def same(a: Run, b: Run) -> bool:
    """Bitwise."""
    return a.start.tobytes() == b.start.tobytes() and a.end.tobytes() == b.end.tobytes()
