"""Where tokens come from: synthetic, or a file. Without torch, so that a bad file is found before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from executor.data.dataset import IGNORED
from executor.data.files import FORM, check_vocabulary, labels_of, map_tokens, refuse_outside, refuse_outside_labels
from ir.core.files import named_path
from ir.job import Job

# Of a Feistel network, and bits of its halves at least: with fewer, a handful of windows has favourite permutations.
ROUNDS, LEAST = 8, 3
_WORD = 2**64 - 1


@dataclass(frozen=True)
class TokenOrder:
    """A permutation of 0 … count − 1 drawn by its keys: a Feistel network over a power of four, walked along
    until it is back among the count. A place costs about 10 µs and no memory, however many windows there are.

    >>> order = TokenOrder.of(5, seed=0, epoch=0)
    >>> sorted(order.window(k) for k in range(5)), [order.place(order.window(k)) for k in range(5)]
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """

    count: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, count: int, seed: int, epoch: int) -> TokenOrder:
        return _drawn(count, seed, epoch)

    def window(self, place: int) -> int:
        """What is read at a place."""
        half, mask = self._half
        while True:
            left, right = place >> half, place & mask
            for key in self.keys:
                left, right = right, left ^ (_mixed(right + key) & mask)
            place = left << half | right
            if place < self.count:
                return place

    def place(self, window: int) -> int:
        """Where a window is read: the other way round."""
        half, mask = self._half
        while True:
            left, right = window >> half, window & mask
            for key in reversed(self.keys):
                left, right = right ^ (_mixed(left + key) & mask), left
            window = left << half | right
            if window < self.count:
                return window

    @property
    def _half(self) -> tuple[int, int]:
        bits = max(LEAST, ((self.count - 1).bit_length() + 1) // 2)
        return bits, (1 << bits) - 1


@lru_cache(maxsize=16)
def _drawn(count: int, seed: int, epoch: int) -> TokenOrder:
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    return TokenOrder(count, tuple(int(k) for k in keys))


def _mixed(x: int) -> int:
    """The finaliser of splitmix64: every bit of a word depends on every other."""
    x &= _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


class TokenSource(Protocol):
    """Where tokens come from."""

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """Tokens and labels (int64) of sequence `index` of a step's global batch: (2, length). A token is 0 where there
        is none, a label IGNORED where none counts."""

    def missing(self, step: int, length: int) -> int:
        """Labels of a step's global batch that are IGNORED."""


@dataclass(frozen=True)
class SyntheticTokens:
    """Arithmetic progressions with noise, so a loss can fall; every sequence of every step is another one.

    >>> SyntheticTokens(vocab=100, seed=0).sequence(0, 0, 4).shape
    (2, 4)
    """

    vocab: int
    seed: int = 0

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, step, index])
        tokens = (rng.integers(self.vocab) + rng.integers(1, 4) * np.arange(length + 1)) % self.vocab
        noise = rng.random(length + 1) < 0.1
        drawn = np.where(noise, rng.integers(self.vocab, size=length + 1), tokens).astype(np.int64)
        return np.stack((drawn[:-1], drawn[1:]))

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
        self.labels = labels_of(self.tokens)
        self._missing: tuple[int, int] | None = None  # of which step, how many

    def sequence(self, step: int, index: int, length: int) -> np.ndarray:
        """The window that comes next in the epoch's order. Raises PiperError: a token outside the vocabulary."""
        start = self._window(step, index, length) * length
        part = np.asarray(self.tokens[start : start + length + 1], dtype=np.int64)
        refuse_outside(part, self.path, self.vocab)
        labels = self._labels(part[1:], start + 1)
        if self.labels is not None:
            refuse_outside_labels(labels, self.path, self.vocab)
        out = np.stack((np.zeros(length, np.int64), np.full(length, IGNORED)))
        out[0, : len(part)], out[1, : len(labels)] = part[:length], labels
        return out

    def missing(self, step: int, length: int) -> int:
        """Only the file's last window is short: count the epochs that read it in this step. Where columns say what
        counts, they are read, of all the step's windows."""
        if self.labels is not None:
            if self._missing is None or self._missing[0] != step:
                self._missing = step, sum(self._ignored(step, k, length) for k in range(self.sequences))
            return self._missing[1]
        windows, first = self._windows(length), step * self.sequences
        short = windows * length - (len(self.tokens) - 1)
        end = first + self.sequences
        epochs = range(first // windows, (end - 1) // windows + 1) if short else ()
        at = (e * windows + TokenOrder.of(windows, self.seed, e).place(windows - 1) for e in epochs)
        return short * sum(first <= k < end for k in at)

    def _ignored(self, step: int, index: int, length: int) -> int:
        start = self._window(step, index, length) * length + 1
        labels = self._labels(self.tokens[start : start + length], start)
        return length - int(np.count_nonzero(labels != IGNORED))

    def _labels(self, tokens: np.ndarray, start: int) -> np.ndarray:
        return tokens if self.labels is None else self.labels.of(tokens, start)

    def _window(self, step: int, index: int, length: int) -> int:
        windows = self._windows(length)
        epoch, place = divmod(step * self.sequences + index, windows)
        return TokenOrder.of(windows, self.seed, epoch).window(place)

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
