"""Reserved memory: what a plan asks for, its replay against the naive allocator, and the limit of the device."""

from functools import lru_cache

import numpy as np
import pytest

from cost_models import OptimizerPrecision, load_hardware
from cost_models.allocator import MemoryRequests, replay
from ir.core.work import DType
from ir.job.load import job_from
from ir.plan.plan import Plan
from ir.schedules.registry import NAMES
from piper_sim.memory import reserved as allocators
from piper_sim.memory.reserved import requests, reserved
from piper_sim.memory.timeline import Memory, memory, state
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from tests.cost_models.allocator.naive_allocator import naive

RECIPE = OptimizerPrecision("adamw", DType.BF16, DType.FP32, DType.FP32)
H100, CPU = load_hardware("h100-sxm"), load_hardware("cpu")
MIB = 2**20


@lru_cache(maxsize=64)
def found_of(schedule: str, zero: int = 1, microbatch_size: int = 8) -> tuple[Plan, Memory]:
    """Buffers of 0.1 to 20 MiB, so that both pools are used."""
    more = {"model": {"config": "tiny-moe", "seq_len": 512}, "parallel": {"pp": 2, "dp": 2, "ep": 2, "zero": zero}}
    table = {
        **more,
        "cluster": {"gpu": "h100-sxm"},
        "schedule": {"name": schedule, "microbatches": 8, "microbatch_size": microbatch_size},
    }
    job = job_from(table)
    made = prepare_priced(job, hardware_of(job))
    plan = made.plan()
    return plan, memory(plan, state(plan, RECIPE))


def test_requests_are_the_walk_over_every_op_and_cover() -> None:
    """Each request's op, and bytes in use after it: what the walk sees, workspace as the last of its cover."""
    plan, found = found_of("dualpipe", 3)
    for p, (asked, op) in enumerate(requests(plan, found)):
        level, live = [], {}
        for a in asked.events.tolist():
            if a >= 0:
                assert a not in live
                live[a] = int(asked.sizes[a])
            else:
                del live[~a]
            level.append(sum(live.values()))
        assert max(level) + found.state[p].total == found.peak[p]
        assert op[level.index(max(level))] == found.at[p]
        assert (np.diff(op) >= 0).all() and (plan.program[op] == p).all()
        ends = np.append(np.flatnonzero(np.diff(op)), len(op) - 1)
        assert [level[i] for i in ends] == found.level[op[ends]].tolist()


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zbv", "dualpipe"])
def test_reserved_is_the_naive_replay_of_two_steps(schedule: str) -> None:
    plan, found = found_of(schedule)
    bands = reserved(plan, found, H100)
    for (asked, _), r, peak in zip(requests(plan, found), bands, found.peak, strict=True):
        events, sizes = asked.events.tolist(), asked.sizes.tolist()
        one, other = (naive(asked.state, events, sizes, 2, 2**62, e) for e in (False, True))
        assert (r.band.middle, r.allocated) == (one[1], one[0])
        assert r.band.low == min(one[1], other[1])
        assert peak <= r.allocated <= r.band.middle < r.band.high
        assert r.refused is None and r.expandable_fits and r.given_back == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expandable", [False, True])
def test_a_third_step_reserves_no_more(name: str, expandable: bool) -> None:
    plan, found = found_of(name)
    for asked, _ in requests(plan, found):
        two, three, nine = (replay(asked, steps=n, expandable=expandable) for n in (2, 3, 9))
        assert two.reserved == three.reserved == nine.reserved


def test_a_device_with_room_for_the_replay_is_enough_and_one_without_room_for_the_peak_is_not() -> None:
    plan, found = found_of("zbv")
    free = reserved(plan, found, H100)
    most = max(range(2), key=lambda p: free[p].band.middle)
    limit = free[most].band.middle
    roomy = reserved(plan, found, H100, limit)
    assert [(r.band, r.allocated, r.refused) for r in roomy] == [(r.band, r.allocated, r.refused) for r in free]
    tight = reserved(plan, found, H100, limit - 1)[most]
    assert tight.refused is not None or tight.band.middle < limit, "cached segments go back, or a request is refused"
    full = reserved(plan, found, H100, int(found.peak[most]) - 1)[most]
    assert full.refused is not None and not full.expandable_fits
    assert plan.bounds[most] <= full.refused <= found.at[most], "refused no later than at the peak"
    assert full.band == free[most].band, "what it would need"
    assert reserved(plan, found, H100, found.state[most].optimizer)[most].refused == -1


def test_what_is_cached_goes_back_before_a_job_is_refused() -> None:
    """Somewhere between the peak in use and the unlimited replay lies a limit that is kept by giving back."""
    kept = 0
    for schedule in NAMES:
        plan, found = found_of(schedule)
        for p, r in enumerate(reserved(plan, found, H100)):
            for limit in range(r.allocated, r.band.middle, 2 * MIB):
                tight = reserved(plan, found, H100, limit)[p]
                if tight.refused is None:
                    assert tight.band.middle <= limit and tight.given_back > 0
                    kept += 1
    assert kept > 0


def test_expandable_segments_give_pages_back_before_they_refuse() -> None:
    """30 MiB, freed, then 20 of 1 MiB from the other pool: 60 MiB if nothing limits them, and 40 will do."""
    events = [0, ~0, *range(1, 21), *(~i for i in range(1, 21))]
    asked = MemoryRequests((0, 0, 0), np.array(events), np.array([30 * MIB] + [MIB] * 20))
    assert replay(asked, expandable=True).reserved == 60 * MIB
    for limit in (32, 40, 48, 60):
        fits = allocators._cached(asked, np.arange(len(events)), 30 * MIB, H100, limit * MIB).expandable_fits
        naively = naive(asked.state, events, asked.sizes.tolist(), 2, limit * MIB, True)
        assert fits == (naively[-1] is None) == (limit >= 40)


def test_without_a_caching_allocator_reserved_is_allocated() -> None:
    plan, found = found_of("1f1b")
    for p, r in enumerate(reserved(plan, found, CPU, int(found.peak[0]) + 2 * MIB)):
        assert found.peak[p] <= r.band.middle < found.peak[p] + 20 * MIB and r.refused is None
    assert reserved(plan, found, CPU, 1)[0].refused == found.at[0]
