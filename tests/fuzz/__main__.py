"""`python -m tests.fuzz N [--seed S] [--state FILE] [FORMAT …]`: N cases over all formats; exits 1 where one is bad.

With a state it goes on where it was stopped; the same seed and number are the same case.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.formats import Format, formats
from tests.fuzz.run import Outcome, guarded, judged, placed

BLOCK = 2000  # cases of one worker, for a share of 1


def main(args: list[str]) -> int:
    """Run and tell."""
    flags = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    flags.add_argument("cases", type=int)
    flags.add_argument("names", nargs="*", metavar="FORMAT")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--state", type=Path)
    given = flags.parse_args(args)
    chosen = [f for f in formats() if not given.names or f.name in given.names]
    found = _state(given.state, given.seed, chosen)
    began, each = time.monotonic(), given.cases / sum(f.share for f in chosen)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        while todo := [f for f in chosen if found[f.name].next < round(each * f.share)]:
            for f in todo:
                folder, at = Path(name, f.name.replace(":", "-")), found[f.name]
                if not folder.exists():  # a valid file first: what its reader imports is no answer's memory or time
                    folder.mkdir()
                    valid = judged(f, placed(f, folder, f.seed))
                    assert valid == "read", f"the seed of {f.name} is not valid: {valid}"
                stop = min(round(each * f.share), at.next + max(10, round(BLOCK * f.share)))
                _add(at, guarded(f, range(at.next, stop), folder, given.seed))
                if given.state is not None:
                    table = {n: vars(o) for n, o in found.items()}
                    given.state.write_text(json.dumps({"seed": given.seed, "formats": table}), encoding="utf-8")
    return _tell(found, time.monotonic() - began)


def _state(file: Path | None, seed: int, chosen: list[Format]) -> dict[str, Outcome]:
    found = {f.name: Outcome() for f in chosen}
    if file is not None and file.exists():
        kept = json.loads(file.read_text("utf-8"))
        assert kept["seed"] == seed, f"{file} is of seed {kept['seed']}"
        found |= {n: Outcome(**{**o, "ends": Counter(o["ends"])}) for n, o in kept["formats"].items()}
    return found


def _add(at: Outcome, more: Outcome) -> None:
    at.next = more.next
    at.ends += more.ends
    at.bad += more.bad
    at.seconds += more.seconds


def _tell(found: dict[str, Outcome], seconds: float) -> int:
    for name, o in found.items():
        print(f"{name}: {o.next} cases, {dict(o.ends)}, {1e3 * o.seconds / max(1, o.next):.2f} ms each")
        for said, i in {said[-400:]: i for i, said in reversed(o.bad)}.items():
            print(f"  case {i}: {said}")
    cases, bad, spent = (sum(x) for x in zip(*((o.next, len(o.bad), o.seconds) for o in found.values()), strict=True))
    print(f"{cases:,} cases, {bad} bad, {spent:,.0f} s of processor time, {seconds:,.0f} s on the clock")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
