"""What torchtitan and Automodel mean by a word: torch's own pipelining, FSDP2 and optimizers.

Expected values are read off the frameworks' own sources, named beside each.
"""

from pathlib import Path

import pytest

from ir.job.build import precision_of, prepare
from ir.job.load import job_from
from piper_sim.frameworks.exporting import export_launch
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN
from tests.piper_sim.frameworks.test_export import prepared, read_back
from tests.piper_sim.frameworks.test_import import TEXTS, imported, listed

TITAN = TEXTS["texts"]["titan"]

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
    assert found.job["precision"].get("residual") == ("fp32" if "replicate" in more else None), "autocast's"
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


@pytest.mark.parametrize("value", ["0", "-1", "1"])
def test_copies_that_are_none_of_torchs_still_have_gpus(tmp_path: Path, value: str) -> None:
    text = TITAN.replace("shard_degree = 2", f"replicate_degree = {value}")
    c = imported(tmp_path, text, "t.toml").job["cluster"]
    assert c["nodes"] >= 1 and c["gpus_per_node"] >= 1


@pytest.mark.parametrize("value", ["0", "-4", "[4, 2]"])
def test_a_batch_that_is_none_of_torchs_still_has_a_job(tmp_path: Path, value: str) -> None:
    found = imported(tmp_path, TITAN.replace("local_batch_size = 4", f"local_batch_size = {value}"), "t.toml")
    assert found.job["schedule"]["microbatches"] >= 1


# torchtitan/distributed/pipeline_parallel.py: stages_per_rank = 1 if is_single_stage_schedule else 2


@pytest.mark.parametrize("more", ["", "data_parallel_shard_degree = -1\n"])
def test_interleaved_zero_bubble_has_two_stages_a_rank(tmp_path: Path, more: str) -> None:
    stages = f'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "InterleavedZeroBubble"\n{more}'
    found = imported(tmp_path, f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{stages}', "t.toml")
    assert found.job["schedule"]["stages_per_rank"] == 2 and not listed(found, ASSUMED)
    assert prepare(job_from(found.job)).layers == (4, 5, 4, 4, 4, 4, 4, 3)


# train.py: global_batch_size is a multiple of local_batch_size times replicas; parallel_dims.py: etp is 1 or tp


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--training.local_batch_size 16 --training.global_batch_size 32", "--training.global_batch_size"),
        ("--parallelism.expert_tensor_parallel_degree 2", "--parallelism.expert_tensor_parallel_degree"),
        (
            "--parallelism.pipeline_parallel_schedule DualPipeV --parallelism.pipeline_parallel_layers_per_stage 15",
            "--parallelism.pipeline_parallel_layers_per_stage",
        ),
        ("--training.local_batch_size 16 --training.global_batch_size 128", None),
    ],
)
def test_what_torchtitan_stops_at_is_said(tmp_path: Path, words: str, named: str | None) -> None:
    (tmp_path / "t.toml").write_text(
        '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[parallelism]\npipeline_parallel_degree = 2\n'
    )
    start = "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file t.toml"
    found = imported(tmp_path, f"{start} --parallelism.expert_parallel_degree 4 {words}")
    assert listed(found, ASSUMED) == [named] * (named is not None)


@pytest.mark.parametrize(("tp", "said"), [(8, []), (16, ["parallel.tp"])])
def test_ranks_beyond_kv_heads_are_said(tmp_path: Path, tp: int, said: list[str]) -> None:
    (tmp_path / "t.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    start = "torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train --job.config_file t.toml"
    found = imported(tmp_path, f"{start} --parallelism.tensor_parallel_degree {tp}")
    assert [e.key for e in found.entries if "only Megatron-Core" in e.note] == said


# torchtitan/config/manager.py parses by tyro, whose flags say no in front of a key's last word


@pytest.mark.parametrize("flag", ["--compile.no-enable", "--compile.no_enable", "--compile.enable"])
def test_a_flag_that_says_no_turns_off_what_the_file_has(tmp_path: Path, flag: str) -> None:
    (tmp_path / "t.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[compile]\nenable = true\n')
    found = imported(tmp_path, f"torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file t.toml {flag}")
    assert (found.job["costs"]["software"] == "torchtitan") == ("no" in flag)
    assert flag in listed(found, UNDERSTOOD)
    odd = imported(
        tmp_path, "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file t.toml --compile.no-such"
    )
    assert listed(odd, UNKNOWN) == ["--compile.no-such"]
