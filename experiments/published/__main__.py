"""`python -m experiments.published`: score every published row, print the table; --write renews docs/PUBLISHED.md."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import msgspec

from experiments.published.controls import CONTROLS
from experiments.published.page import PAGE, PICTURE, page
from experiments.published.picture import scatter
from experiments.published.report import as_json, rows_text, summary
from experiments.published.rows import DATA, DataSet
from experiments.published.score import Change, Each, Score, scores
from experiments.published.sets import SETS, chosen
from experiments.published.sure import residual_file
from piper_sim.study.sure import FILE


def main(argv: Sequence[str] | None = None) -> int:
    """Score what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m experiments.published", description=__doc__)
    parser.add_argument("--sets", default="", help="names, separated by commas: " + ", ".join(s.name for s in SETS))
    parser.add_argument("--data", type=Path, default=DATA, help="a folder of tables to read instead")
    parser.add_argument("--control", choices=list(CONTROLS), help="change every job, to see what it costs")
    parser.add_argument("--rows", action="store_true", help="every row, with what its step is made of")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--write", action="store_true", help=f"renew docs/{PAGE.name} and {PICTURE.name}: all")
    parser.add_argument("--workers", type=int, default=1, help="processes that predict")
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(args.workers) if args.workers > 1 else nullcontext() as pool:
        return _told(args, map if pool is None else pool.map)


def _told(args: argparse.Namespace, each: Each) -> int:
    if args.write:
        found = _found(SETS, args.data, None, each)
        controls = {name: _found(SETS, args.data, change, each) for name, change in CONTROLS.items()}
        PAGE.write_text(page(found, controls))
        PICTURE.write_bytes(scatter(found))
        FILE.write_text(residual_file(found))
        return 0
    found = _found(chosen(args.sets), args.data, CONTROLS[args.control] if args.control else None, each)
    if args.json:
        print(msgspec.json.encode(as_json(found)).decode())
    else:
        print(summary(found))
        if args.rows:
            print(rows_text(found))
    return 0


def _found(sets: Sequence[DataSet], data: Path, change: Change | None, each: Each) -> dict[DataSet, list[Score]]:
    out = {}
    for s in sets:
        out[s] = list(scores(s.rows(data), change, each))
        print(f"{s.name}: {len(out[s])} rows", file=sys.stderr)
    return out


if __name__ == "__main__":
    sys.exit(main())
