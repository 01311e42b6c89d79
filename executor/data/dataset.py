"""A dataset that Hugging Face's `datasets` has saved to a folder: its tokens and labels as one row each, mapped."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ir.core.errors import check_installed
from ir.core.files import FileErrors

COLUMN, LABELS, IGNORED = "input_ids", "labels", -100
# 0 where a token is no label: of the token itself, as trl reads them.
TRAINED = ("completion_mask", "assistant_masks")
# 0 where a token is none, or where one is no label, of this token to some and of the next to others.
UNREAD = ("attention_mask", "loss_mask")


_READING = threading.Lock()  # ranks may be threads, and the library's bars of progress are not made for these


@dataclass(frozen=True)
class ChunkedTokens:
    """Rows of tokens behind one another, to be sliced like one array; a slice is copied where rows meet in it.

    >>> tokens = ChunkedTokens.of([np.arange(3), np.arange(3, 5)])
    >>> len(tokens), tokens[1:4].tolist(), tokens[-1:].tolist(), tokens[4:9].tolist()
    (5, [1, 2, 3], [4], [4])
    """

    parts: tuple[np.ndarray, ...]
    starts: tuple[int, ...]  # where each begins; at last, where all end
    labels: TrainedTokens | None = None  # where columns say what of the tokens is trained on; None: all are
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


@dataclass(frozen=True)
class TrainedTokens:
    """What a dataset's columns say is to be predicted, read as transformers' losses read it: the label of the token
    before, IGNORED where none counts, and nothing across rows.

    column: `labels`; None: the tokens. masks: each 0 where a token counts for nothing. rows: where rows begin.
    """

    column: ChunkedTokens | None
    masks: tuple[ChunkedTokens, ...]
    rows: np.ndarray

    def of(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """The labels (int64) that the tokens at `start` … are of the ones before them.

        >>> masks = (ChunkedTokens.of([np.array([0, 1, 1, 1, 0])]),)
        >>> TrainedTokens(None, masks, np.array([0, 3])).of(np.array([7, 8, 9]), 2).tolist()
        [7, -100, -100]
        """
        stop = start + len(tokens)
        part = tokens if self.column is None else self.column[start:stop]
        found = np.array(part, dtype=np.int64)
        for mask in self.masks:
            found[mask[start:stop] == 0] = IGNORED
        first, last = np.searchsorted(self.rows, (start, stop))
        found[self.rows[first:last] - start] = IGNORED
        return found


def saved_dataset(folder: Path, form: FileErrors) -> ChunkedTokens:
    """All rows of column `input_ids`, in their order, behind one another; a page is read when somebody reads on it.

    Raises PiperError (missing_dependency): `datasets` is not installed; (job): the folder holds no such column, or
    another that does not fit it, or marks tokens that are to be left out.
    """
    check_installed("datasets", "datasets", f"{folder} is a folder, so a saved dataset")
    import datasets
    from pyarrow import ArrowException

    path = str(folder)
    try:
        with _READING:
            found = datasets.load_from_disk(path)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArrowException) as error:
        allowed = "a folder that Dataset.save_to_disk has made"
        raise form.wrong(f"no saved dataset: {error}", path, None, allowed) from error
    if isinstance(found, datasets.DatasetDict):
        splits = [str(folder / name) for name in found]
        raise form.wrong("a dataset of several splits", path, None, ", ".join(splits), splits[0])
    if COLUMN not in found.column_names:
        has = ", ".join(found.column_names)
        raise form.wrong(f"a dataset without the column {COLUMN}: {has}", path, None, _lists(COLUMN))
    _refuse_unread(found.data, path, form)
    return replace(_column(found.data, COLUMN, path, form), labels=_labels(found.data, path, form))


def _lists(name: str) -> str:
    return f"{name}: lists of integers, as a tokenizer makes them"


def _column(table: Any, name: str, path: str, form: FileErrors, kinds: str = "ui") -> ChunkedTokens:
    """A column's numbers. kinds: NumPy's letters of what they may be. Raises PiperError (job): others, or no lists."""
    from pyarrow import ArrowException, types

    try:
        flat = [c.flatten() for c in table.column(name).chunks]
        chunks = [c.to_numpy(zero_copy_only=not types.is_boolean(c.type)) for c in flat]  # Arrow packs these
        if any(c.dtype.kind not in kinds for c in chunks):
            raise ValueError
    except (AttributeError, ValueError, ArrowException) as error:  # no lists; holes, or no numbers in them
        found = table.column(name).type
        raise form.wrong(f"column {name} is {found}, or has holes", path, None, _lists(name)) from error
    return ChunkedTokens.of(chunks)


def _labels(table: Any, path: str, form: FileErrors) -> TrainedTokens | None:
    """What the columns say of labels; None: nothing. Raises PiperError (job): their rows are not as long as tokens'."""
    names = [n for n in (LABELS, *TRAINED) if n in table.column_names]
    if not names:
        return None
    held = {n: _column(table, n, path, form, "ui" if n == LABELS else "uib") for n in names}
    rows = _row_lengths(table, COLUMN)
    for name in names:
        other = _row_lengths(table, name)
        if (wrong := np.flatnonzero(other != rows)).size:
            k = int(wrong[0])
            message = f"row {k} has {rows[k]} of {COLUMN} and {other[k]} of {name}"
            raise form.wrong(message, path, None, "columns of the same lengths: one for each token")
    masks = tuple(held[name] for name in names if name != LABELS)
    return TrainedTokens(held.get(LABELS), masks, np.cumsum([0, *rows[rows > 0]])[:-1])


def _row_lengths(table: Any, name: str) -> np.ndarray:
    from pyarrow import compute

    lengths: np.ndarray = compute.list_value_length(table.column(name)).fill_null(0).to_numpy()
    return lengths


def _refuse_unread(table: Any, path: str, form: FileErrors) -> None:
    """Raise PiperError (job) for a column that is not read, and marks tokens that are not to be trained on."""
    for name in (n for n in UNREAD if n in table.column_names):
        parts, said = _numbers(table.column(name)), None
        low = min((p.min() for p in parts or () if len(p)), default=1)
        if parts is None:
            said = "is no list of numbers, or has holes"
        elif low < 1:
            less = f"weighs some tokens less than others ({low})"
            said = "marks some tokens (0) that are not to be trained on" if low == 0 else less
        if said:
            message, fix = f"column {name} {said}, and is not read", f"remove_columns({name!r}), and all tokens count"
            allowed = f"rows without padding; a column {LABELS} that is {IGNORED} where a token counts for nothing"
            raise form.wrong(message, path, None, allowed, fix)


def _numbers(column: Any) -> list[np.ndarray] | None:
    """What a column's lists hold, however deep; None: something else than numbers, or holes beside them."""
    found = []
    for chunk in column.chunks:
        while hasattr(chunk, "flatten"):
            chunk = chunk.flatten()
        part = None if getattr(chunk, "null_count", 1) else chunk.to_numpy(zero_copy_only=False)
        if part is None or part.dtype.kind not in "biuf":
            return None
        found.append(part)
    return found
