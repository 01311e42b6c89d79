"""A dataset that Hugging Face's library has saved is read as a file of the same tokens is."""

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.data.dataset import ChunkedTokens
from executor.data.files import digest_of_tokens, map_tokens
from executor.data.tokens import FileTokens
from ir.core.errors import ErrorKind, PiperError
from tests.executor.runs import run

datasets.disable_progress_bars()
ROWS = [np.random.default_rng(k).integers(0, 128, size=n).tolist() for k, n in enumerate((7, 0, 130, 1, 64, 300))]
FLAT = np.concatenate([np.array(row, dtype=np.int64) for row in ROWS])


def saved(folder: Path, rows: Any = ROWS, column: str = "input_ids", shards: int = 3) -> Path:
    datasets.Dataset.from_dict({column: rows}).save_to_disk(str(folder), num_shards=shards)
    return folder


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(-12, 12), st.integers(-12, 12))
def test_slices_are_those_of_one_array(sizes: list[int], start: int, stop: int) -> None:
    whole = np.arange(sum(sizes))
    tokens = ChunkedTokens.of(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    assert len(tokens) == len(whole)
    assert (
        tokens[start:stop].tolist() == whole[start:stop].tolist() and tokens[start:].tolist() == whole[start:].tolist()
    )


def test_rows_stand_behind_one_another_and_are_mapped(tmp_path: Path) -> None:
    tokens = map_tokens(str(saved(tmp_path / "set")), 128)
    assert isinstance(tokens, ChunkedTokens) and len(tokens.parts) == 3  # a row of none is in none
    assert tokens[:].tolist() == FLAT.tolist()
    assert not any(part.flags.owndata or part.flags.writeable for part in tokens.parts)
    assert digest_of_tokens(tokens) == digest_of_tokens(FLAT)
    chosen = datasets.Dataset.from_dict({"input_ids": ROWS}).select([2, 4])  # by indices, which saving resolves
    chosen.save_to_disk(str(tmp_path / "chosen"))
    assert map_tokens(str(tmp_path / "chosen"), 128)[:].tolist() == [*ROWS[2], *ROWS[4]]


def test_windows_and_training_are_those_of_a_file_of_the_same_tokens(tmp_path: Path) -> None:
    folder, file = saved(tmp_path / "set"), tmp_path / "tokens.npy"
    np.save(file, FLAT)
    a, b = (FileTokens(str(path), 128, seed=3, sequences=4) for path in (folder, file))
    for step in range(20):
        assert [a.sequence(step, k, 32).tolist() for k in range(4)] == [
            b.sequence(step, k, 32).tolist() for k in range(4)
        ]
        assert a.missing(step, 32) == b.missing(step, 32)
    ran = [run(f"data.source={path}", "model.vocab_size=128").object["losses"] for path in (folder, file)]
    assert ran[0] == ran[1] != run("model.vocab_size=128").object["losses"]


def test_what_is_no_dataset_of_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    both = {"train": datasets.Dataset.from_dict({"input_ids": ROWS}), "test": datasets.Dataset.from_dict({"x": [1]})}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "splits"))
    cases = [
        (tmp_path / "empty", "no saved dataset"),
        (tmp_path / "splits", "several splits"),
        (saved(tmp_path / "other", column="tokens"), "without the column input_ids: tokens"),
        (saved(tmp_path / "floats", [[0.5, 1.0], [2.0, 1.0]], shards=1), "elements of float64"),
        (saved(tmp_path / "words", [["a", "b"]], shards=1), "column input_ids is List"),
        (saved(tmp_path / "holes", [[1, None, 3]], shards=1), "or has holes"),
        (saved(tmp_path / "flat", [1, 2, 3], shards=1), "column input_ids is Value"),
    ]
    for path, words in cases:
        with pytest.raises(PiperError, match=words) as told:
            map_tokens(str(path), 128)
        assert told.value.key == "data.source" and told.value.allowed
    with pytest.raises(PiperError, match="is outside the vocabulary of 100"):
        run(f"data.source={saved(tmp_path / 'set')}", "model.vocab_size=100")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PiperError, match="needs datasets") as told:
        map_tokens(str(tmp_path / "set"), 128)
    assert told.value.kind is ErrorKind.MISSING_DEPENDENCY


def test_columns_that_say_otherwise_what_is_trained_on_are_not_silently_left_out(tmp_path: Path) -> None:
    """Copies of the tokens, as packing scripts add them, and masks of ones, as tokenizers do, say nothing new; a
    prompt's -100, the labels of a T5, and padding do."""
    ones = [[1] * len(row) for row in ROWS]
    silent = {
        "copies": ("labels", ROWS),
        "mask": ("attention_mask", ones),
        "bools": ("loss_mask", [[True]] * len(ROWS)),
    }
    loud = {
        "hidden": ("labels", [[-100, *row[1:]] if row else row for row in ROWS], r"hides some labels \(-100\)"),
        "others": ("labels", [row[::-1] for row in ROWS], "is another text than input_ids"),
        "fewer": ("labels", [[5, 6]] * len(ROWS), "is another text than input_ids"),
        "padded": ("attention_mask", [[*row[1:], 0] for row in ones], r"marks some tokens \(0\)"),
        "prompt": ("completion_mask", [[False, True]] * len(ROWS), r"marks some tokens \(0\)"),
    }
    for name, (column, rows, *_) in {**silent, **loud}.items():
        datasets.Dataset.from_dict({"input_ids": ROWS, column: rows}).save_to_disk(str(tmp_path / name))
    for name in silent:
        assert map_tokens(str(tmp_path / name), 128)[:].tolist() == FLAT.tolist()
    for name, (column, _, words) in loud.items():
        with pytest.raises(PiperError, match=f"column {column} {words}.*is not read"):
            map_tokens(str(tmp_path / name), 128)
