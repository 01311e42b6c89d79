"""`python -m experiments.published.fit nanotron`: a framework's constants, fitted to every other row of its tables.

Coordinate descent over the numbers of its software file on the mean error, each row's counted up to a half; a number
that is "as" another file's stays. Prints what it found; whoever runs it writes the file, with where each comes from.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cost_models.software import load_software
from experiments.published.rows import Row, fitted
from experiments.published.score import Table, scores, times
from experiments.published.sets import SETS

STEPS = (0.7, 0.85, 0.93, 1.07, 1.18, 1.4)
NUMBERS = ("attention", "traffic", "launch_us", "dispatch_us", "turn_us")
USED = {  # tables a framework is fitted to
    "megatron": ("zero_bubble",),
    "megatron-2021": ("megatron_sc21", "megatron_sc21_table2"),
    "megatron-deepspeed": ("vtrain_single_node", "vtrain_multi_node"),
    "llm-foundry": ("llm_foundry",),
    "nanotron": ("ultrascale",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fit one framework."""
    parser = argparse.ArgumentParser(prog="python -m experiments.published.fit", description=__doc__)
    parser.add_argument("framework", choices=list(USED))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    sets = [s.rows() for s in SETS if s.name in USED[args.framework]]
    rows = [r for some in sets for r in some if r.name in fitted(some)]
    now = load_software(args.framework)
    best = {k: float(getattr(now, k)) for k in NUMBERS if not now.sources.get(k, "as").startswith("as")}
    flags = {k: getattr(now, k) for k in now.sources if k not in best}
    loss = error(rows, {**flags, **best})
    for _ in range(args.rounds):
        for key in best:
            for step in STEPS:
                tried = {**best, key: float(f"{best[key] * step:.3g}")}
                if (found := error(rows, {**flags, **tried})) < loss - 1e-4:
                    best, loss = tried, found
                    print(f"{loss:.4f} {best}", file=sys.stderr, flush=True)
    print(json.dumps({"framework": args.framework, "rows": len(rows), "mean_error": loss, **best}))
    return 0


def error(rows: Sequence[Row], constants: Mapping[str, object]) -> float:
    """Mean size of the errors of time, each at most a half, with a file of these constants."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "fit.json"
        sources = dict.fromkeys(constants, "being fitted")
        file.write_text(json.dumps({"name": "fit", **constants, "sources": sources}))

        def change(job: Table) -> Table:
            return {**job, "costs": {**job["costs"], "software": str(file)}}

        sizes = [min(0.5, abs(e)) for e in times(scores(rows, change))]
    return sum(sizes) / len(sizes)


if __name__ == "__main__":
    sys.exit(main())
