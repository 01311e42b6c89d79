"""From a job to its plan: what it leaves open, what must go together, how errors name the job."""

import json
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.core.limits import RANKS, check_ranks
from ir.core.mesh import Mesh
from ir.job.build import blaming, directives_json, prepare, resolve
from ir.job.load import job_from
from ir.job.schema import Job
from ir.verify import check_plan
from tests.refusals import refusal


def job(file: str = "job.toml", **sections: dict[str, Any]) -> Job:
    return job_from({"model": {"config": "tiny-moe", "seq_len": 128}, **sections}, file=file)


def refused(**sections: dict[str, Any]) -> PiperError:
    return refusal(prepare, job(**sections))


@pytest.mark.parametrize(
    ("parallel", "cluster", "dp", "nodes"),
    [
        ({"pp": 2}, {"nodes": 1, "gpus_per_node": 8}, 4, 1),
        ({"pp": 2, "tp": 2}, {"nodes": 2, "gpus_per_node": 8}, 4, 2),
        ({"pp": 2, "dp": 3}, {}, 3, 1),
        ({"pp": 4, "dp": 3}, {}, 3, 2),
        ({"pp": 4}, {}, 1, 1),
        ({"pp": 4}, {"gpus_per_node": 4}, 1, 1),
    ],
)
def test_dp_is_what_is_left_and_nodes_are_as_many_as_needed(
    parallel: dict[str, Any], cluster: dict[str, Any], dp: int, nodes: int
) -> None:
    found = resolve(job(parallel=parallel, cluster=cluster), 8)
    assert (found.parallel.dp, found.cluster.nodes) == (dp, nodes)


@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        ("tp cp ep dp pp", {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 2, "etp": 2}),
        ("pp ep dp tp cp", {"tp": 1, "cp": 2, "dp": 4, "pp": 2, "ep": 4, "etp": 1}),
    ],
)
def test_the_mesh_is_what_parallel_says(order: str, sizes: dict[str, int]) -> None:
    assert prepare(job(parallel={**sizes, "order": order})).mesh == Mesh.of(**sizes, order=order.split())


@pytest.mark.parametrize(
    ("parallel", "cluster", "key", "fix"),
    [
        ({"pp": 3}, {"nodes": 1}, "parallel.pp", "cluster.nodes = 3"),
        ({"pp": 2, "dp": 3}, {"nodes": 1}, "parallel.dp", "dp = 4"),
        ({"pp": 3, "dp": 3}, {"nodes": 1}, "parallel.dp", "cluster.nodes = 2"),
        ({"pp": 2, "dp": 400_000}, {}, "parallel.dp", "replicas"),
        ({"pp": 2}, {"nodes": 100_000}, "cluster.nodes", "fewer nodes"),
        ({"pp": 2}, {"speed": {"2": 0.5}}, "cluster.speed", "ranks 0..1"),
    ],
)
def test_sizes_must_fill_the_cluster(parallel: dict[str, Any], cluster: dict[str, Any], key: str, fix: str) -> None:
    error = refused(parallel=parallel, cluster=cluster)
    assert (error.kind, error.key, error.file) == (ErrorKind.JOB, key, "job.toml")
    assert fix in (error.suggestion or "")


def test_the_fix_for_too_few_nodes_is_one_that_works() -> None:
    error = refused(parallel={"pp": 3}, cluster={"nodes": 1})
    assert error.suggestion is not None
    nodes = int(error.suggestion.split("=")[1].split(",")[0])
    assert resolve(job(parallel={"pp": 3}, cluster={"nodes": nodes}), 8).parallel.dp == 8


@pytest.mark.parametrize(
    ("model", "parallel", "gpus", "fix"),
    [
        ({"vocab_size": 32001}, {"tp": 3}, 6, "tp = 1"),  # a divisor of it, and of no heads
        ({"vocab_size": 96, "num_attention_heads": 9, "num_key_value_heads": 9}, {"tp": 8}, 8, "tp = 1"),  # not 3
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 258}, {"tp": 4}, 4, "tp = 2"),
        ({"seq_len": 12}, {"cp": 4}, 4, "cp = 2"),  # 3 of 4 GPUs
        ({"seq_len": 12}, {"cp": 4}, None, "cp = 3"),
        ({"config": "tiny-moe", "num_experts": 6}, {"ep": 4}, 4, "ep = 2"),
        ({"config": "tiny-moe", "num_experts": 6}, {"ep": 4, "dp": 12}, None, "ep = 3"),
    ],
)
def test_the_fix_for_ranks_that_do_not_divide_is_one_that_works(
    model: dict[str, Any], parallel: dict[str, Any], gpus: int | None, fix: str
) -> None:
    model = {"config": "tiny-llama", "seq_len": 144, "hidden_size": 72, "head_dim": 8, "intermediate_size": 96} | model
    cluster = {"nodes": 1, "gpus_per_node": gpus} if gpus else {}
    error = refused(model=model, parallel=parallel, cluster=cluster)
    axis, _, value = (error.suggestion or "").partition(",")[0].partition(" = ")
    assert (error.key, f"{axis} = {value}") == (f"parallel.{axis}", fix)
    prepare(job(model=model, parallel=parallel | {axis: int(value)}, cluster=cluster))


def test_16384_gpus_are_few() -> None:
    sizes = {"tp": 8, "pp": 16, "dp": 128}
    plan = prepare(job(model={"config": "llama3-405b"}, parallel=sizes, schedule={"microbatches": 64})).plan()
    check_plan(plan)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"parallel": {"pp": 2}, "schedule": {"microbatches": 10**9}}, "schedule.microbatches"),
        ({"parallel": {"pp": 2}, "schedule": {"microbatches": 150_000}}, "schedule.microbatches"),
        ({"schedule": {"stages_per_rank": 10**9, "name": "vpp"}}, "parallel.pp"),
        ({"model": {"config": "tiny-moe", "num_hidden_layers": 2_000}}, "model.num_hidden_layers"),
        ({"model": {"config": "gpt2", "n_layer": 2_000}}, "model.n_layer"),
        ({"model": {"config": "tiny-llama", "vocab_size": 10**14}}, "model.seq_len"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_built(sections: dict[str, Any], key: str) -> None:
    assert refused(**sections).key == key


def test_a_config_file_of_too_many_layers(tmp_path: Path) -> None:
    from ir.workload.config import load as model

    raw = json.loads((model._PRESETS / "tiny-llama.json").read_text())
    (tmp_path / "deep.json").write_text(json.dumps({**raw, "num_hidden_layers": 5_000}))
    refusal(prepare, job_from({"model": {"config": "deep.json"}}, file=str(tmp_path / "job.toml")), match="5000 layers")


def test_a_flag_s_error_is_the_job_s_here() -> None:
    error = refused(parallel={"pp": 3}, schedule={"name": "dualpipe"})
    assert (error.kind, error.key, error.file) == (ErrorKind.JOB, "parallel.pp", "job.toml")


def test_an_inline_model_key_is_the_job_s() -> None:
    error = refused(model={"config": "tiny-moe", "num_experts_per_tok": 9})
    assert (error.kind, error.key, error.file) == (ErrorKind.MODEL, "model.num_experts_per_tok", "job.toml")


def test_what_is_not_built_yet_is_said() -> None:
    assert refused(parallel={"reshard": False}).key == "parallel.reshard"


@pytest.mark.parametrize(
    ("parallel", "ops"),
    [
        ({}, ["split", "place", "replicate", "order"]),
        ({"tp": 2, "ep": 2}, ["split", "place", "shard", "shard", "replicate", "order"]),
        ({"cp": 2}, ["split", "place", "shard", "replicate", "order"]),
    ],
)
def test_parallel_is_directives(parallel: dict[str, Any], ops: list[str]) -> None:
    made = prepare(job(parallel=parallel, schedule={"microbatches": 2}))
    assert [d["op"] for d in directives_json(made.strategy)] == ops
    check_plan(made.plan())


def test_layers_are_those_of_the_stages() -> None:
    listed = prepare(job(parallel={"pp": 2, "layers": [3, 1]}))
    assert listed.layers == (3, 1)
    assert prepare(job(parallel={"pp": 2, "layers": [4, 0]})).layers == (4, 0)
    assert sum(prepare(job(parallel={"pp": 2})).layers) == 4


def test_two_microbatches_per_rank_where_none_are_given() -> None:
    assert prepare(job(parallel={"pp": 2})).mbs == 4
    assert prepare(job()).schedule == "1f1b"


def test_what_is_wrong_with_directives_is_wrong_in_their_file(tmp_path: Path) -> None:
    own = job(str(tmp_path / "job.toml"), schedule={"directives": "mine.json"})
    for kind in (ErrorKind.DIRECTIVE, ErrorKind.ILLEGAL_PLAN):
        with pytest.raises(PiperError) as caught, blaming(own):
            raise PiperError(kind, "no order for stage 1")
        assert (caught.value.file, caught.value.key) == (str(tmp_path / "mine.json"), "schedule.directives")
        assert caught.value.allowed


def test_so_many_gpus_and_no_more() -> None:
    check_ranks(RANKS, "cluster.nodes")
    refusal(check_ranks, RANKS + 1, "cluster.nodes", match=f"{RANKS + 1} GPUs")


def test_a_price_of_cents_is_a_price() -> None:
    assert job(cluster={"price": 0.01}).cluster.price == 0.01
