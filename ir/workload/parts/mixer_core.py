"""The recurrences themselves, in chunks of tokens: Mamba-2's scan, and the gated delta rule's two forms, as published
kernels do.

Within a chunk every token meets every other, as in attention; between chunks a state per head passes. Forward stores
the states of all chunks for its own last step only: backward makes them again (state-spaces/mamba's
`mamba_split_conv1d_scan_combined`, flash-linear-attention's `chunk_gated_delta_rule` and `chunk_kda`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.core.work import SCAN, SCAN_BACK, Kernel, KernelKind, Work
from ir.workload.config.recurrence import LayerMixerKind
from ir.workload.part import SavedBuffer
from ir.workload.parts.kernels import copies, memory
from ir.workload.setting import PartSetting

_WIDE = 4  # states and sums are fp32
# Bytes per feature of a key that `chunk_kda` moves more than `chunk_gated_delta_rule` (flash-linear-attention 0.5,
# fla/ops/kda). Forward: sums of decays, from 16 bits to 32 (6); scores, in two kernels, which read them (8), queries
# and keys once more (4); what is written, which reads them and keeps weighed keys (6); outputs, which read them (4).
# Backward: what is written, and weighed queries, again (10); gradients of all, which read decays and write theirs (8);
# scores', which read and write three gradients in 32 bits, and read decays, queries and keys (32); sums back (8), and
# through the gate (8).
_DECAYS, _DECAYS_BACK = 28, 66


@dataclass(frozen=True, slots=True)
class LayerRecurrence:
    """The recurrence of one device: whole sequences (`rows` tokens), its share of the heads and of their groups. faded:
    each feature of a key has a decay of its own (Kimi's).
    """

    delta: bool
    faded: bool
    sequences: int
    rows: int
    heads: int
    groups: int
    v: int
    k: int
    chunk: int

    @classmethod
    def of(cls, s: PartSetting) -> LayerRecurrence:
        """As tensor parallelism, then context parallelism, cut the heads; a group serves all that share its heads."""
        m = s.config.mixer
        assert m is not None
        by = s.layout.tp * s.layout.cp
        chunk = min(m.chunk, s.shape.seq_len)
        heads, groups = m.heads // by, -(-m.groups // by)
        return cls(
            m.kind.is_delta,
            m.kind.is_faded,
            s.shape.microbatch_size,
            s.shape.tokens,
            heads,
            groups,
            m.head_dim,
            m.state,
            chunk,
        )

    @property
    def inner(self) -> int:
        """Features of a token's output."""
        return self.heads * self.v

    @property
    def channels(self) -> int:
        """Features that pass the convolution."""
        return self.inner + 2 * self.groups * self.k

    @property
    def states(self) -> int:
        """Numbers of the states of all chunks."""
        return -(-self.rows // self.chunk) * self.heads * self.v * self.k

    @property
    def within(self) -> int:
        """Pairs of tokens that meet inside of chunks, of one head."""
        return self.rows * self.chunk

    def forward(self, s: PartSetting) -> Work:
        """Convolved values, keys and queries to the output, not yet gated."""
        if self.delta:
            out = self._within(s, "scan.output", self.heads, self.v + self.k, self.k + self.v, self.states * s.wide)
            read = self._between(s, "scan.read", 1)
            return (*self._normed(s, 1), *self._decays(s, _DECAYS), *self._rule(s), *self._passed(s, 2), read, out)
        out = self._within(s, "scan.output", self.heads, self.v, self.v, 0)
        return (*self._chunks(s), self._between(s, "scan.read", 1), out)

    def backward(self, s: PartSetting) -> Work:
        """Gradients of values, keys, queries and rates: what forward did not keep is made first."""
        if self.delta:
            again = (*self._rule(s, inverse=False), *self._passed(s, 2))
            # Scores' and inverse's gradients, then values', keys' and queries': twice the products of forward.
            inner = self._within(s, "scan.within", self.heads, 3 * (self.v + self.k), 4 * (self.k + self.v), 0)
            rest = (*self._passed(s, 4), self._between(s, "scan.read", 2), inner)
            return _behind((*again, *rest, *self._decays(s, _DECAYS_BACK), *self._normed(s, 2)))
        outer = self._within(s, "scan.within", self.heads, 3 * self.v, 4 * self.v, 0)
        scores = self._within(s, "scan.scores", self.groups, 2 * self.k, 4 * self.k, 0)
        return _behind((*self._chunks(s), *self._passed(s, 1), self._between(s, "scan.read", 4), outer, scores))

    def saved(self, s: PartSetting) -> tuple[SavedBuffer, ...]:
        """What backward needs beside the projections' output and the recurrence's: of the delta rule, inverses and what
        was convolved.
        """
        if not self.delta:
            return ()
        inverse = SavedBuffer("inverse", (2 if self.faded else 1) * self.heads * self.within * s.wide)  # scores, too
        return (SavedBuffer("convolved", self.rows * self.channels * s.wide), inverse)

    def workspace(self, s: PartSetting) -> int:
        """Bytes of states and of scores inside chunks."""
        scores = (
            self.heads * (self.k + self.v) * self.rows * s.wide if self.delta else self.groups * self.within * _WIDE
        )
        decays = self.rows * self.heads * self.k * (_WIDE + s.wide) if self.faded else 0  # and keys that they weigh
        return self.states * (s.wide if self.delta else _WIDE) + scores + decays

    def _chunks(self, s: PartSetting) -> Work:
        """Mamba's first steps: each chunk's own state, states passed from chunk to chunk, scores inside chunks."""
        scores = self._within(s, "scan.scores", self.groups, self.k, 2 * self.k, self.groups * self.within * _WIDE)
        return (self._between(s, "scan.states", 1), *self._passed(s, 1), scores)

    def _rule(self, s: PartSetting, *, inverse: bool = True) -> Work:
        """The delta rule's first steps: products of keys inside chunks, their triangular inverse, what is written."""
        made = self.heads * self.within * (_WIDE + s.wide)
        products = self._within(s, "scan.keys", self.heads, self.k, self.k, made // 2)
        solved = (products, memory(s, "scan.inverse", made))
        written = self._within(s, "scan.written", self.heads, self.k + self.v, 2 * (self.k + self.v), 0)
        return (*(solved if inverse else ()), written)

    def _decays(self, s: PartSetting, bytes_each: int) -> Work:
        """What a decay for each feature adds to the rule's traffic."""
        return (memory(s, "scan.decays", self.rows * self.heads * self.k * bytes_each),) if self.faded else ()

    def _normed(self, s: PartSetting, times: int) -> Work:
        """The lengths of keys and queries, taken out."""
        return (copies(s, "scan.lengths", times * self.rows * 2 * self.groups * self.k),)

    def _passed(self, s: PartSetting, products: int) -> Work:
        """States from chunk to chunk: Mamba's, which only fade, elementwise; the delta rule's by products, one chunk
        after another, with as many sequences and heads beside each other as there are.
        """
        if not self.delta:
            return (memory(s, "scan.pass", 2 * self.states * _WIDE),)
        one = self.sequences * self.heads
        flops = products * 2 * self.rows * self.heads * self.k * self.v
        moved = self.rows * self.heads * 2 * (self.k + self.v) * s.wide + self.states * s.wide
        shape = (one, self.k, self.v, max(1, self.rows // self.sequences))
        return (Kernel(KernelKind.GROUPED_GEMM, flops, moved, s.precision.activations, shape, "scan.pass"),)

    def _between(self, s: PartSetting, label: str, products: int) -> Kernel:
        """Products of every token's values with its keys into a state, or of its query with one."""
        flops = products * 2 * self.rows * self.heads * self.v * self.k
        moved = products * (self.rows * (self.inner + self.groups * self.k) * s.wide + self.states * _WIDE)
        shape = (-(-self.rows // self.chunk) * self.heads, self.v, self.k, self.chunk)
        return Kernel(KernelKind.GROUPED_GEMM, flops, moved, s.precision.activations, shape, label)

    def _within(self, s: PartSetting, label: str, groups: int, features: int, moved: int, more: int) -> Kernel:
        """Products of tokens with tokens of their chunk. features: of all products; moved: read and written, of a
        token and group.
        """
        flops = 2 * groups * self.within * features
        size = self.rows * groups * moved * s.wide + more
        shape = (-(-self.rows // self.chunk) * groups, self.chunk, features, self.chunk)
        return Kernel(KernelKind.GROUPED_GEMM, flops, size, s.precision.activations, shape, label)


def _behind(work: Work) -> Work:
    """Kernels of backward, which do not reach the rates of forward's."""
    return tuple(replace(k, label=SCAN_BACK + k.label.removeprefix(SCAN)) for k in work)


def model_flops(s: PartSetting) -> int:
    """Forward FLOPs of the recurrence over all heads and tokens, as Megatron-LM counts them: of Mamba's scan seven for
    each number of a state; of the delta rule four products with each head's state, and its convolution.
    """
    m, tokens = s.config.mixer, s.shape.tokens
    assert m is not None
    if m.kind is LayerMixerKind.MAMBA:
        return 7 * tokens * m.inner * m.state
    return 2 * tokens * (4 * m.inner * m.state + m.conv * m.channels)
