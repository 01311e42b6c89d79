"""Core attention, softmax(q·kᵀ)·v: fused (flash), or unfused with its score matrices stored as Megatron stores them."""

from __future__ import annotations

from dataclasses import dataclass

from ir.core.ops import Pass
from ir.core.work import CAST, DROPOUT, DType, Kernel, KernelKind, Work
from ir.workload.part import SavedBuffer
from ir.workload.parts.kernels import memory
from ir.workload.setting import AttentionKind, PartSetting


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Attention of one device: its heads, its share of the queries, all keys. qk, v: features of one head. keys: of
    another sequence, which all queries see; 0: of their own. joint: values are the first features of keys. Where cp
    divides heads: those of its cp group, of which each device then works on a share, of all queries; its tensors are as
    large.
    """

    heads: int
    kv_heads: int
    qk: int
    v: int
    keys: int = 0
    joint: bool = False

    @classmethod
    def of(cls, s: PartSetting, keys: int = 0) -> AttentionCore:
        """As tensor parallelism cuts the heads. Kernels that read picked keys alone read compressed ones, which all
        heads share (the multi-query mode of latent attention, arXiv:2512.02556).
        """
        c, tp = s.config, s.layout.tp
        if c.compressed:
            return cls(c.heads // tp, 1, c.head_dim, c.head_dim, keys, joint=True)
        if s.picked and c.mla:
            return cls(c.heads // tp, 1, c.mla.latent_dim, c.mla.kv_rank, keys, joint=True)
        return cls(c.heads // tp, max(1, (c.heads if c.mla else c.kv_heads) // tp), c.qk_dim, c.v_dim, keys)

    @property
    def q_features(self) -> int:
        """Features of all queries of a token."""
        return self.heads * self.qk

    @property
    def kv_features(self) -> int:
        """Features of all keys and values of a token."""
        return self.kv_heads * (self.qk if self.joint else self.qk + self.v)

    @property
    def out_features(self) -> int:
        """Features of the output of a token."""
        return self.heads * self.v

    def repeated(self, s: PartSetting) -> int:
        """How often keys and values are there: beside a mask for each head, or for ranks that exchange heads."""
        if s.style.masked and s.attention is AttentionKind.FLASH:
            return self.heads // self.kv_heads
        return max(1, s.layout.cp // self.kv_heads) if s.layout.cp_heads else 1

    def forward(self, s: PartSetting) -> Work:
        """q, k, v to the output."""
        if s.attention is AttentionKind.FLASH:
            into = self._narrowed(s, "cast", self.q_features + self.kv_features, 1)
            return (*self._repeat(s), *into, self._flash(s, 1, self.qk + self.v, "attention"))
        context = self._product(s, "context", self.queries(s), self.v, self.seen(s))
        return (*self._repeat(s), *self.scores(s), context)

    def backward(self, s: PartSetting) -> Work:
        """Gradients of q, k, v. Flash makes the scores again: 5 products against forward's 2."""
        if s.attention is AttentionKind.FLASH:
            whole = self._flash(s, 2, 3 * self.qk + 2 * self.v, "attention_backward")
            return (*self._narrowed(s, "cast_grad", self.out_features, 2), whole, *self._repeat(s))
        q, kv, n = self.queries(s), self.seen(s), self._score_elements(s)
        dropout = (memory(s, "dropout_backward", n * (2 * s.wide + 1)),) if s.config.attn_dropout else ()
        return (
            self._product(s, "d_probs", q, kv, self.v),
            self._product(s, "d_value", kv, self.v, q),
            *dropout,
            memory(s, "softmax_backward", 3 * n * s.wide),
            *self._capped(s, 3),
            *self._distances(s, 1),
            self._product(s, "d_query", q, self.qk, kv),
            self._product(s, "d_key", kv, self.qk, q),
            *self._repeat(s),
        )

    def _narrowed(self, s: PartSetting, label: str, features: int, times: int) -> Work:
        """What the kernel reads, into its format; on the way back the output's gradient. What is kept for backward
        stays as large: of blocks both copies are, of which each product reads the one along its sum.
        """
        if s.precision.attention is None:
            return ()
        return (memory(s, f"attention.{label}{CAST}", times * s.tokens * features * (s.wide + 1)),)

    def _repeat(self, s: PartSetting) -> Work:
        """Keys and values written as often as ranks need them; on the way back the sum of their gradients."""
        times = self.repeated(s)
        return (memory(s, "repeat_kv", (times + 1) * s.tokens * self.kv_features * s.wide),) if times > 1 else ()

    def scores(self, s: PartSetting) -> Work:
        """The unfused first half, which "scores" recomputes: q·kᵀ, softmax, dropout."""
        n = self._score_elements(s)
        dropout = (memory(s, "dropout", n * (2 * s.wide + 1)),) if s.config.attn_dropout else ()
        product = self._product(s, "scores", self.queries(s), self.seen(s), self.qk)
        return (product, *self._distances(s, 2), *self._capped(s, 2), memory(s, "softmax", 2 * n * s.wide), *dropout)

    def _capped(self, s: PartSetting, tensors: int) -> Work:
        """The squeeze of scores by a tanh, and back."""
        moved = tensors * self._score_elements(s) * s.wide
        return (memory(s, "score_cap", moved),) if s.config.form.score_cap else ()

    def _distances(self, s: PartSetting, tensors: int) -> Work:
        """A number for each distance onto the scores, and their gradients summed by distance."""
        moved = tensors * self._score_elements(s) * s.wide
        return (memory(s, "distances", moved),) if s.config.form.distances else ()

    def saved(self, s: PartSetting) -> tuple[SavedBuffer, ...]:
        """What backward needs beside q, k, v and the output."""
        more = (self.repeated(s) - 1) * s.tokens * self.kv_features * s.wide
        beside = (SavedBuffer("repeated_kv", more, Pass.I),) if more else ()
        if s.attention is AttentionKind.FLASH:
            lse = SavedBuffer("lse", 4 * s.tokens * self.heads, Pass.I)
            if not s.layout.cp_heads:
                return (*beside, lse)
            attended = SavedBuffer("attended", s.tokens * self.out_features * s.wide, Pass.I)  # before it went home
            return (*beside, lse, attended)
        # Softmax output, and with dropout its mask (one byte) and its output: the 5as²b of arXiv:2205.05198.
        each = s.wide + ((s.wide + 1) if s.config.attn_dropout else 0)
        made = ("scores", "operators"), self.scores(s)
        return (*beside, SavedBuffer("scores", self._score_elements(s) * each, Pass.I, *made))

    def workspace(self, s: PartSetting, when: Pass) -> int:
        """Bytes alive only inside the pass: raw scores; in backward their gradients, or flash's fp32 sums."""
        if s.attention is AttentionKind.UNFUSED:
            return self._score_elements(s) * s.wide * (2 if when is Pass.I else 1)
        return 4 * self._summed(s) if when is Pass.I else 0

    def gradients(self, s: PartSetting) -> int:
        """Bytes of gradients at their most: the output's beside those of q, k, v, or beside the scores' and v's."""
        unfused = s.attention is AttentionKind.UNFUSED
        features = self.kv_heads * self.v if unfused else self.q_features + self.kv_features
        return s.tokens * (self.out_features + features) * s.wide + self.workspace(s, Pass.I)

    def queries(self, s: PartSetting) -> int:
        """Query positions of one sequence on this device."""
        return s.shape.seq_len // (1 if s.layout.cp_heads else s.layout.cp)

    def worked_on(self, s: PartSetting) -> int:
        """Heads that this device works on."""
        return self.heads // (s.layout.cp if s.layout.cp_heads else 1)

    def seen(self, s: PartSetting) -> int:
        """Key positions of one sequence, compressed ones among them."""
        n, x = s.shape.seq_len, s.config.compressed
        return self.keys or n + (x.keys.entries(n) if x else 0)

    def pairs_doubled(self, s: PartSetting) -> int:
        """Twice the (query, key) pairs of one sequence over all devices."""
        return 2 * s.shape.seq_len * self.keys if self.keys else pairs_doubled(s, s.picked or s.config.window)

    def model_flops(self, s: PartSetting) -> int:
        """Forward FLOPs over all heads and tokens, causal counted half; whatever keys kernels read, in which form."""
        c, n = s.config, s.shape.seq_len
        pairs = 2 * n * self.keys if self.keys else pairs_doubled(s, c.indexer.top_k if c.indexer else c.window)
        return s.shape.microbatch_size * c.heads * pairs * (c.qk_dim + c.v_dim)

    def _score_elements(self, s: PartSetting) -> int:
        return s.shape.microbatch_size * self.worked_on(s) * self.queries(s) * self.seen(s)

    def _flash(self, s: PartSetting, passes: int, features: int, label: str) -> Kernel:
        b, q, kv, heads = s.shape.microbatch_size, self.queries(s), self.seen(s), self.worked_on(s)
        pairs = 2 * s.shape.seq_len * self.seen(s) if s.style.masked else self.pairs_doubled(s)
        if passes == 2 and s.precision.attention is DType.FP8 and not s.config.form.chunked:
            pairs = pairs_doubled(s, 0)  # whatever lies outside of a window is worked on (cuDNN 9.26)
        flops = b * self.heads * pairs // s.layout.cp * features
        kv_heads = self.kv_heads * self.repeated(s) * heads // self.heads
        dtype = s.precision.attention or s.precision.activations
        out, read = q * heads * self.v, q * heads * self.qk + kv * kv_heads * self.kv_features // self.kv_heads
        sums = 2 * 4 * self._summed(s) if passes == 2 else 0
        # Backward reads in the one format, and writes in the other.
        each = (dtype.bytes + s.wide) * (read + out) if passes == 2 else dtype.bytes * read + s.wide * out
        moved = b * each + sums + 4 * b * q * heads
        shape = (b, heads, q, kv, self.qk, self.v)
        drawn = DROPOUT if s.config.attn_dropout else ""
        return Kernel(KernelKind.ATTENTION, flops, moved, dtype, shape, label + drawn)

    def _summed(self, s: PartSetting) -> int:
        """Elements that flash's backward sums up in fp32: gradients of queries; of picked keys, which many share."""
        if self.joint:
            return s.shape.microbatch_size * self.seen(s) * self.qk
        return s.shape.microbatch_size * self.queries(s) * self.worked_on(s) * self.qk

    def _product(self, s: PartSetting, label: str, m: int, n: int, k: int) -> Kernel:
        groups = s.shape.microbatch_size * self.worked_on(s)
        dtype: DType = s.precision.activations
        moved = groups * (m * k + n * k + m * n) * dtype.bytes
        return Kernel(KernelKind.GROUPED_GEMM, 2 * groups * m * n * k, moved, dtype, (groups, m, n, k), label)


def pairs_doubled(s: PartSetting, w: int) -> int:
    """Twice the (query, key) pairs of one sequence, under the causal mask counted as half the square.

    A sliding window of w keys leaves w·s − w²/2 of them, and so do w that are picked for each query; stretches of w
    that do not see each other, w²/2 each. w 0: all. Compressed keys are seen beside a window's.
    """
    n, x = s.shape.seq_len, s.config.compressed
    if x is not None:
        return (n * n if n <= w else 2 * w * n - w * w) + 2 * x.keys.pairs(n)
    if s.config.form.bidirectional:
        return 2 * n * n
    if s.config.form.chunked and 0 < w < n:
        return n // w * w * w + (n % w) ** 2
    return n * n if not 0 < w < n else 2 * w * n - w * w
