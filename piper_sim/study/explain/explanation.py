"""Why a step takes as long as it does: causes of idle time, the critical path, what-ifs; and why two jobs differ."""

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TypeVar

import numpy as np

from ir.core.grid import GRID
from ir.core.ops import Pass
from ir.core.order import IntArray
from ir.job import Job
from ir.job.build import blaming
from ir.job.load import no_job
from piper_sim.folding.ground import DevicePlacement, RankPositions
from piper_sim.pricing.scenario import scenario_of
from piper_sim.study.explain.blame import CAUSES, OpBlame, busy_ticks, idle_ticks, phases
from piper_sim.study.explain.chain import chain_of, ticks
from piper_sim.study.explain.excess import covering, excess_of
from piper_sim.study.explain.path import critical_path
from piper_sim.study.explain.what_if import JobChange, Progress, what_ifs
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from piper_sim.study.simulate import Object

K = TypeVar("K", bound=Hashable)
BACKWARD = (Pass.I, Pass.W, Pass.R)
COMMON = ("expert_skew", "link", "host")  # of a job: routing, links and launches are stated for all of its ranks


@dataclass(frozen=True)
class StepExplanation:
    """Where a step's idle time comes from. Seconds are multiples of 2**-40, so that sums are exact.

    idle: pipeline rank -> cause -> seconds, means over its replicas; a row sums to the rank's idle time. causes: the
    same seconds over all pipeline ranks, by cause and the rank that caused them, or most of them where the cause is
    `COMMON`; rank counts over all GPUs, op is the one that caused most. critical_path: from 0 to iteration_s without a
    gap. spent: cause -> what a rank spends of the step in the mean, idle or busy (`compute`); sums to iteration_s.
    difference: the same of two jobs, b less a.
    """

    iteration_s: float
    causes: tuple[Object, ...]
    idle: Mapping[str, Mapping[str, float]]
    critical_path: tuple[Object, ...] = field(repr=False)
    what_ifs: tuple[JobChange, ...]
    spent: Mapping[str, float]
    difference: Mapping[str, float] | None = None
    second: str = "the second job's step"
    fits: bool = True
    reason: str | None = None

    def to_dict(self) -> Object:
        """The object that `piper-sim explain --json` prints."""
        out: Object = {
            "schema_version": 1,
            "iteration_s": self.iteration_s,
            "causes": list(self.causes),
            "idle": {r: dict(row) for r, row in self.idle.items()},
            "critical_path": list(self.critical_path),
            "what_ifs": [vars(w) for w in self.what_ifs],
            "spent": dict(self.spent),
            "fits": self.fits,
        }
        return deepcopy(
            out
            | ({} if self.difference is None else {"difference": dict(self.difference)})
            | ({} if self.reason is None else {"reason": self.reason})
        )


def explain(a: Job, b: Job | None = None, progress: Progress = nullcontext) -> StepExplanation:
    """Why a job's step takes as long as it does, with what-ifs that are simulated. b: another, to be held against a.

    Raises PiperError: as `predict` does.

    >>> from piper_sim import explain, load_job
    >>> job = load_job({"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}})
    >>> found = explain(job)
    >>> found.critical_path[-1]["end_s"] == found.iteration_s, found.what_ifs[0].gain_s > 0
    (True, True)
    """
    for given in (a,) if b is None else (a, b):
        if not isinstance(given, Job):
            raise no_job(given)
    first = _predicted(a, progress)
    found = explained(first, what_ifs(a, first, progress))
    if b is None:
        return found
    other = explained(_predicted(b, progress))
    why = found.reason if other.reason is None else found.reason or f"{b.file}: {other.reason}"
    return replace(found, difference=difference(found, other), fits=found.fits and other.fits, reason=why)


def against(predicted: StepExplanation, measured: StepExplanation) -> StepExplanation:
    """What was measured, by how much each cause is more than predicted, and the what-ifs of the prediction."""
    second, more = "the step as measured, held against the prediction,", difference(predicted, measured)
    return replace(measured, what_ifs=predicted.what_ifs, difference=more, second=second)


def difference(a: StepExplanation, b: StepExplanation) -> dict[str, float]:
    """Cause -> seconds that b spends more than a; they sum to the difference of the two steps."""
    keys = dict.fromkeys([*a.spent, *b.spent])
    rest = {k: b.spent.get(k, 0.0) - a.spent.get(k, 0.0) for k in keys}
    return {k: v for k, v in sorted(rest.items(), key=lambda x: -abs(x[1])) if v}


def _predicted(job: Job, progress: Progress) -> Prediction:
    with progress(f"simulating {job.file}"), blaming(job):
        return predict(job)


def explained(p: Prediction, others: tuple[JobChange, ...] = ()) -> StepExplanation:
    """The explanation of a job that was simulated; others: its what-ifs."""
    classes, at, programs = p.planned.classes, RankPositions(p.prepared.mesh), p.plan.programs
    slow = slowest(p.planned.model.ground)
    seats = [
        RankSeat(q, size, int(at.offset[first]) + q * at.stride, int(at.offset[slow[q, first]]) + q * at.stride)
        for first, size in zip(classes.first.tolist(), classes.size.tolist(), strict=True)
        for q in range(programs)
    ]
    found = told(blame_of(p), seats, lambda op: p.plan.text(op % len(p.plan)), COMMON)
    return replace(found, what_ifs=others, fits=p.fits, reason=p.to_dict().get("reason"))


def slowest(ground: DevicePlacement) -> IntArray:
    """[program, position] the slowest of the ranks that a rank meets inside its ops: who else makes it slow."""
    members = ground.positions.members(("tp", "cp"))
    out = np.empty(ground.speed.shape, dtype=np.int64)
    least = ground.speed[:, members].argmin(axis=2)
    out[:, members] = members[np.arange(len(members)), least][:, :, None]
    return out


def blame_of(p: Prediction) -> OpBlame:
    """What `blame` needs of a job that was simulated."""
    scenario = scenario_of(p.planned.model, p.plan, p.planned.classes, p.costs.duration)
    chain = chain_of(scenario, p.run, p.costs.duration)
    own = ticks(p.costs.duration)
    copies = p.planned.classes.count
    forward, backward = covering(p.plan, lambda n: n.kind is Pass.F), covering(p.plan, lambda n: n.kind in BACKWARD)
    filled, drained = phases(chain, np.tile(forward, copies), np.tile(backward, copies))
    excess = excess_of(p.planned, p.costs, scenario, chain)
    return OpBlame(chain, excess, own, own[chain.main], filled, drained)


def apportioned(parts: Mapping[K, int], divisor: int, total: int | None = None) -> dict[K, int]:
    """parts / divisor as whole numbers that sum to `total`, by default to the rounded sum: largest remainder.

    >>> apportioned({"a": 1, "b": 1, "c": 4}, 3)
    {'a': 1, 'b': 0, 'c': 1}
    """
    if total is None:
        total = (2 * sum(parts.values()) + divisor) // (2 * divisor)
    out = {k: n // divisor for k, n in parts.items()}
    left = total - sum(out.values())
    for k in sorted(parts, key=lambda k: -(parts[k] % divisor))[:left]:
        out[k] += 1
    return out


@dataclass(frozen=True)
class RankSeat:
    """Whose ops a chain's program are: a pipeline rank's, in how many replicas, and the rank that stands for them.

    slow: the slowest of those it meets inside its ops, by default itself.
    """

    row: int
    replicas: int
    rank: int
    slow: int = -1

    def blamed(self, cause: str) -> int:
        """Who is named for a cause of these ops."""
        return self.slow if cause == "straggler" and self.slow >= 0 else self.rank


def told(
    asked: OpBlame, seats: Sequence[RankSeat], text: Callable[[int], str], common: Container[str] = ()
) -> StepExplanation:
    """What a chain says of its last step. seats: of its programs; text: of an op; common: causes of all ranks."""
    chain = asked.chain
    rows: list[dict[str, int]] = [defaultdict(int) for _ in range(max(s.row for s in seats) + 1)]
    most: dict[tuple[str, int | None], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    spent: dict[str, int] = defaultdict(int)
    count = [sum(s.replicas for s in seats if s.row == r) for r in range(len(rows))]
    whole = lcm(*count)
    for k, seat in enumerate(seats):
        weight = seat.replicas * whole // count[seat.row]
        found = idle_ticks(asked, k).found
        for (cause, op), n in found.items():
            rows[seat.row][cause] += n * weight
            rank = None if cause in common else seats[int(chain.program[op])].blamed(cause)
            most[cause, rank][op] += n * weight
        for cause, n in [*busy_ticks(asked, k).items(), *((c, n) for (c, _), n in found.items())]:
            spent[cause] += n * weight
    tables = [apportioned(row, whole) for row in rows]
    total = sum(sum(t.values()) for t in tables)
    causes = apportioned({key: sum(ops.values()) for key, ops in most.items()}, whole, total)
    worst = {key: max(ops, key=ops.__getitem__) for key, ops in most.items()}
    blamed = {key: seats[int(chain.program[op])].blamed(key[0]) for key, op in worst.items()}
    listed = [
        {"cause": key[0], "rank": blamed[key], "op": text(worst[key]), "seconds": n / GRID}
        for key, n in sorted(causes.items(), key=lambda x: -x[1])
        if n
    ]
    by_size = sorted(apportioned(spent, whole * len(rows), chain.period).items(), key=lambda x: -x[1])
    path = [(x, seats[int(chain.program[x.op])].blamed(x.cause)) for x in critical_path(asked)]
    return StepExplanation(
        chain.period / GRID,
        tuple(listed),
        {str(r): {c: t[c] / GRID for c in CAUSES if t.get(c)} for r, t in enumerate(tables)},
        tuple(
            {"op": text(x.op), "rank": r, "start_s": x.begin / GRID, "end_s": x.end / GRID, "cause": x.cause}
            for x, r in path
        ),
        (),
        {c: n / GRID for c, n in by_size if n},
    )
