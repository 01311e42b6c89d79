"""A campaign of seeded faults on real runs: the right rank and op, in time, and nobody left; slow is no fault."""

from pathlib import Path
from typing import Any

import pytest

from executor.launch import run as cli
from executor.launch.launch import launch
from executor.launch.watch.verdict import RankFailed
from tests.executor import faults
from tests.executor.launch.events import LIMIT_S
from tests.executor.launch.fault_cases import Case, Fault, campaign, place
from tests.executor.launch.processes import gone, pids
from tests.executor.runs import judged, run

WATCHDOG_S = 2.0
CASES = campaign(50)
QUICK = 8


def _inject(monkeypatch: pytest.MonkeyPatch, target: Any, fault: dict[str, Any]) -> None:
    def launched(fn: object, ranks: int, args: dict[str, Any], **options: Any) -> list[Any]:
        return launch(target, ranks, {**args, "fault": fault}, **options)

    monkeypatch.setattr(cli, "launch", launched)


def _sets(case: Case) -> tuple[str, ...]:
    ranks = 4 if case[3] == "last" else 2
    return f"schedule.name={case[2]}", f"parallel.pp={ranks}", f"model.num_hidden_layers={2 * ranks}"


def _suffer(case: Case, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Fault, RankFailed]:
    """Run into a fault; checks all but the op: rank, who waits, that nobody is left. Time tells only of a stop."""
    folder.mkdir()
    sets = _sets(case)
    _, plan = judged(folder, *sets)
    fault = place(case, plan, seed)
    _inject(monkeypatch, faults.at_op, fault.__dict__)
    kernels = {"emulate": 0.002} if seed % 2 else {}
    with pytest.raises(RankFailed) as info:
        run(*sets, steps=3, out=folder / "out", watchdog_s=WATCHDOG_S if fault.kind == "stop" else LIMIT_S, **kernels)
    error, everyone = info.value, pids(folder / "out")
    assert error.rank == fault.rank and error.kind.exit_code == 4
    assert ("no progress for" in error.reason) == (fault.kind == "stop")
    assert len(everyone) == plan.programs and all(map(gone, everyone))
    assert fault.rank not in error.waiting and set(error.waiting) <= set(range(plan.programs))
    assert error.waiting, "somebody waits"
    return fault, error


@pytest.mark.parametrize("seed", range(QUICK), ids=lambda i: "-".join(CASES[i]))
def test_a_fault_is_laid_at_the_right_rank_and_op(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, error = _suffer(CASES[seed], seed, tmp_path / "run", monkeypatch)
    assert error.op == fault.text


@pytest.mark.slow
def test_the_whole_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = 0
    for seed, case in enumerate(CASES):
        fault, error = _suffer(case, seed, tmp_path / str(seed), monkeypatch)
        right += error.op == fault.text
    assert right >= 0.95 * len(CASES)


@pytest.mark.parametrize(("name", "ranks", "rank"), [("1f1b", 2, 0), ("zbv", 3, 2), ("gpipe", 3, 1)])
def test_a_straggler_is_named_and_is_no_fault(
    name: str, ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = f"schedule.name={name}", f"parallel.pp={ranks}", f"model.num_hidden_layers={2 * ranks}"
    _inject(monkeypatch, faults.slow, {"rank": rank, "seconds": 0.1})
    found = run(*sets, emulate=0.005, watchdog_s=LIMIT_S).object
    assert found["slowest"]["rank"] == rank and found["slowest"]["waited_s"] > 0.05


def test_ranks_that_share_a_process_fail_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = judged(tmp_path)
    fault = place(("raise", "backward", "1f1b", "last"), plan, 0)
    _inject(monkeypatch, faults.at_op, fault.__dict__)
    with pytest.raises(RankFailed, match="bad luck") as info:
        run(backend="local", out=tmp_path / "out")
    assert (info.value.rank, info.value.op, list(info.value.waiting)) == (fault.rank, fault.text, [0])
    assert len(set(pids(tmp_path / "out"))) == 1 and all(map(gone, pids(tmp_path / "out")))


def test_without_a_fault_the_same_run_ends_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _inject(monkeypatch, faults.at_op, {"rank": 0, "index": -7, "kind": "kill"})
    assert run(steps=3, out=tmp_path / "out").object["ranks"] == 2
