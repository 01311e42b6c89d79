"""`[schedule] recompute_layers`: which layers each spelling means, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind
from ir.core.ops import Pass
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from tests.refusals import refusal

LAYERS = 8


def _job(name: str = "1f1b", pp: int = 2, model: str = "tiny-llama", **schedule: Any) -> PreparedJob:
    table = {
        "model": {"config": model, "num_hidden_layers": LAYERS},
        "parallel": {"pp": pp, "dp": 1},
        "schedule": {"name": name, "microbatches": 8, **schedule},
    }
    return prepare(job_from(table))


def _again(job: PreparedJob) -> set[int]:
    return {n.tags["L"] for n in job.base.nodes if n.kind is Pass.R and "L" in n.tags}


@given(st.lists(st.integers(0, LAYERS - 1)))
def test_a_list_is_these_layers(layers: list[int]) -> None:
    assert _again(_job(recompute="full", recompute_layers=layers)) == set(layers)


@given(st.integers(0, 12) | st.none(), st.integers(0, 12) | st.none(), st.integers(1, 4) | st.none())
def test_a_slice_is_pythons(start: int | None, stop: int | None, step: int | None) -> None:
    said = ["" if x is None else str(x) for x in (start, stop)] + ([] if step is None else [str(step)])
    assert _again(_job(recompute="full", recompute_layers=":".join(said))) == set(range(LAYERS)[start:stop:step])


@pytest.mark.parametrize(
    ("name", "pp", "count", "layers"),
    [
        ("1f1b", 2, 1, {0, 4}),
        ("1f1b", 1, 3, {0, 1, 2}),
        ("interleaved-1f1b", 2, 1, {0, 2, 4, 6}),
        ("zbv", 2, 9, set(range(8))),
        ("dualpipe", 2, 3, {0, 1, 2, 4, 5, 6}),
        ("1f1b", 2, 0, set()),
    ],
)
def test_a_number_is_of_each_stage(name: str, pp: int, count: int, layers: set[int]) -> None:
    assert _again(_job(name, pp, recompute="full", recompute_layers=count)) == layers


def test_modules_behind_the_layers_follow_all_of_them_alone() -> None:
    def again(**schedule: Any) -> set[str]:
        job = _job(model="deepseek-v3", pp=1, recompute="full", **schedule)
        return {n.part.partition(".")[0] for n in job.base.nodes if n.kind is Pass.R}

    assert again() == {*(f"l{n}" for n in range(LAYERS)), "mtp0"}
    assert again(recompute_layers=":") == {f"l{n}" for n in range(LAYERS)}


def test_plans_of_all_layers_are_one_plan_however_said() -> None:
    plain = _job(recompute="full").plan()
    for said in (":", 4, list(range(LAYERS))):
        assert _job(recompute="full", recompute_layers=said).plan() is plain
    assert _job(recompute=["mlp", "attention"]).plan() is plain
    assert _job(recompute="full", recompute_layers="::2").plan() is not plain


@pytest.mark.parametrize(
    ("layers", "recompute", "says"),
    [
        ("1:2:3:4", "full", "1:2:3:4"),
        ("2", "full", "fix: 2"),
        ("::0", "full", "'1::2'"),
        ("-1:", "full", "-1:"),
        ([0, LAYERS], "full", f"layers 0 to {LAYERS - 1}"),
        (1, "none", "recompute = 'full'"),
    ],
)
def test_refused(layers: object, recompute: str, says: str) -> None:
    e = refusal(_job, recompute=recompute, recompute_layers=layers, match="recompute_layers")
    assert says in str(e) and e.kind is ErrorKind.JOB


@pytest.mark.parametrize("layers", [-1, [-1], True, 1.5, {"a": 1}])
def test_no_layers_at_all(layers: object) -> None:
    refusal(_job, recompute="full", recompute_layers=layers, match="recompute_layers")
