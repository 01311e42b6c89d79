"""Jobs that divide their parts over tensor- and context-parallel ranks, crossed with pipelines, replicas and ZeRO."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from tests.executor.pairwise import cover, met, pairs
from tests.executor.runtime.test_run_families import sets as family_sets

# tp, cp, pp, dp
LAYOUTS = (
    (2, 1, 1, 1), (1, 2, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (2, 1, 1, 2),
    (1, 2, 1, 2), (2, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2), (4, 2, 1, 1), (2, 4, 1, 1), (4, 1, 2, 1),
)  # fmt: skip
FAMILIES = ("llama", "llama tied", "gpt2", "nemotron", "qwen3", "mistral", "mixtral", "deepseek_v2", "deepseek_v3")
VALUES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "zero": (0, 1, 2, 3),
    "schedule": ("1f1b", "zb1p", "zbv", "dualpipe"),
    "sequence": (True, False),
    "recompute": ("none", "selective", '["attention"]', "full"),
    "optimizer": ("adamw", "sgd"),
    "family": FAMILIES,
    "ep": (1, 2, 4),
    "heads": (False, True),
}
EXPERTS = ("mixtral", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class Case:
    """One job. sequence: sequence parallelism, where there is tp. ep: over how many ranks experts are spread.
    heads: cp divides attention's heads, of which there are four.
    """

    layout: tuple[int, int, int, int]
    zero: int
    schedule: str
    sequence: bool
    recompute: str
    optimizer: str
    family: str
    ep: int = 1
    heads: bool = False

    @property
    def ranks(self) -> int:
        """How many processes."""
        tp, cp, pp, dp = self.layout
        return tp * cp * pp * dp

    @property
    def legal(self) -> bool:
        """Whether there is such a job."""
        tp, cp, pp, dp = self.layout
        if self.schedule == "dualpipe" and pp == 1:
            return False
        if self.ep > 1 and (self.family not in EXPERTS or tp * cp * dp % self.ep):
            return False
        if self.heads and (cp == 1 or tp * cp > 4):
            return False
        return self.sequence or (tp > 1 and self.family not in EXPERTS)

    @property
    def name(self) -> str:
        """`tp2 pp2 zero1 zbv full sgd qwen3`."""
        sizes = [f"{a}{n}" for a, n in zip(("tp", "cp", "pp", "dp"), self.layout, strict=True) if n > 1]
        sizes += [f"ep{self.ep}"] if self.ep > 1 else []
        words = [*sizes, f"zero{self.zero}", self.schedule, self.recompute.strip('[]"'), self.optimizer, self.family]
        words += [] if self.sequence else ["whole tokens"]
        return " ".join([*words, *(["heads"] if self.heads else [])])

    def sets(self) -> tuple[str, ...]:
        """The overrides of `tests.executor.runs.JOB`."""
        tp, cp, pp, dp = self.layout
        draw = random.Random(self.name)
        stages = pp * (2 if self.schedule == "zbv" else 1)
        out = [
            *(f"parallel.{a}={n}" for a, n in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp), ("ep", self.ep))),
            f"parallel.zero={self.zero}",
            f"parallel.sequence_parallel={str(self.sequence).lower()}",
            f"parallel.order={draw.choice(('tp cp ep dp pp', 'cp tp dp ep pp', 'pp dp tp cp ep'))}",
            f"schedule.name={self.schedule}",
            f"schedule.microbatches={max(2, pp)}",
            f"schedule.microbatch_size={draw.choice((1, 1, 2))}",
            f"schedule.recompute={self.recompute}",
            f"optimizer.name={self.optimizer}",
            f"optimizer.lr={0.05 if self.optimizer == 'sgd' else 0.001}",
            f"optimizer.clip_norm={draw.choice((0.0, 0.3))}",
        ]
        if self.family == "deepseek_v3":
            out.append(f"parallel.layers={[4 // stages] * stages}")
        if self.heads:
            out.append("parallel.cp_comm=all_to_all")
        if (tp > 2 or self.heads) and self.family in ("llama", "llama tied", "nemotron", "qwen3", "mistral", "mixtral"):
            out.append("model.num_key_value_heads=4")
        if draw.random() < 0.3:
            out.append("parallel.bucket_MiB=0.02")
        if self.recompute == "selective" or draw.random() < 0.3:
            out.append("model.attention=unfused")
        return family_sets(self.family, *out)


@lru_cache
def everything() -> tuple[Case, ...]:
    """All there are."""
    return tuple(c for c in (Case(*row) for row in product(*VALUES.values())) if c.legal)


@lru_cache
def covering(seed: int = 7) -> tuple[Case, ...]:
    """Few cases in which every two values meet that can, those that add most first; of equals, those of few ranks.

    >>> rows = covering(); 60 < len(rows) < 200, len(missing(rows)), len(missing(rows[1:])) > 0
    (True, 0, True)
    """
    return _cover(random.Random(seed).sample(everything(), 1500), missing(()))


@lru_cache
def handful(seed: int = 7) -> tuple[Case, ...]:
    """Fewer still, of four ranks at most: what bears on what happens inside an op; every other value comes once.

    >>> rows = handful(); len(rows) < 18, {c.family for c in rows} == set(FAMILIES), {c.zero for c in rows}
    (True, True, {0, 1, 2, 3})
    """
    small = [c for c in everything() if c.ranks <= 4 and 2 in c.layout]
    both = {("schedule", "recompute"), ("optimizer", "ep"), *((n, "sequence") for n in ("layout", "zero", "schedule"))}
    both |= {("sequence", n) for n in ("recompute", "optimizer", "family")}
    wanted = {p for c in small for p in pairs(c, tuple(VALUES)) if (p[0], p[2]) in both}
    return _cover(random.Random(seed).sample(small, 2500), wanted)


def missing(cases: Iterable[Case]) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that no case has."""
    names = tuple(VALUES)
    possible: set[tuple[str, Any, str, Any]] = set()
    for a, b in combinations(names, 2):
        possible |= {(a, x, b, y) for x, y in product(VALUES[a], VALUES[b]) if _meet({a: x, b: y})}
    return possible - met(cases, names)


def _meet(given: dict[str, Any]) -> bool:
    usual = {"layout": (2, 1, 2, 1), "zero": 0, "schedule": "1f1b", "sequence": True, "recompute": "none"}
    usual |= {"optimizer": "adamw", "family": "mixtral" if given.get("ep", 1) > 1 else "llama", "ep": 1}
    if "layout" not in given:
        usual["layout"] = (2, 2, 2 if given.get("schedule") == "dualpipe" else 1, 1)
    elif given.get("heads"):
        usual["layout"] = (2, 2, 1, 1)
    return Case(**{**usual, **given}).legal


def _cover(rows: list[Case], wanted: set[tuple[str, Any, str, Any]]) -> tuple[Case, ...]:
    return tuple(cover(rows, tuple(VALUES), wanted, lambda new, case: (new, -case.ranks)))
