"""The house's rules hold; and each of them finds what it is there to find."""

from pathlib import Path

import pytest

from tests.house import rules
from tests.house.rules import RULES, Rule
from tests.house.source import Source

ROOT = Path(__file__).parents[2]
RED = {  # rule -> what breaks it today; one that holds again is taken out here
    "production_lines": "53,327 lines",
    "tests_lines": "36,822 lines",
}
BODY = "    x = 1\n"
PROJECT = '[project]\ndependencies = ["numpy>=1"]\n[project.optional-dependencies]\ndev = ["ruff", "hypothesis"]\n'


@pytest.fixture(scope="module")
def source() -> Source:
    return Source.read(ROOT)


def _as_is(rule: Rule) -> object:
    marks = pytest.mark.xfail(strict=True, reason=RED[rule.__name__]) if rule.__name__ in RED else ()
    return pytest.param(rule, marks=marks, id=rule.__name__)


@pytest.mark.parametrize("rule", [_as_is(rule) for rule in RULES])
def test_a_rule_holds(rule: Rule, source: Source) -> None:
    found = rule(source)
    assert not found, "\n".join([(rule.__doc__ or "").strip(), *found])


def test_the_rules_read_the_whole_house(source: Source) -> None:
    paths = {p.relative_to(ROOT).as_posix() for top in ("ir", "executor", "tests") for p in (ROOT / top).rglob("*.py")}
    assert paths <= source.files.keys() and len(paths) > 300
    assert "ir.core.errors" in source.edges["ir.job.load"]
    assert set(RED) <= {rule.__name__ for rule in RULES}


BROKEN = [
    (rules.production_lines, {"ir/a.py": "\n" * 35_001}, "35,001 lines"),
    (rules.tests_lines, {"tests/a.py": "\n" * 22_001}, "22,001 lines"),
    (rules.folders, {f"ir/core/f{i}.py": "" for i in range(13)}, "ir/core: 13 files"),
    (rules.import_circles, {"ir/a.py": "import ir.b", "ir/b.py": "def f():\n    from ir import a\n"}, "ir.a, ir.b"),
    (rules.import_circles, {"ir/a/__init__.py": "from .b import c", "ir/a/b.py": "import ir.a"}, "ir.a, ir.a.b"),
    (
        rules.floors,
        {f"ir/d{i}/x.py": f"def f():\n    from ir.d{i + 1}.x import y\n" for i in range(7)} | {"ir/d7/x.py": "y = 1"},
        "ir: 8 floors",
    ),
    (
        rules.one_class_a_name,
        {"ir/a.py": "class A: pass", "executor/b.py": "class A: pass"},
        "A: executor/b.py, ir/a.py",
    ),
    (rules.function_sizes, {"ir/a.py": "class A:\n  def f(self):\n" + BODY * 60}, "ir/a.py:2 f: 61 lines"),
    (rules.function_sizes, {"ir/a.py": "def f(a, b, c, d, *e, f, g, h, **i):\n" + BODY}, "9 parameters"),
    (rules.type_ignores, {"ir/a.py": "x = y  # type: ignore[a]\n" * 16}, "16 type ignores"),
    (rules.any_parameters, {"piper_sim/study/a.py": "def f(x: int, **y: Any): pass"}, "f: y is Any"),
    (rules.dependencies, {"ir/a.py": "import numpyro", "tests/a.py": "import hypothesis, numpy"}, "numpy is asked"),
    (rules.dependencies, {"ir/a.py": "import numpy, hypothesis_x", "tests/a.py": ""}, "hypothesis is asked"),
    (rules.used_by_tests_alone, {"ir/a.py": "def f(): f()", "tests/a.py": "from ir.a import f"}, "ir/a.py:1 f"),
    (rules.used_by_tests_alone, {"ir/b/__init__.py": "from ir.b.a import F", "ir/b/a.py": "F = 1"}, "ir/b/a.py:1 F"),
    (rules.used_by_tests_alone, {"ir/a.py": "f = 1", "ir/b.py": "from ir.c import f", "ir/c.py": "f = 2"}, "ir/a.py:1"),
    (
        rules.raises_documented,
        {"ir/a.py": 'class A:\n  def f(self):\n    """F."""\n    raise PiperError(1) from None\n'},
        "ir/a.py:2 f",
    ),
]
KEPT = [
    (rules.any_parameters, {"piper_sim/app/a.py": "def f(x: dict[str, Any]): pass", "ir/a.py": "def f(x: Any): pass"}),
    (rules.folders, {f"ir/core/{n}/f{i}.py": "" for n in "ab" for i in range(12)}),
    (rules.import_circles, {"ir/a.py": "import ir.b", "ir/b.py": "import tests.a", "tests/a.py": "import ir.a"}),
    (rules.floors, {f"ir/d{i}/x.py": f"import ir.d{i + 1}.x" for i in range(5)} | {"ir/d5/x.py": "import ir.d5.y"}),
    (rules.one_class_a_name, {"ir/a.py": "class _A: pass", "ir/b.py": "class _A: pass", "tests/a.py": "class B: pass"}),
    (rules.function_sizes, {"ir/a.py": "@jit\ndef f(a, b, c, d, e, f, g, h, i):\n" + BODY * 60}),
    (rules.function_sizes, {"ir/a.py": "class A:\n  def f(self, a, b, c, d, e, f, g, h):\n" + BODY * 59}),
    (
        rules.dependencies,
        {"ir/a.py": "def f():\n    import numpy.linalg", "tests/a.py": "from hypothesis import given"},
    ),
    (rules.used_by_tests_alone, {"ir/a.py": "f = 1\ng = f", "ir/b.py": "from ir import a\nif a.g: pass"}),
    (rules.used_by_tests_alone, {"ir/a.py": "@rule\ndef f(): pass\ndef _g(): pass", "ir/__init__.py": "def h(): pass"}),
    (rules.used_by_tests_alone, {"ir/a.py": "def f(): pass", "ir/b.py": "_X = 'from ir.a import f; f()'"}),
    (
        rules.raises_documented,
        {"ir/a.py": 'def f():\n    """Raises PiperError (job): always."""\n    raise PiperError(1)\n'},
    ),
    (rules.raises_documented, {"ir/a.py": "def _f():\n    raise PiperError(1)\n\ndef g():\n    raise ValueError(1)\n"}),
]


@pytest.mark.parametrize(("rule", "files", "says"), BROKEN)
def test_what_breaks_a_rule_is_found(rule: Rule, files: dict[str, str], says: str) -> None:
    (found,) = rule(Source(files, PROJECT if rule is rules.dependencies else "[project]\n"))
    assert says in found


@pytest.mark.parametrize(("rule", "files"), KEPT)
def test_what_keeps_a_rule_is_left_alone(rule: Rule, files: dict[str, str]) -> None:
    assert rule(Source(files, PROJECT if rule is rules.dependencies else "[project]\n")) == []


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule for rule, *_ in BROKEN} == set(RULES)
