"""What a framework means by a word, where another means something else, or its file says it elsewhere.

Expected values are read off the frameworks' own sources, named beside each.
"""

from pathlib import Path
from typing import Any

import pytest

from ir.job.build import prepare
from ir.job.load import job_from
from piper_sim.app.cli import main
from piper_sim.frameworks.exporting import export_launch
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN
from tests.piper_sim.frameworks.test_export import read_back
from tests.piper_sim.frameworks.test_import import TEXTS, imported, listed
from tests.refusals import refusal

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


# transformers/trainer.py: without DeepSpeed it is accelerate's, DDP under autocast unless --fsdp says otherwise


def test_a_trainer_that_torchrun_starts_is_no_megatron(tmp_path: Path) -> None:
    words = "--model_name_or_path meta-llama/Llama-2-7b-hf --max_seq_length 2048 --bf16 True --gradient_checkpointing"
    words += " --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_grad_norm 0.5 --fsdp full_shard"
    found = imported(tmp_path, f"torchrun --nproc_per_node 8 train.py {words}\n")
    assert found.framework == "accelerate" and listed(found, UNKNOWN) == ["--fsdp"]
    assert (found.job["model"]["config"], found.job["model"]["seq_len"]) == ("llama2-7b", 2048)
    schedule = {"microbatch_size": 4, "microbatches": 2, "recompute": "full"}
    assert found.job["schedule"] == schedule and found.job["optimizer"]["clip_norm"] == 0.5


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
    assert refusal(export_launch, prepare(job_from(job)), "torchtitan").key == "parallel.cp_comm"


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


# Megatron-LM transformer_config.py: fp8_dot_product_attention, fp8_output_proj, moe_hybridep_num_sms


@pytest.mark.parametrize("framework", ["megatron", "megatron-bridge"])
def test_attention_and_head_in_fp8_and_an_exchange_s_sms_go_out_and_come_back(framework: str) -> None:
    sms = {"all_to_all": 32}
    job: dict[str, Any] = {"model": {"config": "mixtral-8x7b", "seq_len": 4096}, "parallel": {"ep": 8}}
    job |= {"cluster": {"gpu": "gb300-nvl72", "nodes": 1, "gpus_per_node": 8, "comm_sms": sms}}
    job |= {"precision": {"compute": "fp8", "attention": "fp8", "head": "fp8"}, "costs": {"dispatcher": "hybridep"}}
    back = read_back(export_launch(prepare(job_from(job)), framework)).job
    assert (back["precision"]["attention"], back["precision"]["head"]) == ("fp8", "fp8")
    assert back["cluster"]["comm_sms"] == sms and back["costs"]["dispatcher"] == "hybridep"


def test_formats_in_fp8_are_nothing_where_products_are_not(tmp_path: Path) -> None:
    words = "--fp8-dot-product-attention --fp8-output-proj --use-transformer-engine-op-fuser"
    found = imported(tmp_path, f"{MEGATRON} --bf16 {words}\n")
    assert not {"attention", "head"} & set(found.job["precision"])
    assert listed(found, ASSUMED) == ["--use-transformer-engine-op-fuser"]


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


def test_a_name_of_a_file_that_is_a_table_is_not_understood(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: [[a], {b: 1}]}\n"
    assert listed(imported(tmp_path, text, "a.yaml"), UNKNOWN) == ["deepspeed_config.deepspeed_config_file"]
