"""What ranks that are threads read by msgspec is known to it whole before they do: it shows types half known."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.executor.launch.processes import forked

ROOT = Path(__file__).parents[3]
# What the ranks' server imports before it forks; then, whether msgspec knows the classes that ranks read.
KNOWN = """
import ir.core.files
{control}
import executor.runtime.rank
from executor.checkpoint.manifest import CheckpointManifest, RankManifest
from executor.checkpoint.pieces import ShardPiece
from executor.runtime.spec import PlanRun
from ir.job.run_options import JobRunOptions
kinds = CheckpointManifest, RankManifest, ShardPiece, PlanRun, JobRunOptions
print(sum("__msgspec_cache__" in vars(kind) for kind in kinds), len(kinds))
"""
WHOLE = {"": True, "ir.core.files.resolve_types = lambda *kinds: None": False}


@cache
def _known() -> dict[str, tuple[int, str]]:
    """None of our modules is there yet where a program begins."""
    return dict(zip(WHOLE, forked("import torch", *(KNOWN.format(control=c) for c in WHOLE)), strict=True))


@pytest.mark.parametrize("control", WHOLE)
def test_what_threads_read_is_known_before(control: str) -> None:
    code, said = _known()[control]
    known, all_ = map(int, said.split())
    assert code == 0 and (known == all_ if WHOLE[control] else known == 0)


def _read(file: Path) -> set[str]:
    """The classes that a file has msgspec read, by name."""
    out = set()
    for call in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)):
        name = ast.unparse(call.func)
        asked = [k.value for k in call.keywords if k.arg == "type"]
        asked += call.args[1:2] if name == "msgspec.convert" else []
        out |= {n.id for kind in asked for n in ast.walk(kind) if isinstance(n, ast.Name)}
    return out - {"dict", "list", "str", "Any"}


def test_whatever_ranks_read_is_resolved_where_it_is_made() -> None:
    files = [*(ROOT / "executor").rglob("*.py")]
    read = {name for file in files for name in _read(file) if "msgspec" in file.read_text()}
    text = "".join(file.read_text() for file in files)
    assert "CheckpointManifest" in read and "KernelSample" in read
    resolved = {n for line in text.splitlines() if line.startswith("resolve_types(") for n in line[14:-1].split(", ")}
    assert read - {"cls"} <= resolved, "those of `cls` are PlanRun's own"
    assert "PlanRun" in resolved
