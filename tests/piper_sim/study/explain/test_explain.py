"""Explanations add up to the bit, name what was planted, and promise what simulating gives."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ir.job import load_job
from ir.job.load import job_from
from ir.job.schema import BUCKET_MIB
from ir.schedules.registry import NAMES
from piper_sim.study.explain import StepExplanation, blame, chain, excess, explain, explained, explanation
from piper_sim.study.explain.what_if import changed, settings
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from tests.piper_sim.pricing.prediction_cases import RICH, asked, drawn
from tests.piper_sim.study.explain.planted import campaign, drawn_case, drawn_wide, verdict

CAUSES = set(
    ["straggler", "expert_skew", "link", "host", "split", "warmup", "drain", "dependency", "memory", "collective"]
)
BUSY = ("compute", "recompute", "slowdown", "optimizer")


def check(p: Prediction, found: StepExplanation) -> None:
    """What every explanation obeys."""
    assert found.iteration_s == p.iteration_s
    for rank, row in enumerate(p.times.seconds):
        told = found.idle[str(rank)]
        assert set(told) <= CAUSES and min(told.values(), default=0.0) >= 0
        idle = sum(v for k, v in row.items() if k not in BUSY)
        assert abs(sum(told.values()) - idle) <= (0.0 if p.planned.classes.count == 1 else 1e-12)
    each = [c["seconds"] for c in found.causes]
    assert each == sorted(each, reverse=True) and {c["cause"] for c in found.causes} <= CAUSES
    assert sum(each) == sum(sum(row.values()) for row in found.idle.values())
    assert sum(found.spent.values()) == found.iteration_s and min(found.spent.values()) >= 0
    path = found.critical_path
    assert path[0]["start_s"] == 0 and path[-1]["end_s"] == found.iteration_s
    assert all(a["end_s"] == b["start_s"] and a["start_s"] < a["end_s"] for a, b in pairwise(path))
    texts = {(int(r) % p.plan.programs, t) for r, t in zip(p.plan.program, p.plan.texts, strict=True)}
    seat = {r: k for k, ranks in enumerate(_table(p)) for r in ranks}
    assert all((seat[x["rank"]], x["op"]) in texts for x in [*path, *found.causes])


def _table(p: Prediction) -> list[list[int]]:
    mesh = p.prepared.mesh
    return [[r for r in range(mesh.ranks) if mesh.coordinates(r)["pp"] == k] for k in range(p.plan.programs)]


@pytest.mark.parametrize(("ranks", "mbs"), [(1, 1), (2, 1), (4, 2), (4, 9)])
@pytest.mark.parametrize("name", NAMES)
def test_sums_and_paths_of_every_schedule(name: str, ranks: int, mbs: int) -> None:
    if name == "dualpipe" and ranks == 1:
        ranks = 2
    job = {
        "model": {"config": "tiny-llama", "seq_len": 128, "num_hidden_layers": 8},
        "cluster": {"gpu": "h800-sxm", "nodes": 1, "gpus_per_node": ranks},
        "parallel": {"pp": ranks},
        "schedule": {"name": name, "microbatches": mbs},
    }
    p, _ = asked(job)
    check(p, explained(p))


@pytest.mark.parametrize("seed", range(12))
def test_sums_and_paths_of_drawn_jobs(seed: int) -> None:
    p, _ = asked(drawn(seed))  # a seed whose job is refused is none for here, and fails
    check(p, explained(p))


def test_sums_and_paths_where_replicas_differ() -> None:
    p, _ = asked(RICH)
    check(p, explained(p))


def _job(**sections: Any) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model": {"config": "tiny-llama", "seq_len": 512, "num_hidden_layers": 8},
        "cluster": {"gpu": "h100-sxm"},
        "parallel": {"pp": 4},
        "schedule": {"name": "1f1b", "microbatches": 8},
    }
    for section, keys in sections.items():
        out[section] = {**out.get(section, {}), **keys}
    return out


def test_a_what_if_is_what_simulate_says_with_those_changes() -> None:
    table = _job(cluster={"speed": {"2": 0.5}}, parallel={"layers": [3, 2, 2, 1]})
    job = job_from(table)
    found = explain(job)
    assert found.what_ifs == tuple(sorted(found.what_ifs, key=lambda w: -w.gain_s))
    assert {"no straggler", "links x 2", "host free", "balanced layers", "perfect split"} < {
        w.name for w in found.what_ifs
    }
    for w in found.what_ifs:
        again = load_job(table, set=settings(w.changes))
        assert again == changed(job, w.changes)
        assert predict(again).iteration_s == w.iteration_s and w.gain_s == found.iteration_s - w.iteration_s
    assert predict(changed(job, {})).iteration_s == found.iteration_s


def test_ranks_faster_than_the_rest_stay_so_without_a_straggler() -> None:
    found = {w.name: w for w in explain(job_from(_job(cluster={"speed": {"2": 0.5, "1": 1.25}}))).what_ifs}
    assert found["no straggler"].changes == {"cluster.speed": {"1": 1.25}}
    assert "no straggler" not in {w.name for w in explain(job_from(_job(cluster={"speed": {"1": 1.25}}))).what_ifs}


def test_what_given_stage_times_have_in_them_is_not_asked_to_be_free() -> None:
    moe = _job(
        model={"config": "tiny-moe"}, parallel={"pp": 2, "tp": 2, "dp": 2, "ep": 2}, cluster={"speed": {"0": 0.5}}
    )
    free = {"all-to-all free", "other collectives free", "transfers free"}
    assert free <= {w.name for w in explain(job_from(moe)).what_ifs}
    found = {w.name: w for w in explain(job_from(moe | {"costs": {"stage_times": {"F": 0.001, "B": 0.002}}})).what_ifs}
    assert free & found.keys() == {"transfers free"} and min(w.gain_s for n, w in found.items() if "free" in n) >= 0


@pytest.mark.parametrize(("parallel", "asked"), [({"zero": 3}, 2), ({"zero": 1}, None), ({"zero": 3, "tp": 4}, None)])
def test_shards_inside_a_node_are_asked_for_where_they_lie_across(parallel: dict[str, int], asked: int | None) -> None:
    cluster = {"gpu": "h100-sxm", "nodes": 2, "gpus_per_node": 4}
    job = job_from({"model": {"config": "tiny-llama", "seq_len": 256}, "cluster": cluster, "parallel": parallel})
    found = [w.changes for w in explain(job).what_ifs if w.name == "shards inside a node"]
    assert found == ([{"parallel.dp_replicate": asked}] if asked else [])


@pytest.mark.parametrize(
    ("parallel", "asked"),
    [
        ({"zero": 1, "dp": 4}, True),
        ({"zero": 0, "dp": 1, "cp": 4}, True),
        ({"zero": 1, "dp": 4, "bucket_MiB": 40}, False),
        ({"zero": 1, "dp": 4, "overlap_grad_reduce": False}, False),
        ({"zero": 3, "dp": 4}, False),
        ({"zero": 1, "dp": 1}, False),
    ],
)
def test_reductions_beside_backward_are_asked_for_where_they_wait(parallel: dict[str, Any], asked: bool) -> None:
    model = {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 2048}
    table = {"model": model, "cluster": {"gpu": "h100-sxm"}, "parallel": parallel}
    found = [w for w in explain(job_from(table)).what_ifs if w.name == "reductions beside backward"]
    assert len(found) == asked
    for w in found:
        again = predict(job_from({**table, "parallel": {**parallel, "bucket_MiB": BUCKET_MIB}}))
        assert w.iteration_s == again.iteration_s and w.gain_s > 0


def test_some_recomputed_layers_are_held_against_none_and_all() -> None:
    table = _job(schedule={"recompute": "full", "recompute_layers": "1::2"})
    found = {w.name: w for w in explain(job_from(table)).what_ifs if w.name.startswith("recompute")}
    assert found["recompute none"].gain_s > 0 > found["recompute full"].gain_s
    for how in ("none", "full"):
        said, meant = settings(found[f"recompute {how}"].changes), _job(schedule={"recompute": how})
        seconds = {predict(load_job(table, set=said)).iteration_s, predict(job_from(meant)).iteration_s}
        assert seconds == {found[f"recompute {how}"].iteration_s}


def test_a_difference_sums_to_the_difference() -> None:
    a, b = job_from(_job()), job_from(_job(cluster={"speed": {"2": 0.5}}))
    found = explain(a, b)
    assert found.difference is not None
    more = predict(b).iteration_s - predict(a).iteration_s
    assert sum(found.difference.values()) == more and found.to_dict()["difference"] == found.difference
    assert max(found.difference, key=lambda c: found.difference[c]) == "straggler"
    assert explain(a, a).difference == {}


@pytest.mark.parametrize("what", ["a wait", "a stretch of the path"])
def test_what_is_left_out_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, _ = asked(_job())
    check(p, explained(p))
    if what == "a wait":
        whole = blame.RankWaits.explain
        monkeypatch.setattr(blame.RankWaits, "explain", lambda *a: None if a[-1] == "drain" else whole(*a))
    else:
        path = explanation.critical_path
        monkeypatch.setattr(explanation, "critical_path", lambda a: (*path(a)[:3], *path(a)[4:]))
    with pytest.raises(AssertionError):
        check(p, explained(p))


def test_planted_causes_are_named_first() -> None:
    right, counted = campaign(60)
    assert counted == 60 and right >= 0.95 * counted


# Contention on slow links; more layers' reductions, tp messages and launches, on an even rank, too; six more.
WIDE = (10, 41, 241, 74, 118, 218, 229, 14, 358, 2, 5, 601, 603, 609, 615)


def wrong() -> set[int]:
    return {seed for seed in WIDE if not verdict(drawn_wide(seed), beside=True)[0]}


def test_planted_causes_of_any_job_are_named_first() -> None:
    assert wrong() == set()


def test_a_job_whose_ranks_all_have_the_same_to_do_has_no_bad_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of such seeds those with a bad split fail, and no others."""
    monkeypatch.setattr(excess.OpExcess, "_beyond", lambda e, fair: np.zeros(len(e.unit)))
    assert {74, 118, 218, 229, 358} <= wrong() <= {s for s in WIDE if "split" in drawn_wide(s).without}


def test_messages_that_queue_for_slow_links_are_collectives_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of queues."""
    monkeypatch.setattr(excess, "_queued", lambda chain, duration: np.zeros(chain.ops, dtype=np.int64))
    assert {10, 41, 241} <= wrong() <= {s for s in WIDE if "link" in drawn_wide(s).without}


def test_a_walk_that_overlooks_what_ops_wait_for_names_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: only the op ahead in its stream counts, so waits lead nowhere."""
    latest = chain._latest
    monkeypatch.setattr(
        chain, "_latest", lambda rows, items, end: latest(rows[: end.shape[1]], items[: end.shape[1]], end)
    )
    right, counted = campaign(15)
    assert right < 0.7 * counted
    p, _ = asked(_job())
    with pytest.raises(AssertionError, match="an op on the path lasts as long as it does"):
        check_ops(p, explained(p))


WHAT = {"straggler": "no straggler", "expert_skew": "balanced experts", "link": "links as usual"}


@pytest.mark.parametrize("slow", [8, 9, 15])
def test_of_ranks_that_meet_inside_an_op_the_slow_one_is_named(slow: int) -> None:
    job = {
        "model": {"config": "llama3-8b", "seq_len": 4096},
        "cluster": {"gpu": "h100-sxm", "nodes": 2, "gpus_per_node": 8, "speed": {str(slow): 0.8}},
        "parallel": {"tp": 2, "pp": 4},
        "schedule": {"name": "1f1b", "microbatches": 8},
    }
    found = explained(predict(load_job(job)))
    assert (found.causes[0]["cause"], found.causes[0]["rank"]) == ("straggler", slow)
    assert {x["rank"] for x in found.critical_path if x["cause"] == "straggler"} == {slow}


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6, 9])
def test_removing_a_planted_cause_gains_what_was_promised(seed: int) -> None:
    case = drawn_case(seed)
    found = explain(job_from(case.table))
    promised = {w.name: w for w in found.what_ifs}
    for cause, table in case.without.items():
        if cause in WHAT:
            assert promised[WHAT[cause]].iteration_s == predict(job_from(table)).iteration_s
            assert promised[WHAT[cause]].gain_s == found.iteration_s - predict(job_from(table)).iteration_s


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_ops_on_the_path_last_as_long_as_they_do(name: str) -> None:
    for free in ([], ["host"]):
        p, _ = asked(_job(schedule={"name": name}, costs={"interference": "none", "free": free}))
        check_ops(p, explained(p))


def check_ops(p: Prediction, found: StepExplanation) -> None:
    """Behind the first, which may have begun in the step before: an op by itself takes its duration, not more."""
    took = {(r, t): d for r, t, d in zip(p.plan.program.tolist(), p.plan.texts, p.costs.duration.tolist(), strict=True)}
    for x in found.critical_path[1:]:
        same = x["cause"] == "host" or x["end_s"] - x["start_s"] == took[x["rank"], x["op"]]
        assert same, "an op on the path lasts as long as it does"
