"""What people are told of files that are nearly right is what they were told: who alters it reads the difference."""

import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from ir.core.errors import PiperError
from tests.fuzz.formats import ROOT, Format, formats
from tests.fuzz.run import case, placed

CASES = 120  # of a format that many use
OTHERS = re.compile(r"not (JSON|TOML|CSV|YAML)|Error while deserializing")  # words that each version of theirs changes


def told(form: Format, number: int, folder: Path) -> str:
    """The words, or none where the file is read or no such file at all."""
    try:
        form.read(placed(form, folder, case(form, 1, number)))
    except PiperError as e:
        words = re.sub(r"(cannot read tokens): .*", r"\1", str(e).replace(str(folder), ".").replace(str(ROOT), ".."))
        lines = [x if len(x) < 200 else f"{x[:160]} … {sha256(x.encode()).hexdigest()[:12]}" for x in words.split("\n")]
        return "" if OTHERS.search(words) else f"{number} {e.kind} " + "\n  ".join(lines) + "\n"
    return ""


@pytest.mark.parametrize("form", [f for f in formats() if f.share >= 0.1], ids=lambda f: f.name)
def test_people_are_told_what_they_were(form: Format, golden: Callable[[str, str], None], tmp_path: Path) -> None:
    golden(
        f"{form.name.replace(':', '-')}.txt",
        "".join(told(form, n, tmp_path) for n in range(CASES if form.share >= 1 else 40)),
    )
