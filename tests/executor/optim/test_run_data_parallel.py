"""Replicas and ZeRO 0 to 3, with and without pipelines: the numbers of one process on the same global batch."""

import numpy as np
import pytest

from executor.launch.watch.verdict import RankFailed
from tests.executor import faults
from tests.executor.families import TINY
from tests.executor.launch.test_run_faults import _inject
from tests.executor.optim.replica_cases import Case, covering, crossed
from tests.executor.runs import alone, error, far, run, same
from tests.executor.runtime import test_run_families as families

ROUNDING = 1e-10
STEPS, FEW = 20, 2  # `make test-all` gives all of them all 20
PAIRED = "parallel.pp=2", "parallel.dp=2"


LONG = {c.zero: c for c in sorted(covering(), key=lambda c: -c.ranks) if c.dp > 1}.values()  # the least of each level


@pytest.mark.parametrize("case", covering(), ids=lambda c: c.name)
def test_every_two_choices_train_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=STEPS if case in LONG else FEW) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("case", dict.fromkeys([*covering(), *crossed()]), ids=lambda c: c.name)
def test_every_crossing_trains_as_one_process_does(case: Case) -> None:
    assert far(*case.sets(), steps=STEPS) <= ROUNDING


TIED, BETWEEN = "model.tie_word_embeddings=true", "parallel.order=tp cp ep pp dp"
MORE = {
    "ties": (*PAIRED, "parallel.zero=1", TIED),
    "ties, sharded": (*PAIRED, "parallel.zero=3", TIED, "parallel.prefetch=0"),
    "ties in one program, sharded": ("parallel.pp=1", "parallel.dp=2", "parallel.zero=3", TIED),
    "ties between copies": (*PAIRED, "parallel.zero=2", "schedule.name=dualpipe", TIED),
    "experts": (*PAIRED, "parallel.zero=3", "schedule.name=zb1p", "model.config=tiny-moe"),
    "pp between": (*PAIRED, "parallel.tp=2", "parallel.zero=3", BETWEEN, "model.config=tiny-moe"),
    "pp between copies": ("parallel.pp=2", "parallel.dp=4", "parallel.zero=3", "parallel.dp_replicate=2", BETWEEN),
    "reduced behind": (*PAIRED, "parallel.bucket_MiB=0.02", "parallel.overlap_grad_reduce=false"),
    "gathered on demand": (*PAIRED, "parallel.zero=3", "schedule.name=zbv", "costs.software=deepspeed"),
    "sizes that do not divide": ("parallel.pp=1", "parallel.dp=3", "parallel.zero=3", "model.vocab_size=131"),
}


@pytest.mark.parametrize("name", MORE)
def test_ties_experts_and_odd_sizes_too(name: str) -> None:
    assert far(*MORE[name], steps=FEW) <= ROUNDING


@pytest.mark.parametrize(
    "formats",
    [
        ("precision.compute=fp32",),
        ("precision.compute=bf16", "precision.params=fp32"),
        ("precision.compute=fp32", "precision.grads=fp64", "precision.reduce=fp32"),
    ],
    ids=["fp32", "bf16 over fp32", "sums in fp64"],
)
@pytest.mark.parametrize("zero", [2, 3])
def test_narrower_formats_are_as_near_as_they_can_be(formats: tuple[str, ...], zero: int) -> None:
    two = "parallel.pp=1", "parallel.dp=2", f"parallel.zero={zero}", "optimizer.name=sgd", "optimizer.lr=0.1"
    two = (*two, "schedule.microbatches=2")
    assert error(run(*formats, *two), alone(*formats, *two)) <= (2e-2 if "bf16" in formats[0] else 1e-4)


@pytest.mark.parametrize("zero", [1, 3])
def test_threads_train_as_processes_do_and_a_repeated_run_is_the_same(zero: int) -> None:
    sets = (*PAIRED, f"parallel.zero={zero}", "schedule.name=zb1p")
    apart, again, together = run(*sets), run(*sets), run(*sets, backend="local")
    assert same(apart, again) and same(apart, together)
    assert apart.object["losses"] == again.object["losses"] == together.object["losses"]


@pytest.mark.parametrize("order", ["tp cp ep dp pp", "pp tp cp ep dp"])
def test_ranks_are_those_of_the_mesh(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = (*PAIRED, "parallel.zero=2", f"parallel.order={order}")
    ran, programs = run(*sets), (0, 0, 1, 1) if order.startswith("tp") else (0, 1, 0, 1)
    assert ran.object["ranks"] == 4 and list(ran.object["memory"]["persistent_bytes"]) == ["0", "1", "2", "3"]
    for rank, program in enumerate(programs):
        ops = {ran.trace.op[k] for k in np.flatnonzero(ran.trace.rank == rank).tolist()}
        assert ops == {ran.plan.text(i) for i in np.flatnonzero(ran.plan.program == program).tolist()}
    assert len(ran.trace) == 2 * len(ran.plan) * 2  # replicas, steps
    index = next(i for i in range(len(ran.plan)) if ran.plan.text(i).startswith("1F1"))
    _inject(monkeypatch, faults.at_op, {"rank": 3, "index": index, "kind": "raise"})
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


USUAL = "deepseek_v3", "gpt2", "nemotron"


@pytest.mark.parametrize(
    "family", [f if f in USUAL else pytest.param(f, marks=pytest.mark.slow) for f in TINY if f != "llama"]
)
def test_every_family_trains_with_sharded_weights(family: str) -> None:
    more = ("parallel.layers=[2,2]",) if family == "deepseek_v3" else ()
    assert families.error(*families.sets(family, *PAIRED, "parallel.zero=3", "schedule.name=zb1p", *more)) <= ROUNDING
