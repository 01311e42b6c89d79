"""The one door: what is no file, too large, no text or no JSON is refused at once, and said so."""

import gzip
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from cost_models.hardware import load_hardware
from cost_models.software import load_software
from ir.core.errors import ErrorKind, PiperError, nearest, printable
from ir.core.files import HIDDEN, FileErrors, named_path, read_json, read_text, run_file, typed
from ir.core.limits import divisors
from ir.job.build import prepare
from ir.job.load import job_from
from tests.refusals import refusal

FORM = FileErrors("a file", ErrorKind.JOB, "--file", packed=True)


def refused(path: str | Path, read: Any = read_text) -> PiperError:
    with pytest.raises(PiperError) as e:
        read(path, FORM) if read in (read_text, read_json) else read(path)
    assert e.value.file and e.value.key and e.value.allowed
    return e.value


def test_pipes_devices_and_folders_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path, what in ((tmp_path / "pipe.json", "FIFO"), (Path("/dev/zero"), "device"), (tmp_path, "folder")):
        assert what in refused(path).message
        assert what in refused(f"{path}/" if path == tmp_path else path, load_hardware).message


def test_a_gzip_bomb_is_refused_before_it_has_unpacked(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.gz", "wb", 9) as f:
        for _ in range(200):
            f.write(b" " * 10**6)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    assert "unpacks" in refused(tmp_path / "bomb.gz").message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 180 * 2**10
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b"[" * 200_000, "--file"),
        (b"[" * 100 + b"]" * 100, "[0]"),
        (b'{"a": {"b": 1, "b": 2}}', "a.b"),
        (b'{"a": [1, NaN]}', "a[1]"),
        (b'{"a": 1e77}', "a"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "a"),
        (b'{"a": "x\\u0000"}', "a"),
        (b'{"a": "\\ud800"}', "a"),
        (b'{"a": \x00}', "line 1"),
        (b'{\n"a": "\xff"}', "line 2"),
        (b'{\n"a" 1}', "line 2, column 5"),
    ],
)
def test_what_is_no_strict_json_is_refused_by_key_or_line(tmp_path: Path, text: bytes, key: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    assert refused(path, read_json).key.startswith(key)
    refused(path, load_hardware)
    refused(str(path), load_software)


def test_a_pair_of_escapes_is_a_letter(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": "\\ud83d\\ude00", "b": 1e-05}')
    assert read_json(tmp_path / "x.json", FORM) == {"a": "\U0001f600", "b": 1e-05}


def test_a_huge_ep_is_answered_at_once() -> None:
    job = {"model": {"config": "tiny-moe", "seq_len": 64}, "parallel": {"ep": 10**9 + 7}}
    began = time.process_time()
    refusal(prepare, job_from(job))
    assert time.process_time() - began < 5 and divisors(10**9 + 7) == [1, 10**9 + 7]


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ({"nic_GBps": 100}, "cluster.nic_Gbps = 800"),
        ({"nvlink_Gbps": 3600}, "cluster.nvlink_GBps = 450"),
        ({"hbm_MiB": 40960}, "cluster.hbm_GiB = 40"),
        ({"memory_GB": 80}, None),
        ({"peak_TFLOPs": {"fp4": 1}}, None),
    ],
)
def test_a_fix_says_what_was_meant_or_there_is_none(overrides: dict[str, Any], fix: str | None) -> None:
    e = refusal(load_hardware, "h100-sxm", overrides)
    assert e.suggestion == fix and e.allowed


@pytest.mark.parametrize(
    ("value", "fix"), [("8k", None), ("8192", "model.seq_len = 8192"), (8192.0, "model.seq_len = 8192")]
)
def test_a_number_that_is_none_is_not_made_one(value: object, fix: str | None) -> None:
    e = refusal(job_from, {"model": {"config": "tiny-llama", "seq_len": value}})
    assert (e.key, e.suggestion) == ("model.seq_len", fix)


def test_other_digits_are_another_thing() -> None:
    assert nearest("fp4", ["fp8", "fp64"]) is None and nearest("bf61", ["bf16"]) == "bf16"
    assert nearest("gpt_oss", ["gpt2"]) is None and nearest("llama3-7b", ["llama3-8b", "llama3-70b"]) is None


def test_paths_start_at_the_jobs_folder_and_escapes_are_spelled_out() -> None:
    assert named_path("a/job.toml", "x.csv") == "a/x.csv" and named_path("a/job.toml", "h100", ["h100"]) == "h100"
    assert printable("a\x1b[31m\u202eb") == "a\\x1b[31m\\u202eb"
    assert "\x1b" not in str(PiperError(ErrorKind.JOB, "no \x1b[2J", file="\x1b]0;x\x07"))


@pytest.mark.parametrize("bytecode", [True, False])
def test_a_users_file_is_run_as_it_stands_and_nothing_is_left_beside_it(
    bytecode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions of one second and one size, as an editor that saves twice leaves them."""
    monkeypatch.setattr(sys, "dont_write_bytecode", not bytecode)
    file, found = tmp_path / "mine.py", []
    for value in (1, 2):
        file.write_text(f"value = {value}\n")
        os.utime(file, (1e9, 1e9))
        found.append(run_file("piper_user_mine", file).value)
    assert found == [1, 2] and [p.name for p in tmp_path.iterdir()] == ["mine.py"]


def test_a_users_file_imports_what_lies_beside_it_and_no_other_files_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # a library that nobody has imported
    before, found = set(sys.modules), []
    for name in ("one", "two", "one"):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        (folder / "parts").mkdir(exist_ok=True)
        (folder / "beside_it.py").write_text(f"value = '{name}, {len(found)}'\n")
        (folder / "parts" / "inner.py").write_text(f"value = '{name}'\n")
        (folder / "colorsys.py").write_text("raise RuntimeError('no library stands behind what lies here')\n")
        (folder / "mine.py").write_text("import colorsys, beside_it, parts.inner\n")
        made = run_file("piper_user_mine", folder / "mine.py")
        found.append((made.beside_it.value, made.parts.inner.value))
        assert not list(tmp_path.rglob("__pycache__"))
    assert found == [("one, 0", "one"), ("two, 1", "two"), ("one, 2", "one")]
    assert (set(sys.modules) - before) | {"piper_user_mine"} == {
        "piper_user_mine",
        "beside_it",
        "parts",
        "parts.inner",
        "colorsys",
    }


def test_an_environment_beside_a_users_file_is_not_imported_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "environment" / "packages"
    packages.mkdir(parents=True)
    monkeypatch.syspath_prepend(packages)
    (packages / "installed_there.py").write_text("")
    (tmp_path / "mine.py").write_text("import installed_there\n")
    one, two = (run_file("piper_user_mine", tmp_path / "mine.py").installed_there for _ in range(2))
    assert one is two


def test_a_hidden_field_is_neither_read_nor_offered() -> None:
    @dataclass
    class Table:
        size: int
        file: Annotated[str, HIDDEN] = ""

    for raw in ([], {"file": "x"}):
        e = refusal(typed, raw, Table, FileErrors("a table", ErrorKind.JOB, "table"), "x")
        assert "size" in str(e.allowed) and "file" not in str(e.allowed)


def test_a_class_is_known_whole_before_a_second_thread_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec shows one that it half knows to the next who asks: jobs first read by threads crashed the interpreter."""

    @dataclass
    class Fresh:
        x: int

    seen: list[tuple[str, bool, bool]] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        lock = sys.modules[typed.__module__]._FINDING

        def ask(*args: Any, **more: Any) -> Any:
            seen.append((name, lock.locked(), "__msgspec_cache__" in vars(Fresh)))
            return call(*args, **more)

        return ask

    monkeypatch.setattr(msgspec.json, "Decoder", watched("found", msgspec.json.Decoder))
    monkeypatch.setattr(msgspec, "convert", watched("read", msgspec.convert))
    for _ in range(2):
        assert typed({"x": 1}, Fresh, FORM).x == 1
    assert seen == [("found", True, False), ("read", False, True), ("read", False, True)]
