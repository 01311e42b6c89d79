"""`python -m experiments.published`: score every published row, print the table; --write renews docs/PUBLISHED.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.published.report import PAGE, as_json, summary, rows_text, page
from experiments.published.rows import DATA
from experiments.published.controls import plain
from experiments.published.score import scores
from experiments.published.sets import SETS, chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Score what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m experiments.published", description=__doc__)
    parser.add_argument("--sets", default="", help="names, separated by commas: " + ", ".join(s.name for s in SETS))
    parser.add_argument("--data", type=Path, default=DATA, help="a folder of tables to read instead")
    parser.add_argument("--rows", action="store_true", help="every row, with what its step is made of")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--write", action="store_true", help=f"renew {PAGE}")
    parser.add_argument("--plain", action="store_true", help="without software files")
    args = parser.parse_args(argv)
    found = {}
    for s in chosen(args.sets):
        found[s] = list(scores(s.rows(args.data), plain if args.plain else None))
        print(f"{s.name}: {len(found[s])} rows", file=sys.stderr)
    if args.write:
        PAGE.write_text(page(found))
    if args.json:
        print(json.dumps(as_json(found)))
    else:
        print(summary(found))
        if args.rows:
            print(rows_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
