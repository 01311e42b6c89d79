"""Rounding rules, and the band around reserved memory."""

import pytest

from cost_models import load_hardware
from cost_models.allocator.bands import (
    context_bytes,
    replayed_band,
    reserved_bytes,
    segment_bytes,
)

H100, B200 = load_hardware("h100-sxm"), load_hardware("b200-sxm")
MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    "asked, segment", [(0, 0), (1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 1, 20), (10 * MIB, 10), (10 * MIB + 1, 12)]
)
def test_segments_follow_the_allocators_thresholds(asked: int, segment: int) -> None:
    assert segment_bytes(asked) == segment * MIB


# (allocated, reserved) MiB of rank 0 in SimuMax's B200 runs (simumax_b200_measured.csv), the first, second and fourth.
@pytest.mark.parametrize("allocated, reserved", [(68149, 70730), (62136, 63914), (28965, 29816), (46726, 49942)])
def test_measured_reserves_lie_in_the_band(allocated: int, reserved: int) -> None:
    band = reserved_bytes(allocated * MIB, B200)
    assert band.low <= reserved * MIB <= band.high
    assert abs(band.middle / (reserved * MIB) - 1) < 0.05


def test_the_band_is_ordered_and_above_allocated() -> None:
    band = reserved_bytes(10 * GIB, H100)
    assert 10 * GIB <= band.low <= band.middle <= band.high
    assert reserved_bytes(0, H100).high == 0


def test_a_replay_lies_between_the_better_mode_and_its_allowance() -> None:
    band = replayed_band(30 * GIB, 28 * GIB, 27 * GIB, H100)
    assert (band.low, band.middle) == (28 * GIB, 30 * GIB)
    assert band.high - band.middle == segment_bytes(int(27 * GIB * 0.08)), "the upper end of what is measured"
    assert replayed_band(28 * GIB, 30 * GIB, 27 * GIB, H100).low == 28 * GIB


def test_where_nothing_caches_the_replay_does_not_count() -> None:
    cpu = load_hardware("cpu")
    assert replayed_band(30 * GIB, 28 * GIB, 27 * GIB, cpu) == reserved_bytes(27 * GIB, cpu)


def test_communicators_add_to_the_context() -> None:
    assert context_bytes(H100, 0) == 522 * MIB
    assert context_bytes(H100, 3) - context_bytes(H100, 2) == 512 * MIB


@pytest.mark.parametrize("call", [lambda: reserved_bytes(-1, H100), lambda: context_bytes(H100, -1)])
def test_negative_amounts_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="-1"):
        call()
