"""What a run says of its steps while it goes on, and what it evaluates in between without touching the training.

And what it keeps of many: every loss, and a trace of the newest, the same ones on every rank.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from executor.launch import run as cli
from executor.launch.step_log import StepLog, norm_of_ranks
from executor.runtime import rank
from executor.runtime.batch import rank_batches
from executor.runtime.rank import traced_steps, train_rank
from executor.runtime.worker import RankContext
from ir.core.errors import PiperError
from ir.job.load import job_from
from ir.job.run_options import CheckpointOptions
from ir.plan.places import RankPlacement
from ir.trace.text import MAX_ROWS
from tests.executor.runs import judged, run

PLANS: list[tuple[str, ...]] = [
    ("parallel.zero=3", "parallel.dp=2", "schedule.microbatches=2"),
    ("schedule.name=dualpipe", "optimizer.clip_norm=0"),
]


@pytest.mark.parametrize("sets", PLANS, ids=" ".join)
def test_evaluations_and_lines_say_what_the_run_does(sets: tuple[str, ...], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(33, 33 + 4 * 8 + 1)))  # one step's windows: every step reads the same, differently
    data = (*sets, f"data.source={text}")
    tests = "run.eval_every=1", f"run.eval_source={text}", "run.log_every=2"
    plain, ran = run(*data, steps=3), run(*data, *tests, steps=3, out=tmp_path / "out")
    assert ran.object["losses"] == plain.object["losses"] and plain.object["evals"] == []
    assert ran.object["grad_norms"] == plain.object["grad_norms"]
    evals = {e["step"]: e["loss"] for e in ran.object["evals"]}
    assert [evals[0], evals[1]] == pytest.approx(ran.object["losses"][1:], rel=1e-12) and evals[2] < evals[1]
    lines: list[dict[str, Any]] = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [0, 1, 2] and [x["tokens"] for x in lines] == [32, 64, 96]
    for line in lines:
        step = line["step"]
        assert (line["loss"], line["grad_norm"]) == (ran.object["losses"][step], ran.object["grad_norms"][step])
        assert line["eval_loss"] == evals[step] and line["step_s"] > 0 and line["lr"] == 1e-3
    assert len(ran.trace.op) == len(plain.trace.op)  # what is evaluated is no step of the trace


def test_every_evaluation_has_a_line_and_no_other_step_gets_one(tmp_path: Path) -> None:
    sets = "run.eval_every=3", "run.eval_source=synthetic", "run.log_every=5"
    ran = run("parallel.pp=1", *sets, steps=6, out=tmp_path / "out")
    lines = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [2, 4, 5]
    found = [{"step": x["step"], "loss": x["eval_loss"]} for x in lines if "eval_loss" in x]
    assert found == ran.object["evals"] and [x["step"] for x in found] == [2, 5]


def test_a_run_that_goes_on_keeps_the_lines_of_what_it_goes_on_from(tmp_path: Path) -> None:
    """A kill may have left steps that are not saved, and half a line; a run from the start keeps nothing."""
    out, sets = tmp_path / "out", ("parallel.pp=1", "run.eval_every=2", "run.eval_source=synthetic")
    whole = run(*sets, steps=5, out=tmp_path / "whole").object
    run(*sets, steps=3, out=out, saving=CheckpointOptions(str(tmp_path / "saved"), 2))
    (tmp_path / "saved" / "step-000003").rename(tmp_path / "lost")
    log = out / "log.jsonl"
    with log.open("a") as file:
        file.write('{"step": 3, "loss')
    run(*sets, steps=5, out=out, saving=CheckpointOptions(resume=str(tmp_path / "saved")))
    lines = [json.loads(x) for x in log.read_text().splitlines()]
    assert [x["step"] for x in lines] == [0, 1, 2, 3, 4] and [x["loss"] for x in lines] == whole["losses"]
    assert [{"step": x["step"], "loss": x["eval_loss"]} for x in lines if "eval_loss" in x] == whole["evals"]
    run(*sets, steps=1, out=out)
    assert [json.loads(x)["step"] for x in log.read_text().splitlines()] == [0]


def test_an_evaluation_needs_both_what_and_when() -> None:
    for key, other in (("eval_every", "eval_source"), ("eval_source", "eval_every")):
        with pytest.raises(PiperError, match=f"no {other}") as info:
            job_from({"model": {"config": "tiny-llama"}, "run": {key: 3 if key == "eval_every" else "x.txt"}})
        assert info.value.key == f"run.{other}"


SETS = ("parallel.dp=2", "parallel.zero=1", "schedule.microbatches=3")


def forgetful(ctx: RankContext, **spec: Any) -> Any:
    """Keeps as many rows as three steps and a half have."""
    _, plan = ctx.given()
    rank.TRACED = _rows(plan) * 7 // 2
    return train_rank(ctx, **spec)


def slow_reader(ctx: RankContext, **spec: Any) -> Any:
    """Takes its time to read a step's tokens, though not those of an evaluation."""

    def batches(*of: Any) -> Any:
        read = rank_batches(*of)
        return read if len(of) > 3 else lambda step: (time.sleep(0.2), read(step))[1]

    rank.rank_batches = batches  # type: ignore[attr-defined]
    return train_rank(ctx, **spec)


@pytest.mark.parametrize(("every", "lines"), [(1, [0, 1, 2, 3, 4]), (2, [1, 2, 3, 4])])
def test_a_line_s_seconds_are_those_of_the_trace_from_end_to_end(
    every: int, lines: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "RANK", slow_reader)
    sets = "run.eval_every=3", "run.eval_source=synthetic", f"run.log_every={every}"
    ran = run(*sets, steps=5, out=tmp_path / "out")
    table = list(zip(ran.trace.step, ran.trace.start_s, ran.trace.end_s, strict=True))
    ends = {k: max(end for step, _, end in table if step == k) for k in range(5)}
    begins = ends | {k: min(start for step, start, _ in table if step == k + 1) for k in (-1, 2)}  # behind a test
    told = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in told] == lines
    for line in told:
        k = line["step"]
        assert line["step_s"] == pytest.approx(ends[k] - begins[k - 1], rel=1e-4)
        assert k in (0, 3) or line["step_s"] > 0.2


def test_a_line_s_norm_has_one_order_of_sums_whoever_tells_first(tmp_path: Path) -> None:
    prepared, _ = judged(tmp_path, "parallel.pp=1", "parallel.dp=4", "schedule.microbatches=1")
    note = {"step": 0, "losses": [], "test": [], "norm": None, "before": None, "start": 0.0, "end": 1.0}
    found: list[dict[str, Any]] = []
    log = StepLog(prepared, 1, tmp_path, [found.append])
    for one in (3, 2, 1, 0):
        squares = [2.0**-53 if one else 1.0]
        (tmp_path / f"steps-{one}").write_text(json.dumps(note | {"squares": squares}) + "\n")
        log.poll()
    assert [line["grad_norm"] for line in found] == [norm_of_ranks(None, [[1.0], *[[2.0**-53]] * 3])] == [1.0]


def _rows(plan: Any) -> int:
    """Of all ranks in one step."""
    places = RankPlacement.of(plan)
    return sum(int(plan.bounds[p + 1] - plan.bounds[p]) for p in map(places.program, range(places.ranks)))


def test_a_trace_has_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(*SETS, steps=8)
    monkeypatch.setattr(cli, "RANK", forgetful)
    ran = run(*SETS, steps=8)
    assert ran.object["losses"] == whole.object["losses"] and len(ran.object["losses"]) == 8
    rows = _rows(ran.plan)
    assert [len(r.trace.step) for r in (whole, ran)] == [8 * rows, 3 * rows]
    assert set(ran.trace.step.tolist()) == {5, 6, 7} and 0 < ran.object["iteration_s"] < 10


def test_four_million_rows_are_kept_but_one_step_at_least(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, plan = judged(tmp_path, *SETS)
    assert traced_steps(plan, prepared.ranks) == 4_000_000 // _rows(plan)
    assert rank.TRACED <= MAX_ROWS  # of a file
    monkeypatch.setattr(rank, "TRACED", 7)
    assert traced_steps(plan, prepared.ranks) == 1
