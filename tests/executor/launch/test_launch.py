"""Ranks that succeed, raise, die and hang: the report names the right one, and nothing is left running."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from executor.device.progress import RankRecord, RankState
from executor.launch.launch import RankFailed, launch
from executor.launch.watch.verdict import stuck
from executor.runtime.worker import RankContext
from executor.transport.base import TransportTopology
from tests.executor.launch.events import LIMIT_S, others_wait, until
from tests.executor.launch.processes import gone, pids, started


def _ring(ctx: RankContext, fault: str = "", at: int = 1) -> float:
    """Rank 0 sends to 1, …; each rank waits for its predecessor. `fault` happens on rank `at` in its second round."""
    t = ctx.gloo(TransportTopology.of(ctx.world, [(r, (r + 1) % ctx.world) for r in range(ctx.world)]))
    before, after, total = (ctx.rank - 1) % ctx.world, (ctx.rank + 1) % ctx.world, 0.0
    sent = []
    for i in range(3):
        got = torch.empty(4)
        handle = t.recv(before, got)
        ctx.progress.op(2 * i, f"{ctx.rank}F{i}")
        if fault and i == 1:
            t.barrier()  # the first round is over everywhere
        if ctx.rank == at and i == 1:
            if fault:
                others_wait(ctx)
                print("the last line")
            if fault == "raise":
                raise ValueError("bad luck")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "crash":
                signal.raise_signal(signal.SIGSEGV)
            if fault == "exit":
                os._exit(7)
            if fault == "hang":
                time.sleep(1000)
        sent.append(t.send(after, torch.full((4,), float(ctx.rank + i))))
        ctx.progress.op(2 * i + 1, f"{ctx.rank}RECV_F{i}")
        ctx.progress.wait([before])
        handle.wait()
        ctx.progress.go_on()
        total += float(got.sum())
    ctx.progress.wait(text="end")
    for h in sent:
        h.wait()
    t.close()
    return total


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_return_their_results_and_end(world: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    got = launch(_ring, world, out=out)
    assert got == [4.0 * sum((r - 1) % world + i for i in range(3)) for r in range(world)]
    assert len(pids(out)) == world and all(map(gone, pids(out)))
    assert sorted(p.name for p in out.iterdir()) == ["ranks.json"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "ValueError: bad luck"),
        ("kill", "SIGKILL"),
        ("crash", "SIGSEGV"),
        ("exit", "code 7"),
        ("hang", "no progress"),
        ("stop", "no prog"),
    ],
)
def test_the_culprit_is_named_and_everybody_ends(fault: str, reason: str, tmp_path: Path) -> None:
    watchdog_s = 1.5 if "no prog" in reason else LIMIT_S
    with pytest.raises(RankFailed, match=reason) as info:
        launch(_ring, 3, {"fault": fault, "at": 1}, out=tmp_path, watchdog_s=watchdog_s)
    error = info.value
    assert (error.rank, error.op) == (1, "1F1")
    # Rank 0 is one or two waits further back, or finds its own send refused: that depends on who is quicker.
    assert error.waiting.pop(2) == "2RECV_F1" and error.waiting.popitem()[1] in ("0F1", "0RECV_F1", "0F2", "0RECV_F2")
    words = {"raise": 'raise ValueError("bad luck")', "crash": "in _ring"}.get(fault, "the last line")
    assert error.kind.exit_code == 4 and words in error.details and error.__notes__ == [error.details]
    assert all(map(gone, pids(tmp_path)))


def test_a_slow_rank_is_no_dead_one() -> None:
    """Of two ranks that work, each new op puts the watchdog off; one that waits is never the culprit."""

    def seen(rank: int, state: RankState, changed_s: float, beat_s: float = 100.0) -> RankRecord:
        return RankRecord(rank, state, 3, "1F0", (), changed_s, beat_s)

    def found(*records: RankRecord) -> tuple[int, float] | None:
        return stuck(records, now_s=100.0, began_s=0.0, watchdog_s=10.0, startup_s=60.0)

    assert found(seen(0, RankState.RUN, 90.5), seen(1, RankState.RUN, 95.0)) is None
    assert found(seen(0, RankState.RUN, 90.5), seen(1, RankState.RUN, 89.5)) == (1, 10.5)
    assert found(seen(0, RankState.WAIT, 50.0), seen(1, RankState.RUN, 95.0)) is None
    assert found(seen(0, RankState.WAIT, 50.0), seen(1, RankState.RUN, 89.0)) == (1, 11.0)
    assert found(seen(0, RankState.STARTING, 50.0), seen(1, RankState.DONE, 10.0)) is None
    assert found(seen(0, RankState.WAIT, 50.0, beat_s=60.0), seen(1, RankState.RUN, 95.0)) == (0, 50.0), "it is frozen"
    assert found(seen(0, RankState.WAIT, 50.0), seen(1, RankState.OUTSIDE, 10.0)) is None, "a loop takes its time"
    lost = seen(1, RankState.OUTSIDE, 10.0, beat_s=39.0)
    assert found(seen(0, RankState.WAIT, 50.0), lost) == (1, 90.0), "its machine is gone"


def _variables(ctx: RankContext) -> list[str | None]:
    return [os.environ.get(name) for name in ("PIPER_A", "PIPER_B", "OMP_NUM_THREADS")]


def test_ranks_have_the_variables_that_the_launcher_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_A", "1")
    assert launch(_variables, 1) == [["1", None, "1"]]
    monkeypatch.delenv("PIPER_A")
    monkeypatch.setenv("PIPER_B", "\udcff two")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch(_variables, 2) == [[None, "\udcff two", "1"]] * 2


def _mute(ctx: RankContext) -> None:
    time.sleep(1000)


def test_a_rank_that_never_comes_to_its_first_op_has_failed() -> None:
    with pytest.raises(RankFailed, match="before its first op"):
        launch(_mute, 1, startup_s=0.5)


def test_only_functions_of_a_module_can_be_launched() -> None:
    with pytest.raises(TypeError, match="module-level"):
        launch(lambda ctx: None, 1)


_SCRIPT = """
import sys
from pathlib import Path
from executor.launch.launch import launch
import tests.executor.launch.test_launch as module
Path(sys.argv[1], "mains").open("a").write(f"{__name__} ")
launch(module._mute, 2, out=Path(sys.argv[1]))
"""


def test_ranks_end_with_a_killed_parent_and_never_run_its_main_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    with started(str(script), str(tmp_path)) as parent:
        until((tmp_path / "ranks.json").exists)
        parent.kill()
    ranks = pids(tmp_path)
    assert len(ranks) == 2
    until(lambda: all(map(gone, ranks)))
    assert (tmp_path / "mains").read_text() == "__main__ "
