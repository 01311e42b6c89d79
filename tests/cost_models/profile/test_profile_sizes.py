"""What a profile says of sizes that were not measured: ops on power laws, messages on curves with knees."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.profile.fit import fit
from cost_models.profile.shapes import CostBySize, KernelShape, between, op_shapes
from ir.job.build import prepare
from ir.job.load import job_from

seconds = st.floats(1e-9, 1e3)


# -- other sizes ------------------------------------------------------------------------------------------------------


def sized(seconds: Callable[..., float], *grid: tuple[int, int, int]) -> list[CostBySize]:
    """Times on a grid of (tokens, sequences, ranks)."""
    names = ("seq_len", "sequences", "tp")
    return [
        CostBySize({**dict(zip(names, p, strict=True)), "sequence_parallel": int(p[2] > 1)}, seconds(*p), 0.0)
        for p in grid
    ]


def at(tokens: int, sequences: int = 1, tp: int = 1, divided: int | None = None) -> dict[str, int]:
    divided = int(tp > 1) if divided is None else divided
    return {"seq_len": tokens, "sequences": sequences, "tp": tp, "sequence_parallel": divided}


def linear(tokens: int, sequences: int, tp: int) -> float:
    return 1e-6 * tokens * sequences / tp


def attention(tokens: int, sequences: int, tp: int) -> float:
    return sequences * (1e-6 * tokens + 2.5e-10 * tokens**2) / tp


STAR = ((1024, 1, 1), (2048, 1, 1), (4096, 1, 1), (8192, 1, 1), (2048, 2, 1), (2048, 4, 1), (2048, 1, 2), (2048, 1, 8))


@pytest.mark.parametrize("law", [linear, attention])
@pytest.mark.parametrize("wanted", [(3000, 1, 1), (2048, 3, 1), (2048, 1, 4), (6000, 3, 4)])
def test_a_size_between_measured_ones_is_read_off_them(law: Callable[..., float], wanted: tuple[int, int, int]) -> None:
    found = between(sized(law, *STAR), at(*wanted))
    assert found is not None and found.inside
    assert found.seconds == pytest.approx(law(*wanted), rel=0.03)
    assert abs(found.seconds - law(*wanted)) <= found.spread_s + 1e-12, "the spread says how far it may be off"


def test_beyond_the_measured_sizes_it_says_so_and_the_spread_grows() -> None:
    known = sized(attention, *STAR)
    near, far = between(known, at(16384)), between(known, at(65536))
    assert near is not None and far is not None and not near.inside and not far.inside
    assert near.spread_s / near.seconds < far.spread_s / far.seconds
    doubtful = between(
        [CostBySize({"numel": n}, n / 1000, n / 1000 * x) for n, x in ((1000, 0.1), (4000, 0.3))], {"numel": 2000}
    )
    assert doubtful is not None and doubtful.spread_s == pytest.approx(0.3 * 2.0), (
        "on a straight line the larger of two"
    )
    for wanted, inside in (((8192,), True), ((512, 2), False), ((3000, 8), False), ((3000, 4), True)):
        found = between(known, at(*wanted))
        assert found is not None and found.inside == inside


def test_where_no_line_of_measurements_leads_nothing_is_said() -> None:
    assert between(sized(linear, (1024, 1, 1)), at(2048)) is None
    assert between(sized(linear, (1024, 1, 1), (2048, 2, 1)), at(2048)) is None, "two sizes changed at once"
    assert between(sized(linear, (1024, 1, 1), (2048, 1, 1)), {"numel": 2048}) is None
    assert between([], at(2048)) is None


def test_norms_divided_over_ranks_are_not_read_off_norms_that_are_not() -> None:
    divided = sized(linear, (1024, 1, 1), (1024, 1, 4))
    assert between(divided, at(1024, 1, 2, divided=1)) is not None
    assert between(divided, at(1024, 1, 2, divided=0)) is None


@given(
    st.lists(st.tuples(st.integers(1, 10**6), seconds, st.floats(0, 1)), min_size=2, max_size=6), st.integers(1, 10**6)
)
def test_what_is_read_off_is_a_time(points: list[tuple[int, float, float]], size: int) -> None:
    known = [CostBySize({"numel": n}, s, s * r) for n, s, r in {p[0]: p for p in points}.values()]
    found = between(known, {"numel": size})
    if found is not None:
        assert found.seconds >= 0 and found.spread_s >= 0
        exact = [k for k in known if k.at["numel"] == size]
        assert all(found.seconds == pytest.approx(k.seconds) for k in exact)


def test_the_same_part_of_another_size_is_of_the_same_family() -> None:
    def families(*sets: str) -> dict[str, KernelShape]:
        table = {"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}}
        g = prepare(job_from(table, sets)).plan().graph
        named = zip(g.nodes, op_shapes(g), strict=True)
        return {f"{n.kind}/{n.part}": s for n, s in named if s is not None}

    here = families()
    for change in ("model.seq_len=128", "schedule.microbatch_size=2", "parallel.tp=2"):
        there = families(change)
        assert all(there[k].family == s.family and there[k].at != s.at for k, s in here.items() if "/p" not in k)
    for change in ("model.hidden_size=128", "precision.compute=fp32", "schedule.recompute=full"):
        there = families(change)
        assert there["F/l0.attn"].family != here["F/l0.attn"].family
    updates = {k: s.at for k, s in here.items() if k.startswith("UPDATE")}
    assert updates and all(set(sizes) == {"numel"} for sizes in updates.values())


# -- curves with knees ------------------------------------------------------------------------------------------------

PROTOCOLS = ((8e-6, 1 / 15e9), (2.2e-5, 1 / 80e9), (9e-5, 1 / 360e9))  # latency, seconds per byte


def fastest(size: int) -> float:
    return min(a + b * size for a, b in PROTOCOLS)


def test_a_library_that_changes_its_protocol_gives_a_piece_for_each() -> None:
    curve = fit([(n, fastest(n)) for n in (2**k for k in range(10, 34))])
    assert len(curve.pieces) == 3 and curve.error < 0.01
    for piece, (alpha, beta) in zip(curve.pieces, PROTOCOLS, strict=True):
        assert piece.alpha_s == pytest.approx(alpha, rel=0.02) and piece.beta_s_per_byte == pytest.approx(
            beta, rel=0.02
        )
    assert curve.latency_s == pytest.approx(8e-6, rel=0.02) and curve.bytes_per_s == pytest.approx(360e9, rel=0.02)
    for size in (3000, 5 * 10**5, 3 * 10**6, 3 * 10**9):
        assert curve.seconds(size) == pytest.approx(fastest(size), rel=0.1)


def test_noise_makes_no_knee() -> None:
    rng = np.random.default_rng(0)
    points = [(n, (2e-5 + n / 1e11) * float(rng.uniform(0.95, 1.05))) for n in (2**k for k in range(10, 31))]
    assert len(fit(points).pieces) == 1


@given(st.lists(st.tuples(st.integers(1, 10**9), seconds), min_size=2, max_size=14, unique_by=lambda p: p[0]))
def test_a_curve_is_continuous_and_as_wrong_as_it_says(points: list[tuple[int, float]]) -> None:
    curve = fit(points)
    worst = max(abs(curve.seconds(n) / t - 1) for n, t in points)
    assert curve.error == pytest.approx(worst)
    for a, b in pairwise(curve.pieces):
        assert a.last < b.first
        middle = curve.seconds((a.last + b.first) // 2)
        ends = sorted((curve.seconds(a.last), curve.seconds(b.first)))
        assert ends[0] - 1e-12 <= middle <= ends[1] + 1e-12
