"""Configurations evaluated in their order, by this process or by several: which does not change what is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType

from cost_models import DeviceHardware
from piper_sim.study.search.evaluate import BoundedJob, EvaluatedJob, Front, evaluate, full
from piper_sim.study.search.journal import JobJournal
from piper_sim.study.simulate import Object


def loaded() -> None:
    """Make a process ready: what the engine's compiled twin needs is loaded once, for all that follows."""
    import piper_sim.compiled  # noqa: F401


class JobWorkers:
    """Evaluates jobs, ahead of being asked where there are several processes. limit_GiB: of device bytes on a rank."""

    def __init__(self, count: int, hardware: DeviceHardware, limit_GiB: float | None, journal: JobJournal) -> None:
        self.count, self.hardware, self.limit_GiB, self.journal = count, hardware, limit_GiB, journal
        self.pool = ProcessPoolExecutor(count, get_context("spawn"), loaded) if count > 1 else None

    def __enter__(self) -> JobWorkers:
        if self.pool is None:
            loaded()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
                found = self.journal.of(one) or result()
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
            return evaluate(one.job, self.hardware, self.limit_GiB, front())

        def there() -> EvaluatedJob:
            try:
                return future.result()
            except BrokenExecutor:  # a process died, out of memory as a rule: this one does its work
                self.pool = None
                return here()

        if self.pool is None or self.journal.of(one) is not None:
            return here, None
        try:
            future = self.pool.submit(evaluate, one.job, self.hardware, self.limit_GiB, tuple(front()))
        except BrokenExecutor:
            return here, None
        return there, future

    def full(self, asked: list[BoundedJob]) -> list[Object]:
        """`simulate`'s objects, and what each changes."""
        if self.pool is None or len(asked) < 2:
            return [full(one.changes, one.job) for one in asked]
        return [f.result() for f in [self.pool.submit(full, one.changes, one.job) for one in asked]]
