"""Best-first search: the least bounds go first, what cannot be on the front of time and memory is never planned."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush

from cost_models import DeviceHardware
from ir.core.errors import PiperError, job_error, usage_error
from ir.job import Job
from ir.job.load import no_job
from piper_sim.pricing.prepare import hardware_of
from piper_sim.report.units import GIB
from piper_sim.study.search.bound import JobBound, JobBounds
from piper_sim.study.search.evaluate import (
    ANY,
    BoundedJob,
    EvaluatedJob,
    JobLimits,
    JobRefusal,
    RejectedJob,
    beaten,
    over,
    refused,
)
from piper_sim.study.search.result import JobSearchResult, front, said
from piper_sim.study.search.space import Changes, JobSpace
from piper_sim.study.search.workers import JobJournal, JobWorkers
from piper_sim.study.simulate import Object

BUDGET_S = 60.0
DRAWN, TRIES = 32, 3  # for a first answer: configurations bounded, and simulated at most
ROOMY, SLOWER = 0.8, 1.5  # it leaves so much of a device free, and its bound is at most so much longer than the least
MANY, SIMULATED = 20_000, 0.5  # a space is bounded in a drawn order from so many on; so much time is left after bounds
Progress = Callable[[str], None]


def search(
    job: Job,
    budget_s: float = BUDGET_S,
    workers: int = 1,
    progress: Progress = lambda _: None,
    journal: str = "",
    limits: JobLimits = ANY,
) -> JobSearchResult:
    """The fastest configuration of a job's model on its GPUs at its global batch, and what memory buys.

    budget_s: no new configuration is begun after so many seconds. workers: processes. progress: told how far it is; a
    line that ends is to be kept. journal: a file that simulations are kept in, and taken from where it has them.
    limits: what a launch can say, where the winner is to be one.

    Raises PiperError (job): a job that cannot be searched, `[search]` with a value that no key takes; (usage): no
    workers, a budget below nothing; (usage, io): a journal of another space, or that cannot be written.

    >>> from piper_sim import load_job, search
    >>> job = load_job({"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"dp": 2},
    ...                 "search": {"tp": [1, 2], "pp": [1, 2], "name": ["1f1b"], "pin": ["recompute"]}})
    >>> found = search(job)
    >>> found.proven, found.best["fits"]
    (True, True)
    """
    if not isinstance(job, Job):
        raise no_job(job)
    for key, value, kinds, least in (("--workers", workers, int, 1), ("--budget", budget_s, (int, float), 0)):
        if not (isinstance(value, kinds) and value >= least):
            raise usage_error(key, f"{value!r}", allowed=f"{least} or more")
    if job.search.objective == "cost" and job.cluster.price is None:
        raise job_error("cluster.price", "no price", "price = 2.5, of one GPU for an hour", file=job.file)
    began, hardware = time.monotonic(), hardware_of(job)
    found = _Search(JobSpace.of(job, hardware, limits.ranges), hardware, began, budget_s, progress)
    kept = JobJournal(journal, found.space, limits.launch)
    with JobWorkers(workers, hardware, job.search.memory_limit_GiB, kept, limits.check) as pool:
        return found.run(pool)


class _Search:
    """One search's state. front: (seconds, bytes, number) of what fits and nothing beats in both, fastest first.

    misses: (bytes, number) of what does not fit, as far as is known. flying: what is being simulated, in order.
    unseen: configurations that not even a bound was worked out for, in time. complete: bounds of all are known.
    """

    def __init__(
        self, space: JobSpace, hardware: DeviceHardware, began: float, budget_s: float, progress: Progress
    ) -> None:
        self.began, self.until, self.progress, self.job = began, began + budget_s, progress, space.job
        self.space, self.bounds, job = space, JobBounds(hardware), space.job
        self.limit_bytes = (job.search.memory_limit_GiB or float("inf")) * GIB
        self.draws = random.Random(job.search.seed)
        self.complete = False
        self.known: dict[int, BoundedJob] = {}
        self.front: list[tuple[float, float, int]] = []
        self.misses: list[tuple[float, int]] = []
        self.rejected: list[tuple[int, RejectedJob]] = []
        self.queue: list[BoundedJob] = []
        self.flying: deque[BoundedJob] = deque()
        self.unseen, self.evaluated = 0, set[int]()
        self.first_s: float | None = None
        self.proven_s: float | None = None

    def run(self, workers: JobWorkers) -> JobSearchResult:
        """The job itself; where it does not fit, one that will; then the rest by their bounds.

        Of a space too large to be bounded in half the time, what was drawn until then is simulated by its bounds.
        """
        configurations = list(enumerate(self.space))
        self._bounded(configurations[:1], self.until)
        self._simulate(workers, self._asked())
        rest = configurations[1:]
        if not self.front:
            drawn = random.Random(self.job.search.seed).sample(rest, min(DRAWN, len(rest)))
            late = self._bounded(drawn, self.until)
            for one in self._likely():
                if self.front or time.monotonic() >= self.until:
                    heappush(self.queue, one)
                else:
                    self.flying.append(one)
                    self._simulate(workers, iter([one]))
            seen = {number for number, _ in drawn} - {number for number, _ in late}
            rest = [x for x in rest if x[0] not in seen]
        if len(rest) > MANY:
            random.Random(self.job.search.seed).shuffle(rest)
        while not self.complete:
            self.progress("bounding the space")
            now = time.monotonic()
            rest = self._bounded(rest, now + (self.until - now) * (1 - SIMULATED))
            self.complete = not rest
            self._simulate(workers, self._asked())
            if time.monotonic() >= self.until:
                break
        self.unseen = len(rest)
        left = self._left()
        proven = not self.unseen and not any(self._best >= e.seconds for e in left)
        if proven and self.proven_s is None:
            self.proven_s = self._seconds
        shown = workers.full([self.known[number] for *_, number in self.front])
        return JobSearchResult(
            job=self.job,
            best=shown[0] if shown else None,
            nearest=None if shown else self._nearest(workers),
            pareto=shown,
            all_rejected=[r for _, r in sorted(self.rejected, key=lambda x: x[0])],
            evaluated=len(self.evaluated),
            space=len(configurations),
            proven=proven,
            pareto_proven=not left and not self.unseen,
            seconds=self._seconds,
            first_s=self.first_s,
            proven_s=self.proven_s if proven else None,
        )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def _best(self) -> float:
        return self.front[0][0] if self.front else math.inf

    def _bounded(self, configurations: list[tuple[int, Changes]], until: float) -> list[tuple[int, Changes]]:
        """Queue those that are legal and may fit, by a quick bound; what there was no time for is returned."""
        for i, (number, changes) in enumerate(configurations):
            if number and time.monotonic() >= until:
                return configurations[i:]
            try:
                job = self.space.job_of(changes)
                self._queue(BoundedJob(0.0, self.draws.random(), number, 0.0, changes, job), self.bounds.first(job))
            except PiperError as e:
                self._reject(number, changes, JobRefusal.ILLEGAL, refused(e))
        return []

    def _queue(self, one: BoundedJob, bound: JobBound, walked: bool = False) -> None:
        """Queue a configuration by its bound, or reject it."""
        one = replace(one, seconds=bound.seconds, device_bytes=bound.device_bytes, walked=walked)
        self.known[one.number] = one
        excess = bound.excess
        if excess is None and bound.device_bytes > self.limit_bytes:
            excess = over(bound.device_bytes, self.limit_bytes / GIB)
        if excess is None:
            heappush(self.queue, one)
        else:
            self.misses.append((bound.device_bytes, one.number))
            self._reject(one.number, one.changes, JobRefusal.MEMORY, excess)

    def _simulate(self, workers: JobWorkers, asked: Iterator[BoundedJob]) -> None:
        """Simulate what is asked for and nothing beats."""
        for one, found in workers.each(asked, self._wanted, lambda: self.front):
            self.flying.popleft()
            if found is None:
                self._beaten(one)
            else:
                self._commit(one, found)
            after = self.flying[0] if self.flying else self.queue[0] if self.queue else None
            if self.proven_s is None and self.complete and after is not None and after.seconds > self._best:
                self.proven_s = self._seconds

    def _left(self) -> list[BoundedJob]:
        """What there was no time for."""
        for one in self.queue:
            if not self._wanted(one):
                self._beaten(one)
        return [one for one in self.queue if self._wanted(one)]

    def _likely(self) -> list[BoundedJob]:
        """Of what is queued, a few that are quick to simulate and leave room for what their bounds leave out."""
        quick, self.queue = self.queue, []
        for one in quick:
            self._sharpen(one)
        roomy = [x for x in self.queue if x.device_bytes <= ROOMY * min(self.bounds.room(x.job), self.limit_bytes)]
        most = SLOWER * min((x.seconds for x in roomy), default=0.0)
        found = sorted((x for x in roomy if x.seconds <= most), key=lambda x: (self._layers(x.job), x))[:TRIES]
        self.queue = sorted(x for x in self.queue if x not in found)
        return found

    def _layers(self, job: Job) -> int:
        """Grows as microbatches of a replica times layers: a plan's ops, and what simulating it takes."""
        p, s = job.parallel, job.schedule
        return p.tp * p.cp * p.pp * self.space.sequences // s.microbatch_size

    def _asked(self) -> Iterator[BoundedJob]:
        """The queue in order; a quick bound is sharpened when it is a configuration's turn, and queues again."""
        while self.queue and time.monotonic() < self.until:
            one = heappop(self.queue)
            if not self._wanted(one):
                self._beaten(one)
            elif one.walked:
                self.flying.append(one)
                yield one
            else:
                self._sharpen(one)

    def _sharpen(self, one: BoundedJob) -> None:
        """Queue a configuration again, by a walk of its schedule."""
        try:
            self._queue(one, self.bounds.of(one.job), walked=True)
        except PiperError as e:
            self._reject(one.number, one.changes, JobRefusal.ILLEGAL, refused(e))

    def _commit(self, one: BoundedJob, found: EvaluatedJob) -> None:
        self.evaluated.add(one.number)
        seconds, least = found.iteration_s, found.least_bytes
        if seconds is not None and least is not None and beaten(seconds, least, self.front):
            return self._beaten(one, seconds, least)
        if found.kind is not None:
            if found.device_bytes is not None:
                self.misses.append((found.device_bytes, one.number))
            return self._reject(one.number, one.changes, found.kind, found.reason)
        assert found.iteration_s is not None and found.device_bytes is not None
        if self.first_s is None:
            self.first_s = self._seconds
            took = f"{found.iteration_s:.4g} s and {found.device_bytes / GIB:.1f} GiB"
            self.progress(f"the first that fits, after {self.first_s:.1f} s: {took}, {said(one.changes)}\n")
        points = [*self.front, (found.iteration_s, found.device_bytes, one.number)]
        self.front = front(points)
        for t, m, number in (x for x in points if x not in self.front):
            winner = next(x for x in self.front if x[0] <= t and x[1] <= m)
            self._reject(
                number, self.known[number].changes, JobRefusal.BOUNDED, self._against(t, m, "simulated", winner)
            )
        how = "best so far" if self.proven_s is None else "proven best"
        self.progress(f"{len(self.evaluated)} simulated; {how} {self._best:.4g} s; bounds from {one.seconds:.4g} s")

    def _wanted(self, one: BoundedJob) -> bool:
        """Whether nothing known is both faster than its bound and no larger."""
        return beaten(one.seconds, one.device_bytes, self.front) is None

    def _beaten(self, one: BoundedJob, simulated_s: float | None = None, nbytes: float = 0.0) -> None:
        """Reject by its bounds; or as simulated, its allocators not asked."""
        seconds, nbytes = (one.seconds, one.device_bytes) if simulated_s is None else (simulated_s, nbytes)
        winner = beaten(seconds, nbytes, self.front)
        assert winner is not None
        self._reject(one.number, one.changes, JobRefusal.BOUNDED, self._against(seconds, nbytes, "at least", winner))

    def _against(self, seconds: float, nbytes: float, how: str, winner: tuple[float, float, int]) -> str:
        """What one takes, and what another does that is no slower and no larger."""
        t, m, number = winner
        mine = f"{seconds:.6g} s and {nbytes / GIB:.1f} GiB {how}"
        return f"{mine}; {said(self.known[number].changes)} takes {t:.6g} s and {m / GIB:.1f} GiB"

    def _reject(self, number: int, changes: Changes, kind: JobRefusal, why: str) -> None:
        self.rejected.append((number, RejectedJob(changes, kind, why)))

    def _nearest(self, workers: JobWorkers) -> Object | None:
        """What lacks least, where nothing fits."""
        for _, number in sorted(self.misses)[:8]:
            with suppress(PiperError):
                found = workers.full([self.known[number]])[0]
                peak = max(found["memory"]["device_peak_bytes"].values())
                if found["fits"]:
                    found |= {"fits": False, "reason": over(peak, self.limit_bytes / GIB)}
                return found
        return None
