"""What a framework takes where its launch says nothing, `auto` or half of it.

Expected values are read off the frameworks' own sources, named beside each.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ir.job.build import prepare
from ir.job.load import job_from
from piper_sim.frameworks.exporting import export_launch, hugging_face
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN, import_launch
from tests.piper_sim.frameworks.test_export import TITAN, prepared, read_back
from tests.piper_sim.frameworks.test_import import imported, listed

SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
MEGATRON = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --vocab-size 256 --bf16 --micro-batch-size 2 "
PIPE = MEGATRON.replace(" 8 pretrain", " 4 pretrain") + "--pipeline-model-parallel-size 4 "

DSA = "--multi-latent-attention --q-lora-rank 24 --experimental-attention-variant dsa "


@pytest.mark.parametrize(
    ("more", "section", "key", "value"),
    [
        # megatron/training/arguments.py: --num-query-groups, default=1
        ("--group-query-attention", "model", "num_key_value_heads", 1),
        # megatron/core/distributed/distributed_data_parallel_config.py: data_parallel_sharding_strategy = 'no_shard'
        ("--use-megatron-fsdp", "parallel", "zero", 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "parallel", "zero", 3),
        # arguments.py: args.global_batch_size = args.micro_batch_size * args.data_parallel_size
        ("--pipeline-model-parallel-size 4", "schedule", "microbatches", 1),
        ("--step-batch-size-schedule '0:16 1B:32 2B:64'", "schedule", "microbatches", 4),
        # arguments.py: ffn_hidden_size is less with --swiglu alone
        ("--swiglu", "model", "intermediate_size", 128),
        ("--quick-geglu", "model", "intermediate_size", 256),
        # arguments.py: _add_mla_args
        ("--multi-latent-attention --swiglu --kv-lora-rank 16", "model", "qk_nope_head_dim", 128),
        ("--multi-latent-attention --swiglu", "model", "kv_lora_rank", 32),
        ("--multi-latent-attention --num-experts 4", "model", "q_lora_rank", 0),
        ("--multi-latent-attention --num-experts 4", "model", "n_shared_experts", 0),
        # megatron/core/transformer/transformer_config.py: experimental_attention_variant
        (DSA + "--dsa-indexer-n-heads 8", "model", "model_type", "deepseek_v32"),
        (DSA + "--dsa-indexer-n-heads 8 --dsa-indexer-loss-coeff 0", "model", "index_n_heads", 8),
        (DSA + "--dsa-indexer-topk 512 --dsa-indexer-head-dim 64", "model", "index_topk", 512),
        ("--multi-latent-attention --dsa-indexer-topk 512", "model", "index_topk", None),
        # megatron/core/tokenizers: a null tokenizer's vocab_size is _vocab_size_without_eod + 1, and padded
        ("--tokenizer-type NullTokenizer --vocab-size 1280", "model", "vocab_size", 1408),
        # arguments.py: moe_freq_type
        ("--num-experts 4 --moe-layer-freq '([1]*3+[0]*1)*2'", "model", "mlp_only_layers", [3, 7]),
        # arguments.py: params_dtype, and accumulate_allreduce_grads_in_fp32, which bf16 sets unless told otherwise
        ("", "precision", "grads", None),
        ("--grad-reduce-in-bf16", "precision", "grads", "bf16"),
        ("--grad-reduce-in-bf16", "precision", "reduce", "bf16"),
        ("--main-grads-dtype bf16 --use-precision-aware-optimizer", "precision", "reduce", "bf16"),
        ("--accumulate-allreduce-grads-in-fp32", "precision", "reduce", None),
    ],
)
def test_what_megatron_takes_by_itself(tmp_path: Path, more: str, section: str, key: str, value: object) -> None:
    found = imported(tmp_path, MEGATRON + more)
    assert found.job[section].get(key) == value and not listed(found, UNKNOWN)


@pytest.mark.parametrize(
    ("more", "key", "value", "lost"),
    [
        # arguments.py: `if args.recompute_activations: args.recompute_granularity = 'selective'`, wherever it stands
        ("--recompute-activations --recompute-granularity full", "schedule.recompute", "selective", "--recompute-gran"),
        # arguments.py: `if args.use_rotary_position_embeddings: args.position_embedding_type = 'rope'`
        (
            "--use-rotary-position-embeddings --position-embedding-type none",
            "model.position_embedding_type",
            "rope",
            "--position-emb",
        ),
        # arguments.py: `if args.grad_reduce_in_bf16: args.accumulate_allreduce_grads_in_fp32 = False`, of bf16 alone
        ("--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", "precision.grads", "bf16", ""),
        ("--grad-reduce-in-bf16 --fp16", "precision.reduce", "fp16", "--grad-reduce"),
    ],
)
def test_what_wins_in_megatron_wherever_it_stands(tmp_path: Path, more: str, key: str, value: str, lost: str) -> None:
    said = MEGATRON.replace("--bf16 ", "" if "--fp16" in more else "--bf16 ")
    ways = [more, "--".join(["", *more.removeprefix("--").split("--")[::-1]]).replace("--", " --")]
    for found in (imported(tmp_path, said + x) for x in ways):
        section, name = key.split(".")
        assert found.job[section][name] == value and not listed(found, UNKNOWN)
        assert not lost or next(e.note for e in found.entries if e.argument.name.startswith(lost))


def test_torchs_fsdp_under_megatron_goes_without_a_distributed_optimizer(tmp_path: Path) -> None:
    """Primus' llama2_70B-BF16-pretrain.yaml says both, and what stops beside FSDP2 is left off in its others."""
    config = tmp_path / "exp.yaml"
    keys = dict(num_layers=8, hidden_size=64, num_attention_heads=8, seq_length=64, use_distributed_optimizer=False)
    for fsdp, zero in ((True, 3), (False, 0)):
        given = {"framework": "megatron", "overrides": keys | {"use_torch_fsdp2": fsdp}}
        config.write_text(json.dumps({"modules": {"pre_trainer": given}}))
        assert import_launch(str(config)).job["parallel"]["zero"] == zero


def test_half_gradients_of_megatron_come_back_as_they_went_out(tmp_path: Path) -> None:
    fp16 = MEGATRON.replace("--bf16", "--fp16")
    half, wide = (imported(tmp_path, fp16 + x).job["precision"] for x in ("", "--accumulate-allreduce-grads-in-fp32"))
    assert (half["grads"], half["reduce"]) == ("fp16", "fp16") and "reduce" not in wide
    for said in ({"compute": "fp16"}, half, wide, {"compute": "bf16", "grads": "bf16", "reduce": "bf16"}):
        made = export_launch(prepared(precision=said), "megatron")
        assert not {k for k in made.left_out if k.startswith("precision")}
        assert prepare(job_from(read_back(made).job)).job.precision == prepare(job_from(made.read.job)).job.precision


# arguments.py: _print_args, of every argument, those that bear on nothing too


def test_a_log_states_sizes_of_latent_attention_where_there_is_none(tmp_path: Path) -> None:
    said = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64, "bf16": True}
    said |= {"multi_latent_attention": False, "kv_lora_rank": 32, "qk_head_dim": 128, "v_head_dim": 128, "tp": 1}
    lines = [f"  {k} {'.' * 20} {v}" for k, v in said.items()]
    config = prepare(job_from(imported(tmp_path, "\n".join(lines), "run.log").job)).config
    assert config.mla is None and config.head_dim == 8


def test_latent_attention_has_only_what_the_launch_says(tmp_path: Path) -> None:
    found = imported(tmp_path, MEGATRON + "--multi-latent-attention --num-experts 4 --swiglu --disable-bias-linear")
    config = prepare(job_from(found.job)).config
    assert config.mla is not None and config.moe is not None
    assert (config.mla.q_rank, config.mla.kv_rank, config.moe.shared_ffn) == (0, 32, 0)
    assert hugging_face(job_from(found.job))["q_lora_rank"] is None


def test_weights_of_tokens_that_do_not_add_up_to_one_are_said_so() -> None:
    parts = {"model": {"config": "deepseek-v2-lite", "seq_len": 4096}, "parallel": {"ep": 8}}
    made = export_launch(prepared(**parts), "megatron")
    assert "--moe-router-pre-softmax" in made.files["launch.sh"]
    moe = prepare(job_from(read_back(made).job)).config.moe
    assert moe is not None and not moe.normalised
    whole = export_launch(prepared(**parts | {"model": {"config": "deepseek-v3", "seq_len": 4096}}), "megatron")
    assert "--moe-router-pre-softmax" not in whole.files["launch.sh"]


def test_layers_that_megatron_counts_beside_the_decoders_make_chunks_too(tmp_path: Path) -> None:
    # arguments.py: num_layers += 1 for each of account_for_embedding_in_pipeline_split and …loss…
    ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    text = PIPE.replace("--num-layers 8", "--num-layers 14") + ends + " --num-layers-per-virtual-pipeline-stage 2"
    found = imported(tmp_path, text)
    assert found.job["schedule"]["stages_per_rank"] == 2 and found.job["parallel"]["layers"] == "even"
    assert "--num-layers-per-virtual-pipeline-stage" in listed(found, UNDERSTOOD)


# sbatch(1), srun(1), mpirun(1): tasks are ranks only where no launcher starts some of its own


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --ntasks=4\nsrun torchrun --nnodes 4 --nproc_per_node 8 {}", (4, 8)),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=1\nsrun --exclusive {}", (4, 8)),
        ("srun -N 4 -n 32 --gpus-per-node 8 python {}", (4, 8)),
        ("srun -N 2 --ntasks-per-node 4 python {}", (2, 4)),
        ("mpirun -np 16 python {}", (2, 8)),
        # deepspeed/launcher/runner.py: parse_resource_filter
        ("deepspeed --include localhost:0,1,2,3 {}", (1, 4)),
        ("deepspeed --include='a:0,1@b:0,1' {}", (2, 2)),
        # slurm's gres: name[:type][:count], several of them
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8,nvme:1\nsrun python {}", (4, 8)),
        ("#SBATCH --nodes=4\n#SBATCH --gres=nvme:2,gpu:a100:4(S:0-1)\nsrun python {}", (4, 4)),
        ("#SBATCH --nodes=4\n#SBATCH --gres=nvme:1\nsrun --ntasks-per-node=8 python {}", (4, 8)),
        # torch/distributed/run.py: --nnodes MIN:MAX
        ("torchrun --nnodes=4:4 --nproc-per-node=8 {}", (4, 8)),
        # srun(1): -N4; mpirun(1) of Open MPI: -N is ranks of a node
        ("#SBATCH -N4\nsrun -n32 --gpus-per-node=8 python {}", (4, 8)),
        ("mpirun -np 32 -N 8 python {}", (4, 8)),
        # what starts a launcher has options of its own, by the same names
        ("docker run --gpus 8 img torchrun --nnodes 4 --nproc_per_node 8 {}", (4, 8)),
        (
            "srun -N 4 --ntasks-per-node=1 docker run --gpus 8 img torchrun --nnodes 4 --nproc_per_node 8 {}",
            (4, 8),
        ),
        ("nice -n 10 /usr/bin/torchrun --nproc_per_node 4 {}", (1, 4)),
        ("nsys profile -n true torchrun --nproc_per_node 4 {}", (1, 4)),
    ],
)
def test_a_launcher_says_how_many_ranks_there_are(tmp_path: Path, start: str, ranks: tuple[int, int]) -> None:
    found = imported(tmp_path, "#!/bin/bash\n" + start.format(f"pretrain_gpt.py {SIZES} --bf16"))
    assert (found.job["cluster"]["nodes"], found.job["cluster"]["gpus_per_node"]) == ranks
    assert not listed(found, UNKNOWN)
    per = [e.argument.value for e in found.entries if e.key == "cluster.gpus_per_node" and e.list == ASSUMED]
    assert per == ([8] if "-np 16" in start else []), "which nobody states"


def test_hosts_with_other_numbers_of_devices_are_not_understood(tmp_path: Path) -> None:
    found = imported(tmp_path, f"deepspeed --include='a:0,1,2@b:0' pretrain_gpt.py {SIZES} --bf16")
    assert (found.job["cluster"]["nodes"], found.job["cluster"]["gpus_per_node"]) == (2, 2)
    assert "--include" in listed(found, ASSUMED)


@pytest.mark.parametrize("nodes", ["$NNODES", "1:4"])
def test_a_node_of_which_nobody_says_how_many_there_are_is_used_whole(tmp_path: Path, nodes: str) -> None:
    start = f"torchrun --nproc_per_node 8 --nnodes {nodes} pretrain_gpt.py {SIZES} --bf16"
    found = imported(tmp_path, start + " --tensor-model-parallel-size 2")
    assert (found.job["cluster"]["nodes"], found.job["cluster"]["gpus_per_node"]) == (1, 8)
    assert listed(found, UNKNOWN) == ["--nnodes"] and not any(
        e.key == "cluster.gpus_per_node" for e in found.entries[-6:]
    )


# deepspeed/runtime/engine.py: communication_data_type, get_data_types

DS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
TRAINER = "deepspeed --num_gpus 8 run.py --model_name_or_path meta-llama/Llama-2-7b-hf --deepspeed ds.json "


@pytest.mark.parametrize(
    ("more", "grads", "reduce"),
    [
        ({"bf16": {"enabled": True}}, "bf16", "bf16"),
        ({"fp16": {"enabled": True}}, "fp16", "fp16"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, "fp32", "bf16"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "fp32", "bf16"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "bf16", "fp32"),
        ({"bf16": {"enabled": True}, "fp32_allreduce": True}, "bf16", "fp32"),
        ({}, None, None),
    ],
)
def test_deepspeed_keeps_gradients_in_the_compute_format(
    tmp_path: Path, more: dict[str, Any], grads: str | None, reduce: str | None
) -> None:
    precision = imported(tmp_path, json.dumps(DS | more), "ds.json").job["precision"]
    assert (precision.get("grads"), precision.get("reduce")) == (grads, reduce)


def test_a_batch_that_is_no_product_is_said(tmp_path: Path) -> None:
    said = DS | {"gradient_accumulation_steps": 7, "train_batch_size": 100}
    assert "train_batch_size" in listed(imported(tmp_path, json.dumps(said), "ds.json"), ASSUMED)
    whole = imported(tmp_path, json.dumps(said | {"train_batch_size": 112}), "ds.json")
    assert "train_batch_size" in listed(whole, UNDERSTOOD) and whole.job["cluster"]["gpus_per_node"] == 8


def test_a_bucket_of_deepspeed_has_elements_of_the_format_that_it_reduces(tmp_path: Path) -> None:
    said = DS | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20}}
    assert imported(tmp_path, json.dumps(said), "ds.json").job["parallel"]["bucket_MiB"] == 2
    made = export_launch(prepared(precision={"reduce": "fp32"}, parallel={"zero": 2, "bucket_MiB": 8}), "deepspeed")
    assert "parallel.bucket_MiB" not in made.left_out


def test_an_export_to_deepspeed_says_formats_that_are_not_its_own() -> None:
    made = export_launch(prepared(precision={"compute": "bf16", "reduce": "bf16"}, parallel={"zero": 2}), "deepspeed")
    assert not {k for k in made.left_out if k.startswith("precision")}
    assert read_back(made).job["precision"] == {"compute": "bf16", "grads": "fp32", "reduce": "bf16"}


def test_an_export_says_what_stays_on_the_host() -> None:
    for framework, share in (("deepspeed", 0.5), ("deepspeed", 1.0), ("accelerate", 1.0)):
        made = export_launch(prepared(optimizer={"offload": share}, parallel={"zero": 2}), framework)
        assert "optimizer.offload" not in made.left_out and made.read.job["optimizer"]["offload"] == share
        assert "fp32_allreduce" not in "".join(made.files.values()), "which new ones do not have"
    half = export_launch(prepared(optimizer={"offload": 0.5}, parallel={"zero": 2}), "accelerate")
    assert half.left_out["optimizer.offload"] == 1.0


# transformers/integrations/deepspeed.py: `auto` is what the Trainer's arguments say


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_auto_is_left_to_the_trainer(tmp_path: Path, kind: str) -> None:
    auto = {k: {"enabled": "auto"} for k in ("bf16", "fp16")}
    (tmp_path / "ds.json").write_text(json.dumps(DS | auto | {"gradient_clipping": "auto"}))
    found = imported(tmp_path, f"{TRAINER} --{kind} True --block_size 2048 --max_grad_norm 1.0\n")
    assert found.job["precision"]["compute"] == kind and not listed(found, UNKNOWN)
    assert {"bf16.enabled", "fp16.enabled"} <= {*listed(found, ASSUMED)}
    assert (found.job["model"]["seq_len"], found.job["optimizer"]["clip_norm"]) == (2048, 1.0)


def test_a_block_size_of_files_is_no_length(tmp_path: Path) -> None:
    found = imported(tmp_path, json.dumps(DS | {"aio": {"block_size": 2**20}}), "d.json")
    said = [e.argument.value for e in found.entries if e.key == "model.seq_len" and e.list == ASSUMED]
    assert said == [4096] == [found.job["model"]["seq_len"]], "nobody states it, which is said"


# deepspeed/runtime/pipe/module.py, partition_method "type:transformer": Megatron-DeepSpeed's, and gpt-neox's


def test_deepspeeds_stages_have_as_many_layers_each(tmp_path: Path) -> None:
    text = PIPE + "--deepspeed --zero-stage 1"
    assert imported(tmp_path, text).job["parallel"]["layers"] == "even"
    odd = imported(tmp_path, text.replace("--num-layers 8", "--num-layers 9"))
    assert [e.argument.value for e in odd.entries if e.key == "parallel.layers" and e.list == ASSUMED] == ["balanced"]


def test_gpt_neox_has_a_word_for_no_pipeline(tmp_path: Path) -> None:
    text = '{"pipe-parallel-size": 0, "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64}'
    found = imported(tmp_path, text, "a.yml")
    assert not listed(found, UNKNOWN) and "pp" not in found.job["parallel"]


# megatron/model/transformer.py of gpt-neox: ffn_dim_in; megatron/core/transformer/transformer_config.py: __post_init__


def test_a_gated_mlp_that_nobody_sizes(tmp_path: Path) -> None:
    neox = '{"pipe-parallel-size": 1, "num-layers": 2, "hidden-size": 96, "num-attention-heads": 4, '
    neox += '"activation": "swiglu"}'
    assert prepare(job_from(imported(tmp_path, neox, "a.yml").job)).config.ffn == 128
    bridge = "model: {num_layers: 2, hidden_size: 96, num_attention_heads: 4}\ntrain: {micro_batch_size: 1}\n"
    assert prepare(job_from(imported(tmp_path, bridge, "c.yaml").job)).config.ffn == 384


def test_gpt_neox_says_its_format_in_a_word(tmp_path: Path) -> None:
    found = imported(tmp_path, '{"pipe-parallel-size": 1, "precision": "bfloat16"}', "a.yml")
    assert found.job["precision"]["compute"] == "bf16"


# torchtitan/config/manager.py: --module and --config name an entry of a registry


def test_an_entry_of_torchtitans_registry_is_no_debug_model(tmp_path: Path) -> None:
    found = imported(tmp_path, "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b")
    assert found.job["model"].get("num_hidden_layers") != 6 and {*listed(found, ASSUMED)} >= {"--module", "--config"}


# torchtitan/distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part: embedding and head are a layer each;
# nemo_automodel/components/distributed/pipelining/functional.py: they are none


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ("pipeline_parallel_degree = 2", "even"),
        ("pipeline_parallel_degree = 4", [8, 9, 8, 7]),
        ("pipeline_parallel_degree = 4\npipeline_parallel_last_stage_less_layers = 3", [8, 9, 9, 6]),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"', [8, 9, 8, 7]),
    ],
)
def test_layers_of_torchtitans_stages(tmp_path: Path, more: str, layers: object) -> None:
    found = imported(tmp_path, f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{more}\n', "t.toml")
    assert found.job["parallel"]["layers"] == layers and not listed(found, ASSUMED)


def test_replicas_that_the_gpus_do_not_make_are_said(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('[model]\nname = "llama3"\n[parallelism]\ndata_parallel_shard_degree = 4\n')
    start = "torchrun --nproc_per_node {} -m torchtitan.train --job.config_file t.toml --parallelism.{}"
    for ranks, more, doubtful in ((8, "x", True), (4, "x", False), (8, "data_parallel_replicate_degree 2", False)):
        found = imported(tmp_path, start.format(ranks, more))
        assert ("parallelism.data_parallel_shard_degree" in listed(found, ASSUMED)) == doubtful


def test_layers_of_automodels_stages(tmp_path: Path) -> None:
    text = "step_scheduler: {global_batch_size: 8}\nmodel: {pretrained_model_name_or_path: deepseek-ai/DeepSeek-V3}\n"
    found = imported(tmp_path, text + "distributed: {strategy: fsdp2, pp_size: 4, ep_size: 8}\n", "a.yaml")
    assert found.job["parallel"]["layers"] == [16, 15, 15, 15]


@pytest.mark.parametrize("framework", ["torchtitan", "automodel"])
def test_stages_of_other_lengths_are_named_module_by_module(framework: str) -> None:
    zero = 1 if framework == "torchtitan" else 2
    parts = {"parallel": {"pp": 2, "zero": zero, "layers": [25, 7]}, "model": TITAN}
    made = export_launch(prepared(**parts), framework)
    assert "module_fqns_per_model_part" in "".join(made.files.values())
    assert read_back(made).job["parallel"]["layers"] == [25, 7]
    usual = export_launch(prepared(**parts | {"parallel": {"pp": 2, "zero": zero, "layers": "even"}}), framework)
    assert "module_fqns_per_model_part" not in "".join(usual.files.values())


def test_stages_that_are_no_run_of_layers_are_not_understood(tmp_path: Path) -> None:
    for parts in ('[["tok_embeddings", "layers.1"], ["layers.0", "output"]]', "[1, 2]", '[["layers.0"], []]'):
        more = f"pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = {parts}"
        found = imported(tmp_path, f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{more}\n', "t.toml")
        assert listed(found, UNKNOWN) == ["parallelism.module_fqns_per_model_part"]
