"""Which tests look at a file, and what they say of a mutant of it: each in a process and a copy of the tree of its own.

Tests are chosen by the import graph, not by measured coverage: ranks are other processes and kernels are compiled, so
that coverage does not see them; the graph takes a second, and a test too many costs nothing but time.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from itertools import accumulate, count
from multiprocessing import get_context
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import HealthCheck, Phase, settings

from tests.house.source import Source, module_of
from tests.mutate.operators import Mutant

ROOT = Path(__file__).parents[2]
WIDER = 6  # test files beyond those of the room, and `TOLD`, which reads every format
TOLD = "tests/fuzz/test_told.py"
ALLOWED = 60.0  # seconds on top of four times what the tests take
LONGEST = 60.0  # of a mutant's tests without it, in the room and again beyond: what only slower ones see, survives


# What takes seconds to import is imported once, and children are forked. CI: a test that is skipped is red.
os.environ |= {"OMP_NUM_THREADS": "1", "CI": "1"}
_FORK = get_context("forkserver")
_FORK.set_forkserver_preload(["pytest", "hypothesis.strategies", "numba", "torch"])
_LATER = count()  # bytecode is known by its source's size and second: no two mutants have the same
# Hypothesis is there before pytest is. What fails need not be made small, and draws are the same every time.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-profile=mutants")


class ImportGraph(Source):
    """Imports of tests too: who reaches a file, and by how many imports."""

    @cached_property
    def modules(self) -> dict[str, str]:
        """Module -> path, tests too."""
        return {module_of(path): path for path in self.files}

    def tests(self, path: str) -> tuple[list[str], list[str]]:
        """(doctests of its own and its importers, tests of its room and above it; the nearest test files beyond)."""
        users: dict[str, set[str]] = {}
        for module, targets in self.edges.items():
            for target in targets:
                users.setdefault(target, set()).add(module)
        steps, todo = {module_of(path): 0}, [module_of(path)]
        for module in todo:
            new = users.get(module, set()) - steps.keys()
            steps |= dict.fromkeys(new, steps[module] + 1)
            todo += sorted(new)
        paths = {self.modules[m]: n for m, n in steps.items() if m in self.modules}
        room = next(r for r in Path("tests", path).parents if any(p.startswith(f"{r}/") for p in self.files))
        home = f"tests/{path.split('/')[0]}/"
        far = {p: (n, not p.startswith(home), len(self.edges[module_of(p)])) for p, n in paths.items() if "/test_" in p}
        around = {f"{r}" for r in room.parents}
        inside = [p for p in far if p.startswith(f"{room}/") or str(Path(p).parent) in around]
        beside = [p for p, n in paths.items() if n == 1 and p.startswith(home[6:]) and ">>> " in self.files[p]]
        outside = [p for p in far if p not in inside and not p.startswith(("tests/bench/", "tests/docs/"))]
        nearest = sorted(outside, key=lambda p: (p != TOLD, far[p]))[: WIDER + 1]
        return [path, *beside, *inside], nearest


def copied(root: Path, tree: Path) -> None:
    """The checkout's files, as they stand, without what git ignores."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, text=True)
    for name in listed.split("\n"):
        if (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)


def _pytest(tree: Path, arguments: Sequence[str], said: Path) -> None:
    """A forked child becomes pytest in a tree."""
    os.setsid()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(tree / ".cache")}
    sys.dont_write_bytecode = False  # what is not a mutant is compiled once
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p) not in (ROOT, tree))]
    for name in [m for m in sys.modules if m.split(".")[0] == "tests"]:
        del sys.modules[name]
    for name in (module_of(a) for a in arguments if a.endswith(".py") and not a.startswith("test")):
        import_module(name)  # as users do: pytest would put `ir.directives.shard` where the function of that name is
    draw = dict(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], **draw)
    sys.exit(int(import_module("pytest").main(["-q", "--tb=line", "-m", "not slow", *_QUIET, *arguments])))


def run(tree: Path, files: Sequence[str], *more: str, limit: float | None = None) -> tuple[int, str]:
    """pytest's exit code (124: over the limit, in seconds) and its words."""
    said = tree / "said.txt"
    child = _FORK.Process(target=_pytest, args=(tree, [*more, *files], said))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        os.killpg(child.pid or 0, signal.SIGKILL)
        return 124, "over time"
    return child.exitcode, said.read_text(errors="replace")


def baseline(tree: Path, files: Sequence[str]) -> dict[str, float]:
    """Seconds of each test file without any mutant; endless where it is red, and so can judge none."""
    report, seconds = tree / "baseline.xml", dict.fromkeys(files, 0.0)
    code, said = run(tree, files, f"--junitxml={report}", "-o", "junit_family=xunit1") if files else (0, "")
    for case in ElementTree.parse(report).iter("testcase") if files else ():
        seconds[case.attrib["file"]] += math.inf if len(case) else float(case.attrib["time"])
    if code and math.inf not in seconds.values():
        raise RuntimeError(said[-3000:])
    return seconds


def killed(tree: Path, mutant: Mutant, seconds: dict[str, float]) -> str:
    """What tests, with the seconds they take, say of it: its own doctests, then the quickest ones; "" if nothing."""
    path = tree / mutant.path
    source, times = path.read_bytes(), path.stat()
    kernels = set(path.parent.glob("__pycache__/numba-*"))
    path.write_bytes(mutant.applied(source))
    os.utime(path, (times.st_atime, times.st_mtime + 10 + next(_LATER)))
    try:
        every = sorted(seconds, key=lambda f: (f != mutant.path, f.startswith("tests/"), seconds[f]))
        spent = accumulate(seconds[f] for f in every)
        first = [f for f, s in zip(every, spent, strict=True) if s <= LONGEST or f == every[0]]
        code, said = run(tree, first, "-x", limit=ALLOWED + 4 * sum(seconds.values())) if first else (0, "")
        words = [w for w in said.split("\n") if w.startswith(("FAILED", "ERROR"))]
        return "" if code in (0, 5) else (words[0] if words else f"exit {code}")[:150]
    finally:
        path.write_bytes(source)
        os.utime(path, (times.st_atime, times.st_mtime))
        for folder in set(path.parent.glob("__pycache__/numba-*")) - kernels:
            shutil.rmtree(folder)
