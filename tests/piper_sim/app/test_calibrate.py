"""`piper-sim calibrate` where nothing is measured: imports, one laid over another, and a machine without PyTorch."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cost_models.profile.file import load_profile
from piper_sim.app import cli as command_line
from piper_sim.study.calibrate.pairs import read_pairs
from tests.piper_sim.study.calibrate.kineto_trace import Trace
from tests.piper_sim.study.calibrate.nccl_text import table


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_has", lambda module: False)


def fastest(size: int) -> float:
    return min(1.2e-5 + size / 12e9, 9e-5 + size / 190e9)


def files(tmp_path: Path) -> tuple[str, str]:
    """nccl-tests of two ranks on one node, and a trace."""
    (tmp_path / "nccl.txt").write_text(table("all_reduce", fastest, 2, 2) + table("sendrecv", fastest, 2, 2))
    trace = Trace()
    for _ in range(4):
        trace.range("0F0/l0.attn", (100.0, 50.0))
    return str(tmp_path / "nccl.txt"), trace.write(tmp_path / "trace.json")


def test_without_torch_measuring_says_how_to_install_it(cli: Any, job: Any, no_torch: None) -> None:
    result = cli("calibrate", job())
    assert result.code == 2 and result.error["kind"] == "missing_dependency"
    assert result.error["message"] == "calibrate needs PyTorch" and "piper-sim[exec]" in result.error["suggestion"]


def test_what_was_measured_is_said_though_the_disk_is_full(
    cli: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring takes minutes; its folder could be written to when it began."""

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    line = "calibrate", job(), "--from-nccl-tests", files(tmp_path)[0], "--out", tmp_path / "p"
    result = cli(*line, as_json=False)
    assert result.code == 2 and "No space left" in result.err
    assert "of this job's step: " in result.out and "written" not in result.out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_watchdog_that_waits_for_nothing_is_no_failed_rank(cli: Any, job: Any, seconds: str) -> None:
    found = cli("calibrate", job(), "-n", "1", "--watchdog", seconds)
    assert (found.code, found.error["kind"], found.error["key"]) == (2, "usage", "--watchdog")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("-n", "2"),
        ("--seq-len", "64"),
        ("--repeats", "3"),
        ("--by", "kernels"),
        ("--backend", "nccl"),
        ("--watchdog", "9"),
    ],
)
def test_what_is_for_measuring_goes_with_no_file(cli: Any, job: Any, tmp_path: Path, flag: str, value: str) -> None:
    found = cli("calibrate", job(), "--from-kineto", files(tmp_path)[1], flag, value)
    assert (found.code, found.error["kind"], found.error["key"]) == (2, "usage", flag)
    assert "is for measuring" in found.error["message"]


def test_without_torch_files_are_read_all_the_same(cli: Any, job: Any, no_torch: None, tmp_path: Path) -> None:
    path = job(model={"config": "tiny-llama", "seq_len": 100}, parallel={"dp": 1, "ep": 1})
    nccl, trace = files(tmp_path)
    first = cli("calibrate", path, "--from-nccl-tests", nccl, "--out", tmp_path / "a").json
    assert (first["ops"], first["links"], first["by"], first["processes"]) == (0, 48, None, None)
    assert first["fit_error"] < 0.02 and first["fingerprint"].startswith("NVIDIA H100 80GB HBM3 x2")
    assert first["curves"]["all_reduce 2@1"]["latency_s"] == pytest.approx(1.2e-5, rel=0.02)
    assert first["curves"]["p2p@1"]["bytes_per_s"] == pytest.approx(190e9, rel=0.02)
    assert first["curves"]["p2p@1"]["knees_bytes"], "a knee at each change of protocol"
    second = cli(
        "calibrate", path, "--from-kineto", trace, "--onto", tmp_path / "a/profile.json", "--out", tmp_path
    ).json
    assert (second["ops"], second["links"]) == (1, 48) and len(second["origins"]) == 3
    assert second["cost_source"] == "mixed" and second["missing"]
    both = cli("calibrate", path, "--from-kineto", trace, "--from-nccl-tests", nccl).json
    assert (both["ops"], both["links"], both["profile"]) == (1, 48, None)
    shares = cli("simulate", path, "--set", "costs.profile=profile.json").json["cost_shares"]
    assert 0 < shares["measured"] < 1 and shares["modelled"] > 0 and 0 < shares["interpolated"] < 1
    assert shares["edited"] is False and 0 < shares["spread"] < 0.1
    assert sum(shares[k] for k in ("measured", "interpolated", "extrapolated", "modelled")) == pytest.approx(1.0)


def test_a_job_that_names_the_profile_it_wants_can_be_calibrated(cli: Any, job: Any, tmp_path: Path) -> None:
    path = job(costs={"profile": "profile.json"})
    assert cli("simulate", path).code == 2
    assert cli("calibrate", path, "--from-nccl-tests", files(tmp_path)[0], "--out", tmp_path).code == 0
    assert cli("simulate", path).json["cost_source"] == "mixed"


def test_what_was_edited_stays_so_under_an_import(cli: Any, job: Any, tmp_path: Path) -> None:
    nccl, trace = files(tmp_path)
    path = job(model={"config": "tiny-llama", "seq_len": 128}, parallel={"dp": 1, "ep": 1})
    assert cli("calibrate", path, "--from-nccl-tests", nccl, "--out", tmp_path).code == 0
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host_s": 1e-5, "digest": None}))
    more = ["--from-kineto", trace, "--onto", file, "--out", tmp_path, "--force"]
    assert cli("calibrate", path, *more).json["cost_shares"]["edited"] is True
    assert not load_profile(file).sealed and load_profile(file).host_s == 1e-5


def test_people_are_told_where_it_went_and_how_to_use_it(cli: Any, job: Any, tmp_path: Path) -> None:
    path = job()
    out = cli("calibrate", path, "--from-nccl-tests", files(tmp_path)[0], "--out", tmp_path / "p", as_json=False).out
    assert f"written to {tmp_path / 'p/profile.json'}" in out and "costs.profile=p/profile.json" in out
    assert "48 links" in out and "worst fit error" in out and "machine: NVIDIA H100" in out
    assert "all_reduce 2@1" in out and "not measured, hence modelled" in out
    out = cli("calibrate", path, "--from-nccl-tests", files(tmp_path)[0], as_json=False).out
    assert "not written anywhere" in out


def guide() -> list[str]:
    """Our commands in the guide."""
    text = (Path(__file__).parents[3] / "docs" / "CALIBRATE.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("piper-sim ")]


@pytest.mark.parametrize("line", guide())
def test_the_commands_of_the_guide_are_understood(line: str) -> None:
    parsed, unknown = command_line.parser().parse_known_args(line.split()[1:])
    assert not unknown and parsed.command in line


def test_the_table_of_the_guide_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "CALIBRATE.md").read_text(encoding="utf-8")
    (tmp_path / "pairs.csv").write_text(text.partition("```csv\n")[2].partition("```")[0])
    assert len(read_pairs(str(tmp_path / "pairs.csv")).pairs) == 2


def test_a_profile_of_another_gpu_is_not_laid_under(cli: Any, job: Any, tmp_path: Path) -> None:
    path, nccl = job(), files(tmp_path)[0]
    (tmp_path / "a100.txt").write_text((tmp_path / "nccl.txt").read_text().replace("H100 80GB HBM3", "A100-SXM4-80GB"))
    (tmp_path / "pairs.csv").write_text("compute,message,held,moving,wire\nmemory,p2p,0.0,0.1,0.2\n")
    for name, how in (("a", ["--from-nccl-tests", tmp_path / "a100.txt"]), ("b", ["--pairs", tmp_path / "pairs.csv"])):
        assert cli("calibrate", path, *how, "--out", tmp_path / name).code == 0
    onto_a, onto_b = (("--from-nccl-tests", nccl, "--onto", tmp_path / x / "profile.json") for x in "ab")
    other = cli("calibrate", path, *onto_a, "--out", tmp_path / "c")
    assert (other.code, other.error["key"]) == (2, "--onto") and "A100" in other.error["message"]
    assert "H100" in other.error["suggestion"] and not (tmp_path / "c").exists()
    two = cli("calibrate", path, "--from-nccl-tests", nccl, tmp_path / "a100.txt")
    assert (two.code, two.error["key"]) == (2, "--from-nccl-tests") and "A100" in two.error["message"]
    assert cli("calibrate", path, *onto_b).json["fingerprint"].startswith("NVIDIA H100"), "pairs say of no device"
