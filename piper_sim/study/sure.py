"""How sure a prediction is: how far published runs like it were from their predictions.

`residuals.json` beside this file holds measured / predicted of every published row (`python -m experiments.published
--write` renews it). A row counts the more the more it is like the job, by GPU, framework, mixture of experts, op times
given or modelled, and whether the host is waited for; a publisher of many rows, all of which share what nobody told of
its machines, counts as the root of their number.

The job itself counts, too, as one more row of a publisher with as many as the rows like it, half of it at either end,
for nobody knows where it will lie: the fewer rows are like it, the wider its interval. (Conformal prediction's own
point, weighted as by Barber, Candès, Ramdas and Tibshirani, 2023.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, read_json, typed
from ir.job.schema import JobSlowNodes

FILE = Path(__file__).with_name("residuals.json")
FORM = FileErrors("a table of residuals", ErrorKind.IO, "residuals", 10**7, "written by experiments.published")
UNLIKE = 0.5  # what a row counts for each thing in which it differs
TWICE = ("software", "given")  # these differ as two things do
LEAST = 1e-6  # chance of anything
WAITS = 0.1  # share of a step for the host, from which on it is waited for


class PredictionTraits(msgspec.Struct, frozen=True):
    """What a run is like. software: "" for none. given: op times of the source, not modelled ones."""

    gpu: str
    software: str
    moe: bool
    given: bool
    waits: bool

    def likeness(self, other: PredictionTraits, of: str = "time") -> float:
        """1 where all is the same, a half for each thing that differs; memory does not wait for the host."""
        fields = (f for f in self.__struct_fields__ if (of, f) != ("memory", "waits"))
        things = ((f, getattr(self, f) != getattr(other, f)) for f in fields)
        return float(UNLIKE ** sum((2 if f in TWICE else 1) * differs for f, differs in things))


class PublishedPrediction(msgspec.Struct, frozen=True):
    """One published row: measured / predicted of a step's time and of peak memory.

    table: that it stands in. publisher: who measured it, mostly a repository. traits: what it is like.
    """

    table: str
    publisher: str
    traits: PredictionTraits
    time: float | None
    memory: float | None


@cache
def residuals() -> tuple[PublishedPrediction, ...]:
    """Those of every published row."""
    return typed(read_json(FILE, FORM), tuple[PublishedPrediction, ...], FORM, str(FILE))


def weighted(
    traits: PredictionTraits, rows: Iterable[PublishedPrediction], of: str = "time"
) -> list[tuple[float, float]]:
    """(measured / predicted, weight), by the first; weights sum to 1. First and last is the job itself, in halves."""
    some = (r for r in rows if getattr(r, of) is not None)
    known = [(float(getattr(r, of)), r.publisher, traits.likeness(r.traits, of)) for r in some]
    many = Counter(publisher for _, publisher, _ in known)
    found = sorted((x, like / many[publisher] ** 0.5) for x, publisher, like in known)
    own = (1.0 + sum(like for _, _, like in known)) ** -0.5
    total = own + sum(w for _, w in found)
    return [(x, w / total) for x, w in ((found[0][0], own / 2), *found, (found[-1][0], own / 2))]


def quantile(found: Sequence[tuple[float, float]], share: float) -> float:
    """The least value up to which at least `share` of the weight lies.

    >>> quantile([(0.9, 0.05), (1.0, 0.9), (1.2, 0.05)], 0.9)
    1.0
    """
    reached = 0.0
    for value, weight in found:
        reached += weight
        if reached >= share - 1e-12:
            return value
    return found[-1][0]


@dataclass(frozen=True)
class SlowStepChances:
    """What comes of nodes of which nobody knows which are slow.

    asked: in the job. nodes: that it runs on. steps: (seconds, chance) of the worst node met, quickest first: the first
    is the step that no slow node lengthens. Chances sum to 1.
    """

    asked: JobSlowNodes
    nodes: int
    steps: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, float]:
        """What `simulate` says of them."""
        any_slow = 1.0 - (1.0 - self.asked.share) ** self.nodes
        return {"chance": any_slow, "without_s": self.steps[0][0], "worst_s": self.steps[-1][0]}


def interval(seconds: float, traits: PredictionTraits, slow: SlowStepChances | None = None) -> list[float]:
    """[p10, p90] of a step's seconds, which are as far off as of runs like it. slow: instead of seconds, its steps."""
    steps = ((seconds, 1.0),) if slow is None else slow.steps
    found = sorted((s * x, chance * w) for x, w in weighted(traits, residuals()) for s, chance in steps)
    return [quantile(found, share) for share in (0.1, 0.9)]


def fits_probability(allocated: int, device: int, capacity: int, traits: PredictionTraits) -> float:
    """Chance that a rank finds room: what is allocated is as far off as of runs like it, the rest is as modelled.

    The job's own halves lie beyond the farthest rows, twice as far off half as often: never certain, either way, but no
    job of a gigabyte is doubted on a device of eighty.
    """
    room = 1 + (capacity - device) / max(1, allocated)  # the greatest measured / predicted that fits
    (low, own), *found, (high, _) = weighted(traits, residuals(), "memory")
    fitting = sum(w for ratio, w in found if ratio <= room)
    farther = own * (_beyond(high, room) if room > high else 1.0)
    nearer = own * (_beyond(low, room) if room < low else 1.0)
    return min(max(fitting + nearer + own - farther, LEAST), 1 - LEAST)


def _beyond(edge: float, ratio: float) -> float:
    """Share of what lies beyond edge that lies beyond ratio, too, farther from 1: a tail of Pareto's with index 1.

    >>> _beyond(1.2, 1.4)
    0.5
    """
    return round(min(1.0, max(0.0, (edge - 1) / (ratio - 1))), 6)
