"""What is trained on: tokens by (step, sequence of the global batch); any plan of one global batch sees the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from executor.modules.base import TokenLoss
from ir.errors import ErrorKind, PiperError


@dataclass(frozen=True)
class Batch:
    """One microbatch: (sequences, length) of token ids and of labels; scale: 1 / the step's valid tokens."""

    ids: Tensor
    labels: Tensor
    scale: float

    def extras(self, wants: tuple[str, ...]) -> tuple[object, ...]:
        """What a unit asks for beside activations, by name."""
        return tuple(getattr(self, w) for w in wants)


class Source(Protocol):
    """Where tokens come from."""

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """length + 1 tokens (int64) of sequence `index` of a step's global batch; -1 marks padding."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Arithmetic progressions with noise, so a loss can fall; every sequence of every step is another one.

    >>> Synthetic(vocab=100, seed=0).sequence(0, 0, 4).shape
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
        try:
            if file.suffix == ".npy":
                self.tokens = np.load(file, mmap_mode="r", allow_pickle=False)
            else:
                self.tokens = np.memmap(file, dtype="<u2" if file.suffix == ".bin" else np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise PiperError(ErrorKind.IO, f"cannot read tokens: {error}", file=path, key="data.source") from error
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
        return np.concatenate([part, np.full(length + 1 - len(part), -1, dtype=np.int64)])

    stride = 1_000_003  # sequences a step moves on; Data sets it to the global batch


class Data:
    """The microbatches of each step: replica r's microbatch m is sequences (r·M + m)·size … of the global batch.

    source: "synthetic", or a path to text or tokens.

    >>> data = Data("synthetic", vocab=100, length=8, replicas=2, microbatches=3, size=2)
    >>> data.batch(0, replica=1, mb=2).ids.shape, data.valid_tokens(0)
    (torch.Size([2, 8]), 96)
    """

    def __init__(
        self,
        source: str,
        *,
        vocab: int,
        length: int,
        replicas: int = 1,
        microbatches: int = 1,
        size: int = 1,
        seed: int = 0,
    ) -> None:
        self.length, self.replicas, self.microbatches, self.size = length, replicas, microbatches, size
        self.source: Source
        if source == "synthetic":
            self.source = Synthetic(vocab, seed)
        else:
            self.source = FileTokens(source, vocab, seed)
            self.source.stride = self.sequences
        self._valid: tuple[int, int] = (-1, 0)

    @property
    def sequences(self) -> int:
        """Of the global batch."""
        return self.replicas * self.microbatches * self.size

    def batch(self, step: int, replica: int, mb: int) -> Batch:
        """One microbatch."""
        first = (replica * self.microbatches + mb) * self.size
        rows = np.stack([self.source.sequence(step, first + i, self.length) for i in range(self.size)])
        labels = np.where(rows[:, 1:] < 0, TokenLoss.IGNORE, rows[:, 1:])
        ids = np.maximum(rows[:, :-1], 0)
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), 1.0 / max(1, self.valid_tokens(step)))

    def valid_tokens(self, step: int) -> int:
        """Labels of the whole global batch that count; every rank finds the same without asking another."""
        if isinstance(self.source, Synthetic):
            return self.sequences * self.length
        if self._valid[0] != step:
            rows = (self.source.sequence(step, i, self.length) for i in range(self.sequences))
            self._valid = (step, sum(int((r[1:] >= 0).sum()) for r in rows))
        return self._valid[1]
