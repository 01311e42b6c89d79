"""Plans touch nothing that streams or the caching allocator could give to another meanwhile; and what does is seen."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from executor.device.race import RaceDevice
from executor.modules.attention import rope
from executor.optim.sync import BucketSync
from executor.runtime.interpreter import PlanInterpreter
from executor.transport.streams import Stream, StreamOp
from ir.core.errors import PiperError
from piper_sim.app.cli import main
from tests.executor.device import race_cases
from tests.executor.device.race_notes import Deletions
from tests.executor.device.races import PLANS, noted, raced
from tests.executor.runs import job_file


@pytest.mark.parametrize("name", PLANS)
def test_nothing_races(name: str, tmp_path: Path) -> None:
    assert raced(tmp_path, *PLANS[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", race_cases.covering(), ids=str)
def test_nothing_races_whatever_the_plan(case: race_cases.Case, tmp_path: Path) -> None:
    assert raced(tmp_path, *case.sets()) == []


# Orderings of which some are needless, by who asks for them, for whom, of which lane for which; and why they are kept.
NEEDLESS = {
    "LocalTransportHandle.wait for _TokenLoss.forward: compute, compute": "the words chosen are read behind a later sum",
    "LocalTransportHandle.wait for Thread.run: dp, dp": "who needs it waits for a later op of the stream, too",
    "StreamOp.post for PlanInterpreter._queue: compute, dp": "what a bucket reduces is older than the op before it",
    "LocalTransportHub._move for BucketSync.start.<locals>.<lambda>: dp, dp": "as above, for another rank's end of it",
}


@pytest.mark.parametrize("name", ["1f1b", "cp, ZeRO-2"])
def test_every_ordering_that_is_needed_is_missed(name: str) -> None:
    _misses_what_is_needed(PLANS[name], 24)


@pytest.mark.slow
@pytest.mark.parametrize("sets", [*PLANS.values(), *(c.sets() for c in race_cases.covering()[3::40])])
def test_every_ordering_that_is_needed_is_missed_in_any_plan(sets: tuple[str, ...]) -> None:
    _misses_what_is_needed(sets, 60)


def _misses_what_is_needed(sets: tuple[str, ...], count: int) -> None:
    """By the oracle, which is not the detector. What others imply is no ordering."""
    notes = noted(*sets)
    lost = Deletions.of(notes, notes.some(count))
    assert lost.found == lost.needed and len(lost.found) > lost.asked / 5
    assert lost.share >= 0.9 and {notes.why[k] for k in lost.kept} <= NEEDLESS.keys()


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


def _received_into_the_streams_own(self: PlanInterpreter, i: int, row: Any) -> None:
    def post() -> Any:
        into = self._values[self.program.value(i)] = self.boundary()  # its memory goes back to the stream's lane
        return self.transport.recv(self.program.peer(i), into)

    self._queue(i, row, post, self.delay_s)


def _reduced_early(self: PlanInterpreter, i: int, row: Any, *rest: Any, real: Any = PlanInterpreter._queue) -> None:
    if i in self.program.meetings and self.program.meetings[i].bucket:
        self._streams.setdefault(row.stream, Stream(row.stream, self.device))
        before = next(r.start for r in reversed(self._pending) if r.queued is None and r.start is not None)
        with patch.object(self, "device", Mock(wraps=self.device, mark=lambda: before)):
            real(self, i, row, *rest)
    else:
        real(self, i, row, *rest)


CONTROLS = {
    "a receive is into its stream's own memory": (PlanInterpreter, "_recv", _received_into_the_streams_own, "1f1b"),
    "a bucket is reduced before its last gradient": (PlanInterpreter, "_queue", _reduced_early, "cp, ZeRO-2"),
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


def test_weights_dropped_early_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(self: BucketSync, buckets: Any, op: str) -> None:
        for key in buckets:
            self.flat[key].drop()

    monkeypatch.setattr(BucketSync, "reads", drop)
    with pytest.raises(PiperError, match=r"on rank-\d compute touches memory that was given back"):
        raced(tmp_path, *PLANS["experts, ZeRO-3"])


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


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.cpu, float])
def test_the_host_reads_behind_its_lane_and_knows_it(read: Any) -> None:
    device = RaceDevice()
    device.bind()
    left, right = device.lane("left"), device.lane("right")
    with left():
        x = torch.zeros(1)
    with right():
        read(x)
    (race,) = device.races
    assert str(race).startswith("read by") and "right, not behind the write by aten.zeros" in str(race)
    with left():
        y = torch.ones(1)
        read(y)
    with right():
        y.add_(1.0)
    assert device.races == [race], "the host launched that behind what it has read"


def test_who_asks_for_a_shape_reads_nothing() -> None:
    device = RaceDevice()
    device.bind()
    left, right = device.lane("left"), device.lane("right")
    with left():
        x = torch.zeros(8)
    with right():
        torch.zeros_like(x), x.new_empty(3), x.view(2, 4)
    assert device.races == []


def test_the_command_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(job_file(tmp_path))
    assert main(["run", job, "-n", "2", "--racecheck", "--json"]) == 0
    assert '"races": []' in capsys.readouterr().out
    assert main(["run", job, "-n", "2", "--racecheck", "--emulate", "0.01"]) == 2
