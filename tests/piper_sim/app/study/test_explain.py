"""`piper-sim explain` as the contract has it."""

from typing import Any

KEYS = {"schema_version", "iteration_s", "causes", "idle", "critical_path", "what_ifs", "spent", "fits"}


def test_its_object_and_what_people_read(cli: Any, job: Any) -> None:
    path, slow = job(schedule={"global_batch": 16, "microbatches": None}), ("--set", "cluster.speed={2 = 0.5}")
    found = cli("explain", path, *slow)
    assert found.code == 0 and set(found.json) == KEYS
    assert found.json["iteration_s"] == cli("simulate", path, *slow).json["iteration_s"]
    assert all(set(c) == {"cause", "rank", "op", "seconds"} for c in found.json["causes"])
    assert all(set(x) == {"op", "rank", "start_s", "end_s", "cause"} for x in found.json["critical_path"])
    what = {w["name"]: w for w in found.json["what_ifs"]}
    assert all(set(w) == {"name", "changes", "iteration_s", "gain_s", "fits"} for w in what.values())
    assert what["one more microbatch"]["changes"].keys() == {"schedule.global_batch"}
    sets = ("--set", 'costs.free=["all_to_all"]')
    assert what["all-to-all free"]["iteration_s"] == cli("simulate", path, *slow, *sets).json["iteration_s"]
    text = cli("explain", path, *slow, as_json=False).out
    for word in ("critical path", "straggler", "what if", "no straggler", "cluster.speed={  }", "rank 2 is slow at"):
        assert word in text, word


def test_keys_that_a_what_if_leaves_out_are_told(cli: Any, job: Any) -> None:
    text = cli("explain", job(), "--set", "cluster.slow_nodes={share = 0.1}", as_json=False).out
    assert "without cluster.slow_nodes" in " ".join(text.split())


def test_two_jobs_differ_by_causes_that_sum_to_the_difference(cli: Any, job: Any) -> None:
    a, b = job("a.toml", schedule={"name": "gpipe"}), job("b.toml")
    steps = [cli("simulate", p).json["iteration_s"] for p in (a, b)]
    found = cli("explain", a, b).json
    assert set(found) == {*KEYS, "difference"} and sum(found["difference"].values()) == steps[1] - steps[0]
    assert "the second job's step takes" in cli("explain", a, b, as_json=False).out


def test_what_does_not_fit_is_explained_and_exits_3(cli: Any, job: Any) -> None:
    found = cli("explain", job(), "--set", "cluster.hbm_GiB=2.5")
    assert found.code == 3 and found.json["fits"] is False and "GiB" in found.json["reason"] and found.json["causes"]


def test_a_second_job_that_does_not_fit_exits_3(cli: Any, job: Any) -> None:
    a, b = job("a.toml"), job("b.toml", cluster={"hbm_GiB": 2.5})
    found = cli("explain", a, b)
    assert found.code == 3 and found.json["fits"] is False and found.json["reason"].startswith(f"{b}: rank")
    assert "the second job's step takes +0 s" in cli("explain", a, b, as_json=False).out


def test_what_is_asked_wrongly(cli: Any, job: Any, tmp_path: Any) -> None:
    for args in ((), (job(), job(), "--trace", "t.tsv"), (job(), "--set", 'costs.free=["dinner"]'), ("nope.toml",)):
        assert cli("explain", *args).code == 2, args
    for name, text in (("a.json", "{}"), ("b.json", '{"traceEvents": []}'), ("c.tsv", '{"piper_trace": 1}')):
        (tmp_path / name).write_text(text)
        error = cli("explain", "--trace", tmp_path / name).error
        assert error["message"] and error["suggestion"], error
    assert cli("explain", "--trace", tmp_path / "gone.tsv").error["file"].endswith("gone.tsv")
