"""What choosing by prediction costs against measured sweeps: regret of the winner, and how the whole order agrees.

    python -m experiments.regret [--vtrain FILE.csv] [--only a,b] [--groups] [--json]

A group is one model on as many GPUs at one global batch. Its regret is the measured time of the configuration that is
predicted to be the fastest, over the measured fastest, less one; Kendall's tau is that of all its pairs. The control
shuffles predictions inside groups. Tables: experiments/published/data (a source beside each run); `--vtrain` adds
another of vTrain's, as they print it.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import median

from experiments.published.rows import DATA, Line, Row, lines
from experiments.published.sets import NAMED
from ir.core.errors import PiperError
from ir.job.load import job_from
from piper_sim.study.predict import predict

LEAST = 3  # runs of a group
SHUFFLES = 200
Group = tuple[str, ...]
Pairs = list[tuple[float, float]]  # measured, predicted


def vtrain(line: Line) -> Row:
    """Megatron-DeepSpeed on A100, on one node or on several."""
    row = NAMED["vtrain_multi_node" if line["inter_node_Gbps_per_node"] else "vtrain_single_node"].row(line)
    assert row.job is not None
    nodes = -(-int(line["gpus"]) // 8)
    row.job["cluster"] |= {"nodes": nodes} if int(line["gpus"]) == 8 * nodes else {}
    return row


@dataclass(frozen=True)
class Sweep:
    """A table of runs. group: columns that a group shares."""

    name: str
    path: Path
    row: Callable[[Line], Row]
    group: tuple[str, ...]

    def groups(self) -> dict[Group, Pairs]:
        """Measured and predicted seconds of its groups."""
        out: dict[Group, Pairs] = defaultdict(list)
        for line in lines(self.path):
            row = self.row(line)
            if "global_batch" not in line:
                line["global_batch"] = str(prod(int(line[c]) for c in ("dp", "micro_batch", "grad_accum")))
            if row.job is None or row.seconds is None or row.failed or line.get("quality", "A") not in "AB":
                continue
            try:
                seconds = predict(job_from(row.job, file=row.name)).iteration_s
            except PiperError:
                continue  # no prediction: not a choice
            out[tuple(line[c] for c in self.group)].append((row.seconds, seconds))
        return {g: pairs for g, pairs in out.items() if len(pairs) >= LEAST}


def regret(pairs: Pairs) -> float:
    """Of choosing the least predicted.

    >>> regret([(2.0, 1.0), (1.0, 3.0), (4.0, 5.0)])
    1.0
    """
    chosen = min(pairs, key=lambda p: p[1])[0]
    return chosen / min(m for m, _ in pairs) - 1


def tau(pairs: Pairs) -> float:
    """Kendall's: pairs in the same order less pairs in the other, over all.

    >>> tau([(1.0, 1.0), (2.0, 2.0), (3.0, 1.5)])
    0.3333333333333333
    """
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def figures(groups: Sequence[Pairs]) -> dict[str, float]:
    """Median and worst regret, median tau, and the control's median regret."""
    found = [regret(g) for g in groups]
    r = random.Random(0)
    control = []
    for _ in range(SHUFFLES):
        for g in groups:
            guessed = [p for _, p in g]
            r.shuffle(guessed)
            control.append(regret([(m, p) for (m, _), p in zip(g, guessed, strict=True)]))
    return {
        "groups": len(groups),
        "runs": sum(map(len, groups)),
        "median_regret": median(found),
        "worst_regret": max(found),
        "median_tau": median(map(tau, groups)),
        "control_median_regret": median(control),
    }


def main() -> None:
    """Predict all tables and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vtrain", type=Path, action="append", default=[], metavar="FILE.csv")
    parser.add_argument("--only", default="", metavar="a,b", help="of the tables")
    parser.add_argument("--groups", action="store_true", help="each group by itself, too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    same = ("model", "gpus", "seq_len", "global_batch")
    sweeps = [
        Sweep("vtrain_multi", DATA / "vtrain_multi.csv", vtrain, same),
        Sweep("ultrascale", DATA / "ultrascale.csv", NAMED["ultrascale"].row, ("model", "gpus", "global_batch")),
        *(Sweep(path.stem, path, vtrain, same) for path in args.vtrain),
    ]
    out: dict[str, dict[str, float]] = {}
    only = args.only.split(",") if args.only else [s.name for s in sweeps]
    for sweep in (s for s in sweeps if s.name in only):
        groups = sweep.groups()
        for key, pairs in sorted(groups.items()) if args.groups else ():
            print(f"{sweep.name} {' '.join(key)}: {len(pairs)} runs, {regret(pairs):.1%}, tau {tau(pairs):.2f}")
        if groups:
            out[sweep.name] = figures(list(groups.values()))
            if not args.json:
                print(sweep.name, ", ".join(f"{k} {v:.4g}" for k, v in out[sweep.name].items()), flush=True)
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
