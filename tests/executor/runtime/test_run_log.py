"""What a run says of its steps while it goes on, and what it evaluates in between without touching the training."""

import json
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.job.load import job_from
from tests.executor.runs import run

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
    assert [x["step"] for x in lines] == [1, 2] and [x["tokens"] for x in lines] == [64, 96]
    for line in lines:
        step = line["step"]
        assert (line["loss"], line["grad_norm"]) == (ran.object["losses"][step], ran.object["grad_norms"][step])
        assert line["eval_loss"] == evals[step] and line["step_s"] > 0 and line["lr"] == 1e-3
    assert len(ran.trace.op) == len(plain.trace.op)  # what is evaluated is no step of the trace


def test_an_evaluation_needs_both_what_and_when() -> None:
    for key, other in (("eval_every", "eval_source"), ("eval_source", "eval_every")):
        with pytest.raises(PiperError, match=f"no {other}") as info:
            job_from({"model": {"config": "tiny-llama"}, "run": {key: 3 if key == "eval_every" else "x.txt"}})
        assert info.value.key == f"run.{other}"
