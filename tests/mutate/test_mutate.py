"""The tool sees what lives and what dies, and what it knows beforehand is still there."""

import ast
from pathlib import Path

from tests.mutate.__main__ import known, members, named
from tests.mutate.operators import mutants
from tests.mutate.runs import ROOT, ImportGraph, killed


def test_a_mistake_dies_where_a_test_sees_it_and_lives_where_none_does(tmp_path: Path) -> None:
    source = b"def f(x):\n    return max(x, 0) < 3\n"
    (tmp_path / "a.py").write_bytes(source)
    (tmp_path / "test_a.py").write_text("from a import f\ndef test_f():\n    assert f(2) and not f(3)\n")
    ends = {m.change: killed(tmp_path, m, {"test_a.py": 1.0}) for m in mutants("a.py", source)}
    assert {change for change, said in ends.items() if not said} == {"0 → 1"}
    assert sum("test_a.py::test_f" in said for said in ends.values()) == len(ends) - 1 == 3
    assert (tmp_path / "a.py").read_bytes() == source


def test_what_is_known_beforehand_names_code_that_is_there() -> None:
    data, drawn = known(), {name: members(globs) for name, globs in known()["folders"].items()}
    every = {(m.path, m.line, m.change): m for some in drawn.values() for m in some}
    assert not [e for e in data["equivalent"] if (e["path"], e["line"], e["change"]) not in every or not e["reason"]]
    found = [named(e) for e in data["named"]]
    assert len(set(found)) >= 10 and min(map(len, drawn.values())) > 500
    for mutant in found:
        ast.parse(mutant.applied((ROOT / mutant.path).read_bytes()))


def test_a_files_tests_are_those_that_reach_it_its_room_first() -> None:
    near, wider = ImportGraph.read(ROOT).tests("ir/lower/zero.py")
    assert near[0] == "ir/lower/zero.py" and "tests/ir/lower/test_lower_zero.py" in near
    assert "tests/ir/verify/test_rules_lowering.py" in wider and not set(near) & set(wider)
    assert "tests/cost_models/links/test_links.py" not in [*near, *wider]
