"""Our plans on torch's own pipelining runtime: our order as CSV, the same gradients and losses to the bit."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from executor.launch.launch import launch
from executor.runtime.given import given_text
from ir.core.order import Order
from ir.schedules.custom import from_csv
from ir.schedules.registry import build
from piper_sim.formats.torch_csv import order_csv
from tests.executor import torch_ranks
from tests.executor.runs import Arrays, distance, judged, merged, run

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev")
STEPS = 2


@dataclass(frozen=True)
class Oracle:
    """What torch's runtime made of one plan. order: as we read the CSV again. losses: one per step."""

    order: tuple[Order, ...]
    losses: list[float]
    grads: Arrays
    params: Arrays


def _sets(schedule: str, ranks: int, mbs: int, layers: int) -> tuple[str, ...]:
    return (
        f"schedule.name={schedule}",
        f"schedule.microbatches={mbs}",
        f"parallel.pp={ranks}",
        f"model.num_hidden_layers={layers}",
        "optimizer.name=sgd",
        "optimizer.lr=0.5",
        "optimizer.clip_norm=0",
    )


@lru_cache
def _oracles(ranks: int, mbs: int, layers: int) -> dict[str, Oracle]:
    """All schedules in one launch: importing torch's pipelining takes longer than a run."""
    with tempfile.TemporaryDirectory() as name:
        given, folders = [], [Path(name) / s for s in SCHEDULES]
        for schedule, folder in zip(SCHEDULES, folders, strict=True):
            folder.mkdir()
            sets = _sets(schedule, ranks, mbs, layers)
            prepared, plan = judged(folder, *sets)
            (folder / "order.csv").write_text(order_csv(prepared))
            given.append(given_text(prepared, plan))
        args = {"steps": STEPS, "folders": [str(f) for f in folders]}
        results = launch(torch_ranks.train, ranks, args, given=given)
        return {s: _oracle(f, [r[k] for r in results]) for k, (s, f) in enumerate(zip(SCHEDULES, folders, strict=True))}


def _oracle(folder: Path, losses: Sequence[list[list[float]]]) -> Oracle:
    ends = [load_file(folder / f"rank-{r}.safetensors") for r in range(len(losses))]
    grads, params = (
        merged([{n.removeprefix(kind): a for n, a in end.items() if n.startswith(kind)} for end in ends])
        for kind in ("grad/", "param/")
    )
    (mine,) = [x for x in losses if all(x)]
    return Oracle(from_csv(folder / "order.csv").orders, [_total(step) for step in mine], grads, params)


def _total(losses: list[float]) -> float:
    total = 0.0
    for loss in losses:
        total += loss
    return total


def _same(schedule: str, ranks: int, mbs: int, layers: int) -> None:
    theirs = _oracles(ranks, mbs, layers)[schedule]
    assert theirs.order == build(schedule, ranks, mbs).orders
    ours = run(*_sets(schedule, ranks, mbs, layers), steps=STEPS)
    assert ours.object["losses"] == theirs.losses and len(theirs.losses) == STEPS
    assert distance(merged(ours.grads), theirs.grads) == 0.0
    assert distance(merged(ours.params), theirs.params) == 0.0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchs_runtime_on_our_order_trains_the_same_to_the_bit(schedule: str, ranks: int) -> None:
    _same(schedule, ranks, mbs=ranks + 1, layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mbs", "layers"), [(2, 4, 5), (3, 7, 7), (4, 8, 9)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_layers_and_more_microbatches_too(schedule: str, ranks: int, mbs: int, layers: int) -> None:
    _same(schedule, ranks, mbs, layers)


def test_the_comparison_sees_another_order_of_sums() -> None:
    """looped-bfs has the same stages and takes microbatches backward from the last to the first."""
    sets = _sets("looped-bfs", 2, 3, 8)
    theirs, ours = _oracles(2, 3, 8)["interleaved-1f1b"], run(*sets, steps=STEPS)
    assert 0.0 < distance(merged(ours.grads), theirs.grads) < 1e-10
