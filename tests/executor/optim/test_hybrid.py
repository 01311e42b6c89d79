"""Shards over a part of the replicas, copied over the others: the numbers, bytes and messages, and what goes red."""

import json
import random
from collections import Counter
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.checkpoint.pieces import written
from executor.launch import run as cli
from ir.core.errors import PiperError
from ir.graph.sync import buckets
from ir.job.build import directives_json
from ir.plan.places import RankPlacement
from piper_sim.memory.timeline import state
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of
from tests.executor.checkpoint.checkpoints import resumed, saved
from tests.executor.optim import zero_faults
from tests.executor.optim.test_zero import _as_torchs_shards, _expected, _traffic
from tests.executor.pairwise import cover
from tests.executor.runs import alone, distance, error, far, judged, merged, run

ROUNDING, VISIBLE = 1e-10, 1e-3
LAYOUTS = (  # tp, cp, pp, dp, ep, dp_replicate
    (1, 1, 1, 2, 1, 2), (1, 1, 1, 4, 1, 2), (1, 1, 1, 6, 1, 3), (1, 1, 1, 8, 1, 4), (1, 1, 2, 2, 1, 2),
    (1, 1, 2, 4, 1, 2), (1, 1, 2, 4, 1, 4), (1, 1, 4, 2, 1, 2), (2, 1, 1, 4, 1, 2), (2, 1, 2, 2, 1, 2),
    (1, 2, 1, 4, 1, 2), (1, 2, 2, 2, 1, 2), (2, 2, 1, 2, 1, 2), (1, 1, 1, 4, 2, 2), (1, 1, 1, 8, 2, 2),
    (1, 1, 2, 4, 2, 2), (2, 1, 1, 4, 2, 2), (1, 2, 1, 2, 2, 2), (2, 1, 2, 2, 2, 2),
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "zero": (1, 2, 3),
    "schedule": ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe"),
    "more": ("", "tied", "buckets", "behind"),
    "order": ("tp cp ep dp pp", "pp tp cp ep dp"),
}


@dataclass(frozen=True, order=True)
class Case:
    """One job; experts where ep says so. more: a tied embedding, small buckets, and reductions behind all passes."""

    layout: tuple[int, int, int, int, int, int]
    zero: int
    schedule: str
    more: str
    order: str

    def sets(self) -> tuple[str, ...]:
        """The overrides of `tests.executor.runs.JOB`."""
        tp, cp, pp, dp, ep, copies = self.layout
        out = [f"parallel.{k}={v}" for k, v in dict(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, dp_replicate=copies).items()]
        out += [f"parallel.zero={self.zero}", f"schedule.name={self.schedule}", f"parallel.order={self.order}"]
        out += ["model.config=tiny-moe"] if ep > 1 else [f"model.num_hidden_layers={max(4, 2 * pp)}"]
        out += ["model.tie_word_embeddings=true"] if self.more == "tied" else []
        out += ["parallel.bucket_MiB=0.05"] if self.more in ("buckets", "behind") else []
        out += ["parallel.overlap_grad_reduce=false"] if self.more == "behind" else []
        return (*out, f"schedule.microbatches={pp + 1}", "optimizer.clip_norm=0.3")

    @property
    def legal(self) -> bool:
        """Whether there is such a job."""
        return not (self.schedule == "dualpipe" and self.layout[2] == 1)


def drawn() -> list[Case]:
    """Few cases in which every two values meet that can."""
    rest = [c for c in (Case(*row) for row in product(*VALUES.values())) if c.legal]
    random.Random(3).shuffle(rest)
    return sorted(cover(rest, [f.name for f in fields(Case)]))


@pytest.mark.parametrize(
    "case", [c if i % 5 == 0 else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(drawn())], ids=str
)
def test_drawn_jobs_train_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=3, backend="local") <= ROUNDING


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_processes_train_as_the_uniform_plan_and_a_racecheck_finds_nothing(zero: int) -> None:
    sets = ("parallel.pp=1", "parallel.dp=4", f"parallel.zero={zero}", "schedule.microbatches=2")
    ran, plain = run(*sets, "parallel.dp_replicate=2", steps=3), run(*sets, steps=3)
    assert distance(merged(ran.params), merged(plain.params)) <= ROUNDING
    assert distance(merged(ran.grads), merged(plain.grads)) <= ROUNDING
    numbers = [np.array([*r.object["losses"], *r.object["grad_norms"]]) for r in (ran, plain)]
    assert np.abs(numbers[0] / numbers[1] - 1).max() <= ROUNDING
    checked = run(*sets, "parallel.dp_replicate=2", steps=3, backend="local", racecheck=True)
    assert checked.object["losses"] == ran.object["losses"]


def test_torchs_hybrid_shards_train_the_same(tmp_path: Path) -> None:
    sets = ("parallel.pp=1", "parallel.dp=4", "parallel.dp_replicate=2")
    sets = (*sets, "optimizer.clip_norm=0.3", "schedule.microbatches=2")
    _as_torchs_shards(tmp_path, *((*sets, f"parallel.zero={zero}") for zero in (2, 3)), steps=5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_that_travel_in_another_format_are_those_of_the_ranks(zero: int) -> None:
    sets = ("precision.compute=fp32", "precision.grads=fp64", "precision.reduce=fp32", f"parallel.zero={zero}")
    sets = (*sets, "parallel.pp=1", "parallel.dp=4", "parallel.dp_replicate=2")
    sets = (*sets, "optimizer.name=sgd", "optimizer.lr=0.1", "schedule.microbatches=2")
    assert error(run(*sets, backend="local"), alone(*sets)) <= 1e-5


EXPERTS_ALONE = '{"op": "replicate", "filter": {"EP": "*"}, "zero": 3, "dp_replicate": 1}'


def test_a_filter_may_leave_some_parameters_over_all_replicas(tmp_path: Path) -> None:
    sets = ("parallel.pp=1", "parallel.dp=4", "parallel.ep=2", "model.config=tiny-moe", "parallel.dp_replicate=2")
    sets = (*sets, "schedule.microbatches=2")
    prepared, _ = judged(tmp_path, *sets)
    table = directives_json(prepared.strategy)
    at = max(i for i, d in enumerate(table) if d["op"] == "replicate") + 1
    (tmp_path / "s.json").write_text(json.dumps([*table[:at], json.loads(EXPERTS_ALONE), *table[at:]]))
    mixed = (*sets, f'schedule.directives="{tmp_path / "s.json"}"')
    prepared, plan = judged(tmp_path, *mixed)
    assert {(b.replica.zero, b.ranks, b.copies) for b in buckets(plan.graph)} == {(1, 2, 2), (3, 2, 1)}
    assert far(*mixed, steps=3, backend="local") <= ROUNDING


# -- bytes and messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "shares"),
    [
        (("parallel.pp=1", "parallel.dp=4", "parallel.zero=1"), (1, 1, 2)),
        (("parallel.pp=1", "parallel.dp=4", "parallel.zero=2"), (1, 2, 2)),
        (("parallel.pp=1", "parallel.dp=4", "parallel.zero=3"), (2, 2, 2)),
        (("parallel.pp=1", "parallel.dp=2", "parallel.zero=3"), (1, 1, 1)),
        (("parallel.dp=4", "parallel.zero=1", "schedule.name=dualpipe"), (1, 1, 4)),
        (("parallel.dp=4", "parallel.zero=3", "schedule.name=dualpipe"), (2, 2, 2)),
    ],
    ids=lambda x: " ".join(s.split("=")[1] for s in x) if isinstance(x[0], str) else None,
)
def test_a_rank_holds_its_share_of_a_set_of_shards(
    sets: tuple[str, ...], shares: tuple[int, int, int], tmp_path: Path
) -> None:
    sets = (*sets, "parallel.dp_replicate=2", "schedule.microbatches=2")
    held = run(*sets, steps=1, memory=True, backend="local").object["memory"]["persistent_bytes"]
    prepared, plan = judged(tmp_path, *sets)
    promised = state(plan, CostModel(prepared, hardware_of(prepared.job)).recipe)
    places, found = RankPlacement.of(plan), buckets(plan.graph)
    for rank in range(prepared.ranks):
        program, mine = places.program(rank), held[str(rank)]
        whole = sum(b.numel for b in found if program in b.owners)
        for kind, share, each in zip(("parameters", "gradients", "optimizer"), shares, (8, 8, 16), strict=True):
            padding = each * sum(b.ranks for b in found)
            assert 0 <= mine[kind] - getattr(promised[program], kind) <= padding
            assert 0 <= mine[kind] - whole * each / share < 64 * len(plan.graph.entries)
        assert mine["buffers"] == 0


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_step_sends_what_the_plan_says_and_a_closed_form(
    zero: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mbs, copies, dp, pair = 2, 2, 4, 2 if name == "dualpipe" else 1
    sets = ("parallel.pp=2", f"parallel.dp={dp}", f"parallel.zero={zero}", f"schedule.name={name}")
    ran, found = _traffic(monkeypatch, *sets, f"parallel.dp_replicate={copies}", f"schedule.microbatches={mbs}")
    for rank, traffic in enumerate(found):
        assert traffic == _expected(ran.plan, rank)
    wanted: Counter[tuple[str, int, int]] = Counter({("all_reduce", 0, 2 * dp): 1})  # the norm
    # Of rank 0: every message is 8 bytes an element, padded to the parts that it is cut in.
    for b in buckets(ran.plan.graph):
        if 0 not in b.owners:
            continue
        parts = dp // copies * (len(b.owners) if zero == 1 else 1)
        share, together = -(-b.numel // parts) * 8, copies * (len(b.owners) if zero > 1 else 1)
        # Of a pair's two directions a group runs half of the microbatches of each stage.
        wanted["reduce_scatter", share * parts, parts] += 1 if zero == 1 else mbs // pair
        wanted["all_reduce", share, together] += 1
        wanted["all_gather", share * parts, parts] += 1 if zero < 3 else 0
    if zero == 3:
        found[0] = Counter({k: n for k, n in found[0].items() if k[0] != "all_gather"})
    assert found[0] == wanted


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("parallel.zero=1", "parallel.dp_replicate=2"), ("parallel.zero=1",)),
        (("parallel.zero=3",), ("parallel.zero=2", "parallel.dp_replicate=2")),
        (("parallel.zero=2", "parallel.dp_replicate=4"), ("parallel.zero=3", "parallel.dp_replicate=2")),
    ],
    ids=str,
)
def test_a_run_goes_on_where_shards_lie_otherwise(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    base = ("parallel.pp=1", "parallel.dp=4", "schedule.microbatches=2")
    saved(tmp_path / "first", *base, *before, steps=2, every=2)
    end = resumed(tmp_path / "first" / "step-000002", *base, *after, steps=4)
    one = alone(*base, steps=4)
    assert distance(merged(end.params), one.params) <= ROUNDING
    assert np.abs(np.array(end.object["losses"]) / one.losses[2:] - 1).max() <= ROUNDING


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_each_share_is_written_by_one_of_those_that_hold_it(zero: int, name: str, tmp_path: Path) -> None:
    sets = ("parallel.pp=2", "parallel.dp=4", "parallel.dp_replicate=2", f"parallel.zero={zero}")
    prepared, plan = judged(tmp_path, *sets, f"schedule.name={name}")
    places = RankPlacement.of(plan)
    writers = Counter(n for r in range(prepared.ranks) for n in written(plan.graph, places, r))
    assert writers == {n: b.ranks for b in buckets(plan.graph) for n in b.params}


# -- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2])
def test_copies_that_are_not_summed_are_seen(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", zero_faults.unreduced)
    sets = ("parallel.pp=1", "parallel.dp=4", "parallel.dp_replicate=2", f"parallel.zero={zero}")
    sets = (*sets, "optimizer.clip_norm=0", "schedule.microbatches=2")
    ran = run(*sets)
    try:
        assert error(ran, alone(*sets)) > VISIBLE
    except AssertionError as differ:
        assert "copies of" in str(differ)


@pytest.mark.parametrize(
    ("sets", "key", "says"),
    [
        (("parallel.dp=4", "parallel.dp_replicate=3"), "parallel.dp_replicate", "dp_replicate in [1, 2, 4]"),
        (("parallel.dp=4", "parallel.dp_replicate=2", "parallel.zero=0"), "parallel.dp_replicate", "zero = 0"),
        (("parallel.dp=4", "parallel.ep=4", "parallel.dp_replicate=2", "model.config=tiny-moe"),
         "parallel.dp_replicate", "edp = 1"),
    ],
)  # fmt: skip
def test_parts_that_do_not_divide_are_refused(sets: tuple[str, ...], key: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PiperError) as refused:
        judged(tmp_path, "parallel.pp=1", *sets)
    assert refused.value.key == key and says in str(refused.value) and refused.value.suggestion
