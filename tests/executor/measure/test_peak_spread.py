"""Experts over ranks, their routing forced: the peak of each rank to the byte, whoever gets which rows."""

import pytest

from executor.measure.peak_bytes import peak_bytes, peaks
from executor.parallel.expert_all_to_all import ExpertTransfer
from tests.executor.measure.peak_runs import measured, planned
from tests.executor.measure.test_peak_bytes import SMALL_DEEPSEEK

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
    "columns": f"{TWO} parallel.dp=4 parallel.etp=2",
    "columns, bf16": f"{PIPED} parallel.ep=1 parallel.etp=2 precision.compute=bf16 schedule.recompute=full",
    "beside tensor parallel": f"{TWO} parallel.dp=1 parallel.tp=2 parallel.sequence_parallel=true",
}
USUAL = "one stage", "zb1p, all again, ZeRO-3", "shared experts, groups, prediction", "columns"


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_peak_found_alone_is_the_measured_peak_to_the_byte(name: str) -> None:
    sets = CASES[name].split()
    assert peak_bytes(*planned(*sets)) == measured(*sets)


def test_without_values_too() -> None:
    assert peaks(*planned(*TWO.split()), real=False) == measured(*TWO.split())


def test_ranks_that_get_more_rows_need_more() -> None:
    found = peak_bytes(*planned(*TWO.split())) or ()
    assert found[0] != found[1]
    assert peak_bytes(*planned(*TWO.split(), "routing.kind=balanced")) != found


def test_what_routers_choose_nobody_knows_before() -> None:
    assert peak_bytes(*planned(*TWO.split(), "routing.forced=false", "routing.kind=balanced")) is None


def test_rows_that_nobody_lets_go_of_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[ExpertTransfer] = []
    monkeypatch.setattr(ExpertTransfer, "end", lambda self: kept.append(self))
    found = peak_bytes(*planned(*TWO.split())) or ()
    assert all(a > b for a, b in zip(found, measured(*TWO.split()), strict=True))
