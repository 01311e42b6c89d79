"""Every key of a config is modelled, inert for a reason, or refused: rotary embeddings, windows, routing, formats."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.keys import TYPES, fits
from ir.workload.config.load import raw_config
from ir.workload.config.spec import AttentionRopeScaling, AttentionRopeScalingKind, ModelConfig
from ir.workload.part import chunk_flops
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import ConfigModelWork
from tests.ir.workload import models as hub
from tests.ir.workload.models import LLAMA, refused
from tests.refusals import refusal

QWEN = {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 4, "sliding_window": 16, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(raw: Mapping[str, object], **inline: object) -> ModelConfig:
    return config_from(raw, "here.json", inline)


def test_theta_is_read_in_either_spelling() -> None:
    assert read({**LLAMA, "rope_theta": 5e5}) == read({**LLAMA, "rope_parameters": {"rope_theta": 5e5}})
    assert read({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    assert read({**LLAMA, "rope_parameters": None, "rope_scaling": None}).rope_theta == 1e4
    assert read({**LLAMA, "model_type": "mixtral", "num_key_value_heads": 4}).rope_theta == 1e6, "that class's default"


def test_a_job_changes_what_a_file_says_of_theta() -> None:
    file = {**LLAMA, "rope_parameters": {**YARN, "rope_theta": 5e5}}
    c = read(file, rope_theta=7e5)
    assert c.rope_theta == 7e5 and c.rope_scaling is not None and c.rope_scaling.factor == 4
    assert read(file, rope_parameters={"factor": 2.0}).rope_scaling == AttentionRopeScaling(
        AttentionRopeScalingKind.YARN, 2.0, 512, times=0.1 * math.log(2) + 1
    )
    linear = {"rope_type": "linear", "factor": 2.0}
    for table in ("rope_parameters", "rope_scaling"):
        c = read(file, **{table: linear})
        assert (c.rope_scaling, c.rope_theta) == (AttentionRopeScaling(AttentionRopeScalingKind.LINEAR, 2.0), 5e5), (
            "theta is not of a kind"
        )
        assert read(file, rope_theta=7e5, **{table: linear}).rope_theta == 7e5
        assert read(file, **{table: {**linear, "rope_theta": 9e5}}).rope_theta == 9e5
    e = refused(file, rope_theta=7e5, rope_parameters={**linear, "rope_theta": 9e5})
    assert e.key == "model.rope_parameters.rope_theta"


def test_one_thing_said_in_two_ways_is_refused() -> None:
    e = refused({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}})
    assert e.key == "rope_parameters.rope_theta" and "two values" in e.message
    assert refused({**LLAMA, "rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2}}).key == (
        "rope_scaling"
    )
    assert refused({**LLAMA, "rope_scaling": {**YARN, "type": "linear"}}).key == "rope_scaling.type"
    moe = {**raw_config("tiny-moe"), "num_local_experts": 4}
    assert "one key with two values" in refused(moe).message


def test_llama_31_is_not_llama_3() -> None:
    c = read(hub.LLAMA31_8B)
    assert c.rope_scaling == AttentionRopeScaling(AttentionRopeScalingKind.LLAMA3, 8.0, 8192, 1.0, 4.0)
    assert c.rope_theta == 5e5
    assert load_config("llama3-8b").rope_scaling is None


def test_deepseek_v3s_own_file() -> None:
    """Its checkpoint is stored in fp8; YaRN scales its scores, by the square of 0.1 ln 40 + 1."""
    c, preset = read(hub.DEEPSEEK_V3), load_config("deepseek-v3")
    assert c.stored == "fp8" and preset.stored == ""
    assert c.rope_scaling == AttentionRopeScaling(AttentionRopeScalingKind.YARN, 40.0, 4096, 1.0, 32.0, times=1.0)
    assert c.score_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert c.moe == preset.moe, "aux_loss_alpha of a file is a loss of the training code that came with it"
    e = refused({**hub.DEEPSEEK_V3, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert e.key == "quantization_config.quant_method" and "fp8" in str(e.allowed)


def test_other_models_own_files() -> None:
    qwen = read(hub.QWEN3_30B)
    assert (qwen.window, qwen.moe) == (0, load_config("qwen3-30b-a3b").moe)
    assert read(hub.QWEN3_30B, router_aux_loss_coef=0.1).moe.balance == 0.1  # type: ignore[union-attr]
    assert read(hub.MPT_7B).positions == 0, "ALiBi, whatever learned_pos_emb says"
    assert load_config("mpt-7b").positions == 2048


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "proportional", "ntk", 3])
def test_other_kinds_of_scaling_are_refused_by_name(kind: object) -> None:
    e = refused({**LLAMA, "rope_scaling": {"type": kind, "factor": 2.0}})
    assert e.key == "rope_scaling.type" and repr(kind) in e.message and "yarn" in str(e.allowed)
    assert refused(LLAMA, rope_parameters={"rope_type": kind}).key == "model.rope_parameters.rope_type"


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"factor": 2.0}, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": 2, "mscale_all_dim": 1.0}, "mscale_all_dim"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}, "high_freq_factor"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({**YARN, "mscale": "1"}, "mscale"),
        ({**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_theta": 1e6}}, "full_attention"),
    ],
)
def test_tables_are_strict(table: Mapping[str, object], key: str) -> None:
    assert refused({**LLAMA, "rope_parameters": table}).key == f"rope_parameters.{key}"


def test_only_whole_pairs_of_features_turn() -> None:
    assert refused({**LLAMA, "head_dim": 9}).key == "head_dim"
    nemotron = raw_config("nemotron-15b")
    assert read(nemotron, head_dim=10, num_attention_heads=8).rope_share == 0.5, "5 features, rounded up"
    assert refused(nemotron, head_dim=10, num_attention_heads=8, rope_scaling=YARN).key == "partial_rotary_factor"
    assert read({**nemotron, "partial_rotary_factor": 0.25}).rope_share == 0.25


def test_windows_of_each_layer() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    c = read({**QWEN, "layer_types": kinds})
    assert (c.windows, c.window, c.at(2).window, c.at(3).window) == ((16, 0, 16, 0), 0, 16, 0)
    assert read({**QWEN, "max_window_layers": 2}).windows == (0, 0, 16, 16)
    assert read(QWEN).window == 0 and read({**QWEN, "max_window_layers": 0}).window == 16
    assert read({**QWEN, "use_sliding_window": False, "max_window_layers": 2}).windows == ()
    assert refused({**QWEN, "use_sliding_window": False, "layer_types": kinds}).key == "layer_types"
    assert refused({**QWEN, "layer_types": kinds[:3]}).key == "layer_types"
    assert "chunked_attention" in refused({**QWEN, "layer_types": ["chunked_attention"] * 4}).message
    llama = {**LLAMA, "layer_types": kinds}
    assert refused(llama).key == "layer_types" and read({**LLAMA, "layer_types": ["full_attention"] * 4}) == read(LLAMA)


def test_a_window_of_one_layer_is_in_the_costs_of_that_layer() -> None:
    c, shape = read({**QWEN, "max_window_layers": 2}), MicrobatchShape(1, 256)

    def flops_of(config: ModelConfig) -> list[int]:
        source = ConfigModelWork(config, shape, ModelPrecision())
        return [chunk_flops(source, chunk) for chunk in model_chunks(config)[1:5]]

    flops, one = flops_of(c), [flops_of(w)[0] for w in (read(QWEN), read({**QWEN, "max_window_layers": 0}))]
    assert flops == [one[0], one[0], one[1], one[1]] and one[0] > one[1]


def test_routing_is_its_class_s() -> None:
    v2, v3 = raw_config("deepseek-v2"), raw_config("deepseek-v3")
    assert read(v2).moe.groups == 8  # type: ignore[union-attr]
    assert read({k: v for k, v in v2.items() if k != "topk_method"}).moe.groups == 0  # type: ignore[union-attr]
    assert refused({**v2, "topk_method": "noaux_tc"}).key == "topk_method"
    assert refused({**v2, "norm_topk_prob": True}).key == "norm_topk_prob"
    assert refused({**v3, "scoring_func": "softmax"}).key == "scoring_func"
    assert refused({**v3, "topk_method": "greedy"}).key == "topk_method"
    bare = {k: v for k, v in v3.items() if k not in ("n_group", "topk_group", "first_k_dense_replace", "q_lora_rank")}
    assert read(bare) == read(v3), "transformers' defaults"
    assert refused({**v3, "n_group": 256}).key == "n_group"
    assert refused({**v3, "n_group": 128, "num_experts_per_tok": 9}).key == "num_experts_per_tok"
    mixtral = raw_config("mixtral-8x7b")
    assert refused({**mixtral, "router_jitter_noise": 0.1}).key == "router_jitter_noise"
    assert refused({**mixtral, "output_router_logits": True}).key == "output_router_logits"
    assert read({**mixtral, "router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02}) == read(mixtral)


def test_gpt2_scales_scores_as_it_says() -> None:
    gpt = raw_config("gpt2")
    assert read({**gpt, "scale_attn_weights": False}).score_scale == 8.0
    c = read({**gpt, "scale_attn_by_inverse_layer_idx": True})
    assert (c.at(0).score_scale, c.at(3).score_scale) == (1.0, 0.25)
    assert refused({**gpt, "add_cross_attention": True}).key == "add_cross_attention"


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest() -> None:
    e = refused({**LLAMA, "rope_tetha": 5e5})
    assert (e.key, e.suggestion) == ("rope_tetha", "rope_theta")
    e = refused({**LLAMA, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256})
    assert "leave it out" in str(e.suggestion) and "query_pre_attn_scalar" in e.message


@pytest.mark.parametrize("other", ["gpt3", "kimi_k2", "minimax", "bart", "jamba", "llama5"])
def test_another_architecture_is_no_typing_error(other: str) -> None:
    e = refused({**LLAMA, "model_type": other})
    assert e.suggestion is None and "llama" in str(e.allowed)


def test_a_suggestion_is_what_was_meant() -> None:
    assert refused({**LLAMA, "model_type": "Qwen3-MoE"}).suggestion == "qwen3_moe"
    assert refused({**LLAMA, "hidden_act": "gelu"}).suggestion is None
    assert refused({**LLAMA, "hidden_act": "SiLU"}).suggestion == "silu"
    for name, near in {"deepseek_v3": "deepseek-v3", "llama3.1-8b": None, "gpt-oss-240b": None}.items():
        assert refusal(load_config, name).suggestion == near, name


# What else a key needs to have a meaning, and another value where none of the usual ones will do.
BASES: Mapping[str, str] = {
    "llama": "llama3-8b",
    "gpt2": "gpt2",
    "mpt": "mpt-1b",
    "nemotron": "nemotron-15b",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "qwen2": "qwen2-7b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "tiny-moe",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
}
FAMILIES: dict[str, dict[str, Any]] = dict(hub.FAMILIES)
MEGATRON = {"model_type": "megatron", "vocab_size": 96, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
MEGATRON |= {"num_experts": 8, "position_embedding_type": "rope", "add_bias_linear": False}
FAMILIES["megatron"] = {"config": MEGATRON}  # on no Hub


def base_of(model_type: str) -> dict[str, Any]:
    return raw_config(BASES[model_type]) if model_type in BASES else dict(FAMILIES[model_type]["config"])


WITH: Mapping[str, Mapping[str, object]] = {
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
    "max_window_layers": {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
    "use_sliding_window": {"sliding_window": 8, "max_window_layers": 0},
    "rope_interleave": {"rope_interleave": True},
    "output_router_logits": {"router_aux_loss_coef": 0.1},
    "topk_group": {"n_group": 4, "num_expert_group": 4, "topk_group": 4},
    **{k: {"layer_types": None} for k in ("layer_group_size", "full_attn_idxs")},
    "expand": {"intermediate_size": None},
    "mamba_expand": {"mamba_d_ssm": None, "mamba_d_head": "auto"},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "multi_query": {"new_decoder_architecture": False},
    "parallel_attn": {"new_decoder_architecture": False},
    **{k: {"layer_types": None} for k in ("sliding_window_pattern", "global_attn_every_n_layers")},
    "layers_block_type": {"hybrid_override_pattern": None},
    "first_k_dense_replace": {"mlp_layer_types": None},
    "prefix_dense_sliding_window_pattern": {"layer_types": None, "first_k_dense_replace": 4},
    "linear_attn_config.full_attn_layers": {"layer_types": None, "linear_attn_config.kda_layers": []},
    "linear_attn_config.kda_layers": {"layer_types": None, "linear_attn_config.full_attn_layers": []},
    "attention_types": {"attention_layers": None},
    **{f"mtp_{k}": {"num_nextn_predict_layers": 1} for k in ("hybrid_override_pattern", "layers_block_type")},
    **{k: {"position_embedding_type": "rope"} for k in ("rope_theta", "rope_parameters", "rope_scaling")},
    "partial_rotary_factor": {"position_embedding_type": "rope", "qk_rope_head_dim": None},
    "index_skip_topk_offset": {"indexer_types": None, "index_topk_freq": 4},
    **{f"mamba_{k}": {"hybrid_override_pattern": "M*-E"} for k in ("num_heads", "head_dim", "num_groups", "state_dim")},
    **{k: {"kv_lora_rank": 8} for k in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}
LOSSES = ("router_aux_loss_coef", "aux_loss_alpha", "seq_aux")  # of training code; read where the job says them
OTHERS = (3, 2, 0, 0.25, True, False, "x", [1], ["x"], {"x": 1}, {"rope_type": "linear", "factor": 2})


EACH = [t if t in BASES or t in ("falcon", "llama4_text") else pytest.param(t, marks=pytest.mark.slow) for t in TYPES]


def _keys(model_type: str, modelled: bool) -> list[str]:
    return [n for n, k in TYPES[model_type].items() if k.is_read is modelled and n not in LOSSES]


def _differs(raw: Mapping[str, object], key: str, value: object) -> bool:
    """Another model, or a refusal."""
    try:
        return config_from({**raw, key: value}, "x") != config_from(raw, "x")
    except PiperError:
        return True


@pytest.mark.parametrize("model_type", EACH)
def test_a_key_that_is_not_inert_makes_another_model_or_is_refused(model_type: str) -> None:
    table = TYPES[model_type]
    for key in _keys(model_type, modelled=True):
        raw, own = base_of(model_type), table[key]
        raw |= {k: v for k, v in WITH.get(key, {}).items() if k in table and not table[k].only}
        others = [v for v in OTHERS if fits(own.holds, v) and v != raw.get(key, own.default) and v not in own.only]
        found = [_differs(raw, key, value) for value in others]
        assert any(found) and (not own.only or all(found)), f"{key} is read in vain"


@pytest.mark.parametrize("model_type", EACH)
def test_what_is_inert_has_a_reason_and_changes_nothing(model_type: str) -> None:
    raw = base_of(model_type)
    for key in _keys(model_type, modelled=False):
        assert TYPES[model_type][key].why, key
        assert not any(_differs(raw, key, value) for value in OTHERS), key


def test_infinite_limits_of_what_is_not_read_are_taken_and_no_others(tmp_path: Path) -> None:
    """`time_step_limit` of Mamba's configs on the Hub is [0.0, Infinity], which is no JSON."""
    file, raw = tmp_path / "config.json", dict(FAMILIES["mamba2"]["config"])
    file.write_text(json.dumps({**raw, "time_step_limit": [0.0, math.inf]}))
    assert load_config(str(file)).mixer == config_from(raw, "x").mixer
    for key in ("layer_norm_epsilon", "hidden_size"):
        file.write_text(json.dumps({**raw, key: math.inf}))
        e = refusal(load_config, str(file))
        assert (e.key, e.kind.exit_code) == (key, 2)
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": math.inf}}
    file.write_text(json.dumps(FAMILIES["llama"]["config"] | scaled))
    assert refusal(load_config, str(file)).key == "rope_scaling.factor"


def test_the_hub_s_other_spellings_of_a_hybrid() -> None:
    """Keys that its class leaves alone are in its table again, whatever the tables it is like have of them."""
    raw = dict(FAMILIES["nemotron_h"]["config"])
    spelled = {"rope_theta": 10000, "partial_rotary_factor": 1.0, "norm_eps": 1e-5, "rms_norm_eps": 1e-5}
    spelled |= {"hidden_dropout": 0.0, "mamba_state_dim": 128, "mamba_num_groups": 8}
    assert config_from(raw | spelled, "x") == config_from(raw, "x")
    assert "one key with two values" in refused(raw | {"mamba_num_groups": 4}).message
