"""What frameworks beside Megatron and torchtitan take where their launches say nothing, or half of it.

Expected values are read off the frameworks' own sources, named beside each.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ir.job.build import prepare
from ir.job.load import job_from
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN
from tests.piper_sim.frameworks.test_import import imported, listed
from tests.piper_sim.frameworks.test_silence import PIPE, SIZES

NEOX = dict(pipe_parallel_size=1, num_layers=8, hidden_size=64, num_attention_heads=8, seq_length=64)


@pytest.mark.parametrize("total", [64, 60])
def test_deepspeed_accumulates_nothing_by_itself(tmp_path: Path, total: int) -> None:
    """deepspeed/runtime/config.py, _set_batch_related_parameters: a train_batch_size alone is one microbatch."""
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": total, "zero_optimization": {"stage": 2}}))
    found = imported(tmp_path, f"deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed_config ds.json {SIZES}\n")
    assert (found.job["schedule"]["microbatch_size"], found.job["schedule"]["microbatches"]) == (total // 16, 1)
    assert ("train_batch_size" in listed(found, ASSUMED)) == bool(total % 16)


# deepspeed/runtime/pipe/module.py: partition_method, which bigscience's gpt_model.py has from --pp-partition-method


@pytest.mark.parametrize(
    ("layers", "pp", "how", "split"),
    [
        # BLOOM's: embedding and head count as layers
        (6, 4, "type:transformer|embedding", (1, 2, 2, 1)),
        (2, 4, "type:transformer|embedding", (0, 1, 1, 0)),
        (8, 4, "type:transformer", (2, 2, 2, 2)),
    ],
)
def test_deepspeeds_stages_are_cut_as_the_launch_says(
    tmp_path: Path, layers: int, pp: int, how: str, split: tuple[int, ...]
) -> None:
    text = PIPE.replace("--num-layers 8", f"--num-layers {layers}") + f"--pp-partition-method '{how}' --deepspeed"
    found = imported(tmp_path, text)
    assert prepare(job_from(found.job)).layers == split and not listed(found, UNKNOWN)


@pytest.mark.parametrize(("how", "list_of"), [("parameters", ASSUMED), ("type:mlp", UNKNOWN)])
def test_a_cut_of_deepspeeds_that_is_not_built_is_listed(tmp_path: Path, how: str, list_of: str) -> None:
    found = imported(tmp_path, f"{PIPE} --pp-partition-method '{how}' --deepspeed")
    assert "--pp-partition-method" in listed(found, list_of)


@pytest.mark.parametrize(
    ("said", "attention", "listed_as"),
    [
        # gpt-neox's megatron/model/transformer.py: use_flash_attention = attention_type == "flash"; global by itself
        ({"attention_config": [[["flash"], "all"]]}, "flash", UNDERSTOOD),
        ({"attention-config": [[["global"], 8]]}, "unfused", UNDERSTOOD),
        ({"attention_config": [[["flash", "global"], 4]]}, "unfused", UNKNOWN),
        ({}, "unfused", None),
    ],
)
def test_attention_of_gpt_neox_is_flash_where_it_says_so(
    tmp_path: Path, said: dict[str, Any], attention: str, listed_as: str | None
) -> None:
    found = imported(tmp_path, json.dumps(NEOX | said), "neox.yml")
    assert found.job["model"]["attention"] == attention
    assert [e.list for e in found.entries if e.argument.name in said] == [listed_as] * bool(said)
    assert said or [e.argument.value for e in found.entries if e.key == "model.attention"] == ["unfused"]


@pytest.mark.parametrize(("fsdp", "zero"), [({"fsdp_config": {"sync_module_states": True}}, 3), ({}, 0)])
def test_llm_foundry_without_a_section_of_fsdp_is_ddp(tmp_path: Path, fsdp: dict[str, Any], zero: int) -> None:
    # composer/trainer/trainer.py: FSDP where a config of it is given, whose sharding_strategy is FULL_SHARD by itself
    text = json.dumps({"global_train_batch_size": 64, "max_seq_len": 64, "model": {"name": "mpt_causal_lm"}} | fsdp)
    assert imported(tmp_path, text, "mpt.yaml").job["parallel"]["zero"] == zero


@pytest.mark.parametrize(("half", "params"), [(False, "fp32"), (True, None)])
def test_weights_of_nemo_are_halved_by_o2(tmp_path: Path, half: bool, params: str | None) -> None:
    # megatron_base_model.py of NeMo: without megatron_amp_O2 forward runs under autocast, on weights in fp32
    model = dict(num_layers=8, hidden_size=64, num_attention_heads=8, encoder_seq_length=64, megatron_amp_O2=half)
    text = json.dumps({"trainer": {"devices": 8, "num_nodes": 1, "precision": "bf16"}, "model": model})
    assert imported(tmp_path, text, "nemo.yaml").job["precision"].get("params") == params


# accelerate/commands/launch.py; utils/dataclasses.py: DeepSpeedPlugin.zero_stage is 2 by itself


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ("--use_fsdp", 3),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", 2),
        ("--use_deepspeed", 2),
        ("--use_deepspeed --zero_stage 3", 3),
        ("--multi_gpu", 0),
        ("", 0),
    ],
)
def test_accelerates_flags_say_what_its_file_would(tmp_path: Path, flags: str, zero: int) -> None:
    text = (
        f"accelerate launch {flags} --mixed_precision bf16 --num_processes 8 train.py --per_device_train_batch_size 2"
    )
    found = imported(tmp_path, text)
    assert found.framework == "accelerate" and not listed(found, UNKNOWN)
    assert (found.job["parallel"]["zero"], found.job["precision"]["compute"]) == (zero, "bf16")
    # accelerator.py: "Upcasted low precision parameters"; FullyShardedDataParallelPlugin.set_mixed_precision; without
    # either, forward runs under autocast, and weights, their gradients and the residual stream stay as they are
    said = found.job["precision"]
    assert (said.get("params"), said.get("reduce")) == (
        None if "deepspeed" in flags else "fp32",
        "bf16" if zero else None,
    )
    assert said.get("residual") == (None if zero else "fp32") and "--mixed_precision" not in listed(found, ASSUMED)
    assert [e.argument.value for e in found.entries if e.key == "parallel.zero" and not e.argument.name] == [0] * (
        not flags
    )
    file = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {gradient_accumulation_steps: 4}\n"
    assert imported(tmp_path, file, "a.yaml").job["parallel"]["zero"] == 2


# nemo_automodel/components/datasets: packed sequences are as long as packed_sequence_size, if it is one


@pytest.mark.parametrize(("size", "length"), [(0, 2048), (8192, 8192)])
def test_packed_sequences_of_automodel(tmp_path: Path, size: int, length: int) -> None:
    text = "step_scheduler: {global_batch_size: 8}\nmodel: {pretrained_model_name_or_path: meta-llama/Llama-2-7b}\n"
    parts = [f"packed_sequence: {{packed_sequence_size: {size}}}\n", "dataset: {seq_length: 2048}\n"]
    for rest in (parts, parts[::-1]):
        assert imported(tmp_path, text + "".join(rest), "a.yaml").job["model"]["seq_len"] == length
