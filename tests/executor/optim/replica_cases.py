"""Jobs that cross pipelines with data parallelism, ZeRO and schedules: a set that covers all pairs, and all of them."""

import random
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from tests.executor.pairwise import cover, met  # noqa: F401  met: in examples

SCHEDULES = ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe")
VALUES: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4),
    "dp": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "optimizer": ("adamw", "sgd"),
    "clip": (0.0, 0.3),
}
MOST_RANKS = 8


@dataclass(frozen=True, order=True)
class Case:
    """One job. What else it says is drawn by its name: microbatches, order of axes, buckets, prefetch, recompute."""

    pp: int
    dp: int
    zero: int
    schedule: str
    optimizer: str
    clip: float

    @property
    def ranks(self) -> int:
        """How many processes."""
        return self.pp * self.dp

    @property
    def legal(self) -> bool:
        """Whether there is such a job, of so few ranks."""
        return self.ranks <= MOST_RANKS and not (self.schedule == "dualpipe" and self.pp == 1)

    @property
    def name(self) -> str:
        """`pp2 dp3 zero1 zbv adamw clip`."""
        clip = " clip" if self.clip else ""
        return f"pp{self.pp} dp{self.dp} zero{self.zero} {self.schedule} {self.optimizer}{clip}"

    def sets(self) -> tuple[str, ...]:
        """The overrides of `tests.executor.runs.JOB`."""
        draw = random.Random(self.name)
        out = [
            f"parallel.pp={self.pp}",
            f"parallel.dp={self.dp}",
            f"parallel.zero={self.zero}",
            f"schedule.name={self.schedule}",
            f"schedule.microbatches={self.pp + draw.choice((0, 1))}",
            f"model.num_hidden_layers={8 if self.pp == 4 else 4}",
            f"optimizer.name={self.optimizer}",
            f"optimizer.lr={0.2 if self.optimizer == 'sgd' else 0.001}",
            f"optimizer.clip_norm={self.clip}",
            f"parallel.order={draw.choice(('tp cp ep dp pp', 'pp tp cp ep dp'))}",
            f"schedule.recompute={draw.choice(('none', 'none', 'full'))}",
        ]
        if draw.random() < 0.3:
            out.append("parallel.bucket_MiB=0.1")
        if self.zero == 3:
            out.append(f"parallel.prefetch={draw.choice((0, 1, 2))}")
        return tuple(out)


FACTORS = [f.name for f in fields(Case)]


def crossed(seed: int = 5) -> list[Case]:
    """Every (pp, dp, zero, schedule); optimizer and clipping are drawn.

    >>> len(crossed()), sum(c.pp == 1 for c in crossed())
    (224, 80)
    """
    draw, names = random.Random(seed), ("pp", "dp", "zero", "schedule")
    rows = [
        Case(*row, draw.choice(VALUES["optimizer"]), draw.choice(VALUES["clip"]))
        for row in product(*(VALUES[n] for n in names))
    ]
    return [c for c in rows if c.legal]


def covering(seed: int = 13) -> list[Case]:
    """Few cases in which every two values meet that can: those that add most first.

    >>> rows = covering(); len(rows) < 30, met(everything(), FACTORS) - met(rows, FACTORS)
    (True, set())
    """
    rest = everything()
    random.Random(seed).shuffle(rest)
    return sorted(cover(rest, FACTORS, value=lambda new, case: (new, -case.ranks)))


def everything() -> list[Case]:
    """All there are."""
    return [c for c in (Case(*row) for row in product(*VALUES.values())) if c.legal]
