"""The tokens of a dataset that Hugging Face's `datasets` has saved to a folder, as one row, mapped and not copied."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ir.core.errors import check_installed
from ir.core.files import FileErrors

COLUMN, LABELS = "input_ids", "labels"
# 0 where a token is none, or counts for nothing.
MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")
_BLOCK = 2**20  # tokens compared at once


@dataclass(frozen=True)
class ChunkedTokens:
    """Rows of tokens behind one another, to be sliced like one array; a slice is copied where rows meet in it.

    >>> tokens = ChunkedTokens.of([np.arange(3), np.arange(3, 5)])
    >>> len(tokens), tokens[1:4].tolist(), tokens[-1:].tolist(), tokens[4:9].tolist()
    (5, [1, 2, 3], [4], [4])
    """

    parts: tuple[np.ndarray, ...]
    starts: tuple[int, ...]
    """where each begins; at last, where all end"""
    ndim = 1

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> ChunkedTokens:
        held = tuple(p for p in parts if len(p)) or (np.zeros(0, dtype=np.int64),)
        return cls(held, (0, *accumulate(map(len, held))))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    @property
    def size(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, at: slice) -> np.ndarray:
        start, stop, _ = at.indices(len(self))
        first = max(0, int(np.searchsorted(self.starts, start, side="right")) - 1)
        found = []
        for part, begin in zip(self.parts[first:], self.starts[first:-1], strict=True):
            if begin >= stop:
                break
            found.append(part[max(0, start - begin) : stop - begin])
        return np.concatenate(found) if found else self.parts[0][:0]


def saved_dataset(folder: Path, form: FileErrors) -> ChunkedTokens:
    """All rows of column `input_ids`, in their order, behind one another; a page is read when somebody reads on it.

    Raises PiperError (missing_dependency): `datasets` is not installed; (job): the folder holds no such column, or
    says otherwise in another what counts: every token here is the label of the one before it.
    """
    check_installed("datasets", "datasets", f"{folder} is a folder, so a saved dataset")
    import datasets
    from pyarrow import ArrowException

    path, lists = str(folder), f"{COLUMN}: lists of integers, as a tokenizer makes them"
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError, TypeError, LookupError, ArrowException) as error:
        allowed = "a folder that Dataset.save_to_disk has made"
        raise form.wrong(f"no saved dataset: {error}", path, None, allowed) from error
    if isinstance(found, datasets.DatasetDict):
        splits = [str(folder / name) for name in found]
        raise form.wrong("a dataset of several splits", path, None, ", ".join(splits), splits[0])
    if COLUMN not in found.column_names:
        has = ", ".join(found.column_names)
        raise form.wrong(f"a dataset without the column {COLUMN}: {has}", path, None, lists)
    try:
        chunks = [c.flatten().to_numpy(zero_copy_only=True) for c in found.data.column(COLUMN).chunks]
    except (AttributeError, ValueError, ArrowException) as error:  # no lists; holes, or no numbers in them
        raise form.wrong(f"column {COLUMN} is {found.features[COLUMN]}, or has holes", path, None, lists) from error
    tokens = ChunkedTokens.of(chunks)
    _refuse_unread(found.data, tokens, path, form)
    return tokens


def _refuse_unread(table: Any, tokens: ChunkedTokens, path: str, form: FileErrors) -> None:
    """Raise PiperError (job) for a column that is not read, and says that not every token is the next one's label."""
    for name in (n for n in (LABELS, *MASKS) if n in table.column_names):
        low = _least(table.column(name))
        said = None
        if name in MASKS:
            said = "marks some tokens (0) that are not to be trained on" if low == 0 else None
        elif low is not None and low < 0:
            said = "hides some labels (-100)"
        elif not _copies(table.column(name), tokens):
            said = f"is another text than {COLUMN}"
        if said:
            message, fix = f"column {name} {said}, and is not read", f"remove_columns({name!r}), and all tokens count"
            allowed = "datasets whose tokens all count, each the label of the one before"
            raise form.wrong(message, path, None, allowed, fix)


def _least(column: Any) -> int | None:
    """The least number of a column of lists; None where it holds none."""
    from pyarrow import compute

    lows = [compute.min(c.flatten()).as_py() for c in column.chunks if hasattr(c, "flatten")]
    return min((int(low) for low in lows if isinstance(low, int)), default=None)


def _copies(column: Any, tokens: ChunkedTokens) -> bool:
    """Whether a column has the same numbers, in any format."""
    parts = [c.flatten() for c in column.chunks if hasattr(c, "flatten")]
    if any(p.null_count or not hasattr(p, "to_numpy") for p in parts):
        return False
    other = ChunkedTokens.of([p.to_numpy(zero_copy_only=False) for p in parts])
    starts = range(0, len(tokens), _BLOCK)
    return len(other) == len(tokens) and all(
        np.array_equal(other[i : i + _BLOCK], tokens[i : i + _BLOCK]) for i in starts
    )
