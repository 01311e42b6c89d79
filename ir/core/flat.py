"""Tensors as one line of elements: how a bucket's parameters lie in it, and in what stretches it is updated."""

from collections.abc import Mapping

ALIGN_BYTES = 64  # the same kernel takes other paths, to other last bits, where a weight starts elsewhere


def places_in(numels: Mapping[str, int], narrowest: int) -> tuple[dict[str, slice], int]:
    """Where each parameter lies, each on a multiple of 64 bytes, and where the last one ends; all in elements.

    narrowest: bytes of an element in the narrowest format that such a tensor is kept in.

    >>> places_in({"a": 3, "b": 8}, 8)
    ({'a': slice(0, 3, None), 'b': slice(8, 16, None)}, 16)
    """
    step, out, end = ALIGN_BYTES // narrowest, {}, 0
    for name, numel in numels.items():
        start = -(-end // step) * step
        end = start + numel
        out[name] = slice(start, end)
    return out, end


LEAST_BLOCK, BLOCKS = 4096, 16


def update_blocks(numel: int) -> list[int]:
    """Sizes of the stretches in which a tensor is updated: a fused kernel needs no room of its own, these need little.

    >>> update_blocks(5000), len(update_blocks(10**6))
    ([4096, 904], 16)
    """
    size = max(LEAST_BLOCK, -(-numel // BLOCKS))
    return [min(size, numel - i) for i in range(0, numel, size)] or [0]
