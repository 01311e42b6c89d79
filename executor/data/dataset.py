"""The tokens of a dataset that Hugging Face's `datasets` has saved to a folder, as one row, mapped and not copied."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors

COLUMN = "input_ids"


@dataclass(frozen=True)
class ChunkedTokens:
    """Rows of tokens behind one another, as one array has them of which slices are read.

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

    Raises PiperError (missing_dependency): `datasets` is not installed; (job): the folder holds no such column.
    """
    if find_spec("datasets") is None:
        message = f"{folder} is a folder, and a saved dataset is read by datasets, which is not installed"
        fix = "pip install 'piper-sim[datasets]'"
        raise PiperError(ErrorKind.MISSING_DEPENDENCY, message, key="datasets", suggestion=fix)
    import datasets
    import pyarrow

    try:
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict):
            splits = ", ".join(str(folder / name) for name in found)
            raise form.wrong("a dataset of several splits", str(folder), None, splits, str(folder / next(iter(found))))
        if COLUMN not in found.column_names:
            has = ", ".join(found.column_names)
            message = f"a dataset without the column {COLUMN}: {has}"
            raise form.wrong(message, str(folder), None, f"{COLUMN}: lists of integers, as a tokenizer makes them")
        chunks = found.data.column(COLUMN).chunks
        return ChunkedTokens.of([c.flatten().to_numpy(zero_copy_only=True) for c in chunks])
    except (OSError, ValueError, TypeError, AttributeError, KeyError, pyarrow.ArrowException) as error:
        allowed = "a folder that Dataset.save_to_disk has made"
        raise form.wrong(f"no saved dataset of tokens: {error}", str(folder), None, allowed) from error
