"""Pictures: the same bytes for the same trace, at any size."""

import io

import pytest

from ir.trace.trace import MemorySamples, Trace
from piper_sim.report import picture
from piper_sim.report.picture import timeline_png


def png(trace: Trace, title: str = "1F1B") -> bytes:
    out = io.BytesIO()
    timeline_png(trace, out, title)
    return out.getvalue()


def pixels(data: bytes) -> tuple[int, int]:
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_same_trace_gives_the_same_bytes(make_trace) -> None:
    first, second = (png(make_trace(mbs=4, comm=True)) for _ in range(2))
    assert first == second
    assert b"Software" not in first


@pytest.mark.parametrize("as_image", [False, True])
def test_lanes_can_be_boxes_or_images(make_trace, monkeypatch: pytest.MonkeyPatch, as_image: bool) -> None:
    monkeypatch.setattr(picture, "_MOST_BOXES", 0 if as_image else 10**9)
    width, height = pixels(png(make_trace(ranks=2, mbs=64, comm=True)))
    assert (width, height) > (1000, 200)


def test_64_ranks_stay_a_picture_one_can_open(make_trace) -> None:
    width, height = pixels(png(make_trace(ranks=64, mbs=8, comm=True)))
    assert width == 2560
    assert height < 6000


def test_titles_are_no_formulas_and_ops_may_be_fused_or_missing() -> None:
    rows = [(0, 0, "compute", "(0F7;7B3)OVERLAP_F_B", 0, 0, 2), (0, 1, "dp", "2RS", 1, 1, 1)]
    assert png(Trace.of({}, rows, MemorySamples.of([(5, 0.0, 0)])), "costs $x_{$ and $\\frac")
    assert png(Trace.of({}, []), "nothing")
