"""Plans to be watched by the racing device: schedules with ZeRO, kinds of layers and what is made again, paired.

As a script, those that cover all pairs, one after the other, with the time of each:

    python -m tests.executor.device.race_cases
"""

import random
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from pathlib import Path

from ir.schedules.registry import NAMES
from tests.executor.device.races import raced
from tests.executor.pairwise import cover, met  # noqa: F401  met: in examples
from tests.executor.runtime.test_run_families import sets as family_sets

KINDS = {  # family, what is divided
    "dense": ("llama", ("parallel.dp=2",)),
    "two ranks": ("gpt2", ()),
    "tied": ("llama tied", ("parallel.dp=2",)),
    "experts": ("mixtral", ("parallel.dp=2", "parallel.ep=2")),
    "shared experts": ("deepseek_v3", ("parallel.dp=2", "parallel.ep=2")),
    "tp": ("qwen3", ("parallel.tp=2",)),
    "sequences": ("llama tied", ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "experts, tp": ("deepseek_v2", ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=2")),
    "cp": ("llama", ("parallel.cp=2",)),
}


@dataclass(frozen=True)
class Case:
    """One job of a pipeline of two. What else it says is drawn by its name."""

    schedule: str
    zero: int
    kind: str
    recompute: str

    def __str__(self) -> str:
        return f"{self.schedule}, {self.kind}, ZeRO-{self.zero}, {self.recompute}"

    def sets(self) -> tuple[str, ...]:
        """The overrides of `tests.executor.runs.JOB`."""
        draw, (family, divided) = random.Random(str(self)), KINDS[self.kind]
        stages = 4 if self.schedule in FOUR else 2
        out = [
            *divided,
            f"schedule.name={self.schedule}",
            f"schedule.microbatches={draw.choice((3, 4))}",
            f"schedule.recompute={self.recompute}",
            f"parallel.zero={self.zero}",
            f"optimizer.name={draw.choice(('adamw', 'sgd'))}",
            f"optimizer.clip_norm={draw.choice((0.0, 0.3))}",
        ]
        if family == "deepseek_v3":
            out.append(f"parallel.layers={[4 // stages] * stages}")
        if draw.random() < 0.5:
            out.append("parallel.bucket_MiB=0.02")
        if self.zero == 3:
            out.append(f"parallel.prefetch={draw.choice((0, 1, 2))}")
        if self.recompute == "selective":
            out.append("model.attention=unfused")
        if draw.random() < 0.3:
            out.append('precision.compute="bf16"')
        return family_sets(family, *out)


FOUR = {"interleaved-1f1b", "interleaved-1f1b-overlap", "looped-bfs", "zbv", "v-half", "v-min", "dualpipev"}
FACTORS = [f.name for f in fields(Case)]


@lru_cache
def everything() -> list[Case]:
    """All there are."""
    return [Case(*row) for row in product(NAMES, range(4), KINDS, ("none", "full", "selective"))]


@lru_cache
def covering(seed: int = 0) -> list[Case]:
    """Few cases in which every two values of two factors meet.

    >>> found = covering(); len(found) < 150, len(met(everything(), FACTORS) - met(found, FACTORS))
    (True, 0)
    """
    return cover(random.Random(seed).sample(everything(), len(everything())), FACTORS)


def main(names: list[str]) -> None:
    """Those whose names have such a word, or all."""
    for case in covering():
        if not names or any(n in str(case) for n in names):
            with tempfile.TemporaryDirectory() as folder:
                since_s = time.monotonic()
                found = raced(Path(folder), *case.sets())
                print(f"{case}: {time.monotonic() - since_s:.1f} s", *found, sep="\n  ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
