"""Every way to spoil a plan is refused, and the refusal says which op it is."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import parse_filter
from ir.directives import ReplicateDirective
from ir.job.build import prepare
from ir.job.load import job_from
from ir.lower import MessageQueue, PlanPolicy
from ir.plan.plan import Plan
from ir.verify import check_plan, held
from tests.ir.plans import WHOLE, moe_plan, stage_plan
from tests.ir.verify.defects import LARGE
from tests.ir.verify.defects_small import SMALL, found_buckets
from tests.refusals import refusal

ALL = LARGE | SMALL
SINGLE = PlanPolicy(p2p=MessageQueue.SINGLE)


@lru_cache(maxsize=1)
def plans() -> dict[str, Plan]:
    """A few of every sort: bare stages, and experts under each ZeRO level."""
    out = {f"{name} stages": stage_plan(name, 4, 6, None, WHOLE) for name in ("1f1b", "dualpipe", "zbv")}
    out |= {f"{name} cut": stage_plan(name, 3, 5, None, PlanPolicy()) for name in ("gpipe", "zb1p", "dualpipev")}
    out["interleaved single"] = stage_plan("interleaved-1f1b", 3, 5, None, SINGLE)
    out["1f1b one program"] = stage_plan("1f1b", 1, 3, None, WHOLE)
    out["dualpipe zero 0"] = moe_plan("dualpipe", 4, 4, zero=0, layers=4)
    out["dualpipe zero 1"] = moe_plan("dualpipe", 4, 4, zero=1, layers=4)
    out["1f1b zero 1, tied"] = moe_plan("1f1b", 3, 4, SINGLE, zero=1, layers=3, tied=True)
    out["dualpipe zero 2"] = moe_plan("dualpipe", 2, 4, zero=2, layers=2)
    out["dualpipev zero 3"] = moe_plan("dualpipev", 2, 3, zero=3, layers=4)
    mixed = tuple(ReplicateDirective(parse_filter({"L": n}), n, 0.0005 if n == 2 else None, "zero") for n in range(4))
    out["1f1b mixed"] = moe_plan("1f1b", 2, 3, zero=1, layers=4, then=mixed)
    out["dualpipe mixed"] = moe_plan("dualpipe", 2, 4, zero=3, layers=4, then=mixed)
    for zero in range(4):
        out[f"gpipe zero {zero}, streams"] = moe_plan("gpipe", 2, 3, zero=zero, layers=4, reduce_stream="zero")
    for name, zero in (("1f1b", 1), ("dualpipe", 1), ("dualpipe", 2), ("zbv", 3)):
        out[f"{name} zero {zero}, copies"] = moe_plan(name, 2, 3, zero=zero, layers=4, dp_replicate=2)
    out["zbv zero 3"] = moe_plan("zbv", 2, 3, SINGLE, zero=3, layers=4, recompute=("full",))
    out["gpipe zero 3, an op reads several buckets"] = _several()
    return out


def _several() -> Plan:
    """Each layer's attention and mlp are cut into buckets, and room is for two."""
    job = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 2, "seq_len": 16},
        "parallel": {"dp": 2, "zero": 3, "bucket_MiB": 0.02, "prefetch": 1},
        "schedule": {"name": "gpipe", "microbatches": 2},
        "cluster": {"gpu": "h100-sxm"},
    }
    return prepare(job_from(job)).plan()


def test_the_untouched_plans_pass() -> None:
    for name, plan in plans().items():
        check_plan(plan, serial="single" in name)


@pytest.mark.parametrize("defect", ALL)
def test_there_is_a_plan_for_every_defect(defect: str) -> None:
    assert any(ALL[defect](plan, Random(n)) for plan in plans().values() for n in range(3))


@pytest.mark.parametrize("defect", ALL)
@given(name=st.sampled_from(sorted(plans())), seed=st.integers(0, 2**32))
def test_a_spoiled_plan_is_refused_by_name(defect: str, name: str, seed: int) -> None:
    spoiled = ALL[defect](plans()[name], Random(seed))
    if spoiled is None:
        return
    plan, names = spoiled
    with pytest.raises(PiperError) as refused, patch.object(held, "buckets", found_buckets):
        check_plan(plan)
    assert refused.value.kind in (ErrorKind.ILLEGAL_PLAN, ErrorKind.DEADLOCK)
    assert any(name in refused.value.message for name in names), f"{names} not in:\n{refused.value}"


def test_what_is_said_of_spoiled_plans(golden: Callable[[str, str], None]) -> None:
    """All of it: who stands where, and what is allowed."""
    said = []
    for defect, n in product(sorted(ALL), range(24)):
        name = Random(f"{defect} {n}").choice(sorted(plans()))
        if (spoiled := ALL[defect](plans()[name], Random(n))) is not None:
            with pytest.raises(PiperError) as refused, patch.object(held, "buckets", found_buckets):
                check_plan(spoiled[0])
            said.append(f"{defect} {n}, {name}: {refused.value.kind} {refused.value}\n")
    golden("refusals.txt", "".join(said))


def test_no_gather_of_a_small_plan_may_come_earlier() -> None:
    """Where ops read several buckets, room binds, and not how far ahead a gather may be."""
    plan, refusals = _several(), set()
    for seed in range(60):
        spoiled = SMALL["gather_one_op_early"](plan, Random(seed))
        assert spoiled is not None
        refused = refusal(check_plan, spoiled[0])
        refusals.add(refused.message.partition(" is ")[2])
    assert refusals == {"more than 1 readings ahead of its own", "dispatched before there is room for it"}


def test_a_parameter_in_two_buckets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is in both, not their first."""
    graph = moe_plan("1f1b", 2, 3, zero=1, layers=2).graph
    first, *rest = held.buckets(graph)
    again = first.params[2]
    assert again != first.params[0]
    monkeypatch.setattr(held, "buckets", lambda g: (first, *rest, replace(first, name="again", params=(again,))))
    refusal(held.held, graph, match=f"^{again} is in bucket {first.stage}/again and in another")
