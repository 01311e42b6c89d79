"""What of a model backward makes again: options of `[schedule] recompute`, and the layers they are true of."""

from collections.abc import Iterable
from dataclasses import dataclass

from ir.workload.part import Chunk

# What each whole-part recompute option runs again; the finer ones name tensors (`SavedBuffer.recompute`) instead.
WHOLE = {
    "attention": frozenset({"attn", "cross", "mixer"}),
    "mlp": frozenset({"mlp", "router", "shared", "experts", "add"}),
    "full": frozenset({"attn", "cross", "mixer", "mlp", "router", "shared", "experts", "add", "block"}),
}
NORMED = frozenset({"norm", "operators"})  # options that make outputs of norms again


@dataclass(frozen=True, slots=True)
class RecomputedLayers:
    """Options, and the decoder layers they are true of; None: all, and the modules behind them. early: whole layers run
    again up to the last value that backward reads, as by torch's checkpoint, and not to their end.

    >>> half = RecomputedLayers(frozenset({"full"}), frozenset({1, 3}))
    >>> sorted(half.of(Chunk("l1", (), {"L": 1}))), sorted(half.of(Chunk("l2", (), {"L": 2})))
    (['full'], [])
    """

    options: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    early: bool = False

    def of(self, chunk: Chunk) -> frozenset[str]:
        """The options that a chunk has."""
        return self.options if self.layers is None or chunk.tags.get("L") in self.layers else frozenset()

    def makes_norm(self, chunk: Chunk, part: str) -> bool:
        """Whether a part that keeps a norm's output makes that again, by itself."""
        return not self.of(chunk).isdisjoint(NORMED) and not self.whole(chunk, part)

    def ends_early(self, chunk: Chunk, part: str) -> bool:
        """Whether a part that runs again leaves its last product out: nobody reads what a layer hands on."""
        return self.early and chunk.parts[-1].name == part

    def whole(self, chunk: Chunk, part: str) -> bool:
        """Whether the whole forward of a chunk's part runs again."""
        layer = "L" in chunk.tags or chunk.name.startswith(("l", "mtp"))
        return layer and runs_again(part, self.of(chunk))


def runs_again(part: str, options: Iterable[str]) -> bool:
    """Whether a recompute option names this part of a layer; captured layers that differ are block, block2, …

    >>> runs_again("block2", ["full"]), runs_again("mlp", ["attention"]), runs_again("embed", ["full"])
    (True, False, False)
    """
    name = "block" if part.rstrip("0123456789") == "block" else part
    return any(name in WHOLE.get(o, ()) for o in options)
