"""Every code block of README and docs runs: Python as it stands, TOML as jobs, shell lines through the command line."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.build import directives_json
from piper_sim.app.cli import main, parser
from piper_sim.study.predict import predict

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "toml", "sh", "json", "csv", ""}
QUICK = {
    "schedule",
    "simulate",
    "plan",
    "import",
    "export",
}  # of what a page shows, what is run; every other line is parsed
OTHERS = {
    "pip",
    "make",
    "torchrun",
    "python",
    "git",
    "srun",
    "sbatch",
    "export",
    "cd",
    "mpirun",
    "env",
    "for",
    "done",
    "touch",
    "kubectl",
    "ray",
}
JOB = '[model]\nconfig = "tiny-moe"\nseq_len = 64\n[parallel]\npp = 2\ndp = 2\nep = 2\n[schedule]\nmicrobatches = 4\n'
SCRIPT = """torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 4 --hidden-size 64 --seq-length 64 \\
  --num-attention-heads 8 --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 --bf16
"""


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """(line, language, text) of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for m in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text[: m.start()].count("\n") + 1, m[1], m[2]


def blocks_of(language: str) -> list[object]:
    found = [(p, line, text) for p in PAGES for line, lang, text in blocks(p) if lang == language]
    return [pytest.param(text, id=f"{p.name}:{line}") for p, line, text in found]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `piper-sim` line; lines of other programs are let by if they are known."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "piper-sim":
            yield words[1:]
        else:
            assert not words or words[0] in OTHERS, f"what is {words[0]}?"


def unredirected(words: list[str]) -> list[str]:
    """A command without its `> file`."""
    return words[:-2] if words[-2:-1] == [">"] else words


def test_there_are_pages_and_every_block_has_a_language_that_is_run() -> None:
    assert len(PAGES) > 5 and len(blocks_of("sh")) > 3 and len(blocks_of("python")) > 3 and len(blocks_of("toml")) > 1
    assert {lang for p in PAGES for _, lang, _ in blocks(p)} <= LANGUAGES


@pytest.mark.parametrize("page", [p for p in PAGES if any(lang == "python" for _, lang, _ in blocks(p))], ids=str)
def test_python_runs_from_top_to_bottom(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for line, lang, text in blocks(page):
        if lang == "python":
            exec(compile("\n" * line + text, str(page), "exec"), names)


@pytest.mark.parametrize("text", blocks_of("toml"))
def test_toml_is_a_job_or_sections_of_one(text: str) -> None:
    table = tomllib.loads(text)
    load_job({"model": {"config": "tiny-moe", "seq_len": 64}} | table)
    with pytest.raises(PiperError, match="unknown key"):  # and it is the keys that are looked at
        load_job({"model": {"config": "tiny-moe"}} | table | {"parallel": {"ppp": 2}})


@pytest.mark.parametrize("text", blocks_of("json"))
def test_json_is_json_and_lists_are_directives_behind_a_job_s_own(text: str, tmp_path: Path) -> None:
    found = json.loads(text)
    if isinstance(found, list):
        job, path = load_job(tomllib.loads(JOB)), tmp_path / "strategy.json"
        own = directives_json(predict(job).prepared.strategy)
        path.write_text(json.dumps([*own, *found]), encoding="utf-8")
        assert predict(load_job(tomllib.loads(JOB), set=[f'schedule.directives="{path}"'])).fits


@pytest.mark.parametrize("text", blocks_of("sh"))
def test_commands_take_the_flags_they_are_shown_with(text: str) -> None:
    for words in map(unredirected, commands(text)):
        _, unknown = parser().parse_known_args(words)
        assert not unknown, f"piper-sim {' '.join(words)}: {unknown}"


# Recipes are run whole, by test_site.py.
@pytest.mark.parametrize("text", [b for b in blocks_of("sh") if not str(b.id).startswith("RECIPES.md")])
def test_commands_that_are_quick_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a job of that name; what reads a file that only the reader has is parsed above."""
    monkeypatch.chdir(tmp_path)
    for name in ("job.toml", "tiny.toml"):
        (tmp_path / name).write_text(JOB, encoding="utf-8")
    (tmp_path / "pretrain_gpt.sh").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "ConfigContainer.yaml").write_text("model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4}\n")
    for whole in commands(text):
        words = unredirected(whole)
        if words != whole:
            with open(whole[-1], "w", encoding="utf-8") as f, redirect_stdout(f):
                assert main(words) == 0, words
            continue
        missing = "history.file" in " ".join(words) or "costs.profile" in " ".join(words)
        if (words[0] in QUICK or {"search", "--to"} <= {*words}) and not missing:
            given = [w.replace("{17=", "{3=") for w in words]  # the tiny job has four ranks
            given = ["1" if before == "--budget" else w for before, w in zip(["", *given], given, strict=False)]
            assert main([*given, "--json"]) == 0, words
