"""Replicas and ZeRO 0 to 3, with and without pipelines: the numbers of one process on the same global batch."""

from __future__ import annotations

import numpy as np
import pytest

from executor.verdict import RankFailed
from tests.executor import faults
from tests.executor.crossed import Case, covering, crossed
from tests.executor.runs import Ran, alone, distance, error, merged, run
from tests.executor.test_run_faults import _inject

ROUNDING = 1e-10
STEPS = 20
PAIRED = "parallel.pp=2", "parallel.dp=2"


def _far(*sets: str, steps: int) -> float:
    """How far a run is from one process: gradients of the first step and the last, parameters, losses, norms."""
    ran = run(*sets, steps=steps, watchdog_s=60.0)
    return max(error(ran, alone(*sets, steps=steps)), distance(merged(ran.first), alone(*sets, steps=1).grads))


@pytest.mark.parametrize("case", covering(), ids=lambda c: c.name)
def test_every_two_choices_train_as_one_process_does(case: Case) -> None:
    assert _far(*case.sets(), steps=STEPS) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in crossed() if c not in covering()], ids=lambda c: c.name)
def test_every_crossing_trains_as_one_process_does(case: Case) -> None:
    assert _far(*case.sets(), steps=STEPS) <= ROUNDING


MORE = {
    "ties": (*PAIRED, "parallel.zero=1", "model.tie_word_embeddings=true"),
    "ties, sharded": (*PAIRED, "parallel.zero=3", "model.tie_word_embeddings=true", "parallel.prefetch=0"),
    "ties in one program, sharded": ("parallel.pp=1", "parallel.dp=2", "parallel.zero=3", "model.tie_word_embeddings=true"),
    "ties between copies": (*PAIRED, "parallel.zero=2", "schedule.name=dualpipe", "model.tie_word_embeddings=true"),
    "experts": (*PAIRED, "parallel.zero=3", "schedule.name=zb1p", "model.config=tiny-moe"),
    "sizes that do not divide": ("parallel.pp=1", "parallel.dp=3", "parallel.zero=3", "model.vocab_size=131"),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_ties_experts_and_odd_sizes_too(name: str) -> None:
    assert _far(*MORE[name], steps=3) <= ROUNDING


@pytest.mark.parametrize(
    "formats",
    [
        ("precision.compute=fp32",),
        ("precision.compute=bf16", "precision.params=fp32"),
        ("precision.compute=fp32", "precision.grads=fp64", "precision.reduce=fp32"),
    ],
    ids=["fp32", "bf16 over fp32", "sums in fp64"],
)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_narrower_formats_are_as_near_as_they_can_be(formats: tuple[str, ...], zero: int) -> None:
    sets = (*formats, "parallel.pp=1", "parallel.dp=2", f"parallel.zero={zero}", "optimizer.name=sgd", "optimizer.lr=0.1")
    wide = (*sets, "precision.compute=fp64", "precision.params=fp64")
    assert error(run(*sets), alone(*sets)) <= (2e-2 if "bf16" in formats[0] else 1e-4)
    assert error(run(*sets), alone(*wide)) <= (5e-2 if "bf16" in formats[0] else 1e-4)


def _same(a: Ran, b: Ran) -> bool:
    pairs = zip((*a.grads, *a.params), (*b.grads, *b.params), strict=True)
    return all(x.keys() == y.keys() and all(np.array_equal(x[n], y[n], equal_nan=True) for n in x) for x, y in pairs)


@pytest.mark.parametrize("zero", [1, 3])
def test_threads_train_as_processes_do_and_a_repeated_run_is_the_same(zero: int) -> None:
    sets = (*PAIRED, f"parallel.zero={zero}", "schedule.name=zb1p")
    apart, again, together = run(*sets), run(*sets), run(*sets, backend="local")
    assert _same(apart, again) and _same(apart, together)
    assert apart.object["losses"] == again.object["losses"] == together.object["losses"]


@pytest.mark.parametrize("order", ["tp cp ep dp pp", "pp tp cp ep dp"])
def test_ranks_are_those_of_the_mesh(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = (*PAIRED, "parallel.zero=2", f"parallel.order={order}")
    ran, (second, third) = run(*sets), (1, 0) if order.startswith("tp") else (0, 1)
    assert ran.object["ranks"] == 4 and list(ran.object["memory"]["peak_allocated_bytes"]) == ["0", "1", "2", "3"]
    stage = {int(r): {o[0] for o, s in zip(ran.trace.op, ran.trace.stream, strict=True) if s == "compute"} for r in "0"}
    for rank, program in ((1, 0 if second else 1), (2, 0 if third else 1), (3, 1)):
        rows = np.flatnonzero(ran.trace.rank == rank).tolist()
        stage[rank] = {ran.trace.op[k][0] for k in rows if ran.trace.stream[k] == "compute" and "p" not in ran.trace.op[k]}
        assert stage[rank] == {str(program)}, (rank, program)
    assert len(ran.trace) == 2 * len(ran.plan) * 2
    index = next(i for i in range(len(ran.plan)) if ran.plan.text(i).startswith("1F1"))
    _inject(monkeypatch, faults.at_op, {"rank": 3, "index": index, "kind": "raise", "mark": "/dev/null"})
    with pytest.raises(RankFailed, match="bad luck") as info:
        run(*sets)
    assert (info.value.rank, info.value.op) == (3, ran.plan.text(index)) and 3 not in info.value.waiting
    assert info.value.waiting and set(info.value.waiting) <= {0, 1, 2}


@pytest.mark.parametrize("zero", [0, 3])
def test_ops_of_a_given_time_run_on_every_replica(zero: int) -> None:
    sets = (*PAIRED, f"parallel.zero={zero}")
    ran = run(*sets, emulate=0.002)
    assert len(ran.trace) == 2 * 2 * len(ran.plan) and ran.object["losses"] is None
    assert ran.object["iteration_s"] > 8 * 2 * 0.002
