"""Configurations evaluated in their order, by this process or by several: which does not change what is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType

from piper_sim.study.search.evaluate import BoundedJob, EvaluatedJob, evaluate, full
from piper_sim.study.simulate import Object


def loaded() -> None:
    """Make a process ready: what the engine's compiled twin needs is loaded once, for all that follows."""
    import piper_sim.compiled  # noqa: F401


class JobWorkers:
    """Evaluates jobs, ahead of being asked where there are several processes. limit_GiB: of device bytes on a rank."""

    def __init__(self, count: int, limit_GiB: float | None) -> None:
        self.count, self.limit_GiB = count, limit_GiB
        self.pool = ProcessPoolExecutor(count, get_context("spawn"), loaded) if count > 1 else None

    def __enter__(self) -> JobWorkers:
        if self.pool is None:
            loaded()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def each(
        self, asked: Iterator[BoundedJob], wanted: Callable[[BoundedJob], bool]
    ) -> Iterator[tuple[BoundedJob, EvaluatedJob | None]]:
        """Evaluate in order. wanted: asked when a result is due, whether it is still to be had; None if it is not."""
        if self.pool is None:
            for one in asked:
                yield one, evaluate(one.job, self.limit_GiB) if wanted(one) else None
            return
        waiting: deque[tuple[BoundedJob, Future[EvaluatedJob]]] = deque()
        while True:
            while len(waiting) <= self.count and (new := next(asked, None)) is not None:
                waiting.append((new, self.pool.submit(evaluate, new.job, self.limit_GiB)))
            if not waiting:
                return
            one, future = waiting.popleft()
            if wanted(one):
                yield one, future.result()
            else:
                future.cancel()
                yield one, None

    def full(self, asked: list[BoundedJob]) -> list[Object]:
        """`simulate`'s objects, and what each changes."""
        if self.pool is None or len(asked) < 2:
            return [full(one.changes, one.job) for one in asked]
        return [f.result() for f in [self.pool.submit(full, one.changes, one.job) for one in asked]]
