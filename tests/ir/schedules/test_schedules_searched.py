"""The searched schedules: as good as published heuristics, within their limits, complete, and always able to run."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.core.ops import OpToken, ScheduledOp
from ir.core.order import Order
from ir.schedules.schedule import OpTimes
from ir.schedules.search import improve
from ir.schedules.search.blocks import blocks, unroll
from ir.schedules.search.greedy import greedy, rules
from ir.schedules.search.searched import v_half, v_min, zb2p
from ir.schedules.search.shop import ScheduleProblem, settle

ROOT = Path(__file__).parents[3]
ORACLES = ROOT / "tests" / "data" / "oracles"
TABLE_5 = ROOT / "tests" / "data" / "zero_bubble_table5.csv"

BUILD = {"zb2p": zb2p, "v-half": v_half, "v-min": v_min}
CHUNKS = {"zb2p": 1, "v-half": 2, "v-min": 2}
LIMIT = {"zb2p": lambda p: 2 * p, "v-half": lambda p: 2 * ((p + 2) // 2), "v-min": lambda p: 2 * ((p + 4) // 3)}
NAMES = sorted(BUILD)


@dataclass(frozen=True)
class Replay:
    """What the tests themselves find out about orders."""

    makespan: float
    worst_span_bubble: float
    peak: int  # whole activations, from F until W
    peak_held: float  # with shares given back at I


def rank_of(stage: int, ranks: int) -> int:
    return stage if stage < ranks else 2 * ranks - 1 - stage


def replay(orders: tuple[Order, ...], chunks: int, times: OpTimes) -> Replay:
    """Step every rank as far as it can go; AssertionError where no rank can move."""
    ranks, stages = len(orders), len(orders) * chunks
    todo = [order.actions() for order in orders]
    took = {OpToken.F: times.F, OpToken.I: times.I, OpToken.W: times.W}
    done: dict[ScheduledOp, float] = {}
    at, now, first = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    while any(at[r] < len(todo[r]) for r in range(ranks)):
        before = list(at)
        for r in range(ranks):
            while at[r] < len(todo[r]):
                op = todo[r][at[r]]
                needs = inputs(op, stages)
                if any(x not in done for x in needs):
                    break
                wire = [times.p2p if rank_of(x.stage, ranks) != r else 0.0 for x in needs]
                start = max([now[r], *(done[x] + c for x, c in zip(needs, wire, strict=True))])
                first[r] = start if at[r] == 0 else first[r]
                done[op] = now[r] = start + took[op.token]
                at[r] += 1
        assert at != before, "no rank can move"
    spans = [end - start for start, end in zip(first, now, strict=True)]
    work = [sum(took[op.token] for op in row) for row in todo]
    return Replay(
        makespan=max(now),
        worst_span_bubble=max(1 - w / s if s else 0.0 for w, s in zip(work, spans, strict=True)),
        peak=round(max(peak(row, 1.0) for row in todo)),
        peak_held=max(peak(row, times.w_memory) for row in todo),
    )


def inputs(op: ScheduledOp, stages: int) -> list[ScheduledOp]:
    if op.token is OpToken.F:
        return [ScheduledOp(op.stage - 1, OpToken.F, op.mb)] if op.stage else []
    if op.token is OpToken.W:
        return [ScheduledOp(op.stage, OpToken.I, op.mb)]
    own = ScheduledOp(op.stage, OpToken.F, op.mb)
    return [own] if op.stage == stages - 1 else [own, ScheduledOp(op.stage + 1, OpToken.I, op.mb)]


def peak(row: list[ScheduledOp], w_memory: float) -> float:
    held = most = 0.0
    for op in row:
        held += {OpToken.F: 1.0, OpToken.I: w_memory - 1.0, OpToken.W: -w_memory}[op.token]
        most = max(most, held)
    return most


def check(name: str, ranks: int, mbs: int, times: OpTimes) -> Replay:
    """Complete, in microbatch order, within the limit, deadlock-free; the replay."""
    orders = BUILD[name](ranks, mbs, times)
    stages = ranks * CHUNKS[name]
    for rank, order in enumerate(orders):
        mine = [s for s in range(stages) if rank_of(s, ranks) == rank]
        rows = order.actions()
        for stage, token in product(mine, (OpToken.F, OpToken.I, OpToken.W)):
            assert [op.mb for op in rows if (op.stage, op.token) == (stage, token)] == list(range(mbs))
        assert len(rows) == 3 * mbs * len(mine)
        assert order.unit.tolist() == list(range(len(order)))
    found = replay(orders, CHUNKS[name], times)
    assert found.peak_held <= LIMIT[name](ranks) + 1e-6 if name == "zb2p" else found.peak <= LIMIT[name](ranks)
    return found


def oracle_cases() -> list[object]:
    files = [ORACLES / f"{name}.json" for name in NAMES]
    cases = [(f.stem, *item) for f in files for item in json.loads(f.read_text()).items()]
    return [pytest.param(*case, id=case[1]) for case in cases]


@pytest.mark.parametrize(("name", "key", "case"), oracle_cases())
def test_no_worse_than_published_heuristics_on_the_times_they_were_run_with(name: str, key: str, case: dict) -> None:
    for text, derived in case["derived"].items():
        times = OpTimes(**{k: float(v) for k, v in (item.split("=") for item in text.split(","))})
        found = check(name, case["P"], case["M"], times)
        assert found.makespan <= derived["makespan"] * (1 + 1e-12)
        assert found.peak <= max(case["peak_inflight"].values())


with TABLE_5.open() as file:
    TABLE_5_ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("row", TABLE_5_ROWS, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_zb2p_reaches_the_bubble_rates_its_paper_prints(row: dict[str, str]) -> None:
    a, h, s = (int(row[key]) for key in ("heads", "hidden", "seq_len"))
    f, i, w, p2p = (float(row[key]) for key in ("F_ms", "I_ms", "W_ms", "p2p_ms"))
    times = OpTimes(f, i, w, p2p, w_memory=32 * h / (34 * h + 5 * a * s))
    found = check("zb2p", int(row["ranks"]), int(row["microbatches"]), times)
    assert found.worst_span_bubble <= float(row["zb2p_bubble_rate"]) + 0.0005


def test_zb2p_without_that_share_is_at_the_closed_bound() -> None:
    shop = ScheduleProblem(8, 24, 1, OpTimes(18.522, 18.086, 9.337, 0.601), 16.0)
    found = check("zb2p", 8, 24, shop.times)
    assert found.makespan == pytest.approx(improve.lower_bound(shop), rel=1e-12)
    assert found.worst_span_bubble == pytest.approx(0.1015, abs=1e-4)


# makespan - 6 M at F = I = W = 1 of sail-sg's heuristics, for M >= P, as we measured them
PUBLISHED_IDLE = {
    "v-half": {2: 1, 3: 5, 4: 5, 5: 11, 6: 11, 7: 17, 8: 17},
    "v-min": {2: 3, 3: 5, 4: 11, 5: 15, 6: 17, 7: 23, 8: 27},
}


@pytest.mark.parametrize(("name", "ranks"), [(name, p) for name, row in PUBLISHED_IDLE.items() for p in row])
def test_v_schedules_of_equal_passes_idle_no_more_than_published(name: str, ranks: int) -> None:
    mbs = ranks + 4
    assert check(name, ranks, mbs, OpTimes()).makespan - 6 * mbs <= PUBLISHED_IDLE[name][ranks]


@pytest.mark.parametrize(("ranks", "mbs"), [(1, 1), (2, 4), (4, 4), (4, 9), (8, 8), (8, 40)])
def test_zb2p_of_equal_passes_keeps_the_last_rank_busy(ranks: int, mbs: int) -> None:
    assert check("zb2p", ranks, mbs, OpTimes()).makespan == 3 * mbs + ranks - 1


times_of_any_kind = st.builds(
    OpTimes,
    F=st.sampled_from((0.0, 1.0, 3.0, 18.522)),
    I=st.sampled_from((0.0, 1.0, 4.0, 18.086)),
    W=st.sampled_from((0.0, 1.0, 2.5, 9.337)),
    p2p=st.sampled_from((0.0, 0.601, 2.0)),
    w_memory=st.sampled_from((1.0, 1.0, 0.3664, 0.0)),
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), times_of_any_kind)
def test_any_shape_and_times_give_a_legal_order_above_the_bounds(name: str, ranks: int, mbs: int, t: OpTimes) -> None:
    found = check(name, ranks, mbs, t)
    work, stages = CHUNKS[name] * mbs * (t.F + t.I + t.W), ranks * CHUNKS[name]
    alone = stages * (t.F + t.I) + t.W + 2 * CHUNKS[name] * (ranks - 1) * t.p2p
    assert found.makespan >= max(work + (ranks - 1) * (t.F + t.p2p), alone) * (1 - 1e-9)
    share = t.w_memory if name == "zb2p" else 1.0
    shop = ScheduleProblem(ranks, mbs, CHUNKS[name], replace(t, w_memory=share), LIMIT[name](ranks))
    padding = 0.0 if t.F and t.I and t.W else 1e-3  # the shop's ops all take some time
    assert found.makespan >= improve.lower_bound(shop) * (1 - 1e-9) - padding


@pytest.mark.parametrize("name", NAMES)
def test_alone_on_one_rank_there_is_nothing_to_wait_for(name: str) -> None:
    times = OpTimes(2, 3, 4, p2p=100)
    assert check(name, 1, 3, times).makespan == 27 * CHUNKS[name]


@pytest.mark.parametrize("name", NAMES)
def test_one_microbatch_takes_the_straight_way(name: str) -> None:
    v = CHUNKS[name]
    assert check(name, 3, 1, OpTimes(2, 3, 4, p2p=1)).makespan == 3 * v * 5 + 4 + 2 * v * 2


def test_without_weight_gradients_nothing_is_kept_for_them() -> None:
    order = zb2p(3, 5, OpTimes(W=0))[0].cells()
    assert [b for a, b in pairwise(order) if "I" in a] == [f"0W{m}" for m in range(5)]


@cache
def _elsewhere(seed: str) -> dict[str, list[str]]:
    """What another process finds, by name."""
    code = (
        "import json\nfrom ir.schedules.schedule import OpTimes\nfrom ir.schedules.search import searched\n"
        "def cells(name):\n search = getattr(searched, name.replace('-', '_'))\n"
        " return [' '.join(o.cells()) for o in search(3, 5, OpTimes(1.0, 1.3, 0.7, 0.05))]\n"
        f"print(json.dumps({{name: cells(name) for name in {list(NAMES)!r}}}))"
    )
    env, line = {**os.environ, "PYTHONHASHSEED": seed}, [sys.executable, "-c", code]
    found: dict[str, list[str]] = json.loads(
        subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_same_question_has_the_same_answer_in_every_process(name: str) -> None:
    here = BUILD[name](3, 5, OpTimes(1.0, 1.3, 0.7, 0.05))
    assert _elsewhere("1")[name] == _elsewhere("2")[name] == [" ".join(o.cells()) for o in here]


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_of_time_does_not_matter(name: str) -> None:
    seconds, halves = OpTimes(1.0, 1.5, 0.75, 0.125), OpTimes(2.0, 3.0, 1.5, 0.25)
    texts = [[o.cells() for o in BUILD[name](4, 5, t)] for t in (seconds, halves)]
    assert texts[0] == texts[1]


def test_a_broken_limit_and_a_deadlock_would_be_noticed() -> None:
    times = OpTimes(1000, 1300, 700, 50)
    orders = v_min(4, 8, times)
    assert replay(orders, 2, times).peak == 4
    rows = [a for a in orders[0].actions() if (a.stage, a.token) == (0, OpToken.F)]
    rows += [a for a in orders[0].actions() if a not in rows]
    greedy_first = (Order.of([str(a) for a in rows]), *orders[1:])
    assert replay(greedy_first, 2, times).peak > 4
    stuck = [a for a in orders[0].actions() if a.token is OpToken.I] + rows[:8]
    with pytest.raises(AssertionError, match="no rank can move"):
        replay((Order.of([str(a) for a in stuck]), *orders[1:]), 2, times)


def starts(shop: ScheduleProblem) -> list[list[int]]:
    found = [greedy(shop, rule) for rule in rules(shop)[::29]]
    return found + ([unroll(shop, b) for b in blocks(shop.ranks, shop.limit)[::3]] if shop.chunks == 2 else [])


@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (3, 5, 1, 6), (2, 4, 2, 4), (4, 6, 2, 4), (3, 2, 2, 4)])
def test_improving_never_makes_it_longer_and_keeps_the_limit(shape: tuple[int, int, int, int]) -> None:
    p, m, v, limit = shape
    shop = ScheduleProblem(p, m, v, OpTimes(1.0, 1.3, 0.7, 0.05), limit)
    seconds, random = shop.every(shop.seconds), Random(1)
    for order in starts(shop):
        ends, _ = settle(shop, order, seconds)
        found = improve.justify(shop, order, seconds, improve.ScheduleSearchEffort(10**6))
        assert improve.lower_bound(shop) * (1 - 1e-12) <= found.objective <= shop.objective(ends) * (1 + 1e-12)
        for ops in (found.sequences, settle(shop, improve.shake(shop, found, random), seconds)[1]):
            orders = tuple(Order.of([shop.text(op) for op in row]) for row in ops)
            assert replay(orders, v, shop.times).peak <= limit


def test_a_tail_makes_a_rank_end_early() -> None:
    plain = ScheduleProblem(2, 3, 1, OpTimes(), 4)
    assert improve.lower_bound(replace(plain, tail=(5.0, 0.0))) == improve.lower_bound(plain) + 4
    order = greedy(plain, rules(plain)[0])
    found = improve.justify(
        replace(plain, tail=(5.0, 0.0)), order, plain.every(plain.seconds), improve.ScheduleSearchEffort(10**6)
    )
    assert found.objective == 14.0


SHOPS = [
    (1, 3, 1, 2), (2, 4, 1, 4), (3, 5, 1, 6), (4, 9, 1, 8), (4, 6, 1, 3),
    (1, 2, 2, 2), (2, 4, 2, 4), (3, 5, 2, 4), (4, 7, 2, 6), (4, 5, 2, 4),
]  # fmt: skip
TIMES = OpTimes(1.0, 1.3, 0.7, 0.05), OpTimes(1.0, 1.0, 1.0), OpTimes(2.0, 1.0, 3.0, 0.5, w_memory=0.4)


def test_a_search_takes_the_way_it_took(golden: Callable[[str, str], None]) -> None:
    """Start orders of each family, and where they lead: no order is changed unseen."""
    said = []
    for shape, times in product(SHOPS, TIMES):
        p, m, v, limit = shape
        shop = ScheduleProblem(p, m, v, times if v == 1 else replace(times, w_memory=1.0), limit)
        families = {f.__name__: f(shop, 9) for f in (improve.round_orders, improve.block_orders, improve.greedy_orders)}
        orders = " ".join(f"{name} {len(found)} {_digest(found)}" for name, found in families.items())
        every = [greedy(shop, rule) for rule in rules(shop)]
        found = improve.search(shop, breadth=4, shakes=20)
        best = f"{found[0].objective:.9g} of {improve.lower_bound(shop):.9g} {_digest([x.sequences for x in found])}"
        said.append(f"{shape} {times}: {orders} rules {_digest(rules(shop))} {_digest(every)} best {best}\n")
    golden("searched.txt", "".join(said))


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:12]
