"""Configurations evaluated in their order, by one process or several, and kept in a journal as they are found."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import TracebackType

import msgspec

from cost_models import DeviceHardware
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import writing
from ir.job.cache import PLANS
from piper_sim.study.inputs import inputs_digest
from piper_sim.study.search.evaluate import (
    BoundedJob,
    EvaluatedJob,
    Front,
    JobCheck,
    beaten,
    evaluate,
    full,
)
from piper_sim.study.search.space import JobSpace
from piper_sim.study.simulate import Object

KEPT_OPS = 500_000  # of all plans that are kept while a search runs


class JobJournal:
    """Simulations by what they change, one line each behind a line that says of which space; "": kept nowhere.

    A line is written whole and at once. What a kill leaves of the last one is dropped.

    A journal is of what its simulations were made from: what the job says, what its files hold, this program; and of
    whose launch they were asked to be.

    Raises PiperError (usage): the file is of another space, or no journal; (io): it cannot be written.
    """

    def __init__(self, path: str, space: JobSpace, launch: str = "") -> None:
        self.path, self.known = path, dict[str, EvaluatedJob]()
        if not path:
            return
        said = [space.values, space.schedules, space.job.search.memory_limit_GiB, launch]
        digest = hashlib.sha256(json.dumps([inputs_digest(space.own), said], default=str).encode()).hexdigest()
        head = json.dumps({"schema_version": 1, "space": digest}) + "\n"
        try:
            if Path(path).exists() and not Path(path).is_file():  # a device may never end
                raise OSError("not a regular file")
            with Path(path).open("a+", encoding="utf-8") as file:
                file.seek(0)
                text = file.read()
                whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
                self._read(whole or [text], head)  # what is no journal is left as it is
                file.truncate(sum(len(line.encode()) for line in whole))
                if not whole:
                    file.write(head)
        except (OSError, ValueError) as e:  # a NUL in its name, what is no UTF-8
            raise PiperError(ErrorKind.IO, str(e), file=path, key="--journal") from None

    def _read(self, lines: list[str], head: str) -> None:
        try:
            same = head.startswith(lines[0])  # or as much of it as there is
            for row in map(json.loads, lines[1:]):
                self.known[row["changes"]] = found = msgspec.convert(row["found"], EvaluatedJob)
                timed = None not in (found.iteration_s, found.least_bytes)
                same = same and asdict(found) == row["found"] and (timed or found.kind is not None)
        except (ValueError, KeyError, TypeError, RecursionError):
            same = False
        if not same:
            message = "a journal of another job, file of it, space, hardware or version of piper-sim, or damaged"
            fix = "another file, or remove this one"
            raise PiperError(ErrorKind.USAGE, message, file=self.path, key="--journal", suggestion=fix)

    def add(self, one: BoundedJob, found: EvaluatedJob) -> None:
        """Keep one more. Raises PiperError (io): it cannot be written."""
        if self.path and self.known.get(_key(one)) != found:
            with writing(Path(self.path), "--journal"), Path(self.path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"changes": _key(one), "found": asdict(found)}) + "\n")

    def of(self, one: BoundedJob, front: Front) -> EvaluatedJob | None:
        """What is known of one. Whose allocators were not asked, as it was beaten, is known only while it is: another
        seed, or a slower machine, comes to it before what beat it.
        """
        found = self.known.get(_key(one))
        if found is None or found.kind is not None or found.device_bytes is not None:
            return found
        assert found.iteration_s is not None and found.least_bytes is not None
        return found if beaten(found.iteration_s, found.least_bytes, front) else None


def _key(one: BoundedJob) -> str:
    return json.dumps(one.changes, sort_keys=True)


def loaded() -> None:
    """Make a process ready: what the engine's compiled twin needs is loaded once, for all that follows.

    A configuration makes 10⁵ objects and no cycles: looked for every 700 objects, they cost a sixth to a third of it.
    A structure comes once, and memory that was used before is quicker than new: few plans are kept.
    """
    import piper_sim.compiled  # noqa: F401

    gc.set_threshold(50_000, 20, 20)
    PLANS.most = KEPT_OPS


def _begin() -> None:
    """Make a worker ready, which ends with who searches: of one that is killed it hears nothing, and would wait."""
    threading.Thread(target=_follow, name="who searches", daemon=True).start()
    loaded()


def _follow() -> None:
    if (searching := parent_process()) is not None:
        searching.join()
        os._exit(1)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A process begun in here never sees it, though a terminal sends it to all: who searches hears and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class JobWorkers:
    """Evaluates jobs, ahead of being asked where there are several processes. limit_GiB: of device bytes on a rank.

    check: what else is asked of one that fits.
    """

    def __init__(
        self,
        count: int,
        hardware: DeviceHardware,
        limit_GiB: float | None,
        journal: JobJournal,
        check: JobCheck | None = None,
    ) -> None:
        self.count, self.hardware, self.limit_GiB, self.journal, self.check = count, hardware, limit_GiB, journal, check
        self.pool = ProcessPoolExecutor(count, get_context("spawn"), _begin) if count > 1 else None
        self.collected, self.kept = gc.get_threshold(), PLANS.most

    def __enter__(self) -> JobWorkers:
        if self.pool is None:
            loaded()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gc.set_threshold(*self.collected)
        PLANS.most = self.kept
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def each(
        self, asked: Iterator[BoundedJob], wanted: Callable[[BoundedJob], bool], front: Callable[[], Front]
    ) -> Iterator[tuple[BoundedJob, EvaluatedJob | None]]:
        """Evaluate in order. wanted: asked when a result is due, whether it is still to be had; None if it is not."""
        waiting: deque[tuple[BoundedJob, Callable[[], EvaluatedJob], Future[EvaluatedJob] | None]] = deque()
        while True:
            while len(waiting) <= (self.count if self.pool else 0) and (new := next(asked, None)) is not None:
                waiting.append((new, *self._begun(new, front)))
            if not waiting:
                return
            one, result, future = waiting.popleft()
            if wanted(one):
                found = self.journal.of(one, front()) or result()
                self.journal.add(one, found)
                yield one, found
            else:
                if future is not None:
                    future.cancel()
                yield one, None

    def _begun(
        self, one: BoundedJob, front: Callable[[], Front]
    ) -> tuple[Callable[[], EvaluatedJob], Future[EvaluatedJob] | None]:
        """How its result is had; and what works on it meanwhile."""

        def here() -> EvaluatedJob:
            return evaluate(one.job, self.hardware, self.limit_GiB, front(), self.check)

        def there() -> EvaluatedJob:
            try:
                return future.result()
            except BrokenExecutor:  # a process died, out of memory as a rule: this one does its work
                self.pool = None
                return here()

        if self.pool is None or self.journal.of(one, front()) is not None:
            return here, None
        try:
            with _without_ctrl_c():
                future = self.pool.submit(evaluate, one.job, self.hardware, self.limit_GiB, tuple(front()), self.check)
        except BrokenExecutor:
            return here, None
        return there, future

    def full(self, asked: list[BoundedJob]) -> list[Object]:
        """`simulate`'s objects, and what each changes."""
        if self.pool is not None and len(asked) > 1:
            with suppress(BrokenExecutor):  # a process died: this one does its work
                return [f.result() for f in [self.pool.submit(full, one.changes, one.job) for one in asked]]
        return [full(one.changes, one.job) for one in asked]
