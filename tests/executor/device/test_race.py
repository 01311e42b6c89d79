"""Plans touch nothing that streams or the caching allocator could give to another meanwhile; and what does is seen."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.device.race import RaceDevice
from executor.modules.attention import rope
from executor.runtime.interpreter import PlanInterpreter
from executor.transport.streams import StreamOp
from piper_sim.app.cli import main
from tests.executor.device.races import PLANS, raced
from tests.executor.runs import job_file


@pytest.mark.parametrize("name", PLANS)
def test_nothing_races(name: str, tmp_path: Path) -> None:
    assert raced(tmp_path, *PLANS[name]) == []


def _send_freed_at_dispatch(self: PlanInterpreter, i: int, row: Any) -> None:
    value = self.program.value(i)
    tensor = self._take(value, i)
    self._values[value] = torch.empty(0)
    self._queue(i, row, lambda: self.transport.send(self.program.peer(i), tensor), self.delay_s)


def _after_forgotten(
    self: StreamOp, post: Any, needs: Any = (), after: Any = None, real: Any = StreamOp.__init__
) -> None:
    real(self, post, needs, None)


def _wait_without_follow(self: PlanInterpreter, op: int, now: int | None) -> None:
    if op in self._under:
        queued = self._under.pop(op).queued
        assert queued is not None
        queued.wait()


CONTROLS = {
    "a send is freed as it is dispatched": (PlanInterpreter, "_send", _send_freed_at_dispatch, "1f1b"),
    "a message does not wait for what it carries": (StreamOp, "__init__", _after_forgotten, "1f1b"),
    "who waits does not follow": (PlanInterpreter, "_wait", _wait_without_follow, "experts, ZeRO-3"),
    "one rank's tables are read by another": (rope, "get_ident", lambda: 0, "dualpipe, ZeRO-1, recompute"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_races(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, plan = CONTROLS[name]
    rope.forget_tables()
    monkeypatch.setattr(owner, attribute, wrong)
    assert raced(tmp_path, *PLANS[plan])


def test_a_deaf_device_races_everywhere(tmp_path: Path) -> None:
    found = raced(tmp_path, device=RaceDevice(deaf=True))
    assert len(found) > 10 and any("free" in str(race) for race in found)


def test_bytes_apart_do_not_race_and_overlapping_ones_do() -> None:
    device = RaceDevice()
    device.bind()
    left, right = device.lane("left"), device.lane("right")
    with left():
        x = torch.zeros(8)
        made = device.mark()
    with right():
        device.follow(made)
        x[4:].add_(1.0)
    with left():
        x[:4].add_(1.0)
        assert device.races == []
        x[3:5].add_(1.0)
    (race,) = device.races
    assert "write by aten.add_" in str(race) and race.bytes == 32


def test_the_command_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(job_file(tmp_path))
    assert main(["run", job, "-n", "2", "--racecheck", "--json"]) == 0
    said = capsys.readouterr().out
    assert '"races": []' in said and '"host_syncs": {"results": ' in said
    assert main(["run", job, "-n", "2", "--racecheck", "--emulate", "0.01"]) == 2
