"""Attention to a window and to compressed keys behind it (DeepSeek-V4), as a model graph needs to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.workload.config.values import ModelValues

SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_BY_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}  # in the words of DeepSeek's own config.json


@dataclass(frozen=True, slots=True)
class CompressedAttentionKeys:
    """What a layer sees beside its window: one key of every `rate` tokens, 0 for none; of these `top_k` at most for
    each query, which an indexer picks, 0 for all. Picked ones are each of two neighbouring stretches' tokens.
    """

    rate: int = 0
    top_k: int = 0

    @property
    def series(self) -> int:
        """Projections of a token that are compressed apart: of its own stretch, and for the next one's key."""
        return 2 if self.top_k else 1

    def entries(self, tokens: int) -> int:
        """Compressed keys of a sequence: stretches that are whole.

        >>> CompressedAttentionKeys(4).entries(15), CompressedAttentionKeys().entries(15)
        (3, 0)
        """
        return tokens // self.rate if self.rate else 0

    def pairs(self, tokens: int) -> int:
        """(query, key) pairs of one sequence: a query sees stretches that end at or before it.

        >>> CompressedAttentionKeys(4).pairs(9), CompressedAttentionKeys(4, top_k=1).pairs(9)
        (8, 6)
        """
        if not self.rate:
            return 0
        full = min(tokens, self.top_k * self.rate - 1) if self.top_k else tokens
        whole, more = divmod(full, self.rate)
        return self.rate * whole * (whole - 1) // 2 + whole * (more + 1) + (tokens - full) * self.top_k


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Queries through q_rank features; one key for all heads, which is its value, too; the output through out_rank
    features of each of out_groups groups of heads. rope_dim: features of a key, a query and the output that are turned.
    index_heads, index_dim: of what picks keys; nothing trains it here. layers: what each sees; keys: what one does.
    """

    q_rank: int
    out_groups: int
    out_rank: int
    rope_dim: int
    index_heads: int
    index_dim: int
    layers: tuple[CompressedAttentionKeys, ...] = ()
    keys: CompressedAttentionKeys = CompressedAttentionKeys()

    def at(self, layer: int) -> "CompressedAttention":
        """That of one layer."""
        return replace(self, layers=(), keys=self.layers[layer])


def read_compressed(v: ModelValues) -> CompressedAttention:
    """Raises PiperError (model): kinds of layers that do not go with the layers, sizes that do not divide."""
    v.divides("o_groups", v.size("num_attention_heads"), "num_attention_heads")
    dim, turned = v.size("head_dim"), v.get("qk_rope_head_dim")
    share = v.get("partial_rotary_factor")
    rope = turned if isinstance(turned, int) else int(dim * (share if isinstance(share, (int, float)) else 0.125))
    if not 0 < rope <= min(dim, v.size("index_head_dim")):
        name = "qk_rope_head_dim" if turned else "partial_rotary_factor"
        message = f"{rope} features are turned of {dim} of a head and {v.size('index_head_dim')} of the indexer's"
        v.refuse(name, message, allowed=f"1 to {min(dim, v.size('index_head_dim'))} features")
    rates, top = _rates(v), v.size("index_topk")
    layers = tuple(CompressedAttentionKeys(rates[kind], top if kind == SPARSE else 0) for kind in _kinds(v))
    indexer = v.size("index_n_heads"), v.size("index_head_dim")
    return CompressedAttention(v.size("q_lora_rank"), v.size("o_groups"), v.size("o_lora_rank"), rope, *indexer, layers)


def _kinds(v: ModelValues) -> Sequence[str]:
    """Of every layer. By ratios a list may go on: with a module's that predicts further tokens."""
    n, given = v.size("num_hidden_layers"), v.get("layer_types")
    if isinstance(given, (list, tuple)):
        key, kinds, allowed = "layer_types", list(given), f'{n} of "{SPARSE}", "{HEAVY}", "{WINDOW}"'
    elif isinstance(ratios := v.get("compress_ratios"), (list, tuple)):
        key, allowed = "compress_ratios", f"{n} of 0, 4, 128"
        kinds = [_BY_RATIO.get(r, str(r)) for r in ratios[:n]]
    else:
        return [HEAVY] * min(n, 2) + [SPARSE if i % 2 else HEAVY for i in range(max(n - 2, 0))]
    if len(kinds) != n or (odd := set(kinds) - {SPARSE, HEAVY, WINDOW}):
        told = f", of which {', '.join(sorted(map(str, odd)))} is none" if len(kinds) == n else ""
        v.refuse(key, f"{len(kinds)} kinds for {n} layers{told}", allowed=allowed)
    return kinds


def _rates(v: ModelValues) -> dict[str, int]:
    """Tokens of a compressed key, by kind of layer."""
    table = v.get("compress_rates")
    said = dict(table) if isinstance(table, dict) else {}
    found = {WINDOW: 0}
    for kind, short, usual in ((SPARSE, "csa", 4), (HEAVY, "hca", 128)):
        given = said.pop(kind, usual)
        rate = v.get(f"compress_rate_{short}") or given
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
            v.refuse("compress_rates", f"{rate!r} tokens for one key", allowed="a positive integer")
        found[kind] = rate
    if said:
        v.refuse("compress_rates", f"no kind of layer is called {min(said)!r}", allowed=f"{SPARSE}, {HEAVY}")
    return found
