"""`--save` and `--resume` as users give them: to `piper-sim run` and under torchrun; file tokens, a user's module."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from executor.checkpoint import __main__ as lister
from executor.checkpoint.manifest import read_manifest
from piper_sim.app.cli import main
from tests.executor.launch.processes import agent, free_port, objects
from tests.executor.launch.test_run_command import command
from tests.executor.runs import JOB, job_file


def _run(capfd: pytest.CaptureFixture[str], job: str, *flags: str) -> dict[str, Any]:
    return command(capfd, "run", job, "-n", "2", *flags)


def test_a_files_tokens_are_read_on_where_they_were_left(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("each step reads another part of this text, and no step reads it twice; " * 9)
    job = str(job_file(tmp_path, text=JOB + '[data]\nsource = "text.txt"\n'))
    folder = str(tmp_path / "saved")
    whole = _run(capfd, job, "--steps", "5", "--save", folder, "--every", "3")
    shutil.move(tmp_path / "text.txt", tmp_path / "moved.txt")  # it is known by what is in it
    moved = ["--set", "data.source=moved.txt", "--resume", folder + "/step-000003"]
    assert _run(capfd, job, "--steps", "5", *moved)["losses"] == whole["losses"][3:]
    assert len({round(x, 12) for x in whole["losses"]}) == 5
    (tmp_path / "moved.txt").write_text("another text")
    error = command(capfd, "run", job, "-n", "2", "--steps", "5", *moved, code=2)["error"]
    assert error["key"] == "data.source" and "12 tokens here, 639 tokens there" in error["message"]


def test_people_are_told_where_it_was_saved_and_where_it_goes_on(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, folder = str(job_file(tmp_path)), str(tmp_path / "saved")
    assert main(["run", job, "-n", "2", "--save", folder]) == 0
    assert f"saved to {folder}/step-000001" in capfd.readouterr().out
    assert main(["run", job, "-n", "2", "--steps", "2", "--resume", folder]) == 0
    out = capfd.readouterr().out
    assert "step 1: loss" in out and "step 0" not in out


def _torchrun(ranks: int, job: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    launcher = agent(1, ranks, free_port(), job, *flags)
    text, errors = launcher.communicate(timeout=120)
    (found,) = objects(text)
    return launcher.returncode, found, errors


PAGE = Path(__file__).parents[3] / "docs" / "CHECKPOINTS.md"
FEWER = {"1200": "5", "1000": "4", "100": "2", "4": "2"}  # steps and ranks than the page's, for the sake of time


def _page(job: str, folder: str) -> tuple[list[list[str]], list[str]]:
    """The commands that the page shows, and the names of the files; the Hub's are tests/executor/modules' own."""
    commands, files, _ = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    words = {"JOB": job, "runs/a": folder, **FEWER}
    lines = [[words.get(w, w) for w in shlex.split(line, comments=True)] for line in commands.splitlines()]
    return lines, [line.split()[0].removeprefix("runs/a/") for line in files.splitlines()]


def test_the_page_shows_what_happens_torchrun_takes_up_and_hands_on(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    (save, again, other, torchrun, check), files = _page(str(job_file(tmp_path)), str(folder))
    assert " ".join(other[3:5]) == "-n 2" and "parallel.pp=1" in other
    other += ["--set", "parallel.dp=2", "--set", "schedule.microbatches=2"]
    whole = command(capfd, *save[1:])
    assert (save[0], len(whole["losses"])) == ("piper-sim", 4) and whole["saved"] == str(folder / "step-000004")
    assert {p.name for p in folder.iterdir()} == {"lock", "step-000002", "step-000004"}
    assert all((folder / f.replace("000100", "000002")).exists() for f in files[:3]) and ".tmp-" in files[3]
    shutil.rmtree(folder / "step-000004")  # whatever happened
    assert torchrun[:3] + torchrun[4:6] == ["torchrun", "--nproc-per-node", "2", "executor", str(tmp_path / "job.toml")]
    flags = [*torchrun[6:], "--resume", str(folder), "--steps", "3"]
    code, found, errors = _torchrun(int(torchrun[2]), torchrun[5], *flags)
    assert code == 0 and found["losses"] == whole["losses"][2:3] and found["first_step"] == 2, errors
    assert found["saved"] == str(folder / "step-000003")
    assert command(capfd, *again[1:])["losses"] == whole["losses"][3:]
    assert len({read_manifest(folder / f"step-00000{n}").run for n in (3, 4)}) == 1
    assert command(capfd, *other[1:])["first_step"] == 4
    assert check[:3] == ["python", "-m", "executor.checkpoint"] and lister.main(check[3:]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 4


@pytest.mark.slow
def test_torchrun_refuses_what_piper_sim_refuses(tmp_path: Path) -> None:
    job, folder = str(job_file(tmp_path)), tmp_path / "saved"
    assert _torchrun(2, job, "--steps", "2", "--save", str(folder))[0] == 0
    for flags, key in ((("--resume", str(folder)), "--steps"), (("--save", str(folder)), "--save")):
        code, found, _ = _torchrun(2, job, "--steps", "2", *flags)
        assert code != 0 and found["error"]["key"] == key
    file = folder / "step-000002" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, found, _ = _torchrun(2, job, "--steps", "5", "--resume", str(folder))
    assert code != 0 and (found["error"]["kind"], found["error"]["rank"]) == ("rank_failed", 1)
    assert str(file) in found["error"]["message"] and "damaged" in found["error"]["message"]
