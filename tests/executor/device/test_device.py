"""What a device with queues of its own is told, written down by one that is none: who follows whom, on any plan.

No GPU is needed: a mark carries a vector clock, so that "behind" can be asked of any two points of any two lanes.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.device.device import HostDevice
from executor.device.progress import RankProgress, RankState, create
from executor.device.race import DeviceRaceMark, RaceDevice
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import RankPlan
from executor.runtime.rank import blank, crossing, topology
from executor.runtime.spec import PlanRun
from executor.transport.local import LocalTransport
from executor.transport.streams import Stream, StreamOp
from ir.job.run_options import JobRunOptions
from ir.plan.plan import OpKind, Plan
from tests.executor.runs import judged
from tests.executor.threads import run_threads

Spans = dict[int, tuple[DeviceRaceMark, DeviceRaceMark]]


class Witness(RaceDevice):
    """A device that only writes down who follows whom."""

    def bind(self) -> None:
        """Ops are not watched."""

    def unseen(self) -> AbstractContextManager[Any]:
        return nullcontext()


class _Watched(PlanInterpreter):
    """Keeps the marks of each op of the last step."""

    def _settle(self) -> None:
        self.marks = {}
        for k, row in enumerate(self._pending):
            q = row.queued
            self.marks[self.program.first + k] = (row.start, row.end) if q is None else (q.start, q.end)
        super()._settle()


def _spans(plan: Plan, prepared: Any, device: Witness, folder: Path) -> Spans:
    """Run two steps with virtual ranks; the marks of each op."""
    create(folder / "progress", plan.programs)
    spec = PlanRun(JobRunOptions(2, 2, backend="local", emulate=0.0))

    def life(t: LocalTransport) -> dict[int, Any]:
        program = RankPlan.of(plan, t.rank)
        kernels, empty = blank(prepared, plan, program, spec), crossing(prepared, HostDevice())
        run = _Watched(program, kernels, t, RankProgress(folder / "progress", t.rank), device, empty)
        batches: Any = dict.fromkeys(range(prepared.mbs), _NoBatch())
        for step in range(2):
            run.step(step, batches)
        run.close()
        return run.marks

    out: Spans = {}
    for marks in run_threads(life, topology(plan), device):
        out |= marks
    return out


class _NoBatch:
    ids = None

    def extras(self, wants: object) -> tuple[()]:
        return ()


def _broken(plan: Plan, spans: Spans) -> list[tuple[str, str]]:
    """Every two ops of which one must be over before the other starts on the device, and is not."""
    must = [(int(w), int(i)) for i, w in zip(plan.waits.rows(), plan.waits.items, strict=True)]
    for a, b in zip(plan.bounds.tolist(), plan.bounds.tolist()[1:], strict=False):
        last = -1
        for i in range(a, b):
            if plan.kind[i] == OpKind.COMPUTE:
                last = i
            elif last >= 0:
                must.append((last, i))  # its memory may have been that op's
    out = [(plan.text(w), plan.text(i)) for w, i in must if not spans[i][0].behind(spans[w][1])]
    for recv in np.flatnonzero(plan.kind == OpKind.RECV).tolist():
        send = int(plan.partner[recv])
        if not spans[recv][1].behind(spans[send][0]):
            out.append((plan.text(send), plan.text(recv)))
    return out


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "interleaved-1f1b"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_the_device_too_nothing_starts_before_what_the_plan_lets_it_wait_for(
    name: str, ranks: int, tmp_path: Path
) -> None:
    sets = f"schedule.name={name}", f"parallel.pp={ranks}", f"model.num_hidden_layers={2 * ranks}"
    prepared, plan = judged(tmp_path, *sets)
    assert _broken(plan, _spans(plan, prepared, Witness(), tmp_path)) == []
    assert len(_broken(plan, _spans(plan, prepared, Witness(deaf=True), tmp_path))) > len(plan) / 4


class _Noted(RankProgress):
    """Remembers how each op was shown since somebody last cleared `seen`."""

    seen: list[tuple[str, RankState]]

    def _write(self, state: RankState) -> None:
        super()._write(state)
        self.__dict__.setdefault("seen", []).append((self._text.decode(), state))


class _Settling(PlanInterpreter):
    """Keeps how each op was shown while the host waited for the device at the end of the step."""

    def _settle(self) -> None:
        self.progress.seen = []  # type: ignore[attr-defined]
        super()._settle()


def test_who_waits_for_a_message_on_the_device_is_shown_to_wait(tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path)
    create(tmp_path / "progress", plan.programs)
    spec, device = PlanRun(JobRunOptions(2, backend="local", emulate=0.0)), Witness()

    def life(t: LocalTransport) -> list[tuple[str, RankState]]:
        program, progress = RankPlan.of(plan, t.rank), _Noted(tmp_path / "progress", t.rank)
        kernels, empty = blank(prepared, plan, program, spec), crossing(prepared, HostDevice())
        run = _Settling(program, kernels, t, progress, device, empty)
        run.step(0, dict.fromkeys(range(prepared.mbs), _NoBatch()))  # type: ignore[arg-type]
        run.close()
        return progress.seen

    for rank, seen in enumerate(run_threads(life, topology(plan), device)):
        a, b = plan.bounds[rank : rank + 2].tolist()
        talks = {plan.text(i): plan.kind[i] != OpKind.COMPUTE for i in range(a, b)}
        assert {talks[text] for text, _ in seen} == {True, False}
        assert all(state is (RankState.WAIT if talks[text] else RankState.RUN) for text, state in seen)


def test_an_op_that_the_device_queues_needs_no_thread() -> None:
    device = Witness()

    class Posted:  # as NCCL's: to wait for it is to tell the active lane to
        def __init__(self) -> None:
            self.mark = device.mark()

        def done(self) -> bool:
            return True

        def wait(self) -> None:
            device.follow(self.mark)

    stream = Stream("send>1", device)
    compute = device.lane("compute")
    with compute():
        made = device.mark()
        ops = [StreamOp(Posted, after=made), StreamOp(Posted)]
        for op in ops:
            stream.put(op)
        assert all(op.done() for op in ops) and stream._thread is None
        ends = [op.end for op in ops]
        assert isinstance(ends[0], DeviceRaceMark) and isinstance(ends[1], DeviceRaceMark)
        assert ends[0].behind(made) and ends[1].behind(ends[0]) and not device.mark().behind(ends[1])
        device.follow(ends[1])
        assert device.mark().behind(ends[1])
    stream.close()


def test_a_host_is_never_ahead() -> None:
    host = HostDevice()
    with host.lane("compute")():
        mark = host.mark()
        host.follow(mark)
    assert mark.done() and mark.seconds() <= time.monotonic()
