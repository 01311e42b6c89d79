"""Jobs whose experts are spread over ranks: with pipelines, replicas, ZeRO and schedules; few that cover all pairs.

As a script, all of them, each for 20 steps under both optimizers, one after the other:

    python -m tests.executor.parallel.expert_cases FILE

FILE gets a line for each case as soon as it has run; those that are in there already are not run again.
"""

import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tests.executor.pairwise import cover, met  # noqa: F401  met: in examples
from tests.executor.runs import far

SCHEDULES = ("1f1b", "zb1p", "interleaved-1f1b", "zbv", "dualpipe")
TWICE = ("interleaved-1f1b", "zbv")  # two stages a rank
VALUES: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 3, 4),
    "dp": (2, 4, 6, 8),
    "ep": (1, 2, 4, 8),
    "etp": (1, 2),
    "zero": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "optimizer": ("adamw", "sgd"),
}
MOST_RANKS, STEPS, ROUNDING = 8, 20, 1e-10
PAIRED = ("ep", "etp", "zero", "schedule", "optimizer", "recompute")
ONE = ("model.config=tiny-moe", "parallel.pp=1", "parallel.dp=2", "parallel.ep=2", "model.num_hidden_layers=2")


@dataclass(frozen=True, order=True)
class Case:
    """One job. What else it says is drawn by its name: microbatches, experts per token, order of axes, clipping."""

    pp: int
    dp: int
    ep: int
    etp: int
    zero: int
    schedule: str
    optimizer: str

    @property
    def ranks(self) -> int:
        """How many processes."""
        return self.pp * self.dp

    @property
    def legal(self) -> bool:
        """Whether there is such a job, of so few ranks; schedules differ where there is a pipeline."""
        schedule = self.schedule == "1f1b" if self.pp == 1 else self.schedule != "dualpipe" or self.pp % 2 == 0
        return self.ranks <= MOST_RANKS and self.ep * self.etp > 1 and self.dp % (self.ep * self.etp) == 0 and schedule

    @property
    def recompute(self) -> str:
        """What of forward runs again."""
        return random.Random(f"again {self.name}").choice(("none", "none", "full", "mlp"))

    @property
    def name(self) -> str:
        """`pp2 dp4 ep2 etp1 zero1 zbv adamw`."""
        return f"pp{self.pp} dp{self.dp} ep{self.ep} etp{self.etp} zero{self.zero} {self.schedule} {self.optimizer}"

    def sets(self) -> tuple[str, ...]:
        """The overrides of `tests.executor.runs.JOB`."""
        draw = random.Random(self.name)
        out = [
            *(f"parallel.{a}={getattr(self, a)}" for a in ("pp", "dp", "ep", "etp", "zero")),
            "model.config=tiny-moe",
            f"model.num_experts_per_tok={draw.choice((1, 2, 2, 3))}",
            f"schedule.name={self.schedule}",
            f"schedule.microbatches={self.pp + draw.choice((0, 1))}",
            f"schedule.recompute={self.recompute}",
            f"model.num_hidden_layers={2 * self.pp if self.schedule in TWICE else max(2, self.pp)}",
            f"optimizer.name={self.optimizer}",
            f"optimizer.lr={0.2 if self.optimizer == 'sgd' else 0.001}",
            f"optimizer.clip_norm={draw.choice((0.0, 0.3))}",
            f"parallel.order={draw.choice(('tp cp ep dp pp', 'pp tp cp ep dp', 'tp cp dp ep pp'))}",
        ]
        if draw.random() < 0.3:
            out.append("parallel.bucket_MiB=0.1")
        if self.zero == 3:
            out.append(f"parallel.prefetch={draw.choice((0, 1, 2))}")
        return tuple(out)


def everything() -> list[Case]:
    """All there are.

    >>> len(everything()), max(c.ranks for c in everything())
    (496, 8)
    """
    return [c for c in (Case(*row) for row in product(*VALUES.values())) if c.legal]


def drawn(seed: int = 5) -> list[Case]:
    """Every (pp, dp, ep, etp, zero, schedule); the optimizer is drawn.

    >>> len(drawn())
    248
    """
    draw = random.Random(seed)
    rows = sorted({replace(c, optimizer="") for c in everything()})
    return [replace(c, optimizer=draw.choice(VALUES["optimizer"])) for c in rows]


def covering(seed: int = 19) -> list[Case]:
    """Few cases in which every two values meet that can, of few ranks: those that add most first.

    >>> rows = covering(); len(rows) < 30, met(everything(), PAIRED) - met(rows, PAIRED)
    (True, set())
    """
    rest = everything()
    random.Random(seed).shuffle(rest)
    return sorted(cover(rest, PAIRED, value=lambda new, case: new / case.ranks**0.3))


def main(file: Path) -> int:
    """Run what is not in the table yet."""
    done = {line.split("\t")[0] for line in file.read_text().splitlines()} if file.exists() else set()
    bad = 0
    for case in everything():
        if case.name in done:
            continue
        begun = time.monotonic()
        try:
            found = f"{far(*case.sets(), steps=STEPS):.2e}"
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        ok = found[0].isdigit() and float(found) <= ROUNDING
        bad += not ok
        with file.open("a") as table:
            table.write(f"{case.name}\t{found}\t{'ok' if ok else 'BAD'}\t{time.monotonic() - begun:.1f} s\n")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]))))
