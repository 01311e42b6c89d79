"""Mixes of `replicate`, drawn at random: levels, bucket sizes, streams, prefetch, by layer, part, stage, microbatch.

`python -m tests.executor.optim.mixed 200` runs so many: each trains as one process does, or is refused before a rank
starts.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.directives.load import parse_strategy
from ir.job.build import directives_json
from tests.executor.runs import alone, distance, error, judged, merged, run
from tests.executor.runtime.test_run_families import sets as family_sets

ROUNDING, STEPS = 1e-10, 2
LAYERS = 4
# tp, cp, pp, dp, ep, schedule
LAYOUTS = (
    (1, 1, 1, 2, 1, "gpipe"), (1, 1, 2, 2, 1, "1f1b"), (1, 1, 2, 2, 1, "dualpipe"), (1, 1, 2, 1, 1, "dualpipe"),
    (1, 1, 2, 2, 1, "zbv"), (2, 1, 1, 2, 1, "gpipe"), (1, 2, 1, 2, 1, "1f1b"), (2, 1, 2, 1, 1, "zb1p"),
    (1, 1, 1, 2, 2, "gpipe"), (1, 1, 2, 2, 2, "1f1b"), (1, 1, 1, 4, 2, "gpipe"), (1, 1, 2, 2, 2, "dualpipe"),
    (1, 1, 1, 3, 1, "1f1b"),
)  # fmt: skip
DENSE, EXPERTS = ("llama", "llama tied", "gpt2", "qwen3"), ("mixtral", "qwen3_moe", "deepseek_v3")
STREAMS = ("dp", "dp", "zero", "ep", "default")
Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One job and the `replicate` directives of its strategy, in order."""

    layout: tuple[int, int, int, int, int, str]
    family: str
    mbs: int
    prefetch: int
    replicates: tuple[Mapping[str, Any], ...]
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = [f"{a}{n}" for a, n in zip(("tp", "cp", "pp", "dp", "ep"), self.layout[:5], strict=True) if n > 1]
        said = [json.dumps({k: v for k, v in d.items() if k != "op"}) for d in self.replicates]
        return " ".join([*sizes, self.layout[5], self.family, f"M{self.mbs}", f"prefetch{self.prefetch}", *said])

    def sets(self) -> tuple[str, ...]:
        """The overrides of `tests.executor.runs.JOB` without the mix: the job that the strategy is taken from."""
        tp, cp, pp, dp, ep, name = self.layout
        sizes = (f"parallel.{a}={n}" for a, n in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp), ("ep", ep)))
        stages = pp * (2 if name == "zbv" else 1)
        even = f"parallel.layers={[LAYERS // stages] * stages}"
        run = f"schedule.microbatches={self.mbs}", f"parallel.prefetch={self.prefetch}"
        return family_sets(self.family, *sizes, even, f"schedule.name={name}", *run, "parallel.zero=0", *self.more)

    def mixed(self, folder: Path) -> tuple[str, ...]:
        """The overrides with it; the strategy is written to a folder."""
        prepared, _ = judged(folder, *self.sets())
        ours = [d for d in directives_json(prepared.strategy) if d["op"] != "replicate"]
        at = next(i for i, d in enumerate(ours) if d["op"] == "order")
        strategy = [*ours[:at], *self.replicates, *ours[at:]]
        parse_strategy(strategy)
        (folder / "strategy.json").write_text(json.dumps(strategy))
        kept = [s for s in self.sets() if not s.startswith("schedule.name")]
        return (*kept, f'schedule.directives="{folder / "strategy.json"}"')


def drawn(seed: int) -> Case:
    """A case by its number."""
    draw = random.Random(seed)
    layout = draw.choice(LAYOUTS)
    family = draw.choice(EXPERTS if layout[4] > 1 or draw.random() < 0.3 else DENSE)
    first = [] if draw.random() < 0.1 else [_replicate(draw, layout[2], {})]
    rest = [_replicate(draw, layout[2], _filter(draw, layout, family)) for _ in range(draw.randrange(1, 4))]
    more = [f"optimizer.clip_norm={draw.choice((0.0, 0.3))}", f"optimizer.name={draw.choice(('adamw', 'sgd'))}"]
    if draw.random() < 0.2:
        more.append("schedule.recompute=full")
    mbs = draw.choice((2, 3, 4)) if layout[5] != "dualpipe" else draw.choice((2, 4, 5))
    return Case(layout, family, mbs, draw.choice((0, 1, 1, 2, 5)), (*first, *rest), tuple(more))


def _replicate(draw: random.Random, pp: int, wanted: Fields) -> Fields:
    out: Fields = {"op": "replicate", "filter": wanted, "zero": draw.randrange(4)}
    if draw.random() < 0.4:
        out["bucket_MiB"] = draw.choice((0.002, 0.01, 0.05))
    if draw.random() < 0.5:
        out |= {"reduce_stream": draw.choice(STREAMS), "gather_stream": draw.choice(STREAMS)}
    return out


def _filter(draw: random.Random, layout: tuple[int, int, int, int, int, str], family: str) -> Fields:
    stages = layout[2] * (2 if layout[5] == "zbv" else 1)
    found: list[Fields] = [
        {"L": draw.randrange(LAYERS)},
        {"L": draw.choice(("0..1", "1,3", "!2", "*", "-"))},
        {"PP": draw.randrange(stages)},
    ]
    if family in EXPERTS:
        found += [{"EP": "*"}, {"EP": "-"}, {"EP": draw.randrange(2)}] * 2
    rare: list[Fields] = [{"L": 1, "MB": draw.choice((0, "0..1", "*"))}, {"L": "0..2", "PASS": draw.choice("FW")}]
    return draw.choice(rare if draw.random() < 0.1 else found)


def off(case: Case, **options: Any) -> float:
    """How far a case is from one process: gradients of the first step and the last, parameters, losses, norms."""
    with tempfile.TemporaryDirectory() as name:
        ran = run(*case.mixed(Path(name)), steps=STEPS, **options)
        steps, first = (alone(*case.sets(), steps=n) for n in (STEPS, 1))
    both = error(ran, steps), distance(merged(ran.first), first.grads)
    return float(np.max(both))  # NaN stays NaN, and fails


WHY = {
    "no replicate names them": "unnamed",
    "is one parameter in several parts": "two levels",
    "the filter selects some of": "microbatches",
    "selects nothing": "nothing",
}


def outcome(case: Case, **options: Any) -> tuple[str, float]:
    """`equal`, `wrong` or why it was refused; and how far off it was."""
    try:
        far = off(case, **options)
    except PiperError as e:
        why = next((short for words, short in WHY.items() if words in e.message), None)
        if why is None or e.kind is not ErrorKind.DIRECTIVE:
            return f"wrong: {type(e).__name__} {e.kind} {e.message}", np.nan
        return why, np.nan
    except Exception as e:
        return f"wrong: {type(e).__name__} {e}", np.nan
    return ("equal" if far <= ROUNDING else "wrong"), far


def campaign(count: int, first: int = 0) -> Iterator[tuple[int, Case, str, float]]:
    """Run cases first … first + count − 1."""
    for seed in range(first, first + count):
        case = drawn(seed)
        yield seed, case, *outcome(case, backend="local")


def main() -> None:
    """`python -m tests.executor.optim.mixed COUNT [FIRST]`."""
    found: Counter[str] = Counter()
    for seed, case, what, far in campaign(*map(int, sys.argv[1:3])):
        found[what.partition(":")[0]] += 1
        print(seed, what, far, case, flush=True)
    print(dict(found))
    sys.exit(found["wrong"] > 0)


if __name__ == "__main__":
    main()
