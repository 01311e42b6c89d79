"""Where tokens come from: synthetic, or a file. Without torch, so that a bad file is found before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors, check_regular, named_path
from ir.job import Job

PADDING = -1
FORM = FileErrors("tokens", ErrorKind.JOB, "data.source", 2**50, "synthetic, or a path that starts at the job's folder")


class TokenSource(Protocol):
    """Where tokens come from."""

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """length + 1 tokens (int64) of sequence `index` of a step's global batch; PADDING where there is none."""
        ...


@dataclass(frozen=True)
class SyntheticTokens:
    """Arithmetic progressions with noise, so a loss can fall; every sequence of every step is another one.

    >>> SyntheticTokens(vocab=100, seed=0).sequence(0, 0, 4).shape
    (5,)
    """

    vocab: int
    seed: int = 0

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """Tokens made from (seed, step, index) alone."""
        rng = np.random.default_rng([self.seed, step, index])
        tokens = (rng.integers(self.vocab) + rng.integers(1, 4) * np.arange(length + 1)) % self.vocab
        noise = rng.random(length + 1) < 0.1
        return np.where(noise, rng.integers(self.vocab, size=length + 1), tokens).astype(np.int64)


class FileTokens:
    """A file of tokens (`.npy`, or `.bin` of uint16), or of text (one token per UTF-8 byte), read in shuffled windows.

    The last window of an epoch may be short; what is missing counts for nothing.
    """

    def __init__(self, path: str, vocab: int, seed: int = 0) -> None:
        self.path, self.vocab, self.seed = path, vocab, seed
        file = Path(path)
        check_regular(file, FORM)
        try:
            if file.suffix == ".npy":
                self.tokens = np.load(file, mmap_mode="r", allow_pickle=False)
            else:
                self.tokens = np.memmap(file, dtype="<u2" if file.suffix == ".bin" else np.uint8, mode="r")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            fix = "synthetic, or a path that starts at the job's folder"
            raise PiperError(
                ErrorKind.IO, f"cannot read tokens: {why}", file=path, key="data.source", suggestion=fix
            ) from error
        if self.tokens.ndim != 1 or len(self.tokens) < 2 or self.tokens.dtype.kind not in "ui":
            raise PiperError(ErrorKind.JOB, "not a row of tokens", file=path, key="data.source", allowed="≥ 2 integers")
        highest = int(self.tokens.max())
        if highest >= vocab:
            raise PiperError(
                ErrorKind.JOB,
                f"token {highest} is outside the vocabulary of {vocab}",
                file=path,
                key="data.source",
                suggestion=f"model.vocab_size={highest + 1}",
            )
        self._steps: dict[int, int] = {}

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """Windows do not overlap within an epoch; each epoch has its own order."""
        windows = max(1, -(-(len(self.tokens) - 1) // length))
        epoch, place = divmod(index + step * self.stride, windows)
        order = np.random.default_rng([self.seed, epoch]).permutation(windows)
        start = int(order[place]) * length
        part = np.asarray(self.tokens[start : start + length + 1], dtype=np.int64)
        return np.concatenate([part, np.full(length + 1 - len(part), PADDING, dtype=np.int64)])

    stride = 1_000_003  # sequences a step moves on; Data sets it to the global batch


def source_of(name: str, vocab: int, seed: int) -> TokenSource:
    """`[data] source`: "synthetic", or a path. Raises PiperError: a file that is not there, or not of this vocabulary.

    >>> source_of("synthetic", 100, 0)
    SyntheticTokens(vocab=100, seed=0)
    """
    return SyntheticTokens(vocab, seed) if name == "synthetic" else FileTokens(name, vocab, seed)


def source_name(job: Job) -> str:
    """`[data] source`; a path starts at the job's folder."""
    return job.data.source if job.data.source == "synthetic" else named_path(job.file, job.data.source)
