"""`schedule` against numbers that others computed: exact where they are exact."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from ir.schedules.registry import NAMES
from piper_sim.study.pipeline import PassTimes, report, run_schedule

DATA = Path(__file__).parents[2] / "data"
ORACLES = DATA / "oracles"


def table5() -> list[dict[str, str]]:
    lines = (DATA / "zero_bubble_rates.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("row", table5(), ids=lambda r: f"{r['case']}-{r['schedule']}")
def test_bubble_rates_of_the_zero_bubble_paper_to_all_printed_digits(row: dict[str, str]) -> None:
    name = {"1F1B": "1f1b", "ZB-H1": "zb1p", "ZB-1p": "zb1p"}[row["schedule"]]
    times = PassTimes.parse(f"F={row['TF_ms']},I={row['TB_ms']},W={row['TW_ms']},p2p={row['Tcomm_ms']}")
    found = report(run_schedule(name, int(row["pp"]), int(row["microbatches"]), 1, times))
    assert round(float(str(found["span_bubble_fraction"])), 4) == float(row["bubble_rate"])


# ASTRA-sim analytical 4f387bc, congestion-aware, built and run: F = 1 ms, B = 2 ms, 50 MB at 50 GiB/s and 500 ns a hop.
@pytest.mark.parametrize(
    ("ranks", "mbs", "nanoseconds"), [(8, 64, 328545928), (16, 256, 1286365576), (64, 1024, 5255099080)]
)
def test_astra_sim_to_the_nanosecond(ranks: int, mbs: int, nanoseconds: int) -> None:
    found = report(run_schedule("1f1b", ranks, mbs, times=PassTimes.parse("F=0.001,B=0.002,p2p=0.000931822")))
    assert found["makespan"] == nanoseconds / 1e9


# Nobody has published tables of these: tests/ir/schedules/test_schedules_fixed.py holds them to closed forms.
WITHOUT = {"1f1b-overlap", "interleaved-1f1b-overlap"}


def test_every_other_family_has_oracles() -> None:
    assert {p.stem for p in ORACLES.glob("*.json")} >= set(NAMES) - WITHOUT and set(NAMES) >= WITHOUT


@pytest.mark.parametrize("family", sorted(set(NAMES) - WITHOUT))
def test_every_oracle_of_a_family(family: str) -> None:
    cases: dict[str, Any] = json.loads((ORACLES / f"{family}.json").read_text())
    assert cases
    for key, case in cases.items():
        exact = "torch" in case["source"] or "deepseek" in case["source"]
        peak = list(case["peak_inflight"].values())
        for text, expected in case["derived"].items():
            found: Any = report(run_schedule(family, case["P"], case["M"], case["V"], PassTimes.parse(text)))
            where = f"{key} {text}"
            if exact:
                assert found["order"] == case["order"], where
                assert found["makespan"] == expected["makespan"], where
                assert list(found["busy"].values()) == expected["busy"], where
                idle = expected["span_bubble_fraction"]
                assert found["span_bubble_fraction"] == pytest.approx(idle, abs=1e-12), where
                assert list(found["peak_inflight"].values()) == peak, where
            else:
                assert found["makespan"] <= expected["makespan"], where
                assert max(found["peak_inflight"].values()) <= max(peak), where
