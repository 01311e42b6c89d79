"""Recurrences and convolutions that stand in place of attention, as a model graph needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum


class LayerMixerKind(StrEnum):
    """Recurrences over a sequence: Mamba-2's state space (arXiv:2405.21060), the gated delta rule (2412.06464), and it
    with a decay for each feature of a key (Kimi delta attention, 2510.26692), whose gates Ling 3 has in one step;
    Mamba-1's selective scan (2312.00752), whose heads are single features that all read the same keys and queries; and
    a convolution over a few tokens between two gates (LFM2's), feature by feature, without a state.
    """

    MAMBA = "mamba"
    DELTA = "delta"
    KIMI = "kimi"
    LING = "ling"
    SELECTIVE = "selective"
    CONV = "conv"

    @property
    def is_faded(self) -> bool:
        """Whether each feature of a key has a decay of its own."""
        return self in (LayerMixerKind.KIMI, LayerMixerKind.LING)

    @property
    def is_delta(self) -> bool:
        """Whether what a key stands for is written over, not only added to."""
        return self not in (LayerMixerKind.MAMBA, LayerMixerKind.SELECTIVE, LayerMixerKind.CONV)


@dataclass(frozen=True, slots=True)
class LayerMixer:
    """What stands in place of attention in layers whose tokens are mixed by a recurrence: a state per head.

    heads of head_dim features (values) share keys and queries of `groups` with `state` features (Mamba's B and C); so a
    head's state is head_dim × state numbers. conv: tokens that a convolution over all three sees. chunk: tokens between
    two states that are stored. layers: those that have it. alone: layers without MLP or experts behind what mixes
    tokens; unmixed: layers that are an MLP or experts, no more. proj_bias, out_bias: of the projections in, and out.
    normed: a norm stands before the projection out. steps: features that Mamba-1's step sizes come through. beside: its
    layers have attention, too, and both read one norm.
    """

    kind: LayerMixerKind
    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int
    layers: frozenset[int]
    alone: frozenset[int] = frozenset()
    unmixed: frozenset[int] = frozenset()
    conv_bias: bool = False
    proj_bias: bool = False
    out_bias: bool = field(default=False, repr=False)  # profiles were taken before there was such a thing
    normed: bool = field(default=True, repr=False)
    steps: int = field(default=0, repr=False)
    beside: bool = field(default=False, repr=False)

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Features that pass the convolution: values, keys and queries."""
        return self.inner + 2 * self.keys

    @property
    def keys(self) -> int:
        """Features of the keys that come with the values; Mamba-1's come of what was convolved."""
        return 0 if self.kind is LayerMixerKind.SELECTIVE else self.groups * self.state

    @property
    def rates(self) -> int:
        """Numbers per head and token beside them: a step size, and where the delta rule writes, how much of it. Kimi's
        has a decay for each feature, which is no rate of a head.
        """
        return {LayerMixerKind.DELTA: 2, LayerMixerKind.SELECTIVE: 0, LayerMixerKind.CONV: 0}.get(self.kind, 1)

    @property
    def gates(self) -> int:
        """Numbers for each feature of the output: its gate, and Kimi's decays; a convolution's two gates."""
        return (2 if self.kind.is_faded or self.kind is LayerMixerKind.CONV else 1) * self.inner

    @property
    def rank(self) -> int:
        """Features that each of Kimi's two gates comes through (as many as a head has, in flash-linear-attention's
        KimiDeltaAttention); 0: gates come with the rest.
        """
        return self.head_dim if self.kind is LayerMixerKind.KIMI else 0

    @property
    def projected(self) -> int:
        """Outputs of the projections in: channels, gates, the rates."""
        return self.channels + self.gates + self.rates * self.heads

    def weights(self, hidden: int) -> int:
        """Elements of its projections' weights, in and out."""
        if not self.rank:
            return hidden * (self.projected + self.inner) + self.inner * (self.selected + self.steps)
        return hidden * (self.projected - self.gates + self.inner + 2 * self.rank) + self.rank * self.gates

    @property
    def selected(self) -> int:
        """What Mamba-1 makes of a convolved token: a key and a query, and what step sizes come through."""
        return self.steps + 2 * self.state if self.kind is LayerMixerKind.SELECTIVE else 0

    @property
    def anywhere(self) -> LayerMixer:
        """The same without the numbers of layers, which change no kernel."""
        return replace(self, layers=frozenset(), alone=frozenset(), unmixed=frozenset())
