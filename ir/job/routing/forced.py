"""Counts made into choices: which experts each token goes to, so that every expert gets as many as it should."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from ir.core.order import IntArray
from ir.graph.graph import Graph
from ir.job.build import PreparedJob
from ir.job.routing.counts import ExpertCounts, ExpertLayer, moe_layers
from ir.job.routing.described import counts_of
from ir.workload.work import ConfigModelWork


@dataclass(frozen=True, eq=False)
class ForcedExperts:
    """The routing of a job, token by token.

    Which counts a source has is for `[routing]` to say. Which of its tokens go where depends on seed, layer, the
    microbatch's number in the global batch, and which of the sources that share it this is; so all plans of one global
    batch whose sources are equal route every token alike.
    """

    counts: ExpertCounts
    layers: tuple[ExpertLayer, ...]
    top_k: int
    seed: int

    @classmethod
    def of(cls, prepared: PreparedJob, graph: Graph) -> ForcedExperts:
        """Of a job whose directives made `graph`. Raises PiperError: a file that does not fit the job."""
        source, mesh, moe = prepared.base.source, prepared.mesh, prepared.config.moe
        assert isinstance(source, ConfigModelWork) and moe is not None
        layers, shared = moe_layers(graph, source), mesh.sizes["tp"] * mesh.sizes["cp"]
        counts = counts_of(prepared.job, prepared.config, layers, shared * mesh.sizes["dp"], prepared.mbs)
        return cls(counts, layers, moe.top_k, prepared.job.routing.seed)

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Of one source, by decoder layer."""
        return {x.number: x.tokens for x in self.layers}

    def experts(self, layer: int, source: int, mb: int, number: int, part: int = 0) -> IntArray:
        """[token, copy] experts of a source's tokens in its microbatch `mb`, the number-th of the global batch.

        part: which of the sources that share the microbatch it is.
        """
        counts = self.counts.tokens(layer, mb)[source]
        return choices(counts, self.tokens[layer], self.top_k, f"{self.seed}/{layer}/{number}/{part}")


def choices(counts: IntArray, tokens: int, top_k: int, key: str) -> IntArray:
    """[token, copy] experts: counts[e] different tokens for expert e, top_k different experts for each token.

    counts sum to tokens * top_k, none above tokens. Copies are laid in rows of `tokens`, expert after expert: one
    expert's never meet in a column. Which token is which column is a turn of them all, drawn from the key.

    >>> choices(np.array([3, 1, 2, 0]), 3, 2, "0/1/0/0").tolist()
    [[0, 1], [0, 2], [0, 2]]
    """
    assert int(counts.sum()) == tokens * top_k and int(counts.max(initial=0)) <= tokens
    experts = np.repeat(np.arange(len(counts)), counts).reshape(top_k, tokens).T
    drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    step = next(s for s in range(drawn % tokens + 1, 2 * tokens + 2) if gcd(s, tokens) == 1)
    return np.ascontiguousarray(experts[(np.arange(tokens) * step + drawn // tokens % tokens) % tokens])
