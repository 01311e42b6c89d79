"""`piper-sim search`: its object, its exit codes, the winner as a job file."""

import errno
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ir.job import load_job
from piper_sim.study.inputs import named_files

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


def test_what_was_found_is_said_though_the_disk_is_full(
    cli: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes hours; its folder could be written to when it began."""

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    result = cli("search", tiny, "--out", str(tmp_path / "found"), as_json=False)
    assert result.code == 2 and "No space left" in result.err
    assert "the best is proven" in result.out and "written to" not in result.out


def test_the_winner_names_the_job_s_files_from_where_it_lies(cli: Any, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("tokens.bin", "tests.bin", "runs.csv", "model.safetensors"):
        (tmp_path / "data" / name).write_text("history.file is read by backtests alone")
    (tmp_path / "synthetic").write_text("a word of [data], and no file")
    named = {"data.source": "data/tokens.bin", "run.eval_source": "synthetic", "history.file": "data/runs.csv"}
    sets = [f"--set={k}={v}" for k, v in {**named, "model.weights": "data", "run.eval_every": "2"}.items()]
    assert cli("search", tiny, *sets, "--out", str(tmp_path / "found")).code == 0
    job = load_job(str(tmp_path / "found" / "best.toml"))
    found = {k: f.path.resolve() for k, f in named_files(job).items()}
    places = {"cluster.gpu": "gpus/mine.json", "data.source": "data/tokens.bin", "history.file": "data/runs.csv"}
    assert found == {k: tmp_path / v for k, v in {**places, "model.weights": "data"}.items()}
    assert job.run.eval_source == "synthetic"


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


@pytest.mark.parametrize(
    ("sets", "fix"),
    [
        ('name="zbv"', 'name = ["zbv"]'),
        ("cp=2", "cp = [2]"),
        ('merge=["template", "profil"]', 'merge = ["template", "profile"]'),
        ("zero=[1, 4]", "zero = [1, 3]"),
        ('name=["1f1b", "dualpip"]', 'name = ["1f1b", "dualpipe"]'),
        ("layers=[4, 4]", "layers = [[4, 4]]"),
        ('layers=["blanced", "even"]', 'layers = ["balanced", "even"]'),
        ('order=["tp cp dp"]', 'order = ["tp cp ep dp pp"]'),
        ('pin=["stage_per_rank", "microbatch_size"]', 'pin = ["stages_per_rank", "microbatch_size"]'),
    ],
)
def test_what_is_put_in_place_of_a_wrong_list_is_what_was_meant(cli: Any, tiny: str, sets: str, fix: str) -> None:
    found = cli("search", tiny, f"--set=search.{sets}")
    assert found.code == 2 and found.json["error"]["suggestion"] == fix
    assert found.json["error"]["key"] == f"search.{sets.partition('=')[0]}"
    assert load_job(tiny, [f"search.{fix}"]).search.overrides


def test_the_price_of_a_million_tokens(cli: Any, tiny: str) -> None:
    found = cli("search", tiny, "--set=search.objective=cost", "--set=cluster.price=2").json
    per_gpu = found["best"]["tokens_per_s_per_gpu"]
    assert found["objective"]["value"] == pytest.approx(2 / 3600 / per_gpu * 1e6)


def test_a_global_batch_is_microbatches_said_otherwise(cli: Any, tiny: str) -> None:
    given = cli("simulate", tiny).json
    counted = cli("simulate", tiny, "--set=schedule.microbatches=4").json
    assert given == counted and given["job_digest"] == counted["job_digest"]
    odd = cli("simulate", tiny, "--set=schedule.global_batch=6")
    assert odd.code == 2 and odd.error["suggestion"] == "global_batch = 8"
    for first, last in (("microbatches=4", "global_batch=8"), ("global_batch=8", "microbatches=4")):
        both = cli("simulate", tiny, f"--set=schedule.{first}", f"--set=schedule.{last}")
        assert both.code == 2 and "both given" in both.error["message"], "neither is dropped without a word"


SAYS: dict[str, Any] = {
    "model": {"config": "tiny-llama", "num_hidden_layers": 8, "seq_len": 256},
    "cluster": {"nodes": 1, "gpus_per_node": 4},
    "parallel": {"pp": 2, "layers": "even"},
    "schedule": {"name": "1f1b", "microbatches": 4},
    "search": {"tp": [1], "pp": [2], "cp": [1], "zero": [1], "microbatch_size": [1], "pin": ["layers"]},
}


def test_what_wins_can_be_said_by_the_framework_that_is_named(cli: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "job.toml", SAYS)

    def found_and_said(name: str, *flags: str) -> tuple[Any, int]:
        found = cli("search", path, "--budget", "300", "--out", str(tmp_path / name), *flags).json
        best, launch = str(tmp_path / name / "best.toml"), str(tmp_path / name / "launch")
        return found, cli("export", best, "--to", "megatron", "--out", launch).code

    free, code = found_and_said("free")
    assert code == 2, "the control: Megatron has no such schedule"
    for workers in ("1", "2"):
        found, code = found_and_said(workers, "--to", "megatron", "--workers", workers)
        assert code == 0 and found["proven"] and found["best"]["iteration_s"] >= free["best"]["iteration_s"]
        names = {p["changes"].get("schedule.name", "1f1b") for p in found["pareto"]}
        assert names <= {"1f1b", "interleaved-1f1b"}
    assert any(r["kind"] == "illegal" and "megatron cannot say" in r["reason"] for r in found["rejected"])


def test_a_journal_of_what_any_launch_may_be_is_none_of_one_framework_s(cli: Any, tmp_path: Path) -> None:
    ways = {"name": ["1f1b", "zbv"], "stages_per_rank": [1, 2], "ep": [1], "layers": ["even"], "recompute": ["none"]}
    more = {"search": SAYS["search"] | ways | {"dp_replicate": [1], "pin": ["etp"]}}
    kept = ("--journal", str(tmp_path / "kept.jsonl"))
    path = write(tmp_path / "job.toml", SAYS | more)
    assert cli("search", path, *kept).code == 0
    again = cli("search", path, *kept, "--to", "megatron")
    assert again.code == 2 and again.error["key"] == "--journal"


@pytest.mark.parametrize(
    ("to", "pp", "zero"),
    [("megatron-bridge", 2, 1), ("primus", 2, 1), ("torchtitan", 2, 2), ("automodel", 2, 0), ("accelerate", 1, 1)],
)
def test_what_wins_for_each_framework_is_one_of_its_launches(
    cli: Any, tmp_path: Path, to: str, pp: int, zero: int
) -> None:
    table = {"model": {"config": "llama3-8b", "seq_len": 2048}, "cluster": {"nodes": 1, "gpus_per_node": 8}}
    table |= {"parallel": {"pp": pp, "zero": zero}, "schedule": {"microbatches": 4, "recompute": "full"}}
    path = write(tmp_path / "job.toml", table | {"search": {"tp": [1], "cp": [1], "pp": [1, 2]}})
    found = cli("search", path, "--to", to, "--budget", "20", "--out", str(tmp_path / "x"))
    assert found.code == 0, found.json
    best = str(tmp_path / "x" / "best.toml")
    assert cli("export", best, "--to", to, "--out", str(tmp_path / "launch")).code == 0


def test_a_framework_that_nobody_knows_is_refused(cli: Any, tiny: str) -> None:
    found = cli("search", tiny, "--to", "megatrn")
    assert found.code == 2 and found.json["error"]["key"] == "--to" and found.json["error"]["suggestion"] == "megatron"
