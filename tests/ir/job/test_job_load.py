"""Jobs as values: defaults, --set, what is refused at the door."""

from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.job.load import job_from, load_job
from ir.workload import load_config
from tests.refusals import refusal

TINY = {"model": {"config": "tiny-moe"}}


def refused(table: dict[str, Any], *sets: str) -> PiperError:
    return refusal(job_from, table, sets)


def test_defaults_are_the_contract_s() -> None:
    job = job_from(TINY)
    p = job.parallel
    assert (p.tp, p.cp, p.pp, p.dp, p.ep, p.etp, p.zero) == (1, 1, 1, None, 1, 1, 1)
    assert p.order == "tp cp ep dp pp" and p.layers == "balanced" and p.sequence_parallel is True
    assert job.model.seq_len == 4096 and job.model.attention == "flash" and job.model.seed == 0
    assert job.cluster.memory_margin_GiB == 2 and job.schedule.microbatch_size == 1
    assert job.schedule.recompute == "none" and job.routing.kind == "balanced"
    assert (job.costs.interference, job.costs.host_model) == ("pairwise", "ahead")
    assert (job.gate.iteration, job.gate.op_median, job.gate.memory) == (0.05, 0.10, 0.02)
    assert (job.optimizer.name, job.optimizer.lr, job.optimizer.clip_norm) == ("adamw", 1e-3, 1.0)
    assert job.precision.compute == "bf16" and job.data.source == "synthetic"


def test_the_contract_s_own_job_file_loads(tmp_path: Path) -> None:
    text = """
[model]
config = "deepseek-v3"
seq_len = 4096
attention = "flash"
module = "my_model.py:build"
[cluster]
gpu = "h800-sxm"
memory_margin_GiB = 2
speed = { 17 = 0.8 }
nodes = 256
gpus_per_node = 8
[parallel]
tp = 1
cp = 1
pp = 16
dp = 128
ep = 64
zero = 1
order = "tp cp ep dp pp"
sequence_parallel = true
layers = "balanced"
[schedule]
name = "dualpipe"
microbatches = 64
microbatch_size = 1
stages_per_rank = 1
recompute = "none"
[routing]
kind = "balanced"
[costs]
profile = "h800.json"
interference = "pairwise"
host_model = "ahead"
software = "megatron"
[data]
source = "synthetic"
seed = 0
[gate]
iteration = 0.05
op_median = 0.10
memory = 0.02
[history]
file = "past_runs.csv"
[optimizer]
name = "adamw"
lr = 1e-3
clip_norm = 1.0
[precision]
compute = "bf16"
params = "bf16"
grads = "fp32"
optimizer = "fp32"
"""
    path = tmp_path / "job.toml"
    path.write_text(text)
    job = load_job(path)
    assert job.cluster.speed == {"17": 0.8} and job.parallel.dp == 128 and job.costs.software == "megatron"
    assert job.file == str(path)


@pytest.mark.parametrize(
    ("item", "read"),
    [
        ("schedule.name=zbv", lambda j: j.schedule.name == "zbv"),
        ('schedule.name="zbv"', lambda j: j.schedule.name == "zbv"),
        (" schedule.name = zbv ", lambda j: j.schedule.name == "zbv"),
        ("model.config=a=b", lambda j: j.model.config == "a=b"),
        ("optimizer.clip_norm=0", lambda j: j.optimizer.clip_norm == 0.0),
        ("parallel.layers=[2, 2]", lambda j: j.parallel.layers == (2, 2)),
        ("parallel.bucket_MiB=25", lambda j: j.parallel.bucket_MiB == 25.0),
        ("model.rope_scaling.factor=2", lambda j: j.model.overrides["rope_scaling"] == {"factor": 2}),
        ("cluster.speed.3=0.5", lambda j: j.cluster.speed == {"3": 0.5}),
        ("cluster.nic_Gbps=200", lambda j: j.cluster.overrides == {"nic_Gbps": 200}),
        ("costs.stage_times={F=1}", lambda j: j.costs.stage_times == {"F": 1}),
        ("data.source=true story.txt", lambda j: j.data.source == "true story.txt"),
    ],
)
def test_set_takes_toml_else_a_bare_text(item: str, read: Any) -> None:
    assert read(job_from(TINY, [item]))


def test_a_line_break_in_a_value_is_no_second_key() -> None:
    assert refused(TINY, "parallel.pp=2\n[data]\nseed=1").key == "parallel.pp"


def test_set_leaves_the_table_as_it_was() -> None:
    table = {"model": {"config": "tiny-moe", "rope_scaling": {"factor": 1}}}
    job_from(table, ["model.rope_scaling.factor=2", "parallel.pp=2"])
    assert table == {"model": {"config": "tiny-moe", "rope_scaling": {"factor": 1}}}


def test_a_schedule_named_by_set_replaces_the_file_s() -> None:
    table = {**TINY, "schedule": {"name": "zbv", "microbatches": 8}}
    found = job_from(table, ["schedule.csv=mine.csv"]).schedule
    assert (found.name, found.csv, found.microbatches) == (None, "mine.csv", 8)
    both = refused({**TINY, "schedule": {"name": "zbv", "csv": "mine.csv"}})
    assert both.key == "schedule" and "name and csv" in both.message


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("parallel", "tp", True),
        ("parallel", "tp", 1.0),
        ("parallel", "tp", 0),
        ("parallel", "layers", [1, True]),
        ("parallel", "layers", 3),
        ("parallel", "prefetch", -1),
        ("schedule", "recompute", ["full"]),
        ("schedule", "microbatches", 2**40),
        ("model", "seed", -1),
        ("data", "seed", 1.5),
        ("optimizer", "lr", float("nan")),
        ("optimizer", "lr", -1.0),
        ("optimizer", "betas", [0.9, 1.0]),
        ("optimizer", "betas", [0.9]),
        ("optimizer", "eps", 0),
        ("optimizer", "no_decay", "*.bias"),
        ("optimizer", "min_lr", 0.5),
        ("optimizer", "decay_steps", 5),
        ("gate", "memory", True),
        ("cluster", "memory_margin_GiB", 10**400),
        ("cluster", "hbm_GiB", 1e300),
        ("cluster", "hbm_GiB", 1e-300),
        ("precision", "params", "int8"),
        ("history", "file", 3),
    ],
)
def test_values_beyond_reason_are_refused_by_key(section: str, key: str, value: object) -> None:
    table = {**TINY, section: {**TINY.get(section, {}), key: value}}
    assert refused(table).key == f"{section}.{key}"
    assert refused(table).kind is ErrorKind.JOB


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"schedule": "cosine"}, "decay_steps"),
        ({"schedule": "wsd", "decay_steps": 4, "min_lr": 0.5}, "min_lr"),
        ({"schedule": "cosinus", "decay_steps": 4}, "schedule"),
    ],
)
def test_schedules_of_the_learning_rate_that_say_too_little(given: dict[str, Any], key: str) -> None:
    assert refused({**TINY, "optimizer": given}).key == f"optimizer.{key}"


def test_every_error_names_the_file() -> None:
    found = refusal(job_from, {"model": {"config": "x"}, "parallel": {"ordr": 1}}, file="there.toml")
    assert (found.file, found.suggestion) == ("there.toml", "parallel.order")


def test_a_list_of_schedules_to_try_has_names_alone() -> None:
    e = refused({**TINY, "search": {"name": ["zbv", None]}})  # of a dictionary: TOML has no null
    assert (e.kind, e.key, e.suggestion) == (ErrorKind.JOB, "search.name", 'name = ["zbv", "gpipe"]')


@pytest.mark.parametrize("key", ["preset", "name", "hf_path"])
def test_a_model_said_under_a_key_of_one_s_own_is_shown_where_it_is_said(key: str) -> None:
    found = refused({"model": {key: "llama3-70b"}})
    assert (found.key, found.suggestion) == (f"model.{key}", 'config = "llama3-70b"')
    assert refused({"model": {"hidden_act": "silu"}}).key == "model.config"  # which is no model


def test_a_section_that_is_one_word_is_shown_the_key_it_means() -> None:
    found = refused({"model": "llama3-70b"})
    assert (found.key, found.suggestion) == ("model", 'model.config = "llama3-70b"')
    assert refused({**TINY, "schedule": "dualpipe"}).suggestion == 'schedule.name = "dualpipe"'
    assert "seq_len" in (refused({"model": "4GiB"}).allowed or "")  # no model's name: the table's keys are told


def test_a_name_of_the_hub_is_said_not_to_be_fetched() -> None:
    told = refusal(load_config, "meta-llama/Llama-3.1-8B").suggestion
    assert told == "the path to its config.json: nothing is fetched from the Hub"
    assert (
        refusal(load_config, "llama3_8b").suggestion == "llama3-8b"
        and refusal(load_config, "qwerty").suggestion is None
    )
