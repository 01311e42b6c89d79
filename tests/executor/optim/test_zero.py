"""What ZeRO promises: bytes on each rank, messages of each step, FSDP2's numbers; and what must go red when broken."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.launch import run as cli
from executor.launch.launch import launch
from executor.launch.watch.verdict import RankFailed
from executor.modules.choose import gathered_format
from executor.parallel.collective import Collective
from executor.runtime.given import given_text
from ir.core.errors import PiperError
from ir.graph.sync import buckets
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, Plan
from piper_sim.memory.timeline import state
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of
from tests.executor.launch.test_run_faults import _inject
from tests.executor.optim import fsdp_ranks, zero_faults
from tests.executor.runs import Ran, alone, distance, error, judged, merged, part_of, run

ROUNDING, VISIBLE = 1e-10, 1e-3
TWO, FEW = ("parallel.pp=1", "parallel.dp=2"), "schedule.microbatches=2"


# -- bytes ------------------------------------------------------------------------------------------------------------


@lru_cache
def _held(*sets: str) -> tuple[Any, Any]:
    memory = run(*sets, FEW, steps=1, memory=True).object["memory"]
    return memory["persistent_bytes"], memory["peak_allocated_bytes"]


@pytest.mark.parametrize(
    ("sets", "shares"),
    [
        ((*TWO, "parallel.zero=0"), (1, 1, 1)),
        ((*TWO, "parallel.zero=1"), (1, 1, 2)),
        ((*TWO, "parallel.zero=2"), (1, 2, 2)),
        ((*TWO, "parallel.zero=3"), (2, 2, 2)),
        (("parallel.pp=1", "parallel.dp=4", "parallel.zero=3"), (4, 4, 4)),
        (("parallel.dp=3", "parallel.zero=2"), (1, 3, 3)),
        (("parallel.dp=2", "parallel.zero=1", "schedule.name=dualpipe"), (1, 1, 4)),
        (("parallel.dp=2", "parallel.zero=3", "schedule.name=dualpipe"), (2, 2, 2)),
    ],
    ids=lambda x: " ".join(s.split("=")[1] for s in x) if isinstance(x[0], str) else None,
)
def test_a_rank_holds_its_share_and_no_more(
    sets: tuple[str, ...], shares: tuple[int, int, int], tmp_path: Path
) -> None:
    held, peaks = _held(*sets)
    whole, _ = _held(*(s for s in sets if not s.startswith(("parallel.dp", "parallel.zero"))), "parallel.zero=0")
    prepared, plan = judged(tmp_path, *sets)
    promised = state(plan, CostModel(prepared, hardware_of(prepared.job)).recipe)
    places, padding = RankPlacement.of(plan), 8 * sum(b.ranks for b in buckets(plan.graph))  # to equal shares
    for rank in range(prepared.ranks):
        program, mine = places.program(rank), held[str(rank)]
        for kind, share in zip(("parameters", "gradients", "optimizer"), shares, strict=True):
            assert 0 <= mine[kind] - getattr(promised[program], kind) <= padding
            assert 0 <= mine[kind] - whole[str(program)][kind] / share < 64 * len(plan.graph.entries)
        assert mine["buffers"] == 0 and peaks[str(rank)] > sum(mine.values())


def test_peak_memory_falls_where_less_is_kept() -> None:
    """Not from ZeRO-1 to 2: an op that runs a whole stage's backward has all of one microbatch's gradient beside half
    the sums, and only then are its buckets reduced."""
    big = (*TWO, "model.num_hidden_layers=16", FEW)
    zero0, zero1, zero2, zero3 = (_held(*big, f"parallel.zero={zero}")[1]["0"] for zero in range(4))
    assert zero3 < zero1 < zero0 and zero3 < zero2 < zero0 and zero3 < 0.62 * zero0


def test_a_layer_more_costs_half_as_much_where_weights_are_sharded() -> None:
    base = (*TWO, "precision.compute=fp32", "optimizer.name=sgd", "optimizer.clip_norm=0", FEW)
    base = (*base, "model.hidden_size=128", "model.intermediate_size=1024", "model.seq_len=4")  # so that weights count

    def growth(zero: int) -> int:
        few, many = (_held(*base, f"parallel.zero={zero}", f"model.num_hidden_layers={n}")[1]["0"] for n in (4, 8))
        return many - few

    assert growth(3) <= 0.53 * growth(0)


# -- messages ---------------------------------------------------------------------------------------------------------

Traffic = Counter[tuple[str, int, int]]  # kind, bytes, ranks → how often


def _expected(plan: Plan, rank: int) -> Traffic:
    places, out = RankPlacement.of(plan), Traffic()
    program = places.program(rank)
    for i in range(int(plan.bounds[program]), int(plan.bounds[program + 1])):
        shape = plan.shapes[int(plan.shape[i])]
        if shape.kind is OpKind.COLLECTIVE:
            meeting = Collective.of(plan, places, rank, shape, int(plan.mb[i]))
            message = shape.message or plan.graph.nodes[shape.covers[0][0]].message
            size = message.bytes if message and meeting.bucket else 0
            out[str(meeting.kind), size, len(meeting.members)] += 1
    return out


def _traffic(
    monkeypatch: pytest.MonkeyPatch, *sets: str, fault: Any = zero_faults.counted
) -> tuple[Ran, list[Traffic]]:
    """One step's collectives, rank by rank; the norm's bytes count as 0."""
    with tempfile.TemporaryDirectory() as name:
        _inject(monkeypatch, fault, {"folder": name})
        steps, out = 2, []
        ran = run(*sets, steps=steps)
        for rank in range(ran.object["ranks"]):
            rows = Counter(tuple(r) for r in json.loads((Path(name) / f"traffic-{rank}.json").read_text()))
            assert all(count % steps == 0 for count in rows.values())
            out.append(Traffic({row: count // steps for row, count in rows.items()}))
    return ran, out


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_step_sends_what_the_plan_says(zero: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = "parallel.pp=2", "parallel.dp=2", f"parallel.zero={zero}", f"schedule.name={name}", "parallel.bucket_MiB=0.2"
    ran, found = _traffic(monkeypatch, *sets, FEW)
    for rank, traffic in enumerate(found):
        assert traffic == _expected(ran.plan, rank)
    mbs, kinds = 2, Counter({k: sum(n for (kind, _, _), n in found[0].items() if kind == k) for k, _, _ in found[0]})
    assert kinds["reduce_scatter"] == 0 if zero == 0 else kinds["reduce_scatter"] % (mbs if zero > 1 else 1) == 0


FORMATS = ("precision.compute=bf16", "precision.params=fp32", "precision.reduce=fp32")
THREE = ("parallel.pp=1", "parallel.dp=2", "parallel.zero=3", FEW, *FORMATS)


@pytest.mark.parametrize(
    ("sets", "gather"),
    [((), "bf16"), (("precision.gather=fp32",), "fp32"), (("parallel.pp=2", "schedule.name=dualpipe"), "bf16")],
)
def test_weights_travel_and_are_read_in_the_format_that_the_plan_says(sets: tuple[str, ...], gather: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ran, found = _traffic(patch, *THREE, *sets)
    assert ran.plan.graph.source.sync_bytes()[1] == {"bf16": 2, "fp32": 4}[gather]
    assert all(traffic == _expected(ran.plan, rank) for rank, traffic in enumerate(found))
    kept = run(*THREE, *sets, "parallel.zero=0", backend="local")
    assert ran.object["losses"] == kept.object["losses"]
    mine, theirs = merged(ran.first), merged(kept.first)
    for name, grad in theirs.items():  # a norm's weight gets its gradient in the format that it is read in
        rounding = 2**-8 if gather == "bf16" and "norm" in name else 1e-6
        assert np.abs(mine[name] - grad).max() <= rounding * np.abs(grad).max(), name


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_plans_gather_what_is_read_where_code_is_compiled_too(compiled: str, tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, *THREE, f"run.compile={compiled}")
    assert plan.graph.source is not None
    assert plan.graph.source.sync_bytes()[1] == gathered_format(prepared).bytes


@pytest.mark.parametrize("zero", [1, 2])
def test_weights_that_ranks_keep_whole_come_back_as_they_are_kept(zero: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ran, found = _traffic(patch, *THREE, f"parallel.zero={zero}")
    assert all(traffic == _expected(ran.plan, rank) for rank, traffic in enumerate(found))


FORMATS = ["bf16 bf16", "bf16 fp32", "fp32 fp32", "fp32 fp64", "bf16 bf16 bf16", "fp32 fp32 bf16", "bf16 bf16 fp32"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("formats", FORMATS)
def test_states_are_as_many_bytes_as_are_predicted_or_refused(name: str, formats: str, tmp_path: Path) -> None:
    """Moments narrower than weights are kept by no run; they were predicted, beside a copy of the weights."""
    keys = zip(("compute", "params", "optimizer"), formats.split(), strict=False)
    sets = [*(f"precision.{k}={v}" for k, v in keys), f"optimizer.name={name}", "parallel.zero=0"]
    if (name, formats) == ("adamw", "fp32 fp32 bf16"):
        with pytest.raises(PiperError) as refused:
            run(*sets, backend="local")
        assert (refused.value.key, refused.value.allowed) == ("precision.optimizer", "fp32")
        return
    held = run(*sets, memory=True, backend="local").object["memory"]["persistent_bytes"]
    prepared, plan = judged(tmp_path, *sets)
    promised = state(plan, CostModel(prepared, hardware_of(prepared.job)).recipe)
    assert [x["optimizer"] for x in held.values()] == [s.optimizer for s in promised]


@pytest.mark.parametrize(("sets", "allowed"), [(("parallel.zero=1",), "fp32"), (("precision.gather=fp16",), "bf16")])
def test_a_format_that_weights_do_not_travel_in_is_refused(sets: tuple[str, ...], allowed: str) -> None:
    with pytest.raises(PiperError) as refused:
        run(*THREE, "precision.gather=bf16", *sets)
    assert refused.value.key == "precision.gather" and str(refused.value.allowed).startswith(allowed)


@pytest.mark.parametrize("zero", [0, 1])
def test_reducing_every_microbatch_is_seen_though_the_numbers_are_right(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = (*TWO, f"parallel.zero={zero}")
    ran, found = _traffic(monkeypatch, *sets, fault=zero_faults.reduced_every_microbatch)
    assert found[0] != _expected(ran.plan, 0) and sum(found[0].values()) >= sum(_expected(ran.plan, 0).values()) + 4
    assert error(ran, alone(*sets)) <= ROUNDING


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "dp", "optimizer", "clip"),
    [
        (3, 2, "adamw", 0.3),
        pytest.param(2, 2, "sgd", 0.0, marks=pytest.mark.slow),
        pytest.param(2, 4, "adamw", 0.0, marks=pytest.mark.slow),
        pytest.param(3, 4, "sgd", 0.3, marks=pytest.mark.slow),
    ],
)
def test_fsdp2_trains_the_same(zero: int, dp: int, optimizer: str, clip: float, tmp_path: Path) -> None:
    sets = (
        "parallel.pp=1",
        f"parallel.dp={dp}",
        f"parallel.zero={zero}",
        f"optimizer.name={optimizer}",
        f"optimizer.clip_norm={clip}",
        f"optimizer.lr={0.2 if optimizer == 'sgd' else 0.001}",
    )
    _as_torchs_shards(tmp_path, sets, steps=20)


def _as_torchs_shards(folder: Path, *jobs: tuple[str, ...], steps: int) -> None:
    """Jobs of as many ranks, in one launch: what each rank of torch's imports takes longer than a run."""
    folders = [folder / str(k) for k in range(len(jobs))]
    for at in folders:
        at.mkdir()
    made = [judged(at, *sets) for at, sets in zip(folders, jobs, strict=True)]
    args = {"steps": steps, "folders": [str(at) for at in folders]}
    found = launch(fsdp_ranks.train, made[0][0].ranks, args, given=[given_text(*each) for each in made])[0]
    for at, sets, losses in zip(folders, jobs, found, strict=True):
        ours, first, last = run(*sets, steps=steps), *(np.load(at / f"{n}.npz") for n in ("first", "last"))
        assert np.abs(np.array(ours.object["losses"]) / losses - 1).max() <= ROUNDING
        assert distance(merged(ours.first), part_of(first, "grad/")) <= ROUNDING
        assert distance(merged(ours.params), part_of(last, "param/")) <= ROUNDING


# -- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "zero"),
    [
        (zero_faults.scaled_by_replicas, 0),
        (zero_faults.scaled_by_replicas, 3),
        (zero_faults.averaged, 2),
        (zero_faults.same_data, 1),
        (zero_faults.same_data, 3),
        (zero_faults.unreduced, 0),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_wrong_sum_over_replicas_is_seen(
    fault: Callable[..., Any], zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = (*TWO, FEW, f"parallel.zero={zero}", "optimizer.clip_norm=0")
    monkeypatch.setattr(cli, "RANK", fault)
    assert _far(sets) > VISIBLE


def _far(sets: tuple[str, ...]) -> float:
    """How far from one process; infinitely, if replicas differ from one another."""
    try:
        return error(run(*sets), alone(*sets))
    except AssertionError as differ:
        assert "copies of" in str(differ)
        return math.inf


@pytest.mark.parametrize("zero", [1, 2])
def test_weights_that_are_not_gathered_after_the_update_are_seen(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", zero_faults.ungathered)
    assert _far((*TWO, FEW, f"parallel.zero={zero}")) == math.inf


def test_weights_freed_early_end_the_run_at_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RANK", zero_faults.freed_early)
    with pytest.raises(RankFailed, match="which was not gathered or freed already") as info:
        run(*TWO, "parallel.zero=3")
    assert info.value.rank in (0, 1) and info.value.op


FALLS = "optimizer.weight_decay=30.0", "optimizer.schedule=wsd", "optimizer.decay_steps=2"
DECAYS = ('optimizer.no_decay=["*norm*"]', *FALLS)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_shards_decay_by_the_names_in_them(zero: int) -> None:
    one = alone(*DECAYS, steps=3)
    ran = run(f"parallel.zero={zero}", "parallel.dp=2", FEW, *DECAYS, steps=3)
    assert error(ran, one) < ROUNDING
    plain = alone(*FALLS, steps=3)
    assert distance(plain.params, one.params) > VISIBLE  # it is felt
