"""Training runs of many steps: what they vary, which of them meet every pair, and schedules nobody has named."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product

from ir.schedules.registry import NAMES, default_chunks
from tests.executor.pairwise import cover, met  # noqa: F401  met: in examples

STEPS = 20
MODEL = (
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.vocab_size=32",
    "model.seq_len=4",
)
CLIP = 0.1  # less than the norm of any step of this model
REORDERED = ("dualpipe", "looped-bfs")  # sums of two copies; microbatches backward from the last to the first


@dataclass(frozen=True)
class Case:
    """One run. clip: whether gradients are clipped, which then every step needs."""

    schedule: str
    ranks: int
    mbs: int
    tied: bool = False
    uneven: bool = False
    optimizer: str = "adamw"
    clip: bool = False

    def __str__(self) -> str:
        words = [w for w in ("tied", "uneven", "clip") if getattr(self, w)]
        return " ".join([self.schedule, f"P{self.ranks}", f"M{self.mbs}", self.optimizer, *words])

    @property
    def copies(self) -> int:
        """On how many ranks a parameter is; a single microbatch leaves DualPipe's second direction empty."""
        return 2 if self.schedule == "dualpipe" and self.mbs > 1 else 1

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage are on one rank."""
        return self.ranks == 1 or self.schedule in ("zbv", "v-half", "v-min", "dualpipev")

    @property
    def exact(self) -> bool:
        """Whether one process adds everything up in the same order."""
        return not self.tied and self.schedule not in REORDERED

    @property
    def layers(self) -> list[int]:
        """Of each stage: one; uneven: some two or three, and where there are inner stages, the last none."""
        stages = self.ranks * default_chunks(self.schedule)
        counts = [1] * stages if stages > 1 else [2]
        if self.uneven:
            draw = random.Random(str(self))
            counts[-1] = 0 if stages > 2 else 1
            for _ in range(2):
                counts[draw.randrange(stages - (stages > 2))] += 1
        return counts

    @property
    def sets(self) -> tuple[str, ...]:
        """As overrides of the tests' job."""
        return (*shape(self.ranks, self.mbs, self.layers), f"schedule.name={self.schedule}", *self._training)

    @property
    def _training(self) -> tuple[str, ...]:
        tied = ("model.tie_word_embeddings=true",) if self.tied else ()
        return (*tied, *training(self.optimizer, clip=self.clip))


FACTORS = [f.name for f in fields(Case)]


def shape(ranks: int, mbs: int, layers: Sequence[int]) -> tuple[str, ...]:
    """A small model cut into stages of so many layers."""
    return (
        *MODEL,
        f"model.num_hidden_layers={sum(layers)}",
        f"parallel.pp={ranks}",
        f"parallel.layers=[{', '.join(map(str, layers))}]",
        f"schedule.microbatches={mbs}",
    )


def training(optimizer: str, *, clip: bool) -> tuple[str, ...]:
    """An optimizer whose steps are large enough to be seen."""
    lr = 0.1 if optimizer == "sgd" else 0.01
    return f"optimizer.name={optimizer}", f"optimizer.lr={lr}", f"optimizer.clip_norm={CLIP if clip else 0}"


def everything(ranks: Sequence[int] = (1, 2, 3, 4), mbs: Sequence[int] = (1, 3, 5)) -> list[Case]:
    """The cross product, without DualPipe on an odd number of ranks.

    >>> len(everything())
    2400
    """
    both = (False, True)
    rows = product(NAMES, ranks, mbs, both, both, ("sgd", "adamw"), both)
    return [Case(*row) for row in rows if row[0] != "dualpipe" or row[1] % 2 == 0]


@lru_cache
def covering(seed: int = 4) -> list[Case]:
    """Few cases in which every two values of two factors meet, those that bring most together first.

    >>> found = covering(); len(found) < 60, len(met(everything(), FACTORS) - met(found, FACTORS))
    (True, 0)
    >>> {case.schedule for case in found[:24]} == set(NAMES)
    True
    """
    return cover(drawn(len(everything()), seed), FACTORS)


def drawn(count: int, seed: int = 4) -> list[Case]:
    """So many of the cross product, at random."""
    return random.Random(seed).sample(everything(), count)


def random_rows(homes: Sequence[Sequence[int]], seed: int, *, in_order: bool) -> list[list[str]]:
    """Each rank's row of a schedule at random. homes: [microbatch][stage] the rank.

    in_order: a stage's weight gradients come in the order of microbatches, as in one process.

    >>> random_rows([(0, 1)], 0, in_order=True)
    [['0F0', '0I0', '0W0'], ['1F0', '1I0', '1W0']]
    """
    draw, stages = random.Random(seed), len(homes[0])
    left: dict[tuple[int, int], list[str]] = {}
    for m, s in product(range(len(homes)), range(stages)):
        left[s, m] = draw.choice([["F", "B"], ["F", "I", "W"]])
    rows: list[list[str]] = [[] for _ in range(1 + max(map(max, homes)))]
    forward, backward, weights = set[tuple[int, int]](), set[tuple[int, int]](), set[tuple[int, int]]()

    def ready(at: tuple[int, int]) -> bool:
        (s, m), pass_ = at, left[at][0]
        if pass_ == "F":
            return s == 0 or (s - 1, m) in forward
        if in_order and pass_ in "BW" and m and (s, m - 1) not in weights:
            return False
        return pass_ == "W" or s == stages - 1 or (s + 1, m) in backward

    while left:
        at = draw.choice([a for a in left if ready(a)])
        pass_ = left[at].pop(0)
        if not left[at]:
            del left[at]
        for passes, done in (("F", forward), ("BI", backward), ("BW", weights)):
            if pass_ in passes:
                done.add(at)
        rows[homes[at[1]][at[0]]].append(f"{at[0]}{pass_}{at[1]}")
    return rows
