"""What a search tries: lists, pins, and what stands for keys of which nothing is said."""

from typing import Any

import pytest

from ir.job import Job, load_job
from ir.job.schema import BUCKET_MIB
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.predict import predict
from piper_sim.study.search import search
from piper_sim.study.search.space import JobSpace


@pytest.mark.parametrize(("pp", "left_out"), [([2, 4], True), ([1, 4], False)])
def test_lists_are_all_that_is_tried(pp: list[int], left_out: bool) -> None:
    """Against all of them, written out by hand: the job's own pipeline of one is no answer where it is not listed."""
    base = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 8, "seq_len": 2048},
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4},
    }
    lists = {"pp": pp, "name": ["1f1b", "gpipe"], "tp": [1], "zero": [1], "microbatch_size": [1], "recompute": ["none"]}

    def job(p: int, name: str, **more: Any) -> Job:
        parallel = {"pp": p, "dp": 4 // p, "zero": 1, "layers": "even"}
        return load_job({**base, "parallel": parallel, "schedule": {"global_batch": 8, "name": name}, **more})

    found = search(job(1, "1f1b", search={**lists, "layers": ["even"]}))
    steps = [predict(job(p, name)).iteration_s for p in pp for name in ("1f1b", "gpipe")]
    assert found.proven and found.best is not None and found.best["iteration_s"] == min(steps)
    assert (predict(job(1, "1f1b")).iteration_s < min(steps)) == left_out  # it would have won


@pytest.mark.parametrize(("room", "wins"), [(80.0, 0.0), (14.0, 1.0)])
def test_the_host_keeps_an_optimizer_where_nothing_else_fits(room: float, wins: float) -> None:
    """Found is what all values simulated one by one give: without offload where it fits, with it where it must."""
    base = {"model": {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 1024}, "schedule": {"microbatches": 2}}
    base |= {"cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 2, "hbm_GiB": room}, "parallel": {"pp": 2}}

    def job(**more: object) -> Job:
        return load_job({**base, **more})

    values = [0.0, 0.5, 1.0]
    free = ["tp", "cp", "pp", "zero", "layers", "microbatch_size", "recompute", "name", "stages_per_rank"]
    found = search(job(search={"offload": values, "pin": free}))
    runs = {v: predict(job(optimizer={"offload": v})) for v in values}
    best = min((v for v in values if runs[v].fits), key=lambda v: runs[v].iteration_s)
    assert best == wins and found.proven and found.best is not None
    assert found.best["iteration_s"] == runs[best].iteration_s
    assert runs[0.0].iteration_s < runs[0.5].iteration_s < runs[1.0].iteration_s


@pytest.mark.parametrize("overlaps", [True, False])
def test_gradients_are_reduced_beside_backward_where_the_job_lets_them(overlaps: bool) -> None:
    """Else ZeRO-3, which does so layer by layer, would seem better than it is."""
    model = {"config": "llama3-8b", "num_hidden_layers": 8, "seq_len": 4096}
    base = {"model": model, "cluster": {"gpu": "h100-sxm", "nodes": 4}, "schedule": {"global_batch": 64}}
    pins = ["tp", "cp", "pp", "layers", "microbatch_size", "recompute", "name", "stages_per_rank", "zero"]
    parallel = {"overlap_grad_reduce": overlaps, "zero": 1}
    found = search(load_job({**base, "parallel": parallel, "search": {"pin": pins}}))
    whole = predict(load_job({**base, "parallel": parallel})).to_dict()["iteration_s"]
    assert found.best is not None
    if overlaps:
        assert found.best["changes"] == {"parallel.bucket_MiB": BUCKET_MIB}
        assert found.best["iteration_s"] < 0.98 * whole
    else:
        assert found.best["changes"] == {} and found.best["iteration_s"] == whole


@pytest.mark.parametrize(("zero", "nic", "copies"), [(3, 20.0, 2), (3, 4000.0, 1), (1, 20.0, 1)])
def test_shards_stay_inside_a_node_where_that_pays(zero: int, nic: float, copies: int) -> None:
    """Found is the quicker of both, simulated by themselves; ZeRO-1 keeps gradients whole, none is tried."""
    model = {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 1024}
    cluster = {"gpu": "h100-sxm", "nodes": 2, "gpus_per_node": 4, "nic_Gbps": nic}
    base = {"model": model, "cluster": cluster, "schedule": {"global_batch": 16}}
    pins = ["tp", "cp", "pp", "layers", "microbatch_size", "recompute", "name", "stages_per_rank", "bucket_MiB"]
    found = search(load_job({**base, "parallel": {"zero": zero}, "search": {"zero": [zero], "pin": pins}}))
    runs = {n: predict(load_job({**base, "parallel": {"zero": zero, "dp_replicate": n}})) for n in (1, 2)}
    tried = (1, 2) if zero == 3 else (1,)
    assert found.proven and found.best is not None and found.space == len(tried)
    assert copies == min(tried, key=lambda n: runs[n].iteration_s)
    assert found.best["changes"].get("parallel.dp_replicate", 1) == copies
    assert found.best["iteration_s"] == runs[copies].iteration_s


def test_a_job_that_recomputes_some_layers_is_searched_beside_all_and_none() -> None:
    table = {"model": {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 64}, "parallel": {"pp": 2}}
    table |= {"schedule": {"name": "1f1b", "microbatches": 4, "recompute": ["mlp", "attention"], "recompute_layers": 1}}
    job = load_job(table | {"search": {"tp": [1], "pp": [2], "cp": [1], "zero": [1], "pin": ["name"]}})
    space = JobSpace.of(job, hardware_of(job))
    found = {(str(x.schedule.recompute), x.schedule.recompute_layers) for x in (space.job_of(c) for c in space)}
    assert ("('mlp', 'attention')", 1) in found and {r for r, n in found if n is None} >= {"none", "full"}
    assert search(job, budget_s=60.0).proven


def test_another_recompute_says_that_the_job_s_layers_are_left_out() -> None:
    model = {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 64}
    schedule = {"name": "1f1b", "microbatches": 4, "recompute": "full", "recompute_layers": "1::2"}
    lists = {"tp": [1], "pp": [2], "zero": [1], "recompute": ["none", "full", ["norm"]], "pin": ["name"]}
    found = search(load_job({"model": model, "parallel": {"pp": 2}, "schedule": schedule, "search": lists}))
    assert {"none", ("norm",)} & {p["changes"].get("schedule.recompute") for p in found.pareto}
    for p in found.pareto:
        new = {k.split(".")[1]: v for k, v in p["changes"].items() if k.startswith("schedule.")}
        said = {k: v for k, v in (schedule | new).items() if v is not None}
        by_hand = load_job({"model": model, "parallel": {"pp": 2}, "schedule": said})
        assert predict(by_hand).iteration_s == p["iteration_s"]


@pytest.mark.parametrize(("asked", "tried"), [({}, {1, 2, 4}), ({"tp": [4, 8]}, {4, 8})])
def test_ranks_share_a_kv_head_only_where_they_are_listed(asked: dict[str, Any], tried: set[int]) -> None:
    """Qwen3-30B has four: a plan of eight is predicted, and run by Megatron-Core alone."""
    model, cluster = {"config": "qwen3-30b-a3b", "seq_len": 1024}, {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8}
    job = load_job({"model": model, "cluster": cluster, "schedule": {"global_batch": 16}, "search": asked})
    assert set(JobSpace.of(job, hardware_of(job)).values["tp"]) == tried
