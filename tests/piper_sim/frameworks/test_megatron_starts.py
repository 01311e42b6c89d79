"""What is written for Megatron starts there: its own checks of arguments, typed in from its sources, find nothing.

`validate_args` is in megatron/training/arguments.py, the rest in megatron/core/transformer/transformer_config.py and
megatron/core/pipeline_parallel/schedules.py (0.15). A GPU of Hopper or before is taken.
"""

import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from piper_sim.frameworks.exporting import LAUNCH, export_launch
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD
from tests.piper_sim.frameworks.test_export import jobs, prepared, read_back
from tests.piper_sim.frameworks.test_import import imported, listed
from tests.refusals import refusal

LAYOUT = {"--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"}
LAYOUT |= {"--pipeline-model-parallel-layout"}
SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
MEGATRON = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --vocab-size 256 --micro-batch-size 1 "
EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-grouped-gemm "
CHUNKS = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer "


def said(script: str) -> tuple[dict[str, str], dict[str, str]]:
    """The environment and the arguments of a script, each with its words."""
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    env = dict(w.split("=", 1) for a, w in pairwise(words) if a == "export")
    found: dict[str, list[str]] = {}
    for w in words:
        if w.startswith("--"):
            at = found.setdefault(w, [])
        elif found:
            at.append(w)
    return env, {k: " ".join(v) for k, v in found.items()}


def refused(script: str, mbs: int) -> Iterator[str]:
    """What Megatron would stop at."""
    env, a = said(script)
    size = {k: int(a.get(f"--{k}-model-parallel-size", 1)) for k in ("tensor", "pipeline", "expert")}
    tied = size["tensor"] > 1 or int(a.get("--context-parallel-size", 1)) > 1
    one, fsdp = env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", "--use-megatron-fsdp" in a
    modules = a.get("--recompute-modules", "").split()
    virtual = bool(LAYOUT & {*a}) and ("|" not in a.get("--pipeline-model-parallel-layout", "|") or None)
    checks = {
        "there are positions for all tokens": int(a.get("--max-position-embeddings", 0))
        >= int(a.get("--seq-length", 0)),
        "no more than one of the three": len(LAYOUT & {*a}) <= 1,
        "moe_act takes grouped_gemm": "moe_act" not in modules or "--moe-grouped-gemm" in a,
        "mla_up_proj takes latent attention": "mla_up_proj" not in modules or "--multi-latent-attention" in a,
        "CUDA_DEVICE_MAX_CONNECTIONS is 1": one or fsdp or not tied or "--overlap-moe-expert-parallel-comm" in a,
        "FSDP takes CUDA_DEVICE_MAX_CONNECTIONS > 1": not (one and fsdp),
        "FSDP takes its own checkpoints": not fsdp or a.get("--ckpt-format") == "fsdp_dtensor",
        "gathers overlap with the distributed optimizer": "--overlap-param-gather" not in a
        or ("--overlap-grad-reduce" in a and ("--use-distributed-optimizer" in a or fsdp)),
        "experts and tp take sequence_parallel": not ("--num-experts" in a and size["tensor"] > 1)
        or "--sequence-parallel" in a,
    }
    if "--overlap-moe-expert-parallel-comm" in a:
        checks["overlapped all-to-alls take ep"] = size["expert"] > 1
        checks["and stages of their own"] = size["pipeline"] == 1 or virtual is not False
        checks["and no full recompute"] = a.get("--recompute-granularity") != "full"
    if "--num-virtual-stages-per-pipeline-rank" in a:
        checks["rounds are whole"] = mbs % size["pipeline"] == 0
    yield from (text for text, holds in checks.items() if not holds)


@settings(max_examples=60, deadline=None)
@given(jobs(("megatron", "primus")))
def test_megatron_starts_what_is_written(drawn: tuple[str, PreparedJob]) -> None:
    _, job = drawn
    script = export_launch(job, "megatron").files[LAUNCH]
    assert [*refused(script, job.mbs)] == []
    _, a = said(script)
    dp = job.mesh.sizes["dp"] * job.mesh.sizes["cp"]
    assert ("--overlap-grad-reduce" in a) == (dp > 1)  # what is presumed of every launch is said
    assert ("--overlap-param-gather" in a) == (dp > 1 and job.job.parallel.zero > 0)
    assert (a.get("--moe-token-dispatcher-type") == "alltoall") == (job.config.moe is not None)


def test_megatron_has_positions_for_sequences_longer_than_the_model_was_made_for() -> None:
    job = {"model": {"config": "llama2-7b", "seq_len": 8192}, "schedule": {"microbatches": 1}}
    script = export_launch(prepare(job_from(job)), "megatron").files[LAUNCH]
    assert "--max-position-embeddings 8192" in script and [*refused(script, 1)] == []


def test_the_checks_stop_what_was_written_before() -> None:
    """The control: what an export of this repository once wrote."""
    old = "pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    old += " --recompute-modules layernorm mla_up_proj moe_act"
    old += " --pipeline-model-parallel-layout 'Et|t|t|tL' --num-virtual-stages-per-pipeline-rank 2"
    assert len([*refused(old + " --use-megatron-fsdp", 3)]) == 5


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"schedule": {"recompute": ["norm", "activation"]}}, "schedule.recompute"),
        ({"parallel": {"pp": 2}, "schedule": {"name": "interleaved-1f1b", "microbatches": 3}}, "schedule.microbatches"),
        ({"parallel": {"pp": 2}, "schedule": {"name": "1f1b-overlap"}}, "schedule.name"),
    ],
)
def test_what_megatron_would_not_start_is_refused_by_its_key(sections: dict[str, Any], key: str) -> None:
    assert refusal(export_launch, prepared(**sections), "megatron", match=f"megatron cannot say {key}").key == key


def unsaid(tmp_path: Path, more: str) -> str:
    return " ".join(e.note for e in imported(tmp_path, MEGATRON + more).entries if e.list == ASSUMED and not e.key)


@pytest.mark.parametrize(
    ("argument", "lacks"),
    [
        ("--overlap-param-gather", f"{CHUNKS}--overlap-grad-reduce --use-distributed-optimizer"),
        ("--moe-token-dispatcher-type", OVERLAP + EXPERTS),
    ],
)
def test_what_is_presumed_though_megatron_does_otherwise_by_itself_is_said(
    tmp_path: Path, argument: str, lacks: str
) -> None:
    assert argument in unsaid(tmp_path, lacks)
    assert argument not in unsaid(tmp_path, OVERLAP + EXPERTS + "--moe-token-dispatcher-type alltoall")
    alone = "--tensor-model-parallel-size 8"  # one replica: nothing to reduce
    assert argument not in unsaid(tmp_path, alone)


def test_gathers_that_a_ranks_only_stage_waits_for_are_not_understood_as_overlapped(tmp_path: Path) -> None:
    name, one = "--overlap-param-gather", imported(tmp_path, MEGATRON + OVERLAP)
    assert name in listed(one, ASSUMED) and name not in listed(one, UNDERSTOOD)
    assert name not in unsaid(tmp_path, "--use-distributed-optimizer"), "predicted as it runs without"
    for more in (CHUNKS + OVERLAP, OVERLAP + "--tensor-model-parallel-size 8", "--overlap-param-gather"):
        assert name in listed(imported(tmp_path, MEGATRON + more), UNDERSTOOD)
    text = "model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_length: 64}\n"
    text += "train: {micro_batch_size: 2, global_batch_size: 32}\n"
    off = imported(tmp_path, text + "ddp: {use_distributed_optimizer: true, overlap_param_gather: false}\n", "c.yaml")
    assert "ddp.overlap_param_gather" in listed(off, UNDERSTOOD)


def test_experts_are_one_product_where_the_script_asks_for_it(tmp_path: Path) -> None:
    asked, not_asked = (imported(tmp_path, MEGATRON + x) for x in (EXPERTS, EXPERTS.replace("--moe-grouped-gemm", "")))
    assert "grouped_gemm" not in asked.job["costs"] and not_asked.job["costs"]["grouped_gemm"] is False
    assert "grouped_gemm" not in imported(tmp_path, MEGATRON).job["costs"], "no experts"
    for found in (asked, not_asked):
        again = read_back(export_launch(prepare(job_from(found.job)), "megatron"))
        assert again.job["costs"].get("grouped_gemm") == found.job["costs"].get("grouped_gemm")


def test_reductions_run_beside_passes_where_the_script_asks_for_it(tmp_path: Path) -> None:
    """As megatron's own default, with its buckets; not of a single replica, nor where FSDP divides gradients."""
    key = "overlap_grad_reduce"
    said, silent = (imported(tmp_path, MEGATRON + more).job["parallel"] for more in ("--overlap-grad-reduce ", ""))
    assert said[key] is True and said["bucket_MiB"] == pytest.approx(40e6 * 4 / 2**20)
    assert silent[key] is False and "bucket_MiB" not in silent
    for more in ("--tensor-model-parallel-size 8", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"):
        assert key not in imported(tmp_path, MEGATRON + more).job["parallel"]


def test_tokens_that_are_gathered_by_all_are_not_understood(tmp_path: Path) -> None:
    words = OVERLAP + EXPERTS + "--moe-token-dispatcher-type "
    assert "--moe-token-dispatcher-type" in listed(imported(tmp_path, MEGATRON + words + "allgather"), ASSUMED)
    assert "--moe-token-dispatcher-type" in listed(imported(tmp_path, MEGATRON + words + "alltoall"), UNDERSTOOD)


# megatron/core/transformer/transformer_layer.py: "mlp" is dense layers' alone; moe_layer.py: "moe", "shared_experts"


@pytest.mark.parametrize(
    ("modules", "experts", "parts"),
    [
        ("mlp", "", ["mlp"]),
        ("moe", EXPERTS, ["mlp"]),
        ("mlp", EXPERTS, None),
        ("shared_experts layernorm", EXPERTS, ["norm"]),
        ("moe_act", EXPERTS, ["activation"]),
        ("moe_act", "", None),
    ],
)
def test_a_module_is_recomputed_where_there_is_one(
    tmp_path: Path, modules: str, experts: str, parts: list[str] | None
) -> None:
    text = f"{MEGATRON}{experts}--recompute-granularity selective --recompute-modules {modules}"
    found = imported(tmp_path, text)
    assert found.job["schedule"].get("recompute") == parts
    whole = parts is not None and len(parts) == len(modules.split())
    assert ("--recompute-modules" in listed(found, UNDERSTOOD)) == whole
    if whole and experts:
        _, a = said(export_launch(prepared(**found.job), "megatron").files[LAUNCH])
        assert a["--recompute-modules"] == modules


# torchtitan config/job_config.py: Compile.components is ["model", "loss"]; components/loss.py: rescale and compile


@pytest.mark.parametrize(
    ("said", "software", "doubtful"),
    [
        ("[compile]\nenable = true", "torchtitan-compiled-loss", False),
        ('[compile]\nenable = true\ncomponents = ["loss", "model"]', "torchtitan-compiled-loss", False),
        ('[compile]\nenable = true\ncomponents = ["model"]', "torchtitan-compiled", False),
        ('[compile]\nenable = true\ncomponents = ["loss"]', "torchtitan", True),
        ('[compile]\ncomponents = ["model"]', "torchtitan", False),
        ("[training]\ncompile = true", "torchtitan-compiled", False),
    ],
)
def test_what_torchtitan_compiles_is_its_software_and_comes_back(
    tmp_path: Path, said: str, software: str, doubtful: bool
) -> None:
    found = imported(tmp_path, f'[model]\nname = "llama3"\nflavor = "8B"\n{said}\n', "t.toml", "torchtitan")
    assert found.job["costs"]["software"] == software
    assert (listed(found, ASSUMED) == ["compile.components"]) == doubtful
    made = export_launch(prepared(**found.job), "torchtitan")
    assert read_back(made).job["costs"]["software"] == software and "costs.software" not in made.left_out


# and what does not start there is said where it is imported: `validate_args`, TransformerConfig, GPTModel's layer specs


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--num-experts 4 --moe-layer-freq [0]*1+[1]*3", "--moe-layer-freq"),
        ("--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank"),
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage"),
        ("--decoder-first-pipeline-num-layers 3", "--decoder-first-pipeline-num-layers"),
        ("--pipeline-model-parallel-layout 'Ett|t*6L'", "--pipeline-model-parallel-layout"),
        (CHUNKS + "--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank"),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
            "--account-for-embedding-in-pipeline-split",
            "--account-for-embedding-in-pipeline-split",
        ),
        ("--swiglu --squared-relu", "--swiglu"),
        ("--bf16 --fp16", "--bf16"),
        ("--num-experts 4 --expert-model-parallel-size 3", "parallel.ep"),
        ("--num-experts 4 --expert-model-parallel-size 8", "parallel.ep"),
        ("--num-experts 16 --expert-model-parallel-size 16", "parallel.ep"),
        ("--num-experts 4 --tensor-model-parallel-size 2", "parallel.sequence_parallel"),
        ("--context-parallel-size 8 --seq-length 40", "parallel.cp"),
        (CHUNKS + "--global-batch-size 12", "schedule.microbatches"),
    ],
)
def test_what_megatron_stops_at_is_said(tmp_path: Path, words: str, named: str) -> None:
    found = imported(tmp_path, MEGATRON + words)
    assert named in {e.argument.name or e.key for e in found.entries if e.list != UNDERSTOOD}


@pytest.mark.parametrize(
    "words",
    [
        "--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)*2",
        "--num-virtual-stages-per-pipeline-rank 1 --num-layers-per-virtual-pipeline-stage 8",
        CHUNKS + "--global-batch-size 16",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 16",
        "--num-experts 8 --expert-model-parallel-size 8 --swiglu",
        "--use-rotary-position-embeddings --position-embedding-type learned_absolute",
    ],
)
def test_what_it_takes_is_not(tmp_path: Path, words: str) -> None:
    found = imported(tmp_path, MEGATRON + words)
    assert not [e for e in found.entries if e.list != UNDERSTOOD and (e.argument.name or "load" in e.note)]
    assert not [e for e in found.entries if "stops" in e.note]
