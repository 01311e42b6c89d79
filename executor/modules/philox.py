"""The words of numpy's Philox generator, made on a GPU: first values of billions of parameters in seconds."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157  # of Philox4x64-10 (Salmon et al., SC'11)
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # what its two keys are raised by from round to round
ROUNDS = 10
LOW = 2**32 - 1
DRAWN = 2**24  # elements at a time


def words(key: int, starts: np.ndarray, counts: np.ndarray, device: torch.device) -> Iterator[Tensor]:
    """64 bits, as int64, for every element of these stretches of a parameter, about `DRAWN` of them at a time.

    The generator makes four words for each number it counts, numpy's first from 1.

    >>> (found,) = words(7, np.array([2]), np.array([4]), torch.device("cpu"))
    >>> np.array_equal(found.numpy().view(np.uint64), np.random.Philox(key=7).random_raw(6)[2:])
    True
    """
    for first, end in _pieces(starts, counts):
        low, high = (torch.as_tensor(x, device=device) for x in (first, end))
        block, last = low // 4, (high + 3) // 4
        sizes = last - block
        each = torch.repeat_interleave(block - torch.cumsum(sizes, 0) + sizes, sizes)
        each += torch.arange(len(each), device=device)
        made = torch.stack(_philox(each + 1, key), -1)
        if len(first) == 1:
            yield made.view(-1)[int(first[0] % 4) :][: int(end[0] - first[0])]
            continue
        at = 4 * each[:, None] + torch.arange(4, device=device)
        wanted = (at >= torch.repeat_interleave(low, sizes)[:, None]) & (
            at < torch.repeat_interleave(high, sizes)[:, None]
        )
        yield made[wanted]


def _pieces(starts: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The stretches, long ones cut and short ones together: firsts and ends, of about `DRAWN` elements."""
    firsts, ends, held = list[int](), list[int](), 0
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        for first in range(start, start + count, DRAWN):
            firsts.append(first)
            ends.append(min(first + DRAWN, start + count))
            held += ends[-1] - first
            if held >= DRAWN:
                yield np.array(firsts), np.array(ends)
                firsts, ends, held = [], [], 0
    if firsts:
        yield np.array(firsts), np.array(ends)


def _philox(counter: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of each number that is counted. Sums and products are those of unsigned numbers, to the bit."""
    zero = torch.zeros_like(counter)
    a, b, c, d = counter, zero, zero, zero
    keys = [key % 2**64, key >> 64]
    for _ in range(ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ _signed(keys[0]), low_c, high_a ^ d ^ _signed(keys[1]), low_a
        keys = [(k + w) % 2**64 for k, w in zip(keys, WEYL, strict=True)]
    return a, b, c, d


def _product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of x · by."""
    low, high, factor_low, factor_high = x & LOW, _upper(x), by & LOW, by >> 32
    cross, other = high * factor_low, low * factor_high
    middle = _upper(low * factor_low) + (cross & LOW) + (other & LOW)
    return high * factor_high + _upper(cross) + _upper(other) + _upper(middle), x * _signed(by)


def _upper(x: Tensor) -> Tensor:
    return (x >> 32) & LOW


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
