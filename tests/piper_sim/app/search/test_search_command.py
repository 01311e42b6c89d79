"""`piper-sim search`: its object, its exit codes, the winner as a job file."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "model": {"config": "tiny-llama", "seq_len": 256},
    "cluster": {"gpu": "gpus/mine.json", "nodes": 1, "gpus_per_node": 4, "memory_margin_GiB": 0, "speed": {"3": 0.5}},
    "schedule": {"global_batch": 16},
    "search": {"tp": [1, 2], "pp": [1, 2], "name": ["1f1b"], "zero": [1], "pin": ["recompute", "microbatch_size"]},
}
KEYS = {"best", "pareto", "rejected", "rejected_counts", "evaluated", "space", "proven", "seconds"}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "gpus").mkdir()
    preset = files("cost_models.hardware") / "h100-sxm.json"
    (tmp_path / "gpus" / "mine.json").write_text(preset.read_text(encoding="utf-8"))
    return write(tmp_path / "job.toml", TINY)


def write(path: Path, table: dict[str, Any]) -> str:
    from ir.job.load import job_from
    from ir.job.table import job_toml

    path.write_text(job_toml(job_from(table)), encoding="utf-8")
    return str(path)


def test_the_winner_is_a_job_that_simulates_to_the_same_numbers(cli: Any, tiny: str, tmp_path: Path) -> None:
    found = cli("search", tiny, "--out", str(tmp_path / "found"))
    assert found.code == 0 and set(found.json) >= KEYS and found.json["schema_version"] == 1
    assert found.json["proven"] and found.json["best"] == found.json["pareto"][0]
    best = {k: v for k, v in found.json["best"].items() if k not in ("changes", "job_digest")}
    again = cli("simulate", str(tmp_path / "found" / "best.toml")).json
    assert {k: again[k] for k in best} == best
    sets = [f"--set={k}={json.dumps(v)}" for k, v in found.json["best"]["changes"].items()]
    by_hand = cli("simulate", tiny, *sets).json
    assert {k: by_hand[k] for k in best} == best
    assert json.loads((tmp_path / "found" / "search.json").read_text()) == found.json
    assert cli("search", tiny, "--out", str(tmp_path / "found")).code == 2


@pytest.mark.parametrize(
    "sets", [["cluster.hbm_GiB=1"], ["search.memory_limit_GiB=0.5"]], ids=["too small a device", "too low a limit"]
)
def test_nothing_fits(cli: Any, tiny: str, sets: list[str]) -> None:
    found = cli("search", tiny, *[f"--set={s}" for s in sets])
    assert found.code == 3 and found.json["best"] is None and found.json["pareto"] == []
    assert found.json["nearest"]["fits"] is False and found.json["nearest"]["reason"] in found.json["reason"]
    assert found.json["rejected_counts"]["memory"] > 0 and found.json["proven"]


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["search.objective=cost"], "cluster.price"),
        (["search.tp=[3, 0]"], "search.tp"),
        (["search.microbatches=[1]"], "search.microbatches"),
        (['search.name=["1g1b"]'], "search.name"),
        (['search.pin=["tp"]'], "search.pin"),
        (["schedule.global_batch=6", "parallel.dp=4"], "schedule.global_batch"),
        (["schedule.csv=x.csv"], "schedule.csv"),
    ],
)
def test_what_cannot_be_searched_is_refused(cli: Any, tiny: str, sets: list[str], key: str) -> None:
    found = cli("search", tiny, *[f"--set={s}" for s in sets])
    assert found.code == 2 and found.json["error"]["key"] == key and found.json["error"]["file"] == tiny


def test_the_price_of_a_million_tokens(cli: Any, tiny: str) -> None:
    found = cli("search", tiny, "--set=search.objective=cost", "--set=cluster.price=2").json
    per_gpu = found["best"]["tokens_per_s_per_gpu"]
    assert found["objective"]["value"] == pytest.approx(2 / 3600 / per_gpu * 1e6)


def test_a_global_batch_is_microbatches_said_otherwise(cli: Any, tiny: str) -> None:
    given = cli("simulate", tiny).json
    counted = cli("simulate", tiny, "--set=schedule.microbatches=4").json
    assert given == counted and given["job_digest"] == counted["job_digest"]
    both = cli("simulate", tiny, "--set=schedule.microbatches=4", "--set=schedule.global_batch=6")
    assert both.code == 2 and both.error["suggestion"] == "global_batch = 8"
