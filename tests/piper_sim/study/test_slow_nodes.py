"""Slow nodes that nobody knows, against all subsets of nodes, each simulated with its slow ranks named."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ir.job import Job, load_job
from ir.job.schema import JobHistory
from ir.job.table import job_toml
from piper_sim.study.explain.explanation import explain
from piper_sim.study.history.backtest import backtest
from piper_sim.study.predict import predict
from tests.refusals import refusal

SPEED = 0.7
LAYERS = {"1f1b": [5, 1], "gpipe": [2, 4], "zbv": [3, 1, 1, 1]}


def job(
    share: float | None, pp: int = 2, dp: int = 2, schedule: str = "1f1b", speed: dict[str, float] | None = None
) -> Job:
    cluster: dict[str, object] = {"gpus_per_node": 1, "speed": speed or {}}
    if share is not None:
        cluster["slow_nodes"] = {"share": share, "speed": SPEED}
    table = {
        "model": {"config": "llama3-8b", "num_hidden_layers": 6, "seq_len": 2048},
        "cluster": cluster,
        "parallel": {"pp": pp, "dp": dp, "layers": LAYERS[schedule] if pp > 1 else "balanced", "zero": 1},
        "schedule": {"name": schedule, "microbatches": 4},
    }
    return load_job(table)


def enumerated(pp: int, dp: int, schedule: str) -> list[tuple[float, int, int]]:
    """(seconds, slow nodes, most of them in one replica) of every subset of nodes."""
    out = []
    for slow in product((False, True), repeat=pp * dp):
        ranks = [r for r, s in enumerate(slow) if s]
        seconds = predict(job(None, pp, dp, schedule, {str(r): SPEED for r in ranks})).iteration_s
        replicas = [r % dp for r in ranks]  # pp is the outer axis
        out.append((seconds, len(ranks), max(map(replicas.count, replicas), default=0)))
    return sorted(out)


@pytest.mark.parametrize(("pp", "dp", "schedule"), [(1, 4, "1f1b"), (2, 2, "1f1b"), (2, 2, "zbv"), (2, 1, "gpipe")])
def test_steps_are_those_of_all_subsets(pp: int, dp: int, schedule: str) -> None:
    """Chances that a step is no longer than some seconds differ only by subsets with two slow nodes in a replica."""
    every = enumerated(pp, dp, schedule)
    for share in (0.02, 0.2, 0.6):
        p = predict(job(share, pp, dp, schedule))
        assert p.planned.slow is not None
        steps = p.planned.slow.steps
        chance = [share**slow * (1 - share) ** (pp * dp - slow) for _, slow, _ in every]
        unsure = sum(c for c, (_, _, most) in zip(chance, every, strict=True) if most > 1)
        assert steps[0][0] == every[0][0] and sum(c for _, c in steps) == pytest.approx(1)
        for seconds, _ in steps:
            ours = sum(c for s, c in steps if s <= seconds)
            theirs = sum(c for c, (s, _, _) in zip(chance, every, strict=True) if s <= seconds)
            assert theirs - 1e-12 <= ours <= theirs + unsure + 1e-12
        reached = [sum(c for s, c in steps if s <= seconds) for seconds, _ in steps]
        assert p.iteration_s == next(s for (s, _), r in zip(steps, reached, strict=True) if r >= 0.5)


def test_the_job_of_the_median_is_the_one_simulated() -> None:
    """Its slow ranks are named in the job resolved, which takes as long when they are given; the rest is the step."""
    p = predict(job(0.6))
    speed = p.prepared.job.cluster.speed
    assert set(speed) == {"0"} and speed["0"] == SPEED  # the stage with five layers, and its first replica
    assert predict(job(None, speed=dict(speed))).iteration_s == p.iteration_s > predict(job(None)).iteration_s
    found = p.to_dict()["slow_nodes"]
    assert found["chance"] == pytest.approx(1 - 0.4**4)
    assert found["without_s"] == predict(job(None)).iteration_s and found["worst_s"] == p.iteration_s


def test_the_interval_holds_the_others() -> None:
    calm, rare, half = (predict(job(share)).to_dict()["iteration_s_interval"] for share in (None, 1e-6, 0.2))
    assert rare == calm  # one in a million moves no tenth
    assert half[1] > calm[1] and half[0] >= calm[0]


def test_one_digest_for_one_job_and_another_for_another() -> None:
    digests = [
        predict(j).to_dict()["job_digest"] for j in (job(0.6), job(0.6), job(0.61), job(None, speed={"0": SPEED}))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_explain_names_them_and_takes_them_away() -> None:
    found = explain(job(0.6))
    assert {c["rank"] for c in found.causes if c["cause"] == "straggler"} == {0}
    gain = next(w for w in found.what_ifs if w.name == "no slow nodes").gain_s
    assert gain == pytest.approx(predict(job(0.6)).iteration_s - predict(job(None)).iteration_s, abs=1e-12)


@pytest.mark.parametrize(
    ("said", "key", "fix"),
    [
        ({"share": 1.5}, "cluster.slow_nodes.share", None),
        ({"share": 0.1, "speed": 1.1}, "cluster.slow_nodes.speed", None),
        ({"shares": 0.1}, "cluster.slow_nodes", "share"),
        ({"share": 0}, "cluster.slow_nodes.share", None),
        (0.1, "cluster.slow_nodes", None),
    ],
)
def test_what_is_refused(said: object, key: str, fix: str | None) -> None:
    e = refusal(load_job, {"model": {"config": "tiny-llama"}, "cluster": {"slow_nodes": said}})
    assert e.key is not None and e.key.startswith(key)
    assert fix is None or fix in str(e)


def test_nodes_are_known_or_unknown() -> None:
    e = refusal(job, 0.1, speed={"1": 0.5}, match=r"cluster\.slow_nodes.*speed")
    assert e.suggestion == "leave cluster.speed out"


def test_such_a_job_is_written_changed_and_asked_as_any_other(tmp_path: Path) -> None:
    slow = job(0.1)
    (tmp_path / "job.toml").write_text(job_toml(slow))
    assert replace(load_job(tmp_path / "job.toml"), file=slow.file) == slow
    assert {"host free", "one more microbatch", "no slow nodes"} <= {w.name for w in explain(slow).what_ifs}
    (tmp_path / "past.csv").write_text("schedule.microbatches, iteration_s\n8, 1.0\n")
    past = backtest(replace(slow, history=JobHistory(str(tmp_path / "past.csv"))))
    assert past is not None and past.residuals[0].predicted_s > 0
