"""A source's tokens spread over experts: popularities, the cap of top-k, whole numbers."""

from __future__ import annotations

import hashlib

import numpy as np

from ir.core.order import FloatArray, IntArray


def zipf(experts: int, strength: float) -> FloatArray:
    """Logarithms of popularities that fall as rank**-strength, most popular first.

    >>> np.exp(zipf(4, 1.0)).round(3).tolist()
    [1.0, 0.5, 0.333, 0.25]
    """
    return np.asarray(-strength * np.log(np.arange(1, experts + 1)))


def hot(experts: int, strength: float) -> FloatArray:
    """Logarithms of popularities: one expert `strength` times as popular as each of the others, which are equal.

    >>> np.exp(hot(4, 3.0)).round(3).tolist()
    [3.0, 1.0, 1.0, 1.0]
    """
    out = np.zeros(experts)
    out[0] = np.log(strength)
    return out


def spread(popularity: FloatArray, tokens: int, top_k: int) -> IntArray:
    """tokens * top_k copies over experts in proportion to exp(popularity), which falls; none gets more than `tokens`.

    A token goes to `top_k` different experts, so that no expert sees more copies than there are tokens. What is too
    much for one is shared by the others in proportion. Whole numbers by largest remainder, the more popular first.

    >>> spread(np.log([6.0, 1.0, 1.0]), 10, 1).tolist(), spread(np.log([6.0, 1.0, 1.0]), 10, 2).tolist()
    ([8, 1, 1], [10, 5, 5])
    """
    exact = np.full(len(popularity), float(tokens))
    for full in range(top_k):
        weight = np.exp(popularity[full:] - popularity[full])
        share = tokens * (top_k - full) / weight.sum()
        if share <= tokens:
            exact[full:] = share * weight
            break
    else:
        exact[top_k:] = 0.0
    out = np.minimum(np.floor(exact), tokens).astype(np.int64)
    order = np.argsort(out - exact, kind="stable")
    open_ = order[out[order] < tokens]
    out[open_[: tokens * top_k - int(out.sum())]] += 1
    return np.asarray(out)


def ranking(experts: int, layer: int, seed: int) -> IntArray:
    """Experts of a layer, most popular first: in the order of SHA-256 of "seed/layer/expert", the same everywhere.

    >>> sorted(ranking(4, 0, 1).tolist()), ranking(8, 0, 1).tolist() == ranking(8, 1, 1).tolist()
    ([0, 1, 2, 3], False)
    """
    keys = [hashlib.sha256(f"{seed}/{layer}/{e}".encode()).digest() for e in range(experts)]
    return np.array(sorted(range(experts), key=keys.__getitem__), dtype=np.int64)
