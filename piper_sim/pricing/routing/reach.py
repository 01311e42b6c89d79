"""How many of a source's tokens reach each rank and each node: estimated from its counts, which do not say.

Counts say how many copies go where, not which of them are one token's. As in `cost_models.links.fabric`, the k
copies of a token are taken to fall independently: a node that gets share q of a source's copies sees 1 - (1 - q)**k
of its tokens; of those, a rank with share r of the node's copies sees 1 - (1 - r)**x, x the node's copies per token
that it sees. So equal counts give `links.distinct`'s numbers. It is exact for top-1, else a little low: a token's
experts differ. A lower bound mends that where one expert gets nearly all tokens: by how much its inclusion exceeds
the mean, as a share of how much it could. A limit of nodes per token scales a token's nodes down to it.
"""

from dataclasses import dataclass

import numpy as np

from ir.core.order import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TokenReach:
    """Of each row of counts. copies: [row, rank] to its experts; rank, node: [row, …] tokens that get there at all."""

    copies: FloatArray
    rank: FloatArray
    node: FloatArray


def reach(rows: IntArray, node: IntArray, top_k: int, limit: int = 0) -> TokenReach:
    """Of rows of counts by expert, whose ranks lie on nodes `node` (numbers from 0). limit: nodes per token; 0: none.

    >>> r = reach(np.full((1, 8), 2), np.array([0, 0, 1, 1]), top_k=2)  # 8 tokens, two experts on each rank
    >>> r.copies.tolist(), r.node.tolist()
    ([[4.0, 4.0, 4.0, 4.0]], [[6.0, 6.0]])
    """
    count, experts = rows.shape
    tokens = rows.sum(axis=1, keepdims=True) / top_k
    whole = np.maximum(tokens, 1.0)
    local = rows.reshape(count, len(node), -1)
    copies = local.sum(axis=2).astype(np.float64)
    nodes = int(node.max()) + 1
    on = node == np.arange(nodes)[:, None]
    by_node = np.stack([copies[:, n].sum(axis=1) for n in on], axis=1)
    mean = top_k / experts
    least = np.maximum((local.max(axis=2) / whole - mean) / max(1 - mean, 1e-300), 0.0)
    seen = 1 - np.power(1 - by_node / (whole * top_k), top_k)
    if limit:
        seen *= np.minimum(1.0, limit / np.maximum(seen.sum(axis=1, keepdims=True), 1e-300))
    seen = np.maximum(seen, np.stack([least[:, n].max(axis=1) for n in on], axis=1)) * tokens
    return TokenReach(copies, _ranks(copies, by_node, seen, node, least * tokens), seen)


def _ranks(copies: FloatArray, by_node: FloatArray, seen: FloatArray, node: IntArray, least: FloatArray) -> FloatArray:
    total, arrive = by_node[:, node], seen[:, node]
    share = copies / np.where(total > 0, total, 1.0)
    each = np.where(arrive > 0, total / np.where(arrive > 0, arrive, 1.0), 1.0)
    return np.asarray(np.maximum(arrive * (1 - np.power(1 - share, each)), least))
