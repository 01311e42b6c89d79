"""What nobody foresaw ends as an error of the contract; what a file holds reaches the terminal as text."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from executor.launch.watch.verdict import RankFailed
from piper_sim.app.cli import main
from piper_sim.app.commands.output import show
from piper_sim.app.ending import unexpected


def test_an_unforeseen_exception_is_one_object_and_no_traceback(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr("piper_sim.app.cli._dispatch", fail)
    path = job()
    result = cli("simulate", path)
    assert result.code == 2 and "RuntimeError: boom" in result.error["message"] and result.error["file"] == path
    assert "report" in result.error["suggestion"] and "Traceback" not in result.err
    text = cli("simulate", path, as_json=False)
    assert text.code == 2 and text.out == "" and "Traceback" not in text.err and "boom" in text.err
    monkeypatch.setenv("PIPER_DEBUG", "1")
    assert "Traceback" in cli("simulate", path, as_json=False).err


def test_a_package_that_is_there_and_cannot_be_loaded_is_no_mistake_of_ours(tmp_path: Path, job: Any) -> None:
    """As torch for another CUDA; a name that one of our own modules lacks still is."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('raise ImportError("libcudart.so.12: cannot open")')
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    line = [sys.executable, "-m", "piper_sim", "run", job(), "-n", "1"]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "error: torch: torch cannot be loaded: libcudart.so.12" in done.stderr
    ours = unexpected(ImportError("cannot import name 'x' from 'ir.core'", name="ir.core"), [])
    assert "made a mistake" in ours.message


@pytest.mark.parametrize(
    "words", [["run", "JOB", "-n", "1"], ["doctor"], ["schedule", "gpipe", "--ranks=1", "--microbatches=1"]]
)
def test_a_folder_that_is_gone_is_no_mistake_of_ours(tmp_path: Path, job: Any, words: list[str]) -> None:
    """Nor does a command mind that needs none."""
    code = "import os, sys; os.rmdir(os.getcwd()); from piper_sim.app.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "gone").mkdir()
    line = [sys.executable, "-c", code, *(job() if w == "JOB" else w for w in words)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(line, env=env, cwd=tmp_path / "gone", capture_output=True, text=True)
    said = "error: cwd: the folder that it was started in is gone\nfix: cd to one that is there\n"
    needs = words[0] != "schedule"
    assert done.returncode == 2 * needs and done.stderr.endswith(said) == needs and "mistake" not in done.stderr


def test_what_a_rank_that_failed_has_left_is_shown_beside_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RankFailed("killed by SIGSEGV", rank=1, op="1F0", waiting={}, details="rank 1 left:\nFile \x1b[2J")

    monkeypatch.setattr("piper_sim.app.cli._dispatch", fail)
    for flags, end in (([], "error: rank 1 failed at 1F0: killed by SIGSEGV\n"), (["--json"], "")):
        code, (out, err) = main(["demo", *flags]), capsys.readouterr()
        assert (code, err) == (4, "rank 1 left:\nFile \\x1b[2J\n" + end) and "left" not in out


def test_what_is_interrupted_ends_in_one_object(cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("piper_sim.app.cli._dispatch", stop)
    found = cli("simulate", job())
    assert (found.code, found.error["message"]) == (130, "interrupted")
    text = cli("simulate", job(), as_json=False)
    assert (text.code, text.out, text.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_every_command_that_is_told_to_end_leaves_as_it_came(
    cli: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A doctor that was ended so left its runs' folders; the handler from before is back behind it."""
    before = signal.getsignal(signal.SIGTERM)

    def work(_: object) -> int:
        told = signal.getsignal(signal.SIGTERM)
        assert callable(told), "the process ends where it stands"
        told(signal.SIGTERM, None)
        return 0

    monkeypatch.setattr("piper_sim.app.cli._command", lambda name: work)
    found = cli(command)
    assert (found.code, found.error["message"], found.error["key"]) == (143, "ended", "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before


def test_markup_and_escapes_in_a_name_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add_column("[red]a")
    table.add_row("[/nope] \x1b[2J")
    show(table)
    out = capsys.readouterr().out
    assert "[/nope]" in out and "[red]a" in out and "\x1b" not in out and "\\x1b[2J" in out


def test_a_table_for_a_reader_who_has_left_is_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich ended the process with 1."""
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        show(Table("head"))
        gone.flush()


@pytest.mark.parametrize("why", ["full", "gone"])
def test_what_cannot_be_said_of_work_on_its_way_does_not_end_it(why: str) -> None:
    said = "print('step 0', file=sys.stderr); print('step 1', file=sys.stderr, flush=True)"
    program = f"import sys; from piper_sim.app.ending import open_streams; open_streams(); {said}; print(7)"
    if why == "full":
        errors = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, errors = os.pipe()
        os.close(reader)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=errors, env=env)
    finally:
        os.close(errors)
    assert (done.returncode, done.stdout) == (0, b"7\n")
