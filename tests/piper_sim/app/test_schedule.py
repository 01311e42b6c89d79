"""`piper-sim schedule` as the contract has it: names, shapes, times, keys, limits."""

import re
from typing import Any

import pytest

from ir.job import load_job
from piper_sim import predict

KEYS = {
    "schema_version": int,
    "schedule": str,
    "ranks": int,
    "microbatches": int,
    "chunks": int,
    "order_depends_on_times": bool,
    "order": dict,
    "makespan": float,
    "busy": dict,
    "bubble_fraction": float,
    "span_bubble_fraction": float,
    "peak_inflight": dict,
    "param_copies": float,
}
# name: (legal chunks, default)
CHUNKS = {
    "gpipe": ({1}, 1),
    "1f1b": ({1}, 1),
    "interleaved-1f1b": ({2, 3, 4}, 2),
    "1f1b-overlap": ({1}, 1),
    "interleaved-1f1b-overlap": ({2, 3, 4}, 2),
    "looped-bfs": ({2, 3, 4}, 2),
    "zb1p": ({1, 2, 3, 4}, 1),
    "zb2p": ({1}, 1),
    "zbv": ({2}, 2),
    "v-half": ({2}, 2),
    "v-min": ({2}, 2),
    "dualpipe": ({1}, 1),
    "dualpipev": ({2}, 2),
}
V_SHAPES = ("zbv", "v-half", "v-min", "dualpipev")
SEARCHED = ("zb2p", "v-half", "v-min")
CELL = re.compile(r"\d+[FBIW]\d+|\((\d+[FBIW]\d+;)+\d+[FBIW]\d+\)OVERLAP_F_B")


def run(cli: Any, name: str, ranks: int, mbs: int, *flags: object) -> dict[str, Any]:
    result = cli("schedule", name, "--ranks", ranks, "--microbatches", mbs, *flags)
    assert result.code == 0, result.out
    found: dict[str, Any] = result.json
    return found


def actions(cell: str) -> list[tuple[int, str, int]]:
    return [(int(s), k, int(m)) for s, k, m in re.findall(r"(\d+)([FBIW])(\d+)", cell)]


@pytest.mark.parametrize("name", CHUNKS)
def test_every_schedule_prints_every_key_with_its_type(cli: Any, name: str) -> None:
    found = run(cli, name, 4, 8)
    assert list(found) == list(KEYS)
    for key, kind in KEYS.items():
        assert isinstance(found[key], (float, int) if kind is float else kind), key
    assert found["schedule"] == name and found["chunks"] == CHUNKS[name][1]
    assert found["order_depends_on_times"] is (name in SEARCHED)
    for key in ("order", "busy", "peak_inflight"):
        assert list(found[key]) == ["0", "1", "2", "3"]
    assert all(CELL.fullmatch(c) for row in found["order"].values() for c in row)
    assert found["param_copies"] == (2 if name == "dualpipe" else 1)
    total = sum(found["busy"].values())
    assert found["bubble_fraction"] == pytest.approx(1 - total / (4 * found["makespan"]), abs=1e-12)
    assert 0 <= found["span_bubble_fraction"] < 1


@pytest.mark.parametrize(("mbs", "copies"), [(1, 1), (2, 2), (3, 2)])
def test_a_direction_without_a_microbatch_holds_no_parameters(cli: Any, mbs: int, copies: int) -> None:
    assert run(cli, "dualpipe", 2, mbs)["param_copies"] == copies
    job = {"model": {"config": "tiny-llama"}, "parallel": {"pp": 2}, "schedule": {"name": "1f1b", "microbatches": mbs}}
    once, held = (
        predict(load_job({**job, "schedule": {**job["schedule"], "name": name}})).memory["parameters"].sum()
        for name in ("1f1b", "dualpipe")
    )
    assert held == copies * once


@pytest.mark.parametrize("name", CHUNKS)
def test_each_pass_stands_once_on_the_rank_that_the_contract_names(cli: Any, name: str) -> None:
    ranks, mbs = 4, 7
    found = run(cli, name, ranks, mbs)
    stages = ranks * found["chunks"]
    seen: dict[tuple[int, int], str] = {}
    for rank, row in found["order"].items():
        for stage, kind, mb in (a for cell in row for a in actions(cell)):
            home = stage % ranks
            if name in V_SHAPES:
                home = stage if stage < ranks else 2 * ranks - 1 - stage
            if name == "dualpipe" and mb >= (mbs + 1) // 2:
                home = ranks - 1 - stage
            assert int(rank) == home, f"{stage}{kind}{mb} on rank {rank}"
            seen[stage, mb] = seen.get((stage, mb), "") + kind
    assert set(seen) == {(s, m) for s in range(stages) for m in range(mbs)}
    assert {"".join(sorted(k)) for k in seen.values()} <= {"BF", "FIW"}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(("ranks", "mbs"), [(1, 1), (1, 3), (2, 1), (4, 2), (4, 3), (3, 4)])
def test_any_shape_runs_but_odd_ranks_for_dualpipe(cli: Any, name: str, ranks: int, mbs: int) -> None:
    result = cli("schedule", name, "--ranks", ranks, "--microbatches", mbs)
    if name == "dualpipe" and ranks % 2:
        assert result.code == 2
        assert result.error["kind"] == "usage" and result.error["key"] == "--ranks"
        assert "dualpipev" in result.error["suggestion"]
        return
    found = result.json
    # F = I = W = 1: every rank does 3 of work per chunk and microbatch, whatever the order.
    assert sum(found["busy"].values()) == 3 * found["chunks"] * ranks * mbs
    assert found["makespan"] >= 3 * found["chunks"] * mbs


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("chunks", [-1, 0, 1, 2, 3, 4])
def test_chunks_are_those_of_the_contract(cli: Any, name: str, chunks: int) -> None:
    result = cli("schedule", name, "--ranks", 4, "--microbatches", 4, "--chunks", chunks)
    if chunks in CHUNKS[name][0]:
        assert result.json["chunks"] == chunks
    else:
        assert result.code == 2 and result.error["key"] == "--chunks"
        assert result.error["suggestion"].startswith(str(CHUNKS[name][1]))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("vpp", "interleaved-1f1b"),
        ("interleaved", "interleaved-1f1b"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("zb-h1", "zb1p"),
        ("ZB_H2", "zb2p"),
        ("zero-bubble-v", "zbv"),
        ("ZBVZeroBubble", "zbv"),
        ("ScheduleDualPipeV", "dualpipev"),
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("LoopedBFS", "looped-bfs"),
        ("V-Min", "v-min"),
    ],
)
def test_aliases_print_the_canonical_name(cli: Any, alias: str, name: str) -> None:
    assert run(cli, alias, 2, 4)["schedule"] == name


@pytest.mark.parametrize(("ranks", "mbs", "f", "b"), [(4, 8, 1, 2), (3, 5, 2, 3), (1, 4, 1, 1), (4, 2, 1, 2)])
def test_gpipe_and_1f1b_meet_the_closed_form(cli: Any, ranks: int, mbs: int, f: int, b: int) -> None:
    for name in ("gpipe", "1f1b"):
        found = run(cli, name, ranks, mbs, "--times", f"F={f},B={b}")
        assert found["makespan"] == (mbs + ranks - 1) * (f + b)
        assert found["busy"]["0"] == mbs * (f + b)
        assert found["bubble_fraction"] == pytest.approx((ranks - 1) / (mbs + ranks - 1))
    peaks = run(cli, "1f1b", ranks, mbs)["peak_inflight"]
    assert peaks == {str(r): min(ranks - r, mbs) for r in range(ranks)}
    assert set(run(cli, "gpipe", ranks, mbs)["peak_inflight"].values()) == {mbs}


def test_a_transfer_costs_latency_but_no_busy_time(cli: Any) -> None:
    plain, late = run(cli, "1f1b", 2, 4), run(cli, "1f1b", 2, 4, "--times", "p2p=0.25")
    assert late["busy"] == plain["busy"]
    assert late["makespan"] == plain["makespan"] + 0.25 * 2 * 2  # the pair of transfers at the fill and around the turn


def test_times_are_exact_as_written(cli: Any) -> None:
    found = run(cli, "1f1b", 2, 3, "--times", "F=0.1,B=0.2")
    assert found["makespan"] == 1.2 and found["busy"] == {"0": 0.9, "1": 0.9}


def test_b_alone_is_halved_and_a_missing_half_is_the_rest(cli: Any) -> None:
    halves = run(cli, "zb1p", 2, 4, "--times", "F=1,B=3")
    assert halves == run(cli, "zb1p", 2, 4, "--times", "F=1,I=1.5,W=1.5")
    assert run(cli, "zb1p", 2, 4, "--times", "B=3,I=1") == run(cli, "zb1p", 2, 4, "--times", "I=1,W=2")


def test_fb_is_the_duration_of_a_fused_pair(cli: Any) -> None:
    slow, fast = run(cli, "dualpipe", 4, 12), run(cli, "dualpipe", 4, 12, "--times", "FB=2")
    pairs = sum("OVERLAP" in cell for cell in slow["order"]["0"])
    assert pairs and fast["busy"]["0"] == slow["busy"]["0"] - pairs
    assert fast["makespan"] < slow["makespan"]


def test_w_memory_gives_activations_back_early(cli: Any) -> None:
    whole = run(cli, "zb1p", 4, 8)["peak_inflight"]["3"]
    part = run(cli, "zb1p", 4, 8, "--w-memory", "0.5")["peak_inflight"]["3"]
    none = run(cli, "zb1p", 4, 8, "--w-memory", "0")["peak_inflight"]["3"]
    assert none == 1 < part < whole == 4


def test_rendezvous_is_no_faster_than_buffered(cli: Any) -> None:
    for name in ("1f1b", "interleaved-1f1b", "dualpipev"):
        flags = ("--times", "p2p=0.5")
        buffered = run(cli, name, 4, 8, *flags)
        meet = run(cli, name, 4, 8, *flags, "--p2p-mode", "rendezvous")
        assert meet["makespan"] >= buffered["makespan"] and meet["order"] == buffered["order"]


BAD_TIMES = """
F=-1 F=nan F=inf F=x F F= f=1 Q=1 F=1,F=2 B=3,I=1,W=1 B=1,W=2 FB=0.5 F=1;B=2 I=-0.5 p2p=-1 F=1,,B=2
F=1e400 F=1e-400 F=1e99999999 B=1E+999999999 F=1e308,B=1e308 F=1e16
"""


@pytest.mark.parametrize("times", BAD_TIMES.split())
def test_bad_times_exit_2_and_name_the_flag(cli: Any, times: str) -> None:
    result = cli("schedule", "1f1b", "--ranks", 2, "--microbatches", 3, "--times", times)
    assert result.code == 2 and result.error["kind"] == "usage" and result.error["key"] == "--times"


@pytest.mark.parametrize("share", ["-0.1", "1.5", "nan", "inf", "x"])
def test_w_memory_is_a_share(cli: Any, share: str) -> None:
    result = cli("schedule", "zb1p", "--ranks", 2, "--microbatches", 3, "--w-memory", share)
    assert result.code == 2 and result.error["key"] == "--w-memory"


@pytest.mark.parametrize(
    ("ranks", "mbs", "flags", "key"),
    [
        (4, 10**9, (), "--microbatches"),
        (10**9, 4, (), "--ranks"),
        (10**25, 4, (), "--ranks"),
        (4, 4, ("--chunks", 10**9), "--ranks"),
        (0, 4, (), "--ranks"),
        (-2, 4, (), "--ranks"),
        (4, 0, (), "--microbatches"),
        (4, -1, (), "--microbatches"),
    ],
)
def test_no_shape_eats_memory(cli: Any, ranks: int, mbs: int, flags: tuple[object, ...], key: str) -> None:
    name = "interleaved-1f1b" if flags else "1f1b"
    result = cli("schedule", name, "--ranks", ranks, "--microbatches", mbs, *flags)
    assert result.code == 2 and result.error["kind"] == "usage" and result.error["key"] == key


def test_the_limit_leaves_64_ranks_and_1024_microbatches() -> None:
    from ir.core.limits import check_passes

    check_passes(64, 1024)
    check_passes(5 * 64, 1024)


def test_a_typo_is_answered_with_the_nearest_name(cli: Any) -> None:
    result = cli("schedule", "dualpip", "--ranks", 4, "--microbatches", 8)
    assert result.code == 2 and result.error["suggestion"] == "dualpipe" and result.error["key"] == "NAME"
    assert "v-min" in result.error["allowed"]


def test_the_text_names_makespan_and_lanes(cli: Any) -> None:
    result = cli("schedule", "1f1b", "--ranks", 2, "--microbatches", 2, as_json=False)
    assert result.code == 0 and "makespan            9" in result.out
