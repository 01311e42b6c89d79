"""Intervals hold what they say; likeness; room in memory by how far off runs like it were."""

import pytest

from piper_sim.study.sure import (
    PredictionTraits,
    PublishedPrediction,
    fits_probability,
    interval,
    quantile,
    residuals,
    weighted,
)

LIKE = PredictionTraits("h100-sxm", "nemo", moe=False, given=False, waits=False)
GIB = 2**30


def held(rows, known, share=0.1):
    found = [weighted(r.traits, known) for r in rows]
    return sum(quantile(f, share) <= r.time <= quantile(f, 1 - share) for r, f in zip(rows, found, strict=True))


def test_four_fifths_of_held_out_rows_lie_in_their_interval():
    rows = [r for r in residuals() if r.time is not None]
    assert len(rows) > 200
    known, asked = rows[::2], rows[1::2]
    assert 0.73 < held(asked, known) / len(asked) < 0.87
    # Negative control: half of the width holds clearly less.
    assert held(asked, known, 0.3) / len(asked) < 0.6


def test_rows_unlike_the_job_count_less():
    far = PredictionTraits("a100-sxm-80gb", "nanotron", moe=False, given=False, waits=False)
    rows = [PublishedPrediction("a", LIKE, 1.0, None), PublishedPrediction("b", far, 2.0, None)]
    (_, near), (_, other) = weighted(LIKE, rows)
    assert near == pytest.approx(8 * other) and near + other == pytest.approx(1)
    assert interval(2.0, LIKE) == [2 * x for x in interval(1.0, LIKE)]


def test_less_room_is_less_likely_to_do():
    chances = [fits_probability(60 * GIB, 62 * GIB, room * GIB, LIKE) for room in (40, 58, 62, 66, 100)]
    assert chances == sorted(chances) and chances[0] < 0.1 < 0.9 < chances[-1] < 1
