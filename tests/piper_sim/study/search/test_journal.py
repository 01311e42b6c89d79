"""A search that is cut off, on several workers, or on a file of another: nothing is lost, nothing mixed."""

import json
import os
import random
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind
from ir.job import load_job
from piper_sim.study import inputs
from piper_sim.study.search import JobSearchResult, search
from piper_sim.study.search.evaluate import BoundedJob, EvaluatedJob, full
from piper_sim.study.search.workers import JobJournal
from tests.executor.launch.processes import python
from tests.piper_sim.study.search.test_search import small, undisturbed
from tests.refusals import refusal


def test_neither_workers_nor_the_seed_change_what_is_found() -> None:
    one = undisturbed()
    two, other = search(small(), workers=2), search(small(seed=7))
    for found in (two, other):
        assert found.proven and found.pareto == one.pareto and found.best == one.best
    assert [r.to_dict() for r in two.all_rejected] == [r.to_dict() for r in one.all_rejected]
    assert two.evaluated == one.evaluated


def test_a_search_cut_off_anywhere_goes_on_from_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed again and again, the last line torn as often as not: the same answer, and nothing simulated twice."""
    path, whole, r, ends = tmp_path / "kept.jsonl", undisturbed(), random.Random(0), 0
    monkeypatch.setattr(JobJournal, "add", _dying(JobJournal.add, r))
    while True:
        before = path.read_bytes().count(b"\n") if path.exists() else 0
        try:
            found = search(small(), workers=1 + (ends > 2), journal=str(path))
            break
        except KeyboardInterrupt:
            ends += 1
            text = path.read_bytes()
            assert text.count(b"\n") > before
            if r.random() < 0.5:
                path.write_bytes(text + b'{"changes": "{')
    assert ends >= 2 and (found.best, found.pareto, found.evaluated) == (whole.best, whole.pareto, whole.evaluated)
    assert [x.to_dict() for x in found.all_rejected] == [x.to_dict() for x in whole.all_rejected]
    assert path.read_bytes().count(b"\n") == 1 + found.evaluated
    refusal(search, small(hbm_GiB=40.0), journal=str(path), match="of another job")


def test_ctrl_c_reaches_the_process_that_searches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to all: here to the first worker, as soon as there is one, which goes on."""
    workers, managers, submit = list[Any](), list[Any](), ProcessPoolExecutor.submit

    def disturbed(pool: ProcessPoolExecutor, *args: Any) -> Any:
        found = submit(pool, *args)
        if not workers:
            workers.extend(pool._processes.values())
            managers.append(pool._executor_manager_thread)
            os.kill(workers[0].pid, signal.SIGINT)
        return found

    monkeypatch.setattr(ProcessPoolExecutor, "submit", disturbed)
    search(small(), workers=2)
    managers[0].join()  # who asks for the end of its workers; of two who ask at once one is told nothing
    assert workers[0].exitcode == 0


KILLED = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from piper_sim.study.search import search
from tests.piper_sim.study.search.test_search import small

def submit(pool, *args, submit=ProcessPoolExecutor.submit):
    found = submit(pool, *args)
    found.result()  # the worker is ready, and waits for more
    print(*pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

ProcessPoolExecutor.submit = submit
search(small(), workers=2)
"""


def test_a_search_that_is_killed_leaves_no_worker() -> None:
    done = python("-c", KILLED)  # which reads what workers may write, too, until the last of them has ended
    assert done.returncode == -signal.SIGKILL and done.stdout, done.stderr


def test_workers_that_die_at_the_very_end_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small(microbatch_size=[1, 2])
    submit, whole = ProcessPoolExecutor.submit, search(job)

    def dying(pool: ProcessPoolExecutor, what: Any, *args: Any) -> Any:
        found = submit(pool, what, *args)
        for p in list(pool._processes.values()) if what is full else ():
            os.kill(p.pid or 0, signal.SIGKILL)
        return found

    monkeypatch.setattr(ProcessPoolExecutor, "submit", dying)
    assert len(whole.pareto) > 1 and search(job, workers=2).pareto == whole.pareto


def test_what_was_beaten_in_another_order_is_asked_for_its_allocators(tmp_path: Path) -> None:
    """Another seed, or a slower machine, comes to it before what beat it: here nothing in the journal was asked."""
    path, whole = tmp_path / "kept.jsonl", undisturbed()
    search(small(), journal=str(path))
    head, *rows = path.read_text().splitlines()
    for row in (kept := [json.loads(r) for r in rows]):
        if row["found"]["kind"] is None:
            row["found"]["device_bytes"] = None
    path.write_text("\n".join([head, *map(json.dumps, kept)]) + "\n")
    for _ in range(2):  # by what the journal held, then by what it has learned
        found = search(small(), journal=str(path))
        assert (found.best, found.pareto, found.evaluated) == (whole.best, whole.pareto, whole.evaluated)


def test_a_journal_is_of_what_files_held_and_of_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own config, an order's table: changed where they lie, nothing that was found of them is taken."""
    config = json.loads((Path(__file__).parents[4] / "ir/workload/config/presets/tiny-llama.json").read_text())
    table = {
        "model": {"config": str(tmp_path / "config.json"), "seq_len": 64},
        "parallel": {"dp": 2},
        "search": {"tp": [1, 2], "pp": [1], "name": ["1f1b"], "pin": ["recompute"]},
    }

    def found(width: int) -> JobSearchResult:
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
        return search(load_job(table), journal=str(tmp_path / "kept.jsonl"))

    assert found(128).best == found(128).best
    refusal(found, 256, match="of another job, file")
    found(128)
    monkeypatch.setattr(inputs, "program_digest", lambda: "another")
    refusal(found, 128, match="version of piper-sim")


@pytest.mark.parametrize("text", ["notes without an end", "one\ntwo", '{"schema_version": 1, "space": "ab"}\n{"chan'])
def test_a_file_that_is_no_journal_of_this_space_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    refusal(search, small(), journal=str(path), match="of another job")
    assert path.read_text() == text


DAMAGED: list[Callable[[dict[str, Any]], object]] = [
    lambda row: row["found"].update(iteration_s=None),
    lambda row: row["found"].update(iteration_s="0.1"),
    lambda row: row["found"].update(iteration_s=True),
    lambda row: row["found"].update(least_bytes="illegal"),
    lambda row: row["found"].update(device_bytes=1.5),
    lambda row: row["found"].update(kind="other"),
    lambda row: row["found"].pop("kind"),
    lambda row: row.update(found=5),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a journal, which is taken up as it is."""
    path = tmp_path_factory.mktemp("kept") / "kept.jsonl"
    whole = search(small(), journal=str(path))
    assert search(small(), journal=str(path)).best == whole.best
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_line_is_refused_and_left_as_it_is(
    change: Callable[..., object], kept: list[str], tmp_path: Path
) -> None:
    path, (head, first, *rest) = tmp_path / "kept.jsonl", kept
    row = json.loads(first)
    change(row)
    path.write_text(text := "".join([head, json.dumps(row) + "\n", *rest]))
    error = refusal(search, small(), journal=str(path), match="of another job")
    assert error.file == str(path) and path.read_text() == text


def test_a_journal_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refusal(search, small(), journal=str(tmp_path / "pipe"), match="not a regular file")
    refusal(search, small(), journal="a\0b", match="null byte")
    long = replace(small(), data=replace(small().data, source="x" * 300))  # is not there, and nothing reads it
    assert search(long, journal=str(tmp_path / "long.jsonl")).best is not None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        full_disk = refusal(search, small(), journal=str(tmp_path / "kept.jsonl"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (full_disk.kind, full_disk.key) == (ErrorKind.IO, "--journal")


def _dying(add: Callable[..., None], r: random.Random) -> Callable[..., None]:
    def dies(self: JobJournal, one: BoundedJob, found: EvaluatedJob) -> None:
        new = json.dumps(one.changes, sort_keys=True) not in self.known
        add(self, one, found)
        if new and r.random() < 0.7:
            raise KeyboardInterrupt

    return dies
