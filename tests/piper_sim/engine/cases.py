"""What the tests here draw: plans of any schedule, and whole durations for them."""

import random
from functools import lru_cache

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from ir.core.order import FloatArray
from ir.lower import MessageQueue, PassMerge, PlanPolicy
from ir.plan.plan import OpKind, Plan
from tests.ir.plans import FIXED, WHOLE, moe_plan, stage_plan

# Each example builds and runs whole plans; a twentieth of what cheap properties draw.
HEAVY = settings(deadline=None, max_examples=max(40, settings().max_examples // 20))

CUT = PlanPolicy(merge=PassMerge.ALTERNATE, clip=False)
USE = PlanPolicy(merge=PassMerge.FUSED, whole_backward=True, p2p=MessageQueue.USE, clip=False)
SINGLE = PlanPolicy(merge=PassMerge.ALTERNATE, p2p=MessageQueue.SINGLE, clip=False)
POLICIES = {"whole": WHOLE, "cut": CUT, "use": USE, "single": SINGLE}


# What to build is drawn, not the plan: a failing example prints in one line.
STAGES = st.tuples(
    st.sampled_from(FIXED), st.integers(1, 8), st.integers(1, 16), st.sampled_from(["whole", "cut", "use"])
)
LAYERS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")),
        "ranks": st.sampled_from([2, 4]),
        "mbs": st.sampled_from([3, 6]),
        "zero": st.integers(0, 3),
        "tied": st.booleans(),
        "clip": st.booleans(),
        "p2p": st.sampled_from([MessageQueue.CHANNELS, MessageQueue.SINGLE]),
    }
)


@lru_cache(maxsize=4096)
def stages(name: str, ranks: int, mbs: int, policy: str) -> Plan:
    """Any schedule on bare stages, under any way to queue its transfers."""
    return stage_plan(name, ranks + ranks % 2 * (name == "dualpipe"), mbs, None, POLICIES[policy])


@lru_cache(maxsize=4096)
def layers(name: str, ranks: int, mbs: int, zero: int, tied: bool, clip: bool, p2p: MessageQueue) -> Plan:
    """Layer-level mixture of experts: all-to-alls, ZeRO, clipping, DualPipe's and tied embeddings' meetings."""
    return moe_plan(name, ranks, mbs, PlanPolicy(p2p=p2p, clip=clip), zero=zero, tied=tied)


def durations(plan: Plan, seed: int, most: int = 9) -> FloatArray:
    """Random whole numbers, zeros among them; both ends of a transfer and all members of a collective agree."""
    rng = random.Random(seed)
    out = np.array([float(rng.randint(0, most)) for _ in range(len(plan))])
    for i in range(len(plan)):
        if plan.kind[i] == OpKind.RECV:
            out[i] = out[plan.partner[i]]
    for c in range(int(plan.collective.max(initial=-1)) + 1):
        out[plan.collective == c] = rng.randint(0, most)
    return out
