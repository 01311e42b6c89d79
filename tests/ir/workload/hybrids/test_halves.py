"""What stands in place of attention, or beside it, family by family: its parts, its kernels' bytes, its divisions."""

from dataclasses import replace
from typing import Any

import pytest

from ir.job.build import prepare
from ir.job.load import job_from
from ir.verify import check_plan
from ir.workload import config_from, model_chunks
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PartWork
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, check_setting
from tests.ir.workload.models import FAMILIES, small, work
from tests.ir.workload.test_families import TOKENS, counted, parameters, priced
from tests.refusals import refusal

H1, LFM, OLMO = (config_from(FAMILIES[name]["config"], "x") for name in ("falcon_h1", "lfm2", "olmo_hybrid"))

NORMS = tuple(f"{x}_norm{end}" for x in ("input", "post") for end in ("", "_behind", "_backward", "_behind_backward"))


def same(raw: dict[str, Any]) -> None:
    """Parameters and products are transformers' own."""
    hub, whole, recurrent = counted(raw, TOKENS)
    config = config_from(raw, "x")
    assert parameters(config) == sum(p.numel() for p in hub.parameters())
    assert priced(config, TOKENS)[0] == whole - recurrent


def labels(w: PartWork) -> list[str]:
    return [k.label for k in (*w.forward, *w.input_grad)]


@pytest.mark.parametrize(
    "inline",
    [
        {"num_hidden_layers": 1, "mamba_d_ssm": None, "mamba_d_head": "auto", "tie_word_embeddings": True},
        {"mamba_d_ssm": 60, "mamba_n_heads": 5, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_rms_norm": True},
        {"projectors_bias": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "hidden_act": "gelu", "mamba_norm_before_gate": True},
    ],
)
def test_a_recurrence_beside_attention_is_transformers_own(inline: dict[str, Any]) -> None:
    same({**small("falcon_h1"), **inline})


def test_a_recurrence_beside_attention_reads_its_norm() -> None:
    chunk = model_chunks(H1)[1]
    assert [(p.name, p.inputs) for p in chunk.parts] == [("attn", ("",)), ("mixer", ("attn",)), ("mlp", ("mixer",))]
    assert [q.name for p in chunk.parts for q in p.params if "layernorm" in q.name] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    attn, mixer = (work(H1, 1, name) for name in ("attn", "mixer"))
    assert [x for x in labels(attn) if "norm" in x] == ["input_norm", "input_norm_backward"]
    assert not [x for x in labels(mixer) if "norm" in x], "and none of its own before the projection out"
    assert "residual" in labels(mixer) and sum("normed" in b.name for w in (attn, mixer) for b in w.saved) == 1


def test_a_norm_behind_the_recurrence_has_its_kernels_and_what_it_keeps() -> None:
    plain, normed = (
        work(config_from({**FAMILIES["falcon_h1"]["config"], "mamba_rms_norm": on}, "x"), 1, "mixer")
        for on in (False, True)
    )
    assert {*labels(normed)} - {*labels(plain)} == {"mixer_norm", "mixer_norm_backward"}
    assert {b.name for b in normed.saved} - {b.name for b in plain.saved} == {"gated", "mixer_norm_stats"}
    assert flops(plain.forward) == flops(normed.forward)


def test_features_of_all_heads_are_as_many_as_their_key_says() -> None:
    e = refusal(config_from, {**small("falcon_h1"), "mamba_d_ssm": 100}, "x")
    assert e.key == "mamba_d_head" and "do not make up 100" in e.message and "mamba_d_ssm" in str(e.allowed)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "1f1b-overlap"])
@pytest.mark.parametrize("recompute", ["none", "full", "attention", "norm"])
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"cp": 2, "cp_comm": "all_to_all"}])
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "olmo_hybrid"])
def test_their_plans_are_legal(name: str, layout: dict[str, Any], recompute: str, schedule: str) -> None:
    raw = {k: v for k, v in small(name).items() if k not in ("model_type", "max_position_embeddings")}
    table = {
        "model": {"model_type": name, "seq_len": 64, **raw},
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8},
        "parallel": {"pp": 2, "zero": 1, **layout},
        "schedule": {"name": schedule, "microbatches": 8, "recompute": recompute},
    }
    check_plan(prepare(job_from(table)).plan())


def cut(config: ModelConfig, part: str, at: int = 1) -> None:
    """Devices of a tensor-parallel group have an n-th of a part's products each."""
    whole, one = work(config, at, part), work(config, at, part, PartLayout(tp=2))
    for name in ("forward", "input_grad", "weight_grad"):
        assert flops(getattr(whole, name)) == 2 * flops(getattr(one, name)), name


def test_devices_share_both_halves_evenly() -> None:
    cut(H1, "attn")
    cut(H1, "mixer")
    cut(LFM, "mixer")


@pytest.mark.parametrize(
    ("name", "inline"),
    [
        ("lfm2", {"layer_types": None, "num_hidden_layers": 2, "tie_word_embeddings": False, "head_dim": 12}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1], "num_hidden_layers": 3, "block_multiple_of": 50}),
        ("lfm2", {"layer_types": ["conv"], "num_hidden_layers": 1, "conv_bias": True, "conv_L_cache": 4}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "intermediate_size": 77}),
        ("lfm2", {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8, "intermediate_size": 77}),
        ("lfm2_moe", {"conv_bias": True, "num_dense_layers": 0, "norm_topk_prob": False, "use_expert_bias": False}),
        ("lfm2_moe", {"layer_types": ["full_attention"] * 4, "num_dense_layers": 9}),
    ],
)
def test_short_convolutions_are_transformers_own(name: str, inline: dict[str, Any]) -> None:
    same({**small(name), **inline})


def test_a_short_convolution_stands_between_two_gates() -> None:
    """Products of three and one hidden sizes; a gate reads two tensors and writes one, and five on the way back."""
    assert [p.name for p in model_chunks(LFM)[1].parts] == ["mixer", "mlp"]
    w, one = work(LFM, 1, "mixer"), 4096 * LFM.hidden * 2
    found = [(k.label, k.bytes // one) for k in (*w.forward, *w.input_grad) if k.label.startswith("conv")]
    gate = "conv_gate"
    assert found == [(gate, 3), ("conv", 2), (gate, 3), (gate, 5), ("conv", 3), (gate, 5)]
    assert flops(w.forward) == 2 * 4096 * 4 * LFM.hidden**2 == w.model_flops
    assert sum(b.bytes for b in w.saved) // one == 1 + 3 + 1 + 1 + 1, "normed, projected, gated, convolved, context"
    sent = [c.message for c in work(LFM, 1, "mixer", PartLayout(cp=4)).inline]
    assert [(str(x.kind), x.bytes) for x in sent] == [("all_to_all", one // 4)] * 4


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "sliding_attention"])
def test_a_short_convolution_has_its_own_name_in_layer_types(kind: str) -> None:
    e = refusal(config_from, {**small("lfm2"), "layer_types": [kind] * 4}, "x")
    assert e.key == "layer_types" and "conv" in str(e.allowed)
    e = refusal(config_from, {**small("qwen3_next"), "layer_types": ["conv"] * 4}, "x")
    assert e.key == "layer_types" and "conv" not in str(e.allowed)
    e = refusal(config_from, {**small("lfm2_moe"), "layer_types": None}, "x")
    assert e.key == "layer_types"


def test_features_that_devices_do_not_share_evenly_are_refused() -> None:
    e = refusal(
        check_setting, config_from({**small("lfm2"), "vocab_size": 48}, "x"), PartLayout(tp=3), MicrobatchShape()
    )
    assert e.key == "parallel.tp"
    alone = {**small("lfm2"), "layer_types": ["conv"] * 4, "vocab_size": 48, "block_multiple_of": 48}
    e = refusal(check_setting, config_from(alone, "x"), PartLayout(tp=3), MicrobatchShape())
    assert e.key == "parallel.tp" and "convolved features = 64" in e.message


@pytest.mark.parametrize(
    "inline",
    [
        {"layer_types": None, "num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {"layer_types": None, "num_hidden_layers": 5, "attention_bias": True},
        {f"linear_{x}": None for x in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")},
        {"linear_num_key_heads": None, "linear_key_head_dim": 10, "linear_conv_kernel_dim": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ],
)
def test_olmos_recurrence_is_transformers_own(inline: dict[str, Any]) -> None:
    same({**small("olmo_hybrid"), **inline})


def test_norms_stand_where_their_kind_of_layer_has_them() -> None:
    """Before the recurrence and its MLP, behind attention and its own: there linears read the stream."""
    for at, ends in ((1, ("input_layernorm", "post_attention_layernorm")), (4, ("attn_out_norm", "mlp_out_norm"))):
        parts = model_chunks(OLMO)[at].parts
        assert [p.name for p in parts] == ["attn" if at == 4 else "mixer", "mlp"]
        for part, end in zip(parts, ends, strict=True):
            assert [q.name for q in part.params if q.name.split(".")[3] == end], (at, end)
            assert [str(x.until) for x in part.keeps] == (["W"] if at == 4 else ["I"])
            norms = [x for x in labels(work(OLMO, at, part.name)) if x in NORMS]
            assert norms == [x for x in NORMS if ("behind" in x) is (at == 4) and (part.name == "mlp") is ("post" in x)]


def test_a_base_of_null_is_no_rotary_embedding() -> None:
    raw = FAMILIES["olmo_hybrid"]["config"]
    for none in ({"rope_parameters": {"rope_theta": None}}, {"rope_parameters": None, "rope_theta": None}):
        config = config_from({**raw, **none}, "x")
        assert not config.rope and "rope" not in labels(work(config, 4, "attn"))
    assert OLMO.rope and "rope" in labels(work(OLMO, 4, "attn"))


@pytest.mark.parametrize(
    ("inline", "key"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": None, "num_hidden_layers": 1}, "layer_types"),
        ({"linear_num_key_heads": 6}, "linear_num_key_heads"),
        (
            {"linear_num_key_heads": 64, "linear_num_value_heads": 64, "linear_key_head_dim": None},
            "linear_num_key_heads",
        ),
    ],
)
def test_what_olmos_class_does_not_build_is_refused(inline: dict[str, Any], key: str) -> None:
    e = refusal(config_from, {**small("olmo_hybrid"), **inline}, "x")
    assert e.key == key and e.allowed


def test_prediction_modules_behind_layers_with_windows_are_the_models_own() -> None:
    """Their numbers count on from the layers, of which lists of windows say nothing."""
    sizes = {"num_nextn_predict_layers": 1, "mlp_layer_types": None, "layer_types": None}
    config = replace(config_from({**small("glm4_moe_lite"), **sizes}, "x"), windows=(5, 0, 5, 0))
    assert config.at(4) is config and model_chunks(config)[-2].name == "mtp0"
