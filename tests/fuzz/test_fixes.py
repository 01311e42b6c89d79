"""Refusals that do no harm: of slips drawn over all keys, a fix is what was meant, or there is none."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cost_models.hardware import load_hardware
from cost_models.hardware.schema import DeviceHardware
from cost_models.software import FrameworkCosts, load_software
from ir.core.errors import PiperError, nearest, unit_of
from ir.core.work import DType
from ir.job import load_job
from ir.job.schema import OPEN, SECTIONS
from piper_sim.app.cli import main

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
UNITS = ("Gbps", "GBps", "GiB", "GB", "MiB", "us", "ms", "s", "TFLOPs")
Write = Callable[[str, object], object]


def _slips(word: str, rng: random.Random) -> Iterator[str]:
    """The word, one or two letters off."""
    for edits in (1, 1, 1, 2, 2):
        out = word
        for _ in range(edits):
            at = rng.randrange(len(out))
            middle = rng.choice(("", rng.choice(LETTERS), rng.choice(LETTERS) + out[at], out[at : at + 2][::-1]))
            out = out[:at] + middle + out[at + (2 if middle == out[at : at + 2][::-1] else 1) :]
        if out:
            yield out


def _error(write: Write, key: str, value: object) -> PiperError | None:
    try:
        write(key, value)
    except PiperError as e:
        return e
    return None


def _files(folder: Path) -> Iterator[tuple[str, list[str], Write]]:
    """(file, its keys, a file of it with one key set, as read)."""
    for section, cls in SECTIONS.items():
        keys = [f.name for f in fields(cls) if f.name != "overrides"]
        if section not in (*OPEN, "search"):  # what is open holds another file's keys, too

            def job(key: str, value: object, section: str = section) -> object:
                return load_job({"model": {"config": "tiny-llama"}, section: {key: value}})

            yield f"job [{section}]", keys, job
    for name, cls, load, least in (
        ("hardware", DeviceHardware, load_hardware, {"base": "h100-sxm"}),
        ("software", FrameworkCosts, lambda p: load_software(str(p)), {}),
    ):

        def write(key: str, value: object, name: str = name, load: Any = load, least: Any = least) -> object:
            path = folder / f"{name}.json"
            path.write_text(json.dumps({**least, key: value}))
            return load(path)

        yield name, [f.name for f in msgspec.structs.fields(cls)], write


def test_a_fix_of_a_mistyped_key_is_the_key_or_none(tmp_path: Path) -> None:
    drawn = offered = 0
    elsewhere = {f.name for cls in SECTIONS.values() for f in fields(cls)}
    for file, keys, write in _files(tmp_path):
        for key in keys:
            for slip in _slips(key, random.Random(f"{file} {key}")):
                if slip in keys or slip in elsewhere:  # a key of another section, which the fix names
                    continue
                error, drawn = _error(write, slip, 1), drawn + 1
                assert error is not None, f"{file}: {slip} is taken"
                said = (error.suggestion or "").partition(" = ")[0].rpartition(".")[2]
                near = min(_distance(slip, k) for k in keys)
                assert said in ("", key) or _distance(slip, said) == near < _distance(slip, key), (
                    file,
                    slip,
                    said,
                    key,
                )
                offered += said == key
    assert drawn > 400 and offered > 0.6 * drawn, (drawn, offered)


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    before: list[int] = []
    for i, x in enumerate(a, 1):
        last, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                row[-1] = min(row[-1], last[j - 2] + 1)
    return row[-1]


def test_a_key_with_another_unit_is_converted_or_has_no_fix(tmp_path: Path) -> None:
    converted = 0
    for file, keys, write in _files(tmp_path):
        for key in keys:
            for unit in UNITS if unit_of(key) else ():
                slip = f"{key.rpartition('_')[0]}_{unit}"
                if slip in keys or (error := _error(write, slip, 100)) is None or error.suggestion is None:
                    continue
                name, _, value = error.suggestion.partition(" = ")
                assert value, (file, slip, error.suggestion)
                is_, was = unit_of(name.rpartition(".")[2]), unit_of(slip)
                assert is_ and was and is_[0] == was[0], (file, slip, error.suggestion)
                assert float(value) * is_[1] == pytest.approx(100 * was[1], rel=1e-5), (file, slip, error.suggestion)
                converted += 1
    assert converted >= 5


HARM: Mapping[str, tuple[str, ...]] = {
    "precision.compute": ("fp4", "fp6", "f16", "b16", "int8", "mxfp8", "tf32"),
    "cluster.gpu": ("b100-sxm", "a100-sxm", "mi300", "h100-pcie", "v100", "l40s"),
    "costs.dispatcher": ("deepep2",),
    "model.config": ("gpt-oss-240b", "llama3-80b", "llama4-70b", "qwen2-30b-a3b", "deepseek-v9"),
    "model.seq_len": ("8k",),
    "schedule.name": ("zb3p", "2f2b"),
}


@pytest.mark.parametrize(("key", "word"), [(k, w) for k, words in HARM.items() for w in words])
def test_another_thing_of_the_kind_is_no_typo(key: str, word: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "job.toml").write_text('[model]\nconfig = "tiny-llama"\n[cluster]\ngpu = "h100-sxm"\n')
    assert main(["simulate", str(tmp_path / "job.toml"), "--set", f"{key}={word}", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["suggestion"] is None and error["allowed"], error


def test_formats_are_never_mended_into_one_another() -> None:
    for word in DType:
        for other in DType:
            assert word == other or nearest(word, [other]) is None
