"""Where tokens come from: synthetic, or a file. Without torch, so that a bad file is found before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from executor.data.files import FORM, check_vocabulary, map_tokens, refuse_outside
from executor.data.order import TokenOrder
from ir.core.files import named_path
from ir.job import Job

PADDING = -1


class TokenSource(Protocol):
    """Where tokens come from."""

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """length + 1 tokens (int64) of sequence `index` of a step's global batch; PADDING where there is none."""

    def missing(self, step: int, length: int) -> int:
        """Labels of a step's global batch that are PADDING."""


@dataclass(frozen=True)
class SyntheticTokens:
    """Arithmetic progressions with noise, so a loss can fall; every sequence of every step is another one.

    >>> SyntheticTokens(vocab=100, seed=0).sequence(0, 0, 4).shape
    (5,)
    """

    vocab: int
    seed: int = 0

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, step, index])
        tokens = (rng.integers(self.vocab) + rng.integers(1, 4) * np.arange(length + 1)) % self.vocab
        noise = rng.random(length + 1) < 0.1
        return np.where(noise, rng.integers(self.vocab, size=length + 1), tokens).astype(np.int64)

    def missing(self, step: int, length: int) -> int:
        return 0


class FileTokens:
    """A file of tokens (`executor.data.files`), read in windows that do not overlap within an epoch; each epoch has
    its own order. Windows run over the ends of documents. sequences: of a step's global batch.

    The last window may be short; what is missing counts for nothing.
    """

    def __init__(self, path: str, vocab: int, seed: int = 0, sequences: int = 1) -> None:
        self.path, self.vocab, self.seed, self.sequences = path, vocab, seed, sequences
        self.tokens = map_tokens(path, vocab)

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """The window that comes next in the epoch's order. Raises PiperError: a token outside the vocabulary."""
        windows = self._windows(length)
        epoch, place = divmod(step * self.sequences + index, windows)
        start = TokenOrder.of(windows, self.seed, epoch).window(place) * length
        part = np.asarray(self.tokens[start : start + length + 1], dtype=np.int64)
        refuse_outside(part, self.path, self.vocab)
        return np.concatenate([part, np.full(length + 1 - len(part), PADDING, dtype=np.int64)])

    def missing(self, step: int, length: int) -> int:
        """Only the file's last window is short: count the epochs that read it in this step."""
        windows, first = self._windows(length), step * self.sequences
        short = windows * length - (len(self.tokens) - 1)
        end = first + self.sequences
        epochs = range(first // windows, (end - 1) // windows + 1) if short else ()
        at = (e * windows + TokenOrder.of(windows, self.seed, e).place(windows - 1) for e in epochs)
        return short * sum(first <= k < end for k in at)

    def _windows(self, length: int) -> int:
        return max(1, -(-(len(self.tokens) - 1) // length))


def source_of(name: str, vocab: int, seed: int, sequences: int = 1) -> TokenSource:
    """`[data] source`: "synthetic", or a path. Raises PiperError: a file that is not there, or holds no tokens.

    >>> source_of("synthetic", 100, 0)
    SyntheticTokens(vocab=100, seed=0)
    """
    return SyntheticTokens(vocab, seed) if name == "synthetic" else FileTokens(name, vocab, seed, sequences)


def source_name(job: Job, name: str | None = None) -> str:
    """`[data] source`, or another name in the job; a path starts at the job's folder."""
    name = job.data.source if name is None else name
    return name if name == "synthetic" else named_path(job.file, name)


def check_sources(job: Job, vocab: int) -> None:
    """Raise PiperError for data that no run could read, before any rank starts."""
    for name, key in ((job.data.source, "data.source"), (job.run.eval_source, "run.eval_source")):
        if name is None or name == "synthetic":
            continue
        path, form = source_name(job, name), FORM.named_by(key)
        check_vocabulary(map_tokens(path, vocab, form), path, vocab, form)
