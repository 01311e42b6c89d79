"""`python -m tests.fuzz N [SEED] [FORMAT …]`: N cases over all formats; exits 1 where an answer is bad."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.formats import formats
from tests.fuzz.run import fuzz


def main(args: list[str]) -> int:
    """Run and tell."""
    cases, seed, names = int(args[0]), int(args[1]) if len(args) > 1 else 0, args[2:]
    chosen = [f for f in formats() if not names or f.name in names]
    began, failed = time.process_time(), 0
    with tempfile.TemporaryDirectory() as folder:
        for form in chosen:
            ends, bad = fuzz(form, -(-cases // len(chosen)), Path(folder), seed)
            failed += len(bad)
            print(f"{form.name}: {dict(ends)}", flush=True)
            for said, i in {said[-300:]: i for i, said in reversed(bad)}.items():
                print(f"  case {i}: {said}", flush=True)
    print(f"{cases} cases, {failed} bad, {time.process_time() - began:.0f} s of processor time")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
