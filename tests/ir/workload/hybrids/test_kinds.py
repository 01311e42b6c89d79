"""Attention that differs by kind of layer: MiMo-V2's, whose layers with windows have KV heads and sinks of their own,
and whose values are narrower than keys; LFM3's, beside convolutions.
"""

from typing import Any

import pytest

from ir.workload import config_from, model_chunks
from ir.workload.part import PartLayout
from ir.workload.setting import MicrobatchShape, check_setting
from tests.ir.workload.hybrids.test_halves import cut, same
from tests.ir.workload.models import FAMILIES, small, work
from tests.refusals import refusal

RAW = FAMILIES["mimo_v2_flash"]["config"]
MIMO = config_from(RAW, "x")
TABLES = RAW["rope_parameters"]


@pytest.mark.parametrize(
    "inline",
    [
        {"layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 7, "v_head_dim": 6},
        {"layer_types": ["full_attention"] * 4, "num_key_value_heads": 8, "v_head_dim": 20},
        {"layer_types": ["sliding_attention"] * 4, "num_key_value_heads": 1, "attention_bias": True},
        {"mlp_layer_types": ["dense"] * 4, "tie_word_embeddings": True, "sliding_window": 99},
    ],
)
def test_heads_by_kind_of_layer_are_transformers_own(inline: dict[str, Any]) -> None:
    same({**small("mimo_v2_flash"), **inline})


def test_layers_with_windows_have_their_own_kv_heads_and_sinks() -> None:
    """Keys of 192 features and values of 128, of 4 heads where all is seen, of 8 and within 129 tokens elsewhere."""
    assert [(MIMO.at(i).window, MIMO.at(i).kv_heads) for i in (0, 1, 4, 5)] == [(0, 4), (129, 8), (129, 8), (0, 4)]
    shapes = [{q.name.split(".", 3)[3]: q.shape for q in model_chunks(MIMO)[1 + i].parts[0].params} for i in (0, 1)]
    assert [x["self_attn.k_proj.weight"] for x in shapes] == [(4 * 192, 4096), (8 * 192, 4096)]
    assert [x["self_attn.v_proj.weight"] for x in shapes] == [(4 * 128, 4096), (8 * 128, 4096)]
    assert all(x["self_attn.o_proj.weight"] == (4096, 64 * 128) for x in shapes)
    assert [x.get("self_attn.sinks") for x in shapes] == [None, (64,)]
    full, near = (next(k for k in work(MIMO, at, "attn").forward if k.label == "attention").shape for at in (1, 2))
    assert full == near == (1, 64, 4096, 4096, 192, 128)
    kept = [{b.name: b.bytes for b in work(MIMO, at, "attn").saved} for at in (1, 2)]
    assert [x["v"] for x in kept] == [2 * 4096 * n * 128 for n in (4, 8)]
    for at in (1, 2):
        cut(MIMO, "attn", at)


def test_models_of_one_kind_of_layer_have_one_number_of_kv_heads() -> None:
    for kind, heads in (("full_attention", 4), ("sliding_attention", 8)):
        config = config_from({**RAW, "layer_types": [kind] * 48}, "x")
        assert (config.kv_heads, config.window_kv_heads, len(config.windows)) == (heads, 0, 0)
    check_setting(config, PartLayout(tp=8, sequence_parallel=True), MicrobatchShape())
    check_setting(MIMO, PartLayout(tp=8, sequence_parallel=True), MicrobatchShape())  # one head to two ranks, or one


def test_its_authors_keys_say_the_same_or_are_refused() -> None:
    pattern, sparse = [int(k != "full_attention") for k in RAW["layer_types"]], [0] + [1] * 47
    own = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
    own |= {"hybrid_layer_pattern": pattern, "moe_layer_freq": sparse, "sliding_window_size": 128}
    own |= {"add_swa_attention_sink_bias": True, "swa_rope_theta": 10000, "rope_theta": 5000000}
    plain = {k: x for k, x in RAW.items() if k not in ("layer_types", "mlp_layer_types", "rope_parameters")}
    assert config_from({**plain, "sliding_window": 5, **own}, "x") == MIMO
    others: dict[str, object] = {"swa_num_key_value_heads": 4, "swa_head_dim": 128, "hybrid_layer_pattern": [1] * 48}
    for key, value in (others | {"moe_layer_freq": [1] * 48, "rope_theta": 1e4, "n_shared_experts": 1}).items():
        assert refusal(config_from, {**RAW, key: value}, "x").key == key
    assert refusal(config_from, {**RAW, "num_key_value_heads": 64}, "x").key == "num_key_value_heads"


def test_layers_with_windows_turn_as_many_features_as_others() -> None:
    near = {**TABLES["sliding_attention"], "partial_rotary_factor": 0.5}
    e = refusal(config_from, {**RAW, "rope_parameters": {**TABLES, "sliding_attention": near}}, "x")
    assert e.key == "rope_parameters.sliding_attention.partial_rotary_factor" and e.allowed == "0.334"


LFM3 = config_from(FAMILIES["lfm3"]["config"], "x")


@pytest.mark.parametrize(
    "inline",
    [
        {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True},
        {"layer_types": None, "num_hidden_layers": 7, "tie_word_embeddings": False},
        {"layer_types": ["conv"] * 4, "conv_bias": True},
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 99, "head_dim": 12},
    ],
)
def test_windows_beside_convolutions_are_transformers_own(inline: dict[str, Any]) -> None:
    same({**small("lfm3"), **inline})


def test_three_kinds_of_layers_have_norms_at_both_ends() -> None:
    found = [c.parts[0].name for c in model_chunks(LFM3)[1:9]]
    assert found == ["mixer", "mixer", "attn", "mixer", "attn", "mixer", "attn", "mixer"]
    assert [LFM3.at(i).window for i in (2, 4, 6, 8)] == [0, 256, 0, 256]
    left_out = config_from({k: v for k, v in FAMILIES["lfm3"]["config"].items() if k != "layer_types"}, "x")
    assert left_out == LFM3
    for at, name in ((1, "mixer"), (3, "attn")):
        norms = [k.label for k in work(LFM3, at, name).forward if k.label.startswith("input_norm")]
        assert norms == ["input_norm", "input_norm_behind"]


def test_each_head_is_weighed_by_a_number_of_its_own() -> None:
    plain = config_from({**FAMILIES["lfm3"]["config"], "use_attention_gate": False}, "x")
    gated, bare = (next(k for k in work(c, 3, "attn").forward if k.label == "qkv_proj") for c in (LFM3, plain))
    assert gated.shape[1] - bare.shape[1] == 16 == model_chunks(LFM3)[3].parts[0].params[2].shape[0]
    assert "attention_gate" in [k.label for k in work(LFM3, 3, "attn").forward]
    cut(LFM3, "attn", 3)


def test_a_window_that_layers_have_is_said() -> None:
    e = refusal(config_from, {**FAMILIES["lfm3"]["config"], "sliding_window": None}, "x")
    assert e.key == "sliding_window"
    none = {"sliding_window": None, "layer_types": ["conv", "full_attention"] * 12}
    assert config_from({**FAMILIES["lfm3"]["config"], **none}, "x").windows == ()
