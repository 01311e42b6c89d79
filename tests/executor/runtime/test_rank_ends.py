"""How a rank's end is told: records of who stood where, where ranks part, failures as their reporter reads them."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.device import clock
from executor.device.progress import RankProgress, RankRecord, RankState, create
from executor.runtime import flight, worker
from executor.runtime.given import forget, given_name, given_text, read_given
from executor.runtime.program import RankPlan
from executor.runtime.rank import of_the_batch, traced_steps
from executor.runtime.spec import taken
from executor.runtime.target import describe, find, write_whole
from executor.transport.base import TransportError, TransportTopology
from ir.core.errors import ErrorKind, PiperError
from ir.plan.places import RankPlacement
from ir.plan.text import plan_digest
from ir.trace.trace import Trace
from tests.executor.launch.test_flight import _records
from tests.executor.runs import judged

ERRORS = (
    ValueError("bad"), ValueError(), TransportError("gone", [3, 1]), TransportError("gone"),
    PiperError(ErrorKind.IO, "no file", key="x"), KeyboardInterrupt(), KeyError("k"),
)  # fmt: skip


def records() -> Iterator[RankRecord]:
    """Some of every state."""
    for n, state in enumerate(RankState):
        rng = random.Random(n)
        peers, posting = rng.choice(((), (3,), (0, 2))), rng.choice(("", "1SEND_F0"))
        yield RankRecord(n, state, rng.choice((-1, 0, 7)), rng.choice(("", "0F0")), peers, 5.0 * n, 0.0, posting)


def parted() -> Iterator[str]:
    """What is said where one rank of four does something else, ends early, or both."""
    for seed in range(40):
        rng, found = random.Random(seed), _records(seed, (9, 1000)[seed % 2])
        for rank in rng.sample(range(4), rng.choice((0, 1, 2))):
            at = rng.randrange(len(found[rank]))
            if rng.random() < 0.6:
                found[rank][at] = {**found[rank][at], "profiling_name": "nccl:other", "is_p2p": rng.random() < 0.2}
            if rng.random() < 0.6:
                found[rank] = found[rank][: at + rng.randrange(2)]
        for suspect in (None, rng.randrange(4)):
            yield f"{seed} {suspect}: {flight.first_parting(found, suspect)}"


def kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What `keep` leaves of processes of one and two ranks, of which one says nothing and one has gone."""
    out, asked = folder / "out", list[str]()
    monkeypatch.setattr(flight, "PATIENCE_S", 0.0)
    flight.stacks_file(folder, 0).write_text("stacks of 0")
    flight.stacks_file(folder, 3).write_text("")
    flight.operations_file(folder, 1).write_text('{"entries": []}')
    said = {2: {"traceback": "Traceback of 2"}}
    flight.keep(out, folder, [(0, 1), (3,)], lambda: (records(), said, 50.0), lambda: asked.append("signal"))
    yield f"{asked} {(folder / flight.ASKED).exists()}"
    for file in sorted((out / flight.FOLDER).iterdir()):
        yield f"{file.name}: {file.read_text()}"
    flight.forget(out, 1)
    yield str(sorted(p.name for p in (out / flight.FOLDER).iterdir()))


def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a rank asks of another, and does not ask."""
    killed, now = list[tuple[int, int]](), iter(range(1000))
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(clock, "now", lambda: next(now) / 10)
    create(folder / "progress", 2)
    pen = RankProgress(folder / "progress", 0)
    pen.op(2, "1B0")
    for rank, text in ((6, "stacks of 6"), (7, "")):
        flight.stacks_file(folder, rank).write_text(text)
    mine = flight.RankFlight(folder / "own", 5, folder / "progress", "fell")
    mine.tell()
    for rank in (5, 6, 7, 8):
        mine.ask(rank, 100 + rank, folder / "progress")
    flight.RankFlight(None, 5, folder / "progress").ask(9, 109, folder / "progress")
    yield str([(pid, number == signal.SIGUSR2) for pid, number in killed])
    for file in sorted((folder / "own" / flight.FOLDER).glob("*.txt")):
        head, _, rest = file.read_text().partition("\n")
        yield f"{file.name}: {head.partition(', for')[0]} {rest}"
    pen.close()


def test_an_end_is_told_as_it_was(
    golden: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [*parted(), *kept(tmp_path, monkeypatch), *own(tmp_path, monkeypatch)]
    monkeypatch.setattr(flight.tempfile, "tempdir", "/temporary")
    for out, wait in ((None, 5.0), (None, 60.0), (None, 60.1), (Path("out"), 100.0)):
        told.append(f"{wait}: {flight.kept_in(out, wait, 17)}")
        told += [str(flight.pointed(PiperError(ErrorKind.IO, "x"), out, parting)) for parting in ("", "rank 1 was")]
    for error in ERRORS:
        found = worker.failure(error)
        told.append(f"{error!r} {[found.pop(k) is not None for k in ('traceback', 'time_s')]} {found}")
    golden("ends.txt", "\n".join(told).replace(str(tmp_path), ".") + "\n")


def meet(ctx: worker.RankContext, fail: bool = False) -> Any:
    """Two ranks of one process say that they are there; one may fail first."""
    if fail and ctx.rank:
        raise ValueError("bad luck")
    there = ctx.connect("local", TransportTopology.of(2), worker.RaceDevice())
    there.barrier()
    return [ctx.rank, ctx.world, ctx.local_rank, ctx.hub.race_device() is ctx.hub.race_device()]


@pytest.mark.parametrize("fail", [False, True])
def test_ranks_of_one_process_end_together(fail: bool, tmp_path: Path) -> None:
    create(tmp_path / "progress", 2)
    pens = [RankProgress(tmp_path / "progress", r) for r in range(2)]
    spec = {"target": describe(f"{__name__}:meet"), "args": {"fail": fail}, "world": 2, "flight": fail}
    hub, codes = worker.LocalRanks(), {}
    threads = [
        worker.threading.Thread(target=lambda r=r: codes.update({r: worker._rank(spec, tmp_path, r, pens[r], hub)}))
        for r in (1, 0)
    ]
    for thread in threads:
        thread.start()
        if fail:
            thread.join(60)
    for thread in threads:
        thread.join(60)
    states = [r.state for r in flight.read(tmp_path / "progress", 2)]
    assert codes == ({0: 1, 1: 1} if fail else {0: 0, 1: 0}) and hub.failed == (1 if fail else None)
    assert states == [RankState.FAILED if fail else RankState.DONE] * 2
    results = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("result-*"))]
    assert results == ([] if fail else [[0, 2, 0, True], [1, 2, 1, True]])
    failures = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("failure-*"))]
    assert [(f["type"], f["witness"]) for f in failures] == [("TransportError", True), ("ValueError", False)][
        : 2 * fail
    ]
    assert len([*tmp_path.glob("operations-*.json")]) == 2 * fail
    for pen in pens:
        pen.close()


def test_a_job_whose_path_is_no_text_is_given_too(tmp_path: Path) -> None:
    """A file system of another encoding: Python has its bytes as halves of surrogate pairs, which JSON refuses."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    prepared, plan = judged(folder)
    (tmp_path / given_name(2)).write_text(given_text(prepared, plan))
    assert read_given(tmp_path / given_name(2))[0].job.file == str(folder / "job.toml")


def test_what_was_given_is_what_is_read_and_another_plan_is_refused(tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, "parallel.dp=2", "schedule.microbatches=2")
    text, file = given_text(prepared, plan), tmp_path / given_name(1)
    file.write_text(text)
    again, read, _ = read_given(file)
    assert plan_digest(read) == plan_digest(plan) and read_given(file)[1] is read
    assert (again.layers, again.schedule, again.mesh) == (prepared.layers, prepared.schedule, prepared.mesh)
    forget()
    assert read_given(file)[1] is not read
    (tmp_path / "other.json").write_text(text.replace(plan_digest(plan), "0" * 64))
    with pytest.raises(PiperError, match="the plan's digest is") as error:
        read_given(tmp_path / "other.json")
    assert error.value.kind is ErrorKind.ILLEGAL_PLAN and "0" * 64 in error.value.message
    rows = len(plan) * 2
    assert traced_steps(plan, prepared.ranks) == 4_000_000 // rows
    losses, places = {1: 0.5, 0: 0.25}, RankPlacement.of(plan)
    programs = [RankPlan.of(plan, r) for r in range(prepared.ranks)]
    first = [2 * places.replica(r) for r in range(prepared.ranks)]
    assert [of_the_batch(prepared, p, losses) for p in programs] == [[(n, 0.25), (n + 1, 0.5)] for n in first]
    rows_of = [(r, i) for r in range(4) for i in range(len(plan)) if plan.program[i] == places.program(r)]
    streams = [plan.shapes[s].stream for s in plan.shape]
    trace = Trace.of({}, [(0, r, streams[i], plan.text(i), 0.0, 1.0, 2.0 + r) for r, i in rows_of])
    found = [taken(trace, plan, places, r)[0, plan.kind == 0] for r in range(4)]
    for r in range(4):
        own_rank = {p: q for q in range(4) for p in [places.program(q)] if places.position(q) == places.position(r)}
        assert found[r].tolist() == [1.0 + own_rank[int(p)] for p in plan.program[plan.kind == 0]]


def test_functions_are_found_by_module_or_by_file_and_files_appear_whole(tmp_path: Path) -> None:
    ours, theirs = describe(given_text), describe(meet)
    assert ours == {"module": "executor.runtime.given", "name": "given_text"} and find(ours) is given_text
    assert theirs == {"module": __name__, "file": __file__, "name": "meet"} and find(theirs).__name__ == "meet"
    (tmp_path / "mine.py").write_text("def go():\n    return 7\n")
    found = find({"module": "__piper_main__", "file": str(tmp_path / "mine.py"), "name": "go"})
    assert found() == 7
    for wrong in (lambda: 1, RankProgress.op):
        with pytest.raises(TypeError, match="must be a module-level function in a file"):
            describe(wrong)
    write_whole(tmp_path / "x", "whole")
    with pytest.raises(OSError):
        write_whole(tmp_path / "none" / "x", "whole")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "folder", "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "mine.py", "x"]
