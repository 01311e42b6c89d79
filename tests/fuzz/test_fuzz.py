"""A few mutated files of every format, those that were once answered badly, and controls of who judges the answers.

`python -m tests.fuzz N` runs as many as one likes.
"""

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from tests.fuzz.corrupt import PLACES
from tests.fuzz.formats import Format, formats
from tests.fuzz.run import fuzz, guarded, judged, placed

FOUND = tomllib.loads(Path(__file__).with_name("found.toml").read_text("utf-8"))["case"]
ANY = ("megatron.sh", "deepspeed.sh", "args.txt", "megatron.log", "words.txt")  # almost any words are such a file's


@pytest.mark.parametrize("form", formats(), ids=lambda f: f.name)
def test_mutated_files_are_read_or_refused_with_file_key_and_what_is_allowed(form: Format, tmp_path: Path) -> None:
    assert judged(form, placed(form, tmp_path, form.seed)) == "read", "the seed is no valid file"
    cases = 80 if form.share >= 0.1 else 8
    found = fuzz(form, range(cases), tmp_path)
    assert not found.bad and found.ends["refused"] >= (1 if form.name in ANY else cases / 6)


@pytest.mark.parametrize("case", FOUND, ids=lambda c: f"{c['format']} {c['says'][:30]}")
def test_what_was_once_answered_badly_is_answered(case: dict[str, Any], tmp_path: Path) -> None:
    form = next(f for f in formats() if f.name == case["format"])
    data = case["text"].encode() * case.get("times", 1) if "text" in case else case["place"]
    path, began = placed(form, tmp_path, data), time.process_time()
    said = judged(form, path)
    assert said == case.get("ends", "refused"), said
    assert time.process_time() - began < 5
    if said == "refused":
        with pytest.raises(PiperError) as error:
            form.read(placed(form, tmp_path, data))
        assert case["says"] in str(error.value)


def _wait(path: Path) -> None:
    (path.parent / "fifo").exists() or PLACES["a FIFO"](path.parent / "fifo")
    (path.parent / "fifo").read_bytes()


def _turn(path: Path) -> None:
    while True:
        pass


def _lack(path: Path) -> None:
    raise PiperError(ErrorKind.JOB, "wrong", file=str(path), key="x")


def _elsewhere(path: Path) -> None:
    raise PiperError(ErrorKind.JOB, "wrong", file="job", key="x", allowed="y")


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: {}[p], "KeyError"),  # type: ignore[index]
    (lambda p: bytearray(2 * 2**30), "more than a GiB"),
    (_turn, "processor time"),
    (_wait, "it waits"),
    (_lack, "no allowed"),
    (_elsewhere, "no such file"),
]


@pytest.mark.parametrize(("read", "says"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_a_bad_answer_is_noticed_and_the_next_case_is_run(
    read: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    found = guarded(Format("x.txt", b"x\n" * 20, read), range(5, 7), tmp_path, seconds=0.1)
    assert [i for i, _ in found.bad] == [5, 6] and all(says in said for _, said in found.bad), found.bad
