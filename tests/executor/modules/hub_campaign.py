"""Drawn configs against transformers: `python -m tests.executor.modules.hub_campaign 200 [FIRST]`, equal or refused."""

import sys
from collections import Counter
from enum import StrEnum

import torch

from ir.core.errors import PiperError
from tests.executor.modules.hub import gap
from tests.executor.modules.hub_draws import Drawn, draw

CLOSE = 1e-10


class Outcome(StrEnum):
    """What became of a drawn config. Anything but the first two is a defect."""

    EQUAL = "equal"
    REFUSED = "refused"
    UNEQUAL = "unequal"
    CRASHED = "crashed"
    REFUSED_WRONGLY = "refused, though it is built"
    NOT_REFUSED = "not refused, though it is not built"


def judge(drawn: Drawn) -> tuple[Outcome, str]:
    """Train it by both, or see it refused by the key that is wrong in it, with exit code 2."""
    try:
        found = gap(drawn.raw)
    except PiperError as e:
        right = bool(drawn.refused) and drawn.refused in (e.key or "") and e.kind.exit_code == 2
        return (Outcome.REFUSED if right else Outcome.REFUSED_WRONGLY), str(e)
    except Exception as e:  # whatever it is, it is to be counted and told
        return Outcome.CRASHED, f"{type(e).__name__}: {e}"
    if drawn.refused:
        return Outcome.NOT_REFUSED, drawn.refused
    return (Outcome.EQUAL if found.largest <= CLOSE else Outcome.UNEQUAL), str(found)


def main(args: list[str]) -> int:
    """Counts, and every case that is neither equal nor refused."""
    torch.set_num_threads(1)
    count, first = int(args[0]), int(args[1]) if len(args) > 1 else 0
    counts = Counter[str]()
    for seed in range(first, first + count):
        drawn = draw(seed)
        outcome, said = judge(drawn)
        counts[outcome] += 1
        if outcome not in (Outcome.EQUAL, Outcome.REFUSED):
            print(f"{seed}: {outcome}: {said}\n  {dict(drawn.raw)}", flush=True)
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    return int(counts.total() != counts[Outcome.EQUAL] + counts[Outcome.REFUSED])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
