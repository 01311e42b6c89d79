"""What is written where: nothing without --out, nothing over what is there, nothing half; stdout belongs to JSON."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piper_sim.app.cli import main

ROOT = Path(__file__).parents[3]
Shell = Callable[..., "subprocess.CompletedProcess[str]"]
TRACE = {"timeline.png", "trace.json.gz", "trace.tsv", "report.html"}
FILES = {
    "simulate": {"simulate.json", "plan.txt", *TRACE},
    "compare": {"compare.json", *TRACE},
    "plan": {"plan.txt", "strategy.json"},
    "schedule": {"schedule.json", *TRACE},
}


def command(name: str, job: Any) -> list[str]:
    return ["schedule", "1f1b", "--ranks", "2", "--microbatches", "3"] if name == "schedule" else [name, job()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_without_out_nothing_is_written(cli: Any, job: Any, here: Path, name: str) -> None:
    for as_json in (True, False):
        assert cli(*command(name, job), as_json=as_json).code == 0
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_out_is_created_and_never_overwritten_without_force(cli: Any, job: Any, here: Path, name: str) -> None:
    args = [*command(name, job), "--out", "results/a"]
    plain = cli(*args)
    assert plain.code == 0 and {p.name for p in (here / "results/a").iterdir()} == FILES[name]
    before = {p: p.read_bytes() for p in (here / "results/a").iterdir()}
    again = cli(*args)
    assert again.code == 2 and again.error["kind"] == "io" and "--force" in again.error["suggestion"]
    assert {p: p.read_bytes() for p in before} == before
    (here / "results/a/mine.txt").write_text("mine")
    forced = cli(*args, "--force")
    assert forced.code == 0 and forced.out == plain.out
    assert (here / "results/a/mine.txt").read_text() == "mine"
    for own in FILES[name] & {"simulate.json", "compare.json", "schedule.json"}:
        assert json.loads((here / "results/a" / own).read_text()) == plain.json


def test_a_folder_in_use_is_refused_before_the_work(
    cli: Any, job: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "r").mkdir()
    (here / "r/plan.txt").write_text("keep")
    (here / "file").write_text("")
    monkeypatch.setattr("piper_sim.app.commands.simulate.predict", lambda job: pytest.fail("it went to work"))
    monkeypatch.setattr("piper_sim.app.search.search", lambda *a, **k: pytest.fail("it went to work"))
    assert cli("simulate", job(), "--out", "r").code == 2
    for name in ("simulate", "search"):
        for out in ("file", "file/below", "/proc/nothing", "x" * 300):  # nothing could be written there at the end
            found = cli(name, job(), "--out", out)
            assert (found.code, found.error["kind"]) == (2, "io") and "cannot be written" in found.error["message"]
    assert sorted(p.name for p in here.rglob("*")) == ["file", "plan.txt", "r"]


def test_one_file_of_that_name_is_enough_to_refuse_all(cli: Any, job: Any, here: Path) -> None:
    (here / "r").mkdir()
    (here / "r/trace.tsv").write_text("keep")
    assert cli("simulate", job(), "--out", "r").code == 2
    assert [p.name for p in (here / "r").iterdir()] == ["trace.tsv"]


def test_out_must_be_a_folder_that_can_be_one(cli: Any, job: Any, here: Path) -> None:
    (here / "file").write_text("")
    (here / "link").symlink_to(here)
    for out in ("file", "file/below", "link", "/dev/null", "/proc/nothing", "x" * 300, ""):
        result = cli("plan", job(), "--out", out)
        assert result.code == 2 and result.error["kind"] == ("usage" if not out else "io"), out
    assert sorted(p.name for p in here.iterdir()) == ["file", "link"]


def test_what_does_not_fit_is_written_too(cli: Any, job: Any, here: Path) -> None:
    result = cli("simulate", job(), "--set", "cluster.hbm_GiB=1", "--out", "r")
    assert result.code == 3 and json.loads((here / "r/simulate.json").read_text()) == result.json
    empty = cli("compare", job(parallel={"pp": 1, "ep": 1}), "--schedules", "dualpipe", "--out", "c")
    assert empty.code == 0 and (here / "c/compare.json").exists()


def test_demo_writes_its_folder_and_replaces_only_its_own(
    cli: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piper_sim.app.commands import demo

    small = '[model]\nconfig = "tiny-moe"\nseq_len = 128\n[parallel]\npp = 2\n[schedule]\nname = "dualpipe"\n'
    monkeypatch.setattr(demo, "JOB", small)
    first = cli("demo")
    assert first.code == 0 and len(first.json["rows"]) == 6
    folder = here / "piper-sim-demo"
    assert {p.name for p in folder.iterdir()} == {"job.toml", "compare.json", *TRACE}
    (folder / "mine.txt").write_text("mine")
    (folder / "report.html").write_text("old")
    again = cli("demo", as_json=False)
    assert again.code == 0 and "wins" in again.out and "report.html" in again.out
    assert (folder / "mine.txt").read_text() == "mine" and (folder / "report.html").read_text() != "old"
    for out in ("", "file", "/proc/nothing"):
        (here / "file").write_text("")
        monkeypatch.setattr(demo, "compare", lambda *a, **k: pytest.fail("it went to work"))
        assert cli("demo", "--out", out).error["kind"] == ("usage" if not out else "io")
    assert {p.name for p in here.iterdir()} == {"piper-sim-demo", "file"}


@pytest.mark.slow
def test_the_demo_itself(shell: Shell, tmp_path: Path) -> None:
    done = shell("demo", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 0 and rows[0]["schedule"] == "dualpipe" and rows[0]["fits"]
    assert (tmp_path / "piper-sim-demo/report.html").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_leaves_nothing(
    cli: Any, job: Any, here: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    result = cli("simulate", job(), "--out", "r")
    assert result.code == 2 and result.error["kind"] == "io" and result.error["file"].startswith("r/")
    assert list((here / "r").iterdir()) == []


def test_a_folder_that_may_not_be_written(cli: Any, job: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "r")

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = cli("plan", job(), "--out", "r")
    assert result.code == 2 and result.error["kind"] == "io"


def test_progress_goes_to_stderr(cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from piper_sim.app.commands import output

    monkeypatch.setattr(output, "PATIENCE_S", 0.0)
    result = cli("simulate", job())
    assert result.json["iteration_s"] > 0 and "simulating" in result.err


def test_the_same_job_gives_the_same_bytes_whatever_the_hash_seed(job: Any, tmp_path: Path) -> None:
    simulate = ["simulate", job(schedule={"name": "dualpipe"}, parallel={"zero": 3}), "--json"]
    schedule = ["schedule", "zbv", "--ranks", "4", "--microbatches", "8", "--json"]
    searched = ["schedule", "zb2p", "--ranks", "3", "--microbatches", "5", "--json"]
    code = f"from piper_sim.app.cli import main\nfor args in {[simulate, schedule, searched]!r}: assert main(args) == 0"
    outs = []
    for seed in ("1", "4711"):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        outs.append(subprocess.check_output([sys.executable, "-c", code], env=env, cwd=tmp_path))
    assert outs[0] == outs[1] and outs[0].count(b'{"schema_version": 1') == 3


@pytest.mark.parametrize("words", [["simulate", "JOB", "--json"], ["--help"], ["simulate", "--help"], ["--version"]])
def test_stdout_on_a_full_disk_is_an_error_of_ours(shell: Shell, job: Any, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = shell(*(job() if w == "JOB" else w for w in words), stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("flags", "full"), [(["--json"], "stdout"), ([], "stderr"), (["--json"], "both")])
def test_an_error_that_cannot_be_written_keeps_its_code(shell: Shell, flags: list[str], full: str) -> None:
    with open("/dev/full", "w") as nowhere:
        ends = {end: subprocess.PIPE if full not in (end, "both") else nowhere for end in ("stdout", "stderr")}
        done = shell("simulate", "none.toml", *flags, **ends)
    assert done.returncode == 2 and "Traceback" not in f"{done.stdout}{done.stderr}"
    assert ("cannot read" in (done.stderr or "")) is (full == "stdout")


def test_python_finds_the_command_and_no_library_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("print('mine')")
    line = [sys.executable, "-m", "piper_sim", "schedule", "gpipe", "--ranks=1", "--microbatches=1", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["schema_version"] == 1


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path, job: Any) -> None:
    code = "import sys; from piper_sim.app.cli import main; sys.exit(main(sys.argv[1:]))"
    args = [sys.executable, "-c", code, "plan", job(schedule={"microbatches": 64})]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(60) == 0 and "Traceback" not in err and "BrokenPipe" not in err


def test_a_terminal_without_our_letters_still_says_what_fits(shell: Shell, job: Any) -> None:
    """Both were a question mark."""
    ends = []
    for code, device in ((0, {}), (3, {"hbm_GiB": 4, "memory_margin_GiB": 3})):
        done = shell("compare", job(cluster=device), "--schedules", "1f1b", env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == code and "Traceback" not in done.stderr and done.stdout.isascii()
        ends += [x.rstrip(" |")[-1] for x in done.stdout.splitlines() if x.startswith("|1f1b")]
    assert ends == ["y", "n"]


def test_closed_streams_are_no_error(shell: Shell, job: Any) -> None:
    line = f"{sys.executable} -m piper_sim.app.cli simulate {job()} >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 0


def test_help_is_quick_and_imports_no_torch(shell: Shell) -> None:
    done = shell("--help", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    for heavy in ("torch", "matplotlib", "pandas", "simpy", "numpy"):
        assert f" {heavy}\n" not in done.stderr, heavy


def test_a_terminal_as_wide_as_none_is_takes_no_memory(
    job: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000000000")
    assert main(["simulate", job()]) == 0
    assert 1000 < max(map(len, capsys.readouterr().out.splitlines())) <= 10_000


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_no_number_is_cut_in_a_narrow_terminal(
    cli: Any, job: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(command: str) -> str:
        return str(cli(command, job(), as_json=False).out)

    wide = shown("simulate")
    for name, value in (("COLUMNS", str(columns)), ("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    narrow = re.sub(r"\x1b\[[\d;]*m", "", shown("simulate"))
    tables = wide.partition("rank 0")[0] + wide.partition("memory at")[2]
    assert {*re.findall(r"[\d.]*\d", tables)} <= {*re.findall(r"[\d.]*\d", narrow)} and "…" not in narrow
    assert re.search(r"one column is [\d.]+ .?s\n", narrow)
    assert "sele…" not in shown("explain"), "a change that one would copy"
