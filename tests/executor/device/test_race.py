"""Plans touch nothing that streams or the caching allocator could give to another meanwhile; and what does is seen."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from executor.checkpoint import keeper
from executor.device.race import RaceDevice
from executor.device.race_clocks import DeviceRaceClocks
from executor.modules.attention import rope
from executor.optim.sync import BucketSync
from executor.runtime.interpreter import PlanInterpreter
from executor.transport.streams import Stream, StreamOp
from ir.core.errors import PiperError
from piper_sim.app.cli import main
from tests.executor.device import race_cases
from tests.executor.device.race_notes import Deletions
from tests.executor.device.races import PLANS, noted, raced, resumed
from tests.executor.runs import job_file


@pytest.mark.slow
@pytest.mark.parametrize("case", race_cases.covering(), ids=str)
def test_nothing_races_whatever_the_plan(case: race_cases.Case, tmp_path: Path) -> None:
    """That nothing does under PLANS is asked where their hosts wait: test_host_syncs.py."""
    assert raced(tmp_path, *case.sets()) == []


@pytest.mark.parametrize("behind", [True, False])
def test_what_is_saved_evaluated_and_dumped_between_steps_does_not_race(behind: bool, tmp_path: Path) -> None:
    case, on = race_cases.Case("zbv", 1, "tied", "none"), (RaceDevice(), RaceDevice())
    resumed(tmp_path, *case.sets(), f"run.save_behind={str(behind).lower()}", on=on)
    assert on[0].races == on[1].races == []


def test_a_copy_that_the_host_does_not_wait_for_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(held: Any) -> Any:
        return {n: (p, {s: flat.detach().clone() for s, flat in of.items()}) for n, (p, of) in held.items()}

    monkeypatch.setattr(keeper, "_copied", copied)
    case, on = race_cases.Case("zbv", 1, "tied", "none"), (RaceDevice(), RaceDevice())
    resumed(tmp_path, *case.sets(), "run.save_behind=true", on=on)
    assert any("outside of any lane" in race.first and "compute" in race.second for race in on[0].races)


# Who orders, for whom, what nothing needs that clashes, at times; and why it does.
NEEDLESS = {
    "LocalTransportHandle.wait for _TokenLoss.forward": "the words chosen are read behind a later sum",
    "LocalTransportHandle.wait for Thread.run": "who needs a message waits for a later one of its stream, too",
    "StreamOp.post for PlanInterpreter._queue": "what a bucket reduces is older than the message before it",
    "LocalTransportHub._move for BucketSync.start.<locals>.<lambda>": "the same, of another rank's bucket",
    "PlanInterpreter._wait": "weights are read behind a tp message of a rank that has waited for the same gather",
}


@pytest.mark.parametrize("name", ["1f1b", "cp, ZeRO-2"])
def test_every_ordering_that_is_needed_is_missed(name: str) -> None:
    notes = noted(*PLANS[name])
    lost = Deletions.of(notes, notes.some(24))
    assert lost.needed and lost.found == lost.needed, "the oracle is not the detector"


@pytest.mark.slow
def test_nine_orderings_of_ten_are_missed_and_the_others_have_names() -> None:
    found = needless = 0
    for sets in (*PLANS.values(), *(case.sets() for case in race_cases.covering()[3::40])):
        notes = noted(*sets)
        lost = Deletions.of(notes, notes.some(60))
        assert lost.found == lost.needed
        assert {notes.why[k].partition(": ")[0] for k in lost.kept} <= NEEDLESS.keys()
        found, needless = found + len(lost.found), needless + len(lost.kept)
    assert found >= 9 * needless and found > 150


def test_a_detector_that_takes_writes_for_reads_misses_less() -> None:
    class Blind(DeviceRaceClocks):
        def touch(self, lane: int, host: int, what: str, spans: Any, *, read_back: bool = False) -> None:
            reads = [(key, low, high, False) for key, low, high, _ in spans]
            super().touch(lane, host, what, reads, read_back=read_back)

    notes = noted(*PLANS["1f1b"])
    lost = Deletions.of(notes, notes.some(24), Blind)
    assert lost.found < lost.needed


def _send_freed_at_dispatch(self: PlanInterpreter, op: Any, value: Any, peer: int, row: Any) -> None:
    tensor = self._take(value, op)
    self._values[value] = torch.empty(0)
    self._queue(op, row, lambda: self.transport.send(peer, tensor), self.delay_s)


def _after_forgotten(
    self: StreamOp, post: Any, needs: Any = (), after: Any = None, real: Any = StreamOp.__init__
) -> None:
    real(self, post, needs, None)


def _wait_without_follow(self: PlanInterpreter, on: int, op: Any) -> None:
    if on in self._under:
        queued = self._under.pop(on).queued
        assert queued is not None
        queued.wait()


def _received_into_the_streams_own(self: PlanInterpreter, op: Any, value: Any, peer: int, row: Any) -> None:
    def post() -> Any:
        into = self._values[value] = self.boundary()  # its memory goes back to the stream's lane
        return self.transport.recv(peer, into)

    self._queue(op, row, post, self.delay_s)


def _reduced_early(self: PlanInterpreter, op: Any, row: Any, *rest: Any, real: Any = PlanInterpreter._queue) -> None:
    if op.index in self.program.meetings and self.program.meetings[op.index].bucket:
        self._streams.setdefault(row.stream, Stream(row.stream, self.device))
        before = next(r.start for r in reversed(self._pending) if r.queued is None and r.start is not None)
        with patch.object(self, "device", Mock(wraps=self.device, mark=lambda: before)):
            real(self, op, row, *rest)
    else:
        real(self, op, row, *rest)


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
        found = read(y)
    with right():
        y.add_(1.0)
    assert float(torch.as_tensor(found)) == 1.0, "what the host has is a copy"
    assert device.races == [race], "the host launched that behind what it has read"


@pytest.mark.parametrize("waits", ["a read", "a mark", "a mark, later", "another thread", "nobody"])
def test_memory_is_let_go_behind_what_its_host_has_waited_for(waits: str) -> None:
    device = RaceDevice()
    device.bind()
    left, right = device.lane("left"), device.lane("right")
    with left():
        x = torch.zeros(8)
        made = device.mark()
    with right():
        device.follow(made)
        y = x.sum()
        read = device.mark()
        if waits == "a read":
            y.tolist()
    if waits == "a mark":
        read.wait()
    elif waits == "another thread":
        thread = threading.Thread(target=lambda: (device.bind(), read.wait()))
        thread.start()
        thread.join()
    del x
    if waits == "a mark, later":
        read.wait()
    with right():
        torch.zeros(8)
    assert bool(device.races) == (waits not in ("a read", "a mark"))


def test_who_asks_for_a_shape_reads_nothing() -> None:
    device = RaceDevice()
    device.bind()
    left, right = device.lane("left"), device.lane("right")
    with left():
        x = torch.zeros(8)
    with right():
        torch.zeros_like(x), x.new_empty(3), x.view(2, 4)
    assert device.races == []
    assert torch.empty(1, device="meta").device.type == "meta"  # another device's tensor is no tensor of this one


def test_the_command_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(job_file(tmp_path))
    assert main(["run", job, "-n", "2", "--racecheck", "--json"]) == 0
    said = capsys.readouterr().out
    assert '"races": []' in said and '"host_syncs": {"results": ' in said
    assert main(["run", job, "-n", "2", "--racecheck", "--emulate", "0.01"]) == 2
