"""`piper-sim compare` and `piper-sim plan` as the contract has them."""

import json
from pathlib import Path
from typing import Any

import pytest

SIX = {"1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev"}
DEFAULTS = {"1f1b": 1, "interleaved-1f1b": 2, "zb1p": 1, "zbv": 2, "dualpipe": 1, "dualpipev": 2}


def rows(cli: Any, *args: object) -> list[dict[str, Any]]:
    result = cli("compare", *args)
    assert result.code == 0, result.out
    assert set(result.json) == {"schema_version", "rows"}
    found: list[dict[str, Any]] = result.json["rows"]
    return found


def test_rows_are_the_demo_s_six_with_every_simulate_key_sorted(cli: Any, job: Any) -> None:
    found = rows(cli, job())
    assert {r["schedule"]: r["stages_per_rank"] for r in found} == DEFAULTS
    steps = [r["iteration_s"] for r in found]
    assert steps == sorted(steps)
    for row in found:
        alone = cli("simulate", job(schedule={"name": row["schedule"]})).json
        assert {k: v for k, v in row.items() if k in alone} == alone
        assert set(row) == {*alone, "schedule", "stages_per_rank"}


def test_equal_steps_are_not_told_as_a_gain(cli: Any, job: Any) -> None:
    twice = cli("compare", job("a.toml"), job("b.toml"), as_json=False).out
    assert "a 1f1b wins: it takes as long as b 1f1b; its price is 0.0 GiB" in " ".join(twice.split())
    quick = cli("compare", job(), "--schedules", "1f1b,gpipe", "--set", "costs.free=['host']", as_json=False).out
    assert "0.00" not in quick.partition(" wins: ")[2].partition(";")[0], (
        "what a step of milliseconds saves is said in them"
    )


def test_a_step_of_fewer_tokens_does_not_win_by_being_shorter(cli: Any, job: Any) -> None:
    less, more = job("a.toml"), job("b.toml", schedule={"name": "1f1b", "microbatches": 16})
    a, b = rows(cli, less, more)
    said = " ".join(cli("compare", less, more, as_json=False).out.split())
    assert a["iteration_s"] < b["iteration_s"] and a["tokens_per_s"] < b["tokens_per_s"] and "wins" not in said
    rates = f"with 0.25 times its tokens ({a['tokens_per_s']:,.0f} tokens/s, {b['tokens_per_s']:,.0f} there)"
    assert "a 1f1b has the shortest step: it is faster than b 1f1b" in said and rates in said


def test_more_gpus_are_named_beside_the_step_that_they_shorten(cli: Any, job: Any) -> None:
    few, many = job("few.toml"), job("many.toml", parallel={"dp": 4}, schedule={"microbatches": 2})
    said = " ".join(cli("compare", few, many, as_json=False).out.split())
    assert ", on 2 times its GPUs" in said or ", on 0.5 times its GPUs" in said
    assert "times its GPUs" not in cli("compare", few, few, as_json=False).out


def test_a_slow_host_is_named_as_what_makes_the_difference(cli: Any, job: Any) -> None:
    """On one rank nothing waits for another: all that launches of ten times the usual take is the host's."""
    one = {"parallel": {"pp": 1, "dp": 1, "ep": 1}}
    slow = job("slow.toml", cluster={"host_launch_us": 60.0}, **one)
    a, b = rows(cli, job("usual.toml", **one), slow)
    assert b["name"] == "slow" and b["time_breakdown"]["0"]["host"] > a["time_breakdown"]["0"]["host"]
    said = " ".join(cli("compare", job("usual.toml", **one), slow, as_json=False).out.split())
    assert "because of waiting for the host" in said, "it was small savings everywhere"


def test_seconds_that_nobody_has_are_not_told_of(cli: Any, job: Any) -> None:
    found = cli("compare", job(), "--schedules", "dualpipe", "--set", "parallel.layers=[4]", as_json=False)
    assert found.code == 0 and "No schedule fits." in found.out and "Step times" not in found.out


def test_the_job_s_stages_per_rank_count_where_they_are_legal(cli: Any, job: Any) -> None:
    path = job(model={"num_hidden_layers": 8}, schedule={"name": "interleaved-1f1b", "stages_per_rank": 4})
    found = {r["schedule"]: r["stages_per_rank"] for r in rows(cli, path)}
    assert found == DEFAULTS | {"interleaved-1f1b": 4, "zb1p": 4}


def test_what_cannot_be_built_or_does_not_fit_stands_last_with_a_reason(cli: Any, job: Any) -> None:
    found = rows(cli, job(parallel={"pp": 3, "dp": 2, "ep": 2, "layers": [1, 1, 2]}))
    good = [r for r in found if r["fits"]]
    assert {r["schedule"] for r in good} == {"1f1b", "zb1p"}
    assert found[: len(good)] == good
    for row in found[len(good) :]:
        assert row["fits"] is False and row["reason"] and row["iteration_s"] is None
        assert set(row) - {"reason"} == set(good[0])
    reasons = {r["schedule"]: r["reason"] for r in found if not r["fits"]}
    assert "even number of ranks" in reasons["dualpipe"]
    assert "3 layer counts for 6 stages" in reasons["zbv"]


def test_what_does_not_fit_stands_behind_what_is_slower(cli: Any, job: Any) -> None:
    path = job(schedule={"microbatches": 16}, model={"seq_len": 512})
    found = {r["schedule"]: r for r in rows(cli, path, "--schedules", "gpipe,1f1b")}
    peaks = {k: max(r["memory"]["device_peak_bytes"].values()) for k, r in found.items()}
    assert peaks["1f1b"] < peaks["gpipe"]
    room = f"cluster.hbm_GiB={(peaks['1f1b'] + peaks['gpipe']) / 2 / 2**30 + 2}"
    tight = rows(cli, path, "--schedules", "gpipe,1f1b", "--set", room)
    assert [(r["schedule"], r["fits"]) for r in tight] == [("1f1b", True), ("gpipe", False)]
    assert "GiB" in tight[1]["reason"] and tight[1]["iteration_s"] == found["gpipe"]["iteration_s"]
    none = cli("compare", path, "--schedules", "gpipe,1f1b", "--set", "cluster.hbm_GiB=2.5")
    assert (
        none.code == 3 and not any(r["fits"] for r in none.json["rows"]) and all(r["memory"] for r in none.json["rows"])
    )


def test_where_only_the_schedules_do_not_suit_compare_still_exits_0(cli: Any, job: Any) -> None:
    found = rows(cli, job(parallel={"pp": 1, "ep": 1}), "--schedules", "dualpipe")
    assert [r["fits"] for r in found] == [False]
    text = cli("compare", job(parallel={"pp": 1, "ep": 1}), "--schedules", "dualpipe", as_json=False)
    assert text.code == 0 and "even number" in text.out


@pytest.mark.parametrize("setting", ["parallel.ep=3", "parallel.pp=64", "model.config=nope", "parallel.layers=[1,2]"])
def test_where_the_job_itself_is_wrong_compare_exits_2(cli: Any, job: Any, setting: str) -> None:
    path = job()
    result = cli("compare", path, "--set", setting)
    if "layers" in setting:  # a list that suits no schedule is a row's reason, not the job's mistake
        assert result.code == 0 and not any(r["fits"] for r in result.json["rows"])
        return
    assert (
        result.code == 2
        and result.error["file"] == path
        and result.error["key"] == setting.split("=")[0].replace("parallel.pp", "parallel.layers")
    )


def test_schedules_are_taken_by_alias_and_once(cli: Any, job: Any) -> None:
    found = rows(cli, job(), "--schedules", "vpp, interleaved,1F1B")
    assert {r["schedule"] for r in found} == {"interleaved-1f1b", "1f1b"} and len(found) == 2


def test_compare_says_why_the_winner_wins(cli: Any, job: Any) -> None:
    out = cli("compare", job(), as_json=False).out
    best = rows(cli, job())[0]["schedule"]
    assert f"{best} wins" in out and "its price is" in out


def test_plan_prints_directives_programs_and_simulate_s_digest(cli: Any, job: Any) -> None:
    result = cli("plan", job())
    assert result.code == 0 and set(result.json) == {"schema_version", "directives", "programs", "plan_digest"}
    found = result.json
    assert found["plan_digest"] == cli("simulate", job()).json["plan_digest"]
    assert list(found["programs"]) == ["0", "1"]
    assert {d["op"] for d in found["directives"]} == {"split", "place", "shard", "replicate", "order"}
    for rank, ops in found["programs"].items():
        forwards = [op for op in ops if op.startswith(f"{rank}F")]
        assert {op.split("/")[0] for op in forwards} == {f"{rank}F{m}" for m in range(4)}


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "interleaved-1f1b", "v-half"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_printed_directives_are_a_strategy_file_of_the_same_plan(
    cli: Any, job: Any, tmp_path: Path, name: str, zero: int
) -> None:
    path = job(schedule={"name": name}, parallel={"zero": zero, "layers": "even"})
    whole = cli("plan", path).json
    (tmp_path / "strategy.json").write_text(json.dumps(whole["directives"]))
    again = cli("plan", path, "--set", "schedule.directives=strategy.json")
    assert again.code == 0, again.out
    assert again.json["programs"] == whole["programs"] and again.json["directives"] == whole["directives"]


def test_plan_prints_text_that_names_every_op(cli: Any, job: Any) -> None:
    text, found = cli("plan", job(), as_json=False).out, cli("plan", job()).json
    assert text.startswith("split({}, MB=4)\n")
    assert all(op in text for ops in found["programs"].values() for op in ops)


def test_plan_does_not_mind_a_job_that_does_not_fit(cli: Any, job: Any) -> None:
    assert cli("plan", job(), "--set", "cluster.hbm_GiB=1").code == 0
