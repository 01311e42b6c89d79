"""What a framework means by a word, where another means something else, or its file says it elsewhere.

Expected values are read off the frameworks' own sources, named beside each.
"""

from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.job.build import precision_of, prepare
from ir.job.load import job_from
from piper_sim.app.cli import main
from piper_sim.frameworks.exporting import export_launch
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN
from tests.piper_sim.frameworks.test_export import prepared, read_back
from tests.piper_sim.frameworks.test_import import TEXTS, imported, listed

SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
MEGATRON = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --vocab-size 256 "


# transformers' TrainingArguments.deepspeed: a path; deepspeed.add_config_arguments' --deepspeed: a flag


@pytest.mark.parametrize("command", ["deepspeed --num_gpus 8", "torchrun --nproc_per_node 8"])
@pytest.mark.parametrize("equals", [" ", "="])
def test_the_trainers_deepspeed_argument_is_a_file_that_is_read(tmp_path: Path, command: str, equals: str) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}}'
    )
    words = f"--model_name_or_path meta-llama/Llama-2-7b-hf --deepspeed{equals}ds.json --per_device_train_batch_size 4"
    found = imported(tmp_path, f"{command} run_clm.py {words} --gradient_accumulation_steps 2\n")
    assert found.framework == "deepspeed" and found.job["parallel"]["zero"] == 3
    assert found.job["schedule"]["microbatch_size"] == 4 and found.job["schedule"]["microbatches"] == 2
    assert "--deepspeed" in listed(found, UNDERSTOOD)


def test_a_file_that_is_named_and_not_there_is_not_understood(tmp_path: Path) -> None:
    found = imported(tmp_path, "deepspeed --num_gpus 8 run_clm.py --deepspeed gone.json --max_seq_len 64\n")
    assert listed(found, UNKNOWN) == ["--deepspeed"]
    entry = next(e for e in found.entries if e.argument.name == "--deepspeed")
    assert "gone.json" in entry.note
    flag = imported(tmp_path, MEGATRON + "--deepspeed --zero-stage 1\n")
    assert "--deepspeed" in listed(flag, UNDERSTOOD) and flag.job["parallel"]["zero"] == 1


# megatron/training/arguments.py: num_query_groups counts with --group-query-attention alone


def test_megatron_groups_queries_only_where_the_flag_says_so(tmp_path: Path) -> None:
    without = imported(tmp_path, MEGATRON + "--num-query-groups 2\n")
    assert without.job["model"].get("num_key_value_heads", 8) == 8
    assert "--num-query-groups" in listed(without, ASSUMED)
    grouped = imported(tmp_path, MEGATRON + "--num-query-groups 2 --group-query-attention\n")
    assert grouped.job["model"]["num_key_value_heads"] == 2 and not listed(grouped, ASSUMED)
    # Megatron-DeepSpeed has no such flag
    other = imported(tmp_path, MEGATRON + "--num-key-value-heads 2\n")
    assert other.job["model"]["num_key_value_heads"] == 2


# llmfoundry/models/mpt/configuration_mpt.py

MPT, TITAN, NEMO = (TEXTS["texts"][name] for name in ("mpt", "titan", "nemo"))


@pytest.mark.parametrize("row", TEXTS["mpt"], ids=lambda row: row["more"])
def test_an_mpt_is_built_as_its_file_says(tmp_path: Path, row: dict[str, Any]) -> None:
    found = imported(tmp_path, MPT.format(row["more"]), "mpt.yaml", "llm-foundry")
    assert not listed(found, UNKNOWN)
    m = prepare(job_from(found.job)).config
    has = {
        "kv": m.kv_heads,
        "bias": m.mlp_bias,
        "rope": m.rope,
        "positions": bool(m.positions),
        "dropout": m.hidden_dropout,
    }
    has |= {"rms": m.norm.value.startswith("rms"), "ups": m.activation.ups, "qk": bool(m.qk_norm), "ffn": m.ffn}
    has |= {"attn_dropout": m.attn_dropout, "untied": not m.tied}
    assert {k: has[k] for k in row["is"]} == row["is"]


def test_what_an_mpt_has_and_we_do_not_is_said(tmp_path: Path) -> None:
    alibi = imported(tmp_path, MPT.format(", attn_config: {alibi: true}"), "mpt.yaml", "llm-foundry")
    assert "model.attn_config.alibi" in listed(alibi, ASSUMED)
    odd = imported(tmp_path, MPT.format(", frobnicate: 3"), "mpt.yaml", "llm-foundry")
    assert listed(odd, UNKNOWN) == ["model.frobnicate"]


# torchtitan train.py: gradient_accumulation_steps = global / (local · dp), each a whole pass of the pipeline


def test_accumulated_passes_of_torch_are_flushes(tmp_path: Path) -> None:
    found = imported(tmp_path, TITAN, "t.toml")
    s = found.job["schedule"]
    assert (s["microbatch_size"], s["microbatches"], s["flushes"]) == (1, 128, 32)
    assert "flushes" not in imported(tmp_path, TITAN.replace("256", "8"), "t.toml").job["schedule"]
    once = read_back(export_launch(prepare(job_from(found.job)), "torchtitan"))
    assert once.job["schedule"] == s
    flat = imported(tmp_path, TITAN.replace("degree = 4", "degree = 1"), "t.toml").job["schedule"]
    assert (flat["microbatch_size"], flat["microbatches"]) == (4, 32) and "flushes" not in flat


# torch/distributed/pipelining/stage.py: no backward reshards or reduces, perform_reduce_grad does both behind the last;
# _fsdp_param.py to_accumulated_grad_if_needed: until then gradients are summed whole, in reduce_dtype


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
def test_torchs_pipelining_keeps_whole_gradients_and_reduces_them_once(tmp_path: Path, reshard: str) -> None:
    more = f'fsdp_reshard_after_forward = "{reshard}"\n[training]\nmixed_precision_reduce = "bfloat16"'
    text = TITAN.replace("[training]", more)
    found = imported(tmp_path, text, "t.toml")
    parallel, precision = found.job["parallel"], found.job["precision"]
    assert (parallel["zero"], parallel["overlap_grad_reduce"]) == (1, False)
    assert ("parallelism.fsdp_reshard_after_forward" in listed(found, ASSUMED)) == (reshard == "always")
    assert "params" not in precision and precision["grads"] == precision["reduce"] == "bf16"
    job = prepare(job_from(found.job))
    whole = precision_of(job.job)
    assert (whole.params, whole.optimizer) == ("bf16", "fp32"), "weights as gathered, and shards that are updated"
    made = export_launch(job, "torchtitan")
    again = read_back(made).job
    assert (again["parallel"], again["precision"]) == (parallel, precision)
    assert not made.left_out.keys() & {"precision.params", "precision.grads"}
    flat = imported(tmp_path, text.replace("degree = 4", "degree = 1"), "t.toml").job
    assert flat["parallel"] == {"zero": 2 if reshard == "never" else 3}
    assert flat["precision"]["params"] == "fp32" and "grads" not in flat["precision"]
    assert flat["precision"].get("gather") == ("bf16" if reshard == "never" else None), "FSDP casts, then gathers"


# torchtitan/distributed/pipeline_parallel.py: stages are ⌈(layers + 1 + 1) / layers_per_stage⌉, a multiple of the ranks


@pytest.mark.parametrize(
    ("schedule", "pp", "per", "chunks"),
    [
        ("Interleaved1F1B", 2, 9, 2),
        ("Interleaved1F1B", 2, None, 2),
        ("Interleaved1F1B", 2, 6, 3),
        ("1F1B", 4, 9, 1),
        ("1F1B", 4, None, 1),
        ("Interleaved1F1B", 2, 8, None),  # five stages: it stops there
    ],
)
def test_torchtitan_counts_embedding_and_head_among_the_layers_of_its_stages(
    tmp_path: Path, schedule: str, pp: int, per: int | None, chunks: int | None
) -> None:
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = {pp}\n'
    text += f'pipeline_parallel_schedule = "{schedule}"\n' + (
        "" if per is None else f"pipeline_parallel_layers_per_stage = {per}\n"
    )
    found = imported(tmp_path, text, "train.toml", "torchtitan")
    name = "parallelism.pipeline_parallel_layers_per_stage"
    assert (name in listed(found, ASSUMED)) == (chunks is None)
    if chunks is not None:
        assert found.job["schedule"].get("stages_per_rank", 1) == chunks
        written = export_launch(prepare(job_from(found.job)), "torchtitan").files["train.toml"]
        usual = chunks == (1 if schedule == "1F1B" else 2)
        assert ("layers_per_stage" in written) == (not usual) and "sequence_parallel" not in written


# torchtitan/distributed/utils.py, maybe_enable_amp: fully_shard mixes formats, or autocast where nothing is divided
@pytest.mark.parametrize(
    ("more", "gpus", "compute"),
    [
        ("tensor_parallel_degree 4", 4, "fp32"),
        ("pipeline_parallel_degree 4", 4, "fp32"),
        ("tensor_parallel_degree 4 --training.dtype bfloat16", 4, "bf16"),
        ("tensor_parallel_degree 4", 8, "bf16"),
        ("tensor_parallel_degree 2 --parallelism.context_parallel_degree 2", 4, "bf16"),
        ("data_parallel_replicate_degree 4", 4, "bf16"),
    ],
)
def test_torchtitan_mixes_formats_where_there_is_something_to_shard(
    tmp_path: Path, more: str, gpus: int, compute: str
) -> None:
    text = f"torchrun --nproc_per_node {gpus} -m torchtitan.train --model.flavor 8B --parallelism.{more}"
    found = imported(tmp_path, f"{text} --training.mixed_precision_param bfloat16")
    assert found.job["precision"]["compute"] == compute
    assert (found.job["parallel"]["zero"] == 0) == ("replicate" in more), "FSDP over one replica is DDP"
    assert ("--training.mixed_precision_param" in listed(found, ASSUMED)) == (compute == "fp32")
    made = export_launch(prepare(job_from(found.job)), "torchtitan")
    assert made.read.job["precision"]["compute"] == compute


# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce: what is reduced goes to the weights' format;
# torch/optim/adam.py, _init_group: moments are zeros_like(weights), and there are no master weights
@pytest.mark.parametrize("pp", [1, 4])
def test_torchtitan_s_gradients_and_moments_have_the_format_of_its_weights(tmp_path: Path, pp: int) -> None:
    text = TITAN.replace("degree = 4", f"degree = {pp}").replace("[training]", '[training]\ndtype = "bfloat16"')
    found = imported(tmp_path, text, "t.toml")
    job = prepare(job_from(found.job))
    formats = precision_of(job.job)
    assert (formats.params, formats.optimizer, formats.reduce) == ("bf16", "bf16", "fp32")
    assert formats.grads == ("bf16" if pp == 1 else "fp32"), "whole ones are summed as they are reduced"
    assert export_launch(job, "torchtitan").read.job["precision"] == found.job["precision"]


RECIPE = """
step_scheduler: {global_batch_size: 64, local_batch_size: 2}
model: {pretrained_model_name_or_path: meta-llama/Llama-3.1-8B, torch_dtype: torch.bfloat16}
distributed: {strategy: STRATEGY}
optimizer: {_target_: TARGET, lr: 1.0e-5}
"""


@pytest.mark.parametrize(
    ("strategy", "target", "kept"),
    [
        ("fsdp2", "torch.optim.AdamW", "bf16"),
        ("fsdp2", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "fp32"),
        ("megatron_fsdp", "torch.optim.AdamW", "fp32"),
        ("megatron_fsdp, zero_dp_strategy: 3", "torch.optim.AdamW", "fp32"),
    ],
)
def test_automodel_s_moments_are_in_the_format_of_its_weights_where_torch_updates_them(
    tmp_path: Path, strategy: str, target: str, kept: str
) -> None:
    found = imported(tmp_path, RECIPE.replace("STRATEGY", strategy).replace("TARGET", target), "a.yaml", "automodel")
    job = prepare(job_from(found.job))
    formats = precision_of(job.job)
    assert (formats.params, formats.optimizer, formats.grads) == ("bf16", kept, kept)
    assert (job.job.parallel.zero, job.job.optimizer.name) == (3, "adamw")
    made = export_launch(job, "automodel")
    assert made.read.job["precision"] == found.job["precision"]
    assert ("_target_: torch" in made.files["config.yaml"]) == (kept == "bf16")
    assert "exp_avg_dtype" not in made.files["config.yaml"], "torch's takes none"


def test_torchtitan_s_whole_logits_come_in_and_go_out(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 -m torchtitan.train --model.flavor 8B --parallelism.disable_loss_parallel"
    assert "loss_parallel" not in imported(tmp_path, text).job["costs"], "there is nothing to gather"
    found = imported(tmp_path, f"{text} --parallelism.tensor_parallel_degree 2")
    made = export_launch(prepare(job_from(found.job)), "torchtitan")
    for job in (found.job, made.read.job):
        assert job["costs"]["loss_parallel"] is False


def test_torchtitan_s_unbalanced_parts_of_a_sequence_are_not_those_predicted(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 -m torchtitan.train --model.flavor 8B"
    parts = "--parallelism.context_parallel_load_balancer"
    for cp, said, assumed in ((2, "headtail", False), (2, '""', True), (1, '""', False)):
        found = imported(tmp_path, f"{text} --parallelism.context_parallel_degree {cp} {parts} {said}")
        assert (parts in {a.argument.name for a in found.entries if a.list == ASSUMED}) is assumed, (cp, said)
        assert not [a for a in found.entries if "another argument" in a.note], "each says another thing"


def test_an_export_to_torchtitan_computes_in_the_jobs_format() -> None:
    model, precision = {"config": "llama3-8b", "seq_len": 2048}, {"compute": "bf16", "params": "fp32"}
    made = export_launch(prepared(model=model, parallel={"tp": 8, "pp": 2}, precision=precision), "torchtitan")
    assert made.read.job["precision"]["compute"] == "bf16" and made.left_out["precision.params"] == "bf16"


def test_replicas_of_torch_count_among_the_gpus(tmp_path: Path) -> None:
    text = TITAN.replace("shard_degree = 2", "replicate_degree = 2").replace("global_batch_size = 256\n", "")
    c = imported(tmp_path, text.replace("degree = 4", "degree = 1"), "t.toml").job["cluster"]
    assert c["nodes"] * c["gpus_per_node"] % 2 == 0
    many = text.replace("replicate_degree = 2", "replicate_degree = 16").replace("degree = 4", "degree = 1")
    c = imported(tmp_path, many, "t.toml").job["cluster"]
    assert c["nodes"] * c["gpus_per_node"] >= 16


def test_layers_balanced_by_seconds_are_balanced_so_when_read_back(tmp_path: Path) -> None:
    text = TITAN.replace("llama3", "deepseek_v3").replace("8B", "671B").replace("degree = 4", "degree = 2", 1)
    text = text.replace('"1F1B"', '"DualPipeV"\nexpert_parallel_degree = 8').replace(
        "shard_degree = 2", "shard_degree = 8"
    )
    job = imported(
        tmp_path, text.replace("256", "64").replace("local_batch_size = 4", "local_batch_size = 8"), "t.toml"
    )
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert main(["export", str(tmp_path / "job.toml"), "--to", "torchtitan", "--out", str(tmp_path / "out")]) == 0


# Shards of a group, copies among groups


FSDP = "distributed_type: FSDP\nnum_processes: 16\n"
HYBRID = "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 8}\n"
AUTO = "recipe: x\nmodel: {pretrained_model_name_or_path: Qwen/Qwen3-8B}\n"
AUTO += "distributed: {strategy: fsdp2, dp_size: 16, dp_replicate_size: 2}\n"


NODES = "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n"
MICS = '{"train_batch_size": 64, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}'
INSTANCES = "--num-distributed-optimizer-instances 2 --tensor-model-parallel-size 2 "


@pytest.mark.parametrize(
    ("framework", "text", "argument", "copies"),
    [
        # torch/distributed/fsdp/_init_utils.py: HYBRID_SHARD shards over a node
        ("accelerate", FSDP + NODES, "fsdp_sharding_strategy", 2),
        ("accelerate", FSDP + HYBRID, "parallelism_config_dp_replicate_size", 2),
        ("automodel", AUTO, "dp_replicate_size", 2),
        ("torchtitan", TITAN.replace("[training]", "data_parallel_replicate_degree = 2\n[training]"),
         "data_parallel_replicate_degree", 2),
        ("deepspeed", MICS, "mics_shard_size", 1),
        ("megatron", MEGATRON + INSTANCES + "--use-distributed-optimizer\n",
         "--num-distributed-optimizer-instances", 2),
    ],
)  # fmt: skip
def test_copies_of_shards_are_those_of_the_framework(
    tmp_path: Path, framework: str, text: str, argument: str, copies: int
) -> None:
    name = {"torchtitan": "t.toml", "deepspeed": "a.json", "megatron": "a.sh"}.get(framework, "a.yaml")
    found = imported(tmp_path, text, name, framework)
    assert found.job["parallel"].get("dp_replicate", 1) == copies
    assert argument in [a.rpartition(".")[2] for a in listed(found, UNDERSTOOD)]
    p = prepare(job_from(found.job)).mesh.sizes
    assert p["dp"] % copies == 0 and (framework != "deepspeed" or p["dp"] == 8)


@pytest.mark.parametrize(
    "more", ["--num-distributed-optimizer-instances 3 --use-distributed-optimizer", INSTANCES + "--zero-stage 0"]
)
def test_copies_of_shards_that_cannot_be_are_assumed_away(tmp_path: Path, more: str) -> None:
    found = imported(tmp_path, MEGATRON + more + "\n", "a.sh", "megatron")
    assert "--num-distributed-optimizer-instances" in listed(found, ASSUMED)
    assert "dp_replicate" not in found.job["parallel"]


# What attention sends over cp


@pytest.mark.parametrize("framework", ["megatron", "megatron-bridge", "primus"])
def test_attention_by_heads_goes_out_and_comes_back(tmp_path: Path, framework: str) -> None:
    script = MEGATRON + "--context-parallel-size 2 --cp-comm-type {} --bf16 --swiglu --disable-bias-linear\n"
    ring, heads = (imported(tmp_path, script.format(how)) for how in ("p2p", "a2a"))
    assert "cp_comm" not in ring.job["parallel"] and heads.job["parallel"]["cp_comm"] == "all_to_all"
    made = export_launch(prepare(job_from(heads.job)), framework)
    assert read_back(made).job["parallel"]["cp_comm"] == "all_to_all" and not made.left_out.keys() & {
        "parallel.cp_comm"
    }
    assert listed(imported(tmp_path, script.format("a2a+p2p")), UNKNOWN) == ["--cp-comm-type"]


def test_attention_by_heads_is_refused_where_a_framework_has_no_word_for_it() -> None:
    job = {"model": {"config": "llama3-8b"}, "cluster": {"nodes": 1}}
    job |= {"parallel": {"cp": 2, "cp_comm": "all_to_all", "zero": 3}}
    with pytest.raises(PiperError) as e:
        export_launch(prepare(job_from(job)), "torchtitan")
    assert e.value.key == "parallel.cp_comm"


def test_sequences_of_deepspeed_are_cut_by_heads(tmp_path: Path) -> None:
    found = imported(tmp_path, MEGATRON + "--deepspeed --ds-sequence-parallel-size 4 --bf16 --swiglu\n")
    assert found.job["parallel"]["cp"] == 4 and found.job["parallel"]["cp_comm"] == "all_to_all"


# The host's share of the optimizer


@pytest.mark.parametrize(
    ("more", "share"),
    [("", None), ("--optimizer-cpu-offload ", 1.0), ("--optimizer-cpu-offload --optimizer-offload-fraction 0.4 ", 0.4)],
)
def test_an_optimizer_on_the_host_is_one(tmp_path: Path, more: str, share: float | None) -> None:
    found = imported(tmp_path, MEGATRON + more + "--bf16 --swiglu\n")
    assert found.job.get("optimizer", {}).get("offload") == share and not listed(found, UNKNOWN)


# Attention that is not fused


@pytest.mark.parametrize("framework", ["megatron", "megatron-bridge", "primus"])
def test_unfused_attention_goes_out_and_comes_back(tmp_path: Path, framework: str) -> None:
    found = imported(tmp_path, MEGATRON + "--attention-backend unfused --bf16 --swiglu --disable-bias-linear\n")
    assert found.job["model"]["attention"] == "unfused"
    made = export_launch(prepare(job_from(found.job)), framework)
    assert read_back(made).job["model"]["attention"] == "unfused" and "model.attention" not in made.left_out


def test_unfused_attention_is_listed_where_a_framework_has_no_word_for_it(tmp_path: Path) -> None:
    job = {
        "model": {"config": "llama3-8b", "attention": "unfused"},
        "parallel": {"zero": 3},
        "cluster": {"gpu": "h100-sxm", "nodes": 1},
    }
    made = export_launch(prepare(job_from(job)), "torchtitan")
    assert "model.attention" in made.left_out


@pytest.mark.parametrize("framework", ["megatron", "megatron-bridge", "torchtitan", "accelerate", "primus"])
def test_fp8_goes_out_and_comes_back(framework: str) -> None:
    job = {"model": {"config": "llama3-8b"}, "parallel": {"zero": 0 if framework == "accelerate" else 3}}
    job |= {"precision": {"compute": "fp8"}, "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8}}
    made = export_launch(prepare(job_from(job)), framework)
    assert read_back(made).job["precision"]["compute"] == "fp8"


# Megatron-DeepSpeed megatron/model/transformer.py: (i + 1) % expert_interval == 0; Megatron-LM: i % freq == 0


def test_every_second_layer_is_another_one_with_deepspeed(tmp_path: Path) -> None:
    words = MEGATRON + "--num-experts 4 --swiglu {}\n"
    for flags, dense in (("--deepspeed --expert-interval 2", {0, 2, 4, 6}), ("--moe-layer-freq 2", {1, 3, 5, 7})):
        moe = prepare(job_from(imported(tmp_path, words.format(flags)).job)).config.moe
        assert moe is not None and set(moe.dense_layers) == dense


def test_deepspeed_pads_the_vocabulary_as_megatron_does(tmp_path: Path) -> None:
    words = MEGATRON.replace("256", "50257") + "--deepspeed --tensor-model-parallel-size 4\n"
    assert imported(tmp_path, words).job["model"]["vocab_size"] == 50688  # 128 · 4 · 99


# NeMo 2's classes, as nemo-run writes them


def test_a_class_of_nemo_2_is_a_model_by_name(tmp_path: Path) -> None:
    found = imported(tmp_path, NEMO.format("Llama3Config8B"), "n.yaml")
    assert found.job["model"]["config"] == "llama3-8b" and found.job["model"]["seq_len"] == 8192
    assert found.job["parallel"]["tp"] == 2 and not listed(found, UNKNOWN)
    odd = imported(tmp_path, NEMO.format("OddConfig"), "n.yaml")
    assert "model.config._target_" in listed(odd, ASSUMED)


@pytest.mark.parametrize("value", ["0", "-1", "1"])
def test_copies_that_are_none_of_torchs_still_have_gpus(tmp_path: Path, value: str) -> None:
    text = TITAN.replace("shard_degree = 2", f"replicate_degree = {value}")
    c = imported(tmp_path, text, "t.toml").job["cluster"]
    assert c["nodes"] >= 1 and c["gpus_per_node"] >= 1


@pytest.mark.parametrize("value", ["0", "-4", "[4, 2]"])
def test_a_batch_that_is_none_of_torchs_still_has_a_job(tmp_path: Path, value: str) -> None:
    found = imported(tmp_path, TITAN.replace("local_batch_size = 4", f"local_batch_size = {value}"), "t.toml")
    assert found.job["schedule"]["microbatches"] >= 1


def test_a_name_of_a_file_that_is_a_table_is_not_understood(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: [[a], {b: 1}]}\n"
    assert listed(imported(tmp_path, text, "a.yaml"), UNKNOWN) == ["deepspeed_config.deepspeed_config_file"]
