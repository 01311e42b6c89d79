"""Backtests: strict tables, residuals by class, a correction that is found where there is one and nowhere else."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.published.sets import SETS
from ir.core.errors import ErrorKind
from ir.job.load import job_from
from ir.job.schema import Job
from ir.job.table import table_of
from piper_sim.study.history.backtest import backtest
from piper_sim.study.history.correct import PredictionCorrection, suggest
from piper_sim.study.history.show import applied, backtest_object, backtest_text
from piper_sim.study.history.table import parse_runs
from piper_sim.study.predict import predict
from tests.refusals import refusal

TABLE = {
    "model": {"config": "tiny-llama", "seq_len": 128},
    "cluster": {"gpu": "a100-sxm-80gb"},
    "parallel": {"pp": 2, "dp": 2},
    "schedule": {"name": "1f1b", "microbatches": 4},
}
RUNS = [(name, mbs, size) for name in ("1f1b", "gpipe", "zb1p") for mbs in (4, 8) for size in (1, 2)]


def seconds(name, mbs, size):
    return predict(job_from(TABLE, [f"schedule.name={name}", *_sets(mbs, size)])).iteration_s


def _sets(mbs, size):
    return [f"schedule.microbatches={mbs}", f"schedule.microbatch_size={size}"]


@pytest.fixture(scope="module")
def truth():
    return {run: seconds(*run) for run in RUNS}


def job(folder: Path, measured, apply: bool = False) -> Job:
    """A job whose history is RUNS with these seconds."""
    lines = ["schedule.name,schedule.microbatches,schedule.microbatch_size,iteration_s"]
    lines += [f"{name},{mbs},{size},{s!r}" for (name, mbs, size), s in zip(RUNS, measured, strict=True)]
    (folder / "past.csv").write_text("\n".join(lines) + "\n")
    table = {**TABLE, "history": {"file": "past.csv", "apply": apply}}
    return job_from(table, file=str(folder / "job.toml"))


def found(job: Job):
    past = backtest(job)
    return past, suggest(past.residuals, past.columns)


def test_the_simulator_s_own_runs_have_no_residual(tmp_path, truth):
    past, suggestion = found(job(tmp_path, truth.values()))
    assert [r.time for r in past.residuals] == pytest.approx([0.0] * len(RUNS), abs=1e-12)
    assert suggestion is None
    assert "no correction is suggested" in backtest_text(past)


def test_an_injected_factor_is_recovered_and_only_applied_when_asked_for(tmp_path, truth):
    slow = [1.2 * s for s in truth.values()]
    past, suggestion = found(job(tmp_path, slow))
    assert (suggestion.factor, suggestion.by, suggestion.rows) == (pytest.approx(1.2), "", len(RUNS))
    assert suggestion.before == pytest.approx(1 - 1 / 1.2) and suggestion.after < 1e-9
    assert [r.time for r in past.residuals] == pytest.approx([1 / 1.2 - 1] * len(RUNS))
    quiet, loud = job(tmp_path, slow), job(tmp_path, slow, apply=True)
    p = predict(quiet).to_dict()
    assert applied(p, quiet, past) == p, "never silently"
    out = applied(p, loud, past)
    assert out["iteration_s"] == pytest.approx(1.2 * p["iteration_s"])
    assert out["correction"]["raw"]["iteration_s"] == p["iteration_s"]
    assert "corrected by history" in out["cost_source"]
    assert out["mfu"] == pytest.approx(p["mfu"] / 1.2)
    assert out["iteration_s_interval"] == pytest.approx([1.2 * s for s in p["iteration_s_interval"]])
    assert out["correction"]["raw"]["iteration_s_interval"] == p["iteration_s_interval"]
    chances = {"chance": 0.5, "without_s": 1.0, "worst_s": 2.0}
    lengthened = applied(p | {"slow_nodes": chances}, loud, past)["slow_nodes"]
    assert lengthened == pytest.approx({"chance": 0.5, "without_s": 1.2, "worst_s": 2.4})
    for row in out["time_breakdown"].values():
        assert sum(row.values()) == pytest.approx(out["iteration_s"])


def test_a_factor_with_scatter_is_recovered_within_it(tmp_path, truth):
    noise = random.Random(1)
    _, suggestion = found(job(tmp_path, [1.2 * math.exp(noise.gauss(0, 0.03)) * s for s in truth.values()]))
    assert suggestion.factor == pytest.approx(1.2, rel=0.03)
    assert 0 < suggestion.after < 0.05 < suggestion.before


def test_a_factor_of_one_class_is_laid_at_its_column(tmp_path, truth):
    measured = [s * (1.3 if run[0] == "zb1p" else 1.0) for run, s in truth.items()]
    asked = job(tmp_path, measured)
    past, suggestion = found(asked)
    assert suggestion.by == "schedule.name"
    assert (suggestion.factor, suggestion.factors) == (1.0, {"zb1p": pytest.approx(1.3)})
    slow = replace(asked, schedule=replace(asked.schedule, name="zb-h1"))
    assert (suggestion.of(asked), suggestion.of(slow)) == (pytest.approx(1), pytest.approx(1.3)), "aliases count"
    classes = {(c["column"], c["value"]): c for c in backtest_object(past)["classes"]}
    assert classes["schedule.name", "zb1p"]["worst"] == pytest.approx(1 - 1 / 1.3)
    assert classes["schedule.name", "1f1b"]["worst"] < 1e-9


@pytest.mark.parametrize(("column", "value"), [("schedule.name", "1f1b"), ("parallel.dp", "2"), ("cluster.nodes", "1")])
def test_a_job_that_leaves_its_class_open_is_corrected_as_one_that_says_it(column, value):
    """1F1B is what nobody names, dp what is left of the GPUs: one plan, one factor."""
    said = job_from({**TABLE, "cluster": {"gpus_per_node": 4, "nodes": 1}})
    left_open = job_from({**TABLE, "cluster": {"gpus_per_node": 4}, "parallel": {"pp": 2, "dp": 2}})
    if column == "parallel.dp":
        left_open = job_from({**TABLE, "cluster": {"gpus_per_node": 4, "nodes": 1}, "parallel": {"pp": 2}})
    if column == "schedule.name":
        left_open = job_from({**TABLE, "schedule": {"microbatches": 4}})
    correction = PredictionCorrection(1.0, 9, 0.2, 0.0, column, {value: 1.5})
    assert predict(said).to_dict()["plan_digest"] == predict(left_open).to_dict()["plan_digest"]
    assert correction.of(said) == correction.of(left_open) == 1.5


def test_shuffled_seconds_suggest_nothing(tmp_path, truth):
    """Nothing systematic is left: whatever is suggested then is noise."""
    past = backtest(job(tmp_path, truth.values()))
    predicted = [r.predicted_s for r in past.residuals]
    suggested = 0
    for seed in range(200):
        measured = random.Random(seed).sample(list(truth.values()), len(truth))
        rows = [replace(r, time=p / m - 1) for r, p, m in zip(past.residuals, predicted, measured, strict=True)]
        suggested += suggest(rows, past.columns) is not None
    assert suggested <= 4
    assert found(job(tmp_path, random.Random(7).sample(list(truth.values()), len(truth))))[1] is None


def test_few_runs_suggest_nothing():
    rows = [SimpleNamespace(time=-0.2, traits={}) for _ in range(3)]
    assert suggest(rows[:2], ()) is None
    assert suggest(rows, ()).factor == pytest.approx(1.25), "the control"


def test_runs_that_ran_out_of_memory_and_those_said_not_to_fit_are_told_apart(tmp_path):
    text = "\n".join(
        [
            "# runs of last week",
            "cluster.hbm_GiB,iteration_s,peak_allocated_GiB,class,note",
            ",1.0,2.5,good,",
            "3,1.0,,tight,",
            '3,oom,,tight,"died, twice"',
            ",OOM,,good,",
        ]
    )
    (tmp_path / "past.csv").write_text(text)
    asked = job_from({**TABLE, "history": {"file": "past.csv"}}, file=str(tmp_path / "job.toml"))
    past, _ = found(asked)
    out = backtest_object(past)
    assert [r["line"] for r in out["runs"]] == [3, 4, 5, 6]
    assert [r["fits"] for r in out["runs"]] == [True, False, False, True]
    assert out["fits"] == {"ran_fits": 1, "ran_does_not_fit": 1, "oom_fits": 1, "oom_does_not_fit": 1}
    assert [c["n"] for c in out["classes"] if c["of"] == "time" and not c["column"]] == [2], "oom has no seconds"
    peak = predict(job_from(TABLE)).planned.memory.peak.max()
    assert past.residuals[0].memory == pytest.approx(peak / (2.5 * 2**30) - 1)
    assert {c["value"] for c in out["classes"] if c["column"] == "class"} == {"good", "tight"}
    assert "1 of those that ran are said not to fit" in backtest_text(past)
    assert "1 of 2 that ran out of memory are said not to fit" in backtest_text(past)


HEAD = "parallel.pp,iteration_s\n"


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("", "line 1", None),
        ("parallel.pp,iteration_s\n", "line 2", "leave [history] out"),
        ("parallel.ppp,iteration_s\n2,1\n", "line 1, column parallel.ppp", "parallel.pp"),
        ("iteration_ms\n2\n", "line 1, column iteration_ms", None),
        ("paralel.pp,iteration_s\n2,1\n", "line 1, column paralel.pp", "parallel.pp"),
        ("schedule.builder,iteration_s\nx.py:f,1\n", "line 1, column schedule.builder", "name it in the job"),
        ("history.file,iteration_s\na,1\n", "line 1, column history.file", None),
        ("parallel.pp\n2\n", "line 1, column iteration_s", "add it: measured seconds of a step, or oom"),
        ("iteration_s,iteration_s\n1,2\n", "line 1, column iteration_s", "once"),
        (HEAD + "2,1\n\n2,\n", "line 4, column iteration_s", None),
        (HEAD + "2,1.5 s\n", "line 2, column iteration_s", "1.5"),
        (HEAD + "2,-1\n", "line 2, column iteration_s", "1"),
        (HEAD + "2,1250 ms\n", "line 2, column iteration_s", "1.25"),
        (HEAD + "2,1.5e-3 s\n", "line 2, column iteration_s", "0.0015"),
        (HEAD + "2,2 min\n", "line 2, column iteration_s", None),
        (HEAD + "2,nan\n", "line 2, column iteration_s", None),
        (HEAD + "2,1e9\n", "line 2, column iteration_s", None),
        (HEAD + "2,1,3\n", "line 2", "quote cells that hold a comma"),
        (HEAD + "2\n", "line 2", "one comma for each empty cell"),
        (HEAD + '2,"1\n', "line 2", None),
        ("iteration_s,peak_allocated_GiB\noom,4\n", "line 2, column peak_allocated_GiB", "leave it empty"),
        ("iteration_s,peak_allocated_GiB\n1,81920 MiB\n", "line 2, column peak_allocated_GiB", None),
    ],
)
def test_a_bad_table_is_refused_by_line_and_column(text, key, fix):
    e = refusal(parse_runs, text)
    assert (e.key, e.kind) == (key, ErrorKind.JOB)
    if fix is not None:
        assert e.suggestion == fix


@pytest.mark.parametrize(
    ("column", "value", "key", "fix"),
    [
        ("schedule.name", "dualpip", "line 2, column schedule.name", "dualpipe"),
        ("parallel.pp", "two", "line 2, column parallel.pp", None),
        ("parallel.tp", "3", "line 2", None),  # the error is laid at pp, which the row does not set
        ("model.hidden_sise", "64", "line 2", None),
        ("parallel.dp", "3", "line 2, column parallel.dp", "dp = 4"),
    ],
)
def test_a_row_that_no_job_can_be_is_refused_not_dropped(tmp_path, column, value, key, fix):
    file = tmp_path / "past.csv"
    file.write_text(f"{column},cluster.nodes,iteration_s\n{value},,1\n")
    table = {**TABLE, "cluster": {**TABLE["cluster"], "nodes": 1}, "parallel": {"pp": 2}}
    e = refusal(backtest, job_from({**table, "history": {"file": "past.csv"}}, file=str(tmp_path / "job.toml")))
    assert e.file == str(file)
    assert e.key.startswith(key)
    if fix is not None:
        assert e.suggestion == fix


def test_no_file_and_nothing_to_apply_are_said(tmp_path):
    e = refusal(backtest, job_from({**TABLE, "history": {"file": "none.csv"}}, file=str(tmp_path / "job.toml")))
    assert e.kind is ErrorKind.IO and e.key == "history.file"
    assert refusal(backtest, job_from({**TABLE, "history": {"apply": True}})).key == "history.apply"
    assert backtest(job_from(TABLE)) is None


@pytest.mark.parametrize("name", ["zero_bubble", "dgxc", "modelzoo", "llm_foundry"])
def test_a_job_s_table_reads_as_the_job_again(name):
    for row in next(s for s in SETS if s.name == name).rows()[:2]:
        read = job_from(row.job)
        assert job_from(table_of(read)) == read


def test_the_page_s_table_is_one():
    page = (Path(__file__).parents[3] / "docs" / "HISTORY.md").read_text()
    runs = parse_runs(page.split("```csv\n")[1].split("```")[0])
    assert [r.iteration_s for r in runs] == [12.31, 11.87, 12.9, None]
    assert runs[0].settings == {"schedule.name": "1f1b", "parallel.pp": "4", "cluster.nodes": "16"}
    assert runs[2].note == "new driver" and runs[3].label == "week 14"
