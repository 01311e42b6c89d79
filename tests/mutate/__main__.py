"""`python -m tests.mutate --n 30 --seed 1`: mutants of the named folders, whom the tests kill; exits 1 below 90 %.

One folder is called `named`: mistakes that once went unseen, and must never again.
"""

import argparse
import math
import random
import re
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

from tests.mutate.operators import Mutant, mutants
from tests.mutate.runs import ROOT, ImportGraph, baseline, copied, killed

LEAST = 0.9


def known() -> dict[str, list[dict[str, str]]]:
    """What lies in known.toml: `folders` by name, `named` mutants, `equivalent` ones with the reason why."""
    return tomllib.loads((ROOT / "tests/mutate/known.toml").read_text(encoding="utf-8"))


def named(entry: dict[str, str]) -> Mutant:
    """A mutant given by two texts. Raises ValueError: the first is not in the file exactly once."""
    source = (ROOT / entry["path"]).read_bytes()
    was = entry["old"].encode()
    if source.count(was) != 1:
        raise ValueError(f"{entry['path']}: {entry['old']!r} is there {source.count(was)} times")
    at = source.index(was)
    return Mutant(entry["path"], entry["old"], f"{entry['old']} → {entry['new']}", (at, at + len(was)), entry["new"])


def members(globs: list[str]) -> list[Mutant]:
    """All mutants of the files; a pattern with `!` in front takes files away."""
    without = {p for g in globs if g[0] == "!" for p in ROOT.glob(g[1:])}
    found = {p for g in globs if g[0] != "!" for p in ROOT.glob(g)} - without
    return [m for p in sorted(found) for m in mutants(p.relative_to(ROOT).as_posix(), p.read_bytes())]


def judged(chosen: list[Mutant], jobs: int) -> tuple[dict[Mutant, str], list[str]]:
    """(what killed each, "" for a survivor; test files that are red without a mutant), told as it comes.

    Those whom the tests of their room let live meet tests of others.
    """
    graph = ImportGraph.read(ROOT)
    sets = {path: graph.tests(path) for path in {m.path for m in chosen}}
    trees, seconds, ends = SimpleQueue[Path](), dict[str, float](), dict.fromkeys(chosen, "")

    def one(mutant: Mutant, wider: int) -> None:
        tree, began = trees.get(), time.monotonic()
        try:
            green = {f: seconds[f] for f in sets[mutant.path][wider] if seconds[f] < math.inf}
            ends[mutant] = said = killed(tree, mutant, green)
        finally:
            trees.put(tree)
        spent = f"{'wider' if wider else 'room'}, {time.monotonic() - began:.0f} s"
        print(f"{said or 'SURVIVES'} [{spent}] {mutant.path}: {mutant.line} | {mutant.change}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copied(ROOT, clean := Path(folder, "clean"))
        for wider in (0, 1):
            left = [m for m in chosen if not ends[m]]
            seconds |= baseline(clean, sorted({f for m in left for f in sets[m.path][wider]} - seconds.keys()))
            red = [f for f, s in seconds.items() if s == math.inf]
            print(f"{len(seconds)} files of tests run without mutants, {len(red)} of them red: {red}", flush=True)
            for i in range(0 if wider else jobs):  # with the kernels that the clean tree has compiled
                shutil.copytree(clean, Path(folder, str(i)))
                trees.put(Path(folder, str(i)))
            list(pool.map(partial(one, wider=wider), left))
    return ends, red


def main() -> int:
    """Draw, run, tell."""
    flags = argparse.ArgumentParser(prog="tests.mutate", description=__doc__)
    flags.add_argument("--n", type=int, default=30, help="mutants of each folder")
    flags.add_argument("--seed", default="0")
    flags.add_argument("--folders", default="", help="some of them, by comma; `named` is one")
    flags.add_argument("--only", default="", help="of those drawn, the ones that this pattern finds")
    flags.add_argument("--jobs", type=int, default=2)
    said, data = flags.parse_args(), known()
    same = {(e["path"], e["line"], e["change"]): e["reason"] for e in data["equivalent"]}
    drawn = {}
    for name in said.folders.split(",") if said.folders else ["named", *data["folders"]]:
        every = [named(e) for e in data["named"]] if name == "named" else members(data["folders"][name])
        n = len(every) if name == "named" else min(said.n, len(every))
        drawn[name] = random.Random(f"{said.seed} {name}").sample(every, n)
    drawn = {k: [m for m in v if re.search(said.only, f"{m.path}: {m.line} | {m.change}")] for k, v in drawn.items()}
    alike = {m: same[key] for m in chain(*drawn.values()) if (key := (m.path, m.line, m.change)) in same}
    ends, red = judged([m for m in chain(*drawn.values()) if m not in alike], said.jobs)
    good = not red
    for name, some in drawn.items():
        differ = [m for m in some if m not in alike]
        dead = sum(bool(ends[m]) for m in differ)
        print(f"{name}: {dead} of {len(differ)} killed, {len(some) - len(differ)} equivalent; seed {said.seed}")
        print(*(f"  survives: {m.path}: {m.line} | {m.change}" for m in differ if not ends[m]), sep="\n")
        print(*(f"  equivalent: {m.path}: {m.line} | {m.change}: {alike[m]}" for m in some if m in alike), sep="\n")
        good &= dead >= (1 if name == "named" else LEAST) * len(differ)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
