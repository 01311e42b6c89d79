"""Intervals hold what they say; likeness; room in memory by how far off runs like it were."""

import pytest
from msgspec import structs

from piper_sim.study import sure

LIKE = sure.PredictionTraits("h100-sxm", "nemo", moe=False, given=False, waits=False)
GIB = 2**30


def published(of):
    rows = [r for r in sure.residuals() if getattr(r, of) is not None]
    assert len(rows) > 200
    return rows


def held(asked, found, of, share=0.1):
    """Share of rows in the middle of what is `found` of them."""
    each = ((getattr(r, of), f) for r, f in zip(asked, found, strict=True))
    return sum(sure.quantile(f, share) <= x <= sure.quantile(f, 1 - share) for x, f in each) / len(asked)


@pytest.mark.parametrize("of", ["time", "memory"])
def test_four_fifths_of_held_out_rows_lie_in_their_interval(of):
    rows = published(of)
    known, asked = rows[::2], rows[1::2]
    found = [sure.weighted(r.traits, known, of) for r in asked]
    assert 0.73 < held(asked, found, of) < 0.87
    # Negative control: half of the width holds clearly less.
    assert held(asked, found, of, 0.3) < 0.6


def bare(found):
    """Without the job itself."""
    return [[(x, w / (1 - 2 * f[0][1])) for x, w in f[1:-1]] for f in found]


@pytest.mark.parametrize("apart", ["table", "publisher"])
@pytest.mark.parametrize("of", ["time", "memory"])
def test_so_do_those_of_a_table_and_of_a_publisher_that_nobody_has_seen(of, apart):
    rows = published(of)

    def told(known):
        far = ([o for o in known if getattr(o, apart) != getattr(r, apart)] for r in rows)
        return [sure.weighted(r.traits, some, of) for r, some in zip(rows, far, strict=True)]

    # Nanotron's peaks are five times as far off as those of all five other tables, and nothing says so before.
    share = held(rows, found := told(rows), of)
    assert 0.73 < share < 0.87
    # Negative controls: by tables instead of publishers they hold fewer times; without the job itself, fewer peaks.
    if of == "memory":
        assert held(rows, bare(found), of) < share - 0.01
    elif apart == "table":
        assert held(rows, told([structs.replace(o, publisher=o.table) for o in rows]), of) < share - 0.02


def test_rows_unlike_the_job_count_less():
    far = sure.PredictionTraits("a100-sxm-80gb", "nanotron", moe=False, given=False, waits=False)
    rows = [sure.PublishedPrediction(x, x, t, m, None) for x, t, m in (("a", LIKE, 1.0), ("b", far, 2.0))]
    (_, low), (_, near), (_, other), (_, high) = sure.weighted(LIKE, rows)
    assert near == pytest.approx(8 * other) and near + other + low + high == pytest.approx(1)
    # One more row of a table of 1 + 1/8.
    assert low == high and low + high == pytest.approx(near / 2.125**0.5)
    assert sure.interval(2.0, LIKE) == [2 * x for x in sure.interval(1.0, LIKE)]


def test_a_publisher_of_many_rows_counts_as_the_root_of_their_number():
    """In one table or in several: what nobody told of its machines is in all of them."""
    one = sure.PublishedPrediction("a", "lab", LIKE, 1.0, None)
    other = sure.PublishedPrediction("a", "group", LIKE, 2.0, None)
    for tables in ("aaaa", "abcd"):
        found = sure.weighted(LIKE, [*(structs.replace(one, table=t) for t in tables), other])[1:-1]
        assert sum(w for x, w in found if x == 1) == pytest.approx(2 * found[-1][1])


def test_less_room_is_less_likely_to_do():
    chances = [sure.fits_probability(60 * GIB, 62 * GIB, room * GIB, LIKE) for room in (40, 58, 62, 66, 100)]
    assert chances == sorted(chances) and chances[0] < 0.1 < 0.9 < chances[-1] < 1


def test_what_is_far_from_the_limit_is_hardly_doubted():
    """One row more says nothing of an error of 38 times: the chance was 96 %, whatever the room."""
    small = [sure.fits_probability(GIB, 2 * GIB, room * GIB, LIKE) for room in (3, 10, 80)]
    assert small == sorted(small) and 0.999 < small[-1] < 1
    assert sure.fits_probability(400 * GIB, 402 * GIB, 80 * GIB, LIKE) < 0.02
    rows = sure.weighted(LIKE, sure.residuals(), "memory")
    farthest = rows[-1][0]  # just beyond it, half of the job's own weight does not fit
    assert sure.fits_probability(GIB, GIB, int(farthest * GIB) + 1, LIKE) < 1 - rows[-1][1] / 2
