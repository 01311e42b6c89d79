"""Recurrences that stand in place of attention, as a model graph needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class LayerMixerKind(StrEnum):
    """Recurrences over a sequence: Mamba-2's state space (arXiv:2405.21060), the gated delta rule (2412.06464)."""

    MAMBA = "mamba"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class LayerMixer:
    """What stands in place of attention in layers whose tokens are mixed by a recurrence: a state per head.

    heads of head_dim features (values) share keys and queries of `groups` with `state` features (Mamba's B and C); so a
    head's state is head_dim × state numbers. conv: tokens that a convolution over all three sees. chunk: tokens between
    two states that are stored. layers: those that have it. alone: layers without MLP or experts behind what mixes
    tokens; unmixed: layers that are an MLP or experts, no more.
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

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Features that pass the convolution: values, keys and queries."""
        return self.inner + 2 * self.groups * self.state

    @property
    def rates(self) -> int:
        """Numbers per head and token beside them: a step size, and where the delta rule writes, how much of it."""
        return 1 if self.kind is LayerMixerKind.MAMBA else 2

    @property
    def projected(self) -> int:
        """Outputs of the projections in: channels, a gate for each feature of the output, the rates."""
        return self.channels + self.inner + self.rates * self.heads

    @property
    def anywhere(self) -> LayerMixer:
        """The same without the numbers of layers, which change no kernel."""
        return replace(self, layers=frozenset(), alone=frozenset(), unmixed=frozenset())
