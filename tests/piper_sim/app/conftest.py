"""The command line as its users see it: exit code, one JSON object on stdout, errors by kind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from piper_sim.app.cli import main

ROOT = Path(__file__).parents[3]
ERROR_KEYS = ["kind", "file", "key", "message", "allowed", "suggestion"]


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as the one object it is to be, of schema 1."""
        found = json.loads(self.out, parse_constant=_no_constant)
        assert isinstance(found, dict) and found["schema_version"] == 1
        assert self.out.count("\n") == 1, "one object and nothing else"
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which stands alone and has all its keys."""
        found = self.json
        assert list(found) == ["schema_version", "error"]
        assert list(found["error"]) == ERROR_KEYS
        return dict(found["error"])


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


Cli = Callable[..., Result]
MakeJob = Callable[..., str]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process: cli("simulate", job) with --json, cli.text(…) without."""

    def run(*args: object, as_json: bool = True) -> Result:
        capsys.readouterr()
        code = main([*map(str, args), *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process of its own, in an empty folder."""

    def run(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        command = [sys.executable, "-m", "piper_sim.app.cli", *map(str, args)]
        if "stdout" not in options:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.run(command, cwd=tmp_path, env=env, text=True, timeout=60, check=False, **options)

    return run


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    """Write a job file: tiny-moe, pp 2 x dp 2, ep 2, four microbatches of 128 tokens, with sections changed."""

    def write(name: str = "job.toml", **sections: Mapping[str, object] | None) -> str:
        whole: dict[str, dict[str, object]] = {
            "model": {"config": "tiny-moe", "seq_len": 128},
            "cluster": {"gpu": "h100-sxm"},
            "parallel": {"pp": 2, "dp": 2, "ep": 2},
            "schedule": {"name": "1f1b", "microbatches": 4},
        }
        for section, keys in sections.items():
            whole[section] = {**whole.get(section, {}), **(keys or {})}
        lines = []
        for section, keys in whole.items():
            lines.append(f"[{section}]")
            # JSON's text, numbers, lists and truth values are TOML's.
            lines += [f"{k} = {json.dumps(v)}" for k, v in keys.items() if v is not None]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write
