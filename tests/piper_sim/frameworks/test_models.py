"""Imported models: parameters and FLOPs in closed form of the script's own numbers; out again as the same arguments."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.job.build import prepare
from ir.job.load import job_from
from ir.job.model import read_model
from ir.workload import model_chunks
from ir.workload.config.load import raw_config
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from piper_sim.frameworks.exporting import export_launch
from piper_sim.frameworks.importing import ImportedJob, import_launch
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.model import NO_MODEL, named
from tests.ir.workload.test_families import parameters
from tests.piper_sim.frameworks.test_export import read_back
from tests.piper_sim.frameworks.test_import import ASSUMED, UNKNOWN, imported, listed
from tests.refusals import refusal

ACTS = {"": 1, "--swiglu": 2, "--squared-relu": 1, "--quick-geglu": 2}
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope"
Numbers = dict[str, Any]


@st.composite
def scripts(draw: st.DrawFn) -> Numbers:
    """A Megatron-LM GPT's numbers; what is left out of the script is Megatron's default."""
    n: Numbers = {"layers": draw(st.integers(1, 4)), "heads": draw(st.sampled_from([4, 8])), "s": 64, "vocab": 256}
    n |= {"h": n["heads"] * draw(st.sampled_from([8, 16])), "ffn": draw(st.sampled_from([96, 128]))}
    n |= {"d": draw(st.sampled_from([8, 16])), "kv": draw(st.sampled_from([2, 4, n["heads"]]))}
    n |= {k: draw(st.booleans()) for k in ("bias", "qkv", "qk", "rms", "untied")}
    n |= {"act": draw(st.sampled_from([*ACTS])), "place": draw(st.sampled_from(["learned_absolute", "rope", "none"]))}
    n |= {"experts": draw(st.sampled_from([0, 4])), "shared": draw(st.sampled_from([0, 32])), "dense": 0}
    if n["experts"]:
        n |= {"dense": draw(st.integers(0, n["layers"] - 1)), "efn": draw(st.sampled_from([32, 48])), "top": 2}
    return n


def script(n: Numbers) -> str:
    """The launch."""
    words = f"--num-layers {n['layers']} --hidden-size {n['h']} --num-attention-heads {n['heads']}"
    words += f" --ffn-hidden-size {n['ffn']} --kv-channels {n['d']} --seq-length {n['s']} --vocab-size {n['vocab']}"
    words += f" --max-position-embeddings {n['s']} --position-embedding-type {n['place']} {n['act']} --bf16"
    words += f" --group-query-attention --num-query-groups {n['kv']}" if n["kv"] != n["heads"] else ""
    flags = {"qkv": "--add-qkv-bias", "qk": "--qk-layernorm", "untied": "--untie-embeddings-and-output-weights"}
    words += "".join(f" {flag}" for k, flag in flags.items() if n[k])
    words += ("" if n["bias"] else " --disable-bias-linear") + (" --normalization RMSNorm" if n["rms"] else "")
    if n["experts"]:
        words += f" --num-experts {n['experts']} --moe-router-topk {n['top']} --moe-ffn-hidden-size {n['efn']}"
        words += f" --moe-shared-expert-intermediate-size {n['shared']}" if n["shared"] else ""
        pattern = f"[0]*{n['dense']}+[1]*{n['layers'] - n['dense']}"
        words += f" --moe-layer-freq {shlex.quote(pattern)}" if n["dense"] else ""
    return f"torchrun --nproc_per_node 1 pretrain_gpt.py {words}\n"


def closed(n: Numbers) -> tuple[int, int]:
    """Parameters, and FLOPs of one sequence's forward: causal attention counted half."""
    h, q, kv, ups, norm = n["h"], n["heads"] * n["d"], n["kv"] * n["d"], ACTS[n["act"]], 1 if n["rms"] else 2
    products = h * (q + 2 * kv) + q * h
    attn = products + n["bias"] * h + (n["bias"] or n["qkv"]) * (q + 2 * kv) + n["qk"] * 2 * norm * n["d"]
    mlp = [(ups + 1) * h * f + n["bias"] * (ups * f + h) for f in (n["ffn"], n.get("efn", 0), n["shared"])]
    sparse = n["layers"] - n["dense"] if n["experts"] else 0
    moe = n["experts"] * (mlp[1] + h) + (mlp[2] if n["shared"] else 0)
    ends = n["vocab"] * h * (1 + n["untied"]) + (n["s"] * h if n["place"] == "learned_absolute" else 0) + norm * h
    total = n["layers"] * (attn + 2 * norm * h) + (n["layers"] - sparse) * mlp[0] + sparse * moe + ends
    used = (n["layers"] - sparse) * n["ffn"] + sparse * (n.get("top", 0) * n.get("efn", 0) + n["shared"])
    linear = n["layers"] * (products + q * n["s"]) + (ups + 1) * h * used + sparse * h * n["experts"]
    return total, 2 * n["s"] * (linear + n["vocab"] * h)


def counted(found: ImportedJob) -> tuple[int, int]:
    """The same of the job."""
    config = prepare(job_from(found.job)).config
    shape = MicrobatchShape(1, 64)
    parts = ((c, p) for c in model_chunks(config) for p in c.parts)
    works = (part_work(config, c, p, PartLayout(), shape, ModelPrecision(), "flash") for c, p in parts)
    return parameters(config), sum(w.model_flops for w in works)


@settings(max_examples=30, deadline=None)
@given(scripts(), st.sampled_from(["megatron", "megatron-bridge", "primus"]))
def test_a_script_has_its_own_parameters_and_flops(tmp_path_factory: Any, n: Numbers, framework: str) -> None:
    found = imported(tmp_path_factory.mktemp("x"), script(n))
    assert not listed(found, ASSUMED) and not listed(found, UNKNOWN)
    assert counted(found) == closed(n)
    assert counted(found) != closed(n | {"ffn": n["ffn"] + 8, "vocab": n["vocab"] + 8})
    once = read_back(export_launch(prepared := prepare(job_from(found.job)), framework))
    again = prepare(job_from(once.job))
    assert replace(again.config, source="") == replace(prepared.config, source="")
    assert read_back(export_launch(again, framework)).job == once.job


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (f"{LLAMA} --disable-bias-linear", "llama"),
        (LLAMA, "llama"),
        (f"{LLAMA} --disable-bias-linear --add-qkv-bias", "qwen2"),
        (f"{LLAMA} --disable-bias-linear --qk-layernorm", "qwen3"),
        (f"{LLAMA} --qk-layernorm", "megatron"),
        ("", "gpt2"),
        ("--group-query-attention --num-query-groups 2", "megatron"),
        ("--position-embedding-type rope", "megatron"),
        ("--swiglu --position-embedding-type rope --disable-bias-linear", "megatron"),
        ("--squared-relu --position-embedding-type rope --disable-bias-linear", "nemotron"),
    ],
)
def test_a_family_of_the_hub_is_named_where_it_says_just_the_same(tmp_path: Path, words: str, kind: str) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256"
    found = imported(tmp_path, f"torchrun pretrain_gpt.py {sizes} {words}\n")
    assert found.job["model"]["model_type"] == kind and not listed(found, ASSUMED)
    prepared = prepare(job_from(found.job))
    if kind == "megatron":
        refusal(export_launch, prepared, "accelerate", match="no class of transformers")
    else:
        assert f'"{kind}"' in export_launch(prepared, "accelerate").files["config.json"]


def test_every_model_that_is_known_by_name_has_a_preset_and_predicts() -> None:
    from ir.workload import presets

    rows = tables()["hub"]
    assert {row["preset"] for row in rows.values()} <= {*presets()}
    for name in ("google/gemma-2-9b-it", "openai/gpt-oss-20b", "meta-llama/Llama-4-Scout-17B-16E", "Qwen/Qwen2.5-7B"):
        assert named(None, name) is not None, name
    assert named("llama4", "17bx128e") == {"preset": "llama4-maverick"} and named("llama4", "8B") is None


@pytest.mark.parametrize(
    ("said", "config"), [("gpt_oss_20B", "gpt-oss-20b"), ("llama3.1_8B", "llama3-8b"), ("grok1", None)]
)
def test_a_model_file_of_primus_that_is_not_there_is_the_published_model(
    said: str, config: str | None, tmp_path: Path
) -> None:
    """Assumed, and said so; what is not known by name stays unknown, with a placeholder."""
    trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": f"${{PRIMUS_MODEL:{said}}}.yaml"}
    trainer["overrides"] = {"micro_batch_size": 1, "global_batch_size": 8, "seq_length": 4096}
    (tmp_path / "x.yaml").write_text(json.dumps({"modules": {"pre_trainer": trainer}, "work_group": "x"}))
    found = import_launch(str(tmp_path / "x.yaml")).to_dict()
    lists = {e["argument"]: n for n in (ASSUMED, UNKNOWN) for e in found[n]}  # type: ignore[attr-defined]
    assert lists["modules.pre_trainer.model"] == (UNKNOWN if config is None else ASSUMED)
    assert found["job"]["model"]["config"] == (config or NO_MODEL)  # type: ignore[index]
    assert found["framework"] == "primus"


@pytest.mark.parametrize("name", ["dbrx", "gpt-oss-20b", "deepseek-v2-lite", "llama3-8b"])
def test_a_config_beside_a_launch_is_the_model_that_it_is_by_itself(tmp_path: Path, name: str) -> None:
    """Of DBRX's the tables were left out (one head of keys, 4 experts); a loss that a file's class lacks came."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw_config(name)))
    launch = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    found = imported(tmp_path, json.dumps(launch), "ds.json")
    job = found.job["model"]
    mine, own = (read_model(job_from({"model": m})).config for m in (job, {"config": str(path)}))
    assert replace(mine, source="") == replace(own, source="")
    assert ("config" in job) == (name in ("dbrx", "deepseek-v2-lite")), "null and tables stay in their file"
    once = export_launch(prepare(job_from({**found.job, "cluster": {"gpu": "h100-sxm", "nodes": 1}})), "deepspeed")
    assert json.loads(once.files["config.json"])["model_type"] == own.model_type


def test_picked_keys_go_out_and_come_back() -> None:
    model = {"config": "deepseek-v3.2", "num_hidden_layers": 4, "index_topk": 512, "num_nextn_predict_layers": 0}
    job = {"model": model, "schedule": {"microbatches": 1}, "parallel": {"zero": 1}}
    mine = prepare(job_from(job))
    theirs = prepare(job_from(read_back(export_launch(mine, "megatron")).job))
    assert theirs.config.indexer == mine.config.indexer and theirs.config.indexer is not None
    assert parameters(theirs.config) == parameters(mine.config)
    shared = {**model, "config": "glm-5", "index_topk_freq": 2}
    e = refusal(export_launch, prepare(job_from({**job, "model": shared})), "megatron", match="shared")
    assert e.key == "model.mla"


def test_an_indexer_that_is_trained_and_one_of_ordinary_heads_are_told(tmp_path: Path) -> None:
    script = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 --bf16 "
    dsa = "--experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8"
    mla = f"--multi-latent-attention --q-lora-rank 24 {dsa}"
    for more, fact in ((f"{mla} --dsa-indexer-loss-coeff 0.001", "loss"), (dsa, "variant")):
        found = imported(tmp_path, f"torchrun pretrain_gpt.py {script}{more}")
        assert [x for x in listed(found, ASSUMED) if fact in x]
    assert not listed(imported(tmp_path, f"torchrun pretrain_gpt.py {script}{mla}"), UNKNOWN)


PRIMUS = "modules:\n  pre_trainer: {{framework: megatron, model: {}.yaml, overrides: {{micro_batch_size: 1, {}}}}}\n"


@pytest.mark.parametrize(
    ("name", "said", "read"),
    [
        ("llama3_8B", "ffn_hidden_size: 8192", lambda m: m.ffn == 8192),
        ("llama3_8B", "untie_embeddings_and_output_weights: false", lambda m: m.tied),
        ("llama3_8B", "vocab_size: 1000, tensor_model_parallel_size: 2", lambda m: m.vocab == 1024),
        ("llama3_8B", "vocab_size: 1000, padded_vocab_size: 1100", lambda m: m.vocab == 1100),
        ("mixtral_8x7B_v0.1", "num_experts: 16", lambda m: m.moe.experts == 16),
        ("mixtral_8x7B_v0.1", "moe_ffn_hidden_size: 1024", lambda m: m.moe.ffn == 1024),
        ("deepseek_v3", "num_experts: 16, num_layers: 4", lambda m: (m.moe.experts, m.layers) == (16, 4)),
        ("deepseek_v3", "num_layers: 4, moe_layer_freq: '[0]*1+[1]*3'", lambda m: m.moe.dense_layers == {0}),
    ],
)
def test_a_model_by_name_has_what_the_launch_says_instead(
    tmp_path: Path, name: str, said: str, read: Callable[[ModelConfig], bool]
) -> None:
    found = imported(tmp_path, PRIMUS.format(name, said), "exp.yaml")
    assert read(read_model(job_from(found.job)).config)
    assert not {*said.replace(":", " ").split()} & {n.rpartition(".")[2] for n in listed(found, ASSUMED)}


@pytest.mark.parametrize(
    "said", ["normalization: LayerNorm", "disable_bias_linear: false", "qk_layernorm: true", "num_experts: 4"]
)
def test_what_a_model_by_name_cannot_have_is_assumed_away(tmp_path: Path, said: str) -> None:
    found = imported(tmp_path, PRIMUS.format("llama3_8B", said), "exp.yaml")
    assert said.partition(":")[0] in {n.rpartition(".")[2] for n in listed(found, ASSUMED)}
    agrees = imported(tmp_path, PRIMUS.format("llama3_8B", "normalization: RMSNorm, swiglu: true"), "exp.yaml")
    assert not {"normalization", "swiglu"} & {n.rpartition(".")[2] for n in listed(agrees, ASSUMED)}
