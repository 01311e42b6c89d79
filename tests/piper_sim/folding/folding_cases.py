"""What the tests of folding draw: jobs with stragglers and odd nodes, their runs, and groups read off coordinates."""

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ir.core.errors import PiperError
from ir.core.mesh import DENSE, EXPERT, Mesh
from ir.core.order import FloatArray
from ir.plan.plan import OpKind, OpLists, Plan
from piper_sim.engine import EngineRun, EngineScenario, HostModel, KernelInterference, play
from piper_sim.folding import RankClasses, carry, classes, unfold
from piper_sim.pricing.costs import CostModel, OpCosts
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from tests.piper_sim.pricing.test_costs import job

Made = tuple[Plan, CostModel]
LLAMA, MOE = "tiny-llama", "tiny-moe"
ORDERS = ("tp cp ep dp pp", "pp tp cp ep dp", "dp ep cp tp pp", "pp ep dp tp cp")


def made(config: str = LLAMA, schedule: str = "1f1b", cluster: dict[str, Any] | None = None, **parallel: Any) -> Made:
    """A job's plan and prices. parallel: keys of `[parallel]`; cluster: of `[cluster]`."""
    more = {"cluster": cluster} if cluster else {}
    wanted = job(schedule, config, parallel={"ep": 1, **parallel}, **more)
    hardware = hardware_of(wanted)
    prepared = prepare_priced(replace(wanted, schedule=replace(wanted.schedule, microbatches=4)), hardware)
    return prepared.plan(), CostModel(prepared, hardware)


def scenario(plan: Plan, model: CostModel, found: RankClasses, rich: bool = False) -> EngineScenario:
    """rich: with a host that is busy, and kernels and messages that slow each other."""
    whole = unfold(plan, found, model.mesh)
    if not rich:
        return EngineScenario(whole, *carry(plan, found))
    n = len(whole)
    none = np.zeros(0, dtype=np.int64)
    host = HostModel(np.full(n, 2.0**-20), OpLists.of(n, none, none))
    kind = np.where(whole.kind == OpKind.COMPUTE, whole.shape % 2, 0)
    held, moving, wire = (np.array(x) for x in ([[0.25], [0.5]], [[0.125], [0.0]], [[0.25, 0.0]]))
    return EngineScenario(whole, *carry(plan, found), host=host, slow=KernelInterference(kind, held, moving, wire))


def whole(
    plan: Plan, model: CostModel, found: RankClasses, steps: int = 2, rich: bool = False
) -> tuple[EngineRun, OpCosts]:
    costs = model.price(plan, found)
    return play(scenario(plan, model, found, rich), costs.duration, steps), costs


def every(run: EngineRun, found: RankClasses) -> FloatArray:
    """[what, step, position, op] times of every replica, as a run of its class says."""
    both = np.stack([run.start, run.end] + ([] if run.post is None else [run.post]))
    return both.reshape(*both.shape[:2], found.count, -1)[:, :, found.of]


def assert_folds(plan: Plan, model: CostModel, found: RankClasses | None = None, rich: bool = False) -> RankClasses:
    """Each replica's times are, to the bit, those it has where nothing is folded."""
    found = classes(plan, model.ground) if found is None else found
    each = RankClasses.each(len(found.of))
    folded, unfolded = (every(whole(plan, model, c, rich=rich)[0], c) for c in (found, each))
    assert (folded == unfolded).all()
    return found


CASES = st.fixed_dictionaries(
    {
        "config": st.sampled_from([LLAMA, MOE]),
        "schedule": st.sampled_from(["1f1b", "zb1p", "zbv", "dualpipe", "interleaved-1f1b"]),
        "sizes": st.sampled_from(
            [(1, 1, 4), (1, 1, 3), (2, 1, 2), (1, 2, 2), (2, 1, 4), (2, 2, 2), (1, 1, 8), (4, 1, 1)]
        ),
        "ep": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([2, 4]),
        "zero": st.integers(0, 3),
        "copies": st.sampled_from([1, 1, 2]),
        "order": st.sampled_from(ORDERS),
        "per_node": st.sampled_from([8, 8, 8, 3, 5, 2, 1]),
        "seed": st.integers(0, 2**32),
        "rich": st.booleans(),
    }
)


def _divides(case: dict[str, Any], ep: int, copies: int) -> bool:
    tp, cp, dp = case["sizes"]
    try:
        Mesh.of(tp=tp, cp=cp, dp=dp, pp=2, ep=ep, dp_replicate=copies, order=case["order"].split())
    except PiperError:
        return False
    return True


def drawn(case: dict[str, Any]) -> Made:
    """A job of the case, with a few ranks off their speed."""
    tp, cp, dp = case["sizes"]
    rng, devices = random.Random(case["seed"]), tp * cp * dp
    ep = case["ep"] if case["config"] == MOE and devices % case["ep"] == 0 else 1
    ranks = rng.sample(range(devices * 2), rng.choice([0, 1, 1, 2, 3]))
    speed = {str(r): rng.choice([0.5, 0.8, 0.8, 1.25]) for r in ranks}
    legal = ((ep, case["copies"] if case["zero"] else 1), (ep, 1), (1, 1))
    ep, copies = next(x for x in legal if _divides(case, *x))
    parallel = {k: case[k] for k in ("zero", "order")} | {"pp": 2 if case["config"] == MOE else case["pp"]}
    parallel["dp_replicate"] = copies
    cluster = {"gpus_per_node": case["per_node"], "speed": speed}
    return made(case["config"], case["schedule"], cluster, tp=tp, cp=cp, dp=dp, ep=ep, **parallel)


def mates(mesh: Mesh, axes: tuple[str, ...], rank: int) -> set[int]:
    """A rank's group, from coordinates alone: all that agree with it on the other axes of the view."""
    view = EXPERT if any(a.partition("_")[0] in EXPERT for a in axes) else DENSE
    if any("_" in a for a in axes):
        view = tuple(x for a in view for x in ((f"{a}_shard", f"{a}_replicate") if a in ("dp", "edp") else (a,)))
    others = [a for a in (*view, "pp") if a not in axes]
    place = places(tuple(sorted(mesh.sizes.items())), tuple(sorted(mesh.axes.items())))
    return {r for r, there in enumerate(place) if all(there[a] == place[rank][a] for a in others)}


@lru_cache(maxsize=64)
def places(sizes: Any, axes: Any) -> list[dict[str, int]]:
    mesh = Mesh(dict(sizes), dict(axes))
    return [mesh.coordinates(r) for r in range(mesh.ranks)]
