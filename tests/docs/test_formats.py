"""Each format that is read has a page, whoever reads it reads its example, and objects have the keys that are told."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from piper_sim.app.cli import COMMANDS, main
from piper_sim.app.doctor import command as doctor
from tests.docs.test_docs import ROOT
from tests.docs.test_site import LOG
from tests.fuzz.formats import SEEDS, formats

JOBS = {"job.toml", "search.toml", "set.txt", "flags.txt"}  # the job's own page, and the commands'
READERS = {f.name: f for f in formats() if ":" not in f.name}
TWO = '[model]\nconfig = "tiny-llama"\nseq_len = 16\n[parallel]\npp = 2\n[schedule]\nname = "zb1p"\nmicrobatches = 4\n'
RUNS = {
    "error": "simulate nothing.toml",
    "schedule": "schedule 1f1b --ranks 2 --microbatches 4",
    "plan": "plan two.toml",
    "simulate": "simulate two.toml",
    "compare": "compare two.toml --schedules gpipe,1f1b",
    "explain": "explain two.toml",
    "search": "search search.toml --budget 0.01",
    "sweep": "sweep two.toml --try schedule.microbatches=[2,4]",
    "import": "import megatron.sh",
    "history": "history slurm.out",
    "cluster": "cluster --gpu h100-sxm --nodes 2",
    "run": "run two.toml -n 2 --backend local",
    "calibrate": "calibrate two.toml --from-nccl-tests all_reduce.txt",
    "doctor": "doctor",
    "validate": "validate two.toml -n 2 --emulate 0.002 --steps 3",
}


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The hook that makes the reference."""
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / ".ci" / "site.py")
    assert spec is not None and spec.loader is not None
    found = sys.modules["site_hook"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def without_page(read: Iterable[str], told: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Names of files that somebody reads and no page tells."""
    return set(read) - JOBS - {name for row in told.values() for name in row["files"]}


def test_each_format_that_is_read_has_one_page(site: ModuleType) -> None:
    assert without_page(READERS, site.FORMATS) == set()
    names = [name for row in site.FORMATS.values() for name in row["files"]]
    assert len(names) == len(set(names)) and set(names) <= READERS.keys()
    fewer = {k: v for k, v in site.FORMATS.items() if k != "profile"}
    assert without_page([*READERS, "new.toml"], fewer) == {"profile.json", "new.toml"}  # and it is seen if one has none
    assert all((ROOT / "docs" / f"{row['page']}.md").is_file() for row in site.FORMATS.values() if "page" in row)


def test_examples_are_read_by_whoever_reads_the_format(site: ModuleType, tmp_path: Path) -> None:
    asked = {row["example"]: row["files"] for row in site.FORMATS.values() if "example" in row}
    assert len(asked) > 10
    for example, (first, *_) in ((k, v) for k, v in asked.items() if v):
        shutil.copy(ROOT / example, tmp_path / first)
        READERS[first].read(tmp_path / first)


def test_a_page_has_its_keys_those_of_its_tables_and_the_example(site: ModuleType) -> None:
    profile = site._format(**site.FORMATS["profile"])
    for row in (
        "| `host_s` | number ≥ 0 or null |",
        "## MessageCurve",
        "| `beta_s_per_byte` |",
        '"profile_version": 2',
    ):
        assert row in profile
    assert "`reduce_stream`" in site._format(**site.FORMATS["strategy"])
    assert any("more lines" in x for x in site._example("cost_models/hardware/h100-sxm.json"))  # cut, and it says so


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("search.toml", "megatron.sh"):
        shutil.copy(SEEDS / name, tmp_path)
    (tmp_path / "two.toml").write_text(TWO, "utf-8")
    (tmp_path / "slurm.out").write_text("".join(LOG.format(i, 30.0) for i in range(1, 9)), "utf-8")
    (tmp_path / "all_reduce.txt").write_bytes(READERS["all_reduce.txt"].seed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "questions", lambda job: [("nothing", dict)])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "validate" else n for n in RUNS])
def test_an_object_has_the_keys_that_its_page_tells(name: str, site: ModuleType) -> None:
    out = StringIO()
    with redirect_stdout(out):
        main([*RUNS[name].split(), "--json"])
    found = json.loads(out.getvalue())
    keys = found["error"] if name == "error" else {k: v for k, v in found.items() if k != "schema_version"}
    assert keys.keys() - {"reason", "nearest"} == site.RESULTS[name].keys()  # those only where nothing fits


@pytest.mark.usefixtures("folder")
def test_a_run_leaves_lines_with_the_keys_that_its_page_tells(site: ModuleType) -> None:
    assert main(["run", "two.toml", "-n", "2", "--backend", "local", "--out", "out"]) == 0
    row, (line,) = site.FORMATS["run_folder"], Path("out/log.jsonl").read_text("utf-8").splitlines()
    assert json.loads((ROOT / row["example"]).read_text("utf-8").splitlines()[0]).keys() == json.loads(line).keys()
    assert all(f"`{key}`" in row["say"] for key in json.loads(line)) and "`pid`" in row["say"]
    assert json.loads(Path("out/ranks.json").read_text("utf-8"))["ranks"]["0"].keys() == {"pid"}


def test_every_command_that_prints_an_object_is_told(site: ModuleType) -> None:
    assert COMMANDS.keys() - site.RESULTS.keys() == {"demo", "export"}  # as compare; what was written, in words
    assert site.RESULTS.keys() == RUNS.keys()
