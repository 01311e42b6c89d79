"""Families of decoders: parameters and FLOPs equal transformers', whatever the spelling; the rest is refused by name.

tests/data/families.json holds a published config of each type, as its page on the Hub spells it (rotary factors by
feature, which change no count, are ones), and the parameters of transformers' class of it, counted on the meta device.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.keys import FORMS, OUTER, TYPES, UNBUILT
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from tests.executor.modules.hub import quiet

FAMILIES = json.loads((Path(__file__).parents[2] / "data" / "families.json").read_text())
TOKENS = 8
# Types whose defaults transformers writes are of no model.
CONTRADICT = {"qwen3_moe": "one key with two values", "glm4_moe": "does not divide"}
# Sizes of the small models, by key: every one differs from what would also fit in its place.
SMALL = {
    "hidden_size n_embd n_embed d_model word_embed_proj_dim": 64,
    "num_hidden_layers n_layer n_layers num_layers": 4,
    "num_attention_heads n_head n_heads num_heads": 8,
    "num_key_value_heads num_kv_heads attn_config.kv_n_heads": 4,
    "intermediate_size n_inner ffn_dim ffn_config.ffn_hidden_size intermediate_size_mlp": 40,
    "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size": 20,
    "num_experts num_local_experts n_routed_experts moe_num_experts ffn_config.moe_num_experts": 4,
    "num_experts_per_tok experts_per_token moe_k moe_topk ffn_config.moe_top_k": 2,
    "n_group topk_group first_k_dense_replace moe_layer_start_index num_shared_expert n_shared_experts": 1,
    "head_dim": 16,
    "helium.head_dim": 8,
    "partial_rotary_factor": 0.5,
    "short_factor long_factor": [1.0] * 4,
    "vocab_size": 64,
    "max_position_embeddings n_positions max_seq_len seq_length": 32,
    "sliding_window attention_chunk_size window_size": 5,
    "rotary_dim": 6,
    "kv_lora_rank q_lora_rank": 10,
    "qk_nope_head_dim v_head_dim": 14,
    "qk_rope_head_dim": 4,
    "moe_layer_end_index": 3,
    "num_nextn_predict_layers": 0,
    "attention_types": [[["global", "local"], 2]],
    # transformers' class sends every token to every expert of these
    "llama4_text.num_local_experts llama4_text.num_experts_per_tok": 1,
}
KEYS = {key: value for keys, value in SMALL.items() for key in keys.split()}


def small(model_type):
    """A published config with everything small: layers of each kind stay."""

    def size(name, value):
        found = KEYS.get(f"{model_type}.{name}", KEYS.get(name, value))
        if value in (None, 0):
            return value
        if name == "num_key_value_heads" and value == FAMILIES[model_type]["config"].get("num_attention_heads"):
            return KEYS["num_attention_heads"]
        if isinstance(value, dict):
            return {k: size(f"{name}.{k}" if "config" in name else k, v) for k, v in value.items()}
        if isinstance(value, list) and name != "attention_types" and len(value) > 4:
            return (found if found is not value else value[:4]) if isinstance(found, list) else found
        return found

    return {k: size(k, v) for k, v in copy.deepcopy(FAMILIES[model_type]["config"]).items()}


def parameters(config):
    main = [c for c in model_chunks(config) if not c.name.startswith("mtp")]
    return sum({p.name: p.numel for c in main for part in c.parts for p in part.params}.values())


def hub_config(raw):
    from transformers import CONFIG_MAPPING

    raw = {k: v for k, v in copy.deepcopy(raw).items() if k != "quantization_config"}
    return CONFIG_MAPPING[raw.pop("model_type")](**raw, pad_token_id=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_published_models_have_the_parameters_that_transformers_counts(model_type):
    row = FAMILIES[model_type]
    config = config_from(row["config"], row["hub"])
    assert parameters(config) == row["parameters"]
    wider = {**row["config"], "vocab_size": row["config"]["vocab_size"] + 1}
    grown = parameters(config_from(wider, "control")) - row["parameters"]
    assert grown == config.hidden * (2 - config.tied) + config.form.head_bias


def test_every_type_with_a_row_is_in_the_table():
    assert {*FAMILIES, "megatron"} == set(TYPES)  # transformers has no class of Megatron's GPT


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 96}
DROPS = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 32, "activation_function": "gelu", **DROPS}
GATED = {"gated_linear_unit": True, "hidden_act": "silu", "normalization": "RMSNorm", "add_bias_linear": False}
LLAMA = {**GATED, "position_embedding_type": "rope", "attention_dropout": 0.0, "hidden_dropout": 0.0}
LLAMA |= {"tie_word_embeddings": False, "ffn_hidden_size": 96, "num_query_groups": 2, "norm_epsilon": 1e-6}
QWEN = {"num_experts": 4, "mlp_only_layers": [0]}
GROUPED = {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("megatron", "other"),
    [
        ({}, {"model_type": "gpt2", "vocab_size": 96, **GPT2}),
        (LLAMA, {"model_type": "llama", **SIZES, **GROUPED}),
        (LLAMA | {"add_qkv_bias": True}, {"model_type": "qwen2", **SIZES, **GROUPED}),
        (
            LLAMA | QWEN | {"qk_layernorm": True, "kv_channels": 16, "moe_ffn_hidden_size": 24},
            {"model_type": "qwen3_moe", **SIZES, **GROUPED, **QWEN, "head_dim": 16, "norm_topk_prob": True}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
    ],
    ids=["gpt2", "llama", "qwen2", "qwen3_moe"],
)
def test_megatrons_arguments_say_what_families_are(megatron, other):
    sizes = {"hidden_size": 64, "num_layers": 4, "num_attention_heads": 8, "vocab_size": 96}
    found = config_from({"model_type": "megatron", **sizes, "max_position_embeddings": 32, **megatron}, "x")
    other = config_from(other, "x")
    assert replace(found, model_type=other.model_type) == other


def test_megatrons_arguments_that_no_family_has():
    grouped = {"num_query_groups": 2, "position_embedding_type": "rope", "hidden_act": "relu2", "qk_layernorm": True}
    found = config_from({"model_type": "megatron", **SIZES, **grouped}, "x")
    h, kv, ffn = 64, 2 * 8, 256
    layer = 2 * h * (h + kv) + 2 * h * ffn + (h + 2 * kv + h) + (ffn + h) + 2 * 2 * h + 2 * 2 * 8
    assert parameters(found) == 4 * layer + 2 * h + 96 * h
    experts = config_from({"model_type": "megatron", **SIZES, **grouped, "num_experts": 4}, "x")
    assert parameters(experts) - parameters(found) == 4 * (3 * (2 * h * ffn + ffn + h) + 4 * h)
    with pytest.raises(PiperError, match="normalization"):
        config_from({"model_type": "megatron", **SIZES, "normalization": "BatchNorm"}, "x")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_small_model_has_the_parameters_and_flops_of_transformers_own(model_type):
    """Its forward under torch's counter, with scores written out; products by a single number, angles, left out."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    def product(a, b, *_, out_shape=None, **__):
        one = 2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == 3 else 1)
        return one if a[-1] > 1 else 0

    aten, raw = torch.ops.aten, small(model_type)
    products = {aten.mm: product, aten.bmm: product, aten.addmm: lambda _, a, b, *r, **k: product(a, b)}
    counter = FlopCounterMode(
        display=False, custom_mapping=products | {aten.baddbmm: lambda _, a, b, *r, **k: product(a, b)}
    )
    with quiet():
        how = {"attn_implementation": "eager", "experts_implementation": "eager"}
        hub = AutoModelForCausalLM.from_config(hub_config(raw), **how).eval()
        with counter:
            hub(torch.arange(TOKENS)[None], use_cache=False)
    config = config_from(raw, "small")
    assert parameters(config) == sum(p.numel() for p in hub.parameters())
    shape = MicrobatchShape(1, TOKENS)
    each = [(c, p) for c in model_chunks(config) for p in c.parts]
    works = [part_work(config, c, p, PartLayout(), shape, ModelPrecision(), "unfused") for c, p in each]
    assert sum(flops(w.forward) for w in works) == counter.get_total_flops()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_writes_is_the_same_model(model_type):
    """Today's spelling of transformers, every key written out, beside the Hub's."""
    raw = {k: v for k, v in FAMILIES[model_type]["config"].items() if k != "quantization_config"}
    with quiet():
        written = json.loads(hub_config(raw).to_json_string(use_diff=False))
    assert config_from(written, "x") == config_from(raw, "x")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_are_left_out_have_transformers_defaults(model_type):
    from transformers import CONFIG_MAPPING

    with quiet():
        written = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    needed = {k for k, key in TYPES[model_type].items() if key.required}
    given = {k: written[k] if written.get(k) else 4 for k in needed}
    if model_type == "deepseek_v3":  # its class has no prediction module, whatever it writes: none unless it is said
        written["num_nextn_predict_layers"] = 0
    if model_type in CONTRADICT:
        with pytest.raises(PiperError, match=CONTRADICT[model_type]):
            config_from({**written, **given}, "x")
    else:
        assert config_from(given, "x") == config_from({**written, **given}, "x")


@pytest.mark.parametrize("model_type", UNBUILT)
def test_other_architectures_are_refused_by_what_they_have(model_type):
    with pytest.raises(PiperError) as e:
        config_from({"model_type": model_type, "hidden_size": 8}, "config.json")
    assert (e.value.kind, e.value.kind.exit_code, e.value.key) == (ErrorKind.MODEL, 2, "model_type")
    assert model_type in e.value.message and UNBUILT[model_type] in e.value.message and model_type not in TYPES


def test_a_language_model_among_other_towers_is_read():
    """google/gemma-3-4b-pt: what its text_config leaves out has transformers' defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "vocab_size": 262208}
    raw = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
        "eoi_token_index": 256000,
    }
    config = config_from(raw, "x", {"num_hidden_layers": 34})
    assert config == config_from(text, "x") and parameters(config) == 3_880_263_168
    assert config.windows.count(0) == 5 and config.rope_scaling is not None
    with pytest.raises(PiperError, match="is not understood") as e:
        config_from({**raw, "mm_odd": 1}, "x")
    assert e.value.key == "mm_odd" and "mm_odd" not in OUTER
    with pytest.raises(PiperError, match="encoder") as e:
        config_from({**raw, "text_config": {"model_type": "t5"}}, "x")
    assert e.value.key == "model_type"


def test_layers_differ_where_their_keys_say_so():
    def read(model_type, **inline):
        return config_from(FAMILIES[model_type]["config"], "x", inline)

    gemma = read("gemma2")
    assert (gemma.at(0).window, gemma.at(1).window, gemma.form.score_cap) == (4096, 0, 50.0)
    llama = read("llama4_text")
    assert [(llama.at(i).rope, llama.at(i).window) for i in (2, 3)] == [(True, 8192), (False, 0)]
    assert [read("cohere2").at(i).rope for i in range(4)] == [True, True, True, False]
    assert read("falcon").form.parallel == 2 and read("falcon", num_ln_in_parallel_attn=1).form.parallel == 1
    assert read("falcon", new_decoder_architecture=False).kv_heads == 1
    assert read("gpt_bigcode").kv_heads == 1 and read("gpt_bigcode", multi_query=False).kv_heads == 48
    assert read("ernie4_5_moe").moe.dense_layers == {0} and read("qwen2_moe", mlp_only_layers=[3]).moe.dense_layers == {
        3
    }
    with pytest.raises(PiperError) as e:
        read("opt", do_layer_norm_before=False)
    assert e.value.key == "model.do_layer_norm_before"
    assert set(FORMS) < set(TYPES)


PRESETS = (
    "gemma:gemma-7b gemma2:gemma2-9b gemma3_text:gemma3-1b phi:phi-2 phi3:phi3-mini phimoe:phi3.5-moe olmo2:olmo2-7b "
    "olmo3:olmo3-32b olmoe:olmoe-1b-7b glm4:glm4-32b glm4_moe:glm-4.5 ministral:ministral-8b gpt_oss:gpt-oss-120b "
    "llama4_text:llama4-scout cohere:command-r-plus starcoder2:starcoder2-7b gpt_neox:gpt-neox-20b gptj:gpt-j-6b "
    "opt:opt-6.7b bloom:bloom falcon:falcon-40b granite:granite3.1-8b qwen2:qwen2.5-7b qwen2_moe:qwen2-57b-a14b "
    "dbrx:dbrx ernie4_5_moe:ernie4.5-21b-a3b minimax_m2:minimax-m2 hunyuan_v1_moe:hunyuan-a13b smollm3:smollm3-3b "
    "exaone4:exaone4-32b seed_oss:seed-oss-36b dots1:dots.llm1"
)


@pytest.mark.parametrize("pair", PRESETS.split())
def test_a_preset_of_a_family_is_its_published_config(pair):
    """But for the format of its weights: what is trained is wide."""
    model_type, _, preset = pair.partition(":")
    raw = {k: v for k, v in FAMILIES[model_type]["config"].items() if k != "quantization_config"}
    assert replace(load_config(preset), source="x") == config_from(raw, "x")


def test_a_key_that_a_kind_of_angles_does_not_have_is_refused_with_those_it_has():
    raw = FAMILIES["phi3"]["config"]
    with pytest.raises(PiperError) as e:
        config_from({**raw, "rope_scaling": {**raw["rope_scaling"], "low_freq_factor": 4.0}}, "x")
    assert e.value.key == "rope_scaling.low_freq_factor" and "longrope" in e.value.message
    assert {"short_factor", "long_factor", "type"} <= {*str(e.value.allowed).split(", ")}
