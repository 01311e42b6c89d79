"""Made-up counts keep their promises for any size; recorded ones are taken as they are, or refused by name and line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.job.routing import ExpertCounts, check_routing
from ir.job.routing.described import hot, ranking, spread, zipf
from ir.job.routing.recorded import FORM
from ir.job.schema import JobRouting as RoutingKeys
from piper_sim import load_job, predict
from piper_sim.pricing.routing import routing_of
from tests.piper_sim.pricing.routed import HW, job, made, routing
from tests.refusals import refusal

DATA = Path(__file__).parents[2] / "data"
KINDS = {"zipf": zipf, "hot": hot}
SIZES = st.integers(1, 64).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e), st.integers(0, 5000)))


@given(SIZES, st.sampled_from(["zipf", "hot"]), st.one_of(st.floats(1, 8), st.sampled_from([1.0, 1e3, 1e6])))
def test_counts_sum_exactly_fall_with_popularity_and_send_no_token_twice(
    size: tuple[int, int, int], kind: str, strength: float
) -> None:
    experts, top_k, tokens = size
    found = spread(KINDS[kind](experts, strength), tokens, top_k)
    assert found.sum() == tokens * top_k
    assert found.min() >= 0 and found.max() <= tokens
    assert (np.diff(found) <= 0).all()


@given(SIZES, st.floats(0, 3))
def test_counts_are_within_one_of_the_popularity_where_no_cap_binds(
    size: tuple[int, int, int], strength: float
) -> None:
    experts, top_k, tokens = size
    weight = np.arange(1, experts + 1) ** -strength
    exact = tokens * top_k * weight / weight.sum()
    found = spread(zipf(experts, strength), tokens, top_k)
    if exact[0] <= tokens:
        assert (abs(found - exact) < 1 + 1e-9).all()
    else:
        assert found[0] == tokens


@given(st.floats(1, 6))
def test_the_hot_expert_takes_strength_times_the_mean_of_the_others(strength: float) -> None:
    found = spread(hot(64, strength), 65_536, 8)
    assert found[0] / found[1:].mean() == pytest.approx(strength, rel=1e-3)
    assert np.ptp(found[1:]) <= 1


def test_more_hot_is_never_less_of_the_hot_one() -> None:
    taken = [int(spread(hot(8, s), 100, 2)[0]) for s in np.linspace(1, 20, 200)]
    assert taken == sorted(taken) and taken[0] == 25 and taken[-1] == 100


def test_layers_have_their_own_order_which_the_seed_decides_and_all_sources_agree() -> None:
    prepared, plan = made(job())
    one, two, again = (routing(prepared, plan, kind="zipf", seed=s).counts for s in (1, 2, 1))
    assert one.layers == (0, 1, 2, 3) and one.cases == 1
    assert (one.rows == again.rows).all() and (one.rows != two.rows).any()
    assert not (one.tokens(0)[0] == one.tokens(1)[0]).all()
    assert (one.tokens(2) == one.tokens(2)[0]).all() and one.tokens(2, mb=3).shape == (8, 8)
    assert ranking(8, 3, 5).tolist() == [6, 0, 4, 1, 5, 7, 2, 3]  # as `sha256sum` and `sort` have it


def test_balanced_is_left_to_the_cost_model() -> None:
    prepared, plan = made(job())
    assert routing_of(prepared, plan.graph, HW) is None


def read(path: Path | str, **sections: Any) -> ExpertCounts:
    prepared, plan = made(job(file=str(DATA / "job.toml"), routing={"kind": "file", "file": str(path)}, **sections))
    found = routing_of(prepared, plan.graph, HW)
    assert found is not None
    return found.counts


def test_a_file_beside_the_job_holds_for_every_source_and_microbatch_that_it_does_not_name() -> None:
    found = read("routing_tiny_moe.csv")
    assert found.layers == (0, 1, 2, 3) and found.cases == 1 and len(found.rows) == 4
    assert found.tokens(2, mb=1).tolist() == [[512, 200, 112, 80, 50, 40, 30, 0]] * 8


def table(layers: int = 4, mbs: int = 4, sources: int = 8) -> list[list[int]]:
    """Rows of a whole file for tiny-moe: 512 tokens, 8 experts, top-2."""
    rng = np.random.default_rng(3)
    out = []
    for layer in range(layers):
        for mb in range(mbs):
            for s in range(sources):
                counts = rng.permutation([512, 256, 128, 64, 32, 16, 8, 8])
                out += [[layer, mb, s, e, int(t)] for e, t in enumerate(counts)]
    return out


def write(tmp_path: Path, rows: list[list[Any]], head: str = "layer,microbatch,source,expert,tokens") -> Path:
    path = tmp_path / "counts.csv"
    path.write_text("\n".join([head, *(",".join(map(str, r)) for r in rows)]) + "\n", encoding="utf-8")
    return path


def test_every_count_of_a_whole_file_is_taken(tmp_path: Path) -> None:
    rows = table()
    found = read(write(tmp_path, rows))
    assert found.cases == 4
    dense = np.array([[found.tokens(layer, mb) for mb in range(4)] for layer in range(4)])
    assert all(dense[layer, mb, s, e] == t for layer, mb, s, e, t in rows) and dense.sum() == 4 * 4 * 8 * 1024
    shuffled = [[e, t, layer, s, mb] for layer, mb, s, e, t in reversed(rows)]
    again = read(write(tmp_path, shuffled, "expert,tokens,layer,source,microbatch"))
    assert all((again.tokens(layer, mb) == dense[layer, mb]).all() for layer in range(4) for mb in range(4))


def refused(path: Path, **sections: Any) -> PiperError:
    e = refusal(read, path, **sections)
    assert e.key == "routing.file" and e.file == str(path)
    return e


@pytest.mark.parametrize(
    ("row", "column", "value", "says", "fix"),
    [
        (5, 0, 4, "line 7: layer 4 has no experts", "layer 3"),
        (5, 1, 4, "line 7: microbatch 4", "microbatch 3"),
        (9, 2, 8, "line 11: source 8", "source 7"),
        (9, 3, -1, "line 11: expert -1", "expert 0"),
        (9, 4, -2, "line 11: -2 tokens", None),
        (0, 4, "x", "line 2: tokens is 'x'", None),
        (0, 4, "1.0", "line 2: tokens is '1.0'", None),
        (0, 4, "", "line 2: tokens is ''", None),
        (0, 4, "9" * 30, "line 2: tokens is '9", None),
        (1, 3, 0, "line 3: this count stands there already", "drop one of the lines"),
    ],
)
def test_a_bad_cell_is_named_by_its_line(
    tmp_path: Path, row: int, column: int, value: Any, says: str, fix: str | None
) -> None:
    rows: list[list[Any]] = table()
    rows[row][column] = value
    e = refused(write(tmp_path, rows))
    assert e.kind is ErrorKind.JOB and e.message.startswith(says), e
    assert e.suggestion == fix


def test_sums_and_caps_are_checked(tmp_path: Path) -> None:
    rows = table()
    rows[8 * 9 + 2][4] += 3  # layer 0, microbatch 1, source 1
    e = refused(write(tmp_path, rows))
    assert "the counts of layer 0, microbatch 1, source 1 sum to 1027" in e.message and "line 74" in e.message
    assert e.allowed is not None and "1024" in e.allowed and e.suggestion == "-3 tokens"
    rows = [[layer, e, t] for layer in range(4) for e, t in enumerate((600, 424))]
    e = refused(write(tmp_path, rows, "layer,expert,tokens"))
    assert e.message == "line 2: 600 tokens to one expert, but the source has 512" and e.allowed == "0 to 512"


def test_a_layer_that_is_not_there_a_dense_layer_and_mtp(tmp_path: Path) -> None:
    rows = [[layer, e, 128] for layer in range(3) for e in range(8)]
    e = refused(write(tmp_path, rows, "layer,expert,tokens"))
    assert e.message == "layer 3 is not there" and e.allowed == "layers 0 to 3"
    dense = {"config": "tiny-moe", "mlp_only_layers": [0, 2]}
    e = refused(write(tmp_path, rows, "layer,expert,tokens"), model=dense)
    assert e.message.startswith("line 2: layer 0 has no experts") and e.allowed == "layers 1, 3"


@pytest.mark.parametrize(
    ("head", "says", "fix"),
    [
        ("layer,expert,token", "line 1: unknown column 'token'", "tokens"),
        ("layer,expert", "line 1: no column 'tokens'", "layer,microbatch,source,expert,tokens"),
        ("layer,layer,expert,tokens", "line 1: column 'layer' stands there twice", None),
        ("layer,expert,source,tokens", "line 2: 3 cells under 4 columns", "layer,expert,source,tokens"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, head: str, says: str, fix: str | None) -> None:
    e = refused(write(tmp_path, [[0, 0, 512]], head))
    assert e.message == says and (fix is None or e.suggestion == fix)


def test_files_that_are_none(tmp_path: Path) -> None:
    e = refused(tmp_path / "none.csv")
    assert e.kind is ErrorKind.IO and "No such file" in e.message
    e = refused(write(tmp_path, []))
    assert e.message == "no counts"
    (tmp_path / "bin.csv").write_bytes(b"\xff\xfe\x00")
    refusal(read, tmp_path / "bin.csv", match="line 1: not UTF-8")


@pytest.mark.parametrize(
    ("keys", "key", "fix"),
    [
        ({"kind": "file"}, "routing.file", 'routing.file = "tokens.csv"'),
        ({"kind": "zipf", "file": "x.csv"}, "routing.kind", 'routing.kind = "file"'),
        ({"kind": "zipf", "strength": -1.5}, "routing.strength", "strength = 0"),
        ({"kind": "hot", "strength": 0.5}, "routing.strength", "strength = 1"),
        ({"kind": "hot", "strength": 1e9}, "routing.strength", "strength = 1e+06"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], key: str, fix: str) -> None:
    prepared, _ = made(job())
    e = refusal(check_routing, replace(job(), routing=RoutingKeys(**keys)), prepared.config)
    assert (e.kind, e.key, e.suggestion, e.file) == (ErrorKind.JOB, key, fix, "job")


def test_a_model_without_experts_has_no_routing() -> None:
    prepared, _ = made(job("tiny-llama", parallel={"ep": 1}))
    refusal(check_routing, job(routing={"kind": "zipf"}), prepared.config, match="no layer of tiny-llama has experts")
    check_routing(job(), prepared.config)


def test_more_experts_than_are_counted_one_by_one_are_refused_where_routing_is_uneven() -> None:
    model = {"config": "tiny-moe", "seq_len": 64, "num_experts": 2**31}  # a typo, which took all memory
    assert predict(load_job({"model": model})).iteration_s > 0
    e = refusal(predict, load_job({"model": model, "routing": {"kind": "zipf"}}))
    assert (e.kind, e.key, e.suggestion) == (
        ErrorKind.JOB,
        "routing.kind",
        'routing.kind = "balanced"',
    )


def test_too_many_counts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ir.job.routing.recorded.LIMIT_COUNTS", 100)
    assert refused(write(tmp_path, table())).suggestion == "leave out the column source or microbatch"
    monkeypatch.setattr("ir.job.routing.recorded.FORM", replace(FORM, most=100))
    assert "too large" in refused(write(tmp_path, table())).message
