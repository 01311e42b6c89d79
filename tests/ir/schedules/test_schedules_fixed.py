"""The fixed schedules: exactly the recorded orders, legal for every shape, equal to the closed forms."""

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import Order
from ir.schedules.registry import build, legal_chunks
from ir.schedules.schedule import OpTimes, Schedule
from tests.ir.schedules.evaluate import ScheduleEvaluation, evaluate
from tests.refusals import refusal

ORACLES = Path(__file__).parents[2] / "data" / "oracles"
FIXED = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb1p", "zbv", "dualpipe", "dualpipev")
OVERLAPPED = ("1f1b-overlap", "interleaved-1f1b-overlap")
SKEWED = OpTimes(F=10, I=13, W=7)


def oracle(name: str) -> dict[str, Any]:
    return dict(json.loads((ORACLES / f"{name}.json").read_text()))


CASES = [
    pytest.param(name, case, id=key)
    for name in FIXED
    for key, case in oracle(name).items()
    if "sail-sg" not in case["source"]
]
SAIL_CASES = [
    pytest.param(name, case, id=key)
    for name in ("zb1p", "zbv")
    for key, case in oracle(name).items()
    if "sail-sg" in case["source"]
]


def texts(schedule: Schedule) -> list[list[str]]:
    return [order.cells() for order in schedule.orders]


def cost(schedule: Schedule, times: OpTimes = OpTimes(), fb: float | None = None) -> ScheduleEvaluation:
    return evaluate(schedule.orders, schedule.placements, times, fb)


def parsed(text: str) -> tuple[OpTimes, float | None]:
    values = {key: float(value) for key, value in (item.split("=") for item in text.split(","))}
    fb = values.pop("FB", None)
    return OpTimes(**values), fb


def idle(found: ScheduleEvaluation) -> list[float]:
    return [found.makespan - busy for busy in found.busy]


# --- against recorded orders ----------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), CASES)
def test_orders_are_exactly_their_source_s(name: str, case: dict[str, Any]) -> None:
    schedule = build(name, case["P"], case["M"], case["V"])
    assert texts(schedule) == [case["order"][str(r)] for r in range(case["P"])]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_time_and_memory_are_exactly_the_oracle_s(name: str, case: dict[str, Any]) -> None:
    schedule = build(name, case["P"], case["M"], case["V"])
    for text, expected in case["derived"].items():
        found = cost(schedule, *parsed(text))
        assert found.makespan == expected["makespan"], text
        assert list(found.busy) == expected["busy"], text
        assert found.span_bubble_fraction == pytest.approx(expected["span_bubble_fraction"], abs=1e-12), text
        assert found.peak_inflight == tuple(case["peak_inflight"][str(r)] for r in range(case["P"])), text


@pytest.mark.parametrize(("name", "case"), SAIL_CASES)
def test_no_slower_and_no_larger_than_the_zero_bubble_authors_own(name: str, case: dict[str, Any]) -> None:
    schedule = build(name, case["P"], case["M"], case["V"])
    for text, expected in case["derived"].items():
        found = cost(schedule, *parsed(text))
        assert found.makespan <= expected["makespan"]
        assert max(found.peak_inflight) <= max(case["peak_inflight"].values())


def test_what_others_refuse_is_refused_or_done() -> None:
    refused = set()
    for case in json.loads((ORACLES / "rejected.json").read_text()):
        try:
            schedule = build(case["schedule"], case["P"], case["M"], case["V"])
        except PiperError as error:
            assert error.kind is ErrorKind.USAGE
            assert error.suggestion
            refused.add((case["schedule"], case["P"], case["M"], case["V"]))
        else:
            cost(schedule)
    assert refused == {
        ("zbv", 4, 8, 3),
        ("zbv", 4, 8, 1),
        ("dualpipev", 4, 8, 3),
        ("dualpipe", 3, 12, 1),
        ("dualpipev", 4, 0, 2),
    }


# --- for every shape ------------------------------------------------------------------


def shapes(name: str, ranks: range, mbs: range) -> list[tuple[int, int, int]]:
    chunks = [v for v in (1, 2, 3, 4) if legal_chunks(name, v)]
    return [(p, m, v) for p in ranks for v in chunks for m in mbs if name != "dualpipe" or p % 2 == 0]


def assert_each_once_and_in_turn(schedule: Schedule) -> None:
    """Plainly, without the evaluator: one F, then one B or an I and its W, where the stage lives."""
    seen: dict[tuple[int, int], str] = {}
    for rank, order in enumerate(schedule.orders):
        for a in order.actions():
            seen[a.stage, a.mb] = seen.get((a.stage, a.mb), "") + a.token.name
            (home,) = [p.rank_of_stage[a.stage] for p in schedule.placements if a.mb in p.mbs]
            assert home == rank
    assert seen.keys() == set(product(range(schedule.stages), range(schedule.microbatches)))
    assert set(seen.values()) <= {"FB", "FIW"}


@pytest.mark.parametrize("name", FIXED + OVERLAPPED)
def test_any_number_of_microbatches_is_complete_and_free_of_deadlock(name: str) -> None:
    for p, m, v in shapes(name, range(1, 9), range(1, 33)):
        schedule = build(name, p, m, v)
        found = cost(schedule)  # refuses incomplete orders and deadlocks
        # A chain through all stages, and every rank's own work, take their time.
        assert found.makespan >= max(*found.busy, 2 * schedule.stages), (p, m, v)
        assert found.busy == (3 * m * v,) * p


@pytest.mark.parametrize("name", FIXED + OVERLAPPED)
def test_each_pass_comes_once_in_turn_on_its_rank(name: str) -> None:
    for p, m, v in shapes(name, range(1, 7), range(1, 12)):
        assert_each_once_and_in_turn(build(name, p, m, v))


@pytest.mark.parametrize("name", FIXED + OVERLAPPED)
def test_units_count_without_gaps(name: str) -> None:
    for p, m, v in shapes(name, range(1, 6), range(1, 12)):
        for order in build(name, p, m, v).orders:
            assert set(np.diff(order.unit, prepend=-1).tolist()) <= {0, 1}
            assert order.unit[0] == 0
            assert Order.of(order.cells()).cells() == order.cells()


@pytest.mark.parametrize(("name", "chunks"), [("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb1p", 2)])
def test_a_ragged_last_round_costs_no_more_than_filling_it_up(name: str, chunks: int) -> None:
    for p, m in product((2, 3, 4, 5), range(1, 20)):
        full = next(n for n in range(m, m + p) if n % max(1, n // p) == 0)
        for times in (OpTimes(), SKEWED):
            assert cost(build(name, p, m, chunks), times).makespan <= cost(build(name, p, full, chunks), times).makespan


@pytest.mark.parametrize("name", ["zbv", "dualpipe", "dualpipev"])
def test_fewer_microbatches_never_cost_more(name: str) -> None:
    for p in (2, 4, 6):
        found = [cost(build(name, p, m), SKEWED) for m in range(1, 4 * p)]
        assert all(a.makespan <= b.makespan for a, b in pairwise(found))
        assert all(max(a.peak_inflight) <= max(b.peak_inflight) for a, b in pairwise(found))


def test_dualpipe_gives_the_odd_microbatch_to_the_direction_from_rank_0() -> None:
    schedule = build("dualpipe", 4, 9)
    assert [(p.mbs, p.rank_of_stage) for p in schedule.placements] == [
        (range(5), (0, 1, 2, 3)),
        (range(5, 9), (3, 2, 1, 0)),
    ]
    assert [len(p.mbs) for p in build("dualpipe", 4, 1).placements] == [1, 0]


def test_each_rank_holds_its_stages() -> None:
    assert build("interleaved-1f1b", 3, 4, 2).placements[0].rank_of_stage == (0, 1, 2, 0, 1, 2)
    assert build("zbv", 3, 4).placements[0].rank_of_stage == (0, 1, 2, 2, 1, 0)


# --- closed forms, exact on integer costs ---------------------------------------------

F, I, W = SKEWED.F, SKEWED.I, SKEWED.W
B = I + W


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_for_p_minus_1_forwards_and_backwards(name: str, p: int) -> None:
    for m in (p, 2 * p, 2 * p + 3):
        found = cost(build(name, p, m), SKEWED)
        assert idle(found) == [(p - 1) * (F + B)] * p
        assert found.peak_inflight == tuple(m if name == "gpipe" else p - r for r in range(p))


@pytest.mark.parametrize(("p", "v"), list(product((2, 3, 4, 8), (2, 3))))
def test_interleaving_idles_as_1f1b_per_chunk(p: int, v: int) -> None:
    for m in (p, 2 * p, 4 * p):
        found = cost(build("interleaved-1f1b", p, m, v), SKEWED)
        assert idle(found) == [(p - 1) * (F + B)] * p
        assert max(found.peak_inflight) == min((v - 1) * p + 2 * (p - 1) + 1, m * v)
        looped = cost(build("looped-bfs", p, m, v), SKEWED)
        assert idle(looped) == [(p - 1) * (F + B)] * p
        assert looped.peak_inflight == (m * v,) * p


@pytest.mark.parametrize(("p", "v"), list(product((1, 2, 3, 4, 8), (1, 2, 3))))
def test_overlapped_1f1b_idles_as_1f1b_and_holds_megatron_s_fill_and_one_pair_more(p: int, v: int) -> None:
    name = OVERLAPPED[v > 1]
    for m in (1, p - 1 or 1, p, 2 * p, 2 * p + 1, 4 * p + 1):
        schedule = build(name, p, m, v)
        found = cost(schedule, SKEWED)
        assert m < p or idle(found) == [(p - 1) * (F + B)] * p
        group = m if m < p else -(-m // (m // p))
        fills = [min((p - r - 1) * 2 + (v - 1) * group + 1, m * v) for r in range(p)]
        for order, fill in zip(schedule.orders, fills, strict=True):
            cells = order.cells()
            assert [("F" in c, "B" in c) for c in cells[: fill + 1]] == [(True, False)] * fill + [(fill < m * v, True)]
            assert all(("OVERLAP" in c) == (fill <= k < m * v) for k, c in enumerate(cells))
        assert found.peak_inflight == tuple(min(fill + 1, m * v) for fill in fills)


def test_with_less_fill_the_pairs_would_wait_for_themselves_or_each_other() -> None:
    pair = "(1F0;1B0)OVERLAP_F_B"
    e = refusal(evaluate, [Order.of(["0F0", "0B0"]), Order.of([pair])], build("1f1b", 2, 1).placements)
    assert e.kind is ErrorKind.DEADLOCK and pair in e.message
    p, m = 4, 16
    half = [["F"] * (p - r) for r in range(p)]  # 1F1B's fill and one more: legal, and idle half the time
    rows = []
    for r, fill in enumerate(map(len, half)):
        pairs = [f"({r}F{k};{r}B{k - fill})OVERLAP_F_B" for k in range(fill, m)]
        rows.append([f"{r}F{k}" for k in range(fill)] + pairs + [f"{r}B{k}" for k in range(m - fill, m)])
    slow = evaluate([Order.of(row) for row in rows], build("1f1b", p, m).placements, SKEWED)
    assert slow.makespan > 1.3 * cost(build("1f1b-overlap", p, m), SKEWED).makespan


@pytest.mark.parametrize("times", [OpTimes(), SKEWED, OpTimes(F=10, I=11, W=9)])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_zb1p_idles_for_f_plus_i_minus_w(p: int, times: OpTimes) -> None:
    for m in (2 * p, 2 * p + 1, 4 * p):
        found = cost(build("zb1p", p, m), times)
        assert idle(found) == [(p - 1) * (times.F + times.I - times.W)] * p
        assert found.peak_inflight == (p,) * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zbv_has_no_bubble_inside_a_rank_s_span_when_all_passes_last_equally_long(p: int) -> None:
    for m in (2 * p, 2 * p + 1, 4 * p):
        found = cost(build("zbv", p, m))
        assert found.span_bubble_fraction == 0
        assert idle(found) == [p - 1] * p
        assert max(found.peak_inflight) == 2 * p


@pytest.mark.parametrize("times", [OpTimes(), OpTimes(F=10, I=10, W=7), OpTimes(F=10, I=10, W=3)])
@pytest.mark.parametrize("saved", [0, 0.25, 0.5])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_s_formula_holds_where_i_is_f_and_w_no_more(p: int, times: OpTimes, saved: float) -> None:
    pair = times.F + times.I + times.W - saved
    bubble = (p // 2 - 1) * (pair + times.I - 2 * times.W)
    for m in (2 * p, 2 * p + 2, 4 * p):
        found = cost(build("dualpipe", p, m), times, pair)
        assert max(idle(found)) == bubble
        assert found.peak_inflight == (p + 1,) * p
        folded = cost(build("dualpipev", p // 2, m // 2), times, pair)
        assert folded.makespan == found.makespan
        assert max(folded.peak_inflight) == p + 1
