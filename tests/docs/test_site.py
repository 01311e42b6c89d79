"""The site is built strictly, its reference has what the code has, a dead link stops it; recipes run line by line."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from ir.job.schema import SECTIONS
from piper_sim.app.cli import COMMANDS, main
from tests.docs.test_docs import JOB, ROOT, SCRIPT, blocks

RECIPES = ROOT / "docs" / "RECIPES.md"
LOG = " iteration {0:8d}/     500 | elapsed time per iteration (ms): {1} | learning rate: 1.0E-04 |\n"


def built(folder: Path, docs: Path) -> tuple[int, str]:
    """mkdocs on another copy of the pages."""
    own = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    own |= {"docs_dir": str(docs), "site_dir": str(folder / "site"), "hooks": [str(ROOT / ".ci" / "site.py")]}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(own), "utf-8")
    line = [sys.executable, "-m", "mkdocs", "build", "-f", str(folder / "mkdocs.yml")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_site_is_built_and_its_reference_is_of_the_code(tmp_path: Path) -> None:
    code, said = built(tmp_path, ROOT / "docs")
    assert code == 0, said
    job, commands = (
        (tmp_path / "site" / "reference" / n / "index.html").read_text("utf-8") for n in ("job", "commands")
    )
    assert all(f'id="{name}"' in job for name in SECTIONS) and "stages_per_rank" in job
    assert all(f'id="{name}"' in commands for name in COMMANDS) and "--budget" in commands


@pytest.mark.slow
def test_a_link_that_leads_nowhere_stops_the_site(tmp_path: Path) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (docs / "SWEEP.md").write_text("# Sweeps\n\n[there](NOWHERE.md) and [here](LIBRARY.md#no-such-place)\n", "utf-8")
    code, said = built(tmp_path, docs)
    assert code and "NOWHERE.md" in said and "no-such-place" in said


RECIPE = [pytest.param(text, id=f"line {line}") for line, lang, text in blocks(RECIPES) if lang == "sh"]


@pytest.mark.parametrize("text", RECIPE)
def test_a_recipe_runs_as_it_stands(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB, "utf-8")
    Path("pretrain_gpt.sh").write_text(SCRIPT, "utf-8")
    Path("slurm-1234.out").write_text("".join(LOG.format(i, 30.0) for i in range(1, 9)), "utf-8")
    for line in text.splitlines():
        words = shlex.split(line)[1:]
        if words[-2] == ">":
            with open(words[-1], "w", encoding="utf-8") as f, redirect_stdout(f):
                assert main(words[:-2]) == 0, line
        else:
            assert main(words) == 0, line


def test_there_are_ten_recipes() -> None:
    assert len(RECIPE) == 10 == len(re.findall("^## ", RECIPES.read_text("utf-8"), re.MULTILINE))
