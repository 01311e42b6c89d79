"""Experts over ranks, their routing forced: the peak of each rank to the byte, whoever gets which rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.measure import alloc_spread
from executor.measure.alloc import take_lists
from ir.core.alloc import AllocList, Birth, Release
from ir.core.errors import PiperError
from ir.job.build import Prepared
from ir.plan.plan import Plan
from piper_sim.memory import splice
from piper_sim.memory.splice import exchanges, peaks
from piper_sim.memory.splice_rows import Rows
from tests.executor.measure.alloc_runs import measured, planned
from tests.executor.measure.test_alloc import SMALL_DEEPSEEK

# Few parameters, many tokens: what is exchanged makes the peak.
TWO = (
    "model.config=tiny-moe model.num_hidden_layers=2 model.vocab_size=16 parallel.pp=1 parallel.dp=2 parallel.ep=2 "
    "schedule.microbatches=2 routing.forced=true routing.kind=zipf routing.strength=0.8"
)
PIPED = f"{TWO} parallel.pp=2 model.num_hidden_layers=4 schedule.microbatches=3"
IDLE = "routing.kind=hot routing.strength=1e6 model.num_experts_per_tok=1"
DEEP = f"{SMALL_DEEPSEEK} parallel.dp=2 parallel.ep=2 routing.forced=true routing.kind=zipf model.num_hidden_layers=3"
CASES = {
    "one stage": TWO,
    "balanced": f"{TWO} routing.kind=balanced",
    "an idle rank": f"{TWO} {IDLE} parallel.dp=4 parallel.ep=4",
    "zb1p, all again, ZeRO-3": f"{PIPED} schedule.name=zb1p schedule.recompute=full parallel.zero=3",
    "dualpipe, ZeRO-1": f"{PIPED} schedule.name=dualpipe parallel.zero=1 parallel.dp=4",
    "zbv, bf16, ZeRO-2": f"{PIPED} schedule.name=zbv precision.compute=bf16 parallel.zero=2",
    "shared experts, groups, prediction": f"{DEEP} parallel.pp=2 parallel.layers=[1,2] schedule.name=dualpipe",
    "evened out, experts again": f"{DEEP} parallel.pp=1 model.aux_loss_alpha=0.1 schedule.recompute=mlp",
    "beside tensor parallel": f"{TWO} parallel.dp=1 parallel.tp=2 parallel.sequence_parallel=true",
}
USUAL = "one stage", "zb1p, all again, ZeRO-3", "shared experts, groups, prediction"


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_spliced_peak_is_the_measured_peak_to_the_byte(name: str) -> None:
    sets = CASES[name].split()
    prepared, plan = planned(*sets)
    assert exchanges(plan)
    assert peaks(prepared, plan, take_lists(prepared, plan)) == measured(*sets)


def test_ranks_that_get_more_rows_need_more() -> None:
    prepared, plan = planned(*TWO.split())
    found = measured(*TWO.split())
    assert found[0] != found[1]
    even, _ = planned(*TWO.split(), "routing.kind=balanced")
    assert peaks(even, plan, take_lists(prepared, plan)) != found


def test_lists_of_experts_do_not_depend_on_how_rows_are_routed() -> None:
    assert take_lists(*planned(*TWO.split())) == take_lists(*planned(*TWO.split(), *IDLE.split()[:2]))


# -- controls ---------------------------------------------------------------------------------------------------------


def test_some_bytes_more_for_each_row_that_backward_reads_are_seen() -> None:
    prepared, plan = planned(*TWO.split())
    lists = take_lists(prepared, plan)
    (key,) = (k for k in lists if k.startswith("F/experts"))
    more = {**lists, key: _more(lists[key])}
    usual, found = peaks(prepared, plan, lists), peaks(prepared, plan, more)
    assert all(b > a and (b - a) % 64 == 0 for a, b in zip(usual, found, strict=True))


def _more(made: AllocList) -> AllocList:
    """With 64 bytes more for each row of what F keeps."""
    births = [k for k, e in enumerate(made.events) if isinstance(e, Birth)]
    ended = {e.name for e in made.events if isinstance(e, Release)} | set(made.outputs)
    for n, k in enumerate(births):
        event = made.events[k]
        if isinstance(event, Birth) and event.each and f"F{n}" not in ended:
            events = (*made.events[:k], replace(event, bytes=event.bytes + 64), *made.events[k + 1 :])
            return replace(made, events=events)
    raise AssertionError("F keeps nothing")


def test_rows_that_nobody_lets_go_of_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, plan = planned(*TWO.split())
    lists = take_lists(prepared, plan)
    monkeypatch.setattr(splice._Rank, "_wait", lambda self, exchange: None)
    assert all(a > b for a, b in zip(peaks(prepared, plan, lists), measured(*TWO.split()), strict=True))


def test_bytes_that_are_no_bytes_for_each_row_are_refused() -> None:
    odd, even = AllocList.parse("+100 -x0 -F0"), AllocList.parse("+164 -x0 -F0")
    with pytest.raises(PiperError, match="are no bytes for each row"):
        alloc_spread._line(odd, even, 8)
    assert alloc_spread._line(odd, AllocList.parse("+200 -x0 -F0"), 4).text() == "+25n -x0 -F0"


def test_rows_are_those_that_a_run_exchanges() -> None:
    prepared, plan = planned(*TWO.split())
    assert _rows(prepared, plan) != _rows(*planned(*TWO.split(), "routing.kind=balanced"))
    tokens, top_k = 2 * 160, 2
    for mb in range(2):
        both = [Rows.of(prepared, plan, rank, splice.Places.of(plan)).got["l1", mb] for rank in range(2)]
        assert sum(both) == 2 * tokens * top_k


def _rows(prepared: Prepared, plan: Plan) -> list[Rows]:
    return [Rows.of(prepared, plan, rank, splice.Places.of(plan)) for rank in range(2)]
