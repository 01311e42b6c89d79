"""`piper-sim sweep`: rows are what `simulate` says, and none is simulated twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from piper_sim.app import sweep

JOB = """[model]
config = "tiny-llama"
seq_len = 64
[cluster]
nodes = 1
gpus_per_node = 4
"""
GRID = ("--try", "parallel.pp=[1, 2, 3]", "--try", "schedule.name=['1f1b', 'gpipe']")


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.toml").write_text(JOB)
    return str(tmp_path / "job.toml")


def test_a_sweep_is_simulate_row_by_row_and_goes_on_where_it_was_cut_off(
    cli: Any, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = cli("sweep", job, *GRID, "--out", str(out)).json["rows"]
    assert len(first) == 6 and [r["fits"] for r in first] == [True] * 4 + [False] * 2
    alone = cli("simulate", job, "--set", "parallel.pp=2", "--set", "schedule.name=gpipe").json
    mine = next(r for r in first if (r["parallel.pp"], r["schedule.name"]) == (2, "gpipe"))
    assert {k: mine[k] for k in ("iteration_s", "plan_digest", "memory")} == {
        k: alone[k] for k in ("iteration_s", "plan_digest", "memory")
    }
    assert all("3" in r["reason"] for r in first[4:])
    kept = (out / sweep.KEPT).read_text()
    table = pd.read_parquet(out / "rows.parquet")
    assert sorted(table["iteration_s"].dropna()) == [r["iteration_s"] for r in first[:4]]
    # A kill in the middle of a line: that row and those behind it are simulated again, no others.
    lines = kept.splitlines(keepends=True)
    (out / sweep.KEPT).write_text("".join(lines[:3]) + lines[3][:40])
    asked = []
    predict = sweep.predict
    monkeypatch.setattr(sweep, "predict", lambda j: asked.append(j.parallel.pp) or predict(j))
    assert cli("sweep", job, *GRID, "--out", str(out)).json["rows"] == first
    assert asked.count(1) == 0 and asked.count(2) == 1
    assert (out / sweep.KEPT).read_text() == kept
    # Another job in the same file is not taken for it.
    Path(job).write_text(JOB.replace("64", "128"))
    assert cli("sweep", job, *GRID, "--out", str(out)).json["rows"][0]["job_digest"] != first[0]["job_digest"]


@pytest.mark.parametrize("key", ["model.config", "cluster.gpu", "costs.software"])
@pytest.mark.parametrize("named", ["by the job", "by a point"])
def test_rows_are_of_what_the_files_held(key: str, named: str, cli: Any, job: str, tmp_path: Path) -> None:
    """Each file changed where it lies: its rows are simulated anew, and say what `simulate` says."""
    preset, number = {
        "model.config": ("ir/workload/config/presets/tiny-llama", "num_hidden_layers"),
        "cluster.gpu": ("cost_models/hardware/h100-sxm", "host_launch_us"),
        "costs.software": ("cost_models/software/nanotron", "launch_us"),
    }[key]
    whole = json.loads((Path(__file__).parents[4] / f"{preset}.json").read_text())
    file = tmp_path / "mine.json"
    sets = ("--set", f"{key}=mine.json") if named == "by the job" else ()
    tries = ("--try", f"{key}=['mine.json']") if named == "by a point" else ("--try", "parallel.pp=[1]")
    seconds = []
    for factor in (1, 1, 2):
        file.write_text(json.dumps(whole | {number: factor * whole[number]}))
        (row,) = cli("sweep", job, *sets, *tries, "--out", str(tmp_path / "out")).json["rows"]
        alone = cli("simulate", job, "--set", f"{key}=mine.json").json
        assert row["iteration_s"] == alone["iteration_s"]
        seconds.append(row["iteration_s"])
    assert seconds[0] == seconds[1] != seconds[2]
    assert (tmp_path / "out" / sweep.KEPT).read_text().count("\n") == 2  # the second time, nothing was simulated


@pytest.mark.parametrize("name", [sweep.KEPT, "rows.parquet", "rows.csv"])
@pytest.mark.parametrize("content", ["mine", "mine\n", '{"other": 1}\n'])
def test_a_file_that_no_sweep_wrote_is_replaced_only_by_force(
    cli: Any, job: str, tmp_path: Path, name: str, content: str
) -> None:
    line = ("sweep", job, "--try", "parallel.pp=[1]", "--out", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    done = cli(*line)
    assert done.code == 2 and done.error["file"] == str(tmp_path / "out" / name)
    assert [(f.name, f.read_text()) for f in (tmp_path / "out").iterdir()] == [(name, content)]
    assert cli(*line, "--force").code == 0
    assert {f.name for f in (tmp_path / "out").iterdir()} == {sweep.KEPT, "rows.parquet", name}
    assert cli(*line).code == 0  # and now it is a sweep's


DAMAGED: list[Callable[[dict[str, Any]], object]] = [
    lambda row: row.update(found=5),
    lambda row: row["found"].pop("fits"),
    lambda row: row["found"].pop("iteration_s"),
    lambda row: row["found"].update(fits={}),
    lambda row: row["found"].update(iteration_s="0.1"),
    lambda row: row["found"].update(iteration_s=float("nan")),
    lambda row: row["found"].update(reason=-1),
    lambda row: row.update(key=[]),
]


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_row_is_refused_by_its_file(
    change: Callable[..., object], cli: Any, job: str, tmp_path: Path
) -> None:
    line = ("sweep", job, "--try", "parallel.pp=[1, 2]", "--out", str(tmp_path / "out"))
    whole, kept = cli(*line).json, tmp_path / "out" / sweep.KEPT
    first, second = kept.read_text().splitlines(keepends=True)
    row = json.loads(second)
    change(row)
    kept.write_text(first + json.dumps(row) + "\n")
    done = cli(*line)
    assert (done.code, done.error["file"]) == (2, str(kept)) and "--force" in done.error["suggestion"]
    assert cli(*line, "--force").json == whole == cli(*line).json
    assert kept.read_text() == first + second


@pytest.mark.parametrize(("holes", "last"), [(2**40, b"\n"), (0, b"\nhalf a row")])
def test_a_row_is_kept_without_reading_those_before_it(holes: int, last: bytes, tmp_path: Path) -> None:
    path, line = tmp_path / sweep.KEPT, b'{"key": "k", "found": {"fits": true}}\n'
    with path.open("wb") as file:
        file.truncate(holes)  # a terabyte that takes no room
        file.seek(holes)
        file.write(last)
    sweep._keep(str(tmp_path), "k", {"fits": True})
    assert path.stat().st_size == holes + 1 + len(line)
    with path.open("rb") as file:
        file.seek(holes + 1)
        assert file.read() == line


def test_rows_are_not_written_through_a_link(cli: Any, job: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / sweep.KEPT).symlink_to(tmp_path / "elsewhere")
    assert cli("sweep", job, "--try", "parallel.pp=[1]", "--out", str(tmp_path / "out")).code == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("base", ["h100-sxm", "nope"])
def test_hardware_that_is_not_there_is_a_row_and_stops_no_other(base: str, cli: Any, job: str, tmp_path: Path) -> None:
    line = (
        job,
        "--set",
        f"cluster.gpu={base}",
        "--try",
        "cluster.gpu=['h100-sxm', 'nope']",
        "--out",
        str(tmp_path / "out"),
    )
    for _ in range(2):
        rows = cli("sweep", *line).json["rows"]
        assert [r["fits"] for r in rows] == [True, False] and "nope" in rows[1]["reason"]


NO_LISTS = ["parallel.tp", "parallel.tp=4", "parallel.tp=[]", "tp=[1]", "parallel.tp=[1"]


@pytest.mark.parametrize("given", [*NO_LISTS, "model.vocab_size=[100, nan]", "parallel.tp=[2026-01-01]"])
def test_values_that_are_no_list_are_refused(cli: Any, job: str, given: str) -> None:
    done = cli("sweep", job, "--try", given)
    assert done.code == 2 and done.error["key"] == "--try"


def test_a_key_that_is_given_twice_loses_no_values(cli: Any, job: str) -> None:
    found = cli("sweep", job, "--try", "schedule.microbatches=[2]", "--try", "schedule.microbatches=[4]")
    assert (found.code, found.error["key"]) == (2, "--try") and "twice" in found.error["message"]


def test_a_wrong_job_is_no_row(cli: Any, job: str) -> None:
    done = cli("sweep", job, "--try", "parallel.tpp=[1]")
    assert done.code == 2 and done.error["key"] == "parallel.tpp"
    assert cli("sweep", job, "--set", "parallel.cp=x", "--try", "parallel.pp=[1]").code == 2


def test_a_typo_in_the_last_value_costs_no_simulation(cli: Any, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "predict", lambda job: pytest.fail("it went to work"))
    for typo, key in (("schedule.name=['1f1b', '1f1f']", "schedule.name"), ("parallel.zero=[1, 5]", "parallel.zero")):
        done = cli("sweep", job, "--try", "parallel.pp=[1, 2]", "--try", typo)
        assert (done.code, done.error["key"]) == (2, key)
