"""A few mutated files of every format; `python -m tests.fuzz N` runs as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.formats import Format, formats
from tests.fuzz.run import fuzz, judged


@pytest.mark.parametrize("form", formats(), ids=lambda f: f.name)
def test_mutated_files_are_read_or_refused_with_file_key_and_what_is_allowed(form: Format, tmp_path: Path) -> None:
    (tmp_path / form.name).write_bytes(form.seed)
    assert judged(form, tmp_path / form.name) == "read", "the seed is no valid file"
    ends, bad = fuzz(form, 100, tmp_path)
    assert not bad and ends["refused"] > (10 if form.name == "launch.sh" else 30)  # almost any words are a script's
