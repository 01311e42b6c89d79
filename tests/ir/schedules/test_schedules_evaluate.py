"""The evaluator of orders: right on orders that are not ours, and able to see a broken one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ir.core.errors import ErrorKind
from ir.core.order import Order
from ir.schedules.registry import build
from ir.schedules.schedule import OpTimes, Schedule, StagePlacement, check_complete
from tests.ir.schedules.evaluate import evaluate
from tests.refusals import refusal

ORACLES = Path(__file__).parents[2] / "data" / "oracles"


def cost(name: str, times: OpTimes, fb: float) -> float:
    schedule = build(name, 4, 9)
    return evaluate(schedule.orders, schedule.placements, times, fb).makespan


@pytest.mark.parametrize("name", ["zb2p", "v-half", "v-min"])
def test_the_evaluator_agrees_on_orders_that_are_not_ours(name: str) -> None:
    for key, case in json.loads((ORACLES / f"{name}.json").read_text()).items():
        ranks = tuple(range(case["P"]))
        home = ranks if case["V"] == 1 else ranks + ranks[::-1]
        orders = [Order.of(case["order"][str(r)]) for r in ranks]
        for text, expected in case["derived"].items():
            times = OpTimes(**{key: float(value) for key, value in (item.split("=") for item in text.split(","))})
            found = evaluate(orders, [StagePlacement(range(case["M"]), home)], times)
            assert (found.makespan, list(found.busy)) == (expected["makespan"], expected["busy"]), key
            assert found.peak_inflight == tuple(case["peak_inflight"][str(r)] for r in ranks), key


def test_time_is_monotone_in_every_duration() -> None:
    for name in ("1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev"):
        base = cost(name, OpTimes(3, 4, 2, 1), 10)
        for times, fb in (
            (OpTimes(4, 4, 2, 1), 10),
            (OpTimes(3, 5, 2, 1), 10),
            (OpTimes(3, 4, 3, 1), 10),
            (OpTimes(3, 4, 2, 2), 10),
            (OpTimes(3, 4, 2, 1), 11),
        ):
            assert cost(name, times, fb) >= base


def test_w_memory_lets_i_release_its_share() -> None:
    order = [Order.of(["0F0", "0F1", "0I0", "0F2", "0I1", "0I2", "0W0", "0W1", "0W2"])]
    found = evaluate(order, [StagePlacement(range(3), (0,))], OpTimes(w_memory=0.25))
    assert (found.peak_inflight, found.peak_held) == ((3,), (2.25,))


def mutated(schedule: Schedule, rank: int, change: Any) -> list[Order]:
    orders = list(schedule.orders)
    cells = orders[rank].cells()
    change(cells)
    orders[rank] = Order.of(cells)
    return orders


def swap(text: str, other: str) -> Any:
    def change(cells: list[str]) -> None:
        i, j = cells.index(text), cells.index(other)
        cells[i], cells[j] = cells[j], cells[i]

    return change


INCOMPLETE = SimpleNamespace(
    one_f_missing=lambda cells: cells.remove("0F2"),
    one_w_missing=lambda cells: cells.remove("0W2"),
    one_f_twice=lambda cells: cells.append("0F2"),
    whole_backward_besides_i=lambda cells: cells.append("0B2"),
    microbatch_too_many=lambda cells: cells.append("0F9"),
    stage_of_another_rank=lambda cells: cells.append("1F0"),
    stage_too_many=lambda cells: cells.append("9F0"),
)


@pytest.mark.parametrize("change", vars(INCOMPLETE))
def test_an_incomplete_order_is_refused(change: str) -> None:
    schedule = build("zb1p", 2, 4)
    check_complete(schedule.orders, schedule.placements)
    caught = refusal(evaluate, mutated(schedule, 0, getattr(INCOMPLETE, change)), schedule.placements)
    assert caught.kind is ErrorKind.ILLEGAL_PLAN


@pytest.mark.parametrize(("text", "other"), [("0F0", "0I0"), ("0I1", "0W1"), ("0F0", "0W3")])
def test_an_order_that_waits_for_itself_is_a_deadlock(text: str, other: str) -> None:
    schedule = build("zb1p", 2, 4)
    assert refusal(evaluate, mutated(schedule, 0, swap(text, other)), schedule.placements).kind is ErrorKind.DEADLOCK


def test_a_deadlock_tells_where_every_rank_stands() -> None:
    orders = [Order.of(["0F0", "0B0", "0F1", "0B1"]), Order.of(["1F1", "1B1", "1F0", "1B0"])]
    caught = refusal(evaluate, orders, [StagePlacement(range(2), (0, 1))])
    assert caught.message.splitlines() == [
        "no rank can move:",
        "  rank 0 stands at 0B0 (op 1 of its order), waiting for 1B0",
        "  rank 1 stands at 1F1 (op 0 of its order), waiting for 0F1",
    ]


def test_a_pair_waits_for_both_inputs_and_hands_over_at_its_end() -> None:
    orders = [Order.of(["0F0", "0F1", "0B0", "0B1"]), Order.of(["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"])]
    found = evaluate(orders, [StagePlacement(range(2), (0, 1))], OpTimes(p2p=1), fb=5)
    assert found.makespan == 3 + 5 + 2 + 1 + 2  # pair waits for 0F1, 0B1 for 1B1
    assert found.busy == (6, 1 + 5 + 2)
    assert found.peak_inflight == (2, 2)
