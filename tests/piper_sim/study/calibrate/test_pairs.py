"""Measured pair tables: read from CSV, kept in a profile, and slower steps where they say so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cost_models import load_hardware
from cost_models.compute.interference import KernelSlowdown
from cost_models.profile.pairs import KernelPair, pair_keys
from piper_sim.app.cli import main
from piper_sim.study.calibrate.pairs import read_pairs
from tests.refusals import refusal

TABLE = """# GEMM of 8192 and a copy beside NCCL, each alone and together
compute,message,held,moving,wire
arithmetic,all_to_all,0.25,0.05,0.10
memory , collective, 0, 0.4, 0.2
"""


def read(tmp_path: Path, text: str) -> dict[str, KernelPair]:
    (tmp_path / "pairs.csv").write_text(text)
    return dict(read_pairs(str(tmp_path / "pairs.csv")).pairs)


def test_a_table_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, TABLE) == {
        "arithmetic all_to_all": KernelPair(0.25, 0.05, 0.10),
        "memory collective": KernelPair(0.0, 0.4, 0.2),
    }


def test_pairs_that_were_measured_go_before_the_gpus_own(tmp_path: Path) -> None:
    hw = load_hardware("h800-sxm")
    plain, changed = KernelSlowdown.of(hw), KernelSlowdown.of(hw, read(tmp_path, TABLE))
    assert changed.held[0][0] == 0.25 != plain.held[0][0] and changed.wire[0][0] == 0.10
    assert changed.moving[1][1] == 0.4 and changed.wire[1][1] == 0.2
    assert changed.held[0][1:] == plain.held[0][1:] and changed.moving[1][0] == plain.moving[1][0]
    assert plain.wire == ((0.43, 0, 0), (0.43, 0, 0)), "only all-to-alls, as the file says"
    assert len(pair_keys()) == 6


BROKEN: dict[str, tuple[Callable[[str], str], int, str]] = {
    "no header": (lambda t: t.replace("compute,message,held,moving,wire\n", ""), 2, "compute,message"),
    "another column": (lambda t: t.replace("wire", "wires"), 2, "wire"),
    "a column missing": (lambda t: t.replace(",0.10", ""), 3, "wire"),
    "no such compute": (lambda t: t.replace("arithmetic,", "arithmatic,"), 3, "arithmetic"),
    "no such message": (lambda t: t.replace("collective", "all_reduce"), 4, "collective"),
    "no number": (lambda t: t.replace("0.05", "5%"), 3, "1.2 times"),
    "negative": (lambda t: t.replace("0.05", "-0.05"), 3, "0 or more"),
    "not finite": (lambda t: t.replace("0.05", "nan"), 3, "0 or more"),
    "twice": (lambda t: t + "memory,collective,0,0,0\n", 5, "one line"),
    "empty": (lambda t: "", 1, "compute,message"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_table_that_cannot_be_right_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    change, line, help_ = BROKEN[name]
    caught = refusal(read, tmp_path, change(TABLE))
    assert caught.file == f"{tmp_path / 'pairs.csv'}:{line}" and caught.key == "--pairs"
    assert help_ in f"{caught.allowed} {caught.suggestion}"


JOB = """
[model]
config = "tiny-moe"
seq_len = 256
[parallel]
pp = 2
dp = 4
ep = 4
[schedule]
name = "dualpipe"
microbatches = 8
"""


def test_a_step_is_slower_where_the_pairs_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "pairs.csv").write_text(
        TABLE.splitlines()[1] + "".join(f"\n{k.replace(' ', ',')},9,0,9" for k in pair_keys())
    )
    job, out = str(tmp_path / "job.toml"), str(tmp_path)

    def run(*args: str) -> dict[str, Any]:
        assert main([*args, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    made = run("calibrate", job, "--pairs", str(tmp_path / "pairs.csv"), "--out", out)
    assert made["pairs"] == 6 and made["ops"] == made["links"] == 0 and made["cost_source"] == "modelled"
    plain = run("simulate", job)
    slowed = run("simulate", job, "--set", "costs.profile=profile.json")
    off = run("simulate", job, "--set", "costs.profile=profile.json", "--set", "costs.interference=none")
    none = run("simulate", job, "--set", "costs.interference=none")
    assert slowed["iteration_s"] > plain["iteration_s"] and off["iteration_s"] == none["iteration_s"]
    assert max(r["slowdown"] for r in slowed["time_breakdown"].values()) > 0
