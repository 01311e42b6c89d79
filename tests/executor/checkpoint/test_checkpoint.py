"""A run that is taken up again equals the one that was not interrupted: to the bit, or under another plan to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest

from executor.checkpoint.manifest import read_manifest
from executor.launch import run as cli
from ir.core.errors import ErrorKind, PiperError
from ir.job.run_options import CheckpointOptions, JobRunOptions
from tests.executor.checkpoint import checkpoint_faults
from tests.executor.checkpoint.checkpoints import Case, covering, hashes, resumed, saved
from tests.executor.runs import Ran, distance, judged, merged, run

CASES = covering()
QUICK = 4
ROUNDING, VISIBLE = 1e-10, 1e-6


def same(a: Ran, b: Ran, from_step: int) -> None:
    """The second run is the end of the first one."""
    for key in ("losses", "grad_norms"):
        assert a.object[key][from_step:] == b.object[key] and len(b.object[key]) > 0
    for ours, theirs in ((a.params, b.params), (a.grads, b.grads)):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys() and all(np.array_equal(mine[n], other[n], equal_nan=True) for n in mine)


@pytest.mark.parametrize(
    "case", [*CASES[:QUICK], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[QUICK:])], ids=str
)
def test_a_run_taken_up_again_is_the_run_that_went_on(case: Case, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    whole = saved(first, *case.sets, steps=4, every=2)
    assert whole.object["first_step"] == 0 and whole.object["saved"] == str(first / "step-000004")
    assert (first / "step-000002").exists()
    end = resumed(first / "step-000002", *case.sets, steps=4, save=second)
    assert end.object["first_step"] == 2 and set(end.trace.step.tolist()) == {2, 3}
    same(whole, end, 2)
    a, b = (read_manifest(folder / "step-000004") for folder in (first, second))
    assert (a.files, a.parameters, a.tokens) == (b.files, b.parameters, b.tokens)  # moments and generators, too
    half = read_manifest(first / "step-000002")
    assert half.files != a.files and half.tokens == 2 * 4 * 8


def test_what_is_written_while_steps_go_on_is_what_they_began_from(tmp_path: Path) -> None:
    sets = "parallel.pp=1", "parallel.dp=2", "parallel.zero=3", "schedule.microbatches=2"
    now = saved(tmp_path / "now", *sets, steps=5, every=2)
    behind = saved(tmp_path / "behind", *sets, "run.save_behind=true", steps=5, every=2)
    same(now, behind, 0)
    assert behind.object["saved"] == str(tmp_path / "behind" / "step-000005")
    for step in ("step-000004", "step-000005"):
        assert hashes(tmp_path / "behind" / step) == hashes(tmp_path / "now" / step)


def test_one_line_starts_and_goes_on(tmp_path: Path) -> None:
    line = CheckpointOptions(save=str(tmp_path), resume="if-present")
    whole = run(steps=2)
    parts = [run(steps=steps, saving=line) for steps in (1, 2)]
    assert [p.object["first_step"] for p in parts] == [0, 1]
    same(whole, parts[1], 1)


def test_of_a_run_that_died_behind_its_last_save_nothing_is_left(tmp_path: Path) -> None:
    line = CheckpointOptions(save=str(tmp_path / "saved"), resume="if-present")
    first = run(steps=2, saving=line)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    (tmp_path / "job").mkdir()
    prepared, plan = judged(tmp_path / "job")
    again = partial(cli.run, prepared, plan)
    found, trace = again(JobRunOptions(prepared.ranks, steps=2), line)
    assert found.keys() == first.object.keys() and not trace.op
    assert (found["losses"], found["grad_norms"], found["first_step"], found["iteration_s"]) == ([], [], 2, None)
    assert found["saved"] == first.object["saved"] == str(tmp_path / "saved" / "step-000002")
    assert before == {p: p.stat().st_mtime_ns for p in before}
    for steps, resume in ((1, "if-present"), (2, str(tmp_path / "saved"))):  # not what is asked for; or to go on
        with pytest.raises(PiperError, match="has done 2"):
            again(JobRunOptions(prepared.ranks, steps=steps), replace(line, resume=resume))
    weights = next((tmp_path / "saved" / "step-000002").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(PiperError) as error:  # nothing is done of what cannot be read
        again(JobRunOptions(prepared.ranks, steps=2), line)
    assert error.value.kind is ErrorKind.IO


@pytest.mark.parametrize(
    "plan",
    ["ep2 dp2 zero1 pp2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tp2 dp2 zero3", "ep2 dp4 zero2"))],
)
def test_so_it_is_where_tensors_and_experts_are_cut(plan: str, trained: Trained, tmp_path: Path) -> None:
    folder, whole = trained(plan, sets := training(plan))
    end = resumed(folder / "step-000003", *PLANS[plan], *sets, steps=6, save=tmp_path)
    same(whole, end, 3)
    assert read_manifest(tmp_path / "step-000006").files == read_manifest(folder / "step-000006").files


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_run_that_is_asked_to_saves_and_ends(backend: str, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    saving = CheckpointOptions(str(tmp_path), every=3)
    first = run(steps=9, saving=saving, backend=backend)
    assert len(first.object["losses"]) == 1 and first.object["saved"] == str(tmp_path / "step-000001")
    assert {p.name for p in tmp_path.iterdir()} == {"lock", "step-000001"}
    end = run(steps=3, saving=replace(saving, resume=str(tmp_path)), backend=backend)
    assert [*first.object["losses"], *end.object["losses"]] == run(steps=3, backend=backend).object["losses"]


def test_saving_changes_nothing(tmp_path: Path) -> None:
    same(run(steps=3), saved(tmp_path, steps=3, every=1), 0)


def test_ranks_that_share_a_process_save_and_resume(tmp_path: Path) -> None:
    sets = "parallel.dp=2", "parallel.zero=2"
    whole = saved(tmp_path / "a", *sets, steps=3, every=2)
    end = resumed(tmp_path / "a" / "step-000002", *sets, steps=3, save=tmp_path / "b", backend="local")
    same(whole, end, 2)
    assert hashes(tmp_path / "b" / "step-000003") == hashes(tmp_path / "a" / "step-000003")


# -- another plan -----------------------------------------------------------------------------------------------------

DENSE = {
    "dp4 zero3": ("parallel.pp=1", "parallel.dp=4", "parallel.zero=3", "schedule.microbatches=1"),
    "dualpipe dp2": ("parallel.dp=2", "parallel.zero=1", "schedule.microbatches=2", "schedule.name=dualpipe"),
    "zbv": ("parallel.pp=2", "schedule.name=zbv"),
    "tp2 dp2 zero3": ("parallel.pp=1", "parallel.tp=2", "parallel.dp=2", "parallel.zero=3", "schedule.microbatches=2"),
    "buckets zero2": (
        "parallel.pp=1", "parallel.dp=2", "parallel.zero=2", "schedule.microbatches=2", "parallel.bucket_MiB=0.05"
    ),
    "pp4": ("parallel.pp=4", "schedule.name=interleaved-1f1b"),
    "tp2 cp2 zero1": ("parallel.pp=1", "parallel.tp=2", "parallel.cp=2", "parallel.zero=1"),
}  # fmt: skip
EXPERTS = {
    "ep2 dp2 zero1 pp2": ("parallel.dp=2", "parallel.ep=2", "parallel.zero=1", "schedule.microbatches=2"),
    "ep4 dp4 zero3": ("parallel.pp=1", "parallel.dp=4", "parallel.ep=4", "parallel.zero=3", "schedule.microbatches=1"),
    "ep2 dp4 zero2": ("parallel.pp=1", "parallel.dp=4", "parallel.ep=2", "parallel.zero=2", "schedule.microbatches=1"),
    "one rank": ("parallel.pp=1",),
}
PLANS = DENSE | {name: ("model.config=tiny-moe", *sets) for name, sets in EXPERTS.items()}
QUICK_PAIRS = (
    ("dp4 zero3", "dualpipe dp2"),
    ("zbv", "tp2 dp2 zero3"),
    ("ep2 dp2 zero1 pp2", "ep4 dp4 zero3"),
)
PAIRS = [(a, b) for family in (DENSE, EXPERTS) for a in family for b in family if a != b]
Sets = tuple[str, ...]
Trained = Callable[[str, Sets], tuple[Path, Ran]]


def training(*plans: str) -> Sets:
    """Of models that all of these plans can cut: two stages on each of four ranks, or on two at most."""
    return "optimizer.lr=0.01", "optimizer.clip_norm=0.3", f"model.num_hidden_layers={8 if 'pp4' in plans else 4}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Six steps under one of the plans, saved behind the third and the last."""

    @lru_cache
    def of(plan: str, sets: Sets) -> tuple[Path, Ran]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, saved(folder, *PLANS[plan], *sets, steps=6, every=3)

    return of


@pytest.mark.parametrize(
    ("first", "second"),
    [*QUICK_PAIRS, *(pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS if p not in QUICK_PAIRS)],
)
def test_another_plan_takes_it_up(
    first: str, second: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = trained(first, sets := training(first, second))
    monkeypatch.setattr(cli, "RANK", checkpoint_faults.saved_at_once)
    end = resumed(folder / "step-000003", *PLANS[second], *sets, steps=6, save=tmp_path / "other")
    loaded, there = (hashes(d / "step-000003") for d in (tmp_path / "other", folder))
    assert loaded == there and len(loaded) == 3 * len(merged(whole.params))
    last = hashes(folder / "step-000006")
    assert last.keys() == loaded.keys() and not set(last.values()) & set(loaded.values())
    numbers = np.array([*end.object["losses"], *end.object["grad_norms"]])
    wanted = np.array([*whole.object["losses"][3:], *whole.object["grad_norms"][3:]])
    assert np.abs(numbers / wanted - 1).max() <= ROUNDING
    assert distance(merged(end.params), merged(whole.params)) <= ROUNDING


def test_what_is_not_taken_up_is_seen(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole = trained("zbv", sets := training("zbv"))
    for fault in (checkpoint_faults.without_moments, checkpoint_faults.counted_anew, checkpoint_faults.same_data):
        monkeypatch.setattr(cli, "RANK", fault)
        end = resumed(folder / "step-000003", *PLANS["zbv"], *sets, steps=6)
        assert distance(merged(end.params), merged(whole.params)) > VISIBLE
